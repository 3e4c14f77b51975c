"""What layers keep between tokens: keys and values per layer, written in place at the current length."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from laneformer.blocks import BLOCKS
from laneformer.config import BlockOptions, ModelConfig
from laneformer.mesh import DATA, LANE, sharding

CACHE_SPEC = P(LANE, DATA)


@jax.tree_util.register_dataclass
@dataclass
class Cache:
    """keys[n], values[n]: [l, b, t, n_kv, k] for layer n, positions 0..length-1 filled; length: int32 scalar."""

    keys: list[jax.Array]
    values: list[jax.Array]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.keys[0].shape[2]


def make_cache(config: ModelConfig, batch: int, capacity: int, dtype="float32", mesh=None) -> Cache:
    """An empty cache for `capacity` positions of `batch` sequences, sharded over the mesh like the lanes."""
    arrays: dict[str, list[jax.Array]] = {"keys": [], "values": []}
    for layer in config.layers:
        for kept in BLOCKS[type(layer.attention)].state(layer.attention):
            shape = (kept.num_lanes, batch, capacity, *kept.shape)
            device = sharding(CACHE_SPEC, shape, mesh) if mesh is not None else None
            arrays[kept.name].append(jnp.zeros(shape, dtype, device=device))
    return Cache(**arrays, length=jnp.zeros((), jnp.int32))


def values_per_token(options: BlockOptions, context: int) -> int:
    """Values that one token writes to a block's state and, with `context` earlier positions, reads from it."""
    return sum(kept.values_per_token(context) for kept in BLOCKS[type(options)].state(options))
