"""Kinds of modules, for each of which the GPU kernel contains code once, and the tilings of their products."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import MOST_UNITS, Bf12, Plain
from laneformer.custom_calls.gpu.stages import Stage
from laneformer.custom_calls.gpu.supported import Router
from laneformer.custom_calls.gpu.tiling import Machine, Pieces, Tiling, tile
from laneformer.custom_calls.plan import Dtype
from laneformer.ops import Attend, GatherStreams, Op, Product, RootRoute, Weight

MORE_TURNS = 8  # numbers of turns tried for a block-diagonal product, from the fewest on, to divide rows evenly


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
    """A key that is equal for ops or modules that share code: without the weights' names and the size of a window. A
    router with a table of experts gets the key of a router with a correction.
    """
    if isinstance(value, Weight):
        return value.shape, value.lane_sharded, value.experts
    if isinstance(value, RootRoute):
        others = dataclasses.replace(value, matrix=None, norm=None, correction=None, by_token=None)
        chosen = value.correction is not None or value.by_token is not None
        return others, *map(signature, (value.matrix, value.norm, chosen))
    if isinstance(value, Attend) and value.window is not None:
        return signature(dataclasses.replace(value, window=None))
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

    def stage(self, stage: Stage) -> Tiling | None:
        """The tiling of a product, a router or a mixture of streams; None for other ops."""
        op = stage.op
        if isinstance(op, GatherStreams):
            return self.mixture(op)
        if isinstance(op, Router):  # float32, independent of the format of products
            rows = sum(matrix.rows for matrix in stage.matrices)
            return tile(rows, self.hidden, self.ctas, self.machine, Plain(Dtype.float32))
        if not isinstance(op, Product):
            return None
        path, unit = op.matrices[0].weight.path, 2 if op.gated else 1
        if op.blocks:
            return self._blocks(path, op)
        if not op.chosen:
            return self.product(path, op.rows, op.columns, self.ctas, unit)
        return self._experts(path, op, unit)

    def mixture(self, op: GatherStreams) -> Tiling:
        """The tiling of a mixture of streams, as `by_ctas` packs it. A CTA has all rows, and the columns of its own
        channels of each stream.
        """
        columns = op.count * -(-self.hidden // self.ctas)
        return tile(self.ctas * op.mix.rows, columns, self.ctas, self.machine, Plain(Dtype.float32))

    def _blocks(self, path: str, op: Product) -> Tiling:
        """The tiling of a block-diagonal product with the fewest lines; of equal ones, with the fewest products in a
        CTA.
        """
        fewest, found = -(-op.blocks.count // self.ctas), []
        for turns in range(fewest, fewest + MORE_TURNS):
            parts = self.ctas * turns // op.blocks.count
            one = self.product(path, op.rows, op.columns, parts, machine=self.machine)
            found.append(replace(one, ctas=self.ctas * turns, turns=turns, blocks=op.blocks.count))
        return min(found, key=lambda tiling: (tiling.all_lines, tiling.turns))

    def _experts(self, path: str, op: Product, unit: int) -> Tiling:
        """The tiling of a product with experts whose pieces take the least time; of equal ones, with the fewest
        pieces.
        """
        used, summed, ctas, warps = op.chosen.used, op.chosen.summed, self.ctas, self.machine.warps
        found = []
        for each in range(1, used + 1):
            parts = (warps if summed else ctas) * each // used
            if parts == 0:
                continue
            machine = replace(self.machine, warps=parts if summed else warps)
            tiling = self.product(path, op.rows, op.columns, ctas if summed else parts, unit, machine)
            pieces = Pieces(op.matrices[0].weight.experts, used, summed, each, ctas, warps)
            cost = tiling.cost / (15 + tiling.segments) if path in self.codes else tiling.lines
            time = each * cost * (15 + each * tiling.segments)
            found.append((time, each, replace(tiling, pieces=pieces)))
        return min(found, key=lambda one: one[:2])[2]
