"""The formats of weights and values: names, widths and scales; and bf12, bfloat16 in 12 bits without loss, in NumPy.
Plain data, imported where JAX is not.

The high byte of a bfloat16 is its sign and e >> 1, seven bits of its exponent, of which trained weights use few values.
bf12 keeps the eight most frequent of a matrix in a table and stores four bits for the high byte: the index in the table
and, in bit 3, the sign. The low byte (the exponent's last bit, the mantissa) is stored as it is. Exceptions are the
weights whose e >> 1 is not in the table: they have code 0, and a list has their high bytes. Any bfloat16 can be held.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """How numbers are stored: `bits` each and, where `group` is set, a scale of `scale_bits` per group."""

    name: str
    bits: int
    """Bits of one number, without its share of a scale."""
    id: int | None = None
    """Number of the format in the kernels' interfaces; None: no kernel reads it yet, the roofline projects it."""
    group: int = 0
    """Numbers that share a scale; 0: no scale, or one whose bytes do not count (fp8: one per 128 x 128)."""
    scale_bits: int = 0
    """Bits of one scale."""
    weights_only: bool = False
    """Whether it is made from all values of a matrix, which keys and values are not known by."""

    @property
    def bytes(self) -> float:
        """Bytes of one number, its share of the scale included."""
        return (self.bits + (self.scale_bits / self.group if self.group else 0)) / 8


FORMATS = {
    format.name: format
    for format in (
        Format("float32", 32, id=0),
        Format("bfloat16", 16, id=1),
        Format("float16", 16, id=2),
        Format("bf12", 12, weights_only=True),
        Format("fp8", 8),
        Format("int8", 8),
        Format("int4", 4, group=32, scale_bits=16),
        Format("mxfp4", 4, group=32, scale_bits=8),
    )
}
KERNEL_FORMATS = tuple(format.name for format in FORMATS.values() if format.id is not None)
"""Formats that models compute with and kernels read."""

BF12_TABLE = 8
"""Entries in the table of a bf12 matrix."""
BF12_MOST_EXCEPTIONS = 1e-3
"""Share of exceptions above which a matrix stays bfloat16: each takes 32 bits in a kernel's list."""


@dataclass(frozen=True)
class Bf12:
    """A matrix of bfloat16 in 12 bits per weight; equal to what it was made from, bit for bit."""

    table: np.ndarray
    """The values of e >> 1 that codes stand for, the most frequent first, uint8 [8]."""
    codes: np.ndarray
    """Index in the table, sign in bit 3; column 2 j in the low half of byte j, uint8 [rows, ceil(columns / 2)]."""
    low: np.ndarray
    """The weights' low bytes, uint8 [rows, columns]."""
    places: np.ndarray
    """Places of the exceptions, row * columns + column, ascending, int64 [exceptions]."""
    high: np.ndarray
    """Their high bytes, uint8 [exceptions]."""

    @classmethod
    def encode(cls, bits: np.ndarray) -> "Bf12":
        """bits: uint16 [rows, columns], the bits of bfloat16."""
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
        """The bits of bfloat16, uint16 [rows, columns]."""
        codes = np.empty_like(self.low)
        codes[:, ::2] = self.codes & 15
        codes[:, 1::2] = self.codes[:, : codes.shape[1] // 2] >> 4
        high = np.concatenate([self.table, self.table | 0x80])[codes]
        high.flat[self.places] = self.high
        return high.astype(np.uint16) << 8 | self.low


def bf12_table(counts: np.ndarray) -> np.ndarray:
    """The table of a matrix in which e >> 1 = n occurs counts[n] times, int [128]; the smaller first among equals."""
    return np.argsort(-counts, kind="stable")[:BF12_TABLE].astype(np.uint8)


def bf12_exceptions(bits: np.ndarray) -> int:
    """Weights of a matrix, the bits of bfloat16 as uint16, whose e >> 1 is not in the table."""
    counts = np.bincount((bits.ravel() >> 8 & 0x7F).astype(np.uint8), minlength=128)
    return int(counts.sum() - counts[bf12_table(counts)].sum())
