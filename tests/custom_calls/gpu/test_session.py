"""The GPU kernel under jax.jit, on emulated GPUs (or real ones, see emulated.py): the logits of every layout, head and
size, sampling, the exchange under delays, and errors.

The emulator checks the order of waits and their targets, that no copy is read before it is complete or overtakes a
read, and every number. It does not model a GPU's memory order or speed. Compiling kernels takes most of the time, so
tests of calls share one session, and each fast case tests several things.
"""

import dataclasses
import re
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.custom_calls import ENDS, NativeError
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu import layout as gpu_layout
from laneformer.custom_calls.gpu import session as gpu_session
from laneformer.custom_calls.gpu.tiling import H200, Machine
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.decoder import decoder_ops
from laneformer.infer.noise import gumbel
from laneformer.infer.sampling import Sampling, sample
from laneformer.ops import TRACE_NAMES
from laneformer.recipes.models import LANEFORMER_2B
from tests.support import emulated, small
from tests.support.decode_cases import CONFIGS, EXPERTS, LAYOUTS, MODELS, NORMED_SUMS, SAMPLINGS
from tests.support.gpu_cases import (
    AMD,
    REFUSED,
    ROOM,
    fail_often,
    jitted,
    mixed_plan,
    plan_of_normed_sums,
    same,
    some,
    state_of,
    weights_of,
)
from tests.support.plan_interpreter import interpret

pytestmark = [small.needs_library, emulated.needs_gpu]

# Sums of the first land after the last module. The last also has large heads, which are independent of the layout.
# Heads of the model need lanes that differ at the end, which these layouts do not have.
FAST_LAYOUTS = {("kraken", 5): {}, ("desync(2)", 3): {}, ("caat(0.3)", 2): CONFIGS["large heads"]}
# mixed_plan tests other options; test_experts.py has odd numbers of channels, one expert, and warps of 64 threads.
FAST_CONFIGS, SLOW_CONFIGS = {"lane head", "vocab head"}, {"large heads", "one channel more than vectors"}


def run(config, weights, prompt, limit, *, compute="float32", capacity=64, mesh=None, start=None, **options):
    session = emulated.make_session(config, weights, compute=compute, mesh=mesh, **options)
    outputs, state = jitted(session, mesh, room=limit, top=3, logits=True)(
        start or small.make_inputs(prompt, limit), small.make_state(config, capacity, compute, mesh)
    )
    outputs = jax.block_until_ready(outputs)
    assert session.failure is None
    return outputs, state


def check(expected_logits, config, weights, *, prompt=19, limit=3, tolerance=1e-4, **options):
    ids = small.prompt_of(config, prompt)
    outputs, _ = run(config, weights, ids, limit, **options)
    assert outputs.status.tolist() == [limit, ENDS.index("length"), prompt + limit]
    ids += outputs.tokens.tolist()
    expected = expected_logits(config, weights, ids[:-1])[prompt - 1 :]
    assert np.abs(expected).max() > 1
    assert np.abs(expected - outputs.logits).max() < tolerance * np.abs(expected).max()
    np.testing.assert_array_equal(outputs.tokens, np.argmax(outputs.logits, -1))
    return outputs


@pytest.mark.parametrize(("layout", "lanes"), some(LAYOUTS, FAST_LAYOUTS))
def test_layouts_match_the_interpreter(layout, lanes):
    config = small.make_config(**FAST_LAYOUTS.get((layout, lanes), {}) | {"layout": layout, "lanes": lanes})
    check(small.interpreted_logits, config, small.make_weights(config))


@pytest.mark.parametrize("name", some(CONFIGS | MODELS | EXPERTS, FAST_CONFIGS, SLOW_CONFIGS))
def test_configs_match_the_interpreter(name):
    config = small.make_config(**(CONFIGS | MODELS | EXPERTS)[name])
    check(small.interpreted_logits, config, small.make_weights(config))


