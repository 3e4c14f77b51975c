"""Counts of attention: the mean number of keys per query, and the values that a token writes and reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer.blocks.attention import Attention, keys_seen
from tests.support import tiny


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_keys_seen_equals_the_mean_of_the_mask(length, window):
    query, key = np.arange(length)[:, None], np.arange(length)
    mask = (key <= query) & (key > query - (window or length))
    assert keys_seen(length, window) == pytest.approx(mask.sum() / length)


def test_state_is_keys_and_values_of_one_lane():
    options = tiny.config(sliding_window=3, sliding_window_n_layers=1).layers[0].attention
    keys, values = Attention.state(options)
    assert (keys.name, values.name, keys.shape, keys.window) == ("keys", "values", (1, 4), 3)
    # 4 lanes of one head of 4 channels: one position is written, and at most the other two of the window are read.
    assert [keys.values_per_token(context) for context in (0, 1, 2, 9)] == [16, 32, 48, 48]
