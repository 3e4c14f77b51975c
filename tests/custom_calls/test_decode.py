"""The decode kernel under jax.jit: the logits of every layout, head and size, with equal bits from any number of
threads.
"""

import dataclasses
import platform
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.custom_calls import ENDS, State, build
from laneformer.formats import BF12_END, Bf12Product, Bf12Tiles
from laneformer.infer.sampling import sample
from tests.support import small
from tests.support.decode_cases import CONFIGS, EXPERTS, LAYOUTS, MODELS, NORMED_SUMS, ON_CPU, SAMPLINGS
from tests.support.gpu_cases import plan_of_normed_sums, state_of, weights_of
from tests.support.plan_interpreter import interpret

pytestmark = small.needs_library


def run(config, weights, prompt, limit, *, compute="float32", capacity=64, room=None, **options):
    """Runs one call that returns the logits of every token -> (outputs, state)."""
    session = small.make_session(config, weights, compute=compute, **options)
    return run_session(session, config, prompt, limit, compute=compute, capacity=capacity, room=room)


def run_session(session, config, prompt, limit, *, compute="float32", capacity=64, room=None):
    call = call_of(session, room or limit)
    return call(small.make_inputs(prompt, limit), small.make_state(config, capacity, compute))


def call_of(session, room):
    """A compiled function (inputs, state) -> (outputs, state). The outputs are NumPy arrays, because each slice of an
    array of JAX would be a program.
    """
    function = small.jitted(session, room=room, top=3, logits=True)

    def call(inputs, state):
        outputs, state = function(inputs, state)
        return jax.tree.map(np.asarray, outputs), state

    return call


WAYS = ({"threads": 1}, {"threads": 3}, {"one_thread_per_lane": True})


def check(expected_logits, config, weights, *, prompt=19, limit=4, tolerance=1e-4, ways=WAYS, **options):
    """Compares the logits with `expected_logits(config, weights, ids)`. All ways, by default one thread, three threads,
    and one thread per lane that exchanges messages, must give the same bits.
    """
    ids = small.prompt_of(config, prompt)
    first, *others = ways
    result = run(config, weights, ids, limit, **first, **options)
    outputs = result[0]
    assert outputs.status.tolist() == [limit, ENDS.index("length"), prompt + limit]
    ids += outputs.tokens.tolist()
    expected = expected_logits(config, weights, ids[:-1])[prompt - 1 :]
    assert np.abs(expected).max() > 1
    assert np.abs(expected - outputs.logits).max() < tolerance * np.abs(expected).max()
    for way in others:
        assert small.same(run(config, weights, ids[:prompt], limit, **way, **options), result), way
    return outputs


@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS, ids=[f"{layout}-{lanes}" for layout, lanes in LAYOUTS])
def test_layouts_match_the_interpreter(layout, lanes):
    config = small.make_config(layout=layout, lanes=lanes)
    check(small.interpreted_logits, config, small.make_weights(config))


@pytest.mark.parametrize("name", CONFIGS | MODELS | EXPERTS | ON_CPU)
def test_configs_match_the_interpreter(name):
    config = small.make_config(**(CONFIGS | MODELS | EXPERTS | ON_CPU)[name])
    check(small.interpreted_logits, config, small.make_weights(config), ways=WAYS[1:])