@pytest.mark.parametrize("launch", ["persistent", "graph"])
def test_layers_of_several_kinds_match_the_interpreter(launch):
    """The layers have biases, head norms, and a norm over the sum of the lanes before the head."""
    session = check_plan(mixed_plan(), launch=launch)
    assert [kind.layers for kind in session.layout.kinds] == [(0, 2), (1, 3)] * 2


@pytest.mark.parametrize("layout", some(NORMED_SUMS, ()))
@pytest.mark.parametrize("launch", ["persistent", "graph"])
def test_norms_of_sums_match_the_interpreter(layout, launch):
    check_plan(plan_of_normed_sums(layout), launch=launch, chaos_us=20)


def check_plan(plan, **options):
    """Compares the logits of a plan with the interpreter. Returns the session."""
    weights, ids = weights_of(plan), [3, 1, 4, 1, 5, 9, 2]
    session = emulated.open_session(plan, weights, **options)
    call = jitted(session, room=4, logits=True)
    outputs, _ = call(small.make_inputs(ids, 4), state_of(plan, 64))
    assert session.failure is None
    expected = interpret(plan, weights, [*ids, *outputs.tokens[:3].tolist()])[len(ids) - 1 :]
    assert np.abs(expected - outputs.logits).max() < 1e-4 * np.abs(expected).max() > 1e-4
    return session


@pytest.mark.parametrize(
    ("weight_dtype", "cache_dtype", "head_dim"), [("bfloat16", "float16", 16), ("float16", "bfloat16", 6)]
)
def test_two_bytes_match_the_interpreter(weight_dtype, cache_dtype, head_dim):
    """Weights are exact. Keys and values are rounded to the cache's dtype, ties to even, before their own position
    reads them; the first position reads nothing else. Heads have whole or partial vectors.
    """
    config = small.make_config(
        hidden_size=48, ff=24, head_dim=head_dim, heads=4, kv_heads=2, lanes=3, layout="dtp(1)", qkv_bias=True
    )
    weights = small.make_weights(config, weight_dtype)
    weights["layers.0.attention.wv"][:] = 0  # values are the biases, ties whose even neighbour is below or above
    biases = np.ones_like(weights["layers.0.attention.wv_bias"], np.float32)
    biases += np.resize([0.5, 1.5], biases.shape) * float(jnp.finfo(cache_dtype).eps)
    weights["layers.0.attention.wv_bias"] = biases
    plan = make_plan(decoder_ops(config), config.schedule, weight_dtype=weight_dtype, cache_dtype=cache_dtype)
    session = emulated.open_session(plan, weights)
    call = jitted(session, room=3, logits=True)
    for prompt in (1, 19):
        ids = small.prompt_of(config, prompt)
        outputs, state = call(small.make_inputs(ids, 3, room=19), state_of(plan, 64))
        assert session.failure is None
        expected = interpret(plan, weights, [*ids, *outputs.tokens[:2].tolist()])[prompt - 1 :]
        assert np.abs(expected - outputs.logits).max() < 1e-4 * np.abs(expected).max() > 1e-4
        values = np.asarray(state.layers[0]["values"][:, 0, :prompt])
        assert (values == biases.astype(cache_dtype).reshape(3, 1, 2, head_dim)).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_caches_of_two_bytes_match_the_model(dtype):
    config = small.make_config(layout="dtp(1)", hidden_size=32, head_dim=16, ff=12, heads=4, kv_heads=2)
    tolerance = {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
    check(small.model_logits, config, small.make_weights(config, dtype), compute=dtype, tolerance=tolerance)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_2b_on_an_h200_matches_the_model():
    """Three layers of the 2B and a small vocabulary, on 128 CTAs of 256 threads. Takes minutes and 6 GB."""
    config = LANEFORMER_2B.replace(num_hidden_layers=3, vocab_size=4096, max_position_embeddings=512)
    check(
        small.model_logits,
        config,
        small.make_weights(config, "bfloat16"),
        prompt=1,
        limit=2,
        machine=H200,
        timeout_ms=600_000,
    )


@emulated.only_emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, {"lm_head_type": "lane", "lanes": 3}])
def test_amd_matches_the_interpreter(changes):
    """Warps have 64 threads, and weights are loaded into registers without a ring. The head takes several steps."""
    machine = dataclasses.replace(AMD, ctas=2)
    config = small.make_config(layout="dtp(1)", hidden_size=40, vocab_size=400, **changes)
    check(small.interpreted_logits, config, small.make_weights(config), machine=machine)


