"""Gated DeltaNet in the GPU kernel, on emulated GPUs: logits against the recurrence in float64, texts in calls and
passes of any size, states of other sessions, also of the CPU, and calls that end early.
"""

import dataclasses
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.custom_calls import ENDS, State
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, Machine
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import ENTRIES, Attend
from tests.support import emulated, gpu_cases, small
from tests.support.decode_cases import DELTA_NET
from tests.support.gpu_cases import AMD, check_devices, check_drafts, check_texts_of_the_cpu, fail_often, jitted, some
from tests.support.plan_interpreter import interpret

pytestmark = [small.needs_library, emulated.needs_gpu]

ROOM = 64
CONFIG = small.make_config(**DELTA_NET["delta net"])
WEIGHTS = small.make_weights(CONFIG)
GATED = {"lanes": 1, "attention_gate": True, "qk_norm": True, "head_dim": 8, "rotary_dim": 4, "delta_layers": (0, 1)}
SIZES = {"key_heads": 4, "value_heads": 8, "key_dim": 8, "value_dim": 16, "conv_kernel": 4}
CASES = {  # changes of the config, the machine, and the dtype of products and caches
    "two lanes": (DELTA_NET["delta net"], emulated.SMALL, "float32"),
    "odd sizes": (DELTA_NET["delta net of odd sizes"], emulated.SMALL, "float32"),
    "beside gated attention": (GATED | {"delta_net": SIZES | {"conv_kernel": 2}}, emulated.SMALL, "float32"),
    "four lanes, bfloat16": ({"lanes": 4, "delta_layers": (1,), "delta_net": SIZES}, emulated.SMALL, "bfloat16"),
    "warps of 64": ({"lanes": 2, "delta_layers": (0, 2), "delta_net": SIZES | {"value_dim": 40}}, AMD, "float32"),
    "eight warps": (
        GATED | {"delta_net": SIZES | {"key_dim": 80}},
        Machine(warp_size=32, ctas=6, warps=8, shared_bytes=300_000, bulk_copies=True),
        "float16",
    ),
    "one CTA": (GATED | {"delta_net": SIZES}, dataclasses.replace(emulated.SMALL, ctas=1), "float32"),
}


@pytest.mark.parametrize("name", some(CASES, {"odd sizes", "four lanes, bfloat16"}))
def test_logits_match_the_recurrence(name):
    """The text spans several states of 16 positions, with the cache's rounding. Greedy tokens match too."""
    changes, machine, dtype = CASES[name]
    config = small.make_config(**changes)
    plan = make_plan(decoder_ops(config), config.schedule, weight_dtype=dtype, cache_dtype=dtype)
    weights, ids = small.make_weights(config, dtype), small.prompt_of(config, 21)
    session = emulated.open_session(plan, weights, machine=machine)
    outputs, _ = jitted(session, room=ROOM, logits=True)(
        small.make_inputs(ids, 30, room=ROOM), small.make_state(config, 64, dtype)
    )
    assert session.failure is None
    expected = interpret(plan, weights, [*ids, *outputs.tokens[:29].tolist()])[20:]
    assert np.abs(outputs.logits[:30] - expected).max() < 1e-4 * np.abs(expected).max() > 1e-4
    assert outputs.tokens[:30].tolist() == np.argmax(expected, -1).tolist()


@pytest.fixture(scope="module")
def session():
    return emulated.make_session(CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=ROOM, logits=True)


answer = partial(gpu_cases.answer, CONFIG, ROOM)


def copied(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


@pytest.mark.parametrize(
    "sizes",
    [
        [15, 2, 24],
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ([1] * 4 + [37], [16, 16, 9], [31, 10], [32, 1, 8])),
    ],
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
        {name: jnp.full_like(x, jnp.nan) if name == "entries" else x for name, x in layer.items()}
        for layer in state.layers
    ]
    state = state._replace(layers=layers)
    assert small.same(answer(call, ids, [19], state=state)[0], expected)


def test_state_of_another_position_is_refused(session, call):
    _, state = answer(call, small.prompt_of(CONFIG, 50), [50])
    for start in (20, 48 + 2 * ENTRIES):
        outputs, after = call(small.make_inputs([1], 1, start=start, room=ROOM), copied(state))
        assert outputs.status.tolist()[:2] == [0, len(ENDS)]
        assert "recurrent state belongs to another position" in session.failure
        session.begin()
        assert small.same(after, state)
    assert small.same(
        answer(call, [1], [1], state=copied(state), start=50), answer(call, [1], [1], state=state, start=50)
    )


def test_cancelled_text_can_be_continued(session, call):
    ids = small.prompt_of(CONFIG, 13)
    (logits, tokens), _ = answer(call, ids, [13], 40)
    for wanted in (1, 4, 20):
        session.begin()
        ending = threading.Thread(target=lambda wanted=wanted: [session.wait(wanted - 1, 60_000), session.cancel()])
        ending.start()
        outputs, state = call(small.make_inputs(ids, 40, room=ROOM), small.make_state(CONFIG, 128))
        ending.join()
        count, end, position = outputs.status.tolist()
        assert wanted <= count and end == ENDS.index("cancelled" if count < 40 else "length")
        if count == 40:
            continue
        rest, _ = answer(call, tokens[count - 1 : count].tolist(), [1], 2, state=state, start=position - 1)
        assert small.same(rest, (logits[count : count + 2], tokens[count : count + 2]))
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


@pytest.fixture(scope="module")
def several():
    return emulated.make_session(CONFIG, WEIGHTS, rows=4)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [14, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 31))])
def test_drafts_change_no_bit_of_answer_or_state(call, several, prompt):
    """Passes cross multiples of 16 positions."""
    check_drafts(CONFIG, ROOM, call, several, prompt)


@pytest.mark.slow
@emulated.only_emulated
def test_text_of_the_cpu_can_be_continued(call):
    check_texts_of_the_cpu(CONFIG, WEIGHTS, ROOM, call)


def test_models_without_attention_are_refused():
    config = small.make_config(**DELTA_NET["delta net"])
    ops = decoder_ops(config)
    layers = tuple(layer for layer in ops.layers if not any(isinstance(op, Attend) for op in layer.ops))
    schedule = config.replace(num_hidden_layers=2, delta_layers=(0,)).schedule
    plan = make_plan(dataclasses.replace(ops, layers=layers), schedule)
    with pytest.raises(ValueError, match="attention in at least one layer; use backend xla"):
        Layout(plan, H200, 2)


def test_wrong_number_of_channels_is_refused():
    plan = small.with_op(make_plan(decoder_ops(CONFIG), CONFIG.schedule), 0, 1, key_dim=4)
    with pytest.raises(ValueError, match="cannot run layer 0: 4 value and 2 key heads do not fit 168 channels"):
        Layout(plan, H200, 2)
