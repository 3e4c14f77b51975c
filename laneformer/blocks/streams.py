"""Several residual streams, which each module reads and writes through its own mixture: hyper-connections (Zhu et al.,
arXiv 2409.19606) with a doubly stochastic matrix between the streams (DeepSeek-V4). Shape letters as in
laneformer/model.py, and: m streams, w what their mixture is made of. All lanes have the same streams.

With u = the streams end to end over their root mean square, and the rows of `mix` u in three parts: a module reads the
sum over m of pre[m] X[m], pre = sigmoid(first) + eps; its output o becomes X <- post (x) o + M^T X, post = 2
sigmoid(second), and M [m, m] the third through a softmax over each row, then made to sum to 1 over columns and rows in
turn (Sinkhorn). Before the head the streams are read once more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Weight, weight_of_op
from laneformer.config import StreamsOptions
from laneformer.ops import GatherStreams, Matrix


class Mixture(NamedTuple):
    """How a module's output joins the streams, float32."""

    post_lbsm: jax.Array
    between_lbsmm: jax.Array


class Streams(nnx.Module):
    """`read(x [l, b, s, m, d])` gives what a module reads [l, b, s, d] and a Mixture; `write` the streams after it.
    Everything is float32. The mixture at the head has `pre` alone.
    """

    def __init__(self, weights: dict[str, jax.Array], options: StreamsOptions):
        for name, weight in weights.items():
            setattr(self, name, nnx.Param(weight))
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
        """[l, b, s, m, m], of which rows and columns sum to about 1."""
        m, eps = self.options.count, self.options.eps
        between = jax.nn.softmax(rows_lbsw.reshape(*rows_lbsw.shape[:-1], m, m), -1) + eps
        between = between / (between.sum(-2, keepdims=True) + eps)

        def again(_, between):
            between = between / (between.sum(-1, keepdims=True) + eps)
            return between / (between.sum(-2, keepdims=True) + eps)

        return jax.lax.fori_loop(0, self.options.iterations - 1, again, between)

    @staticmethod
    def write(x_lbsmd: jax.Array, o_lbsd: jax.Array, mixture: Mixture) -> jax.Array:
        x, exact = x_lbsmd.astype(jnp.float32), jax.lax.Precision.HIGHEST
        mixed = jnp.einsum("lbsmn,lbsmd->lbsnd", mixture.between_lbsmm, x, precision=exact)
        written = mixture.post_lbsm[..., None] * o_lbsd[..., None, :].astype(jnp.float32)
        return (written + mixed).astype(x_lbsmd.dtype)

    @staticmethod
    def table(options: StreamsOptions, path: str, of_head: bool = False) -> dict[str, Weight]:
        """Path -> Weight, as `Block.table`. of_head: without what writes."""
        m = options.count
        rows = m if of_head else 2 * m + m * m
        shapes = {
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
        """How a module, or the head, reads and writes the streams in a decode step."""
        table = Streams.table(options, path, of_head)
        mix, factors, offsets = (weight_of_op(table, f"{path}.{name}") for name in ("mix", "factors", "offsets"))
        sizes = options.eps, options.norm_eps, options.iterations
        return GatherStreams(options.count, Matrix(mix), factors, offsets, *sizes)
