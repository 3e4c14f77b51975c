"""Weight formats: their widths, scales and numbers for the kernels; bf12 keeps every bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from laneformer.formats import (
    BF12_END,
    BF12_MOST_EXCEPTIONS,
    FORMATS,
    KERNEL_FORMATS,
    Bf12,
    Bf12Tiles,
    bf12_exceptions,
    bf12_rounded,
)


def test_bytes_include_the_scales():
    widths = {name: 8 * format.bytes for name, format in FORMATS.items()}
    expected = {"float32": 32, "bfloat16": 16, "float16": 16, "bf12": 12, "fp8": 8, "int8": 8}
    assert widths == expected | {"int4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}


@pytest.mark.parametrize(("name", "number"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_kernels_number_their_formats(name, number):
    assert FORMATS[name].id == number and name in KERNEL_FORMATS
    assert FORMATS[name].bytes == np.dtype(name if name != "bfloat16" else "uint16").itemsize


def test_other_formats_have_no_number():
    assert [name for name in FORMATS if name not in KERNEL_FORMATS] == ["bf12", "fp8", "int8", "int4", "mxfp4", "nvfp4"]


def normal(shape, seed=0, scale=0.02) -> np.ndarray:
    """The bits of normal weights in bfloat16."""
    values = scale * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(values.astype(jnp.bfloat16)).view(np.uint16)


def outside(bits: np.ndarray) -> int:
    """Number of exceptions by definition: weights without one of the eight most frequent values of e >> 1."""
    counts = np.unique((bits & 0x7FFF) >> 8, return_counts=True)[1]
    return int(counts.sum() - np.sort(counts)[-8:].sum())


ALL = np.arange(1 << 16, dtype=np.uint16)
BITS = {
    "every pattern": ALL.reshape(64, 1024),
    "every pattern, odd columns": np.append(ALL, ALL[-1:]).reshape(1, 65537),
    "random bits": np.random.default_rng(1).integers(0, 1 << 16, (16, 37), np.uint16),
    "normal, 1 column": normal((40, 1)),
    "normal, 37 columns": normal((40, 37)),
    "normal, 3,070 columns": normal((48, 3070)),
    "zeros of both signs": np.array([[0, 0x8000, 0x8000], [0, 0, 0x8000]], np.uint16),
    "subnormals": np.random.default_rng(2).integers(1, 0x80, (3, 9), np.uint16) | np.uint16(0x8000),
    "infinities and NaN": np.array([[0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81]], np.uint16),
    "half pruned": np.where(np.random.default_rng(3).random((64, 96)) < 0.5, 0, normal((64, 96))).astype(np.uint16),
    "empty": np.zeros((0, 4), np.uint16),
}


@pytest.mark.parametrize("name", BITS)
def test_bf12_keeps_every_bit(name):
    bits = BITS[name]
    packed = Bf12.encode(bits)
    np.testing.assert_array_equal(packed.decode(), bits)
    assert packed.codes.shape == (len(bits), (bits.shape[1] + 1) // 2) and packed.low.shape == bits.shape
    assert len(packed.places) == len(packed.high) == bf12_exceptions(bits) == outside(bits)
    assert (np.diff(packed.places) > 0).all()


def tiles_of(bits: np.ndarray) -> tuple[Bf12, Bf12Tiles, np.ndarray]:
    """A matrix as Bf12, as Bf12Tiles, and as padded bits, uint16 [tiles, 16, columns]."""
    packed = Bf12.encode(bits)
    rows, columns = bits.shape
    padded = np.full((-(-max(rows, 1) // 16) * 16, -(-columns // 8) * 8), int(packed.table[0]) << 8, np.uint16)
    padded[:rows, :columns] = bits
    padded = padded.reshape(-1, 16, padded.shape[1])
    return packed, Bf12Tiles.encode(padded, packed.table), padded


@pytest.mark.parametrize("name", BITS)
def test_tiles_keep_every_bit(name):
    """All tiles are decoded, then every third one."""
    packed, tiles, padded = tiles_of(BITS[name])
    count = len(padded)
    np.testing.assert_array_equal(tiles.decode(range(0, count, 1)), padded)
    np.testing.assert_array_equal(tiles.decode(range(count // 4, count, 3)), padded[count // 4 :: 3])
    assert len(tiles.exceptions) == len(packed.places) + count and tiles.problem(BITS[name].shape[1]) is None
    values = BITS[name] & 0x7F80
    assert tiles.surely_finite == (not (values >= 0x7F00).any())


def test_tiles_have_the_documented_places():
    """Codes and low bytes are where the formula in docs/bf12.md says."""
    random = np.random.default_rng(0)
    bits = (random.choice([0x31, 0x33, 0x34, 0x35, 0xB1, 0xB3, 0xB8, 0xC0, 0xC1, 0x42], (16, 24)) << 8).astype(
        np.uint16
    )
    bits += random.integers(0, 256, bits.shape, np.uint16)
    bits[5, 13] = 0x1234
    packed, tiles, _ = tiles_of(bits)
    for row, column in np.ndindex(16, 24):
        unit, half, c = column // 8, column % 8 // 4, column % 4
        byte = 16 * (row // 4) + 8 * (c // 2) + 2 * (row % 4) + c % 2
        assert tiles.units[0, unit, 1 + half, byte] == bits[row, column] & 0xFF
        code = packed.codes[row, column // 2] >> 4 * (column % 2) & 15
        assert tiles.units[0, unit, 0, byte] >> 4 * half & 15 == code
    byte = 64 + 16 + 2 + 1  # row 5, columns 12 to 15 are the second half of unit 1
    assert 1 << 15 | byte << 8 | 0x12 in tiles.exceptions and tiles.exceptions[-1] == BF12_END


@given(arrays.arrays(np.uint16, arrays.array_shapes(min_dims=2, max_dims=2, max_side=24)))
def test_bf12_keeps_any_bits(bits):
    packed = Bf12.encode(bits)
    np.testing.assert_array_equal(packed.decode(), bits)
    assert len(packed.places) == outside(bits)


@given(st.sets(st.integers(0, 127), max_size=33), st.integers(0, 255))
def test_exceptions_side_by_side_are_listed(places, high):
    """In a unit of 16 rows and 8 columns of a matrix in which e >> 1 otherwise takes the eight values of a table."""
    bits = np.tile((np.arange(0x38, 0x40, dtype=np.uint16) << 8) + 5, (100, 16, 1))
    for place in places:
        bits[7, place // 8, place % 8] = high << 8
    packed = Bf12.encode(bits.reshape(1600, 8))
    np.testing.assert_array_equal(packed.decode(), bits.reshape(1600, 8))
    listed = [] if 0x38 <= high & 0x7F < 0x40 else sorted(7 * 128 + place for place in places)
    assert packed.places.tolist() == listed and (packed.high == high).all()
    tiles = Bf12Tiles.encode(bits, packed.table)
    np.testing.assert_array_equal(tiles.decode(range(5, 9, 1)), bits[5:9])
    assert len(tiles.exceptions) == 100 + len(listed) and tiles.problem(8) is None


def test_normal_weights_have_few_exceptions():
    """About 0.7e-4 of normal weights are exceptions: P(|x| < 2^-14 of the largest table entry's range)."""
    share = outside(normal((512, 3072))) / (512 * 3072)
    assert 2e-5 < share < 2e-4 < BF12_MOST_EXCEPTIONS
    assert outside(BITS["random bits"]) / BITS["random bits"].size > 0.5


def test_bf12_rounds_to_the_nearer_neighbour():
    """Between 0.498046875 (0x3EFF) and 2, below the smallest value, above the largest, and for values in the table."""
    table = np.array([64, 62, 61, 60, 65, 66, 67, 68], np.uint8)
    bits = {0x3F00: 0x3EFF, 0x3F9F: 0x3EFF, 0x3FA0: 0x4000, 0xBFFF: 0xC000, 0: 0x3C00, 0x8001: 0xBC00}
    bits |= {0x7F7F: 0x44FF, 0x4500: 0x44FF, 0x3EFF: 0x3EFF, 0xC412: 0xC412}
    assert bf12_rounded(np.array([*bits], np.uint16), table).tolist() == [*bits.values()]
