"""What layers keep between tokens: arrays by name, as each layer's blocks state them, and the current length."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from laneformer.blocks import BLOCKS
from laneformer.blocks.block import KeptArray
from laneformer.config import BlockOptions, LayerOptions, ModelConfig
from laneformer.mesh import DATA, LANE, sharding

CACHE_SPEC = P(LANE, DATA)


@jax.tree_util.register_dataclass
@dataclass
class Cache:
    """layers[n][name]: [l, b, t, ...] of layer n. Where there is an entry per position, t is the capacity, and
    positions 0..length-1 are filled; where several positions share an entry, t is as many as the capacity makes; a
    fixed array has t = 1, and is the state after `length` positions. length: int32 scalar.
    """

    layers: list[dict[str, jax.Array]]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return capacity_of(self.layers)

    @property
    def batch(self) -> int:
        """Sequences."""
        return jax.tree.leaves(self.layers)[0].shape[1]


def capacity_of(layers: list[dict[str, jax.Array]]) -> int:
    """Positions that fit what the layers keep; one layer at least keeps an entry per position."""
    return max(array.shape[2] for array in jax.tree.leaves(layers))


def kept_arrays(options: LayerOptions) -> dict[str, KeptArray]:
    """What a layer keeps between tokens, by name."""
    return {kept.name: kept for own in options for kept in BLOCKS[type(own)].state(own)}


def make_cache(config: ModelConfig, batch: int, capacity: int, dtype="float32", mesh=None) -> Cache:
    """An empty cache for `capacity` positions of `batch` sequences, sharded over the mesh like the lanes."""

    def make(kept: KeptArray) -> jax.Array:
        entries = 1 if kept.fixed else -(-capacity // kept.every)
        shape = (kept.num_lanes, batch, entries, *kept.shape)
        device = sharding(CACHE_SPEC, shape, mesh) if mesh is not None else None
        return jnp.zeros(shape, kept.dtype or dtype, device=device)

    layers = [{name: make(kept) for name, kept in kept_arrays(layer).items()} for layer in config.layers]
    return Cache(layers, jnp.zeros((), jnp.int32))


def emptied(config: ModelConfig, layers: list[dict[str, jax.Array]]) -> Cache:
    """An empty cache of arrays that held another text. Entries of positions stay: a token reads none after its own."""

    def empty(kept: KeptArray, array: jax.Array) -> jax.Array:
        return jnp.zeros_like(array, device=array.sharding) if kept.fixed else array

    found = [
        {name: empty(kept, arrays[name]) for name, kept in kept_arrays(options).items()}
        for options, arrays in zip(config.layers, layers, strict=True)
    ]
    return Cache(found, jnp.zeros((), jnp.int32))


def state_bytes_per_token(options: BlockOptions, context: int, bytes_per_value: float) -> float:
    """Bytes that one token writes to a block's state and, with `context` earlier positions, reads from it.
    bytes_per_value: of arrays without a dtype of their own.
    """
    return sum(kept.bytes_per_token(context, bytes_per_value) for kept in BLOCKS[type(options)].state(options))
