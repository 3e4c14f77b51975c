"""All weights in one table: path in the model, name in a file, shape, how it lies on the mesh, how it begins."""

import math
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from laneformer.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One weight. Lane-first where lanes have their own; `spec` names the mesh axes (lane, data) of each dimension."""

    file_name: str
    shape: tuple[int, ...]
    spec: P
    initial: str
    """normal (matrix that reads the stream), output (one that writes to it), embedding, ones, or zeros."""


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """Path in the module tree -> Parameter, for every weight of the config, in the order of the forward pass."""
    d, v, lanes, e = config.hidden_size, config.vocab_size, config.num_lanes, config.head_size
    q, kv = config.num_attention_heads * e // lanes, config.num_key_value_heads * e // lanes
    f = config.intermediate_size // lanes
    table = {"tok_embeddings": Parameter("model.tok_embeddings.weight", (v, d), P(None, "data"), "embedding")}

    def norm(path: str, per_lane: bool):
        if per_lane:
            table[path] = Parameter(f"model.{path}.scale", (lanes, d), P("lane", None), "ones")
        else:
            table[path] = Parameter(f"model.{path}.weight", (d,), P(None), "ones")

    per_lane_layers, per_lane_final = config.lane_norm_scales
    for n in range(config.num_hidden_layers):
        layer = f"layers.{n}"
        norm(f"{layer}.attention_norm", per_lane_layers)
        for name, rows in (("wq", q), ("wk", kv), ("wv", kv)):
            path = f"{layer}.attention.{name}"
            table[path] = Parameter(f"model.{path}.weight", (lanes, rows, d), P("lane", None, "data"), "normal")
            if config.qkv_bias:
                table[f"{path}_bias"] = Parameter(f"model.{path}.bias", (lanes, rows), P("lane", None), "zeros")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                table[f"{layer}.attention.{name}"] = Parameter(
                    f"model.{layer}.attention.{name}.weight", (e,), P(None), "ones"
                )
        wo = f"{layer}.attention.wo"
        table[wo] = Parameter(f"model.{wo}.weight", (lanes, d, q), P("lane", "data", None), "output")
        norm(f"{layer}.ffn_norm", per_lane_layers)
        for name in ("w1", "w3"):
            path = f"{layer}.feed_forward.{name}"
            table[path] = Parameter(f"model.{path}.weight", (lanes, f, d), P("lane", None, "data"), "normal")
        w2 = f"{layer}.feed_forward.w2"
        table[w2] = Parameter(f"model.{w2}.weight", (lanes, d, f), P("lane", "data", None), "output")
    norm("norm", per_lane_final)
    if config.lm_head_type == "lane":  # in files [v, l d]: see laneformer/hf/folder.py
        table["lm_head"] = Parameter("lm_head.linear.weight", (lanes, v, d), P("lane", None, "data"), "normal")
    elif config.lm_head_type == "vocab_parallel":
        table["lm_head"] = Parameter("lm_head.weight", (lanes, v // lanes, d), P("lane", None, "data"), "normal")
    elif not config.tie_word_embeddings:  # every lane could make all logits; each makes a slice of them
        table["lm_head"] = Parameter("lm_head.weight", (v, d), P("lane", "data"), "normal")
    return table


def initial_weights(config: ModelConfig, seed: int, dtype="float32") -> dict[str, jax.Array]:
    """Fresh weights, the same on every mesh: truncated normals of deviation 0.02; outputs to the stream by a further
    1/sqrt(2N).

    (GPT-2's rule, Radford et al. 2019.) The key of a weight depends on its path alone, so that adding one changes no
    other.
    """
    deviation = {"normal": 0.02, "embedding": 0.02, "output": 0.02 / math.sqrt(2 * config.num_hidden_layers)}

    def make(path: str, parameter: Parameter) -> jax.Array:
        if parameter.initial in ("ones", "zeros"):
            return getattr(jnp, parameter.initial)(parameter.shape, dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()) & 0x7FFFFFFF)
        sample = jax.random.truncated_normal(key, -3, 3, parameter.shape, jnp.float32)
        return (deviation[parameter.initial] * sample).astype(dtype)

    return {path: make(path, parameter) for path, parameter in parameter_table(config).items()}


def parameter_count(config: ModelConfig) -> int:
    """Weights in the model; a tied head counts once."""
    return sum(math.prod(p.shape) for p in parameter_table(config).values())


def parameters_per_token(config: ModelConfig) -> int:
    """Weights that decoding one token must read: all but the embedding table, or all of it once where it is the head
    too.
    """
    return parameter_count(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def weight_bytes_per_token(config: ModelConfig, bytes_per_weight: float = 2) -> float:
    """Bytes of weights read for one token at batch 1, the row of the embedding table included."""
    return (parameters_per_token(config) + config.hidden_size) * bytes_per_weight


def kv_bytes_per_token(config: ModelConfig, context: int = 0, bytes_per_value: float = 2) -> float:
    """Bytes of keys and values that one token writes and, with `context` earlier positions, reads; sliding layers read
    their window.
    """
    per_position = 2 * config.num_key_value_heads * config.head_size * bytes_per_value
    positions_read = [min(context, window - 1) if window else context for window in config.layer_windows]
    return per_position * (config.num_hidden_layers + sum(positions_read))
