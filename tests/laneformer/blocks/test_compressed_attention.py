"""Compressed attention of the model in JAX through a cache, against the float64 interpreter of its ops; whole texts are
compared with a reference model in tests/laneformer/hf/test_deepseek_v4.py.
"""

import jax.numpy as jnp
import numpy as np

from laneformer import Laneformer
from tests.support import small, tiny
from tests.support.decode_cases import COMPRESSED


def test_pieces_of_a_text_have_the_logits_of_the_whole():
    """Pieces of five tokens end in the middle of windows of four and of three, and the entries overlap."""
    config = small.make_config(**COMPRESSED["compressed attention, several streams"])
    weights, ids = small.make_weights(config), small.prompt_of(config, 15)
    model = Laneformer(config, {path: jnp.asarray(weight) for path, weight in weights.items()})
    cache, found = model.make_cache(1, 16), []
    for start in range(0, 15, 5):
        logits, cache = model.extend(np.array([ids[start : start + 5]], np.int32), cache)
        found.append(np.asarray(logits[0]))
    assert tiny.difference(np.concatenate(found), small.interpreted_logits(config, weights, ids)) < 1e-5
