"""The key/value cache: one pair of arrays per layer, written in place at the current length."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from laneformer.config import ModelConfig
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
    """An empty cache for `capacity` positions of `batch` sequences, spread over the mesh as the lanes are."""
    shape = (config.num_lanes, batch, capacity, config.num_key_value_heads // config.num_lanes, config.head_size)
    device = sharding(CACHE_SPEC, shape, mesh) if mesh is not None else None
    layers = range(config.num_hidden_layers)
    keys, values = ([jnp.zeros(shape, dtype, device=device) for _ in layers] for _ in "kv")
    return Cache(keys, values, jnp.zeros((), jnp.int32))
