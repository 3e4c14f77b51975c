"""Laneformers with gated DeltaNet."""

import dataclasses

from configs.models import DELTA_TINY
from configs.stdlib import stdlib
from train.config import TrainConfig


def delta_tiny() -> TrainConfig:
    """stdlib with gated DeltaNet in two of three layers, on a CPU.

    Needs data/stdlib from `make run`.
    """
    return dataclasses.replace(stdlib(), name="delta_tiny", steps=300, model=DELTA_TINY)
