"""Recipes: functions that return a complete TrainConfig. `python -m train NAME` looks them up here."""

from collections.abc import Callable

from configs.laneformer_2b import laneformer_2b
from configs.small import laneformer_120m, laneformer_350m
from configs.stdlib import stdlib
from configs.tiny import tiny
from train.config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    f.__name__: f for f in (stdlib, tiny, laneformer_120m, laneformer_350m, laneformer_2b)
}
