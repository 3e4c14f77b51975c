"""The formats of weights and values (names, widths and scales), and bf12, a lossless 12-bit format of bfloat16, in
NumPy. This file is plain data and does not import JAX.

The high byte of a bfloat16 is its sign and e >> 1, seven bits of its exponent. Trained weights use few values of
e >> 1. bf12 keeps the eight most frequent ones of a matrix in a table, and stores the high byte in four bits: the index
in the table and, in bit 3, the sign. The low byte (the exponent's last bit and the mantissa) is stored unchanged.
Exceptions are weights whose e >> 1 is not in the table. They have code 0, and a list contains their high bytes, so that
any bfloat16 can be stored. `Bf12` stores a matrix row by row, `Bf12Tiles` as files contain it and the CPU kernel reads
it (docs/bf12.md).
"""

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Format:
    """How numbers are stored: `bits` each and, where `group` is set, a scale of `scale_bits` per group."""

    name: str
    bits: int
    """Bits of one number, without its share of a scale."""
    id: int | None = None
    """Number of the format in the kernels' interfaces; None for formats that models do not compute with."""
    group: int = 0
    """Numbers that share a scale; 0: no scale, or one whose bytes are negligible (fp8: one per 128 x 128)."""
    scale_bits: int = 0
    """Bits of one scale."""
    weights_only: bool = False
    """Whether encoding requires all values of a matrix at once, which excludes keys and values."""
    code: Literal["int", "e2m1", "e4m3"] | None = None
    """Meaning of a code in laneformer/quantized; None: the format is not a quantized one."""
    scales: tuple[str, ...] = ()
    """Possible dtypes of the scales in laneformer/quantized; uint8: the bits of E8M0, or of E4M3 for nvfp4."""
    zero: int = 0
    """Code of the number 0, and so the zero point of a record without zero points."""

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Codes as they are stored, [..., ceil(columns / per_byte)], the first one in a byte's lowest bits. codes: one
        number each, [..., columns].
        """
        if self.per_byte == 1:
            return codes
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], -1)
        packed: np.ndarray = codes[..., ::2] | codes[..., 1::2] << 4
        return packed

    def unpack(self, stored: Any, columns: int, xp: ModuleType = np) -> Any:
        """The inverse of `pack`. xp: numpy, or jax.numpy for JAX arrays."""
        if self.per_byte == 1:
            return stored
        return xp.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1)[..., :columns]

    @property
    def bytes(self) -> float:
        """Bytes of one number, including its share of the scale."""
        return (self.bits + (self.scale_bits / self.group if self.group else 0)) / 8


SCALES = ("float32", "bfloat16", "float16")
FORMATS = {
    format.name: format
    for format in (
        Format("float32", 32, id=0),
        Format("bfloat16", 16, id=1),
        Format("float16", 16, id=2),
        Format("bf12", 12, weights_only=True),
        Format("fp8", 8, code="e4m3", scales=SCALES),
        Format("int8", 8, code="int", scales=SCALES),
        Format("int4", 4, group=32, scale_bits=16, code="int", scales=SCALES, zero=8),
        Format("mxfp4", 4, group=32, scale_bits=8, code="e2m1", scales=("uint8",)),
        Format("nvfp4", 4, group=16, scale_bits=8, code="e2m1", scales=("uint8",)),
    )
}
KERNEL_FORMATS = tuple(format.name for format in FORMATS.values() if format.id is not None)
"""Formats of arrays that models compute with and kernels read."""

BF12_TABLE = 8
"""Entries in the table of a bf12 matrix."""
BF12_MOST_EXCEPTIONS = 1e-3
"""Share of exceptions above which a matrix stays bfloat16. Each exception takes 32 bits in a kernel's list."""
BF12_ROWS, BF12_COLUMNS = 16, 8
"""Rows of a tile, and columns of each of its units."""
BF12_LINE = 64
"""Bytes of a line. A unit has three lines: codes, low bytes of columns 0 to 3, low bytes of columns 4 to 7."""
BF12_END = 0xFFFFFFFF
"""Word that ends the exceptions of a tile."""


