"""Rounding to 8 and 4 bits: nearest codes, scales, and the errors of normal weights."""

import ml_dtypes
import numpy as np
import pytest

from laneformer import ConfigError
from laneformer.quantized import E2M1, E4M3
from laneformer.quantized.rounding import ALLOWED, LARGEST_E4M3, relative_error, round_to

NORMAL = np.random.default_rng(0).standard_normal((256, 1024), np.float32)


def uniform(shared: int) -> float:
    """Relative error with steps of max|w| / 127 for `shared` weights: the step divided by the square root of 12."""
    return float(np.sqrt(np.mean(np.square(np.abs(NORMAL.reshape(-1, shared)).max(1) / 127)) / 12))


# Relative errors of normal weights; those of 4 bits and fp8 were measured when the formats were chosen.
ERRORS = {
    ("int8", "row"): uniform(1024),
    ("int8", 32): uniform(32),
    ("int8", 64): uniform(64),
    ("int8", 128): uniform(128),
    ("fp8", "block"): 0.0264,
    ("fp8", "row"): 0.0264,
    ("fp8", "tensor"): 0.0264,
    ("int4", 32): 0.0863,
    ("int4", 64): 0.094,
    ("int4", 128): 0.101,
    ("mxfp4", 32): 0.1116,
    ("nvfp4", 16): 0.0953,
}
VALUES = {  # values of the codes
    "int4": np.arange(-8, 8),
    "int8": np.arange(-128, 128),
    "fp8": E4M3[~np.isnan(E4M3)],
    "mxfp4": E2M1,
    "nvfp4": E2M1,
}


@pytest.mark.parametrize(("kind", "shared"), ERRORS)
def test_codes_are_the_nearest(kind, shared):
    """A search over all codes finds none that is nearer with the chosen scales. The error is that of the format."""
    found = round_to(NORMAL, kind, shared)
    assert found.problem() is None
    rows, columns = found.group
    scales = np.repeat(np.repeat(found.scale_values(), rows, 0), columns, 1)[: NORMAL.shape[0], : NORMAL.shape[1]]
    scales = scales if found.global_scale is None else scales / found.global_scale
    values = np.sort(VALUES[kind].astype(np.float32))
    exact = NORMAL / scales
    above = np.clip(np.searchsorted(values, exact), 1, len(values) - 1)
    nearest = np.minimum(np.abs(values[above] - exact), np.abs(values[above - 1] - exact))
    distance = np.abs(found.dequantize() / scales - exact)
    assert (distance <= nearest * (1 + 1e-3) + 1e-5).all()
    assert relative_error(NORMAL, found) == pytest.approx(ERRORS[kind, shared], rel=0.03)


def test_every_allowed_group_is_tested():
    assert {*ERRORS} == {(kind, shared) for kind, allowed in ALLOWED.items() for shared in allowed}


def test_scales_fit_the_largest_weights():
    """With 8 bits, the largest weight gets the largest code. Scales of mxfp4 are the better of two powers of two."""
    found = round_to(NORMAL, "int8")
    assert (np.abs(found.codes).max(1) == 127).all() and found.scales.dtype == np.float32
    found = round_to(NORMAL, "fp8", "row")
    assert (np.abs(E4M3[found.codes]).max(1) == LARGEST_E4M3).all()
    found = round_to(NORMAL, "mxfp4")
    grouped = NORMAL.reshape(256, -1, 32).astype(np.float64)
    floor = 2.0 ** (np.floor(np.log2(np.abs(grouped).max(2))) - 2)
    errors = []
    for scale in (floor, 2 * floor):
        codes = np.clip(grouped / scale[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        errors.append(np.square(codes * scale[..., None] - grouped).sum(2))
    assert (found.scale_values() == np.where(errors[1] < errors[0], 2 * floor, floor)).mean() > 0.999


def test_lanes_partial_blocks_and_zeros_are_rounded():
    lanes = np.zeros((2, 130, 160), np.float32)
    lanes[1, 129, 159] = 1e-30
    for kind in ALLOWED:
        found = round_to(lanes, kind)
        assert found.problem() is None and found.shape == lanes.shape
        assert (found.dequantize()[0] == 0).all() and (found.dequantize()[:, :129] == 0).all()
        short = round_to(NORMAL[:, :200], kind)  # the last group of a row may be short
        assert short.problem() is None and relative_error(NORMAL[:, :200], short) < 0.12
    assert round_to(lanes, "fp8").scales.shape == (2, 2, 2)
    quick = round_to(NORMAL, "int4", search=False)
    assert relative_error(NORMAL, quick) == pytest.approx(0.097, rel=0.03)  # measured when the format was chosen
    same = round_to(NORMAL[:64], "int4").dequantize()
    assert (round_to(NORMAL[:64].reshape(2, 32, -1), "int4").dequantize().reshape(64, -1) == same).all()


@pytest.mark.parametrize(
    ("weights", "kind", "shared", "expected"),
    [
        (NORMAL, "mxfp4", 64, "--group 64: mxfp4 has scales per 32"),
        (NORMAL, "int8", "block", "--group block: int8 has scales per row, 32"),
        (NORMAL * np.float32(np.inf), "fp8", None, "not finite"),
    ],
)
def test_wrong_groups_and_infinite_weights_are_refused(weights, kind, shared, expected):
    with pytest.raises(ConfigError, match=expected):
        round_to(weights, kind, shared)
