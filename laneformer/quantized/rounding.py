"""Rounds matrices to 8 and 4 bits per weight: to the nearest code, with scales that depend only on the weights.

An int4 scale is the best of 26 factors from 0.5 to 1.0 times max|w| / 7, by the sum of squared errors. An mxfp4 scale
is the better of 2^floor(log2(max|w|)) / 4 (as in OCP Microscaling Formats 1.0) and twice that. With 8 bits and nvfp4,
the largest weight of a group gets the largest code. This file does not import JAX.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.quantized.record import DTYPES, Quantized

Kind = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"]
Shared = int | Literal["row", "block", "tensor"]
USUAL: dict[str, Shared] = {"int4": 32, "int8": "row", "fp8": "block", "mxfp4": 32, "nvfp4": 16}
"""Default for the weights that share a scale: a number of columns in a row, a row, a block of 128 x 128, or the tensor.
"""
ALLOWED: dict[str, tuple[Shared, ...]] = {
    "int4": (32, 64, 128),
    "int8": ("row", 32, 64, 128),
    "fp8": ("block", "row", "tensor"),
    "mxfp4": (32,),
    "nvfp4": (16,),
}
SEARCHED = np.linspace(0.5, 1.0, 26, dtype=np.float32)
BLOCK = 128
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
_AT_ONCE = 1 << 22  # weights that are rounded together


class Arrays(NamedTuple):
    """The array functions that rounding uses, so that training (train/rounding.py) rounds as files are rounded."""

    xp: Any = np
    """numpy or jax.numpy."""
    as_dtype: Callable[[Any, np.dtype], Any] = lambda x, dtype: x.astype(dtype).astype(np.float32)
    """Rounds float32 values to values of a dtype, and returns them in float32."""
    fold: Callable[[Callable[[Any, Any], Any], np.ndarray, Any], Any] = reduce
    """functools.reduce, or an equivalent of it in JAX."""


def group_of(kind: Kind, shared: Shared | None, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix [..., rows, columns] that share a scale. With int4 and int8, a group larger than a
    row is the whole row. Raises ConfigError if the kind does not support `shared`.
    """
    shared = USUAL[kind] if shared is None else shared
    if shared not in ALLOWED[kind]:
        raise ConfigError(f"--group {shared}: {kind} has scales per {', '.join(map(str, ALLOWED[kind]))}")
    rows, columns = shape[-2:]
    if kind in ("int4", "int8") and isinstance(shared, int):
        shared = min(shared, columns)
    if shared == "block":
        return BLOCK, BLOCK
    if shared == "tensor":
        return rows, columns
    return 1, columns if shared == "row" else shared


