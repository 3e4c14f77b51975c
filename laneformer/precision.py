"""Which dtype holds what: parameters, matrix products, the residual stream, and sums."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """Dtype names for the four places where a number can live.

    param: the stored weights. compute: both operands of every matrix product. stream: the residual streams, what the
    lanes exchange and the norms' input. accumulate: results of matrix products before they are rounded to anything
    else.
    """

    param: str = "float32"
    compute: str = "float32"
    stream: str = "float32"
    accumulate: str = "float32"

    @classmethod
    def default(cls, param="float32", platform: str | None = None) -> "Precision":
        """Products in the weights' dtype; on a CPU in float32, where XLA would convert whole bf16 matrices for every
        product.
        """
        platform = platform or jax.default_backend()
        param = jnp.dtype(param).name
        return cls(param=param, compute="float32" if platform == "cpu" else param)

    def einsum(self, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """x and w in the compute dtype; the result in the accumulate dtype. float32 means full float32, not TF32."""
        exact = jax.lax.Precision.HIGHEST if self.compute == "float32" else None
        x, w = x.astype(self.compute), w.astype(self.compute)
        return jnp.einsum(subscripts, x, w, precision=exact, preferred_element_type=self.accumulate)
