"""Writes what is a Llama as `llama`, for transformers, vLLM and llama.cpp: a model whose lanes wait for each other
after every module (layout tp), or with one lane, and without options that a Llama does not have.
"""

import dataclasses
from typing import Any

import numpy as np

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf import config_from_hf
from laneformer.hf.families.llama import sources
from laneformer.hf.rope import deinterleave, rope_to_hf
from laneformer.hf.safetensors import Source
from laneformer.layout import Own
from laneformer.weights import parameter_table

KIND = "llama"
SAME_NAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "rope_theta"),
    *("bos_token_id",),
)
LANES = (  # fields about lanes, which a Llama does not have; what they change is checked by the schedule and the heads
    *("layout", "broadcast_delay", "use_early_comm", "early_lands_twice", "use_attention_comm", "use_mlp_comm"),
    *("lm_head_type", "pre_norm_lane_agg", "replicated_rmsn_scale"),
)
WINDOWS = ("sliding_window_n_layers", "unclamped_layers", "swa_layers")  # without effect if there is no window


def config_to_llama(config: ModelConfig) -> dict[str, Any]:
    """The values of the config.json. Raises ConfigError for a model that is not a Llama, naming the field."""
    values: dict[str, Any] = {"model_type": KIND, "architectures": ["LlamaForCausalLM"]}
    values |= {name: getattr(config, name) for name in SAME_NAME}
    values |= {"head_dim": config.head_size, "rms_norm_eps": config.norm_eps, "attention_bias": False}
    values |= {"mlp_bias": False, "rope_scaling": rope_to_hf(config.rope_scaling)}
    values["eos_token_id"] = [*config.eos_token_id] if len(config.eos_token_id) != 1 else config.eos_token_id[0]
    again = config_from_hf(values, config.num_lanes)
    ignored = {"head_dim", *LANES, *(WINDOWS if config.sliding_window is None else ())}
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if field.name not in ignored and getattr(again, field.name) != value:
            raise _not_a_llama(f"{field.name} = {value!r}")
    waits = config.num_lanes == 1 or config.schedule.adds_whole_sums
    if config.schedule.own != tuple(Own(m) for m in range(config.schedule.num_modules)) or not waits:
        raise _not_a_llama(f"layout {config.layout} of {config.num_lanes} lanes")
    if config.num_lanes > 1 and (config.lm_head_type != "replicate" or config.pre_norm_lane_agg):
        raise _not_a_llama(f"lm_head_type = {config.lm_head_type!r}, pre_norm_lane_agg = {config.pre_norm_lane_agg}")
    return values


def llama_sources(config: ModelConfig) -> dict[str, Source]:
    """Path -> the tensor of a weight."""
    return sources(config, parameter_table(config))


def to_llama(source: Source, path: str, w: np.ndarray) -> np.ndarray:
    """The tensor of a weight: the inverse of `Source.convert`. Raises ConfigError for lanes with different copies."""
    shared = source.cut is None and path.rpartition(".")[2] not in ("tok_embeddings", "lm_head") and w.ndim > 1
    if shared or source.copies > 1:  # a norm of each lane, or a key/value head that several lanes have
        copies = len(w) if shared else source.copies
        kept = w[::copies]
        if not np.array_equal(np.repeat(kept, copies, 0), w):
            raise _not_a_llama(f"{path} has different values in different lanes, which")
        w = kept[0] if shared else kept
    if path == "lm_head" and w.ndim == 3:
        w = w[0]  # of one lane
    if source.cut == "rows":
        w = w.reshape(-1, *w.shape[2:])
    elif source.cut == "columns":
        w = np.concatenate([*w], -1)
    return deinterleave(w, source.head_dim) if source.head_dim else w


def _not_a_llama(what: str) -> ConfigError:
    return ConfigError(f"{what} is not part of a Llama: write the model as laneformer_tp, without --spelling llama")
