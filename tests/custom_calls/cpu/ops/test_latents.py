"""Latent attention in a session: every format of weights, and prompts of several chunks of latents split in any way.
Any number of threads gives the same bits.
"""

import functools
from collections.abc import Iterable
from dataclasses import replace

import jax
import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.config import LatentAttention
from laneformer.custom_calls import NativeError, Session, build
from laneformer.ops import LatentKeep
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import USUAL, round_to
from tests.support import small
from tests.support.plan_interpreter import interpret

pytestmark = small.needs_library

SIZES = LatentAttention(q_lora_rank=40, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=6, v_head_dim=24)
CONFIG = small.make_config(
    lanes=2, heads=3, kv_heads=3, hidden_size=64, head_dim=None, latent_attention=SIZES, layout="tp"
)
MANY = small.make_config(
    lanes=1,
    heads=35,
    kv_heads=35,
    num_hidden_layers=2,
    head_dim=None,
    latent_attention=LatentAttention(kv_lora_rank=21, qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=3),
    layout="tp",
)
"""A model with heads for several vectors and for more than one worker."""
WAYS = ({"threads": 2}, {"threads": 3}, {"one_thread_per_lane": True})


def logits_of(session: Session, config, ids: list[int], ends: Iterable[int] = (), drawn: int = 2) -> list[np.ndarray]:
    """Runs the prompt in calls that end at these positions. Returns the logits of the drawn tokens, and the latents."""
    run, first = small.jitted(session, room=400, top=0, logits=True), 0
    state = small.make_state(config, 400, session.plan.cache_dtype.name)
    for end in (*ends, len(ids)):
        limit = drawn if end == len(ids) else 1
        inputs = small.make_inputs(ids[first:end], limit, start=first, room=400)
        outputs, state = run(inputs, state._replace(seen=np.zeros(config.vocab_size, np.uint8)))
        first = end
    return [np.asarray(outputs.logits[:drawn]), *map(np.asarray, jax.tree.leaves(state.layers))]


def session_of(config, parts: dict, stored: str = "float32", **options) -> Session:
    session = small.open_session(config, stored, **options)
    for path, weight in parts.items():
        session.pack(path, weight)
    return session


def parts_of(config, weights: dict) -> dict:
    plan = small.open_session(config, "float32", threads=1).plan
    return {own: part for path, weight in weights.items() for own, part in plan.parts(path, weight).items()}


@pytest.mark.parametrize("kind", USUAL)
def test_quantized_latents_match_the_dequantized_weights(kind):
    weights, ids = small.make_weights(CONFIG), small.prompt_of(CONFIG, 9)
    plan = small.open_session(CONFIG, "float32", threads=1).plan
    assert sum(path.endswith((".wk", ".wv")) for path in plan.matrices) == 2 * CONFIG.num_hidden_layers
    parts = {
        path: round_to(weight, kind) if path in plan.matrices else weight
        for path, weight in parts_of(CONFIG, weights).items()
    }
    exact = {path: w.dequantize(np.float32) if isinstance(w, Quantized) else w for path, w in parts.items()}
    session = session_of(CONFIG, parts, threads=1)
    found = logits_of(session, CONFIG, ids)
    expected = interpret(plan, exact, [*ids, int(found[0][0].argmax())])[len(ids) - 1 :]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    assert session.read_pass() > 0 and session.quantized_weights["quantized_weights"] > 0
    for ways in WAYS:
        assert small.same(logits_of(session_of(CONFIG, parts, **ways), CONFIG, ids), found), ways