@pytest.mark.parametrize("layout", NORMED_SUMS)
def test_norms_of_sums_match_the_interpreter(layout):
    plan, ids, results = plan_of_normed_sums(layout), [3, 1, 4, 1, 5, 9, 2], []
    weights = weights_of(plan)
    for way in WAYS:
        session = custom_calls.Session(plan, **way)
        for path, weight in weights.items():
            session.pack(path, weight)
        call = small.jitted(session, room=3, logits=True)
        results.append(call(small.make_inputs(ids, 3), state_of(plan, 64)))
    outputs = results[0][0]
    expected = interpret(plan, weights, [*ids, *outputs.tokens[:2].tolist()])[len(ids) - 1 :]
    assert np.abs(expected - outputs.logits).max() < 1e-4 * np.abs(expected).max() > 1e-4
    assert all(small.same(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"hidden_size": 33, "ff": 7, "lm_head_type": "lane", "lanes": 3}]
)
def test_weights_of_two_bytes_match_the_interpreter(dtype, changes):
    config = small.make_config(**changes)
    check(small.interpreted_logits, config, small.make_weights(config, dtype), ways=WAYS[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_activations_match_the_model(dtype):
    """Products and caches of two bytes match the model up to rounding."""
    config = small.make_config(layout="dtp(1)", hidden_size=32, head_dim=8, ff=12)
    weights, tolerance = small.make_weights(config, dtype), {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
    outputs = check(small.model_logits, config, weights, compute=dtype, tolerance=tolerance)
    exact = run(config, weights, small.prompt_of(config, 19), 4, threads=1)[0]
    assert not np.array_equal(exact.logits[0], outputs.logits[0])


@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_instruction_sets_match_the_interpreter(instructions):
    if instructions not in custom_calls.instruction_sets():
        pytest.skip(f"this machine does not run {instructions}")
    config = small.make_config(layout="dtp(1)", lanes=3)
    for dtype in ("float32", "bfloat16"):
        weights = small.make_weights(config, dtype)
        check(small.interpreted_logits, config, weights, ways=WAYS[:2], instructions=instructions)


PACKED = {
    "usual": {},
    "tied": {"tie_word_embeddings": True, "lanes": 3},
    "odd sizes, lane head": {"hidden_size": 33, "ff": 7, "lm_head_type": "lane", "lanes": 3},
    "vocab head, biases": {"lm_head_type": "vocab_parallel", "lanes": 5, "vocab_size": 95, "qkv_bias": True},
    "mlp without a gate": {"gated_mlp": False, "ff": 37, "hidden_size": 64},
}


def with_exceptions(weights, share):
    """Replaces a share of each matrix by values far below the others: subnormals, zeros, and values between."""
    random = np.random.default_rng(5)
    for weight in weights.values():
        count = int(share * weight.size)
        if weight.ndim > 1 and count:
            small_values = np.array([0, -0.0, 1e-39, -1e-30, 1e-25], np.float32).astype(weight.dtype)
            weight.reshape(-1)[random.choice(weight.size, count, replace=False)] = random.choice(small_values, count)
    return weights


@pytest.mark.parametrize("name", PACKED)
def test_weights_in_twelve_bits_have_the_same_results(name, tmp_path):
    """Logits, tokens, log-probabilities and caches have the same bits, with exceptions up to the limit. Weights are
    packed by the session (with three threads), or mapped from a folder.
    """
    config = small.make_config(**PACKED[name] | {"vocab_size": PACKED[name].get("vocab_size", 300)})
    weights = with_exceptions(small.make_weights(config, "bfloat16"), 5e-4)
    ids = small.prompt_of(config, 50)
    plain = small.make_session(config, weights, threads=2)
    expected = run_session(plain, config, ids, 4)
    packed = small.make_session(config, weights, threads=3, bf12=True)
    assert small.same(run_session(packed, config, ids, 4), expected)
    for way in ({"threads": 1}, {"one_thread_per_lane": True}):
        mapped = small.mapped_session(config, weights, tmp_path, **way)
        assert small.same(run_session(mapped, config, ids, 4), expected), way
    counts = packed.bf12_weights
    assert mapped.bf12_weights == counts and mapped.packed_bytes < plain.packed_bytes and mapped.read_pass() > 0
    matrices = [weight for weight in weights.values() if weight.ndim > 1]
    assert counts.matrices >= 3 * config.num_hidden_layers and plain.bf12_weights == (0, 0, 0, 0)
    assert 0 < counts.weights <= sum(weight.size for weight in matrices)
    assert counts.exceptions <= 1e-3 * counts.weights


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_twelve_bits_have_the_same_results_with_every_instruction_set(instructions, compute):
    if instructions not in custom_calls.instruction_sets():
        pytest.skip(f"this machine does not run {instructions}")
    config = small.make_config(hidden_size=72, ff=44, layout="dtp(1)", lanes=3)
    weights, options = with_exceptions(small.make_weights(config, "bfloat16"), 9e-4), {"compute": compute}
    ids = small.prompt_of(config, 50)
    options |= {"instructions": instructions, "threads": 2}
    assert small.same(*(run(config, weights, ids, 4, bf12=bf12, **options) for bf12 in (False, True)))


def test_matrices_with_many_exceptions_stay_in_sixteen_bits():
    config = small.make_config(hidden_size=64, ff=64)
    weights = small.make_weights(config, "bfloat16")
    random = np.random.default_rng(0).integers(0, 0x7F80, weights["layers.1.feed_forward.w2"].shape, np.uint16)
    weights["layers.1.feed_forward.w2"] = random.view(weights["tok_embeddings"].dtype)  # any finite bits
    session = small.make_session(config, weights, threads=2, bf12=True)
    assert session.bf12_weights.left == 1
    ids = small.prompt_of(config, 20)
    assert small.same(*(run(config, weights, ids, 3, threads=2, bf12=bf12) for bf12 in (False, True)))
    with pytest.raises(custom_calls.NativeError, match="packed already"):
        session.pack("layers.0.feed_forward.w1", weights["layers.0.feed_forward.w1"])


def mappable():
    """A model, its weights, and its first product as stored in files, without exceptions."""
    config = small.make_config()
    weights = small.make_weights(config, "bfloat16")
    product = small.make_session(config, weights).plan.products[0]
    paths = tuple(matrix.weight.path for matrix in product.matrices)
    tiles = config.num_lanes * -(-product.rows // 16)
    units = np.zeros((tiles, -(-product.columns // 8), 3, 64), np.uint8)
    return (
        config,
        weights,
        Bf12Product(paths, False, Bf12Tiles(np.arange(8, dtype=np.uint8), units, np.full(tiles, BF12_END, np.uint32))),
    )


UNFIT = {
    "session without 12 bits": ({"bf12": False}, {}, "not opened for weights in 12 bits"),
    "missing tile": ({}, {"units": lambda units: units[1:]}, "bytes of tiles in 12 bits, got"),
    "missing end": ({}, {"exceptions": lambda words: words[1:]}, "one end for each of their tiles"),
    "no end": ({}, {"exceptions": lambda words: np.append(words[1:], np.uint32(0))}, "one end for each"),
    "exception outside": (
        {},
        {"exceptions": lambda words: np.append(np.uint32(3 << 15), words)},
        "outside their columns",
    ),
    "exception in the padding": (
        {},
        {"exceptions": lambda words: np.append(np.uint32(2 << 15 | 64 << 8), words)},
        "is outside",
    ),
    "short table": ({}, {"table": lambda table: table[1:]}, "the table must have 8 values"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_invalid_tiles_are_refused(name):
    options, changes, message = UNFIT[name]
    config, _, product = mappable()
    changed = {field: change(getattr(product.tiles, field)) for field, change in changes.items()}
    product = dataclasses.replace(product, tiles=dataclasses.replace(product.tiles, **changed))
    session = small.open_session(config, "bfloat16", **{"bf12": True} | options)
    with pytest.raises(custom_calls.NativeError, match=message):
        session.map(product)


def test_mapped_product_cannot_be_mapped_or_packed_again():
    config, weights, product = mappable()
    session = small.open_session(config, "bfloat16", bf12=True)
    assert not session.map(dataclasses.replace(product, interleaved=True)), "another order of tiles"
    assert not session.map(dataclasses.replace(product, paths=product.paths[:1])), "another product"
    assert session.map(product)
    with pytest.raises(custom_calls.NativeError, match="packed already"):
        session.map(product)
    with pytest.raises(custom_calls.NativeError, match="packed already"):
        session.pack(product.paths[0], weights[product.paths[0]])


def test_twelve_bits_of_other_dtypes_are_refused():
    config = small.make_config()
    with pytest.raises(custom_calls.NativeError, match="must be bfloat16"):
        small.make_session(config, small.make_weights(config), bf12=True)


def test_unknown_instructions_are_refused():
    config = small.make_config()
    with pytest.raises(custom_calls.NativeError, match="cannot run the instructions avx9000"):
        small.make_session(config, small.make_weights(config), instructions="avx9000")


@pytest.fixture(scope="module")
def model():
    return small.windowed_model()


@pytest.fixture(scope="module")
def call(model):
    """A compiled function (inputs, state) -> (outputs, state), and its session."""
    session = small.make_session(*model, threads=2)
    return call_of(session, 320), session


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 65, 300])
def test_prompts_of_any_length_match_the_interpreter(length, model, call):
    config, weights = model
    ids = small.prompt_of(config, length)
    outputs, _ = call[0](small.make_inputs(ids, 3, room=320), small.make_state(config, 320))
    ids += outputs.tokens[:2].tolist()
    expected = small.interpreted_logits(config, weights, ids)[length - 1 :]
    assert np.abs(expected - outputs.logits[:3]).max() < 1e-4 * np.abs(expected).max()


def test_long_answer_matches_the_interpreter(model, call):
    """It is long enough for attention in several chunks of keys."""
    config, weights = model
    outputs, _ = call[0](small.make_inputs([3], 300, room=320), small.make_state(config, 320))
    expected = small.interpreted_logits(config, weights, [3, *outputs.tokens[:299].tolist()])
    assert np.abs(expected - outputs.logits[:300]).max() < 1e-4 * np.abs(expected).max()
    np.testing.assert_array_equal(outputs.tokens[:300], np.argmax(outputs.logits[:300], -1))
    assert not outputs.tokens[300:].any()


def test_scores_beyond_the_range_of_exp_match_the_interpreter(model):
    """One layer has very large scores of both signs."""
    config, weights = model
    weights = weights | {"layers.1.attention.wq": 200 * weights["layers.1.attention.wq"]}
    ids = small.prompt_of(config, 20)
    outputs, _ = run(config, weights, ids, 3, threads=2)
    expected = small.interpreted_logits(config, weights, [*ids, *outputs.tokens[:2].tolist()])[19:]
    assert np.abs(expected - outputs.logits).max() < 1e-3 * np.abs(expected).max()


def test_log_probabilities_and_most_likely_tokens_follow_from_the_logits(model, call):
    config, _ = model
    outputs, _ = call[0](small.make_inputs([3], 40, room=320, temperature=2.0), small.make_state(config, 320))
    logprobs = np.asarray(jax.nn.log_softmax(np.asarray(outputs.logits[:40], np.float64)))
    np.testing.assert_allclose(outputs.logprobs[:40], logprobs[np.arange(40), outputs.tokens[:40]], atol=2e-6)
    order = np.argsort(-outputs.logits[:40], axis=-1, stable=True)[:, :3]
    np.testing.assert_array_equal(outputs.top_tokens[:40], order)
    np.testing.assert_allclose(outputs.top_logprobs[:40], np.take_along_axis(logprobs, order, -1), atol=2e-6)


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(None, id="equal"),
        pytest.param(
            1e-40,
            id="subnormal",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 flushes them to zero"),
        ),
    ],
)
def test_equal_logits_rank_by_token(factor, model):
    """Subnormal weights count as zero in all threads."""
    config, head = model[0].replace(layout="none"), model[1]["lm_head"]
    weights = model[1] | {"lm_head": np.ones_like(head) if factor is None else head * np.float32(factor)}
    assert weights["lm_head"].any()
    outputs, _ = run(config, weights, [1, 2], 2, threads=3)
    bits = np.asarray(outputs.logits).view(np.uint32) << 1  # XLA would compare subnormals as zero; without the sign
    assert (bits == bits[:, :1]).all()
    assert outputs.tokens.tolist() == [0, 0] and outputs.top_tokens.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("token", [0, 39])
def test_one_overflowing_logit_gives_nan_log_probabilities(token, model):
    """The first or the last worker computes that logit."""
    head = model[1]["lm_head"].copy()
    head[token] = np.resize([3e38, -3e38], head.shape[-1])
    weights = model[1] | {"lm_head": head, "norm": 9 * model[1]["norm"]}
    outputs, _ = run(model[0], weights, [1, 2], 2, threads=3)
    assert np.flatnonzero(np.isnan(outputs.logits[0])).tolist() == [token]
    assert np.isnan(outputs.logprobs).all() and outputs.status[0] == 2


def test_min_p_above_1_keeps_the_best_token(model, call):
    """The logarithm of a min_p just below 1 may also be rounded to a value above 0."""
    inputs = small.make_inputs([3, 4, 5], 8, room=320, temperature=1.0, min_p=1.5)
    outputs, _ = call[0](inputs, small.make_state(model[0], 320))
    assert outputs.tokens[:8].tolist() == np.argmax(outputs.logits[:8], -1).tolist() and outputs.tokens[:8].any()


draw = jax.jit(jax.vmap(sample, (0, 0, 0, None)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_tokens_follow_the_definition_of_sampling(sampling, model, call):
    config, _ = model
    parameters = sampling.parameters()
    prompt, count = [3, 5, 3, 11], 60
    inputs = small.make_inputs(
        prompt,
        count,
        room=320,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        penalty=parameters.repetition_penalty,
        top_k=parameters.top_k,
        seed=parameters.key,
    )
    state = small.make_state(config, 320)
    outputs, after = call[0](inputs, state._replace(seen=state.seen.at[np.array(prompt)].set(1)))
    tokens, logits = outputs.tokens[:count].tolist(), outputs.logits[:count]
    seen = np.array([np.isin(np.arange(config.vocab_size), prompt + tokens[:i]) for i in range(count)])
    expected, _ = draw(logits, seen, np.arange(4, 4 + count, dtype=np.int32), parameters)
    assert tokens == expected.tolist()
    assert len(set(tokens)) > 5
    assert np.flatnonzero(after.seen).tolist() == sorted({*prompt, *tokens})


def test_stop_token_is_the_last_token(model, call):
    config, _ = model
    whole, _ = call[0](small.make_inputs([9], 30, room=320), small.make_state(config, 320))
    stop = int(whole.tokens[20])
    count = whole.tokens.tolist().index(stop) + 1
    outputs, _ = call[0](small.make_inputs([9], 30, room=320, stops=[-1, stop]), small.make_state(config, 320))
    assert outputs.status.tolist() == [count, ENDS.index("stop"), 1 + count]
    assert outputs.tokens.tolist() == whole.tokens[:count].tolist() + [0] * (320 - count)
    assert not outputs.logprobs[count:].any()


def test_cache_is_updated_in_place(model, call):
    """Several calls in a row use the buffers of the first call and have the same results."""
    state = State(jnp.zeros(model[0].vocab_size, jnp.uint8), custom_calls.empty_layers(call[1].plan, 320))
    places, results = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)], []
    for _ in range(3):
        outputs, state = call[0](small.make_inputs([9, 8], 20, room=320), state)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)] == places
        results.append((outputs.tokens[:20], outputs.logits[:20]))
    assert small.same(results[0], results[1]) and small.same(results[0], results[2])
    keys = np.asarray(state.layers[0]["keys"])
    assert keys[:, :, :21].any((0, 1, 3, 4)).all() and not keys[:, :, 21:].any()


def test_call_continues_the_state_of_the_last_call(model, call):
    config, _ = model
    options = {"room": 320, "temperature": 1.0, "penalty": 1.2}
    whole, end = call[0](small.make_inputs([9, 8], 30, **options), small.make_state(config, 320))
    first, state = call[0](small.make_inputs([9, 8], 13, **options), small.make_state(config, 320))
    position = int(first.status[2]) - 1  # the last token drawn is not in the cache yet
    rest, state = call[0](small.make_inputs([int(first.tokens[12])], 17, start=position, **options), state)
    parts = [np.r_[a[:13], b[:17]] for a, b in ((first.tokens, rest.tokens), (first.logits, rest.logits))]
    assert small.same([whole.tokens[:30], whole.logits[:30]], parts)
    assert small.same(end, state)


def test_prompt_in_two_calls_has_the_same_results(model, call):
    config, _ = model
    prompt = small.prompt_of(config, 69)
    whole, end = call[0](small.make_inputs(prompt, 5, room=320), small.make_state(config, 320))
    _, state = call[0](small.make_inputs(prompt[:48], 1, room=320), small.make_state(config, 320))
    rest, state = call[0](small.make_inputs(prompt[48:], 5, start=48, room=320), state)
    assert small.same((whole.tokens[:5], whole.logits[:5]), (rest.tokens[:5], rest.logits[:5]))
    assert small.same(end.layers, state.layers)


def test_without_donation_xla_copies_the_cache(model, call):
    config, _ = model
    decode = partial(custom_calls.decode, call[1], room=320, top=3, logits=True)
    expected, _ = call[0](small.make_inputs([9, 8], 10, room=320), small.make_state(config, 320))
    state = small.make_state(config, 320)
    inputs = small.make_inputs([9, 8], 10, room=320).inputs(call[1])
    outputs, after = jax.jit(decode)(inputs, state)
    assert small.same((expected.tokens[:10], expected.logits[:10]), (outputs.tokens[:10], outputs.logits[:10]))
    assert np.asarray(after.layers[0]["keys"]).any() and not any(np.asarray(x).any() for x in jax.tree.leaves(state))
    with pytest.raises(ValueError, match="donate_argnums"):
        decode(inputs, state)


def chaos(lanes, count, chaos_us, **changes):
    config = small.make_config(
        lanes=lanes,
        hidden_size=16,
        head_dim=4,
        num_hidden_layers=2,
        max_position_embeddings=count + 120,
        sliding_window=30,
        sliding_window_n_layers=2,
        **changes,
    )
    weights = small.make_weights(config)

    def tokens(**options):
        """Tokens, log-probabilities and state after a prompt of several blocks."""
        call = small.jitted(small.make_session(config, weights, **options), room=count)
        inputs = small.make_inputs(small.prompt_of(config, 120), count, temperature=1.0, top_k=30)
        outputs, state = call(inputs, small.make_state(config, count + 120))
        assert outputs.status[0] == count
        return outputs.tokens, outputs.logprobs, state

    expected = tokens(threads=1)
    assert small.same(expected, tokens(one_thread_per_lane=True, chaos_us=chaos_us)), "exchange by messages"
    assert small.same(expected, tokens(threads=2, chaos_us=chaos_us)), "exchange in shared memory"


@pytest.mark.parametrize("layout", ["dtp(1)", pytest.param("kraken", marks=pytest.mark.slow)])
def test_random_delays_change_no_bit(layout):
    chaos(3, 150, 5, layout=layout, broadcast_delay=1)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param("laneformer", 2000, marks=pytest.mark.slow),
        *(pytest.param(n, 10_000, marks=pytest.mark.exhaustive) for n in ("laneformer", "dtp(1)", "dtp(3)", "tp")),
    ],
)
def test_random_delays_change_no_bit_of_thousands_of_tokens(layout, count):
    chaos(4, count, 20, layout=layout, broadcast_delay=1)
