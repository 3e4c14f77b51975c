"""Weight formats: widths, scales, ids of the kernels; bf12 gives every bit back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from laneformer.formats import BF12_MOST_EXCEPTIONS, FORMATS, KERNEL_FORMATS, Bf12, bf12_exceptions


def test_bytes_include_the_scales():
    widths = {name: 8 * format.bytes for name, format in FORMATS.items()}
    expected = {"float32": 32, "bfloat16": 16, "float16": 16, "bf12": 12, "fp8": 8, "int8": 8}
    assert widths == expected | {"int4": 4.5, "mxfp4": 4.25}


@pytest.mark.parametrize(("name", "number"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_kernels_number_their_formats(name, number):
    assert FORMATS[name].id == number and name in KERNEL_FORMATS
    assert FORMATS[name].bytes == np.dtype(name if name != "bfloat16" else "uint16").itemsize


def test_other_formats_have_no_number():
    assert [name for name in FORMATS if name not in KERNEL_FORMATS] == ["bf12", "fp8", "int8", "int4", "mxfp4"]


def normal(shape, seed=0, scale=0.02) -> np.ndarray:
    """The bits of normal weights in bfloat16."""
    values = scale * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(values.astype(jnp.bfloat16)).view(np.uint16)


def outside(bits: np.ndarray) -> int:
    """Exceptions by the definition: those without one of the eight most frequent e >> 1."""
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
def test_bf12_gives_every_bit_back(name):
    bits = BITS[name]
    packed = Bf12.encode(bits)
    np.testing.assert_array_equal(packed.decode(), bits)
    assert packed.codes.shape == (len(bits), (bits.shape[1] + 1) // 2) and packed.low.shape == bits.shape
    assert len(packed.places) == len(packed.high) == bf12_exceptions(bits) == outside(bits)
    assert (np.diff(packed.places) > 0).all()


@given(arrays.arrays(np.uint16, arrays.array_shapes(min_dims=2, max_dims=2, max_side=24)))
def test_bf12_gives_any_bits_back(bits):
    packed = Bf12.encode(bits)
    np.testing.assert_array_equal(packed.decode(), bits)
    assert len(packed.places) == outside(bits)


@given(st.sets(st.integers(0, 127), max_size=33), st.integers(0, 255))
def test_exceptions_side_by_side_are_listed(places, high):
    """Of a matrix of one unit of a kernel, 16 rows and 8 columns, in which e >> 1 takes the eight values of a table."""
    bits = np.tile((np.arange(0x38, 0x40, dtype=np.uint16) << 8) + 5, (100, 16, 1))
    for place in places:
        bits[7, place // 8, place % 8] = high << 8
    packed = Bf12.encode(bits.reshape(1600, 8))
    np.testing.assert_array_equal(packed.decode(), bits.reshape(1600, 8))
    listed = [] if 0x38 <= high & 0x7F < 0x40 else sorted(7 * 128 + place for place in places)
    assert packed.places.tolist() == listed and (packed.high == high).all()


def test_trained_like_weights_have_few_exceptions():
    """Normal weights, 0.7e-4 of them: P(|x| < 2^-14 of the largest table entry's range)."""
    share = outside(normal((512, 3072))) / (512 * 3072)
    assert 2e-5 < share < 2e-4 < BF12_MOST_EXCEPTIONS
    assert outside(BITS["random bits"]) / BITS["random bits"].size > 0.5
