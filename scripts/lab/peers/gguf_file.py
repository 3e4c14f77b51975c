"""Writes tensors and metadata as a GGUF file, version 3, for llama.cpp; random weights unless values are given. Needs
only NumPy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks of weights: src/ggml-common.h and
src/ggml-quants.c of the same repository.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION, ALIGNMENT = 3, 32
FORMS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}  # type of metadata -> its number and its form for struct
STRING, ARRAY = 8, 9
NORMALS = 64 * 131_071  # whole blocks of 32 and 64 weights; the prime factor makes the rows of a matrix differ
CONSTANTS = {"norm.weight": 1.0, "ssm_a": -1.0}  # instead of random weights, by end of the name; ssm_a is negative
MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # midpoints between the magnitudes of E2M1


@dataclass(frozen=True)
class Type:
    """A storage type of tensors."""

    name: str
    number: int
    file: int
    """general.file_type of a file whose matrices have this type."""
    weights: int
    """Weights in a block; a row is whole blocks."""
    size: int
    """Bytes of a block."""
    pack: Callable[[np.ndarray], np.ndarray]
    """Rounds float32 [blocks, weights] to blocks, [blocks, bytes] as uint8."""


@dataclass(frozen=True)
class Tensor:
    name: str
    sizes: tuple[int, ...]
    """Sizes of the axes, the outermost first."""
    type: Type

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) // self.type.weights * self.type.size


def _bytes(*parts: np.ndarray) -> np.ndarray:
    """Blocks of consecutive parts, each [blocks, n]: uint8 [blocks, bytes]."""
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], 1)


def _bf16(x: np.ndarray) -> np.ndarray:
    return _bytes((x.view(np.uint32) >> 16).astype(np.uint16))  # the upper half of a float32


def _q8_0(x: np.ndarray) -> np.ndarray:
    scale = (_largest(x) / 127).astype(np.float16)
    return _bytes(scale, np.rint(x / scale).clip(-127, 127).astype(np.int8))


def _q4_0(x: np.ndarray) -> np.ndarray:
    scale = (_largest(x) / 7).astype(np.float16)
    return _bytes(scale, _halves(np.rint(x / scale).clip(-8, 7) + 8))


def _mxfp4(x: np.ndarray) -> np.ndarray:
    exponent = np.frexp(_largest(x))[1] - 3  # 4 <= the largest / 2^exponent < 8
    return _bytes((exponent + 127).astype(np.uint8), _halves(_e2m1(np.ldexp(x, -exponent))))


def _nvfp4(x: np.ndarray) -> np.ndarray:
    x = x.reshape(-1, 16)
    scale = np.ceil(512 * _largest(x) / 6).clip(1, 15)  # the E4M3 with bits n up to 15 is n * 2^-9
    codes = _halves(_e2m1(x / (scale / 512)))
    return _bytes(scale.astype(np.uint8).reshape(-1, 4), codes.reshape(-1, 32))


def _largest(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(1, keepdims=True)


def _e2m1(x: np.ndarray) -> np.ndarray:
    return np.searchsorted(MIDDLES, np.abs(x)) | np.signbit(x) << 3


def _halves(codes: np.ndarray) -> np.ndarray:
    """Packs two codes into a byte; the first half of a group is in the low bits."""
    low, high = np.split(codes.astype(np.uint8), 2, 1)
    return low | high << 4


F32 = Type("F32", 0, 0, 1, 4, _bytes)
BF16 = Type("BF16", 30, 32, 1, 2, _bf16)
QUANTIZED = {
    "int8": Type("Q8_0", 8, 7, 32, 34, _q8_0),
    "int4": Type("Q4_0", 2, 2, 32, 18, _q4_0),
    "mxfp4": Type("MXFP4", 39, 38, 32, 17, _mxfp4),
    "nvfp4": Type("NVFP4", 40, 39, 64, 36, _nvfp4),
}
"""Kind of laneformer/quantized -> the nearest type of llama.cpp."""


def write(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Sequence[Tensor],
    values: Callable[[Tensor], np.ndarray] | None = None,
) -> None:
    """Writes the file `path`.

    fields: metadata; a tuple becomes an array with the type of its first value. values: returns the values of a tensor
    in its sizes (default: random normals of standard deviation 0.02). Raises ValueError for a tensor whose rows are not
    whole blocks.
    """
    start = header(fields, tensors)
    values = values or _random(tensors)
    with path.open("wb") as file:
        file.write(start)
        for tensor in tensors:
            found = values(tensor)
            if found.dtype != np.uint8:
                found = tensor.type.pack(np.asarray(found, np.float32).reshape(-1, tensor.type.weights))
            if found.nbytes != tensor.bytes:
                raise ValueError(f"{tensor.name} has {found.nbytes} bytes, expected {tensor.bytes}")
            found.tofile(file)
            file.write(b"\0" * (-file.tell() % ALIGNMENT))


def header(fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """The part of the file before the tensors. Raises ValueError for a tensor whose rows are not whole blocks."""
    for tensor in tensors:
        if tensor.sizes[-1] % tensor.type.weights:
            raise ValueError(
                f"{tensor.name} has rows of {tensor.sizes[-1]} weights, but {tensor.type.name} has blocks of"
                f" {tensor.type.weights}; choose another --shape, or --weights bfloat16"
            )
    fields = {"general.alignment": ALIGNMENT, **fields}
    found = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(fields)))
    for key, value in fields.items():
        found += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        # GGUF lists the innermost size first.
        sizes = tensor.sizes[::-1]
        found += _string(tensor.name)
        found += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.type.number, offset)
        offset += _padded(tensor.bytes)
    return bytes(found.ljust(_padded(len(found)), b"\0"))


def digest(fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> str:
    """12 hex digits that are equal for equal files of random weights."""
    return hashlib.sha256(header(fields, tensors)).hexdigest()[:12]


def _random(tensors: Sequence[Tensor]) -> Callable[[Tensor], np.ndarray]:
    """A function that returns random weights of a tensor as bytes.

    Tensors of a type share one table of blocks, in which each tensor starts at a different block.
    """
    normal = 0.02 * np.random.default_rng(0).standard_normal(NORMALS, np.float32)
    types = dict.fromkeys(tensor.type for tensor in tensors)
    blocks = {type: type.pack(normal.reshape(-1, type.weights)) for type in types}
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}

    def values(tensor: Tensor) -> np.ndarray:
        for end, value in CONSTANTS.items():
            if tensor.name.endswith(end):
                return np.full(tensor.sizes, value, np.float32)
        return np.resize(np.roll(blocks[tensor.type], numbers[tensor.name] * 10_007, 0), tensor.bytes)

    return values


def _value(value: Any) -> bytes:
    """A value of metadata, preceded by its type."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, tuple):
        number, form = FORMS[type(value[0])]
        return struct.pack("<IIQ", ARRAY, number, len(value)) + b"".join(struct.pack(form, one) for one in value)
    number, form = FORMS[type(value)]
    return struct.pack("<I", number) + struct.pack(form, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
