"""What an ablation compares: variants of one model, each with several seeds, trained on the same tokens in the same
order.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from infer.roofline.sweeps import layouts_of
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from train.config import TrainConfig, recorded

CELLS = "cells"  # of a grid's folder: one training run each
# Fields of a run that change neither its losses nor what is measured of them.
_FREE = ("run", "name", "log_every", "save_every", "keep", "keep_every")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to cut and join the model: a layout, a number of lanes, a knob."""

    name: str
    model: dict[str, object]
    """Fields of the model that it changes, with their values."""


def variant(layout: str, name: str = "", **changes) -> Variant:
    """A layout with further fields of the model changed, named after them unless a name is given."""
    words = [f"{value} lanes" if field == "num_lanes" else f"{field}={value}" for field, value in changes.items()]
    return Variant(name=name or ", ".join([layout, *words]), model={"layout": layout, **changes})


def cross(layouts: Iterable[str], **axes: Iterable) -> tuple[Variant, ...]:
    """Every layout with every combination of values: cross(["tp", "dtp(4)"], num_lanes=(4, 8))."""
    found = [{}]
    for name, given in axes.items():
        values = tuple(given)
        found = [{**changes, name: value} for changes in found for value in values]
    return tuple(variant(layout, **changes) for layout in layouts for changes in found)


def every_layout(model: ModelConfig, **axes: Iterable) -> tuple[Variant, ...]:
    """Every row of laneformer/layout.py; those that take arguments with the first of a few that fit the model."""
    return cross([name for name in layouts_of(model.replace(layout="tp"))], **axes)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An ablation: `python -m train.ablate RECIPE` trains variants x seeds and reports."""

    name: str
    """Names the grid, and its folder unless --run says otherwise."""
    base: TrainConfig
    """The training run that all share: data, order, tokens, optimizer. Its model is what the variants change."""
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the first weights, which are the same for all variants of a seed where their shapes are. The data keep the
    base's seed.
    """
    reference: str = "tp"
    """The variant that the others are compared with."""
    projected: ModelConfig
    """The model whose speed with each variant's layout and lanes the roofline projects."""
    probe: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Variant -> delays in modules: after training, its loss when one layer alone is exchanged so late
    (train/ablate/probe.py).
    """
    minutes: float | None = None
    """What a cell took on the hardware that the recipe names; None: not known."""

    def __post_init__(self):
        names = [v.name for v in self.variants]
        if not names or not self.seeds:
            raise ConfigError(f"grid {self.name}: it needs at least one variant and one seed")
        for what, given in (("variants", names), ("folders", list(map(_slug, names))), ("seeds", self.seeds)):
            if twice := next((x for x in given if given.count(x) > 1), None):
                raise ConfigError(f"grid {self.name}: two {what} are called {twice!r}; give each a name of its own")
        for name in (self.reference, *self.probe):
            if name not in names:
                raise ConfigError(f"grid {self.name}: {name!r} is none of its variants, which are {', '.join(names)}")
        _ = self.cells

    @cached_property
    def cells(self) -> tuple["Cell", ...]:
        """Every run, the first seed of all variants first: a grid that is not done yet compares most of them. Raises
        ConfigError.
        """
        return tuple(Cell(self, v, seed) for seed in self.seeds for v in self.variants)

    @property
    def folder(self) -> Path:
        """Where its runs and its report lie."""
        return self.base.run or Path("runs") / "ablations" / self.name

    def model(self, v: Variant) -> ModelConfig:
        """The model that the variant trains. Raises ConfigError."""
        return _changed(self.base.model, v)

    def projected_model(self, v: Variant) -> ModelConfig:
        """The large model with the variant's layout. Raises ConfigError."""
        return _changed(self.projected, v)


class Cell:
    """One variant with one seed: an ordinary training run in a folder of its own."""

    def __init__(self, grid: Grid, v: Variant, seed: int):
        self.grid, self.variant, self.seed = grid, v, seed
        config = dataclasses.replace(grid.base, name=self.name, model=grid.model(v), seed=seed)
        settings = {name: value for name, value in recorded(config).items() if name not in _FREE}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        # The settings are in the folder's name: a grid that changes finds again what it shares with the one before.
        self.folder = grid.folder / CELLS / f"{_slug(v.name)}-seed{seed}-{digest}"
        self.config = dataclasses.replace(config, run=self.folder)

    @property
    def name(self) -> str:
        return f"{self.variant.name} #{self.seed}"

    @property
    def probe(self) -> tuple[int, ...]:
        """The delays of `Grid.probe`; only the first seed is probed."""
        return self.grid.probe.get(self.variant.name, ()) if self.seed == self.grid.seeds[0] else ()


def _changed(model: ModelConfig, v: Variant) -> ModelConfig:
    try:
        return model.replace(**v.model)
    except TypeError:
        known = {f.name for f in dataclasses.fields(ModelConfig)}
        raise ConfigError(
            f"variant {v.name!r}: a model has no field {', '.join(sorted(v.model.keys() - known))}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"variant {v.name!r}: {error}") from None


def _slug(name: str) -> str:
    """The name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
