"""Packs integers, scales and zero points into the tensors that quantization tools publish. Written from the formats'
descriptions alone, it is slow and shares no code with the code under test.
"""

import json
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def words_along(values: np.ndarray, bits: int, axis: int, places=None) -> np.ndarray:
    """Packs unsigned integers of `bits` bits into int32 words along an axis, padded with 0. places: indices of a word's
    integers, lowest bits first.
    """
    per_word = 32 // bits
    values = np.moveaxis(values, axis, -1).astype(np.uint64)
    pad = -values.shape[-1] % per_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)]).reshape(*values.shape[:-1], -1, per_word)
    found = np.zeros(values.shape[:-1], np.uint64)
    for place, source in enumerate(places or range(per_word)):
        found |= values[..., source] << np.uint64(bits * place)
    return np.ascontiguousarray(np.moveaxis(found.astype(np.uint32).view(np.int32), -1, axis))


@dataclass
class Matrix:
    """A matrix [out, in] that a tool has quantized."""

    weights: np.ndarray
    """Dequantized weights, float64 [out, in]."""
    tensors: dict[str, np.ndarray]
    """Tensors of the matrix in the file, by suffix."""
    metadata: dict[str, str] | None = None
    """Metadata of the matrix in the file, by suffix."""


def group_of(columns: np.ndarray, group: int | None) -> np.ndarray:
    return np.zeros_like(columns) if group is None else columns // group


def integers(rng, shape, bits: int, group: int | None, *, symmetric: bool, dtype, order: bool = False):
    """Random integer weights: codes [out, in], zeros [out, groups], scales [out, groups], group of each column [in],
    and dequantized weights [out, in]. Codes and zeros are unsigned. order: shuffles the groups of the columns.
    """
    rows, columns = shape
    index = group_of(np.arange(columns), group)
    if order:
        index = rng.permutation(index)
    groups = int(index.max()) + 1
    q = rng.integers(0, 2**bits, shape)
    zeros = np.full((rows, groups), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (rows, groups))
    scales = (rng.uniform(0.5, 1.5, (rows, groups)) * 0.02 * 2.0 ** (4 - bits)).astype(dtype)
    weights = (q - zeros[:, index]) * scales.astype(np.float64)[:, index]
    return q, zeros, scales, index, weights