@emulated.only_emulated
def test_vectors_of_several_segments_match_the_interpreter():
    machine = Machine(warp_size=32, ctas=2, warps=1, shared_bytes=232_448, bulk_copies=True)
    config = small.make_config(layout="tp", hidden_size=1200, ff=700, num_hidden_layers=1)
    check(small.interpreted_logits, config, small.make_weights(config), machine=machine, prompt=3, limit=2)


@pytest.mark.slow
@emulated.only_emulated
def test_head_in_turns_matches_the_interpreter():
    """The head's rows are computed in turns because their sums would take the ring's memory. The sampler's second copy
    of the logits uses the memory in which layers merge attention.
    """
    machine = dataclasses.replace(emulated.SMALL, shared_bytes=70_000)
    config = small.make_config(vocab_size=4001, heads=32, kv_heads=1, head_dim=16, num_hidden_layers=2)
    weights, ids, values = (
        small.make_weights(config),
        [3, 4, 5],
        Sampling(temperature=0.9, top_p=0.9, seed=3).parameters(),
    )
    start = small.make_inputs(ids, 4, seed=values.key, temperature=values.temperature, top_p=values.top_p)
    session = emulated.make_session(config, weights, machine=machine)
    assert session.layout.head.turns > 1 and session.layout.memory.z_in_merged
    outputs, _ = run(config, weights, ids, 4, machine=machine, start=start)
    expected = small.interpreted_logits(config, weights, [*ids, *outputs.tokens[:3].tolist()])[len(ids) - 1 :]
    assert np.abs(expected - outputs.logits).max() < 1e-4 * np.abs(expected).max()
    for i in range(4):
        token, _ = sample(outputs.logits[i], jnp.zeros(config.vocab_size, bool), jnp.int32(len(ids) + i), values)
        assert outputs.tokens[i] == token


NORMED_SUMS = {"layout": "tp", "norm_before": False, "norm_after": "sum"}


