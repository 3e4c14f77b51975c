"""Writes a dense Llama with random bfloat16 weights as a GGUF file, version 3, for llama.cpp; needs numpy alone.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts.peers.protocol import LONGEST, Shape

VERSION, ALIGNMENT = 3, 32
UINT32, FLOAT32, STRING = 4, 6, 8  # value types
F32, BF16 = 0, 30  # tensor types
MOSTLY_BF16 = 32  # file type
BLOCK = 4_194_301  # a prime, so that the rows of a matrix differ


def write(path: Path, shape: Shape) -> None:
    fields, listed = _fields(shape), list(tensors(shape))
    header = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(listed), len(fields)))
    for key, (kind, value) in fields.items():
        header += _string(key) + struct.pack("<I", kind)
        header += _string(value) if kind == STRING else struct.pack("<I" if kind == UINT32 else "<f", value)
    offset = 0
    for name, sizes in listed:
        kind, count = _kind(sizes), math.prod(sizes)
        # GGUF lists the sizes from the innermost on.
        header += _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *reversed(sizes), kind, offset)
        offset += _padded(count * (4 if kind == F32 else 2))
    ones = np.ones(shape.hidden, np.float32).tobytes()
    normal = 0.02 * np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    block = (normal.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is the upper half of a float32
    with path.open("wb") as file:
        file.write(header.ljust(_padded(len(header)), b"\0"))
        for number, (_, sizes) in enumerate(listed):
            count = math.prod(sizes)
            if _kind(sizes) == F32:
                file.write(ones)
            else:
                np.resize(np.roll(block, number * 10_007), count).tofile(file)  # another offset for each matrix
            file.write(b"\0" * (-file.tell() % ALIGNMENT))


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and sizes [outputs, inputs] of each tensor, in the order of the file."""
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab, d)
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


def _fields(shape: Shape) -> dict[str, tuple[int, int | float | str]]:
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
        "general.file_type": (UINT32, MOSTLY_BF16),
        "tokenizer.ggml.model": (STRING, "no_vocab"),
        **{f"llama.{name}": (UINT32, value) for name, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, shape.norm_eps),
        "llama.rope.freq_base": (FLOAT32, shape.rope_theta),
    }


def _kind(sizes: tuple[int, ...]) -> int:
    return F32 if len(sizes) == 1 else BF16


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
