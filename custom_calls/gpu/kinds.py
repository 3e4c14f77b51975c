"""Kinds of modules, for each of which the GPU kernel contains code once, and the tilings of their products."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import MOST_UNITS, Bf12, Plain
from laneformer.custom_calls.gpu.ops.kernel import OpKernel, Stage
from laneformer.custom_calls.gpu.tiling import Machine, Tiling, tile
from laneformer.custom_calls.plan import Dtype
from laneformer.ops import Op, Weight


@dataclass(frozen=True)
class Kind:
    """Modules whose ops differ only in their weights, windows and tables of experts."""

    stages: tuple[Stage, ...]
    """Stages of the module in the first of `layers`."""
    tilings: tuple[Tiling | None, ...]
    """Tiling of each stage; None for a stage that multiplies no matrix."""
    layers: tuple[int, ...]
    """Numbers of the layers with a module of this kind."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The op of each stage."""
        return tuple(stage.op for stage in self.stages)

    @property
    def lines(self) -> int:
        """Lines that a warp reads for a module, without those of experts."""
        return self.lines_before(len(self.ops))

    def lines_before(self, op: int) -> int:
        """Lines that a warp reads before the op of that number, without those of experts."""
        return sum(tiling.all_lines for tiling in self.tilings[:op] if tiling and not tiling.pieces)

    @property
    def of_experts(self) -> list[tuple[int, Tiling]]:
        """Number and tiling of each op that is a product with experts."""
        return [(op, tiling) for op, tiling in enumerate(self.tilings) if tiling and tiling.pieces]

    @property
    def stored_lines(self) -> int:
        """Lines in a warp's memory for all experts of a module."""
        return sum(tiling.stored_lines for _, tiling in self.of_experts)


def signature(value):
    """A key that is equal for ops or modules that share code: without the weights' names, and without what
    OpKernel.signature leaves out.
    """
    if isinstance(value, Weight):
        return value.shape, value.lane_sharded, value.experts
    if isinstance(value, OpKernel):
        return type(value), signature(value.signature())
    if dataclasses.is_dataclass(value):
        return type(value), *(signature(getattr(value, field.name)) for field in dataclasses.fields(value))
    return tuple(map(signature, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Tiler:
    """Chooses the tilings of products for a lane's CTAs."""

    machine: Machine
    ctas: int
    hidden: int
    dtype: Dtype
    """Dtype of weights that are in neither `bf12` nor `codes`."""
    bf12: Collection[str]
    """As in Layout, like `codes`."""
    codes: Mapping[str, Codes]

    def product(
        self, path: str, all_rows: int, columns: int, ctas: int, unit: int = 1, machine: Machine | None = None
    ) -> Tiling:
        """The tiling of a product in the format of its matrix `path`. unit: rows that must stay together. machine: the
        device with another number of warps, for experts.
        """
        if path in self.codes:
            format = replace(self.codes[path], selector_bits=self.machine.selector_bits)
            tilings = (tile(all_rows, columns, ctas, machine or self.machine, way, unit) for way in format.ways)
            return min(tilings, key=lambda tiling: tiling.cost)
        if path in self.bf12 and machine is None:
            tiling = tile(all_rows, columns, ctas, self.machine, Bf12.of(self.machine.selector_bits), unit)
            if 0 < tiling.units <= MOST_UNITS:
                return tiling
        return tile(all_rows, columns, ctas, machine or self.machine, Plain(self.dtype), unit)

    def in_codes(self, path: str) -> bool:
        """Whether a matrix is quantized."""
        return path in self.codes

    def stage(self, stage: Stage) -> Tiling | None:
        """The tiling of a stage; None if it multiplies no matrix."""
        return stage.kernel.tiling(stage, self)
