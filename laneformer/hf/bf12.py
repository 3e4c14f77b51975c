"""bfloat16 matrices in 12 bits per weight in safetensors files; docs/bf12.md describes the format.

The matrices of one product (q, k and v; gate and up) form a group. They share one table, and their tiles are in the
order in which the CPU kernel reads them, which does not depend on its threads. A group is stored as three tensors and
an entry in the metadata of its file, which names the matrices.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.config import ModelConfig
from laneformer.decoder import decoder_ops
from laneformer.errors import CheckpointError, one_line
from laneformer.files import parse_json
from laneformer.formats import (
    BF12_COLUMNS,
    BF12_LINE,
    BF12_MOST_EXCEPTIONS,
    BF12_ROWS,
    Bf12Tiles,
    bf12_rounded,
    bf12_table,
)
from laneformer.hf.safetensors import ALIGNMENT, DTYPES, MappedFile, Output, Source, Tensor
from laneformer.ops import Product

KEY, VERSION = "bf12", 1  # key in the metadata, and version of the format
TILES, TABLE, EXCEPTIONS = "bf12_tiles", "bf12_table", "bf12_exceptions"
_AT_ONCE = 32  # tiles of rows that are encoded or decoded together; they fit in a CPU cache
_COUNTED = 1 << 20  # weights that are counted together


@dataclass(frozen=True)
class Group:
    """The matrices of one product."""

    shapes: dict[str, tuple[int, ...]]
    """Tensor name -> [lanes, rows, columns], or [rows, columns] for one lane; equal except for the rows."""
    interleaved: bool = False
    """Whether tiles alternate between matrices of equal shapes (gate and up); otherwise their rows follow each other.
    """
    rounded: int = 0
    """Number of weights that were rounded to the nearest value of the table when they were written."""

    @property
    def name(self) -> str:
        """Name of the group's tensors, without their kinds."""
        return next(iter(self.shapes))

    @property
    def columns(self) -> int:
        return next(iter(self.shapes.values()))[-1]

    @property
    def lanes(self) -> int:
        return math.prod(next(iter(self.shapes.values()))[:-2])

    @cached_property
    def rows(self) -> dict[str, range]:
        """The rows of each matrix among all rows of a lane."""
        rows = [shape[-2] for shape in self.shapes.values()]
        ends = rows if self.interleaved else accumulate(rows)
        return {name: range(end - count, end) for name, count, end in zip(self.shapes, rows, ends, strict=True)}

    @property
    def units(self) -> int:
        """Tiles of 16 rows in a lane; if interleaved, in a lane of each matrix."""
        return -(-max(rows.stop for rows in self.rows.values()) // BF12_ROWS)

    @property
    def tiles(self) -> int:
        return self.lanes * self.units * (len(self.shapes) if self.interleaved else 1)

    @property
    def weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def padded(self) -> int:
        """Number of columns, including padding."""
        return -(-self.columns // BF12_COLUMNS) * BF12_COLUMNS

    @property
    def tiles_shape(self) -> tuple[int, ...]:
        return self.tiles, self.padded // BF12_COLUMNS, 3, BF12_LINE

    def blocks(self, matrices: Mapping[str, np.ndarray], padding: int) -> Iterator[np.ndarray]:
        """The tiles of the matrices, uint16 [tiles, 16, padded], a few at a time. padding: bits that fill the rest of a
        tile.
        """
        lanes = {name: matrices[name].reshape(self.lanes, -1, self.columns) for name in self.shapes}
        for lane in range(self.lanes):
            for first in range(0, self.units, _AT_ONCE):
                count = min(_AT_ONCE, self.units - first)
                begin, end = first * BF12_ROWS, (first + count) * BF12_ROWS
                parts = [
                    part[lane, max(begin - self.rows[name].start, 0) : max(end - self.rows[name].start, 0)]
                    for name, part in lanes.items()
                ]
                parts = parts if self.interleaved else [np.concatenate(parts)]
                block = np.full((len(parts), count * BF12_ROWS, self.padded), padding, np.uint16)
                for to, part in zip(block, parts, strict=True):
                    to[: len(part), : self.columns] = part
                tiles = block.reshape(len(parts), count, BF12_ROWS, self.padded).swapaxes(0, 1)
                yield tiles.reshape(-1, BF12_ROWS, self.padded)

    def decode(self, tiles: Bf12Tiles, name: str, bits: np.ndarray) -> None:
        """Decodes the matrix `name` from the group's tiles into `bits`, uint16 [lanes, rows, columns]."""
        rows, number = self.rows[name], list(self.shapes).index(name)
        step = len(self.shapes) if self.interleaved else 1
        for lane in range(self.lanes):
            for first in range(rows.start // BF12_ROWS, -(-rows.stop // BF12_ROWS), _AT_ONCE):
                last = min(first + _AT_ONCE, -(-rows.stop // BF12_ROWS))
                begin = lane * self.units * step + (number if self.interleaved else 0)
                found = tiles.decode(range(begin + first * step, lane * self.units * step + last * step, step))
                found = found.reshape(-1, self.padded)[:, : self.columns]
                at = first * BF12_ROWS - rows.start  # place of the first decoded row in the matrix
                part = found[max(-at, 0) : rows.stop - first * BF12_ROWS]
                bits[lane, max(at, 0) : max(at, 0) + len(part)] = part


def groups_of(config: ModelConfig, sources: Mapping[str, Source]) -> Iterator[Group]:
    """The embedding table, then the groups of matrices that a Laneformer's products read, without matrices of experts
    and block-diagonal matrices of heads. sources: by path.
    """
    ops = decoder_ops(config)
    all_products = (op for layer in ops.layers for op in layer.ops if isinstance(op, Product))
    products = [op for op in all_products if op.chosen is None and op.blocks is None]
    yield _group_of([ops.embedding.path], sources)
    for product in products:
        yield _group_of([matrix.weight.path for matrix in product.matrices], sources, product.gated)
    if ops.head.weight != ops.embedding:
        yield _group_of([ops.head.weight.path], sources)


def _group_of(paths: Iterable[str], sources: Mapping[str, Source], interleaved: bool = False) -> Group:
    return Group({sources[path].name: sources[path].shape for path in paths}, interleaved)


@dataclass(frozen=True)
class StoredGroup:
    """A group in a file, whose tensors were checked against each other."""

    group: Group
    tiles: Tensor
    table: np.ndarray
    exceptions: np.ndarray

    def within(self, pages: np.ndarray) -> Bf12Tiles:
        """The group's tiles in the mapped file. pages: bytes of the file, uint8."""
        return Bf12Tiles(self.table, self.tiles.within(pages).reshape(self.tiles.shape), self.exceptions)

    @property
    def unfit(self) -> str | None:
        """Why a kernel cannot use the mapped tiles; None if it can."""
        if self.tiles.start % ALIGNMENT:
            return f"its tiles begin at byte {self.tiles.start:,}, which is no multiple of {ALIGNMENT}"
        if not Bf12Tiles(self.table, np.empty(0, np.uint8), self.exceptions).surely_finite:
            return "it may have values that are not finite"
        return None


@dataclass(frozen=True)
class PackedTensor(Tensor):
    """A matrix of a group, read as if its file contained it in bfloat16."""

    name: str
    stored: StoredGroup

    def read(self, memory: np.ndarray) -> np.ndarray:
        bits = memory.view(np.uint16).reshape(self.stored.group.lanes, *self.shape[-2:])
        self.stored.group.decode(self.stored.within(MappedFile(self.file).pages), self.name, bits)
        values: np.ndarray = memory.view(DTYPES[self.dtype])
        return values.reshape(self.shape)


def unpacked(
    tensors: Mapping[str, Tensor], metadata: Mapping[Path, Mapping[str, object]]
) -> tuple[dict[str, Tensor], list[StoredGroup]]:
    """The tensors of a folder, with matrices in place of their groups' tensors, and the groups. Raises CheckpointError,
    naming file and tensor, for groups that do not fit their tensors.
    """
    tensors, found = dict(tensors), []
    for file, texts in metadata.items():
        for group in _groups(file, texts.get(KEY)):
            parts = {}
            for kind, dtype in ((TILES, "U8"), (TABLE, "U8"), (EXCEPTIONS, "U32")):
                part = tensors.pop(f"{group.name}.{kind}", None)
                if part is None or part.file != file or part.dtype != dtype:
                    raise _wrong(file, group, kind, f"is missing, or not {dtype}")
                parts[kind] = part
            stored = _read_group(group, parts)
            for name, shape in group.shapes.items():
                if name in tensors:
                    raise CheckpointError(f"{file}: tensor {name} appears twice, once in 12 bits; remove one of them")
                tensors[name] = PackedTensor(file, "BF16", shape, 0, 2 * math.prod(shape), name, stored)
            found.append(stored)
    return tensors, found


def _groups(file: Path, text: object) -> Iterator[Group]:
    """The groups that the metadata of a file describe. text: the value of KEY in the metadata, or None."""
    if text is None:
        return
    try:
        values = parse_json(str(text))
        version = values["format_version"]
        if version != VERSION:
            raise CheckpointError(
                f"{file} has weights in version {version!s:.20} of bf12, this program reads {VERSION}: update the"
                " program or convert the model again"
            )
        groups = [_group(entry) for entry in values["groups"]]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{file} is damaged (metadata {KEY}: {what}): copy it again") from None
    yield from groups


def _group(entry: Mapping[str, Any]) -> Group:
    """The group of an entry in the metadata. Raises ValueError, KeyError, TypeError or AttributeError."""
    shapes = {name: tuple(shape) for name, shape in entry["matrices"].items()}
    interleaved, rounded = entry["interleaved"], entry.get("rounded", 0)
    sizes = [size for shape in shapes.values() for size in shape]
    if (
        not sizes
        or not all(type(size) is int and 0 < size < 1 << 40 for size in sizes)
        or type(interleaved) is not bool
    ):
        raise ValueError(f"{shapes} are not shapes of matrices")
    if type(rounded) is not int or rounded < 0:
        raise ValueError(f"rounded is {rounded!s:.20}, not a number of weights")
    rest = {(*shape[:-2], shape[-2] if interleaved else 0, shape[-1]) for shape in shapes.values() if len(shape) > 1}
    if {len(shape) for shape in shapes.values()} - {2, 3} or len(rest) != 1:
        raise ValueError(f"{shapes} do not fit each other")
    return Group(shapes, interleaved, rounded)


def _read_group(group: Group, parts: Mapping[str, Tensor]) -> StoredGroup:
    tiles, table, exceptions = (parts[kind] for kind in (TILES, TABLE, EXCEPTIONS))
    if tiles.shape != group.tiles_shape:
        what = f"has shape {list(tiles.shape)}, but its matrices need {list(group.tiles_shape)}"
        raise _wrong(tiles.file, group, TILES, what)
    if table.shape != (8,):
        raise _wrong(table.file, group, TABLE, f"has shape {list(table.shape)}, not [8]")
    stored = StoredGroup(group, tiles, _values(table, np.uint8), _values(exceptions, np.uint32))
    counted = Bf12Tiles(stored.table, np.empty(tiles.shape[:1], np.uint8), stored.exceptions)
    if problem := counted.problem(group.columns):
        raise _wrong(tiles.file, group, TABLE if "table" in problem else EXCEPTIONS, f"is damaged: {problem}")
    return stored


def _values(tensor: Tensor, dtype: type) -> np.ndarray:
    return tensor.read_bytes(np.empty(tensor.size, np.uint8)).view(dtype)


def _wrong(file: Path, group: Group, kind: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {group.name}.{kind} {what}; copy it again")


@dataclass(frozen=True)
class GroupPlan:
    """How a group is to be written: its table and the number of its exceptions."""

    group: Group
    table: np.ndarray
    exceptions: int

    @classmethod
    def of(cls, group: Group, matrices: Mapping[str, np.ndarray], round_exceptions: bool = False) -> "GroupPlan":
        """The plan for given matrices, name -> bits, uint16. round_exceptions: round exceptions, if they are few, to
        the nearest values of the table. Raises CheckpointError if they are not finite.
        """
        counts = np.zeros(128, np.int64)
        for name in group.shapes:
            bits = matrices[name].reshape(-1)
            for first in range(0, len(bits), _COUNTED):
                high = (bits[first : first + _COUNTED] >> 8 & 0x7F).astype(np.uint8)
                counts += np.bincount(high, minlength=128)
        table = bf12_table(counts)
        plan = cls(group, table, int(counts.sum() - counts[table].sum()))
        if not round_exceptions or not plan.fits:
            return plan
        if counts[0x7F] and 0x7F not in table:
            raise CheckpointError(
                f"{', '.join(group.shapes)}: a weight is infinite, NaN or at least 2^127: round no exceptions of this"
                " model, or use an earlier checkpoint"
            )
        return cls(replace(group, rounded=plan.exceptions), table, 0)

    @property
    def fits(self) -> bool:
        """Whether the group has few enough exceptions."""
        return self.exceptions <= BF12_MOST_EXCEPTIONS * self.group.weights

    @property
    def size(self) -> int:
        """Bytes of the group's tensors."""
        return math.prod(self.group.tiles_shape) + 4 * (self.exceptions + self.group.tiles) + len(self.table)

    def outputs(self, matrices: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, Output]:
        """The group's tensors by name. matrices: returns name -> bits, uint16. Write the tiles before the exceptions,
        which are computed with them.
        """
        group, words = self.group, []

        def tiles() -> Iterator[np.ndarray]:
            for block in group.blocks(matrices(), int(self.table[0]) << 8):
                held = bf12_rounded(block, self.table) if group.rounded else block
                encoded = Bf12Tiles.encode(held, self.table)
                words.append(encoded.exceptions)
                yield encoded.units

        count, shape = self.exceptions + group.tiles, group.tiles_shape
        return {
            f"{group.name}.{TILES}": Output("U8", shape, math.prod(shape), tiles),
            f"{group.name}.{EXCEPTIONS}": Output("U32", (count,), 4 * count, lambda: words),
            f"{group.name}.{TABLE}": Output("U8", (8,), 8, lambda: [self.table]),
        }


def metadata_of(groups: Iterable[Group]) -> dict[str, str]:
    """The entry for the groups in the metadata of their file."""
    entries = [
        {"matrices": {name: list(shape) for name, shape in group.shapes.items()}, "interleaved": group.interleaved}
        | ({"rounded": group.rounded} if group.rounded else {})
        for group in groups
    ]
    return {KEY: json.dumps({"format_version": VERSION, "groups": entries}, separators=(",", ":"))}
