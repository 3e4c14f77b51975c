"""Several residual streams, which each module reads and writes through its own mixture: hyper-connections (Zhu et al.,
arXiv 2409.19606) with a doubly stochastic matrix between the streams (DeepSeek-V4).

Shape letters as in laneformer/model.py, and: m streams, w rows of `mix`. All lanes have the same streams.

Let u be the streams X end to end, divided by their root mean square. The rows of `mix` u form three parts, each times
its factor, plus offsets. A module reads the sum over m of pre[m] X[m], with pre = sigmoid(first part) + eps. Its output
o is written as X <- post (x) o + M^T X, with post = 2 sigmoid(second part). M [m, m] is the softmax over each row of
the third part, after which columns and rows are alternately scaled to sum to 1 (Sinkhorn). The head reads the streams
through a mixture that has only the first part.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Initial, Plain, Weight, Weights, plain, weight_of_op
from laneformer.config import StreamsOptions
from laneformer.ops import GatherStreams, Matrix


class Mixture(NamedTuple):
    """Factors, float32, by which a module's output joins the streams: post and M of the opening comment."""

    post_lbsm: jax.Array
    between_lbsmm: jax.Array


class Streams(nnx.Module):
    """`read(x [l, b, s, m, d])` returns a module's input [l, b, s, d] and a Mixture (None at the head). `write` returns
    the streams after the module. Both compute in float32 and return the dtype of the streams.
    """

    mix: Plain
    factors: Plain
    offsets: Plain

    def __init__(self, weights: Weights, options: StreamsOptions):
        for name, weight in weights.items():
            setattr(self, name, nnx.Param(plain(weight)))
        self.options = options

    def read(self, x_lbsmd: jax.Array) -> tuple[jax.Array, Mixture | None]:
        m, eps, factors = self.options.count, self.options.eps, self.factors[...]
        x = x_lbsmd.astype(jnp.float32)
        flat = x.reshape(*x.shape[:3], -1)
        flat = flat * jax.lax.rsqrt(jnp.mean(flat * flat, -1, keepdims=True) + self.options.norm_eps)
        rows = jnp.einsum("lbsi,wi->lbsw", flat, self.mix[...], precision=jax.lax.Precision.HIGHEST)
        parts = jnp.split(rows, [m, 2 * m][: len(factors) - 1], -1)
        offsets = jnp.split(self.offsets[...], [m, 2 * m][: len(factors) - 1])
        parts = [part * factor + offset for part, factor, offset in zip(parts, factors, offsets, strict=True)]
        pre_lbsm = jax.nn.sigmoid(parts[0]) + eps
        h_lbsd = (pre_lbsm[..., None] * x).sum(-2).astype(x_lbsmd.dtype)
        if len(parts) == 1:
            return h_lbsd, None
        return h_lbsd, Mixture(2 * jax.nn.sigmoid(parts[1]), self._between(parts[2]))

    def _between(self, rows_lbsw: jax.Array) -> jax.Array:
        """The matrix M between the streams, [l, b, s, m, m]. Its rows and columns sum to about 1."""
        m, eps = self.options.count, self.options.eps
        between = jax.nn.softmax(rows_lbsw.reshape(*rows_lbsw.shape[:-1], m, m), -1) + eps
        between = between / (between.sum(-2, keepdims=True) + eps)

        def again(_: int, between: jax.Array) -> jax.Array:
            between = between / (between.sum(-1, keepdims=True) + eps)
            return between / (between.sum(-2, keepdims=True) + eps)

        found: jax.Array = jax.lax.fori_loop(0, self.options.iterations - 1, again, between)
        return found

    @staticmethod
    def write(x_lbsmd: jax.Array, o_lbsd: jax.Array, mixture: Mixture) -> jax.Array:
        x, exact = x_lbsmd.astype(jnp.float32), jax.lax.Precision.HIGHEST
        mixed = jnp.einsum("lbsmn,lbsmd->lbsnd", mixture.between_lbsmm, x, precision=exact)
        written = mixture.post_lbsm[..., None] * o_lbsd[..., None, :].astype(jnp.float32)
        return (written + mixed).astype(x_lbsmd.dtype)

    @staticmethod
    def table(options: StreamsOptions, path: str, of_head: bool = False) -> dict[str, Weight]:
        """Path -> Weight, like `Block.table`. of_head: only what reads the streams, without what writes them."""
        m = options.count
        rows = m if of_head else 2 * m + m * m
        shapes: dict[str, tuple[tuple[int, ...], Initial]] = {
            "mix": ((rows, m * options.hidden_size), "normal"),
            "factors": ((1 if of_head else 3,), "ones"),
            "offsets": ((rows,), "zeros"),
        }
        return {
            f"{path}.{name}": Weight(
                file_name=f"model.{path}.{name}",
                shape=shape,
                spec=P(*[None] * len(shape)),
                initial=initial,
                group="matrix" if name == "mix" else "vector",
                part="norms",
                dtype="float32",
            )
            for name, (shape, initial) in shapes.items()
        }

    @staticmethod
    def op(options: StreamsOptions, path: str, of_head: bool = False) -> GatherStreams:
        """The op by which a module reads and writes the streams in a decode step, or the head reads them."""
        table = Streams.table(options, path, of_head)
        mix, factors, offsets = (weight_of_op(table, f"{path}.{name}") for name in ("mix", "factors", "offsets"))
        sizes = options.eps, options.norm_eps, options.iterations
        return GatherStreams(options.count, Matrix(mix), factors, offsets, *sizes)
