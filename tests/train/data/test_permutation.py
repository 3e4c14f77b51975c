"""The keyed permutation is a bijection, looks random, and has the same values in every version of the project."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.train.data.permutation import mix, permute


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 10**6))
def test_permute_is_a_bijection(size, seed, epoch):
    assert np.sort(permute(np.arange(size), size, seed, epoch)).tolist() == list(range(size))


@given(st.integers(2, 2**61), st.integers(0, 2**32), st.data())
def test_permute_of_large_ranges_keeps_range_shape_and_distinctness(size, seed, data):
    index = np.array(
        data.draw(st.lists(st.integers(0, size - 1), min_size=4, max_size=4, unique=True)) if size > 4 else [0, 1]
    )
    image = permute(index, size, seed, 0)
    assert image.dtype == np.int64 and image.min() >= 0 and image.max() < size
    assert len(set(image.tolist())) == len(index)
    assert (permute(index[:, None], size, seed, 0)[:, 0] == image).all()
    assert permute(index[:1], size, seed, 0)[0] == image[0]


def test_permute_raises_outside_its_range():
    with pytest.raises(IndexError):
        permute(np.array([10]), 10, 0, 0)
    assert permute(np.array([], np.int64), 10, 0, 0).tolist() == []


def test_order_has_known_values():
    """If these values change, resumed runs read other rows."""
    assert [hex(mix(x)) for x in (1, 2**63)] == ["0x5692161d100b05e5", "0x25c26ea579cea98a"]
    assert permute(np.arange(12), 12, 0, 0).tolist() == [3, 1, 11, 0, 5, 7, 4, 6, 9, 8, 10, 2]
    assert permute(np.arange(3), 10**12, 42, 7).tolist() == [257529644458, 604013950505, 133498005024]


def test_permutations_look_random():
    """Over many keys, an index has each image about equally often. With one key, neighbours rarely stay neighbours."""
    size, keys = 13, 4000
    images = np.stack([permute(np.arange(size), size, seed, seed % 3) for seed in range(keys)])
    counts = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    chi2 = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert chi2 < 230  # 144 degrees of freedom: mean 144, deviation 17
    steps = np.diff(permute(np.arange(10**5), 10**5, 0, 0))
    assert (np.abs(steps) == 1).sum() < 20
    assert abs(np.corrcoef(np.arange(10**5), permute(np.arange(10**5), 10**5, 1, 0))[0, 1]) < 0.02