def pack_quantized(rng, shape, bits=4, group=32, symmetric=True, order=False, unpacked=False) -> Matrix:
    """unpacked: stores zero points as signed bytes."""
    q, zeros, scales, index, weights = integers(rng, shape, bits, group, symmetric=symmetric, dtype=BF16, order=order)
    tensors = {
        "weight_packed": words_along(q, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if not symmetric:
        signed = (zeros - 2 ** (bits - 1)).astype(np.int8)
        tensors["weight_zero_point"] = signed if unpacked else words_along(zeros, bits, 0)
    if order:
        tensors["weight_g_idx"] = index.astype(np.int32)
    return Matrix(weights, tensors)


def int_quantized(rng, shape) -> Matrix:
    q = rng.integers(-128, 128, shape).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (shape[0], 1)).astype(np.float32) * np.float32(0.001)
    return Matrix(q * scales.astype(np.float64), {"weight": q, "weight_scale": scales})


def float8_codes(rng, shape) -> np.ndarray:
    """Random E4M3 numbers of all bit patterns except NaN."""
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    return rng.choice(codes, shape).view(E4M3)


def float_quantized(rng, shape, strategy: str, suffix: str = "weight_scale", flat: bool = False) -> Matrix:
    """Random E4M3 weights with a float32 scale per block of 128 x 128, channel or tensor, according to `strategy`.
    flat: stores the scales with one axis.
    """
    rows, columns = shape
    block = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[strategy]
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    codes = float8_codes(rng, shape)
    scales = (rng.uniform(0.5, 1.5, grid) * 3e-4).astype(np.float32)
    spread = scales.astype(np.float64)[np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
    return Matrix(codes.astype(np.float64) * spread, {"weight": codes, suffix: scales.reshape(-1) if flat else scales})


def float4(rng, shape, nvfp4: bool = False, modelopt: bool = False) -> Matrix:
    rows, columns = shape
    size = 16 if nvfp4 else 32
    codes = rng.integers(0, 16, shape)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    grid = (rows, columns // size)
    if nvfp4:
        scales, whole = rng.uniform(8, 400, grid).astype(E4M3), np.array([30000], np.float32)
        real = scales.astype(np.float64) / whole.astype(np.float64)
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        if modelopt:
            factor = np.float32(2.0**-15)
            real = scales.astype(np.float64) * float(factor)
            tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": np.array(factor)}
    else:
        exponents = rng.integers(118, 124, grid)
        real = 2.0 ** (exponents - 127)
        tensors = {"weight_packed": packed, "weight_scale": exponents.astype(np.uint8)}
    return Matrix(values * np.repeat(real, size, 1), tensors)


def e8m0_scales(weights: np.ndarray, rows: int, columns: int, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Scales, float64 powers of two, with which the largest code of each block of `rows` x `columns` weights is at most
    `largest`. Returns one scale per block, and one per weight.
    """
    height, width = weights.shape
    grid = np.empty((-(-height // rows), -(-width // columns)))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weights[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            grid[i, j] = 2.0 ** np.ceil(np.log2(np.abs(part).max() / largest))
    return grid, grid[np.arange(height)[:, None] // rows, np.arange(width) // columns]


def deepseek_fp8(weights: np.ndarray) -> Matrix:
    """Rounds weights to DeepSeek V4's FP8 format: E4M3 with an E8M0 scale per 128 x 128 weights."""
    grid, each = e8m0_scales(weights, 128, 128, 448)
    codes = (weights / each).astype(E4M3)
    return Matrix(codes.astype(np.float64) * each, {"weight": codes, "scale": grid.astype(E8M0)})


def deepseek_fp4(weights: np.ndarray) -> Matrix:
    """Rounds weights to the FP4 format of DeepSeek V4's experts: two E2M1 codes per byte, with an E8M0 scale per 32
    columns.
    """
    grid, each = e8m0_scales(weights, 1, 32, 6)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    sizes = np.abs(np.abs(weights / each)[..., None] - values).argmin(-1)
    codes = sizes + 8 * (weights < 0)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8).view(np.int8)
    return Matrix(np.sign(weights) * values[sizes] * each, {"weight": packed, "scale": grid.astype(E8M0)})


def gptq(rng, shape, bits=4, group=32, symmetric=True, order=False, version=1) -> Matrix:
    q, zeros, scales, index, weights = integers(
        rng, shape, bits, group, symmetric=symmetric, dtype=np.float16, order=order
    )
    stored = (zeros - (1 if version == 1 else 0)) % 2**bits
    tensors = {
        "qweight": words_along(q.T, bits, 0),
        "qzeros": words_along(stored.T, bits, 1),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": index.astype(np.int32),
    }
    return Matrix(weights, tensors)


def awq(rng, shape, group=32) -> Matrix:
    q, zeros, scales, _, weights = integers(rng, shape, 4, group, symmetric=False, dtype=np.float16)
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": words_along(q.T, 4, 1, places),
        "qzeros": words_along(zeros.T, 4, 1, places),
        "scales": np.ascontiguousarray(scales.T),
    }
    return Matrix(weights, tensors)


def torchao(rng, shape, strategy: str) -> Matrix:
    made = float_quantized(rng, shape, strategy)
    tensors = {"_weight_qdata": made.tensors["weight"], "_weight_scale": made.tensors["weight_scale"]}
    block = [1, shape[1]] if strategy == "channel" else [*shape]
    kind = {"_type": "Float8Tensor", "_data": {"block_size": block}, "_tensor_data_names": ["qdata", "scale"]}
    return Matrix(made.weights, tensors, {"weight": json.dumps(kind)})


def compressed(form: str, ignore=("lm_head",), **weights) -> dict:
    """A quantization_config of compressed-tensors. weights: changed fields of the weights' scheme."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "actorder": None, **weights},
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
