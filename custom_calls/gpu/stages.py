"""Stages of a layer: the plan's ops, and the products inside them, in the order in which the GPU kernel runs them.

A product whose matrices differ in format becomes one stage for each run of matrices in one format. These stages read
the same board and write parts of one board, so there is no edge between them.

The products of a shared expert are stages in another order than the plan's. Those that read the stream follow the
router, and are computed while its edge is open. The last one is added after the sum of the chosen experts.

The stage that attends to latents also puts the newest latent into the cache. The stage that makes entries of compressed
attention follows the first product of their queries, and is computed while that product's edge is open.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from laneformer.custom_calls.gpu.supported import Router
from laneformer.ops import (
    CompressedAttend,
    CompressedKeep,
    GatherStreams,
    LatentAttend,
    LatentKeep,
    Layer,
    Matrix,
    Op,
    Product,
    SharedExpert,
    Value,
    products_of,
)

# Values that are not published on a board, because a CTA computes or merges what it needs of them itself. ATTENDED of
# compressed attention is on a board nevertheless.
WITHOUT_BOARD = (Value.STREAM, Value.ATTENDED, Value.OUTPUT, Value.ROUTES)


@dataclass(frozen=True)
class Stage:
    """An op of the plan, or a product inside an op."""

    op: Op
    module: int
    """The module of its layer: 0 attention, 1 feed-forward."""
    reads: str = ""
    """Name of the board that it reads; empty if its input is not on a board."""
    writes: str = ""
    """Name of the board that it writes; empty if its result is not on a board."""
    first: int = 0
    """Its first channel on the board `writes`."""
    of_head: int = 0
    """Channels of one head on the board `writes`, if each head begins at an even word because two words are read at
    once; 0 if only the first channel does.
    """
    shared: SharedExpert | None = None
    """The shared expert to which this product belongs."""
    gate: Matrix | None = None
    """Router: the gate of the shared expert, a row after those of the experts."""
    keep: LatentKeep | CompressedKeep | None = None
    """Latent or compressed attention: the op that defines the cache to which this op attends."""
    queries: str = ""
    """Latent attention: name of the board of queries."""
    latents: str = ""
    """Latent attention: name of the board of latents."""
    index: str = ""
    """Compressed attention with an index: name of the board of the queries that choose entries."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices that it multiplies, whose rows follow each other."""
        if isinstance(self.op, Router):
            return (self.op.matrix, *([self.gate] if self.gate else []))
        if isinstance(self.op, GatherStreams):
            return (self.op.mix,)
        return self.op.matrices if isinstance(self.op, Product) else ()

    @property
    def adds(self) -> bool:
        """Whether its result is added to OUTPUT instead of replacing it."""
        return self.shared is not None and self.op.writes is Value.OUTPUT


def stages(layer: Layer, formats: Mapping[str, object]) -> tuple[Stage, ...]:
    """The stages of a layer that custom_calls/gpu/supported.py accepts. formats: formats of quantized matrices, by
    path.
    """
    results = Counter()
    return tuple(
        stage for module, ops in enumerate(layer.modules) for stage in _of_module(ops.ops, module, formats, results)
    )


def in_one_format(op: Product, formats: Mapping[str, object]) -> list[Product]:
    """Splits a product into products of one format each, which write one after the other. formats: formats of some
    matrices, by path; all other matrices have the same format.
    """
    runs = itertools.groupby(op.matrices, lambda matrix: formats.get(matrix.weight.path))
    return [replace(op, matrices=tuple(matrices)) for _, matrices in runs]


def _of_module(ops: tuple[Op, ...], module: int, formats: Mapping[str, object], results: Counter) -> list[Stage]:
    """The stages of a module. results: number of results of each value that the layer has written so far; each result
    has its own board, because all of a layer's boards have the same tag.
    """
    found: list[Stage] = []
    boards: dict[Value, str] = {}  # the board of the newest result of each value
    gate = next((op.gate for op in ops if isinstance(op, SharedExpert)), None)
    keep = next((op for op in ops if isinstance(op, LatentKeep | CompressedKeep)), None)
    steps = {op.reads: op.blocks.step for op in ops if isinstance(op, Product) and op.blocks}
    for op in ops:
        if isinstance(op, LatentKeep):
            continue
        shared = op if isinstance(op, SharedExpert) else None
        newest = {} if shared else boards
        for one in products_of(op) or (op,):
            stage = Stage(one, module, reads=newest.get(one.reads, ""), shared=shared)
            if isinstance(one, CompressedKeep):
                found.insert(_behind_rank(found), replace(stage, writes="EntriesBoard"))
                continue
            if isinstance(one, CompressedAttend):
                boards[Value.ATTENDED] = "AttendedBoard"
                index = boards.get(Value.INDEX, "")
                found.append(replace(stage, writes="AttendedBoard", keep=keep, index=index))
                continue
            if one.writes not in WITHOUT_BOARD:
                writes = newest[one.writes] = f"{one.writes.name.title()}{results[one.writes] or ''}Board"
                results[one.writes] += 1
                stage = replace(stage, writes=writes)
            if isinstance(one, Product):
                first = 0
                for part in in_one_format(one, formats):
                    found.append(replace(stage, op=part, first=first, of_head=steps.get(one.writes, 0)))
                    first += part.channels
                continue
            if isinstance(one, Router):
                stage = replace(stage, gate=gate)
            elif isinstance(one, LatentAttend):
                stage = replace(stage, keep=keep, queries=newest[Value.QUERIES], latents=newest[Value.PROJECTED])
            found.append(stage)
    early = [stage for stage in found if stage.shared and not stage.adds]
    rest = [stage for stage in found if stage not in early]
    behind = 1 + next((at for at, stage in enumerate(rest) if isinstance(stage.op, Router)), 0)
    return [*rest[:behind], *early, *rest[behind:]]


def _behind_rank(found: list[Stage]) -> int:
    """Index of the stage after the first product of the queries: the first stage that reads HIDDEN."""
    return next(n for n, stage in enumerate(found) if stage.op.reads is Value.HIDDEN)
