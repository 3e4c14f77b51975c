"""Writes a dense Llama with random weights, in bfloat16 or quantized, as a GGUF file, version 3, for llama.cpp; needs
numpy alone.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks of weights: src/ggml-common.h and ggml-quants.c there.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.peers.protocol import LONGEST, Shape

VERSION, ALIGNMENT = 3, 32
UINT32, FLOAT32, STRING = 4, 6, 8  # value types
EMBEDDING = "token_embd.weight"  # as our kernel holds it: bfloat16, also where it is the head as well
NORMALS = 64 * 131_071  # blocks of 32 and 64 weights with a large prime factor, so that the rows of a matrix differ
MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # between the sizes of E2M1


@dataclass(frozen=True)
class Type:
    """How a tensor is stored."""

    name: str
    number: int
    file: int
    """Type of a file whose matrices have it."""
    weights: int
    """Weights in a block; a row is whole blocks."""
    size: int
    """Bytes of a block."""
    pack: Callable[[np.ndarray], np.ndarray]
    """Rounds float32 [blocks, weights] to blocks, [blocks, bytes] as uint8."""

    def bytes(self, sizes: tuple[int, ...]) -> int:
        return math.prod(sizes) // self.weights * self.size


def _bytes(*parts: np.ndarray) -> np.ndarray:
    """Blocks whose parts, [blocks, n] each, follow each other."""
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
    scale = np.ceil(512 * _largest(x) / 6).clip(1, 15)  # E4M3 with these bits is so many times 2^-9
    codes = _halves(_e2m1(x / (scale / 512)))
    return _bytes(scale.astype(np.uint8).reshape(-1, 4), codes.reshape(-1, 32))


def _largest(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(1, keepdims=True)


def _e2m1(x: np.ndarray) -> np.ndarray:
    return np.searchsorted(MIDDLES, np.abs(x)) | np.signbit(x) << 3


def _halves(codes: np.ndarray) -> np.ndarray:
    """Two codes in a byte; the first half of a group is in the low bits."""
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
"""The types nearest to ours, by the kinds of laneformer/quantized."""


def write(path: Path, shape: Shape, type: Type = BF16) -> None:
    """type: of the matrices but for the embedding's table, which is bfloat16. Raises ValueError for a shape whose rows
    are not whole blocks.
    """
    fields, listed = _fields(shape, type), [(*one, type_of(*one, type)) for one in tensors(shape)]
    for name, sizes, stored in listed:
        if sizes[-1] % stored.weights:
            raise ValueError(
                f"{name} has rows of {sizes[-1]} weights, {stored.name} has blocks of {stored.weights}: choose another"
                " --shape, or --weights bfloat16"
            )
    header = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(listed), len(fields)))
    for key, (kind, value) in fields.items():
        header += _string(key) + struct.pack("<I", kind)
        header += _string(value) if kind == STRING else struct.pack("<I" if kind == UINT32 else "<f", value)
    offset = 0
    for name, sizes, stored in listed:
        # GGUF lists the sizes from the innermost on.
        header += _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *reversed(sizes), stored.number, offset)
        offset += _padded(stored.bytes(sizes))
    ones = np.ones(shape.hidden, np.float32).tobytes()
    normal = 0.02 * np.random.default_rng(0).standard_normal(NORMALS, np.float32)
    blocks = {stored: stored.pack(normal.reshape(-1, stored.weights)) for stored in (BF16, type)}
    with path.open("wb") as file:
        file.write(header.ljust(_padded(len(header)), b"\0"))
        for number, (_, sizes, stored) in enumerate(listed):
            if stored is F32:
                file.write(ones)
            else:  # another offset for each matrix
                np.resize(np.roll(blocks[stored], number * 10_007, 0), stored.bytes(sizes)).tofile(file)
            file.write(b"\0" * (-file.tell() % ALIGNMENT))


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and sizes [outputs, inputs] of each tensor, in the order of the file."""
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield EMBEDDING, (shape.vocab, d)
    yield "output_norm.weight", (d,)
    if not shape.tied:
        yield "output.weight", (shape.vocab, d)
    for n in range(shape.layers):
        for name, sizes in (
            ("attn_norm", (d,)),
            ("attn_q", (q, d)),
            ("attn_k", (kv, d)),
            ("attn_v", (kv, d)),
            ("attn_output", (d, q)),
            ("ffn_norm", (d,)),
            ("ffn_gate", (shape.ff, d)),
            ("ffn_up", (shape.ff, d)),
            ("ffn_down", (d, shape.ff)),
        ):
            yield f"blk.{n}.{name}.weight", sizes


def type_of(name: str, sizes: tuple[int, ...], type: Type) -> Type:
    """The type of a tensor in a file of that type."""
    return F32 if len(sizes) == 1 else BF16 if name == EMBEDDING else type


def facts(shape: Shape, type: Type) -> dict[str, object]:
    """The quantized weights of a file and their bytes, as our backends count theirs; empty if there are none."""
    if type is BF16:
        return {}
    found = [sizes for name, sizes in tensors(shape) if type_of(name, sizes, type) is type]
    return {
        "quantized_formats": [type.name],
        "quantized_weights": sum(map(math.prod, found)),
        "quantized_bytes": sum(map(type.bytes, found)),
    }


def _fields(shape: Shape, type: Type) -> dict[str, tuple[int, int | float | str]]:
    """Type and value of each metadata field."""
    numbers = {
        "context_length": LONGEST,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "vocab_size": shape.vocab,
        "rope.dimension_count": shape.head_dim,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (UINT32, ALIGNMENT),
        "general.file_type": (UINT32, type.file),
        "tokenizer.ggml.model": (STRING, "no_vocab"),
        **{f"llama.{name}": (UINT32, value) for name, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, shape.norm_eps),
        "llama.rope.freq_base": (FLOAT32, shape.rope_theta),
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
