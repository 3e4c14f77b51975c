"""Compressed attention of the model in JAX through a cache, against the float64 interpreter of its ops; whole texts are
compared with a reference model in tests/laneformer/hf/test_deepseek_v4.py.
"""

import jax
import numpy as np

from laneformer import Laneformer
from tests.support import small, tiny
from tests.support.decode_cases import COMPRESSED


def test_pieces_of_a_text_have_the_logits_of_the_whole():
    """Pieces of five tokens end in the middle of windows of four and of three, and the entries overlap."""
    config = small.make_config(**COMPRESSED["compressed attention, several streams"])
    weights, ids = small.make_weights(config), small.prompt_of(config, 15)
    model = Laneformer(config, {path: jax.device_put(weight) for path, weight in weights.items()})
    found = tiny.in_pieces(model, np.array([ids], np.int32), (5, 5, 5), capacity=16)
    assert tiny.difference(found[0], small.interpreted_logits(config, weights, ids)) < 1e-5
