"""Writes a dense Llama with random weights, in bfloat16 or quantized, or a mixture of experts like gpt-oss, with its
experts in mxfp4, as a GGUF file, version 3, for llama.cpp; needs numpy alone.

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
    """type: of the matrices but for the embedding's table, which is bfloat16, and experts, which are mxfp4. Raises
    ValueError for a shape whose rows are not whole blocks.
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
    normal = 0.02 * np.random.default_rng(0).standard_normal(NORMALS, np.float32)
    kinds = dict.fromkeys(stored for *_, stored in listed)
    blocks = {stored: stored.pack(normal.reshape(-1, stored.weights)) for stored in kinds}
    with path.open("wb") as file:
        file.write(header.ljust(_padded(len(header)), b"\0"))
        for number, (name, sizes, stored) in enumerate(listed):
            if name.endswith("norm.weight"):
                np.ones(sizes, np.float32).tofile(file)
            else:  # another offset for each
                np.resize(np.roll(blocks[stored], number * 10_007, 0), stored.bytes(sizes)).tofile(file)
            file.write(b"\0" * (-file.tell() % ALIGNMENT))


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and sizes [outputs, inputs] of each tensor, of all experts [experts, outputs, inputs], in the order of the
    file.
    """
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield EMBEDDING, (shape.vocab, d)
    yield "output_norm.weight", (d,)
    if not shape.tied:
        yield "output.weight", (shape.vocab, d)
    attention = [("attn_q", (q, d)), ("attn_k", (kv, d)), ("attn_v", (kv, d)), ("attn_output", (d, q))]
    hidden = [("gate", (shape.ff, d)), ("up", (shape.ff, d)), ("down", (d, shape.ff))]
    for n in range(shape.layers):
        layer = [("attn_norm", (d,)), *attention]
        if shape.experts:
            layer += [("post_attention_norm", (d,)), ("attn_sinks", (shape.heads,))]
            biased = [*attention, ("ffn_gate_inp", (shape.experts, d))]
            experts = [(f"ffn_{name}_exps", (shape.experts, *sizes)) for name, sizes in hidden]
            layer += [biased[-1], *experts]
            yield from ((f"blk.{n}.{name}.bias", sizes[:-1]) for name, sizes in (*biased, *experts))
        else:
            layer += [("ffn_norm", (d,)), *((f"ffn_{name}", sizes) for name, sizes in hidden)]
        yield from ((f"blk.{n}.{name}.weight", sizes) for name, sizes in layer)


def type_of(name: str, sizes: tuple[int, ...], type: Type) -> Type:
    """The type of a tensor in a file of that type."""
    if "_exps." in name:
        return QUANTIZED["mxfp4"] if name.endswith("weight") else F32
    if len(sizes) == 1 or "ffn_gate_inp" in name:
        return F32
    return BF16 if name == EMBEDDING else type


def facts(shape: Shape, type: Type) -> dict[str, object]:
    """The quantized weights that a token reads and their bytes, as our backends count theirs; empty if there are
    none.
    """
    found = [(type_of(*one, type), one[1]) for one in tensors(shape)]
    found = [(stored, sizes) for stored, sizes in found if stored not in (F32, BF16)]
    if not found:
        return {}

    def read(count: int, sizes: tuple[int, ...]) -> int:
        return count * shape.experts_used // shape.experts if len(sizes) == 3 else count

    return {
        "quantized_formats": list(dict.fromkeys(stored.name for stored, _ in found)),
        "quantized_weights": sum(read(math.prod(sizes), sizes) for _, sizes in found),
        "quantized_bytes": sum(read(stored.bytes(sizes), sizes) for stored, sizes in found),
    }


def _fields(shape: Shape, type: Type) -> dict[str, tuple[int, int | float | str]]:
    """Type and value of each metadata field."""
    architecture = "gpt-oss" if shape.experts else "llama"
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
    if shape.experts:
        numbers |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.ff,
            "attention.sliding_window": shape.window,
        }
    return {
        "general.architecture": (STRING, architecture),
        "general.alignment": (UINT32, ALIGNMENT),
        "general.file_type": (UINT32, type.file),
        "tokenizer.ggml.model": (STRING, "no_vocab"),
        **{f"{architecture}.{name}": (UINT32, value) for name, value in numbers.items()},
        f"{architecture}.attention.layer_norm_rms_epsilon": (FLOAT32, shape.norm_eps),
        f"{architecture}.rope.freq_base": (FLOAT32, shape.rope_theta),
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