def spread(devices: int) -> dict:
    """Options of a session whose CTAs are spread over `devices` devices, with random delays."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, devices), ("data", "lane"), axis_types=axes, devices=jax.devices()[:devices])
    return {"mesh": mesh, "machine": dataclasses.replace(emulated.SMALL, ctas=8 // devices), "chaos_us": 20}


@emulated.only_emulated
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (2, {"layout": "dtp(2)"}),
        pytest.param(4, {"layout": "dtp(2)"}, marks=pytest.mark.exhaustive),
        pytest.param(2, NORMED_SUMS, marks=pytest.mark.exhaustive),
        pytest.param(4, {"layout": "ladder", "norm_after": "sum"}, marks=pytest.mark.exhaustive),
        pytest.param(4, {"layout": "desync(2)", "norm_after": "lane"}, marks=pytest.mark.exhaustive),
    ],
)
def test_several_devices_give_the_bits_of_one(devices, changes):
    config = small.make_config(lanes=4, num_hidden_layers=4, **changes)
    weights, ids = small.make_weights(config), small.prompt_of(config, 5)
    one, _ = run(config, weights, ids, 6)
    several, state = run(config, weights, ids, 6, **spread(devices))
    assert same(one, several)
    assert state.seen.sum() > 0


@emulated.only_emulated
def test_norms_of_sums_on_two_devices_match_the_interpreter():
    """Both warps of a CTA have rows of the output."""
    config = small.make_config(lanes=4, num_hidden_layers=4, hidden_size=80, **NORMED_SUMS)
    check(small.interpreted_logits, config, small.make_weights(config), **spread(2))


@pytest.fixture(scope="module")
def session(model):
    return emulated.make_session(*model, timeout_ms=2000)


@pytest.fixture(scope="module")
def long_answer(model, call):
    """The outputs of a call that draws 150 tokens."""
    return jax.device_get(call(small.make_inputs([3], 150, room=ROOM), small.make_state(model[0], 160))[0])


def test_long_answer_matches_the_interpreter(model, long_answer):
    """It is long enough for attention in several splits of keys, and for positions beyond the window."""
    (config, weights), outputs = model, long_answer
    expected = small.interpreted_logits(config, weights, [3, *outputs.tokens[:149].tolist()])
    assert np.abs(expected - outputs.logits[:150]).max() < 1e-4 * np.abs(expected).max()
    assert not outputs.tokens[150:].any() and not outputs.logprobs[150:].any()


def test_scores_beyond_the_range_of_exp_match_the_interpreter(model):
    """One layer has very large scores of both signs."""
    config, weights = model
    wq = "layers.1.attention.wq"
    check(small.interpreted_logits, config, weights | {wq: 200 * weights[wq]}, tolerance=1e-3)


def test_prompt_in_two_calls_has_the_same_tokens(model, call):
    config, _ = model
    ids = small.prompt_of(config, 30)
    whole, _ = call(small.make_inputs(ids, 6, room=ROOM), small.make_state(config, 160))
    _, state = call(small.make_inputs(ids[:20], 1, room=ROOM), small.make_state(config, 160))
    rest, _ = call(small.make_inputs(ids[20:], 6, start=20, room=ROOM), state)
    assert rest.tokens.tolist() == whole.tokens.tolist() and rest.status.tolist() == whole.status.tolist()


def test_log_probabilities_and_most_likely_tokens_follow_from_the_logits(model, call):
    config, _ = model
    outputs, _ = call(small.make_inputs([3], 40, room=ROOM, temperature=2.0), small.make_state(config, 160))
    logprobs = np.asarray(jax.nn.log_softmax(np.asarray(outputs.logits[:40], np.float64)))
    np.testing.assert_allclose(outputs.logprobs[:40], logprobs[np.arange(40), outputs.tokens[:40]], atol=2e-6)
    order = np.argsort(-outputs.logits[:40], axis=-1, stable=True)[:, :3]
    np.testing.assert_array_equal(outputs.top_tokens[:40], order)
    np.testing.assert_allclose(outputs.top_logprobs[:40], np.take_along_axis(logprobs, order, -1), atol=2e-6)


def test_equal_logits_rank_by_token(model):
    config, weights = model
    session = emulated.make_session(config, weights | {"lm_head": np.ones_like(weights["lm_head"])})
    outputs, _ = jitted(session, room=2, top=3)(small.make_inputs([1, 2], 2), small.make_state(config, 160))
    assert outputs.tokens.tolist() == [0, 0] and outputs.top_tokens.tolist() == [[0, 1, 2]] * 2


def test_one_overflowing_logit_gives_nan_log_probabilities(model):
    """One CTA computes that logit; all CTAs must detect it."""
    config, weights = model
    head = weights["lm_head"].copy()
    head[7] = np.resize([3e38, -3e38], head.shape[-1])
    session = emulated.make_session(config, weights | {"lm_head": head, "norm": 9 * weights["norm"]})
    outputs, _ = jitted(session, room=2, logits=True)(small.make_inputs([1, 2], 2), small.make_state(config, 160))
    assert np.flatnonzero(np.isnan(outputs.logits[0])).tolist() == [7]
    assert np.isnan(outputs.logprobs).all() and outputs.status[0] == 2


def test_largest_noise_decides_between_tokens(model, call):
    """Token 2 with seed 94712 at position 3 has the largest random word. Its noise is 16.6355, but would be 15.942 with
    u = w 2^-23. At this temperature, another token would win against the smaller noise.
    """
    config, _ = model
    key, ids = np.array([94712, 0], np.uint32), [3, 4, 5]
    logits = call(small.make_inputs(ids, 1, room=ROOM), small.make_state(config, 160))[0].logits[0]
    noise = np.asarray(gumbel(key, jnp.int32(3), jnp.arange(config.vocab_size)))
    assert noise[2] == pytest.approx(16.6355, abs=1e-3)
    ahead = [other for other in range(config.vocab_size) if logits[other] > logits[2]]
    temperature = max((logits[n] - logits[2]) / (16.3 - noise[n]) for n in ahead)
    inputs = small.make_inputs(ids, 1, room=ROOM, seed=key, temperature=temperature)
    assert call(inputs, small.make_state(config, 160))[0].tokens[0] == 2


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_follow_the_definition(sampling, model, call):
    """infer/sampling.py draws the same tokens from the kernel's logits."""
    config, _ = model
    values, ids = sampling.parameters(), [3, 4, 5]
    inputs = small.make_inputs(
        ids,
        30,
        room=ROOM,
        seed=values.key,
        top_k=int(values.top_k),
        temperature=values.temperature,
        top_p=values.top_p,
        min_p=values.min_p,
        penalty=values.repetition_penalty,
    )
    state = small.make_state(config, 160)
    state = state._replace(seen=state.seen.at[np.array(ids)].set(1))
    outputs, after = call(inputs, state)
    define = jax.jit(sample)
    seen = np.zeros(config.vocab_size, bool)
    seen[ids] = True
    for i in range(30):
        token, logprob = define(outputs.logits[i], jnp.asarray(seen), jnp.int32(len(ids) + i), values)
        assert (int(outputs.tokens[i]), float(outputs.logprobs[i])) == (
            int(token),
            pytest.approx(float(logprob), abs=2e-6),
        ), i
        seen[int(token)] = True
    np.testing.assert_array_equal(after.seen, seen)


