"""The grid of an ablation: variants of one model, each with several seeds, trained on the same tokens in the same
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
from typing import Any, TypeVar

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.infer.roofline.sweeps import layouts_of
from laneformer.train.config import PhaseConfig, TrainConfig, recorded

P = TypeVar("P", bound=PhaseConfig)
CELLS = "cells"  # in a grid's folder: folder with one training run per cell
# Fields of a run that change neither its losses nor its measurements.
_FREE = ("run", "name", "log_every", "save_every", "keep", "keep_every")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One change to the model: a layout, a number of lanes, or another field."""

    name: str
    model: dict[str, Any]
    """Changed fields of the model, with their values."""


def variant(layout: str, name: str = "", **changes) -> Variant:
    """A variant with a layout and further changed fields of the model; named after these by default."""
    words = [f"{value} lanes" if field == "num_lanes" else f"{field}={value}" for field, value in changes.items()]
    return Variant(name=name or ", ".join([layout, *words]), model={"layout": layout, **changes})


def cross(layouts: Iterable[str], **axes: Iterable) -> tuple[Variant, ...]:
    """Variants of every layout with every combination of values: cross(["tp", "dtp(4)"], num_lanes=(4, 8))."""
    found: list[dict[str, Any]] = [{}]
    for name, given in axes.items():
        values = tuple(given)
        found = [{**changes, name: value} for changes in found for value in values]
    return tuple(variant(layout, **changes) for layout in layouts for changes in found)


def every_layout(model: ModelConfig, **axes: Iterable) -> tuple[Variant, ...]:
    """Variants of every layout in laneformer/layout.py that fits the model, with the first arguments that fit."""
    return cross([name for name in layouts_of(model.replace(layout="tp"))], **axes)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An ablation: `python -m train.ablate RECIPE` trains variants x seeds and reports."""

    name: str
    """Name of the grid, and of its folder unless --run is given."""
    base: TrainConfig
    """The training run that all cells share: data, order, tokens, optimizer. Variants change its model."""
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial weights, which are the same for all variants with equal shapes."""
    orders: tuple[int, ...] = ()
    """Seeds of the order of the data: every variant is trained with every seed and every order. By default the base's
    alone.
    """
    reference: str = "tp"
    """The variant that the others are compared with."""
    projected: ModelConfig
    """The model whose speed with each variant's layout and lanes the roofline projects."""
    probe: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Variant -> delays in modules to probe after training, one layer at a time (train/ablate/probe.py)."""
    minutes: float | None = None
    """Minutes per cell on the hardware that the recipe names; None if unknown."""

    def __post_init__(self):
        names = [v.name for v in self.variants]
        if not names or not self.seeds:
            raise ConfigError(f"grid {self.name} has no variants or no seeds; give at least one of each")
        folders = list(map(_slug, names))
        different = {"variants": names, "folders": folders, "seeds": self.seeds, "orders": self.orders}
        for what, given in different.items():
            if twice := next((x for x in given if given.count(x) > 1), None):
                raise ConfigError(f"grid {self.name} has two {what} {twice!r}; make them different")
        for name in (self.reference, *self.probe):
            if name not in names:
                raise ConfigError(f"grid {self.name} has no variant {name!r}; choose {', '.join(names)}")
        _ = self.cells

    @cached_property
    def cells(self) -> tuple["Cell", ...]:
        """All cells, the first seed of every variant first, so that an unfinished grid compares the most variants.

        Raises ConfigError for a variant that does not fit the base.
        """
        orders = self.orders or (None,)
        return tuple(Cell(self, v, seed, order) for seed in self.seeds for order in orders for v in self.variants)

    @property
    def folder(self) -> Path:
        """Folder of the runs and the report."""
        return self.base.run or Path("runs") / "ablations" / self.name

    def model(self, v: Variant) -> ModelConfig:
        """The base's model changed by the variant. Raises ConfigError if the variant does not fit."""
        return _changed(self.base.model, v)

    def projected_model(self, v: Variant) -> ModelConfig:
        """The projected model changed by the variant. Raises ConfigError if the variant does not fit."""
        return _changed(self.projected, v)


class Cell:
    """One variant with one seed and one order of the data: an ordinary training run in its own folder."""

    def __init__(self, grid: Grid, v: Variant, seed: int, order: int | None = None):
        """order: seed of the order of the data; None for the base's."""
        self.grid, self.variant, self.seed, self.order = grid, v, seed, order
        config = dataclasses.replace(grid.base, name=self.name, model=grid.model(v), seed=seed)
        if order is not None:
            then = {name: _in_order(phase, order) for name, phase in config.then.items()}
            config = dataclasses.replace(_in_order(config, order), then=then)
        settings = {name: value for name, value in recorded(config).items() if name not in _FREE}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        of_order = "" if order is None else f"-order{order}"
        # The folder's name has a digest of the settings, so that a changed grid finds the cells that did not change.
        self.folder = grid.folder / CELLS / f"{_slug(v.name)}-seed{seed}{of_order}-{digest}"
        self.config = dataclasses.replace(config, run=self.folder)

    @property
    def name(self) -> str:
        return f"{self.variant.name} #{run_name(self.seed, self.order)}"

    @property
    def probe(self) -> tuple[int, ...]:
        """The delays of `Grid.probe`; only the first seed and order is probed."""
        first = self.seed == self.grid.seeds[0] and self.order in (None, *self.grid.orders[:1])
        return self.grid.probe.get(self.variant.name, ()) if first else ()


def run_name(seed: int, order: int | None) -> str:
    """The name of a run among those of its variant: the seed, as in 2, or the seed and the data's order, as in 2/0."""
    return str(seed) if order is None else f"{seed}/{order}"


def _in_order(phase: P, order: int) -> P:
    return dataclasses.replace(phase, data=dataclasses.replace(phase.data, seed=order))


def _changed(model: ModelConfig, v: Variant) -> ModelConfig:
    try:
        return model.replace(**v.model)
    except TypeError:
        known = {f.name for f in dataclasses.fields(ModelConfig)}
        raise ConfigError(
            f"variant {v.name!r} sets {', '.join(sorted(v.model.keys() - known))}, which a model does not have; use the"
            " fields of ModelConfig"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"variant {v.name!r}: {error}") from None


def _slug(name: str) -> str:
    """The name with _ in place of characters that a folder's name should not have."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
