"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) of every lane's stream."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Weight, plain
from laneformer.config import NormOptions
from laneformer.quantized import Quantized


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, of: jax.Array | None = None, plus_one: bool = False
) -> jax.Array:
    """x / sqrt(mean(of^2) + eps) * scale over the last axis, in float32.

    of: array whose mean square is taken, by default x. plus_one: multiply by 1 + scale instead of scale.
    """
    x = x.astype(jnp.float32)
    of = x if of is None else of.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(of * of, -1, keepdims=True) + eps) * (scale.astype(jnp.float32) + plus_one)


class RMSNorm(nnx.Module):
    """RMSNorm of every lane's stream. The scale is [d], shared by the lanes, or [l, d], one per lane."""

    def __init__(self, scale: jax.Array | Quantized[jax.Array], options: NormOptions):
        self.scale, self.eps, self.plus_one = nnx.Param(plain(scale)), options.eps, options.plus_one

    def __call__(self, x_lbsd: jax.Array, of: jax.Array | None = None) -> jax.Array:
        """The normed stream in float32, with the shape of x. of: see `rms_norm`."""
        scale = self.scale[...]
        return rms_norm(x_lbsd, scale if scale.ndim == 1 else scale[:, None, None, :], self.eps, of, self.plus_one)

    @staticmethod
    def table(options: NormOptions, path: str) -> dict[str, Weight]:
        """Path -> Weight of a norm at `path` in the module tree, like `Block.table`."""
        d = options.hidden_size
        weight = Weight(
            file_name=f"model.{path}.{'scale' if options.per_lane else 'weight'}",
            shape=(options.num_lanes, d) if options.per_lane else (d,),
            spec=P("lane", None) if options.per_lane else P(None),
            initial="zeros" if options.plus_one else "ones",
            group="vector",
            part="norms",
        )
        return {path: weight}
