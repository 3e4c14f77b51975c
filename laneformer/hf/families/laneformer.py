"""Laneformer, in both published spellings of its config.json: `laneformer_tp` and `laneformer`.

Tensors in files have the names of this project. They are lane-first, like the weights, except the lane head.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.family import Family
from laneformer.hf.fields import REQUIRED, Fields
from laneformer.hf.rope import read_rope, rope_to_hf
from laneformer.hf.safetensors import Source
from laneformer.quantized import Quantized

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

ARCHITECTURES = {"laneformer_tp": "LaneformerTPForCausalLM", "laneformer": "LaneformerForCausalLM"}
SAME_NAME = tuple(  # fields of config.json with the names of ModelConfig
    field.name for field in dataclasses.fields(ModelConfig) if field.name not in ("rope_scaling", "eos_token_id")
)


def config_from(fields: Fields, num_lanes: int | None) -> ModelConfig:
    """The ModelConfig of a Laneformer. num_lanes: None, or the number of lanes it was trained with."""
    fields.require(*REQUIRED)
    found = {"num_key_value_heads": fields.get("num_attention_heads"), "norm_eps": fields.get("rms_norm_eps")}
    found = {name: value for name, value in found.items() if value is not None} | fields.given(*SAME_NAME)
    own = found.get("num_lanes", ModelConfig.num_lanes)
    if num_lanes not in (None, own):
        raise ConfigError(f"num_lanes = {num_lanes}: this Laneformer was trained with {own} lanes; leave it out")
    one_switch = fields.get("use_comm")  # the older spelling, one switch for both exchanges
    if one_switch is not None:
        found = {"use_attention_comm": one_switch, "use_mlp_comm": one_switch} | found
    if "swa_layers" in found:  # newer files may also contain the older field; the list decides
        found.pop("sliding_window_n_layers", None)
    longest = found.get("max_position_embeddings", ModelConfig.max_position_embeddings)
    found["rope_theta"], found["rope_scaling"] = read_rope(fields, longest)
    found["hidden_act"] = fields.activation()
    return ModelConfig(**found, eos_token_id=fields.end_tokens)


def config_to_hf(config: ModelConfig, spelling: str = "laneformer_tp") -> dict[str, Any]:
    """The values of a Laneformer's config.json. `spelling` is the model_type. laneformer_tp has a single switch,
    use_comm, if both kinds of modules are exchanged or neither is.
    """
    if spelling not in ARCHITECTURES:
        raise ConfigError(f"unknown spelling {spelling!r}; choose {', '.join(ARCHITECTURES)}")
    values: dict[str, Any] = {"model_type": spelling, "architectures": [ARCHITECTURES[spelling]]}
    for name in SAME_NAME:
        value = getattr(config, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        values[name] = list(value) if isinstance(value, tuple) else value
    if spelling == "laneformer_tp" and config.use_attention_comm == config.use_mlp_comm:
        del values["use_attention_comm"], values["use_mlp_comm"]
        values["use_comm"] = config.use_attention_comm
    eos = config.eos_token_id
    values["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
    values["rope_scaling"] = rope_to_hf(config.rope_scaling)
    return values


def sources(config: ModelConfig, table: "Mapping[str, Weight]") -> dict[str, Source]:
    """The source of each weight, by path. In files the lane head is [v, l d], with the lanes end to end."""
    found = {
        path: Source(weight.file_name, weight.shape, integers=weight.dtype == "int32") for path, weight in table.items()
    }
    if config.lm_head_type == "lane":
        lanes, v, d = found["lm_head"].shape
        found["lm_head"] = Source(found["lm_head"].name, (v, lanes * d), cut="columns", lanes=lanes)
    return found


def to_file(config: ModelConfig, path: str, w: np.ndarray) -> np.ndarray:
    """The tensor of a weight in a file: the inverse of `Source.convert`."""
    if path == "lm_head" and config.lm_head_type == "lane":
        return w.swapaxes(0, 1).reshape(w.shape[1], -1)
    return w


def record_to_file(config: ModelConfig, path: str, record: Quantized) -> Quantized:
    """Like `to_file`, for a quantized weight."""
    return record.join_columns() if path == "lm_head" and config.lm_head_type == "lane" else record


FAMILY = Family(name="Laneformer", config_from=config_from, sources=sources)
