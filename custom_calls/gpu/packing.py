"""Packing of products on the devices: from matrices to the streams and lists of the warps."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from custom_calls.gpu.layout import Tiling
from laneformer.formats import BF12_END


class Placement(NamedTuple):
    """Where a product is packed."""

    offset: int
    """Word of each warp's stream."""
    tiling: Tiling
    arrangement: str
    """As in `placed`."""


@partial(jax.jit, static_argnames=("tiling", "arrangement", "sharding"), donate_argnums=0)
def placed(
    packed: jax.Array,
    parts: list[jax.Array],
    offset: jax.Array,
    table: jax.Array,
    tiling: Tiling,
    arrangement: str,
    sharding,
) -> tuple[jax.Array, ...]:
    """Packs a product; the results are those of `_stored`.

    arrangement of the parts [lanes, rows, columns] (without lanes where all have the same): "rows" one after the
    other; "pairs" of rows, so that a gate and its partner stay in a CTA; "columns" of lanes, end to end.
    """
    lanes = packed.shape[0]
    if arrangement == "as it is":
        matrix = parts[0]
    elif arrangement == "columns":
        matrix = parts[0].transpose(1, 0, 2).reshape(parts[0].shape[1], -1)
    else:
        parts = [part if part.ndim == 3 else jnp.broadcast_to(part, (lanes, *part.shape)) for part in parts]
        paired = arrangement == "pairs"
        matrix = jnp.stack(parts, 2) if paired else jnp.concatenate(parts, 1)
        matrix = matrix.reshape(lanes, -1, parts[0].shape[-1])
    return _stored(packed, tiling.deal(tiling.format.encode(matrix, table)), offset, tiling, sharding)


@partial(jax.jit, static_argnames=("tiling", "sharding"), donate_argnums=0)
def filled(
    packed: jax.Array, block: jax.Array, offset: jax.Array, table: jax.Array, tiling: Tiling, sharding
) -> tuple[jax.Array, ...]:
    """As `placed`, for a matrix of some weights repeated."""
    coded = tiling.format.encode(block, table)
    steps = jnp.resize(coded, (*packed.shape[:3], *tiling.dealt))
    return _stored(packed, steps, offset, tiling, sharding)


def _stored(packed: jax.Array, steps: jax.Array, offset: jax.Array, tiling: Tiling, sharding) -> tuple[jax.Array, ...]:
    """The packed weights with those of a product, what its format lists for each warp or None, and of that the most in
    a warp and the sum.
    """

    def of_lanes(array: jax.Array) -> jax.Array:
        rows = array.reshape(*packed.shape[:3], -1)
        return rows if sharding is None else jax.lax.with_sharding_constraint(rows, sharding)

    lines, listed = of_lanes(tiling.format.pack(steps)), tiling.format.listed(steps)
    packed = jax.lax.dynamic_update_slice(packed, lines, (0, 0, 0, offset))
    if listed is None:
        return packed, None, None, None
    listed = of_lanes(listed)
    counts = (listed != np.uint32(BF12_END)).sum(-1)
    return packed, listed, counts.max(), counts.sum()


@partial(jax.jit, static_argnames="room")
def gathered(words: jax.Array, room: int) -> jax.Array:
    """The words that are no BF12_END, at the beginning of each row, then BF12_END; [..., n] -> [..., room]."""
    rows = words.reshape(-1, words.shape[-1])
    here = rows != jnp.uint32(BF12_END)
    places = jnp.where(here, jnp.cumsum(here, -1) - 1, room)
    found = jnp.full((len(rows), room), BF12_END, jnp.uint32)
    found = found.at[jnp.arange(len(rows))[:, None], places].set(rows, mode="drop")
    return found.reshape(*words.shape[:-1], room)


@partial(jax.jit, donate_argnums=1)
def normal(key: jax.Array, like: jax.Array) -> jax.Array:
    """Normal numbers with the deviation of initial weights; beyond a million, they repeat."""
    block = 0.02 * jax.random.normal(key, (min(like.shape[-1], 1 << 20),))
    return jnp.broadcast_to(jnp.resize(block, like.shape[-1]).astype(like.dtype), like.shape)
