"""Laneformers with gated DeltaNet."""

import dataclasses

from laneformer.recipes.models import DELTA_TINY
from laneformer.recipes.stdlib import stdlib
from laneformer.train.config import TrainConfig


def delta_tiny() -> TrainConfig:
    """stdlib with gated DeltaNet in two of three layers, on a CPU.

    Needs data/stdlib from `make run`.
    """
    return dataclasses.replace(stdlib(), name="delta_tiny", steps=300, model=DELTA_TINY)
