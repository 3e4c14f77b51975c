"""Sampling against a float64 reference written from the definition, and against the distributions it should
draw from.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from laneformer.errors import ConfigError
from laneformer.infer.noise import gumbel
from laneformer.infer.sampling import Adjustments, Sampling, sample, top_logprobs

V = 24
jitted = jax.jit(sample)
noise_of = jax.jit(gumbel)
added_of = jax.jit(Adjustments.of)
many = jax.jit(jax.vmap(sample, (None, None, 0, None)))


def draw(logits, s, seen=None, position=5, drawn=None):
    seen = np.zeros(len(logits), bool) if seen is None else seen
    adjust = s.adjustments(len(logits))
    added = None if adjust is None else added_of(adjust, np.asarray(drawn, np.int32))
    token, logprob = jitted(np.asarray(logits, np.float32), seen, np.int32(position), s.parameters(), added)
    return int(token), float(logprob)


def penalised(logits, seen, s, drawn=0):
    z = np.asarray(logits, np.float64)
    z = np.where(seen, np.where(z > 0, z / s.repetition_penalty, z * s.repetition_penalty), z)
    z = z - drawn * s.frequency_penalty - (drawn > np.zeros(len(z))) * s.presence_penalty  # OpenAI's formula
    for token, bias in s.logit_bias:
        z[token] += bias
    return z


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def kept_tokens(z, s):
    """The kept tokens, bool [v], and the margin by which the closest decision was made. z: logits after temperature,
    float64 [v].
    """
    kept = np.ones(len(z), bool)
    if 0 < s.top_k < len(z):
        kept = z >= np.sort(z)[-s.top_k]
    margin = 1.0
    if s.top_p < 1:
        p = softmax(np.where(kept, z, -np.inf))
        sets = [(t, p[z >= t].sum()) for t in np.unique(z)[::-1]]
        margin = min(abs(total - s.top_p) for _, total in sets)
        kept &= z >= next((t for t, total in sets if total >= s.top_p), -np.inf)
    if s.min_p > 0:
        bound = z.max() + math.log(s.min_p)
        margin = min(margin, np.abs(z - bound)[z != z.max()].min(initial=1.0))
        kept &= (z >= bound) | (z == z.max())
    if s.top_n_sigma > 0:
        bound = z.max() - s.top_n_sigma * z.std()
        margin = min(margin, np.abs(z - bound)[z != z.max()].min(initial=1.0))
        kept &= (z >= bound) | (z == z.max())
    return kept, margin


settings_of_sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 4.0]),
    top_k=st.integers(0, V + 3),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    logit_bias=st.sampled_from([(), ((3, 7.5), (0, -100.0)), {5: 100}]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.5, 1.3]),
)


@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=V, max_size=V),
    st.sampled_from([0, 96, -120]),  # exp overflows or underflows
    st.lists(st.integers(-1, 4), min_size=V, max_size=V),
    st.integers(0, 5000),
    settings_of_sampling,
)
@settings(deadline=None, max_examples=200)
def test_tokens_match_the_float64_reference(logits, added, uses, position, s):
    """uses: number of uses of each token in the answer; -1 for tokens that only the prompt contains."""
    logits, seen, drawn = np.array(logits) + added, np.array(uses) != 0, np.maximum(uses, 0)
    token, logprob = draw(logits, s, seen, position, drawn)
    assert logprob == pytest.approx(math.log(softmax(logits)[token]), abs=3e-5)
    z = penalised(logits, seen, s, drawn)
    if s.temperature == 0:
        close = np.flatnonzero(z.astype(np.float32) == z.astype(np.float32).max())
        assert token == close[0]
        return
    z = z / s.temperature
    kept, margin = kept_tokens(np.round(z, 6), s)  # values such as 1/3 * 3 and 1 are equal in the definition
    assume(margin > 1e-4)
    assert kept[token]
    score = np.where(kept, z + np.asarray(noise_of(s.parameters().key, np.int32(position), np.arange(V))), -np.inf)
    assert score[token] >= score.max() - 1e-4


@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, seed=2**63 + 11),
        Sampling(temperature=2.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.95),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.0, top_n_sigma=0.8),
        Sampling(temperature=1.5, top_k=8, top_p=0.7, min_p=0.05, repetition_penalty=1.5),
    ],
)
def test_draws_follow_the_filtered_distribution(s):
    logits = np.linspace(-2, 2, V).astype(np.float32)[np.random.default_rng(0).permutation(V)]
    seen = np.arange(V) % 3 == 0
    n = 40_000
    tokens = np.asarray(many(logits, seen, np.arange(n), s.parameters())[0])
    z = penalised(logits, seen, s) / s.temperature
    kept, _ = kept_tokens(z, s)
    expected = softmax(np.where(kept, z, -np.inf)) * n
    counts = np.bincount(tokens, minlength=V)
    assert not counts[~kept].any()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # mean + 5 standard deviations; the seeds are fixed


@pytest.mark.parametrize(
    "s", [Sampling(), Sampling(temperature=1.0, top_k=4, top_p=0.9, seed=3), Sampling(1.0, min_p=0.2)]
)
def test_masked_tokens_have_no_probability(s):
    logits, mask = np.random.default_rng(2).normal(size=V).astype(np.float32), np.arange(V) % 3 == 1
    masked = jax.jit(jax.vmap(lambda z, n: sample(z, np.zeros(V, bool), n, s.parameters(), None, mask), (None, 0)))
    without = np.where(mask, logits, -1e30).astype(np.float32)
    tokens, logprobs = masked(logits, np.arange(300))
    assert np.array_equal(tokens, many(without, np.zeros(V, bool), np.arange(300), s.parameters())[0])
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[np.asarray(tokens)], atol=1e-5)


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = np.zeros(V)
    logits[[7, 3, 20]] = 1
    assert draw(logits, Sampling(top_k=1, top_p=0.1, min_p=1.0, seed=9))[0] == 3
    assert draw(np.zeros(V), Sampling())[0] == 0


def test_equal_logits_are_kept_together():
    logits = np.zeros(V)
    logits[:6] = 2
    for s in (
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=0.01),
        Sampling(temperature=1.0, min_p=1.0),
    ):
        tokens = np.asarray(many(logits.astype(np.float32), np.zeros(V, bool), np.arange(500), s.parameters())[0])
        assert set(tokens.tolist()) == set(range(6))


ONE = np.float32(1)


@pytest.mark.parametrize(
    "pair, kept",
    [
        ((0.0, -0.0), {2, 5}),
        ((0.0, 0.5), {5}),
        ((-0.5, 0.0), {5}),
        ((ONE, np.nextafter(ONE, 2)), {5}),
        ((np.nextafter(ONE, 0), ONE), {5}),
    ],  # odd and even bits
    ids=str,
)
def test_zeros_of_both_signs_are_equal_and_neighbours_are_not(pair, kept):
    logits = np.full(V, -9, np.float32)
    logits[[2, 5]] = pair
    tokens = many(logits, np.zeros(V, bool), np.arange(200), Sampling(temperature=1.0, top_k=1).parameters())[0]
    assert set(np.asarray(tokens).tolist()) == kept


def test_logits_in_16_bits_are_computed_in_float32():
    logits = np.linspace(-2, 2, V).astype("bfloat16")
    token, logprob = jitted(logits, np.ones(V, bool), np.int32(3), Sampling(repetition_penalty=1.3).parameters())
    assert (int(token), logprob.dtype) == (V - 1, np.float32)
    assert float(logprob) == pytest.approx(math.log(softmax(logits.astype(np.float64))[V - 1]), abs=1e-6)


def test_top_logprobs_use_raw_logits_and_order_equals_by_id():
    logits = np.full(V, -3.3).astype("bfloat16")
    logits[[2, 5, 9]] = -0.0, 0.0, 1.0
    tokens, logprobs = jax.jit(top_logprobs, static_argnums=1)(logits, 4)
    assert np.asarray(tokens).tolist() == [9, 2, 5, 0]
    np.testing.assert_allclose(logprobs, np.log(softmax(logits.astype(np.float64)))[np.asarray(tokens)], atol=1e-6)


def test_parameters_hold_the_seed_in_two_words():
    parameters = Sampling(seed=0x0123456789ABCDEF, top_k=2**40).parameters()
    assert parameters.key.tolist() == [0x89ABCDEF, 0x01234567] and parameters.key.dtype == np.uint32
    assert parameters.top_k == 2**31 - 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=1e-6),
        Sampling(temperature=1e6, top_p=1e-30, repetition_penalty=1e-6),
        Sampling(temperature=1e-6, top_k=3, top_p=0.999999, repetition_penalty=1e6),
        Sampling(temperature=1.0, top_k=2**40, min_p=1e-40),
        Sampling(temperature=1.0, top_p=0.99999999999),
    ],
)
def test_extreme_values_give_a_token(s, scale):
    logits = np.random.default_rng(1).normal(size=V) * scale
    token, logprob = draw(logits, s, np.ones(V, bool))
    assert 0 <= token < V and math.isfinite(logprob)
    if s.temperature == 1e-6 and scale > 1 and s.repetition_penalty == 1:
        assert token == logits.argmax()


def test_settings_share_one_program():
    before = jitted._cache_size()
    for s in (
        Sampling(),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=1.0, top_p=0.5, min_p=0.1, seed=2**64 - 1),
    ):
        draw(np.zeros(V), s)
    assert jitted._cache_size() <= before + 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", 1e-9),
        ("temperature", math.inf),
        ("temperature", 2e6),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_n_sigma", -0.5),
        ("top_n_sigma", 2e6),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 2e6),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -3),
        ("frequency_penalty", math.nan),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", 5),
    ],
)
def test_bad_values_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} = .*: give"):
        Sampling(**{name: value})


def test_numpy_scalars_are_accepted():
    found = Sampling(temperature=1, top_k=np.int64(4), top_p=np.float32(0.5))
    assert found == Sampling(temperature=1.0, top_k=4, top_p=0.5)
    kinds = [float, int, float, float, float, int, float, float, tuple, float]
    assert [type(value) for value in dataclasses.astuple(found)] == kinds


def test_defaults_are_greedy_and_change_no_logit():
    assert dataclasses.astuple(Sampling()) == (0.0, 0, 1.0, 0.0, 1.0, 0, 0.0, 0.0, (), 0.0)


def test_records_leave_out_later_settings_without_effect():
    assert [*Sampling().record()] == ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"]
    made = Sampling(seed=3, logit_bias={3: 1}, presence_penalty=1)
    assert made.record()["logit_bias"] == ((3, 1.0),) and Sampling(**made.record()) == made


def test_biases_are_pairs_or_a_mapping():
    pairs = Sampling(logit_bias={3: 1, np.int64(5): -100}).logit_bias
    assert pairs == ((3, 1.0), (5, -100.0)) == Sampling(logit_bias=[[3, 1], [5, -100]]).logit_bias
    for wrong, message in (
        ({3: 101}, r"logit_bias\[3\] = 101: give a number from -100 to 100"),
        ([(3, 1), (3, 2)], "has a token id twice"),
        (dict.fromkeys(range(1025), 1), "has 1025 entries: give at most 1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            Sampling(logit_bias=wrong)
    with pytest.raises(ConfigError, match="logit_bias = 24: give token ids from 0 to 23"):
        Sampling(logit_bias={V: 1}).adjustments(V)
