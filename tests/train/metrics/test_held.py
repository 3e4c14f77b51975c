"""Statistics of bf12 during training: the share of weights that are exceptions."""

import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.formats import bf12_exceptions
from laneformer.train.metrics.held import Bf12Statistic
from tests.support import small


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"lm_head_type": "lane"}], ids=str)
def test_shares_match_the_exceptions_of_the_format(changes):
    config = small.make_config(num_hidden_layers=2, **changes)
    weights = small.make_weights(config)
    path = "layers.1.feed_forward.w2"
    weights[path] = np.resize(np.exp2(np.arange(-60, 60, dtype=np.float32)), weights[path].shape)
    statistic = Bf12Statistic(config)
    assert len(statistic.groups) == 2 * 4 + 1
    found = statistic({path: jnp.asarray(weight) for path, weight in weights.items()})
    rounded = {path: np.asarray(weight, jnp.bfloat16).view(np.uint16).reshape(-1) for path, weight in weights.items()}
    groups = [np.concatenate([rounded[path] for path in group]) for group in statistic.groups]
    counts, sizes = [bf12_exceptions(bits) for bits in groups], [len(bits) for bits in groups]
    assert found["exceptions"] == pytest.approx(sum(counts) / sum(sizes)) and found["left"] >= 1
    assert found["most"] == pytest.approx(counts[-2] / sizes[-2]) and found["most"] > 0.5
