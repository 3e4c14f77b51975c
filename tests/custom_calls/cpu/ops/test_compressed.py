"""Compressed attention and several residual streams in a session: logits against float64, prompts split in any way, and
invalid plans.
"""

import functools

import jax
import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.config import CompressedAttention
from laneformer.custom_calls import NativeError, build
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import Value, Weight
from tests.support import small
from tests.support.decode_cases import COMPRESSED, COMPRESSED_SIZES

pytestmark = small.needs_library

CONFIG = small.make_config(**COMPRESSED["compressed attention, several streams"])
WEIGHTS = small.make_weights(CONFIG)
IDS = small.prompt_of(CONFIG, 131)


def absorbed(session, sizes, compute="float32"):
    """Runs the prompt in calls of these sizes. Returns the logits of the last three draws, and their tokens."""
    call, state, start = small.jitted(session, room=140, logits=True), small.make_state(CONFIG, 160, compute), 0
    for n, size in enumerate(sizes):
        limit = 3 if n == len(sizes) - 1 else 1
        outputs, state = call(small.make_inputs(IDS[start : start + size], limit, start=start, room=140), state)
        start += size
    return np.asarray(outputs.logits[:3]), np.asarray(outputs.tokens[:3])


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_any_split_of_a_prompt_has_the_same_bits(compute):
    """With any number of threads. In float32, the logits also match float64."""
    weights = small.make_weights(CONFIG, compute)
    session = small.make_session(CONFIG, weights, compute=compute, threads=2)
    whole = absorbed(session, [131], compute)
    for sizes in ([1] * 30 + [101], [48, 48, 35], [3, 4, 47, 2, 75], [130, 1]):
        assert small.same(absorbed(session, sizes, compute), whole), sizes
    for ways in ({"threads": 1}, {"threads": 7, "chaos_us": 20}, {"one_thread_per_lane": True}):
        other = small.make_session(CONFIG, weights, compute=compute, **ways)
        assert small.same(absorbed(other, [59, 72], compute), whole), ways
    if compute == "float32":
        expected = small.interpreted_logits(CONFIG, weights, [*IDS, *whole[1][:2].tolist()])[130:]
        assert np.abs(whole[0] - expected).max() < 1e-4 * np.abs(expected).max() > 1e-4


@functools.cache
def exact_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """The interpreter's logits of the tokens after IDS, the same for all instruction sets."""
    return small.interpreted_logits(CONFIG, WEIGHTS, [*IDS, *tokens])[len(IDS) - 1 :]


@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_instruction_sets_match_the_interpreter(instructions):
    if instructions not in custom_calls.instruction_sets():
        pytest.skip(f"this machine does not run {instructions}")
    session = small.make_session(CONFIG, WEIGHTS, threads=2, instructions=instructions)
    logits, tokens = absorbed(session, [90, 41])
    expected = exact_logits(tuple(tokens[:2].tolist()))
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_nan_entries_are_chosen_first():
    """A NaN then reaches the result. Only entries contain the first token, whose streams overflow."""
    sizes = CompressedAttention(**COMPRESSED_SIZES | {"ratios": (4,)})
    config = CONFIG.replace(num_hidden_layers=1, compressed_attention=sizes)
    weights, ids = small.make_weights(config), [3, *range(4, 32)]
    weights["tok_embeddings"][3] = 3e38
    call = small.jitted(small.make_session(config, weights, threads=2), room=40, logits=True)
    outputs, _ = call(small.make_inputs(ids, 1, room=40), small.make_state(config, 40))
    assert np.isnan(outputs.logits[0]).all()


def test_state_of_another_position_is_refused():
    session, state = small.make_session(CONFIG, WEIGHTS, threads=2), small.make_state(CONFIG, 160)
    call = small.jitted(session, room=140, logits=True)
    _, state = call(small.make_inputs(IDS[:100], 1, room=140), state)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="recurrent state of layer 0 is not the state before position 60"
    ):
        jax.block_until_ready(call(small.make_inputs([1], 1, start=60, room=140), state))


# Ops of the first layer: mixture, four products, CompressedKeep, attention, two products; then mixture, router.
@pytest.mark.parametrize(("number", "fields", "message"), [
    (0, {"count": 2}, "a mixture is of another number of streams"),
    (0, {"offsets": Weight("offsets", (14,), False)}, "offsets has another size"),
    (3, {"writes": Value.STREAMS}, "a product writes what it must not"),
    (5, {"channels": 5}, "a norm has another size"),
    (5, {"entries": None, "keys": None}, "compressed attention has other entries than are kept"),
    (5, {"keys": None}, "an index has no keys"),
    (6, {"ratio": 3}, "compressed attention has other entries than are kept"),
    (6, {"heads": 3}, "compressed attention reads another number of queries"),
    (6, {"head_dim": 3}, "heads have other channels than what is kept"),
    (10, {"by_token": Weight("table", (40, 1), False, small=True)}, "a table of experts has another size"),
])  # fmt: skip
def test_invalid_plans_are_refused(number, fields, message):
    plan = small.with_op(make_plan(decoder_ops(CONFIG), CONFIG.schedule), 0, number, **fields)
    with pytest.raises(NativeError, match=f"damaged plan: {message}"):
        custom_calls.Session(plan, instructions="none")


def test_modules_without_a_mixture_are_refused():
    plan = make_plan(decoder_ops(CONFIG), CONFIG.schedule)
    first = plan.ops.layers[0]
    plan = small.with_ops(plan, 0, first.attention.ops[1:], first.feed_forward.ops)
    with pytest.raises(NativeError, match="damaged plan: modules begin with a mixture of streams if the head does"):
        custom_calls.Session(plan, instructions="none")
