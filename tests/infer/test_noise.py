"""The sampling noise against the known answers of the Random123 library and two independent implementations."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32 as jax_threefry

from laneformer.infer.noise import gumbel, threefry_2x32

WORD = st.integers(0, 2**32 - 1)
KNOWN = [  # counter, key, output: the lines "threefry2x32 20" of Random123's kat_vectors
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def threefry(key, counter):
    """Threefry-2x32 with Python integers."""
    mask = 2**32 - 1
    k = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    a, b = (counter[0] + k[0]) & mask, (counter[1] + k[1]) & mask
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    for n in range(20):
        a = (a + b) & mask
        r = rotations[n % 8]
        b = (b << r & mask | b >> 32 - r) ^ a
        if n % 4 == 3:
            j = n // 4 + 1
            a, b = (a + k[j % 3]) & mask, (b + k[(j + 1) % 3] + j) & mask
    return a, b


def words(key, counter):
    return tuple(int(word) for word in threefry_2x32([np.uint32(w) for w in key], [np.uint32(w) for w in counter]))


def test_words_match_known_answers():
    for counter, key, output in KNOWN:
        assert words(key, counter) == output
        assert threefry(key, counter) == output


@given(st.tuples(WORD, WORD), st.tuples(WORD, WORD))
@settings(deadline=None, max_examples=50)
def test_words_match_independent_implementations(key, counter):
    assert words(key, counter) == threefry(key, counter)
    assert words(key, counter) == tuple(
        int(w) for w in jax_threefry(np.array(key, np.uint32), np.array(counter, np.uint32))
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
@settings(deadline=None, max_examples=20)
def test_noise_matches_its_definition(seed, position):
    tokens = np.array([0, 1, 2, 31999, 151935], np.int32)
    key = np.array([seed % 2**32, seed >> 32], np.uint32)
    expected = []
    for token in tokens.tolist():
        word, _ = threefry((seed % 2**32, seed >> 32), (position, token))
        expected.append(-math.log(-math.log(((word >> 9) + 0.5) / 2**23)))
    np.testing.assert_allclose(jax.jit(gumbel)(key, np.int32(position), tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("position", "token", "word", "noise"), [(15, 178725, 0, -2.8115), (26, 90565, 2**23 - 1, 16.6355)]
)
def test_noise_of_the_smallest_and_the_largest_word_is_finite(position, token, word, noise):
    key = np.array([7, 0], np.uint32)
    assert words(key, (position, token))[0] >> 9 == word
    assert float(jax.jit(gumbel)(key, np.int32(position), np.int32(token))) == pytest.approx(noise, abs=1e-3)


def test_noise_is_gumbel_distributed():
    noise = np.asarray(jax.jit(gumbel)(np.array([7, 0], np.uint32), np.int32(3), np.arange(200_000)))
    assert noise.min() >= -2.8116 and noise.max() <= 16.636
    for x in (-1.0, 0.0, 1.0, 3.0):  # the distribution function, to five standard deviations of a mean of 200,000
        assert abs((noise < x).mean() - math.exp(-math.exp(-x))) < 5 * 0.5 / math.sqrt(200_000)
