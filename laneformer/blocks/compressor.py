"""The entries of compressed attention, each computed from several positions (DeepSeek-V4).

Shape letters as in laneformer/model.py, and: c channels of an entry, w windows of `ratio` positions, i positions in a
window, u tokens.

Every token has a vector and a gate, each a matrix times h. Entry w is a weighted sum of the vectors in its window. The
weights are, for each channel, the softmax over the window of gate + bias, with one bias per position in the window. The
sum is normed, then rotated at the window's first position.

Where windows overlap, a token has two vectors and two gates. The first ones count in the next window's entry, the
second ones in the token's own window's entry. An entry thus covers two windows.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer import ops
from laneformer.blocks.block import (
    Group,
    Initial,
    KeptArray,
    Memory,
    Plain,
    Weight,
    Weights,
    attention_weight,
    hold,
    weight_of_op,
)
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import rotary_op, rotary_tables, rotate_last
from laneformer.config import CompressedAttentionOptions
from laneformer.ops import EntrySize
from laneformer.precision import Precision


class Compressor(nnx.Module):
    """`entries, kept = compressor(h, memory, name)`: all entries so far, [l, b, w, c], and the arrays to keep."""

    positions: Plain
    norm: Plain

    def __init__(self, weights: Weights, options: CompressedAttentionOptions, channels: int, precision: Precision):
        for name, weight in weights.items():
            setattr(self, name, hold(weight))
        self.options, self.channels, self.precision = options, channels, precision

    @property
    def size(self) -> EntrySize:
        return size_of(self.options, self.channels)

    def __call__(self, h_lbsd: jax.Array, memory: Memory | None, name: str) -> tuple[jax.Array, dict[str, jax.Array]]:
        """name: name of the kept entries. Without a memory, the entries are those of the windows that the tokens fill
        or begin. The entry of an incomplete window is meaningless.
        """
        size, tokens = self.size, h_lbsd.shape[2]
        new_lbuc = jnp.concatenate([self._product(h_lbsd, matrix) for matrix in ("wkv", "wgate")], -1)
        if memory is None:
            start = jnp.int32(0)
            before = jnp.zeros((*new_lbuc.shape[:2], size.earlier, new_lbuc.shape[-1]), new_lbuc.dtype)
        else:
            start, before = memory.start, memory.arrays[f"{name}_tail"][:, :, 0]
        u_lbuc = jnp.concatenate([before.astype(new_lbuc.dtype), new_lbuc], 2)
        made_lbwc, first = self._made(u_lbuc, start, tokens)
        if memory is None:
            return made_lbwc.astype(self.precision.compute), {}
        old = memory.arrays[name]
        entries = jax.lax.dynamic_update_slice_in_dim(old, made_lbwc.astype(old.dtype), first, 2)
        last = tokens if memory.count is None else memory.count
        tail = jax.lax.dynamic_slice_in_dim(u_lbuc, last, size.earlier, 2)[:, :, None]
        return entries.astype(self.precision.compute), {name: entries, f"{name}_tail": tail}

    def _product(self, h_lbsd: jax.Array, name: str) -> jax.Array:
        y = self.precision.block_einsum("lbsd,cd->lbsc", h_lbsd, getattr(self, name)[...])
        kept: jax.Array = checkpoint_name(y, "product")
        return kept.astype(jnp.float32)

    def _made(self, u_lbuc: jax.Array, start: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
        """The entries of all windows that `tokens` tokens from position `start` on may complete, float32 [l, b, w, c],
        and the number of the first window. u: vectors and gates of the tokens, after those of the `earlier` tokens
        before them.
        """
        size, ratio = self.size, self.size.ratio
        windows, first = -(-tokens // ratio), start // ratio
        # Overlapping windows need one more window; u begins `earlier` positions before start.
        u_lbuc = jnp.pad(u_lbuc, ((0, 0), (0, 0), (0, ratio), (0, 0)))
        rows = (windows + size.overlaps) * ratio
        u_lbuc = jax.lax.dynamic_slice_in_dim(u_lbuc, ratio - 1 - start % ratio, rows, 2)
        x, gate = jnp.split(u_lbuc.reshape(*u_lbuc.shape[:2], -1, ratio, 2 * size.width), 2, -1)
        gate = gate + self.positions[...].astype(jnp.float32)
        if size.overlaps:
            there = ((first + jnp.arange(windows)) > 0)[:, None, None]
            x = jnp.concatenate([x[:, :, :-1, :, : size.channels], x[:, :, 1:, :, size.channels :]], 3)
            before = jnp.where(there, gate[:, :, :-1, :, : size.channels], -jnp.inf)
            gate = jnp.concatenate([before, gate[:, :, 1:, :, size.channels :]], 3)
        made = (jax.nn.softmax(gate, 3) * x).sum(3)
        made = rms_norm(made, self.norm[...], self.options.norm_eps)
        positions = ratio * (first + jnp.arange(windows))
        return rotate_last(made[..., None, :], rotary_tables(self.options.rotary, positions))[..., 0, :], first

    @staticmethod
    def table(options: CompressedAttentionOptions, path: str, channels: int) -> dict[str, Weight]:
        """Path -> Weight, like `Block.table`. channels: channels of an entry."""
        size, d = size_of(options, channels), options.hidden_size
        rows: dict[str, tuple[tuple[int, ...], P, Initial, Group]] = {
            "wkv": ((size.width, d), P(None, "data"), "normal", "matrix"),
            "wgate": ((size.width, d), P(None, "data"), "normal", "matrix"),
            "positions": ((size.ratio, size.width), P(None, None), "zeros", "vector"),
            "norm": ((channels,), P(None), "ones", "vector"),
        }
        return {
            f"{path}.{name}": attention_weight(f"{path}.{name}", *row, dtype="float32" if name == "positions" else None)
            for name, row in rows.items()
        }

    @staticmethod
    def state(options: CompressedAttentionOptions, name: str, channels: int, most: int | None) -> tuple[KeptArray, ...]:
        """The entries, and the vectors and gates of the newest tokens. most: largest number of entries that a token
        reads; None for all.
        """
        size, lanes = size_of(options, channels), options.num_lanes
        tail = (size.earlier, 2 * size.width)
        return (
            KeptArray(name=name, num_lanes=lanes, shape=(channels,), every=size.ratio, most=most),
            KeptArray(name=f"{name}_tail", num_lanes=lanes, shape=tail, fixed=True, dtype="float32"),
        )

    @staticmethod
    def op(options: CompressedAttentionOptions, path: str, channels: int, first: int) -> ops.Compressor:
        """The compressor in a decode step. first: first of its channels in PROJECTED."""
        table, size = Compressor.table(options, path, channels), size_of(options, channels)
        biases = weight_of_op(table, f"{path}.positions", small=True)
        norm = ops.Norm(weight_of_op(table, f"{path}.norm"), options.norm_eps)
        return ops.Compressor(**vars(size), first=first, biases=biases, norm=norm, rotary=rotary_op(options.rotary))


def size_of(options: CompressedAttentionOptions, channels: int) -> EntrySize:
    return EntrySize(channels, options.ratio, options.overlaps)
