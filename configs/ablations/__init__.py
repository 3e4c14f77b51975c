"""Grids: functions that return a complete ablation. `python -m train.ablate NAME` looks them up here."""

from collections.abc import Callable

from configs.ablations.ladder import ladder_1p2b, ladder_350m
from configs.ablations.small import web_30m, web_120m
from configs.ablations.tiny import tiny
from train.ablate.grid import Grid

RECIPES: dict[str, Callable[[], Grid]] = {
    "tiny": tiny,
    "30m": web_30m,
    "120m": web_120m,
    "350m": ladder_350m,
    "1p2b": ladder_1p2b,
}
