"""Packs quantized matrices for the CPU kernel: tiles of 16 rows, in the layout of cpu/kernels/quantized.h."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from laneformer.formats import FORMATS
from laneformer.quantized import Quantized

ROWS, BLOCK, CHUNK = 16, 32, 512  # rows of a tile; columns of a block of codes and of a chunk
LINE = 64  # bytes of a line of codes
AT_ONCE = 1 << 24  # bytes of codes that are tiled at a time
CODES = {"int4": 0, "mxfp4": 1, "nvfp4": 1, "int8": 2, "fp8": 3}
SCALES = {"bfloat16": 3, "float16": 4, "float32": 5}
E8M0, E4M3 = 1, 2
FINEST = {"mxfp4": 16, "nvfp4": 16}  # columns of a scale; BLOCK for others
ZEROS = {"int4": FORMATS["int4"].zero, "int8": 0x80}  # stored codes of the value 0


@dataclass(frozen=True)
class Tiles:
    """All tiles of one or more matrices in one format, lane by lane."""

    format: tuple[int, int, int, bool, bool, bool]
    """The fields of the struct `Quantized` in cpu/kernels/quantized.h, in order."""
    data: np.ndarray
    """The tiles of each lane, uint8 [lanes, bytes]."""


@dataclass(frozen=True)
class Piece:
    """The tiles of those matrices of a product that share a format and an order of columns; `Piece` in cpu/state.h."""

    first: int
    """Number of its first tile among all tiles of the product in a lane."""
    step: int
    """Its tile j is tile first + j * step of the product."""
    count: int
    """Number of its tiles in a lane."""
    columns: int
    """Columns of a tile."""
    tiles: Tiles | None = None
    """The quantized tiles; None if the weights are not quantized."""
    order: np.ndarray | None = None
    """The entry of the vector that each column multiplies, -1 for none, int32 [columns]; None if they are in order."""

    @property
    def words(self) -> tuple[int, ...]:
        """This piece as integers for the library, with addresses: `tiles` and `order` must outlive its use."""
        data = () if self.tiles is None else (self.tiles.data.ctypes.data, self.tiles.data.nbytes, *self.tiles.format)
        order = 0 if self.order is None else self.order.ctypes.data
        return (self.first, self.step, self.count, *(data or [0] * 8), self.columns, order)


def refusal(record: Quantized) -> str | None:
    """Why the kernel does not hold a matrix, as the end of a sentence about it; None if it does."""
    group = record.group[1]
    if group < record.columns and record.format.bits * _block(record) > 16 * group:
        return f"has groups of {group} columns, whose codes would take more than 16 bits per weight"
    return None


def _block(record: Quantized) -> int:
    """Columns that a group of the record takes where it is stored, padding included."""
    group, finest = min(record.group[1], record.columns), FINEST.get(record.kind, BLOCK)
    return group if math.gcd(group, CHUNK) % finest == 0 else -(-group // finest) * finest


def in_blocks(record: Quantized, joined: bool = False) -> tuple[Quantized, np.ndarray | None]:
    """The matrix with the columns that are stored, and the entry of the vector that each of them multiplies: int32
    [columns], -1 for none; None instead of the array if all are in order. Groups of a size that the kernel cannot read
    are padded with columns that multiply nothing.

    joined: the matrix [lanes, rows, columns] becomes [rows, lanes * columns].
    """
    columns, group, block = record.columns, min(record.group[1], record.columns), _block(record)
    entries = np.arange(columns, dtype=np.int32) if record.order is None else record.order
    if (group < columns or joined) and (block != group or (joined and columns % group)):
        places = np.arange(-(-columns // group) * block)
        sources = np.where(places % block < group, places // block * group + places % block, columns)
        codes = record.each()[..., sources % columns]
        record = replace(record, codes=record.format.pack(codes), group=(record.group[0], block), columns=len(places))
        entries = np.append(entries, np.int32(-1))[np.minimum(sources, columns)]
    if joined:
        entries = np.concatenate([np.where(entries < 0, -1, entries + n * columns) for n in range(len(record.codes))])
        arrays = {name: np.concatenate(list(array), -1) for name, array in record.arrays.items() if array.ndim > 1}
        group = min(record.group[1], record.columns)
        record = replace(record.with_arrays(arrays), group=(record.group[0], group), columns=len(entries))
    in_order = (entries == np.arange(len(entries))).all()
    return replace(record, order=None), None if in_order else np.ascontiguousarray(entries, np.int32)


def make_pieces(
    parts: Sequence[Quantized | None], rows: Sequence[int], lanes: int, gated: bool, joined: bool = False
) -> list[Piece]:
    """All tiles of a product, in as few pieces as possible. Raises MidTile.

    parts: the product's matrices, each with `lanes` lanes, or without a lane axis if all lanes share it; None for a
    matrix that is not quantized. Experts of a lane count as lanes. rows: rows of each matrix in a lane. gated: the
    tiles of the two matrices alternate. joined: as in `in_blocks`.
    """
    parts = [part if part is None or part.ndim < 4 else _flat(part) for part in parts]
    columns = next(part.columns for part in parts if part is not None)
    held = [(None, None) if part is None else in_blocks(part, joined) for part in parts]
    alike = [None if record is None else (record.kind, order is not None and order.tobytes()) for record, order in held]
    pieces = []
    for _, numbers in groupby(range(len(parts)), alike.__getitem__):
        begin, *rest = numbers
        end = begin + 1 + len(rest)
        if gated:  # the tiles of both matrices alternate
            first, step, count = begin, 1 if rest else 2, -(-rows[0] // ROWS) * (end - begin)
        elif sum(rows[:begin]) % ROWS:
            raise MidTile(begin)
        else:
            first, step, count = sum(rows[:begin]) // ROWS, 1, -(-sum(rows[begin:end]) // ROWS)
        records, order = [record for record, _ in held[begin:end] if record is not None], held[begin][1]
        if records:
            tiles = make_tiles(records, lanes, gated and bool(rest))
            pieces.append(Piece(first, step, count, records[0].columns, tiles, order))
        else:
            pieces.append(Piece(first, step, count, columns))
    return pieces


def _flat(record: Quantized) -> Quantized:
    """Reshapes a record [lanes, experts, rows, columns] to [lanes * experts, rows, columns]."""
    return record.with_arrays(
        {name: array.reshape(-1, *array.shape[-2:]) for name, array in record.arrays.items() if array.ndim == 4}
    )


class MidTile(ValueError):
    """Matrix number args[0] needs another piece than the matrix before it, but its rows begin inside a tile."""


def make_tiles(parts: Sequence[Quantized], lanes: int, alternating: bool) -> Tiles:
    """The tiles of a product's matrices, which must be of one kind and made by `in_blocks`. Their rows follow each
    other, or their tiles alternate. Each matrix has `lanes` lanes, or no lane axis if all lanes share it.

    Tiles are made for some lanes at a time, to limit the memory of intermediate arrays.
    """
    step = max(1, AT_ONCE * lanes // sum(part.codes.nbytes for part in parts))
    starts = range(0, lanes, step)

    def made(first: int, shared: bool) -> Tiles:
        some = [_some_lanes(part, slice(first, first + step)) for part in parts]
        return _make_tiles(some, min(step, lanes - first), alternating, shared)

    begin = made(0, True)
    if len(starts) == 1:
        return begin
    for shared in (True, False):  # all lanes must have the same format
        begin = begin if shared else made(0, False)
        data = np.empty((lanes, begin.data.shape[1]), np.uint8)
        data[:step] = begin.data
        for first in starts[1:]:
            found = made(first, shared)
            if found.format != begin.format:
                break
            data[first : first + step] = found.data
        else:
            break
    return Tiles(begin.format, data)


def _some_lanes(record: Quantized, which: slice) -> Quantized:
    if record.ndim == 2:
        return record
    return record.with_arrays({name: array[which] for name, array in record.arrays.items() if array.ndim == 3})


def _make_tiles(parts: Sequence[Quantized], lanes: int, alternating: bool, shared: bool) -> Tiles:
    """`make_tiles` for some lanes. shared: whether a scale that all rows of a tile share may be stored once."""
    kind, columns = parts[0].kind, parts[0].columns
    zeros = any(part.zero_points is not None for part in parts)
    whole_rows = not zeros and all(part.group[1] >= columns for part in parts)
    # A part with one scale per row fits any group: the scale is repeated.
    group = 0 if whole_rows else math.gcd(CHUNK, *(part.group[1] for part in parts if part.group[1] < columns))
    rows = whole_rows or any(part.global_scale is not None for part in parts)
    wide = len({part.scales.dtype for part in parts}) > 1
    codes, scales, zero_points, factors = [], [], [], []
    for part in parts:
        codes.append(_per_lane(_words(part), lanes))
        one = np.float32(1 if part.global_scale is None else 1 / np.float32(part.global_scale))
        if whole_rows:
            factors.append(_per_lane(_each_row(part, part.scale_values() * one), lanes)[..., 0])
            continue
        finer = part.regrouped(part.group[0], group)
        scales.append(_per_lane(_each_row(part, finer.scale_values() if wide else finer.scales), lanes))
        if zeros:
            points = finer.zero_points
            if points is None:
                points = np.full(finer.scales.shape, ZEROS[kind], np.uint8)
            elif kind == "int8":
                points = points.view(np.uint8) ^ 0x80
            zero_points.append(_per_lane(_each_row(part, points), lanes))
        if rows:
            factors.append(np.full(scales[-1].shape[:2], one, np.float32))

    def tiled(found: list[np.ndarray], fill: int | str) -> np.ndarray:
        return _tiled(found, alternating, fill)

    of_code = tiled(codes, 0)  # [lanes, tiles, 16, words]
    empty = {"int4": 0x88888888, "int8": 0x80808080}.get(kind, 0)
    short = -(-columns // BLOCK) * BLOCK * parts[0].format.bits // (8 * of_code.itemsize) - of_code.shape[-1]
    of_code = np.pad(of_code, [(0, 0)] * 3 + [(0, short)], constant_values=empty) if short else of_code
    if whole_rows:
        scale_type, shared, grids = 0, False, []
    else:
        of_scale = tiled(scales, "edge")  # [lanes, tiles, 16, groups]
        of_kind = SCALES["float32"] if wide else {"mxfp4": E8M0, "nvfp4": E4M3}.get(kind)
        scale_type = of_kind or SCALES[of_scale.dtype.name]
        shared = shared and kind == "fp8" and bool((of_scale == of_scale[:, :, :1]).all())
        grids = [of_scale[:, :, :1] if shared else of_scale, *([tiled(zero_points, "edge")] if zeros else [])]
    pieces = []  # uint8 [lanes, tiles, units, bytes of a unit]; `_streams` alternates the units of two tiles
    if rows:
        pieces.append(_bytes(tiled(factors, 0))[:, :, None])
    for first in range(0, columns, CHUNK):
        here = min(CHUNK, columns - first)
        if group:
            groups = slice(first // group, first // group + -(-here // group))
            found = np.concatenate([_bytes(grid[..., groups].swapaxes(2, 3)) for grid in grids], -1)
            pieces.append(np.pad(found, [(0, 0), (0, 0), (0, -found.shape[-1] % 64)])[:, :, None])
        per = 8 * of_code.itemsize // parts[0].format.bits
        end = -(-(first + here) // BLOCK) * BLOCK // per
        lines = _bytes(of_code[..., first // per : end].swapaxes(2, 3))
        pieces.append(lines.reshape(*lines.shape[:2], -1, LINE))
    return Tiles((CODES[kind], scale_type, group, shared, zeros, rows), _streams(pieces, 1 if kind == "fp8" else 2))


def _streams(pieces: list[np.ndarray], together: int) -> np.ndarray:
    """Concatenates pieces [lanes, tiles, units, bytes of a unit] to streams, uint8 [lanes, bytes]. Each stream contains
    `together` tiles: piece by piece, with their units alternating. Left-over tiles are streams of one tile.
    """
    lanes, tiles = pieces[0].shape[:2]
    sizes = [piece[0, 0].size for piece in pieces]
    found = np.empty((lanes, tiles * sum(sizes)), np.uint8)
    even = tiles - tiles % together
    for first, last, beside in ((0, even, together), (even, tiles, 1)):
        if first == last:
            continue
        streams = found[:, first * sum(sizes) : last * sum(sizes)].reshape(lanes, -1, beside * sum(sizes))
        at = 0
        for piece, size in zip(pieces, sizes, strict=True):
            parts = piece[:, first:last].reshape(lanes, -1, beside, *piece.shape[2:]).swapaxes(2, 3)
            streams[..., at : at + beside * size] = parts.reshape(*parts.shape[:2], -1)
            at += beside * size
    return found


def _words(part: Quantized) -> np.ndarray:
    """The codes of each row as words that a tile keeps together, [*lanes, rows, words]. A word has 8 columns of 4 bits,
    4 columns of int8 or 2 of fp8.
    """
    codes = part.codes
    if part.kind == "int8":
        codes = codes.view(np.uint8) ^ 0x80
    per = {"int8": 4, "fp8": 2}.get(part.kind, 4)
    fill = {"int8": 0x80, "int4": 0x88}.get(part.kind, 0)
    if part.kind == "int4" and part.columns % 2:
        codes = codes.copy()
        codes[..., -1] |= ZEROS["int4"] << 4
    if short := -codes.shape[-1] % per:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)], constant_values=fill)
    codes = np.ascontiguousarray(codes)
    if part.kind == "fp8":
        return codes.view(np.uint16)
    words = codes.view(np.uint32)
    if part.format.bits == 8:
        return words
    low, high = words & 0x0F0F, words >> 16 & 0x0F0F  # even columns of the first and of the last four
    odd_low, odd_high = words >> 4 & 0x0F0F, words >> 20 & 0x0F0F
    even, odd = low | high << 4, odd_low | odd_high << 4
    return (even & 0xFF) | (odd & 0xFF) << 8 | (even & 0xFF00) << 8 | (odd & 0xFF00) << 16


def _each_row(part: Quantized, grid: np.ndarray) -> np.ndarray:
    """Expands a grid [..., groups of rows, n] to [..., rows, n]: each row gets the values of its group."""
    return np.repeat(grid, part.group[0], -2)[..., : part.shape[-2], :] if part.group[0] > 1 else grid


def _per_lane(array: np.ndarray, lanes: int) -> np.ndarray:
    """Broadcasts an array [rows, n], which all lanes share, or [lanes, rows, n] to [lanes, rows, n]."""
    return np.broadcast_to(array, (lanes, *array.shape[-2:]))


def _tiled(parts: list[np.ndarray], alternating: bool, fill: int | str) -> np.ndarray:
    """Joins parts [lanes, rows(, n)] to tiles [lanes, tiles, 16(, n)]. fill: value of padding rows, or "edge" to repeat
    the last row.
    """

    def padded(array: np.ndarray) -> np.ndarray:
        width = [(0, 0), (0, -array.shape[1] % ROWS), *[(0, 0)] * (array.ndim - 2)]
        if width[1][1]:
            array = np.pad(array, width, "edge") if fill == "edge" else np.pad(array, width, constant_values=fill)
        return array.reshape(array.shape[0], -1, ROWS, *array.shape[2:])

    if not alternating:
        return padded(np.concatenate(parts, 1) if len(parts) > 1 else parts[0])
    tiles = np.stack([padded(part) for part in parts], 2)
    return tiles.reshape(tiles.shape[0], -1, *tiles.shape[3:])


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array [lanes, tiles, ...], uint8 [lanes, tiles, n]."""
    flat = np.ascontiguousarray(array).reshape(*array.shape[:2], -1)
    return flat.view(np.uint8)
