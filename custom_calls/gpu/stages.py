"""What the GPU kernel runs of a layer, in its order: stages, which are the plan's ops and the products inside them.

A product whose matrices differ in format is a stage for each run of equal ones: they read the same and write parts of
one board, so that there is no edge between them. The products of a shared expert are stages too, in another order than
the plan's: those that read the stream come right behind the router, so that its edge is open while they are computed,
and the last one is added when the chosen experts' sum is there. Latents are kept by the stage that attends to them: its
tasks with the newest position put it into the cache. Entries of compressed attention are made right behind the product
that their queries begin with, whose edge is open then.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from custom_calls.gpu.supported import Router
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

# Where results between ops are: on a board, but for what a CTA has of them itself. Those of compressed attention are on
# boards all the same
WITHOUT_BOARD = (Value.STREAM, Value.ATTENDED, Value.OUTPUT, Value.ROUTES)


@dataclass(frozen=True)
class Stage:
    """An op of the plan, or a product inside one."""

    op: Op
    module: int
    """Of its layer: 0 attention, 1 feed-forward."""
    reads: str = ""
    """The board that has what it reads; empty where that is on none of these. `writes` likewise."""
    writes: str = ""
    first: int = 0
    """Channel of `writes` with which it begins."""
    of_head: int = 0
    """Channels of `writes` that begin at an even word, as two are read at once: those of a head; 0: the first alone."""
    shared: SharedExpert | None = None
    """Whose product it is."""
    gate: Matrix | None = None
    """A router's: the row behind those of its experts."""
    keep: LatentKeep | CompressedKeep | None = None
    """What states the cache of the vectors to which it attends."""
    queries: str = ""
    """Boards of queries and of latents, where it attends to these."""
    latents: str = ""
    index: str = ""
    """That of the queries that choose entries, where it attends to some of them."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The rows that it multiplies, one after the other."""
        if isinstance(self.op, Router):
            return (self.op.matrix, *([self.gate] if self.gate else []))
        if isinstance(self.op, GatherStreams):
            return (self.op.mix,)
        return self.op.matrices if isinstance(self.op, Product) else ()

    @property
    def adds(self) -> bool:
        """Whether it is added to OUTPUT."""
        return self.shared is not None and self.op.writes is Value.OUTPUT


def stages(layer: Layer, formats: Mapping[str, object]) -> tuple[Stage, ...]:
    """Of a layer that custom_calls/gpu/supported.py knows. formats: of quantized matrices, by path."""
    results = Counter()
    return tuple(
        stage for module, ops in enumerate(layer.modules) for stage in _of_module(ops.ops, module, formats, results)
    )


def in_one_format(op: Product, formats: Mapping[str, object]) -> list[Product]:
    """A product as several that write one after the other. formats: of some matrices, by path; the others have one."""
    runs = itertools.groupby(op.matrices, lambda matrix: formats.get(matrix.weight.path))
    return [replace(op, matrices=tuple(matrices)) for _, matrices in runs]


def _of_module(ops: tuple[Op, ...], module: int, formats: Mapping[str, object], results: Counter) -> list[Stage]:
    """results: how many of each value the layer has written; each has its own board, as all have the same tag."""
    found: list[Stage] = []
    boards: dict[Value, str] = {}  # the newest of each value
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
    """The place of the first stage that reads no stream."""
    return next(n for n, stage in enumerate(found) if stage.op.reads is Value.HIDDEN)
