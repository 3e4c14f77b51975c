"""The table of all weights, collected from the blocks, and the counts computed from it."""

import math
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding
from jax.typing import DTypeLike

from laneformer.blocks import BLOCKS
from laneformer.blocks.block import Weight
from laneformer.blocks.delta_net import DRAWS
from laneformer.blocks.experts import draw_by_token
from laneformer.blocks.layer import Layer
from laneformer.blocks.norm import RMSNorm
from laneformer.blocks.streams import Streams
from laneformer.config import ModelConfig
from laneformer.state import state_bytes_per_token


def parameter_table(config: ModelConfig) -> dict[str, Weight]:
    """Path in the module tree -> Weight, for every weight of the config, in the order of the forward pass."""
    table = {"tok_embeddings": _embedding(config)}
    for weights in module_weights(config):
        table |= weights
    if config.norms.streams:
        table |= Streams.table(config.norms.streams, "head_streams", of_head=True)
    table |= RMSNorm.table(config.norms.final, "norm")
    head = _head(config)
    return table if head is None else table | {"lm_head": head}


def packing_order(config: ModelConfig) -> list[str]:
    """Paths of the table in the order of packing. The embedding table and the head, usually the largest, come first:
    while they are packed, and in memory twice, the other weights are not in memory yet.
    """
    table = parameter_table(config)
    return sorted(table, key=lambda path: table[path].group != "embedding")


def module_weights(config: ModelConfig) -> list[dict[str, Weight]]:
    """The table's entries by module: attention of layer 0, feed-forward of layer 0, ..., each with its norms."""
    return [
        table for n, options in enumerate(config.layers) for table in Layer.tables(options, config.norms, f"layers.{n}")
    ]


def _embedding(config: ModelConfig) -> Weight:
    """The embedding table. A token looks up one row; it multiplies the whole table only if that is also the head."""
    return Weight(
        file_name="model.tok_embeddings.weight",
        shape=(config.vocab_size, config.hidden_size),
        spec=P(None, "data"),
        initial="embedding",
        group="embedding",
        part="head",
        share=1.0 if config.tie_word_embeddings else 0.0,
        looked_up=config.hidden_size,
    )


def _head(config: ModelConfig) -> Weight | None:
    """The head, or None if the embedding table is the head."""
    d, v, lanes = config.hidden_size, config.vocab_size, config.num_lanes
    if config.tie_word_embeddings:
        return None
    file_name, shape, spec = {
        # Lanes share this head, but each device computes only a slice of the logits.
        "replicate": ("lm_head.weight", (v, d), P("lane", "data")),
        # In files this head is [v, l d]; see laneformer/hf/families/laneformer.py.
        "lane": ("lm_head.linear.weight", (lanes, v, d), P("lane", None, "data")),
        "vocab_parallel": ("lm_head.weight", (lanes, v // lanes, d), P("lane", None, "data")),
    }[config.lm_head_type]
    return Weight(file_name=file_name, shape=shape, spec=spec, initial="normal", group="embedding", part="head")


def initial_weights(
    config: ModelConfig, seed: int, dtype: DTypeLike = "float32", shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.Array]:
    """Fresh weights, path -> array, the same on every mesh. Matrices are truncated normals with deviation 0.02, or
    0.02 / sqrt(2N) if they write to the stream (GPT-2's rule, Radford et al. 2019).

    The random key of a weight depends only on the seed and its path, so that adding a weight changes no other. dtype:
    of weights without a fixed dtype. shardings: by path; each weight is made on its devices, with one program for all
    weights of a shape.
    """
    deviation = {"normal": 0.02, "embedding": 0.02, "output": 0.02 / math.sqrt(2 * config.num_hidden_layers)}

    def make(path: str, weight: Weight) -> jax.Array:
        where = shardings and shardings[path]
        own = weight.dtype or dtype
        if weight.initial in ("ones", "zeros"):
            fill = jnp.ones if weight.initial == "ones" else jnp.zeros
            return fill(weight.shape, own, device=where)
        scale = deviation.get(weight.initial)
        if scale is None:
            draw = _draw_other(seed, weight.shape, weight.initial, jnp.dtype(own).name, where, weight.below)
        else:
            draw = _draw(seed, weight.shape, scale, jnp.dtype(own).name, where)
        return draw(np.uint32(zlib.crc32(path.encode()) & 0x7FFFFFFF))

    return {path: make(path, weight) for path, weight in parameter_table(config).items()}


@lru_cache(128)  # programs
def _draw(
    seed: int, shape: tuple[int, ...], deviation: float, dtype: str, where: Sharding | None
) -> Callable[[np.uint32], jax.Array]:
    """A function draw(number) that returns truncated normals, with the key of `seed` folded with the number."""

    def draw(number: np.uint32) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        return (deviation * jax.random.truncated_normal(key, -3, 3, shape, jnp.float32)).astype(dtype)

    return jax.jit(draw, out_shardings=where)


@lru_cache(128)
def _draw_other(
    seed: int, shape: tuple[int, ...], initial: str, dtype: str, where: Sharding | None, below: int | None
) -> Callable[[np.uint32], jax.Array]:
    """Like `_draw`, for weights whose block has its own rule."""

    def draw(number: np.uint32) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = DRAWS[initial](key, shape) if below is None else draw_by_token(key, shape, below)
        return drawn.astype(dtype)

    return jax.jit(draw, out_shardings=where)


def parameter_count(config: ModelConfig) -> int:
    """Number of weights in the model; a tied head counts once."""
    return sum(weight.size for weight in parameter_table(config).values())


def parameters_per_token(config: ModelConfig) -> int:
    """Number of weights that one token multiplies. The embedding table counts only if it is also the head."""
    return sum(weight.read for weight in parameter_table(config).values())


def weight_bytes_per_token(config: ModelConfig, bytes_per_weight: float = 2) -> float:
    """Bytes of weights that one token reads at batch 1, including its row of the embedding table."""
    return sum(weight.read + weight.looked_up for weight in parameter_table(config).values()) * bytes_per_weight


def kv_bytes_per_token(config: ModelConfig, context: int = 0, bytes_per_value: float = 2) -> float:
    """Bytes of keys and values, or other state, that one token writes, plus those that it reads after `context` earlier
    positions. Sliding layers read only their window.
    """
    return sum(state_bytes_per_token(own, context, bytes_per_value) for layer in config.layers for own in layer)


def matmul_parameters(config: ModelConfig) -> int:
    """Number of matrix weights that one token multiplies, including a tied head, without the vectors."""
    return sum(weight.read for weight in parameter_table(config).values() if weight.group != "vector")


def attention_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs per token of q k^T and of the weighted sum of v, in a forward pass over `sequence_length` tokens: for
    grouped queries, the sum over layers of 4 H e keys.

    The sum over `Block.context_flops` of all blocks. Document boundaries are ignored.
    """
    return sum(
        BLOCKS[type(options)].context_flops(options, sequence_length) for layer in config.layers for options in layer
    )


def prompt_multiply_adds(config: ModelConfig, length: int) -> float:
    """Multiply-adds of a prompt of `length` tokens: the layers' matrices and the attention for every token, and the
    head for the last token.
    """
    head = sum(weight.read for weight in parameter_table(config).values() if weight.group == "embedding")
    layers = matmul_parameters(config) - head
    return head + length * (layers + attention_flops_per_token(config, length) / 2)
