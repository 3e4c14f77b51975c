"""What layers keep between tokens: named arrays, which each layer's blocks declare, and the current length."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from laneformer.blocks import BLOCKS
from laneformer.blocks.block import KeptArray
from laneformer.config import BlockOptions, LayerOptions, ModelConfig
from laneformer.mesh import DATA, LANE, sharding

CACHE_SPEC = P(LANE, DATA)


@jax.tree_util.register_dataclass
@dataclass
class Cache:
    """The arrays that all layers keep. layers[n][name] is an array [l, b, t, ...] of layer n. length: int32 scalar.

    With one entry per position, t is the capacity, and positions 0..length - 1 are filled. With several positions per
    entry, t is the number of entries for the capacity. A fixed array has t = 1 and contains the state after `length`
    positions.
    """

    layers: list[dict[str, jax.Array]]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Positions that fit into the cache."""
        return capacity_of(self.layers)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return next(array.shape[1] for layer in self.layers for array in layer.values())


def capacity_of(layers: list[dict[str, jax.Array]]) -> int:
    """Positions that fit into the layers' arrays. At least one layer must keep one entry per position."""
    return max(array.shape[2] for layer in layers for array in layer.values())


def kept_arrays(options: LayerOptions) -> dict[str, KeptArray]:
    """The arrays that a layer keeps between tokens, by name."""
    return {kept.name: kept for own in options for kept in BLOCKS[type(own)].state(own)}


def make_cache(
    config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = "float32", mesh: Mesh | None = None
) -> Cache:
    """An empty cache for `capacity` positions of `batch` sequences, sharded over the mesh like the lanes."""

    def make(kept: KeptArray) -> jax.Array:
        entries = 1 if kept.fixed else -(-capacity // kept.every)
        shape = (kept.num_lanes, batch, entries, *kept.shape)
        device = sharding(CACHE_SPEC, shape, mesh) if mesh is not None else None
        return jnp.zeros(shape, kept.dtype or dtype, device=device)

    layers = [{name: make(kept) for name, kept in kept_arrays(layer).items()} for layer in config.layers]
    return Cache(layers, jnp.zeros((), jnp.int32))


def emptied(config: ModelConfig, layers: list[dict[str, jax.Array]]) -> Cache:
    """An empty cache that reuses the arrays of another text. Fixed arrays are cleared; entries of positions are not,
    because a token reads none after its own.
    """

    def empty(kept: KeptArray, array: jax.Array) -> jax.Array:
        return jnp.zeros_like(array, device=array.sharding) if kept.fixed else array

    found = [
        {name: empty(kept, arrays[name]) for name, kept in kept_arrays(options).items()}
        for options, arrays in zip(config.layers, layers, strict=True)
    ]
    return Cache(found, jnp.zeros((), jnp.int32))


def state_bytes_per_token(options: BlockOptions, context: int, bytes_per_value: float) -> float:
    """Bytes that one token writes to a block's state, plus those that it reads after `context` earlier positions.
    bytes_per_value: bytes of one value in arrays without a fixed dtype.
    """
    return sum(kept.bytes_per_token(context, bytes_per_value) for kept in BLOCKS[type(options)].state(options))
