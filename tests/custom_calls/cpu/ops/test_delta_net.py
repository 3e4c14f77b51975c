"""Gated DeltaNet in a session: logits against the recurrence in float64, prompts split in any way, and states."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from laneformer import custom_calls
from laneformer.custom_calls.plan import make_plan
from laneformer.custom_calls.request import Source
from laneformer.decoder import decoder_ops
from tests.support import small
from tests.support.decode_cases import DELTA_NET
from tests.support.gpu_cases import state_of, weights_of
from tests.support.plan_interpreter import interpret

pytestmark = small.needs_library

CONFIG = small.make_config(**DELTA_NET["delta net"])
WEIGHTS = small.make_weights(CONFIG)
WAYS = ({"threads": 2}, {"threads": 3}, {"threads": 7}, {"one_thread_per_lane": True})


@pytest.fixture(scope="module")
def call():
    session = small.make_session(CONFIG, WEIGHTS, threads=2)
    return small.jitted(session, room=130, logits=True)


def absorbed(call, ids, sizes, drawn=3, dtype="float32"):
    """Runs the prompt in calls of these sizes. Returns the logits of the drawn tokens, and the tokens. dtype: of the
    cache.
    """
    state, start = small.make_state(CONFIG, 256, dtype), 0
    for n, size in enumerate(sizes):
        limit = drawn if n == len(sizes) - 1 else 1
        outputs, state = call(small.make_inputs(ids[start : start + size], limit, start=start, room=130), state)
        start += size
    return np.asarray(outputs.logits[:drawn]), np.asarray(outputs.tokens[:drawn])


def test_long_texts_match_the_recurrence(call):
    """The state is written several times, once for each 16 positions."""
    ids = small.prompt_of(CONFIG, 101)
    logits, tokens = absorbed(call, ids, [101], 30)
    expected = small.interpreted_logits(CONFIG, WEIGHTS, [*ids, *tokens[:-1].tolist()])[100:]
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max() > 1e-5


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_any_split_of_a_prompt_has_the_same_bits(call, ways):
    ids = small.prompt_of(CONFIG, 101)
    whole = absorbed(call, ids, [101])
    other = small.jitted(small.make_session(CONFIG, WEIGHTS, **ways), room=130, logits=True)
    for sizes in ([101], [1] * 20 + [81], [16, 16, 16, 53], [15, 2, 15, 48, 21], [97, 1, 1, 1, 1], [47, 54]):
        assert small.same(absorbed(other, ids, sizes), whole), sizes


def test_any_split_of_a_prompt_has_the_same_bits_in_a_narrow_cache():
    """A convolution reads all inputs as the cache stores them, also those that leave its ring in a long prompt."""
    session = small.make_session(CONFIG, small.make_weights(CONFIG, "bfloat16"), compute="bfloat16", threads=2)
    call, ids = small.jitted(session, room=130, logits=True), small.prompt_of(CONFIG, 101)
    whole = absorbed(call, ids, [101], dtype="bfloat16")
    for sizes in ([1] * 20 + [81], [47, 54]):
        assert small.same(absorbed(call, ids, sizes, dtype="bfloat16"), whole), sizes


def test_layers_of_different_sizes_match_the_recurrence():
    """A worker's buffers suffice for the largest layer, before and after a smaller one."""
    smaller = {"key_heads": 2, "value_heads": 2, "key_dim": 5, "value_dim": 19, "conv_kernel": 3}
    plan, other = (
        make_plan(decoder_ops(config), config.schedule)
        for config in (CONFIG, small.make_config(**DELTA_NET["delta net"] | {"delta_net": smaller}))
    )
    for smaller_layer in (0, 2):
        layers = [*plan.ops.layers]
        layers[smaller_layer] = other.ops.layers[smaller_layer]
        mixed = dataclasses.replace(plan, ops=dataclasses.replace(plan.ops, layers=tuple(layers)))
        weights, ids = weights_of(mixed), small.prompt_of(CONFIG, 40)
        session = custom_calls.Session(mixed, threads=3)
        for path, weight in weights.items():
            session.pack(path, weight)
        outputs, _ = small.jitted(session, room=3, logits=True)(small.make_inputs(ids, 3), state_of(mixed, 64))
        expected = interpret(mixed, weights, [*ids, *outputs.tokens[:2].tolist()])[len(ids) - 1 :]
        assert np.abs(expected - outputs.logits).max() < 1e-4 * np.abs(expected).max() > 1e-4


def test_state_of_another_position_is_refused(call):
    state = small.make_state(CONFIG, 256)
    _, state = call(small.make_inputs(small.prompt_of(CONFIG, 50), 1, room=130), state)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="recurrent state of layer 0 is not the state before position 20"
    ):
        jax.block_until_ready(call(small.make_inputs([1], 1, start=20, room=130), state))


def test_new_text_ignores_the_old_state(call):
    state, ids = small.make_state(CONFIG, 256), small.prompt_of(CONFIG, 40)
    expected = absorbed(call, ids, [40])
    _, state = call(small.make_inputs(small.prompt_of(CONFIG, 70), 20, room=130), state)
    outputs, _ = call(small.make_inputs(ids, 3, room=130), state)
    assert small.same((np.asarray(outputs.logits[:3]), np.asarray(outputs.tokens[:3])), expected)


def test_copying_from_a_running_text_is_refused():
    session = small.make_session(CONFIG, WEIGHTS, threads=1, slots=2)
    inputs = small.make_inputs([1] * 50, 2, slot=1, source=Source(0, 1, 40))
    with pytest.raises(JaxRuntimeError, match="cannot copy a recurrent state from a running call"):
        jax.block_until_ready(small.jitted(session, room=2)(inputs, small.make_state(CONFIG, 128)))


def test_passes_of_any_rows_are_timed():
    """Each pass starts at the same position, although a longer pass before it has moved the state."""
    session = small.make_session(CONFIG, WEIGHTS, threads=2)
    assert all(0 < seconds < 60 for seconds in session._time_passes([16, 1, 12]))
