"""The recipe of `make run`: a small 8-lane Laneformer on Python's standard library, in minutes on two CPU cores."""

import dataclasses
from pathlib import Path

from laneformer.recipes.models import STDLIB
from laneformer.train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig


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


def stdlib_int4() -> TrainConfig:
    """stdlib, then 150 steps with matrices rounded to int4: `python -m scripts.quantize` loses nothing after them."""
    recipe = stdlib()
    # The decay takes the 140 steps after the warm-up.
    optimizer = dataclasses.replace(recipe.optimizer, learning_rate=1e-3, warmup_steps=10, decay_fraction=0.93)
    last = LaterPhase(steps=150, data=recipe.data, optimizer=optimizer, weights="int4")
    return dataclasses.replace(recipe, name="stdlib_int4", then={"int4": last})