@dataclass(frozen=True)
class Bf12:
    """A matrix of bfloat16 in 12 bits per weight, without loss."""

    table: np.ndarray
    """The values of e >> 1 by table index, the most frequent first, uint8 [8]."""
    codes: np.ndarray
    """Table index, with the sign in bit 3; column 2 j is in the low half of byte j, uint8 [rows, ceil(columns / 2)]."""
    low: np.ndarray
    """Low bytes of the weights, uint8 [rows, columns]."""
    places: np.ndarray
    """Positions of the exceptions, row * columns + column, ascending, int64 [exceptions]."""
    high: np.ndarray
    """High bytes of the exceptions, uint8 [exceptions]."""

    @classmethod
    def encode(cls, bits: np.ndarray) -> "Bf12":
        """Encodes a matrix. bits: the bits of bfloat16, uint16 [rows, columns]."""
        rows, columns = bits.shape
        high = (bits >> 8).astype(np.uint8)
        table = bf12_table(np.bincount(high.ravel() & 0x7F, minlength=128))
        codes = np.full(256, 0xFF, np.uint8)
        codes[table] = np.arange(BF12_TABLE)
        codes[table | 0x80] = np.arange(BF12_TABLE) | 8
        found = codes[high]
        places = np.flatnonzero(found == 0xFF)
        found[found == 0xFF] = 0
        pairs = np.zeros((rows, columns + columns % 2), np.uint8)
        pairs[:, :columns] = found
        return cls(table, pairs[:, ::2] | pairs[:, 1::2] << 4, bits.astype(np.uint8), places, high.ravel()[places])

    def decode(self) -> np.ndarray:
        """The bits of the matrix in bfloat16, uint16 [rows, columns]."""
        codes = np.empty_like(self.low)
        codes[:, ::2] = self.codes & 15
        codes[:, 1::2] = self.codes[:, : codes.shape[1] // 2] >> 4
        high = np.concatenate([self.table, self.table | 0x80])[codes]
        high.flat[self.places] = self.high
        bits: np.ndarray = high.astype(np.uint16) << 8 | self.low
        return bits


def bf12_table(counts: np.ndarray) -> np.ndarray:
    """The table of a matrix in which e >> 1 = n occurs counts[n] times, int [128]. Of equal counts, the smaller n comes
    first.
    """
    return np.argsort(-counts, kind="stable")[:BF12_TABLE].astype(np.uint8)


def bf12_exceptions(bits: np.ndarray) -> int:
    """Number of weights whose e >> 1 is not in the matrix's table. bits: the bits of bfloat16, uint16 of any shape."""
    counts = np.bincount((bits.ravel() >> 8 & 0x7F).astype(np.uint8), minlength=128)
    return int(counts.sum() - counts[bf12_table(counts)].sum())


def bf12_rounded(bits: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, uint16, with each exception replaced by the nearest value of equal sign that the table can
    represent; of two equally near values, the smaller. Exceptions must be finite.
    """
    rounded, held = bits.copy(), np.zeros(128, bool)
    held[table] = True
    places = np.nonzero(~held[bits >> 8 & 0x7F])
    sizes = bits[places] & 0x7FFF
    entries = np.sort(table).astype(np.uint16)
    number = np.searchsorted(entries, sizes >> 8)  # of the first entry above
    below = entries[np.maximum(number - 1, 0)] << 8 | 0xFF
    above = entries[np.minimum(number, BF12_TABLE - 1)] << 8

    def value(sizes: np.ndarray) -> np.ndarray:
        return (sizes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    nearer = (number == 0) | (number < BF12_TABLE) & (value(above) - value(sizes) < value(sizes) - value(below))
    rounded[places] = np.where(nearer, above, below) | bits[places] & 0x8000
    return rounded


@dataclass(frozen=True)
class Bf12Tiles:
    """Tiles of 16 rows of bfloat16 in 12 bits per weight, cut into units of 8 columns.

    Byte 16 (r // 4) + 8 (c // 2) + 2 (r % 4) + c % 2 of a line belongs to row r and column c of the line's 4 columns.
    """

    table: np.ndarray
    """The values of e >> 1 by table index, uint8 [8]."""
    units: np.ndarray
    """Uint8 [tiles, units, 3, 64]. Lines of a unit: codes, with columns 4 to 7 in the high halves; low bytes of columns
    0 to 3; low bytes of columns 4 to 7.
    """
    exceptions: np.ndarray
    """For each tile, ascending words unit << 15 | slot << 8 | high byte, then BF12_END, uint32 [exceptions + tiles].
    The slot is the index of the weight's byte in the unit's two lines of low bytes.
    """

    @classmethod
    def encode(cls, bits: np.ndarray, table: np.ndarray) -> "Bf12Tiles":
        """Encodes tiles. bits: the bits of bfloat16, uint16 [tiles, 16, columns], with columns a multiple of 8. Pad
        with `table[0] << 8`, whose code and low byte are 0.
        """
        tiles, _, columns = bits.shape
        # Two neighbouring columns of a line are one uint32.
        pairs = np.ascontiguousarray(bits).view(np.uint32).reshape(tiles, 4, 4, columns // BF12_COLUMNS, 2, 2)
        lines = np.ascontiguousarray(pairs.transpose(0, 3, 4, 1, 5, 2)).view(np.uint16)
        lines = lines.reshape(tiles, columns // BF12_COLUMNS, 2, BF12_LINE)
        of_high = np.full(256, 0xFF, np.uint8)
        of_high[table], of_high[table | 0x80] = np.arange(BF12_TABLE), np.arange(BF12_TABLE) | 8
        high = (lines >> 8).astype(np.uint8)
        codes = of_high[high]
        tile, unit, half, slot = np.nonzero(codes == 0xFF)
        codes[tile, unit, half, slot] = 0
        units = np.empty((*lines.shape[:2], 3, BF12_LINE), np.uint8)
        units[:, :, 0] = codes[:, :, 0] | codes[:, :, 1] << 4
        units[:, :, 1:] = lines.astype(np.uint8)
        exceptions = np.full(len(tile) + tiles, BF12_END, np.uint32)
        words = unit << 15 | (BF12_LINE * half + slot) << 8 | high[tile, unit, half, slot]
        exceptions[np.arange(len(tile)) + tile] = words
        return cls(np.asarray(table, np.uint8), units, exceptions)

    def decode(self, tiles: range) -> np.ndarray:
        """The bits of these tiles in bfloat16, uint16 [tiles, 16, columns]."""
        units = self.units[tiles.start : tiles.stop : tiles.step]
        count = units.shape[1]
        high = np.concatenate([self.table, self.table | 0x80])[np.stack([units[:, :, 0] & 15, units[:, :, 0] >> 4], 2)]
        begins = np.concatenate([[0], self._ends + 1])
        words = self.exceptions[begins[tiles.start] : begins[tiles.stop]]
        ends = words == BF12_END
        tile, left = np.divmod(np.cumsum(ends), tiles.step)
        listed = ~ends & (left == 0)
        words, tile = words[listed], tile[listed]
        high.reshape(len(units), -1)[tile, (words >> 15) * 2 * BF12_LINE + (words >> 8 & 127)] = words & 0xFF
        lines = high.astype(np.uint16) << 8 | units[:, :, 1:]
        pairs = lines.view(np.uint32).reshape(len(units), count, 2, 4, 2, 4).transpose(0, 3, 5, 1, 2, 4)
        return np.ascontiguousarray(pairs).view(np.uint16).reshape(len(units), BF12_ROWS, count * BF12_COLUMNS)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Index of each tile's BF12_END in the exceptions, int [tiles]."""
        return np.flatnonzero(self.exceptions == BF12_END)

    def problem(self, columns: int) -> str | None:
        """What is wrong with the table or the exceptions of tiles with `columns` columns; None if nothing is."""
        if len(np.unique(self.table)) != BF12_TABLE or self.table.max() > 127:
            return f"the table {self.table.tolist()} must have {BF12_TABLE} different values up to 127"
        words = self.exceptions
        if len(self._ends) != len(self.units) or self._ends[-1] != len(words) - 1:
            return f"the exceptions must have an end for each of {len(self.units)} tiles, and no word after the last"
        listed = words[words != BF12_END]
        slot = listed >> 8 & 127
        if ((listed >> 15) * BF12_COLUMNS + slot // 64 * 4 + slot // 8 % 2 * 2 + slot % 2 >= columns).any():
            return f"an exception is outside the {columns} columns"
        if ((words[1:] <= words[:-1]) & (words[:-1] != BF12_END)).any():
            return "the exceptions of a tile must ascend"
        return None

    @property
    def surely_finite(self) -> bool:
        """Whether the table and the exceptions rule out infinite and NaN weights."""
        listed = self.exceptions[self.exceptions != BF12_END]
        return 0x7F not in self.table and not (listed & 0x7F == 0x7F).any()


@dataclass(frozen=True)
class Bf12Product:
    """The matrices of one product, in all lanes, in 12 bits per weight."""

    paths: tuple[str, ...]
    """Paths of the weights, in the order of their rows."""
    interleaved: bool
    """Whether tiles alternate between the matrices; otherwise the matrices' rows follow each other."""
    tiles: Bf12Tiles
    """Tiles of all lanes, lane by lane."""
