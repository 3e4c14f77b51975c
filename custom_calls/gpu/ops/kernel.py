"""How the GPU kernel runs an op: the base class of the classes in this folder, one for each kind of op.

A class has everything in Python that depends on the kind of op: which ops the kernel supports, their stages, tilings,
boards and shared memory, and the constants of their code. The code is in custom_calls/gpu/kernel/ops and mixers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls.gpu.ops.struct import OpStruct
from laneformer.custom_calls.gpu.tiling import Machine, Tiling
from laneformer.ops import Layer, Matrix, Op, Rotary, SharedExpert, Value

T = TypeVar("T", bound=Op)
K = TypeVar("K", bound=Op)

# Values that are not published on a board, because a CTA computes or merges what it needs of them itself.
WITHOUT_BOARD = (Value.STREAM, Value.ATTENDED, Value.OUTPUT, Value.ROUTES)


@dataclass(frozen=True)
class Lane:
    """What the sizes of ops depend on, besides the ops."""

    machine: Machine
    ctas: int
    """CTAs of a lane."""
    stream_rows: int
    """Channels of the residual stream in each CTA."""
    width: int
    """Bytes of a number in the cache."""
    context: int
    """Most positions of a sequence."""


class Tiler(Protocol):
    """Chooses tilings: custom_calls/gpu/kinds.py has the class."""

    @property
    def ctas(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def machine(self) -> Machine: ...

    def product(
        self, path: str, all_rows: int, columns: int, ctas: int, unit: int = 1, machine: Machine | None = None
    ) -> Tiling: ...

    def in_codes(self, path: str) -> bool: ...


@dataclass(frozen=True)
class OpKernel(Generic[T]):
    """How the kernel runs one op. The methods describe an op that multiplies no matrix and keeps nothing."""

    op: T

    kinds: ClassVar[tuple[type, ...]] = ()
    """Classes of ops, in laneformer/ops.py."""
    attends: ClassVar[bool] = False
    """Whether the op is attention, of which a model needs some."""
    keeps: ClassVar[bool] = False
    """Whether the op reads or writes what its layer keeps between tokens."""
    routes: ClassVar[bool] = False
    """Whether the op chooses experts."""
    in_chain: ClassVar[bool] = True
    """Whether the op passes a module's values from one op to the next."""
    own_order: ClassVar[bool] = False
    """Whether `problems` checks the order of all ops of its module."""
    in_float32: ClassVar[bool] = False
    """Whether the op's matrices are packed in float32, whatever others are stored in."""

    @property
    def label(self) -> str:
        """Beginning of the name of the op's struct in the header."""
        return type(self.op).__name__

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        """What the kernel does not support of the op in its layer, as clauses of an error message. hidden: channels of
        the residual stream.
        """
        return iter(())

    def add_stages(self, module: "ModuleStages") -> None:
        """Adds the op's stages to those of its module."""
        module.found.append(module.stage(self))

    def matrices(self, stage: "Stage") -> tuple[Matrix, ...]:
        """The matrices that a stage multiplies, whose rows follow each other."""
        return ()

    def signature(self) -> object:
        """What is equal for ops that share code, besides names of weights."""
        return self.op

    def tiling(self, stage: "Stage", tiler: Tiler) -> Tiling | None:
        """The tiling of the stage's matrices; None without a matrix."""
        return None

    def arranged(self, weight: np.ndarray | jax.Array, lane: Lane) -> np.ndarray | jax.Array:
        """A matrix of a stage `in_float32`, float32 and with its rows in the order in which they are packed."""
        return weight.astype(jnp.float32)

    def words(self, stage: "Stage") -> int:
        """Words of the stage's result on its board."""
        return 0

    def boards(self, lane: Lane, tiling: Tiling | None) -> dict[str, int]:
        """Words of further boards by name. Ops share a board, which has the largest size."""
        return {}

    def merged_floats(self, lane: Lane) -> int:
        """Floats in shared memory of results that a CTA merges for the next op, for one row of a pass."""
        return 0

    def task_floats(self, lane: Lane, rows: int) -> int:
        """Floats in shared memory while a CTA computes the op, for a pass of `rows` rows."""
        return 0

    def rotations(self) -> list[tuple[Rotary, int]]:
        """The tables of rotations that the op reads: the embedding, and channels of a head."""
        return []

    def header(self, struct: OpStruct) -> None:
        """Adds the constants and functions that the op's code reads to its struct in the header."""
        struct.add_tiling()


@dataclass(frozen=True)
class Stage:
    """An op of the plan, or a product inside an op."""

    kernel: OpKernel
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
    keep: Op | None = None
    """Latent or compressed attention: the op that defines the cache to which this op attends."""
    queries: str = ""
    """Latent attention: name of the board of queries."""
    latents: str = ""
    """Latent attention: name of the board of latents."""
    index: str = ""
    """Compressed attention with an index: name of the board of the queries that choose entries."""

    @property
    def op(self) -> Op:
        return self.kernel.op

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices that it multiplies, whose rows follow each other."""
        return self.kernel.matrices(self)

    @property
    def adds(self) -> bool:
        """Whether its result is added to OUTPUT instead of replacing it."""
        return self.shared is not None and self.op.writes is Value.OUTPUT


@dataclass
class ModuleStages:
    """The stages of a module while they are collected."""

    ops: tuple[Op, ...]
    """The module's ops."""
    module: int
    """0 attention, 1 feed-forward."""
    formats: Mapping[str, object]
    """Formats of some matrices, by path; all other matrices have the same format."""
    results: Counter
    """Results of each value that the layer has written so far. Each has its own board, because all of a layer's boards
    have the same tag.
    """
    found: list[Stage] = field(default_factory=list)
    boards: dict[Value, str] = field(default_factory=dict)
    """The board of the newest result of each value."""

    def stage(self, kernel: OpKernel, shared: SharedExpert | None = None) -> Stage:
        """The stage of an op, whose result has a new board."""
        op = kernel.op
        stage = Stage(kernel, self.module, reads=self.boards.get(op.reads, ""), shared=shared)
        if op.writes in WITHOUT_BOARD:
            return stage
        board = f"k{op.writes.name.title()}{self.results[op.writes] or ''}Board"
        self.boards[op.writes] = board
        self.results[op.writes] += 1
        return replace(stage, writes=board)

    def first(self, kind: type[K]) -> K | None:
        """The module's first op of this kind."""
        return next((op for op in self.ops if isinstance(op, kind)), None)