def test_blocks_of_fp8_are_cut_by_head():
    """Heads of 56 rows cross blocks of 128 rows. The groups of one cut matrix have a size that the kernel refuses."""
    weights, ids = small.make_weights(CONFIG), small.prompt_of(CONFIG, 9)
    path, codes = "layers.1.attention.wkv_b", np.random.default_rng(0).integers(0, 0x70, (2, 3 * 56, 48), np.uint8)
    scales = np.float32([[[0.01], [0.02]], [[0.03], [0.04]]])
    record = Quantized("fp8", codes, scales, (128, 128), 48)
    session = small.open_session(CONFIG, "float32", threads=2)
    for own, weight in weights.items():
        if own != path:
            for part, array in session.plan.parts(own, weight).items():
                session.pack(part, array)
    cut = session.plan.parts(path, record)
    exact = session.plan.parts(path, record.dequantize(np.float32))
    for own, part in cut.items():
        np.testing.assert_array_equal(part.dequantize(np.float32), exact[own])
    session.pack(f"{path[:-5]}wv", cut[f"{path[:-5]}wv"])
    with pytest.raises(NativeError, match=r"groups of 8 columns.*add --weights bfloat16"):
        session.pack(f"{path[:-5]}wk", cut[f"{path[:-5]}wk"])
    session.pack(f"{path[:-5]}wk", exact[f"{path[:-5]}wk"])
    found = logits_of(session, CONFIG, ids)
    whole = weights | {path: record.dequantize(np.float32)}
    expected = small.interpreted_logits(CONFIG, whole, [*ids, int(found[0][0].argmax())])[len(ids) - 1 :]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()


def test_latents_in_twelve_bits_have_the_same_results():
    weights, ids = parts_of(CONFIG, small.make_weights(CONFIG, "bfloat16")), small.prompt_of(CONFIG, 50)
    expected = logits_of(session_of(CONFIG, weights, "bfloat16", threads=1), CONFIG, ids)
    for ways in ({"threads": 1}, *WAYS):
        session = session_of(CONFIG, weights, "bfloat16", bf12=True, **ways)
        assert small.same(logits_of(session, CONFIG, ids), expected), ways
        assert session.bf12_weights.left == 0


SPLITS = {
    "calls of 7": range(7, 300, 7),
    "calls of 47": range(47, 300, 47),
    "one token in the last call": [299],
    "single tokens at both ends and across the edge of the chunk": [*range(1, 10), *range(250, 263), *range(291, 300)],
}


@functools.cache
def exact_logits(ids: tuple[int, ...]) -> np.ndarray:
    """The interpreter's logits of MANY, the same for all instruction sets."""
    return small.interpreted_logits(MANY, small.make_weights(MANY, "bfloat16"), list(ids))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_any_split_of_a_prompt_has_the_same_bits(instructions, compute):
    """The prompt has two chunks of latents, and workers share heads."""
    if instructions not in custom_calls.instruction_sets():
        pytest.skip(f"this machine does not run {instructions}")
    weights, ids, options = small.make_weights(MANY, "bfloat16"), small.prompt_of(MANY, 300), {"compute": compute}
    sessions = {
        threads: small.make_session(MANY, weights, threads=threads, instructions=instructions, **options)
        for threads in (1, 3)
    }
    expected = logits_of(sessions[1], MANY, ids)
    if compute == "float32":
        exact = exact_logits((*ids, int(expected[0][0].argmax())))[len(ids) - 1 :]
        assert np.abs(expected[0] - exact).max() < 1e-4 * np.abs(exact).max()
    for name, ends in SPLITS.items():
        assert small.same(logits_of(sessions[3], MANY, ids, ends), expected), name


def test_a_norm_of_another_size_than_the_latent_is_refused():
    plan = small.open_session(CONFIG, "float32", threads=1).plan
    [(number, keep)] = [(n, op) for n, op in enumerate(plan.ops.layers[0].ops) if isinstance(op, LatentKeep)]
    norm = replace(keep.norm, gain=replace(keep.norm.gain, path="other", shape=(keep.rank - 1,)))
    with pytest.raises(NativeError, match="damaged plan: a norm has another size than its vector"):
        Session(small.with_op(plan, 0, number, norm=norm), instructions="none")
