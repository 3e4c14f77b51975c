"""The softcap of scores and logits (Gemma 2, arXiv 2408.00118)."""

import jax
import jax.numpy as jnp


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), element by element; x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def slope_of_cap(y: jax.Array, cap: float | None) -> jax.Array | float:
    """The derivative of `capped` where its result is y: 1 - (y / cap)^2, or 1 without a cap."""
    return 1.0 if cap is None else 1 - jnp.square(y / cap)