def test_min_p_above_1_keeps_the_best_token(model, call):
    """On a GPU, the logarithm of a min_p just below 1 may also be above 0."""
    config, _ = model
    inputs = small.make_inputs([3, 4, 5], 8, room=ROOM, temperature=1.0, min_p=1.5)
    outputs, _ = call(inputs, small.make_state(config, 160))
    assert outputs.tokens[:8].tolist() == np.argmax(outputs.logits[:8], -1).tolist() and outputs.tokens[:8].any()


def test_stop_token_is_the_last_token(model, call):
    config, _ = model
    plain, _ = call(small.make_inputs([3], 20, room=ROOM), small.make_state(config, 160))
    tokens = plain.tokens[:20].tolist()
    stop = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    outputs, _ = call(small.make_inputs([3], 20, room=ROOM, stops=(tokens[stop],)), small.make_state(config, 160))
    assert outputs.status.tolist() == [stop + 1, ENDS.index("stop"), stop + 2]
    assert outputs.tokens[: stop + 1].tolist() == tokens[: stop + 1]


def test_running_call_streams_tokens_until_cancelled(model, session, call, long_answer):
    config, _ = model
    expected = long_answer
    session.begin()
    results = []
    thread = threading.Thread(
        target=lambda: results.append(call(small.make_inputs([3], 150, room=ROOM), small.make_state(config, 160)))
    )
    thread.start()
    while session.wait(4) < 5:
        assert thread.is_alive()
    drawn = session.drawn(0, 5, 3)
    session.cancel()
    thread.join()
    outputs, _ = results[0]
    count = int(outputs.status[0])
    assert session.finished and 5 <= count < 150 and outputs.status[1] == ENDS.index("cancelled")
    assert drawn.tokens.tolist() == expected.tokens[:5].tolist() == outputs.tokens[:5].tolist()
    np.testing.assert_array_equal(drawn.top_tokens, expected.top_tokens[:5])
    np.testing.assert_array_equal(drawn.logprobs, outputs.logprobs[:5])
    assert (np.diff(drawn.times) > 0).all() and abs(drawn.times[-1] - time.monotonic()) < 60
    after = call(small.make_inputs([3], 20, room=ROOM), small.make_state(config, 160))[0]
    found, whole = ([x[:20] for x in outputs[:-1]] for outputs in (after, expected))  # all but the status
    assert small.same(found, whole), "the next call is right"


