"""A layer: two blocks, each with the norms around it. No other file combines norms with blocks."""

import dataclasses

import jax
from flax import nnx

from laneformer import ops
from laneformer.blocks import BLOCKS
from laneformer.blocks.block import FeedForward, Memory, Mixer, Weight, Weights, weight_of_op, within
from laneformer.blocks.norm import RMSNorm
from laneformer.blocks.rotary import Rotations
from laneformer.blocks.streams import Mixture, Streams
from laneformer.config import LayerOptions, NormOptions, Norms
from laneformer.ops import Norm
from laneformer.precision import Precision
from laneformer.routing import Routing

BEFORE = {"attention": "attention_norm", "feed_forward": "ffn_norm"}
"""Block of a layer -> name of the norm through which it reads the stream, as in the weights' paths."""
AFTER = {"attention": "attention_post_norm", "feed_forward": "ffn_post_norm"}
"""Block of a layer -> name of the norm of its output."""
STREAMS = {"attention": "attention_streams", "feed_forward": "ffn_streams"}
"""Block of a layer -> name of its mixture of several residual streams."""


class Layer(nnx.Module):
    """The blocks and norms of a layer, as attributes that are named as in the weights' paths.

    The static methods describe a layer at `path` in the module tree, without an instance.
    """

    attention: Mixer
    feed_forward: FeedForward

    def __init__(self, weights: Weights, options: LayerOptions, norms: Norms, precision: Precision):
        for name, own in zip(options._fields, options, strict=True):
            for norm, path in ((before(norms), BEFORE[name]), (after(norms), AFTER[name])):
                setattr(self, path, RMSNorm(weights[path], norm) if norm else None)
            setattr(self, name, BLOCKS[type(own)](within(weights, name), own, precision))
            if norms.streams:
                setattr(self, STREAMS[name], Streams(within(weights, STREAMS[name]), norms.streams))
        self.has_streams = norms.streams is not None
        self.after_sum = after_sum(norms)

    def gather(self, x: jax.Array, name: str) -> tuple[jax.Array, Mixture | None]:
        """The input of a block, [l, b, s, d], read from several residual streams [l, b, s, m, d], and the Mixture by
        which the block's output joins them. With one stream: x [l, b, s, d] and None.
        """
        if not self.has_streams:
            return x, None
        streams: Streams = getattr(self, STREAMS[name])
        return streams.read(x)

    def attend(
        self, x_lbsd: jax.Array, rotary: Rotations, memory: Memory | None, segments_bs: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The attention's output [l, b, s, d] and the arrays to keep; see `Mixer.__call__`."""
        o_lbsd, kept = self.attention(self._read(x_lbsd, "attention"), rotary, memory, segments_bs)
        return self._write(o_lbsd, "attention"), kept

    def feed(self, x_lbsd: jax.Array, ids_bs: jax.Array | None = None) -> tuple[jax.Array, Routing | None]:
        """The feed-forward block's output [l, b, s, d], and its router's decisions; None without a router. ids: tokens,
        int [b, s].
        """
        o_lbsd, routing = self.feed_forward.routed(self._read(x_lbsd, "feed_forward"), ids_bs)
        return self._write(o_lbsd, "feed_forward"), routing

    def _read(self, x_lbsd: jax.Array, name: str) -> jax.Array:
        norm: RMSNorm | None = getattr(self, BEFORE[name])
        return norm(x_lbsd) if norm else x_lbsd

    def _write(self, o_lbsd: jax.Array, name: str) -> jax.Array:
        norm: RMSNorm | None = getattr(self, AFTER[name])
        return norm(o_lbsd) if norm and not self.after_sum else o_lbsd

    def receive(self, total_lbsd: jax.Array, o_lbsd: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
        """`total` and `o` as they are added to the streams. If the layer norms sums, the norm of `total` scales both;
        otherwise both are unchanged.

        total: sum over all lanes [1, b, s, d] that the output o [l, b, s, d] of block `name` completes.
        """
        if not self.after_sum:
            return total_lbsd, o_lbsd
        norm: RMSNorm = getattr(self, AFTER[name])
        return norm(total_lbsd).astype(total_lbsd.dtype), norm(o_lbsd, of=total_lbsd).astype(o_lbsd.dtype)

    @staticmethod
    def tables(options: LayerOptions, norms: Norms, path: str) -> list[dict[str, Weight]]:
        """Path -> Weight of each module's weights: one table per module, in the order of the forward pass."""

        def norm(own: NormOptions | None, name: str) -> dict[str, Weight]:
            return RMSNorm.table(own, f"{path}.{name}") if own else {}

        return [
            (Streams.table(norms.streams, f"{path}.{STREAMS[name]}") if norms.streams else {})
            | norm(before(norms), BEFORE[name])
            | BLOCKS[type(own)].table(own, f"{path}.{name}")
            | norm(after(norms), AFTER[name])
            for name, own in zip(options._fields, options, strict=True)
        ]

    @staticmethod
    def ops(options: LayerOptions, norms: Norms, path: str) -> ops.Layer:
        """The ops of a decode step of the layer."""

        def module(name: str) -> ops.Module:
            own = getattr(options, name)
            of_stream, of_output = (
                norm_op(norm, f"{path}.{names[name]}") if norm else None
                for norm, names in ((before(norms), BEFORE), (after(norms), AFTER))
            )
            found = BLOCKS[type(own)].ops(own, f"{path}.{name}", of_stream)
            if norms.streams:
                found = (Streams.op(norms.streams, f"{path}.{STREAMS[name]}"), *found)
            if after_sum(norms):
                return ops.Module(found, of_output)
            return ops.Module((*found, ops.OutputNorm(of_output)) if of_output else found)

        return ops.Layer(*map(module, options._fields))


def before(norms: Norms) -> NormOptions | None:
    """The norm of the stream before each module."""
    return norms.in_layers if norms.norm_before else None


def after(norms: Norms) -> NormOptions | None:
    """The norm of each module's output, or of its sum over all lanes, of which lanes have the same scale."""
    own = norms.in_layers
    return dataclasses.replace(own, per_lane=own.per_lane and not after_sum(norms)) if norms.norm_after else None


def after_sum(norms: Norms) -> bool:
    """Whether the norm after a module is that of the sum over all lanes."""
    return norms.norm_after == "sum" and norms.in_layers.num_lanes > 1


def norm_op(options: NormOptions, path: str) -> Norm:
    """The norm at `path` as an op refers to it."""
    return Norm(weight_of_op(RMSNorm.table(options, path), path, plus=float(options.plus_one)), options.eps)
