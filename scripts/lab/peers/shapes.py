"""Shapes to compare, in addition to the models of configs/: `--shape scripts.peers.shapes:quarter_billion`."""

from laneformer.config import ModelConfig
from laneformer.recipes.models import DEEPSEEK_V3_4, EXPERTS, GPT_OSS_20B, PackedModel, packed


def quarter_billion() -> ModelConfig:
    """0.25B parameters, 443 MB of bfloat16 weights per token: far larger than caches, and quick to load."""
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        num_lanes=8,
        layout="laneformer",
        broadcast_delay=2,
    )


def gpt_oss_third() -> PackedModel:
    """A third of the layers and vocabulary of gpt-oss-20b, so that two engines fit in 24 GB. The shares of attention,
    experts and head in the bytes of a token are those of the whole model.
    """
    config = GPT_OSS_20B.replace(
        num_hidden_layers=8, swa_layers=tuple(range(0, 8, 2)), vocab_size=GPT_OSS_20B.vocab_size // 3, eos_token_id=()
    )
    return packed(config, mxfp4=EXPERTS)


def deepseek_v3_bfloat16() -> ModelConfig:
    """Three layers of recipe deepseek_v3_4 in bfloat16, since llama.cpp has no FP8: 6.1 GB of weights."""
    return DEEPSEEK_V3_4.replace(num_hidden_layers=3)
