"""The recipe of `make run`: a small 8-lane Laneformer on Python's standard library, in minutes on two CPU cores."""

from pathlib import Path

from configs.models import STDLIB
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def stdlib() -> TrainConfig:
    """6 layers in 8 lanes with the published layout (delay 2), on a CPU split into 8 devices."""
    return TrainConfig(
        name="stdlib",
        steps=600,
        model=STDLIB,
        data=DataConfig(path=(Path("data/stdlib"),), sequence_length=256, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50, decay_fraction=0.3),
        mesh=MeshConfig(host_devices=8),
    )
