"""Mixtures: every block has exact shares, and the order is a pure function of seed and row."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.train.data.mixture import BLOCK, Mixture, apportion

WEIGHTS = st.lists(st.one_of(st.integers(1, 10**13), st.floats(1e-3, 1e3)), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(1, 1000))
def test_apportion_gives_largest_remainders(weights, seats):
    counts = apportion(weights, seats)
    exact = [Fraction(weight) * seats / sum(map(Fraction, weights)) for weight in weights]
    assert counts.sum() == seats and all(
        0 <= count - share.__floor__() <= 1 for count, share in zip(counts.tolist(), exact, strict=True)
    )
    up = [share % 1 for count, share in zip(counts.tolist(), exact, strict=True) if count > share.__floor__()]
    down = [share % 1 for count, share in zip(counts.tolist(), exact, strict=True) if count == share.__floor__()]
    assert not up or min(up) >= max(down, default=0)


def test_apportion_gives_known_values():
    assert apportion([1, 1, 1], 16).tolist() == [6, 5, 5]
    assert apportion([0.5, 0.3, 0.2], 10).tolist() == [5, 3, 2]
    assert apportion([47000, 16000, 15800, 12000, 6100, 3100], 10).tolist() == [
        5,
        2,
        1,
        1,
        1,
        0,
    ]  # Hare quota, a standard example


@settings(deadline=None, max_examples=20)
@given(WEIGHTS, st.integers(0, 2**32), st.integers(0, 3), st.integers(0, BLOCK))
def test_rows_before_and_places_agree_with_counting(weights, seed, block, within):
    mixture = Mixture(weights, seed)
    end = block * BLOCK + within
    places = [mixture.place(row) for row in range(block * BLOCK, (block + 1) * BLOCK)]
    for source, count in enumerate(mixture.counts.tolist()):
        assert [at for found, at in places if found == source] == list(range(block * count, (block + 1) * count))
        assert mixture.rows_before(end)[source] == block * count + sum(found == source for found, _ in places[:within])


def test_orders_of_blocks_and_seeds_differ_and_look_random():
    def sources(seed, block):
        mixture = Mixture([3, 1], seed)
        return np.array([mixture.place(block * BLOCK + i)[0] for i in range(BLOCK)])

    orders = [sources(seed, block) for seed in (0, 1) for block in (0, 1)]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.04  # 5 deviations
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.04


def test_order_has_known_values():
    """If these values change, resumed runs read other rows."""
    mixture = Mixture([0.5, 0.3, 0.2], 42)
    assert [mixture.place(row) for row in (0, 1, 2, 3, BLOCK, BLOCK + 1, 10**20)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 3277),
        (1, 4915),
        (1, 29998779296875000000),
    ]


@pytest.mark.parametrize("seed", [0, 2**70, -1])
def test_any_seed_is_accepted(seed):
    assert sum(Mixture([1, 2], seed).rows_before(BLOCK + 7)) == BLOCK + 7
