"""Training for weights of 8 and 4 bits.

The forward pass rounds every matrix as `python -m scripts.quantize` does. The gradient reaches the weights as if
nothing had been rounded (straight-through estimator, Bengio et al., arXiv 1308.3432; for quantized networks Jacob et
al., arXiv 1712.05877). Master weights stay float32.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.quantized.rounding import (
    Arrays,
    Kind,
    Shared,
    group_of,
    grouped,
    nearest,
    stored_dtype,
    ungrouped,
    whole_scale,
)
from laneformer.weights import parameter_table


def _as_dtype(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds float32 values to `dtype`; the result is float32.

    XLA may remove a conversion followed by its inverse; these operations keep the rounding.
    """
    if dtype == np.float32:
        return x
    if dtype == ml_dtypes.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def _fold(better, factors, first):
    return jax.lax.scan(lambda best, factor: (better(best, factor), None), first, jnp.asarray(factors))[0]


ARRAYS = Arrays(jnp, _as_dtype, _fold)


def rounded(weights: jax.Array, kind: Kind, shared: Shared | None = None) -> jax.Array:
    """Rounds float32 weights [*lanes, rows, columns] to this format; the gradient passes through unchanged."""
    group = group_of(kind, shared, weights.shape)
    rows, columns = weights.shape[-2:]
    stored = stored_dtype(group, columns)
    exact = jax.lax.stop_gradient(weights).reshape(-1, rows, columns)
    whole = whole_scale(jnp.abs(exact).max(), jnp) if kind == "nvfp4" else None

    def one(w: jax.Array) -> jax.Array:
        numbers, scales = nearest(grouped(w, group, jnp), kind, stored, whole, arrays=ARRAYS)
        return ungrouped(numbers * (scales if whole is None else scales / whole), (rows, columns))

    values = jax.vmap(one)(exact).reshape(weights.shape)
    return values + (weights - jax.lax.stop_gradient(weights))  # equals `values` exactly


def matrices_of(config: ModelConfig) -> list[str]:
    """Paths of the weights that are rounded: not the embedding table, the head, norms and biases."""
    return [path for path, weight in parameter_table(config).items() if weight.group == "matrix"]


def held(params: dict[str, jax.Array], config: ModelConfig, kind: Kind, shared: Shared | None) -> dict[str, jax.Array]:
    """The weights that a forward pass uses: matrices rounded to the format, the others unchanged."""
    return params | {path: rounded(params[path], kind, shared) for path in matrices_of(config)}


def check_groups(config: ModelConfig, kind: Kind, shared: Shared | None) -> None:
    """Raises ConfigError for groups that the format does not have, or that do not divide the columns of a matrix."""
    table = parameter_table(config)
    for path in matrices_of(config):
        shape = table[path].shape
        columns = group_of(kind, shared, shape)[1]
        if kind != "fp8" and shape[-1] % columns:
            raise ConfigError(f"groups of {columns} do not divide the {shape[-1]} columns of {path}")