@pytest.mark.parametrize("name", REFUSED)
def test_device_refuses_impossible_calls(name, model, session, call):
    config, _ = model
    before = call(small.make_inputs([3], 4), small.make_state(config, 160))[0]
    outputs, _ = call(REFUSED[name], small.make_state(config, 160))
    assert outputs.status.tolist()[:2] == [0, len(ENDS)] and "do not fit the cache" in session.failure
    with pytest.raises(jax.errors.JaxRuntimeError, match="call begin first"):
        jax.block_until_ready(call(small.make_inputs([3], 4), small.make_state(config, 160)))
    session.begin()
    assert session.failure is None
    assert same(call(small.make_inputs([3], 4), small.make_state(config, 160))[0], before)


@emulated.only_emulated
def test_missing_lane_times_out(model, monkeypatch):
    monkeypatch.setenv("EMULATOR_STILL", "5,0,lost")
    config, weights = model
    session = emulated.make_session(config, weights, timeout_ms=300)
    call, began = jitted(session, room=8), time.monotonic()
    outputs, _ = call(small.make_inputs([3], 4), small.make_state(config, 160))
    assert 1.8 <= time.monotonic() - began < 60 and outputs.status[1] == len(ENDS)
    assert "timed out waiting for the check-in of lane 2 after 1800 ms" in session.failure


@emulated.only_emulated
def test_timeout_ends_the_call_before_a_wrong_token(model, monkeypatch):
    config, weights = model
    fail_often(emulated.make_session(config, weights, timeout_ms=50), config, monkeypatch)


@emulated.only_emulated
@pytest.mark.parametrize("chaos_us", [5, 200])
def test_delays_change_no_bit(chaos_us, model, call):
    config, weights = model
    expected = call(small.make_inputs([3], 30, room=ROOM, temperature=1.0), small.make_state(config, 160))[0]
    session = emulated.make_session(config, weights, chaos_us=chaos_us)
    outputs = jitted(session, room=ROOM, top=3, logits=True)(
        small.make_inputs([3], 30, room=ROOM, temperature=1.0), small.make_state(config, 160)
    )[0]
    assert same(outputs, expected)


@pytest.mark.exhaustive
def test_ten_thousand_tokens_under_delays():
    config = small.make_config(lanes=3, layout="dtp(2)", max_position_embeddings=512, num_hidden_layers=2)
    weights = small.make_weights(config)
    plain, delayed = (jitted(emulated.make_session(config, weights, chaos_us=us), room=500) for us in (0, 2))
    for seed in range(20):
        inputs = small.make_inputs([seed], 500, temperature=1.0, seed=(seed, 0))
        assert same(*(call(inputs, small.make_state(config, 512))[0] for call in (plain, delayed)))


@pytest.mark.slow
def test_calls_after_many_cancellations_are_right(model, session, call, long_answer):
    config, _ = model
    inputs = small.make_inputs([3], 3)
    expected = call(inputs, small.make_state(config, 160))[0]
    long = small.make_inputs([3], 150, room=ROOM)
    whole = long_answer.tokens
    for i in range(70):  # some calls are cancelled after 0 to 6 tokens, some before their start
        session.begin()
        if i % 10 == 1:
            thread = threading.Thread(target=lambda wanted=i % 7: [session.wait(wanted, 10_000), session.cancel()])
            thread.start()
            outputs, _ = call(long, small.make_state(config, 160))
            thread.join()
            count = int(outputs.status[0])
            assert outputs.tokens[:count].tolist() == whole[:count].tolist() and count > i % 7
            continue
        if i % 3 == 0:
            session.cancel()
        outputs, _ = call(inputs, small.make_state(config, 160))
        assert outputs.status[1] == ENDS.index("cancelled" if i % 3 == 0 else "length")
    session.begin()
    assert same(call(inputs, small.make_state(config, 160))[0], expected)


def test_spans_cover_every_op(model, session, call):
    config, _ = model
    session.trace(1000)
    call(small.make_inputs([3, 4], 3), small.make_state(config, 160))
    spans = dict(session.spans())
    session.trace(0)
    assert len(spans) == config.num_lanes * session.layout.ctas
    per_pass = 1 + 6 * config.num_hidden_layers
    for own in spans.values():
        assert len(own) == 4 * per_pass + 3 * 2 + 4
        assert (own["end_ns"] >= own["begin_ns"]).all() and (own["begin_ns"][1:] >= own["end_ns"][:-1]).all()