def round_to(weights: np.ndarray, kind: Kind, shared: Shared | None = None, search: bool = True) -> Quantized:
    """Rounds weights [*lanes, rows, columns] of any float dtype to a record.

    shared: weights that share a scale, one of ALLOWED[kind]; by default USUAL[kind]. search: try several scales for
    int4; otherwise use max|w| / 7, which takes a tenth of the time.

    Scales are bfloat16 for groups, and float32 for rows, blocks and tensors. The last group of a row may be smaller.
    nvfp4 has one more scale for the tensor. Raises ConfigError for weights that are not finite.
    """
    group = group_of(kind, shared, weights.shape)
    *lead, rows, columns = weights.shape
    lanes = weights.reshape(-1, rows, columns)
    if not all(np.isfinite(lane.astype(np.float32)).all() for lane in lanes):
        raise ConfigError("it has weights that are not finite: only finite weights can be rounded")
    whole = None
    if kind == "nvfp4":
        whole = whole_scale(np.float32(max(np.abs(lane.astype(np.float32)).max() for lane in lanes)), np)
    together = max(1, _AT_ONCE // columns // BLOCK) * BLOCK if group[0] in (1, BLOCK) else rows
    factors = SEARCHED if search else SEARCHED[-1:]
    parts = []
    for lane in lanes:
        for first in range(0, rows, together):
            w = lane[first : first + together].astype(np.float32)
            numbers, scales = nearest(grouped(w, group, np), kind, stored_dtype(group, columns), whole, factors)
            parts.append((_codes(ungrouped(numbers, w.shape), kind), _stored(scales[..., 0, 0], kind, group, columns)))
    codes, scales = (
        np.concatenate(arrays).reshape(*lead, -1, arrays[0].shape[-1]) for arrays in zip(*parts, strict=True)
    )
    return Quantized(
        kind, codes, scales, group, columns, global_scale=None if whole is None else np.asarray(whole).reshape(())
    )


def nearest(
    w: Any,
    kind: Kind,
    stored: np.dtype,
    whole: Any = None,
    factors: np.ndarray = SEARCHED,
    arrays: Arrays = Arrays(),  # noqa: B008  immutable
) -> tuple[Any, Any]:
    """The values of the nearest codes, and the scales [..., 1, 1] of their groups, without the tensor's scale; both
    float32.

    w: weights as `grouped` returns them. stored: dtype of the scales. whole: for nvfp4, the result of `whole_scale`.
    factors: scales that int4 tries, relative to max|w| / 7.
    """
    xp, as_dtype, fold = arrays
    largest = xp.abs(w).max((-2, -1), keepdims=True)

    def scaled(largest: Any, most: float) -> Any:
        """Scales after rounding to the stored dtype, or 1 for groups of zeros. Multiplication by the reciprocal gives
        the same bits as XLA, which divides by a constant in this way.
        """
        scales = as_dtype(largest * np.float32(1 / most), stored)
        return xp.where(scales == 0, np.float32(1), scales)

    def error_of(numbers: Any, scales: Any) -> Any:
        return xp.square(numbers * scales - w).sum((-2, -1), keepdims=True)

    def in_four_bits(scales: Any) -> Any:
        """Nearest values of E2M1, with ties to the even code. Steps are 1/2 up to 2, 1 up to 4, and 2 up to 6."""
        exact = w / scales
        size = xp.minimum(xp.abs(exact), np.float32(LARGEST_E2M1))
        step = xp.where(size < 2, np.float32(0.5), xp.where(size < 4, np.float32(1), np.float32(2)))
        return xp.copysign(xp.rint(size / step) * step, exact)

    if kind == "int4":

        def better(best: tuple[Any, Any], factor: Any) -> tuple[Any, Any]:
            scales = scaled(factor * largest, 7)
            error = error_of(xp.clip(xp.rint(w / scales), -8, 7), scales)
            return xp.where(error <= best[1], scales, best[0]), xp.minimum(error, best[1])

        scales, _ = fold(better, factors, (xp.ones_like(largest), xp.full_like(largest, np.inf)))
        return xp.clip(xp.rint(w / scales), -8, 7), scales
    if kind == "int8":
        scales = scaled(largest, 127)
        return xp.clip(xp.rint(w / scales), -127, 127), scales
    if kind == "fp8":
        scales = scaled(largest, LARGEST_E4M3)
        return as_dtype(xp.clip(w / scales, -LARGEST_E4M3, LARGEST_E4M3), np.dtype(ml_dtypes.float8_e4m3fn)), scales
    if kind == "mxfp4":
        low = xp.where(largest == 0, 0, xp.frexp(largest)[1] - 3)  # 2^2 <= largest / 2^low < 2^3
        first = xp.ldexp(np.float32(1), xp.clip(low, -126, 126))
        second = 2 * first
        scales = xp.where(error_of(in_four_bits(second), second) < error_of(in_four_bits(first), first), second, first)
        return in_four_bits(scales), scales
    scales = as_dtype(
        xp.minimum(largest * np.float32(1 / LARGEST_E2M1) * whole, np.float32(LARGEST_E4M3)),
        np.dtype(ml_dtypes.float8_e4m3fn),
    )
    return in_four_bits(xp.where(scales == 0, np.float32(1), scales / whole)), scales


def whole_scale(largest: Any, xp: Any) -> Any:
    """nvfp4's divisor of all weights of a tensor, float32. largest: largest absolute weight of the tensor. xp: numpy or
    jax.numpy.
    """
    return xp.where(largest > 0, np.float32(LARGEST_E4M3 * LARGEST_E2M1) / xp.where(largest > 0, largest, 1), 1).astype(
        np.float32
    )


def stored_dtype(group: tuple[int, int], columns: int) -> np.dtype:
    """Dtype of the scales of int4, int8 and fp8."""
    return np.dtype(np.float32 if group[1] >= columns or group[0] > 1 else ml_dtypes.bfloat16)


def grouped(w: Any, group: tuple[int, int], xp: Any) -> Any:
    """[rows, columns] -> [groups of rows, groups of columns, *group], padded with zeros at the end."""
    rows, columns = w.shape
    short = [(0, -size % share) for size, share in zip(w.shape, group, strict=True)]
    return xp.pad(w, short).reshape(-(-rows // group[0]), group[0], -(-columns // group[1]), group[1]).swapaxes(1, 2)


def ungrouped(w: Any, shape: tuple[int, int]) -> Any:
    """The inverse of `grouped`."""
    tall, wide, rows, columns = w.shape
    return w.swapaxes(1, 2).reshape(tall * rows, wide * columns)[: shape[0], : shape[1]]


def _codes(numbers: np.ndarray, kind: Kind) -> np.ndarray:
    """The codes of a record, from their values, float32 [rows, columns]."""
    format = FORMATS[kind]
    if format.code == "int":
        return format.pack((numbers + format.zero).astype(DTYPES[kind]))
    if kind == "fp8":
        return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return format.pack(np.ascontiguousarray(numbers.astype(ml_dtypes.float4_e2m1fn)).view(np.uint8))


def _stored(scales: np.ndarray, kind: Kind, group: tuple[int, int], columns: int) -> np.ndarray:
    """The scales of a record, from float32 scales [groups of rows, groups of columns]."""
    if kind == "mxfp4":
        exponents: np.ndarray = np.frexp(scales)[1]
        return (exponents + 126).astype(np.uint8)  # 2^(bits - 127)
    if kind == "nvfp4":
        return scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return scales.astype(stored_dtype(group, columns))


def relative_error(weights: np.ndarray, record: Quantized) -> float:
    """Root mean square of the rounding error, divided by the root mean square of the weights."""
    exact = weights.astype(np.float32)
    return float(np.linalg.norm(record.dequantize(np.float32) - exact) / max(float(np.linalg.norm(exact)), 1e-30))
