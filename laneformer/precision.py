"""The dtypes of parameters, matrix products, the residual stream and sums."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """Dtype names, as in laneformer/formats.py."""

    param: str = "float32"
    """Stored weights."""
    compute: str = "float32"
    """Both operands of every matrix product."""
    stream: str = "float32"
    """Residual streams, payloads between lanes and inputs of norms."""
    accumulate: str = "float32"
    """Results of matrix products, before any other rounding."""

    @classmethod
    def default(cls, param="float32", platform: str | None = None) -> "Precision":
        """Products in the weights' dtype; on a CPU in float32, because XLA converts a whole bf16 matrix for every
        product there.
        """
        platform = platform or jax.default_backend()
        param = jnp.dtype(param).name
        return cls(param=param, compute="float32" if platform == "cpu" else param)

    def einsum(self, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """The product of x and w in the compute dtype, with a result in the accumulate dtype; float32 is never TF32."""
        exact = jax.lax.Precision.HIGHEST if self.compute == "float32" else None
        x, w = x.astype(self.compute), w.astype(self.compute)
        return jnp.einsum(subscripts, x, w, precision=exact, preferred_element_type=self.accumulate)
