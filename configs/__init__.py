"""Recipes: functions that return a complete TrainConfig. `python -m train NAME` looks them up here."""

from collections.abc import Callable

from configs.stdlib import stdlib
from train.config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {f.__name__: f for f in (stdlib,)}
