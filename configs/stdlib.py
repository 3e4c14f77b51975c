"""The recipe of `make run`: a small 8-lane Laneformer on Python's standard library, minutes on two CPU cores."""

from pathlib import Path

from laneformer.config import ModelConfig
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def stdlib() -> TrainConfig:
    """6 layers in 8 lanes with the published layout (delay 2), on 8 devices made of the CPU."""
    return TrainConfig(
        name="stdlib",
        steps=600,
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=256,
            num_lanes=8,
            layout="laneformer",
            broadcast_delay=2,
            bos_token_id=0,
            eos_token_id=(0,),
        ),
        data=DataConfig(path=(Path("data/stdlib"),), sequence_length=256, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50, decay_fraction=0.3),
        mesh=MeshConfig(host_devices=8),
    )