def test_missing_and_unknown_weights_are_refused(model):
    config, weights = model
    session = emulated.make_session(
        config, {path: weight for path, weight in weights.items() if path != "layers.1.ffn_norm"}
    )
    with pytest.raises(NativeError, match=r"1 weights have not been packed, among them layers\.1\.ffn_norm"):
        _ = session.operands
    with pytest.raises(NativeError, match=r"no weight called layers\.7\.ffn_norm"):
        session.pack("layers.7.ffn_norm", weights["norm"])


def misshapen(weight):
    yield weight[..., :-1]
    yield np.concatenate([weight, weight[:1]])
    if weight.ndim > 1:
        yield np.swapaxes(weight, -1, -2)
        yield weight[0]


def plan_of(name: str) -> Plan:
    config = small.make_config(**CONFIGS[name])
    return make_plan(decoder_ops(config), config.schedule)


@pytest.mark.parametrize("make", [mixed_plan, partial(plan_of, "lane head"), partial(plan_of, "vocab head")])
def test_weights_of_other_shapes_are_refused(make):
    """Other tests compile the kernels of these plans too."""
    plan = make()
    weights = weights_of(plan)
    session = emulated.open_session(plan, weights)
    for path, weight in weights.items():
        for wrong in misshapen(weight):
            if wrong.shape != weight.shape:
                with pytest.raises(NativeError, match=rf"weight {re.escape(path)} has the shape"):
                    session.pack(path, wrong)


def test_cache_longer_than_the_context_is_refused(model, session, call):
    config, _ = model
    with pytest.raises(jax.errors.JaxRuntimeError, match="more positions than the model's context"):
        call(small.make_inputs([3], 4), small.make_state(config, config.max_position_embeddings + 1))


def test_names_match_the_headers(session):
    def enum(header, name):
        words = re.search(rf"enum {name} {{(.*?)}}", (gpu_build.SOURCES / header).read_text(), re.DOTALL)[1]
        return [word.lower() for word in re.findall(r"k(?:Name|Step)(\w+)", words)]

    *names, op = enum("ops/dense.h", "Names")
    assert op == "op" and session.ops == (*names, *TRACE_NAMES)
    assert tuple(enum("params.h", "Steps")) == gpu_layout.STEPS
    params = (gpu_build.SOURCES / "params.h").read_text()
    limits = re.search(r"kMaxLayers = (\d+), kMaxDevices = (\d+);\n.*kMaxKept = (\d+) \* kMaxLayers", params)
    layers, devices, kept = map(int, limits.groups())
    assert (layers, devices, kept * layers) == (
        gpu_session.MOST_LAYERS,
        gpu_session.MOST_DEVICES,
        gpu_session.MOST_KEPT,
    )


@emulated.only_emulated
def test_closing_frees_the_memory(model):
    before = emulated.allocations()
    session = emulated.make_session(*model)
    assert emulated.allocations() > before
    session.close()
    assert emulated.allocations() == before
    with pytest.raises(NativeError, match="was closed"):
        session.begin()


@emulated.only_emulated
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EMULATOR_MULTIPROCESSORS", "4", "holds 4 of the .* CTAs that must run together"),
        ("EMULATOR_PEERS", "0", "cannot write to each other's memory"),
    ],
)
def test_unsuitable_machines_are_refused(variable, value, message, model, monkeypatch):
    monkeypatch.setenv(variable, value)
    mesh = jax.make_mesh(
        (1, 3), ("data", "lane"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:3]
    )
    with pytest.raises(NativeError, match=message):
        emulated.make_session(*model, mesh=mesh)


@emulated.only_emulated
def test_missing_driver_is_reported(model, monkeypatch):
    monkeypatch.setattr(emulated, "driver", lambda: "/nowhere/libcuda.so.1")
    with pytest.raises(NativeError, match="driver cannot be loaded"):
        emulated.make_session(*model)
