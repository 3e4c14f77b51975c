"""Compressed attention in the GPU kernel, on emulated GPUs: logits against float64, texts in calls and passes of any
size, and states of other sessions, also of the CPU.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.custom_calls import ENDS
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, Machine
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import ENTRIES, Blocks, CompressedAttend, Product, ProductName
from tests.support import emulated, gpu_cases, small
from tests.support.decode_cases import COMPRESSED
from tests.support.gpu_cases import (
    AMD,
    check,
    check_devices,
    check_drafts,
    check_texts_of_the_cpu,
    compressed,
    fail_often,
    jitted,
    some,
)
from tests.support.plan_interpreter import interpret

pytestmark = [small.needs_library, emulated.needs_gpu]

ROOM = 96
MANY_CTAS = Machine(warp_size=32, ctas=14, warps=2, shared_bytes=300_000, bulk_copies=True)


def config_of(sizes: dict | None = None, **changes):
    return small.make_config(**compressed(sizes, **changes))


CONFIG = config_of(layout="dtp(1)")  # lanes have different streams, and so different caches
WEIGHTS = small.make_weights(CONFIG)
CASES = {  # the config, the machine, and the dtype of products and caches
    "two lanes": (CONFIG, emulated.SMALL, "float32"),
    "many heads": (small.make_config(**COMPRESSED["compressed attention of many heads"]), emulated.SMALL, "float32"),
    "groups of heads, several splits": (
        config_of(
            {"ratios": (2, 8, 0), "overlap_ratio": 2, "window": 20, "index_head_dim": 16, "index_topk": 17},
            **{"lanes": 1, "heads": 8, "head_dim": 64, "hidden_size": 40},
        ),
        MANY_CTAS,
        "float32",
    ),
    "four lanes": (config_of(lanes=4, heads=3, head_dim=10, layout="ladder"), emulated.SMALL, "float32"),
    "several streams, roots and a table": (
        small.make_config(**COMPRESSED["compressed attention, several streams"]),
        emulated.SMALL,
        "float32",
    ),
    "bfloat16": (config_of({"index_topk": 3}, head_dim=8), emulated.SMALL, "bfloat16"),
    "warps of 64": (config_of({"ratios": (4, 16, 4)}, head_dim=80), AMD, "float32"),
    "one CTA": (CONFIG, dataclasses.replace(emulated.SMALL, ctas=1), "float32"),
}


@pytest.mark.parametrize("name", some(CASES, {"two lanes"}, {"groups of heads, several splits"}))
def test_logits_match_the_interpreter(name):
    """The text is longer than every window, and the index leaves out most entries. Greedy tokens match too."""
    config, machine, dtype = CASES[name]
    plan = make_plan(decoder_ops(config), config.schedule, weight_dtype=dtype, cache_dtype=dtype)
    weights, ids = small.make_weights(config, dtype), small.prompt_of(config, 75)
    session = emulated.open_session(plan, weights, machine=machine)
    outputs, _ = jitted(session, room=ROOM, logits=True)(
        small.make_inputs(ids, 20, room=ROOM), small.make_state(config, 100, dtype)
    )
    assert session.failure is None
    expected = interpret(plan, weights, [*ids, *outputs.tokens[:19].tolist()])[74:]
    tolerance = 1e-4 if dtype == "float32" else 2e-2  # vectors may be rounded in different directions
    assert np.abs(outputs.logits[:20] - expected).max() < tolerance * np.abs(expected).max() > 1e-4
    if dtype == "float32":
        assert outputs.tokens[:20].tolist() == np.argmax(expected, -1).tolist()


@pytest.mark.slow
def test_equal_scores_choose_the_lowest_numbers():
    """In one layer the weights of the index are 0, so all scores are 0. There are more entries than a CTA keeps scores
    for.
    """
    config = small.make_config(**COMPRESSED["compressed attention of many heads"])
    plan = make_plan(decoder_ops(config), config.schedule)
    weights = small.make_weights(config)
    weights["layers.0.attention.indexer.weights"][:] = 0
    ids = small.prompt_of(config, 90)
    session = emulated.open_session(plan, weights)
    outputs, _ = jitted(session, room=ROOM, logits=True)(
        small.make_inputs(ids, 2, room=ROOM), small.make_state(config, 100)
    )
    expected = interpret(plan, weights, [*ids, int(outputs.tokens[0])])[89:]
    assert np.abs(outputs.logits[:2] - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
def test_61_layers_match_the_interpreter():
    """DeepSeek-V4-Pro has 61 layers, which keep 306 arrays."""
    config = config_of({"ratios": ((4, 3) * 31)[:61]}, lanes=1, num_hidden_layers=61)
    plan = make_plan(decoder_ops(config), config.schedule)
    assert sum(map(len, plan.kept)) == 306
    check(plan, small.make_weights(config), ids=range(1, 6))


@pytest.fixture(scope="module")
def session():
    return emulated.make_session(CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=ROOM, logits=True)


answer = partial(gpu_cases.answer, CONFIG, ROOM)


@pytest.mark.parametrize(
    "sizes",
    [[15, 2, 24], *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ([1] * 4 + [37], [16, 16, 9], [32, 1, 8]))],
    ids=str,
)
def test_any_split_of_a_prompt_has_the_same_bits(call, sizes):
    ids = small.prompt_of(CONFIG, 41)
    assert small.same(answer(call, ids, sizes)[0], answer(call, ids, [41])[0])


def test_new_text_ignores_the_old_state(call):
    ids = small.prompt_of(CONFIG, 19)
    expected, _ = answer(call, ids, [19])
    _, state = answer(call, small.prompt_of(CONFIG, 40), [40], 9)
    layers = [
        {name: x if name == "base" else jnp.full_like(x, jnp.nan) for name, x in layer.items()}
        for layer in state.layers
    ]
    state = state._replace(layers=layers)
    assert small.same(answer(call, ids, [19], state=state)[0], expected)


def test_state_of_another_position_is_refused(session, call):
    _, state = answer(call, small.prompt_of(CONFIG, 50), [50], 1)
    for start in (20, 49 + 2 * ENTRIES):
        outputs, state = call(small.make_inputs([1], 1, start=start, room=ROOM), state)
        assert outputs.status.tolist()[:2] == [0, len(ENDS)]
        assert "recurrent state belongs to another position" in session.failure
        session.begin()


def test_one_launch_per_op_has_the_same_bits(call):
    ids = small.prompt_of(CONFIG, 18)
    stepwise = jitted(emulated.make_session(CONFIG, WEIGHTS, launch="graph"), room=ROOM, logits=True)
    assert small.same(answer(stepwise, ids, [11, 7], 20), answer(call, ids, [11, 7], 20))


@pytest.mark.slow
@emulated.only_emulated
def test_several_devices_and_delays_change_no_bit(call):
    check_devices(CONFIG, WEIGHTS, ROOM, call)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_timeout_ends_the_call_before_a_wrong_token(monkeypatch):
    fail_often(emulated.make_session(CONFIG, WEIGHTS, timeout_ms=50), CONFIG, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [14, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 31))])
def test_drafts_change_no_bit_of_answer_or_state(call, prompt):
    """Passes cross the ends of entries, under random delays."""
    check_drafts(CONFIG, ROOM, call, emulated.make_session(CONFIG, WEIGHTS, rows=4, chaos_us=20), prompt)


@pytest.mark.slow
@emulated.only_emulated
def test_text_of_the_cpu_can_be_continued(call):
    check_texts_of_the_cpu(CONFIG, WEIGHTS, ROOM, call)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (ProductName.GROUPS, {"blocks": None}, "product GROUPS does not read groups of whole heads"),
        (ProductName.GROUPS, {"blocks": Blocks(2, 24)}, "product GROUPS does not read groups of whole heads"),
        (CompressedAttend, {"index": None}, "its ops are STREAM -> PROJECTED .*HIDDEN -> INDEX"),
    ],
)
def test_unsupported_ops_are_refused(kind, changes, message):
    plan = make_plan(decoder_ops(CONFIG), CONFIG.schedule)
    ops = plan.ops.layers[0].ops
    number = next(
        n for n, op in enumerate(ops) if (op.name if isinstance(op, Product) else type(op)) in (kind, type(kind))
    )
    with pytest.raises(ValueError, match=f"cannot run layer 0: {message}.*; use backend xla"):
        Layout(small.with_op(plan, 0, number, **changes), H200, 2)
