"""ModelConfig from and to Hugging Face `config.json`: the published family in both spellings, and dense Llama
and Qwen.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from laneformer.config import ModelConfig, RopeScaling
from laneformer.errors import CheckpointError, ConfigError

log = logging.getLogger("laneformer")

LANE_TYPES = ("laneformer_tp", "laneformer")
DENSE_TYPES = ("llama", "qwen2", "qwen3")

# What transformers' configuration classes take for a field that is missing or null.
_DENSE_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "norm_eps": 1e-6},
    "qwen2": {"max_position_embeddings": 32768, "norm_eps": 1e-6},
    "qwen3": {"max_position_embeddings": 32768, "norm_eps": 1e-6, "head_dim": 128},
}

_ARCHITECTURES = {"laneformer_tp": "LaneformerTPForCausalLM", "laneformer": "LaneformerForCausalLM"}
_SAME_NAME = (  # fields that our own files carry under the dataclass's name
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_lanes",
    "layout",
    "broadcast_delay",
    "use_early_comm",
    "early_lands_twice",
    "use_attention_comm",
    "use_mlp_comm",
    "lm_head_type",
    "pre_norm_lane_agg",
    "replicated_rmsn_scale",
    "tie_word_embeddings",
    "sliding_window",
    "sliding_window_n_layers",
    "unclamped_layers",
    "swa_layers",
    "rope_theta",
    "norm_eps",
    "qkv_bias",
    "qk_norm",
    "bos_token_id",
)
_READ_APART = {
    "use_comm",
    "eos_token_id",
    "rope_scaling",
    "rope_scaling_args",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
}
_NO_EFFECT = {  # bookkeeping, dropout and training-time fields
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "pad_token_id",
    "auto_map",
    "initializer_range",
    "attention_dropout",
    "attention_bias",
    "mlp_bias",
    "pretraining_tp",
    "_name_or_path",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "hidden_dropout",
    "is_causal",
}


def read_hf_config(path: str | Path, num_lanes: int | None = None) -> ModelConfig:
    """The config of an HF folder. `num_lanes` cuts a dense model into lanes; a Laneformer's own number cannot be
    changed.

    Raises CheckpointError for a missing or unreadable file and ConfigError for values that cannot work.
    """
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist: a checkpoint folder needs a config.json beside its safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}, not a JSON object")
    try:
        return config_from_hf(values, num_lanes)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def config_from_hf(values: Mapping, num_lanes: int | None = None) -> ModelConfig:
    """ModelConfig for the parsed config.json `values`."""
    kind = values.get("model_type")
    if kind in LANE_TYPES:
        fields = _lane_fields(values)
        own = fields.get("num_lanes", 1)
        if num_lanes not in (None, own):
            raise ConfigError(f"num_lanes = {num_lanes}: this Laneformer was trained with {own} lanes")
    elif kind in DENSE_TYPES:
        fields = _dense_fields(values, kind) | {"num_lanes": 1 if num_lanes is None else num_lanes, "layout": "tp"}
    else:
        raise ConfigError(f"model_type = {kind!r}: known are {', '.join(LANE_TYPES + DENSE_TYPES)}")
    fields.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    fields["rope_theta"], fields["rope_scaling"] = _rope(values, fields.get("max_position_embeddings"))
    if values.get("hidden_act") not in (None, "silu"):
        raise ConfigError(f"hidden_act = {values['hidden_act']!r}: only silu is supported")
    for name in ("rms_norm_eps", "norm_eps"):
        if values.get(name) is not None:
            fields["norm_eps"] = values[name]
    eos = values.get("eos_token_id")
    fields["eos_token_id"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    unknown = sorted(set(values) - set(_SAME_NAME) - _READ_APART - _NO_EFFECT)
    if unknown:
        log.warning("config.json: ignored unknown fields %s", ", ".join(unknown))
    missing = [n for n in _SAME_NAME[:6] if fields.get(n) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} missing")
    return ModelConfig(**fields)


def _lane_fields(values: Mapping) -> dict:
    fields = {name: values[name] for name in _SAME_NAME if values.get(name) is not None}
    if values.get("use_comm") is not None:  # the older spelling of two switches
        for name in ("use_attention_comm", "use_mlp_comm"):
            fields.setdefault(name, values["use_comm"])
    if fields.get("swa_layers") is not None:  # newer files may carry the older field beside the list, which decides
        fields.pop("sliding_window_n_layers", None)
    return fields


def _dense_fields(values: Mapping, kind: str) -> dict:
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ConfigError(f"{name} = true: of this family only checkpoints without it are computed")
    names = (*_SAME_NAME[:8], "tie_word_embeddings", "bos_token_id")
    fields = _DENSE_DEFAULTS[kind] | {name: values[name] for name in names if values.get(name) is not None}
    fields |= {"qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3"}
    if values.get("use_sliding_window") and values.get("sliding_window"):
        layers, first = _typed(values, "num_hidden_layers", int) or 0, _typed(values, "max_window_layers", int)
        first = 28 if first is None else first
        kinds = _typed(values, "layer_types", list) or [
            "sliding_attention" if n >= first else "" for n in range(layers)
        ]
        fields |= {"sliding_window": values["sliding_window"]}
        fields |= {"swa_layers": tuple(n for n, name in enumerate(kinds) if name == "sliding_attention")}
    return fields


def _typed(values: Mapping, name: str, kind: type):
    """values[name], None if absent. Raises ConfigError when it is not of that kind."""
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        wanted = {int: "a whole number", list: "a list", Mapping: "an object with named values"}[kind]
        raise ConfigError(f"{name} = {value!r}: write {wanted}")
    return value


def _rope(values: Mapping, longest: int | None) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5), `rope_scaling` (4) or `rope_scaling_args` (Laneformer:
    llama3). longest: the longest context in tokens.
    """
    longest = ModelConfig.max_position_embeddings if longest is None else longest
    parameters, older, args = (
        {name: value for name, value in (_typed(values, f"rope_{n}", Mapping) or {}).items() if value is not None}
        for n in ("parameters", "scaling", "scaling_args")
    )
    scaling = parameters or older
    theta = scaling.pop("rope_theta", values.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or ("llama3" if args else "default")
    scaling.pop("type", None)
    scaling |= args
    if kind == "default":
        return theta, None
    for name in ("old_context_len", "old_context_length"):
        if name in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop(name)
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and all(isinstance(size, int) and size > 0 for size in (original, longest)):
        scaling.setdefault("factor", longest / original)
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", longest)
    known = {name: value for name, value in scaling.items() if name in RopeScaling.__dataclass_fields__}
    if set(scaling) - set(RopeScaling.__dataclass_fields__):
        log.warning(
            "config.json: ignored rope scaling fields %s",
            ", ".join(sorted(set(scaling) - set(RopeScaling.__dataclass_fields__))),
        )
    if "factor" not in known:
        raise ConfigError(f"rope scaling of type {kind!r} needs factor")
    return theta, RopeScaling(type=kind, **known)


def config_to_hf(config: ModelConfig, spelling: str = "laneformer_tp") -> dict:
    """The config.json of a Laneformer folder. `spelling` is the model_type: laneformer_tp writes use_comm where that
    says it all.
    """
    if spelling not in LANE_TYPES:
        raise ConfigError(f"spelling = {spelling!r}: known are {', '.join(LANE_TYPES)}")
    values = {"model_type": spelling, "architectures": [_ARCHITECTURES[spelling]]}
    for name in _SAME_NAME:
        value = getattr(config, name)
        values[name] = list(value) if isinstance(value, tuple) else value
    if spelling == "laneformer_tp" and config.use_attention_comm == config.use_mlp_comm:
        del values["use_attention_comm"], values["use_mlp_comm"]
        values["use_comm"] = config.use_attention_comm
    eos = config.eos_token_id
    values["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
    values["rope_scaling"] = None
    if config.rope_scaling is not None:
        scaling = {name: getattr(config.rope_scaling, name) for name in RopeScaling.__dataclass_fields__}
        values["rope_scaling"] = {"rope_type": scaling.pop("type")} | {
            k: v for k, v in scaling.items() if v is not None
        }
    return values
