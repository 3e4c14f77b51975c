"""A shape to compare on besides the recipes of configs/: `--shape scripts.peers.shapes:quarter_billion`."""

from pathlib import Path

from laneformer.config import ModelConfig
from train.config import DataConfig, TrainConfig


def quarter_billion() -> TrainConfig:
    """0.25B parameters, 443 MB of bfloat16 weights per token: many times what caches hold, and loaded in seconds. Not
    for training.
    """
    return TrainConfig(
        name="quarter_billion",
        model=ModelConfig(
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
        ),
        data=DataConfig(path=(Path("data/stdlib"),), sequence_length=256, batch_size=4),
        steps=1,
    )
