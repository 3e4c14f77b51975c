"""Records of weights in 8 and 4 bits: the value of every code with every scale against ml_dtypes, checks of damaged
records, and cuts that move codes and scales together.
"""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from laneformer.formats import FORMATS
from laneformer.quantized import Quantized, narrow_scales

FLOAT4, FLOAT8, EXPONENT = (
    np.dtype(getattr(ml_dtypes, name)) for name in ("float4_e2m1fn", "float8_e4m3fn", "float8_e8m0fnu")
)
BYTES = np.arange(256, dtype=np.uint8)
NIBBLES = np.arange(16, dtype=np.uint8)
NUMBERS = BYTES[~np.isnan(BYTES.view(FLOAT8).astype(np.float32))]
HALVES = np.arange(1 << 16, dtype=np.uint16)


def finite(dtype) -> np.ndarray:
    """All finite values of a 16-bit dtype."""
    values = HALVES.view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


# Kind -> all codes, their values by ml_dtypes, scales, and their values by ml_dtypes
TABLE = {
    "mxfp4": (NIBBLES, NIBBLES.view(FLOAT4), BYTES[:255], BYTES[:255].view(EXPONENT)),
    "nvfp4": (NIBBLES, NIBBLES.view(FLOAT4), NUMBERS, NUMBERS.view(FLOAT8)),
    "int4": (NIBBLES, NIBBLES.astype(np.int8) - np.int8(8), *[finite(ml_dtypes.bfloat16)] * 2),
    "int8": (BYTES.view(np.int8), BYTES.view(np.int8), *[finite(np.float16)[::7]] * 2),
    "fp8": (NUMBERS, NUMBERS.view(FLOAT8), *[finite(ml_dtypes.bfloat16)[::7]] * 2),
}


def record(kind, codes, scales, group, **more) -> Quantized:
    """A record of codes that are not packed yet, [rows, columns]."""
    packed = FORMATS[kind].pack(codes)
    return Quantized(kind, packed, scales, group, codes.shape[-1], **more)


@pytest.mark.parametrize("kind", TABLE)
def test_every_code_and_scale_has_its_exact_value(kind):
    """Each row has all codes and one scale. Some products overflow in float32, in the record and in the expectation."""
    codes, values, scales, real = TABLE[kind]
    found = record(kind, np.tile(codes, (len(scales), 1)), scales[:, None], (1, len(codes)))
    assert found.problem() is None
    expected = values.astype(np.float64) * real.astype(np.float64)[:, None]
    assert same_bits(found.dequantize(), expected)
    with np.errstate(over="ignore"):
        assert same_bits(found.dequantize(np.float32), expected.astype(np.float32))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_zero_points_are_subtracted_and_the_global_scale_divides():
    points = np.repeat(NIBBLES, 16)[:, None]
    found = record("int4", np.tile(NIBBLES, (256, 1)), np.ones((256, 1), np.float16), (1, 16), zero_points=points)
    assert (found.dequantize() == np.arange(16) - np.repeat(np.arange(16), 16)[:, None]).all()
    signed = BYTES.view(np.int8)
    found = record(
        "int8", np.tile(signed, (256, 1)), np.ones((256, 1), np.float32), (1, 256), zero_points=signed[:, None]
    )
    assert (found.dequantize() == signed.astype(int) - signed.astype(int)[:, None]).all()
    scales = NUMBERS[:, None]
    found = record(
        "nvfp4", np.tile(NIBBLES, (254, 1)), scales, (1, 16), global_scale=np.float32(3) * np.ones((), np.float32)
    )
    real = scales.view(FLOAT8).astype(np.float32) / np.float32(3)
    assert same_bits(found.dequantize(np.float32), NIBBLES.view(FLOAT4).astype(np.float32) * real)


