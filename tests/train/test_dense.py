"""The dense Flax model computes the logits of a Laneformer with one lane, so the benchmark compares equal work."""

import jax
import numpy as np
import pytest
from flax import nnx

from laneformer import Laneformer, ModelConfig
from laneformer.train.dense import DenseModel, dense_step

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    num_lanes=1,
    layout="tp",
)
IDS = np.random.default_rng(0).integers(0, 64, (2, 17), np.int32)


def as_laneformer(dense: DenseModel) -> Laneformer:
    """The Laneformer with the same weights.

    Matrices are [l, out, in] instead of Flax's [in, out]; rotated rows of q and k are in pairs instead of halves.
    """

    def paired(kernel: np.ndarray) -> np.ndarray:
        heads = kernel.T.reshape(-1, 2, CONFIG.head_size // 2, CONFIG.hidden_size)
        return heads.swapaxes(1, 2).reshape(-1, CONFIG.hidden_size)

    weights = {
        "tok_embeddings": np.asarray(dense.embed.embedding),
        "norm": np.asarray(dense.norm.scale),
        "lm_head": np.asarray(dense.head.kernel).T,
    }
    for n, block in enumerate(dense.blocks):
        named = {
            "attention.wq": block.q,
            "attention.wk": block.k,
            "attention.wv": block.v,
            "attention.wo": block.o,
            "feed_forward.w1": block.gate,
            "feed_forward.w3": block.up,
            "feed_forward.w2": block.down,
        }
        for name, linear in named.items():
            kernel = np.asarray(linear.kernel)
            weights[f"layers.{n}.{name}"] = (paired(kernel) if name in ("attention.wq", "attention.wk") else kernel.T)[
                None
            ]
        weights |= {
            f"layers.{n}.attention_norm": np.asarray(block.attention_norm.scale),
            f"layers.{n}.ffn_norm": np.asarray(block.mlp_norm.scale),
        }
    return Laneformer(CONFIG, jax.device_put(weights))


def test_logits_equal_those_of_one_lane():
    dense = nnx.jit(lambda: DenseModel(CONFIG, "float32", nnx.Rngs(0)))()
    with jax.default_matmul_precision("highest"):
        expected = nnx.jit(lambda model: model(IDS))(dense)
    np.testing.assert_allclose(as_laneformer(dense)(IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dense_step_learns():
    step = dense_step(CONFIG, "float32", learning_rate=1e-2, clip_norm=1.0)
    losses = [float(step(IDS)) for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(64), abs=0.3) and losses[-1] < 0.5 * losses[0]
