"""Quantized matrices as the CPU kernel reads them: tiles of 16 rows, as cpu/kernels/quantized.h describes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laneformer.quantized import INT4_ZERO, Quantized

ROWS, BLOCK, CHUNK = 16, 32, 512  # rows of a tile; columns of a block of codes and of a chunk
LINE = 64  # bytes of codes
CODES = {"int4": 0, "mxfp4": 1, "nvfp4": 1, "int8": 2, "fp8": 3}
SCALES = {"bfloat16": 3, "float16": 4, "float32": 5}
E8M0, E4M3 = 1, 2
FINEST = {"nvfp4": 16}  # columns of a scale; 32 for others


@dataclass(frozen=True)
class Tiles:
    """All tiles of a product, lane by lane."""

    format: tuple[int, int, int, bool, bool, bool]
    """The fields of `Quantized` in cpu/kernels/quantized.h."""
    data: np.ndarray
    """Uint8 [lanes, bytes]."""


def refusal(record: Quantized) -> str | None:
    """Why the kernel cannot hold a matrix; None if it can."""
    if record.order is not None:
        return "has columns in an order of their own"
    if record.kind == "int8" and record.zero_points is not None:
        return "has zero points"
    if record.group[1] < record.columns and math.gcd(record.group[1], CHUNK) % FINEST.get(record.kind, BLOCK):
        return f"has groups of {record.group[1]} columns"
    return None


def beside(record: Quantized) -> Quantized:
    """[lanes, rows, columns] as [rows, lanes * columns]. Raises ValueError where a group would cross lanes."""
    columns = record.columns
    group = min(record.group[1], columns)
    if columns % group or columns * record.format.bits % 8:
        raise ValueError(f"lanes of {columns} columns, whose groups of {group} do not fit beside each other")

    def joined(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.concatenate(list(array), -1)

    return replace(
        record,
        codes=joined(record.codes),
        scales=joined(record.scales),
        zero_points=joined(record.zero_points),
        group=(record.group[0], group),
        columns=columns * len(record.codes),
    )


def make_tiles(parts: Sequence[Quantized], lanes: int, alternating: bool) -> Tiles:
    """Of the matrices of a product, whose rows follow each other, or whose tiles alternate. Each has `lanes` lanes, or
    no such axis if it is the same in all. They must be of one kind; see `refusal`.
    """
    kind, columns = parts[0].kind, parts[0].columns
    zeros = any(part.zero_points is not None for part in parts)
    whole_rows = not zeros and all(part.group[1] >= columns for part in parts)
    # A scale of whole rows may be repeated anywhere.
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
            points = np.full_like(finer.scales, INT4_ZERO, np.uint8) if finer.zero_points is None else finer.zero_points
            zero_points.append(_per_lane(_each_row(part, points), lanes))
        if rows:
            factors.append(np.full(scales[-1].shape[:2], one, np.float32))

    def tiled(found: list[np.ndarray], fill: int | str) -> np.ndarray:
        return _tiled(found, alternating, fill)

    of_code = tiled(codes, 0)  # [lanes, tiles, 16, words]
    empty = {"int4": 0x88888888, "int8": 0x80808080}.get(kind, 0)
    short = -(-columns // BLOCK) * BLOCK * parts[0].format.bits // (8 * of_code.itemsize) - of_code.shape[-1]
    of_code = np.pad(of_code, [(0, 0)] * 3 + [(0, short)], constant_values=empty) if short else of_code
    of_scale = None if whole_rows else tiled(scales, "edge")
    shared = kind == "fp8" and of_scale is not None and bool((of_scale == of_scale[:, :, :1]).all())
    code_type = CODES[kind]
    scale_type = {"mxfp4": E8M0, "nvfp4": E4M3}.get(kind) if not wide else SCALES["float32"]
    if whole_rows:
        scale_type = 0
    elif scale_type is None:
        scale_type = SCALES[of_scale.dtype.name]
    pieces = []  # uint8 [lanes, tiles, units, bytes of a unit]: two tiles alternate by units
    if rows:
        pieces.append(_bytes(tiled(factors, 0))[:, :, None])
    of_zero = tiled(zero_points, INT4_ZERO) if zeros else None
    for first in range(0, columns, CHUNK):
        here = min(CHUNK, columns - first)
        if group:
            groups = slice(first // group, first // group + -(-here // group))
            part = of_scale[:, :, :1, groups] if shared else of_scale[..., groups]
            found = [_bytes(part.swapaxes(2, 3))]
            if zeros:
                found.append(_bytes(of_zero[..., groups].swapaxes(2, 3)))
            found = np.concatenate(found, -1)
            pieces.append(np.pad(found, [(0, 0), (0, 0), (0, -found.shape[-1] % 64)])[:, :, None])
        per = 8 * of_code.itemsize // parts[0].format.bits
        end = -(-(first + here) // BLOCK) * BLOCK // per
        lines = _bytes(of_code[..., first // per : end].swapaxes(2, 3))
        pieces.append(lines.reshape(*lines.shape[:2], -1, LINE))
    return Tiles((code_type, scale_type, group, shared, zeros, rows), _streams(pieces, 1 if kind == "fp8" else 2))


def _streams(pieces: list[np.ndarray], together: int) -> np.ndarray:
    """Pieces of all tiles, as [lanes, bytes]: piece by piece of two tiles at a time, whose units alternate, or of one.
    A last tile is by itself.
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
    """The codes of a row in words that stay together in a tile, [*lanes, rows, words]: of 8 columns in 4 bits, 4 in
    int8, 2 in fp8.
    """
    codes = part.codes
    if part.kind == "int8":
        codes = codes.view(np.uint8) ^ 0x80
    per = {"int8": 4, "fp8": 2}.get(part.kind, 4)
    fill = {"int8": 0x80, "int4": 0x88}.get(part.kind, 0)
    if part.kind == "int4" and part.columns % 2:
        codes = codes.copy()
        codes[..., -1] |= INT4_ZERO << 4
    if short := -codes.shape[-1] % per:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)], constant_values=fill)
    words = np.ascontiguousarray(codes).view(np.uint16 if part.kind == "fp8" else np.uint32)
    if part.format.bits == 8:
        return words
    low, high = words & 0x0F0F, words >> 16 & 0x0F0F  # even columns of the first and the last four
    odd_low, odd_high = words >> 4 & 0x0F0F, words >> 20 & 0x0F0F
    even, odd = low | high << 4, odd_low | odd_high << 4
    return (even & 0xFF) | (odd & 0xFF) << 8 | (even & 0xFF00) << 8 | (odd & 0xFF00) << 16


def _each_row(part: Quantized, grid: np.ndarray) -> np.ndarray:
    """What has a value for each group, for each row instead of some."""
    return np.repeat(grid, part.group[0], -2)[..., : part.shape[-2], :] if part.group[0] > 1 else grid


def _per_lane(array: np.ndarray, lanes: int) -> np.ndarray:
    """[rows, n] the same in all lanes, or [lanes, rows, n]."""
    return np.broadcast_to(array, (lanes, *array.shape[-2:]))


def _tiled(parts: list[np.ndarray], alternating: bool, fill: int | str) -> np.ndarray:
    """[lanes, rows(, n)] of each part as [lanes, tiles, 16(, n)] of all. fill: of rows that are padding, or `edge`."""

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
    """[lanes, tiles, ...] as uint8 [lanes, tiles, n]."""
    flat = np.ascontiguousarray(array).reshape(*array.shape[:2], -1)
    return flat.view(np.uint8)
