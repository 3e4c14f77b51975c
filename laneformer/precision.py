"""The dtypes of parameters, matrix products, the residual stream and sums."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from laneformer.quantized import Quantized


@dataclass(frozen=True)
class Precision:
    """The dtypes of a computation, by their names in laneformer/formats.py."""

    param: str = "float32"
    """Dtype of the stored weights."""
    compute: str = "float32"
    """Dtype of both operands of every matrix product."""
    stream: str = "float32"
    """Dtype of residual streams, payloads between lanes and inputs of norms."""
    accumulate: str = "float32"
    """Dtype of the results of matrix products, before any other rounding."""
    activation: str = "float32"
    """Dtype in which results of products in attention and MLP are kept, for their readers and the backward pass."""
    exchange: str = "float32"
    """Dtype in which devices send each other additions to the streams, and their gradients. No wider than `stream`."""

    @classmethod
    def default(cls, param: DTypeLike = "float32", platform: str | None = None) -> "Precision":
        """A Precision that multiplies in the weights' dtype; on a CPU in float32, because XLA converts a whole bfloat16
        matrix for every product there. platform: by default JAX's default backend.
        """
        platform = platform or jax.default_backend()
        name = jnp.dtype(param).name
        return cls(param=name, compute="float32" if platform == "cpu" else name)

    def einsum(
        self, subscripts: str, x: jax.Array, w: jax.Array | Quantized[jax.Array], result: str | None = None
    ) -> jax.Array:
        """The einsum of x and w, which may be quantized, with operands in the compute dtype. Float32 is never TF32.

        result: dtype of the result, by default the accumulate dtype.
        """
        exact = jax.lax.Precision.HIGHEST if self.compute == "float32" else None
        w = widen(w, x) if isinstance(w, Quantized) else w
        x, w = x.astype(self.compute), w.astype(self.compute)
        product = partial(jnp.einsum, precision=exact, preferred_element_type=result or self.accumulate)
        of_x, of_w, of_y = re.split(",|->", subscripts)
        if not ("bs" in of_x and "bs" in of_y) or {"b", "s"} & {*of_w}:
            return product(subscripts, x, w)
        # b and s become one axis: with lanes beside them, XLA:GPU copies and transposes where a gradient contracts two.
        at, to = of_x.index("b"), of_y.index("b")
        y = product(subscripts.replace("bs", "b"), x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]), w)
        return y.reshape(*y.shape[:to], *x.shape[at : at + 2], *y.shape[to + 1 :])

    @property
    def narrow(self) -> bool:
        """Whether blocks keep results of products in a dtype (activation) with fewer bits than accumulate has."""
        return jnp.finfo(self.activation).bits < jnp.finfo(self.accumulate).bits

    def block_einsum(self, subscripts: str, x: jax.Array, w: jax.Array | Quantized[jax.Array]) -> jax.Array:
        """`einsum` for a product in a block, with the result in the activation dtype if that is narrow."""
        if not self.narrow:
            return self.einsum(subscripts, x, w)
        kept = jnp.finfo(self.activation)
        if self.compute != "float32":
            return self.einsum(subscripts, x, w, self.activation)
        # XLA may remove a conversion to 16 bits and back, but not reduce_precision.
        return jax.lax.reduce_precision(self.einsum(subscripts, x, w), kept.nexp, kept.nmant).astype(self.activation)

    def widened(self, y: jax.Array) -> jax.Array:
        """A result of `block_einsum`, converted to the accumulate dtype."""
        return y.astype(jnp.promote_types(y.dtype, self.accumulate))


_FLOATS: dict[str | None, Any] = {"e2m1": jnp.float4_e2m1fn, "e4m3": jnp.float8_e4m3fn}  # by Format.code


def widen(w: Quantized[jax.Array], x: jax.Array) -> jax.Array:
    """The weights of a record in float32, made to depend on x. A program that multiplies by several records then has
    only one of them in float32 at a time, and a loop does not keep them.
    """
    first = x[(0,) * x.ndim]
    codes = w.codes | jnp.isnan(first).astype(w.codes.dtype)  # depends on x; equal to w.codes unless x starts with NaN
    if w.format.per_byte == 2:
        # Shift by the column's parity: on a CPU, XLA would copy a stack of both halves byte by byte.
        codes = jnp.repeat(codes, 2, -1)[..., : w.columns]
        odd = jax.lax.broadcasted_iota(codes.dtype, codes.shape, codes.ndim - 1) & 1
        codes = (codes >> (4 * odd)) & 15
    if w.format.code == "int":
        zeros = w.format.zero if w.zero_points is None else _spread(w, w.zero_points.astype(jnp.int32))
        values = (codes.astype(jnp.int32) - zeros).astype(jnp.float32)
    else:
        dtype = _FLOATS[w.format.code]
        values = jax.lax.bitcast_convert_type(codes.astype(jnp.uint4) if dtype == jnp.float4_e2m1fn else codes, dtype)
        values = values.astype(jnp.float32)
    values = values * _spread(w, _scales(w))
    return values if w.order is None else values[..., jnp.argsort(w.order)]


def _scales(w: Quantized[jax.Array]) -> jax.Array:
    """The scales of a record in float32, divided by its global scale."""
    if w.kind not in ("mxfp4", "nvfp4"):
        return w.scales.astype(jnp.float32)
    dtype = jnp.float8_e8m0fnu if w.kind == "mxfp4" else jnp.float8_e4m3fn
    scales = jax.lax.bitcast_convert_type(w.scales, dtype).astype(jnp.float32)
    return scales if w.global_scale is None else scales / w.global_scale


def _spread(w: Quantized[jax.Array], grid: jax.Array) -> jax.Array:
    """An array shaped like the scales, repeated to one value per weight; axes of size 1 stay, to be broadcast."""
    for axis, group, size in ((-2, w.group[0], w.codes.shape[-2]), (-1, w.group[1], w.columns)):
        if grid.shape[axis] == 1:
            continue  # broadcast
        grid = jnp.repeat(grid, group, axis) if group > 1 else grid
        grid = jax.lax.slice_in_dim(grid, 0, size, axis=axis % grid.ndim)
    return grid
