"""FLOPs by formula against XLA's count and figures computed by hand."""

import jax
import pytest

from laneformer import Laneformer, ModelConfig, parameter_count
from laneformer.train.flops import forward_flops_per_token, model_flops_utilization, train_flops_per_token
from laneformer.weights import attention_flops_per_token, matmul_parameters


def model(**changes) -> ModelConfig:
    return ModelConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "num_lanes": 2,
            "layout": "tp",
            **changes,
        }
    )


def test_published_model_has_flops_by_hand():
    """The count has the head and 15 layers: q and o with 32 heads, k and v with 16, and 3 matrices of the MLP.

    10 layers have a sliding window.
    """
    config = ModelConfig(
        vocab_size=32_000,
        hidden_size=3072,
        intermediate_size=12_288,
        num_hidden_layers=15,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_lanes=8,
        sliding_window=512,
        sliding_window_n_layers=10,
    )
    layer = 2 * 3072 * 3072 + 2 * 3072 * 1536 + 3 * 3072 * 12_288
    assert matmul_parameters(config) == 15 * layer + 32_000 * 3072
    keys = 5 * 4097 / 2 + 10 * (512 - 512 * 511 / (2 * 4096))
    assert attention_flops_per_token(config, 4096) == pytest.approx(4 * 3072 * keys)
    assert train_flops_per_token(config, 4096) == pytest.approx(6 * (15 * layer + 32_000 * 3072) + 12 * 3072 * keys)


def test_only_products_count():
    """Embeddings, norms and biases do not count. The head counts even if it is the embedding table."""
    config, separate = model(qkv_bias=True, qk_norm=True, tie_word_embeddings=True), model(qkv_bias=True, qk_norm=True)
    assert matmul_parameters(config) == matmul_parameters(separate)
    small = 2 * (2 * 256 + 2 * 32 + 256 + 2 * 128) + 256  # norms, norms of q and k, biases, the final norm
    assert parameter_count(config) - small == matmul_parameters(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 1, "tie_word_embeddings": True, "num_key_value_heads": 8},
        {"num_hidden_layers": 1, "lm_head_type": "lane"},
        {"lm_head_type": "vocab_parallel", "sliding_window": 4, "sliding_window_n_layers": 1, "intermediate_size": 768},
    ],
)
def test_flops_match_the_count_of_xla(changes):
    """XLA counts every operation of the unrolled program. Most are those of products: at least 6 x (4 D D + 3 D F) per
    token and layer.

    Beyond the formula, XLA counts all s keys instead of the (s + 1)/2 in the mask: 12 D (s - 1)/2 per layer. The
    gradient of the embedding and the softmax of the loss take about 10 V. Elementwise operations on the activations of
    a layer, forward and backward, are about 30 on each of 8 D + 3 F numbers. Together these are below 6 % here. A
    missing or doubled matrix would change the count by at least 10 %.
    """
    config, s = model(**changes), 16

    def loss(weights, ids):
        return jax.nn.logsumexp(Laneformer(config, weights)(ids), -1).mean()

    weights = jax.eval_shape(lambda: Laneformer.init(config).weights())
    compiled = jax.jit(jax.grad(loss)).lower(weights, jax.ShapeDtypeStruct((4, s), "int32")).compile()
    counted = compiled.cost_analysis()["flops"] / (4 * s)
    expected = train_flops_per_token(config, s)
    d, f, n = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    extra = n * (6 * d * (s - 1) + 30 * (8 * d + 3 * f)) + 10 * config.vocab_size * config.num_lanes
    assert expected * 0.999 < counted < expected + extra
    assert extra < 0.06 * expected


def test_mfu_is_the_share_of_the_peak():
    config = model()
    flops = 3 * forward_flops_per_token(config, 64)
    assert model_flops_utilization(
        config, 64, tokens_per_second=1e6, devices=4, peak_flops=flops * 1e6
    ) == pytest.approx(1 / 4)
