"""Rounds matrices to 8 and 4 bits per weight: to the nearest code, with scales from the weights alone.

A scale of int4 is the best of 26 from 0.5 to 1.0 of max|w| / 7 by the sum of squared errors, one of mxfp4 the better of
2^floor(log2(max|w|)) / 4 and twice that (OCP Microscaling Formats 1.0 has the first). Of 8 bits and nvfp4 the largest
weight gets the largest code. Nothing here imports JAX.
"""

from typing import Literal

import ml_dtypes
import numpy as np

from laneformer.errors import ConfigError
from laneformer.quantized.record import E4M3, INT4_ZERO, Quantized, pack4

Kind = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4"]
Shared = int | Literal["row", "block", "tensor"]
USUAL: dict[str, Shared] = {"int4": 32, "int8": "row", "fp8": "block", "mxfp4": 32, "nvfp4": 16}
"""What shares a scale if nothing is asked for: columns of a row, a row, a block of 128 x 128, or the tensor."""
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
_AT_ONCE = 1 << 22  # weights


def round_to(weights: np.ndarray, kind: Kind, shared: Shared | None = None, search: bool = True) -> Quantized:
    """The record of weights [*lanes, rows, columns] of any float dtype. shared: one of ALLOWED, by default USUAL.
    search: try several scales for int4, or take max|w| / 7, in a tenth of the time.

    Scales are bfloat16 for groups, float32 for rows, blocks and tensors; the last group of a row may be short. nvfp4
    has one more scale for the tensor. Raises ConfigError for weights that are not finite.
    """
    shared = USUAL[kind] if shared is None else shared
    if shared not in ALLOWED[kind]:
        raise ConfigError(f"--group {shared}: {kind} has scales per {', '.join(map(str, ALLOWED[kind]))}")
    *lead, rows, columns = weights.shape
    group = {"row": (1, columns), "block": (BLOCK, BLOCK), "tensor": (rows, columns)}.get(shared, (1, shared))
    whole = None
    if kind == "nvfp4":
        largest = np.float32(max(np.abs(lane.astype(np.float32)).max() for lane in weights.reshape(-1, rows, columns)))
        whole = np.float32(LARGEST_E4M3 * LARGEST_E2M1) / largest if largest > 0 else np.float32(1)
    together = max(1, _AT_ONCE // columns // BLOCK) * BLOCK if group[0] in (1, BLOCK) else rows
    parts = [
        _round(lane[first : first + together].astype(np.float32), kind, group, whole, search)
        for lane in weights.reshape(-1, rows, columns)
        for first in range(0, rows, together)
    ]
    codes, scales = (
        np.concatenate(arrays).reshape(*lead, -1, arrays[0].shape[-1]) for arrays in zip(*parts, strict=True)
    )
    return Quantized(
        kind, codes, scales, group, columns, global_scale=None if whole is None else np.asarray(whole).reshape(())
    )


def _round(
    w: np.ndarray, kind: Kind, group: tuple[int, int], whole: np.float32 | None, search: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float32 [rows, columns]. whole: the tensor's scale, which divides."""
    if not np.isfinite(w).all():
        raise ConfigError("it has weights that are not finite: only finite ones can be rounded")
    rows, columns = w.shape
    tall, wide = -(-rows // group[0]), -(-columns // group[1])
    padded = np.zeros((tall * group[0], wide * group[1]), np.float32)
    padded[:rows, :columns] = w
    grouped = padded.reshape(tall, group[0], wide, group[1]).swapaxes(1, 2)  # [tall, wide, rows, columns of a group]
    largest = np.abs(grouped).max((2, 3), keepdims=True)
    stored = np.dtype(np.float32 if group[1] >= columns or group[0] > 1 else ml_dtypes.bfloat16)
    if kind == "int4":
        codes, scales = _int4(grouped, largest, stored, SEARCHED if search else SEARCHED[-1:])
    elif kind == "nvfp4":
        codes, scales = _nvfp4(grouped, largest, whole)
    else:
        codes, scales = {"int8": _int8, "fp8": _fp8, "mxfp4": _mxfp4}[kind](grouped, largest, stored)
    codes = codes.swapaxes(1, 2).reshape(padded.shape)[:rows, :columns]
    codes = np.ascontiguousarray(codes) if kind in ("int8", "fp8") else pack4(codes)
    return codes, scales.reshape(tall, wide).astype(np.uint8 if kind in ("mxfp4", "nvfp4") else stored)


def _as_stored(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales as they are stored, for which codes are chosen; 1 where all weights are 0."""
    scales = scales.astype(dtype).astype(np.float32)
    return np.where(scales == 0, np.float32(1), scales)


def _int4(w: np.ndarray, largest: np.ndarray, stored: np.dtype, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    best, chosen = np.full(largest.shape, np.inf, np.float32), np.ones_like(largest)
    for factor in factors:
        scales = _as_stored(factor * largest / 7, stored)
        error = np.square(np.clip(np.rint(w / scales), -8, 7) * scales - w).sum((2, 3), keepdims=True)
        chosen = np.where(error <= best, scales, chosen)
        best = np.minimum(error, best)
    return (np.clip(np.rint(w / chosen), -8, 7) + INT4_ZERO).astype(np.uint8), chosen


def _int8(w: np.ndarray, largest: np.ndarray, stored: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    scales = _as_stored(largest / 127, stored)
    return np.clip(np.rint(w / scales), -127, 127).astype(np.int8), scales


def _fp8(w: np.ndarray, largest: np.ndarray, stored: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    scales = _as_stored(largest / np.float32(LARGEST_E4M3), stored)
    limited = np.clip(w / scales, -LARGEST_E4M3, LARGEST_E4M3)
    return limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def _mxfp4(w: np.ndarray, largest: np.ndarray, stored: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    low = np.where(largest == 0, 0, np.frexp(largest)[1] - 3)  # 2^2 <= largest / 2^low < 2^3

    def rounded(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales = np.ldexp(np.float32(1), exponents)
        codes = np.clip(w / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return codes, np.square(codes.astype(np.float32) * scales - w).sum((2, 3), keepdims=True)

    low = np.clip(low, -126, 126)
    (first, error), (second, larger) = rounded(low), rounded(low + 1)
    better = larger < error
    codes = np.where(better, second.view(np.uint8), first.view(np.uint8))
    return codes, (np.where(better, low + 1, low) + 127).astype(np.uint8)


def _nvfp4(w: np.ndarray, largest: np.ndarray, whole: np.float32) -> tuple[np.ndarray, np.ndarray]:
    scales = np.minimum(largest / LARGEST_E2M1 * whole, LARGEST_E4M3).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    values = E4M3[scales] / whole
    limited = np.clip(w / np.where(values == 0, 1, values), -LARGEST_E2M1, LARGEST_E2M1)
    return limited.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), scales


def relative_error(weights: np.ndarray, record: Quantized) -> float:
    """Root mean square of the error over that of the weights."""
    exact = weights.astype(np.float32)
    return float(np.linalg.norm(record.dequantize(np.float32) - exact) / max(np.linalg.norm(exact), 1e-30))
