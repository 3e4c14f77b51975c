"""A shape to compare on besides the models of configs/: `--shape scripts.peers.shapes:quarter_billion`."""

from laneformer.config import ModelConfig


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