@pytest.mark.parametrize("columns", [1, 2, 7, 8])
def test_unpacking_is_the_inverse_of_packing(columns):
    codes = np.random.default_rng(0).integers(0, 16, (3, columns), np.uint8)
    packed = FORMATS["int4"].pack(codes)
    assert (packed[:, 0] & 15 == codes[:, 0]).all() and (FORMATS["int4"].unpack(packed, columns) == codes).all()


def random_record(kind: str, group, shape=(24, 96), seed=0, zeros=False) -> Quantized:
    rng = np.random.default_rng(seed)
    codes, _, scales, _ = TABLE[kind]
    grid = (-(-shape[0] // group[0]), -(-shape[1] // group[1]))
    points = rng.choice(codes, grid) if zeros else None
    return record(
        kind,
        rng.choice(codes, shape),
        rng.choice(scales[scales.astype(np.float32) != 0], grid),
        group,
        zero_points=points,
    )


CUT = {
    "groups": random_record("int4", (1, 32)),
    "groups with zero points": random_record("int4", (1, 32), zeros=True),
    "odd columns": random_record("int4", (1, 32), (24, 93)),
    "rows": random_record("int8", (1, 96), zeros=True),
    "blocks": random_record("fp8", (8, 32)),
    "blocks larger than the matrix": random_record("fp8", (128, 128)),
    "tensor": random_record("fp8", (24, 96)),
    "exponents": random_record("mxfp4", (1, 32)),
    "two scales": replace(random_record("nvfp4", (1, 16)), global_scale=np.full((), 5, np.float32)),
}


@pytest.mark.parametrize("name", CUT)
def test_codes_and_scales_move_together(name):
    """Rows and columns are cut into lanes that fit the groups or do not. Rows are permuted within and across blocks."""
    found = CUT[name]
    weights, (rows, columns) = found.dequantize(), found.shape
    for lanes in (1, 2, 3, 4, 6):
        cut = found.split_rows(lanes)
        assert cut.problem() is None and same_bits(cut.dequantize(), weights.reshape(lanes, -1, columns))
        if columns % lanes == 0:
            cut = found.split_columns(lanes)
            expected = np.ascontiguousarray(weights.reshape(rows, lanes, -1).swapaxes(0, 1))
            assert cut.problem() is None and same_bits(cut.dequantize(), expected)
            assert same_bits(cut.join_columns().dequantize(), weights)
    within = np.arange(rows).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)
    for places in (within, np.random.default_rng(1).permutation(rows)):
        moved = found.take_rows(places)
        assert moved.problem() is None and same_bits(moved.dequantize(), weights[places])
    assert found.take_rows(within).group == found.group


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize(
    ("parts", "first", "count"), [(1, 0, 24), (1, 5, 19), (2, 0, 7), (2, 7, 5), (3, 4, 4), (4, 1, 2)]
)
def test_rows_of_heads_are_cut_and_transposed(name, parts, first, count):
    found = CUT[name]
    weights = found.dequantize().reshape(parts, -1, found.columns)[:, first : first + count]
    for transposed, expected in ((False, weights), (True, weights.swapaxes(-1, -2))):
        for lanes in (False, True):
            record = replace(found, **{n: a[None] for n, a in found.arrays.items() if a.ndim > 1}) if lanes else found
            cut = record.cut(parts, first, count, transposed)
            assert cut.problem() is None
            assert same_bits(cut.dequantize(), np.ascontiguousarray(expected[None] if lanes else expected))


def test_cut_restores_the_order_of_columns():
    order = np.random.default_rng(2).permutation(96).astype(np.int32)
    found = replace(CUT["groups"], order=order)
    expected = found.dequantize().reshape(2, 12, 96)[:, 3:9]
    assert same_bits(found.cut(2, 3, 6, False).dequantize(), np.ascontiguousarray(expected))
    assert same_bits(found.cut(2, 3, 6, True).dequantize(), np.ascontiguousarray(expected.swapaxes(1, 2)))


def test_order_permutes_the_columns():
    order = np.random.default_rng(2).permutation(96).astype(np.int32)
    found = replace(CUT["groups"], order=order)
    assert found.problem() is None
    assert same_bits(found.dequantize()[:, order], CUT["groups"].dequantize())
    assert same_bits(found.split_columns(1).dequantize()[0], found.dequantize())
    with pytest.raises(ValueError, match="2 lanes"):
        found.split_columns(2)


WRONG = {  # record, changes, expected in the problem
    "kind": ("groups", {"kind": "int5"}, "kind 'int5' is not one of int4"),
    "codes": ("groups", {"codes": np.zeros((24, 48), np.int8)}, r"codes are int8 \[24, 48\], not uint8"),
    "axes": ("groups", {"codes": np.zeros(48, np.uint8)}, "2, 3 or 4 axes"),
    "columns": ("groups", {"columns": 95 + 2}, "48 bytes, but 97 columns need 49"),
    "scales": ("groups", {"scales": np.ones((24, 2), np.float32)}, r"\[24, 2\], but groups of 1 x 32 need \[24, 3\]"),
    "dtype of scales": ("groups", {"scales": np.ones((24, 3))}, "scales are float64, not float32 or bfloat16"),
    "group": ("groups", {"group": (1, 0)}, "at least 1 row"),
    "zero points": ("groups", {"zero_points": np.zeros((24, 3), np.int8)}, "zero points are int8"),
    "large zero points": ("groups", {"zero_points": np.full((24, 3), 16, np.uint8)}, r"zero point 16 at \[0, 0\]"),
    "zero points of fp8": ("blocks", {"zero_points": np.zeros((3, 3), np.uint8)}, "fp8 has no zero points"),
    "global scale": ("groups", {"global_scale": np.ones((), np.float32)}, "of int4, not float32"),
    "global scale 0": ("two scales", {"global_scale": np.zeros((), np.float32)}, "0.0 must be finite"),
    "order": ("groups", {"order": np.zeros(96, np.int32)}, "each of the 96 columns once"),
    "short order": ("groups", {"order": np.arange(95, dtype=np.int32)}, r"\[95\], not int32 \[96\]"),
    "NaN as code": ("blocks", {"codes": np.full((24, 96), 0xFF, np.uint8)}, r"code 0xff at \[0, 0\] is not a number"),
    "NaN as E8M0": ("exponents", {"scales": np.full((24, 3), 255, np.uint8)}, r"scale 255 at \[0, 0\]"),
    "infinite scale": ("groups", {"scales": np.full((24, 3), np.inf, np.float16)}, r"scale inf at \[0, 0\]"),
    "padding": ("odd columns", {"codes": np.full((24, 47), 0x11, np.uint8)}, "there are 93 columns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_problem_names_what_is_wrong(name):
    of, changes, expected = WRONG[name]
    assert CUT[of].problem() is None
    assert re.search(expected, replace(CUT[of], **changes).problem())


def test_scales_become_narrow_only_without_loss():
    bf16 = np.float32([[1, 2.5, 2**-100]])
    assert narrow_scales(bf16).dtype == ml_dtypes.bfloat16 and (narrow_scales(bf16) == bf16).all()
    half = np.float16([[1 / 3, 1]])
    assert narrow_scales(half).dtype == np.float32 and (narrow_scales(half) == half).all()


def test_names_and_bytes_describe_the_record():
    names = {
        "groups": "int4 group 32",
        "groups with zero points": "int4 group 32, zero points",
        "rows": "int8 row, zero points",
        "blocks": "fp8 block 8 x 32",
        "tensor": "fp8 tensor",
        "exponents": "mxfp4 group 32",
    }
    assert {name: CUT[name].name for name in names} == names
    weights = 24 * 96
    assert CUT["groups"].nbytes == weights // 2 + weights // 32 * 2
    assert CUT["groups with zero points"].nbytes == CUT["groups"].nbytes + weights // 32 // 2
    assert CUT["two scales"].nbytes == weights // 2 + weights // 16 + 4
