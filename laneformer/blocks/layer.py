"""A layer: two blocks, each with the norms around it. The only file that knows how a norm and a block are joined."""

import jax
from flax import nnx

from laneformer import ops
from laneformer.blocks import BLOCKS
from laneformer.blocks.block import Weight, weight_of_op
from laneformer.blocks.norm import RMSNorm
from laneformer.config import LayerOptions, NormOptions, Norms
from laneformer.ops import Norm, Rotary
from laneformer.precision import Precision

BEFORE = {"attention": "attention_norm", "feed_forward": "ffn_norm"}
"""For each block of a layer the name of the norm through which it reads the stream, as in the weights' paths."""


class Layer(nnx.Module):
    """The blocks of a layer with their norms, as attributes named as in the weights' paths.

    The static methods state the facts of a layer at `path` in the module tree, without an instance.
    """

    def __init__(self, weights: dict[str, jax.Array], options: LayerOptions, norms: Norms, precision: Precision):
        for name, own in zip(options._fields, options, strict=True):
            setattr(self, BEFORE[name], RMSNorm(weights[BEFORE[name]], norms.before))
            setattr(self, name, BLOCKS[type(own)](within(weights, name), own, precision))

    def attend(self, x_lbsd: jax.Array, *args):
        """The attention's output [l, b, s, d], and what it returns beside that; args: see Attention."""
        return self.attention(self.attention_norm(x_lbsd), *args)

    def feed(self, x_lbsd: jax.Array) -> jax.Array:
        """The feed-forward block's output [l, b, s, d]."""
        return self.feed_forward(self.ffn_norm(x_lbsd))

    @staticmethod
    def tables(options: LayerOptions, norms: Norms, path: str) -> list[dict[str, Weight]]:
        """For each module the path -> Weight of its weights, in the order of the forward pass."""
        return [
            RMSNorm.table(norms.before, f"{path}.{BEFORE[name]}") | BLOCKS[type(own)].table(own, f"{path}.{name}")
            for name, own in zip(options._fields, options, strict=True)
        ]

    @staticmethod
    def ops(options: LayerOptions, norms: Norms, path: str, rotary: Rotary) -> ops.Layer:
        """The ops of a decode step."""

        def module(name: str) -> tuple[ops.Op, ...]:
            own = getattr(options, name)
            norm = norm_op(norms.before, f"{path}.{BEFORE[name]}")
            return BLOCKS[type(own)].ops(own, f"{path}.{name}", norm, rotary)

        return ops.Layer(*map(module, options._fields))


def norm_op(options: NormOptions, path: str) -> Norm:
    """The norm at `path` as ops name it."""
    return Norm(weight_of_op(RMSNorm.table(options, path), path), options.eps)


def within(weights: dict[str, jax.Array], prefix: str) -> dict[str, jax.Array]:
    """The weights whose path begins with the prefix and a dot, by the rest of their path."""
    return {
        path.removeprefix(prefix + "."): weight for path, weight in weights.items() if path.startswith(prefix + ".")
    }
