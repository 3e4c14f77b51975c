"""From the config.json of a published mixture-of-experts model to what a token reads of it: dimensions of each part,
and its precision.

Counted are matrices; norms, biases and gates of one value per head or expert are left out, and multi-token prediction
is not read.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.roofline.published import MoeModel, Part
from laneformer.errors import ConfigError, InputError
from laneformer.hf.config import DENSE_TYPES, LANE_TYPES

LINEAR = ("fp8", "finegrained_fp8", "fbgemm_fp8")  # quantization methods whose precision is their name's
DTYPES = ("bfloat16", "float16", "float32")
# Names that stand for a part's matrices where a config lists modules which it leaves as they are.
MODULES = {
    "routed": "model.layers.{n}.mlp.experts.0.gate_proj",
    "shared": "model.layers.{n}.mlp.shared_experts.gate_proj",
    "shared expert": "model.layers.{n}.mlp.shared_expert.gate_proj",
    "dense": "model.layers.0.mlp.gate_proj",
    "attention": "model.layers.{n}.self_attn.o_proj",
    "linear attention": "model.layers.{n}.linear_attn.out_proj",
}


@dataclass(frozen=True)
class ConfigFile:
    """A config.json that was read."""

    file: Path
    name: str
    """Of the model: the file's, or its folder's for one that is called config.json."""
    values: Mapping[str, Any]

    @property
    def is_moe(self) -> bool:
        """Whether it is for `moe`: all that is no model of this package."""
        return self.values.get("model_type") not in (*LANE_TYPES, *DENSE_TYPES)

    def moe(self) -> MoeModel:
        """What a token reads. Raises ConfigError for an architecture that is not known here, naming the field."""
        try:
            return _model(self.values, self.name, f"{self.file}")
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None


def read_config_file(path: str) -> ConfigFile:
    """A config.json, under any name, or that of a folder. Raises InputError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: give the config.json of a model on the Hugging Face hub") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds {type(values).__name__}, not a JSON object")
    return ConfigFile(file, file.resolve().parent.name if file.name == "config.json" else file.stem, values)


class _Fields:
    """The values of a config, each checked when it is asked for."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{name} is missing: the bytes of a token depend on it")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} = {value!r}: it must be a whole number of at least {least}")
        return value

    def rank(self, name: str) -> int | None:
        """A whole number; None where null stands for no such matrix."""
        return None if self._values.get(name) is None else self.size(name)

    def list(self, name: str) -> list | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{name} = {value!r}: it must be a list")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r}: it must be an object with named values")
        return value

    def word(self, name: str, default: str) -> str:
        value = self._values.get(name)
        return default if value is None else str(value)

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name))

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers")

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.hidden // self.size("num_attention_heads"))


@dataclass(frozen=True)
class _Anatomy:
    """What an architecture is made of: (name, weights, key of MODULES, or "" for what no format quantizes); cached
    values; state.
    """

    parts: list[tuple[str, float, str]]
    kv_full: int | None
    kv_window: tuple[int, int] = (0, 0)
    state: int = 0


def _model(values: Mapping[str, Any], name: str, source: str) -> MoeModel:
    text = values.get("text_config")
    if isinstance(text, Mapping):  # a model that also sees: its language model
        values = {
            **{key: values[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in values},
            **text,
        }
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model_type = {kind!r}: known mixtures of experts are {', '.join(ARCHITECTURES)}")
    fields = _Fields(values)
    anatomy = ARCHITECTURES[kind](fields)
    usual, chosen, how = _precisions(fields)
    routed = _expert_dtype(fields) if kind == "deepseek_v4" else None
    parts = []
    for part, weights, module in anatomy.parts:
        precision = routed if routed and module == "routed" else chosen(module) if module else usual
        parts.append(Part(part, weights, precision))
    return MoeModel(
        name=name,
        layers=fields.layers,
        parts=tuple(parts),
        source=source,
        precision_source=how,
        kv_full=anatomy.kv_full,
        kv_window=anatomy.kv_window,
        state=anatomy.state,
        checkpoint=None,
        nominal={},
        nominal_rule="",
        difference="",
    )


def _precisions(fields: _Fields) -> tuple[str, Callable[[str], str], str]:
    """The dtype of what is not quantized, module -> precision, and this in words. Raises ConfigError for a format that
    is not known.
    """
    usual = fields.word("dtype", fields.word("torch_dtype", "bfloat16"))
    if usual not in DTYPES:
        raise ConfigError(f"dtype = {usual!r}: known are {', '.join(DTYPES)}")
    given = fields.mapping("quantization_config")
    if given is None:
        return usual, lambda module: usual, f"all in {usual}, as the config has no quantization"
    quantization = _Fields(given)
    method = quantization.word("quant_method", "none given")
    if method in LINEAR:
        precision = "fp8"
    elif method == "mxfp4":
        precision = "mxfp4"
    elif method == "compressed-tensors":
        precision = _compressed(quantization)
    else:
        known = ", ".join((*LINEAR, "mxfp4", "compressed-tensors"))
        raise ConfigError(f"quantization_config.quant_method = {method!r}: known are {known}")
    kept = [str(pattern) for name in ("modules_to_not_convert", "ignore") for pattern in quantization.list(name) or ()]
    last = fields.layers - 1

    def chosen(module: str) -> str:
        return usual if any(_matches(pattern, MODULES[module].format(n=last)) for pattern in kept) else precision

    return (
        usual,
        chosen,
        f"matrices in {precision} but for those that the config keeps in {usual}, router and head {usual}",
    )


def _compressed(quantization: _Fields) -> str:
    """The precision of compressed-tensors' one group."""
    where = "quantization_config.config_groups"
    groups = quantization.mapping("config_groups") or {}
    if len(groups) != 1:
        raise ConfigError(f"{where} has {len(groups)} groups: known are configs with one")
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where} has no weights")
    found = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if found[:2] in ((8, "float"), (8, "int")):
        return "fp8" if found[1] == "float" else "int8"
    if found == (4, "int", 32):
        return "int4"
    said = ", ".join(map(str, found))
    raise ConfigError(
        f"{where}: num_bits, type, group_size = {said}: known are 8 bits, and int of 4 bits in groups of 32"
    )


def _matches(pattern: str, module: str) -> bool:
    """As Hugging Face's libraries read such lists: regular expressions after re:, else names or parts of names, also
    with *.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ConfigError(f"quantization_config.ignore has {pattern!r}, no regular expression ({error})") from None
    return fnmatch.fnmatch(f".{module}.", f"*.{pattern}.*")


def _expert_dtype(fields: _Fields) -> str | None:
    """Of DeepSeek V4, whose routed experts have a precision of their own beside the quantization of the rest."""
    if fields.mapping("quantization_config") is None:
        return None
    dtype = fields.word("expert_dtype", "fp4")  # as vLLM reads configs without it
    if dtype not in ("fp4", "fp8"):
        raise ConfigError(f"expert_dtype = {dtype!r}: known are fp4, fp8")
    return {"fp4": "mxfp4", "fp8": "fp8"}[dtype]


def _experts(fields: _Fields, sparse: int, experts: int, width: int) -> list[tuple[str, float, str]]:
    """Of `sparse` layers."""
    used, d = fields.size("num_experts_per_tok"), fields.hidden
    if used > experts:
        raise ConfigError(f"num_experts_per_tok = {used}: there are {experts} experts")
    return [(f"routed experts, {used} of {experts}", sparse * used * 3 * width * d, "routed")]


def _router(fields: _Fields, sparse: int, experts: int) -> tuple[str, float, str]:
    return "router", sparse * experts * fields.hidden, ""


def _head(fields: _Fields) -> tuple[str, float, str]:
    return "head", fields.size("vocab_size") * fields.hidden, ""


def _dense(fields: _Fields, count: int) -> list[tuple[str, float, str]]:
    if not count:
        return []
    weights = count * 3 * fields.size("intermediate_size") * fields.hidden
    return [("dense layer" if count == 1 else f"dense layers, {count}", weights, "dense")]


def _grouped(fields: _Fields) -> tuple[int, int]:
    """Weights of one layer's attention with grouped queries, and cached values of a position."""
    heads, kv, dim = fields.size("num_attention_heads"), fields.size("num_key_value_heads"), fields.head_dim
    return fields.hidden * dim * (2 * heads + 2 * kv), 2 * kv * dim


def _of_type(fields: _Fields, kind: str) -> int:
    """Layers that layer_types gives as `kind`."""
    types = fields.list("layer_types")
    if types is None or len(types) != fields.layers:
        raise ConfigError(f"layer_types: it must name all {fields.layers} layers")
    return types.count(kind)


def _mixtral(fields: _Fields) -> _Anatomy:
    layers, experts = fields.layers, fields.size("num_local_experts")
    attention, cached = _grouped(fields)
    window = fields.rank("sliding_window")
    return _Anatomy(
        [
            *_experts(fields, layers, experts, fields.size("intermediate_size")),
            _router(fields, layers, experts),
            ("attention", layers * attention, "attention"),
            _head(fields),
        ],
        0 if window else layers * cached,
        (layers * cached, window) if window else (0, 0),
    )


def _gpt_oss(fields: _Fields) -> _Anatomy:
    layers, experts = fields.layers, fields.size("num_local_experts")
    attention, cached = _grouped(fields)
    sliding = _of_type(fields, "sliding_attention")
    return _Anatomy(
        [
            *_experts(fields, layers, experts, fields.size("intermediate_size")),
            _router(fields, layers, experts),
            ("attention", layers * attention, "attention"),
            _head(fields),
        ],
        (layers - sliding) * cached,
        (sliding * cached, fields.size("sliding_window")) if sliding else (0, 0),
    )


def _sparse_layers(fields: _Fields) -> int:
    """Of Qwen's mixtures: every decoder_sparse_step-th but for mlp_only_layers."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.list("mlp_only_layers") or []
    return sum((n + 1) % step == 0 and n not in dense for n in range(fields.layers))


def _qwen3_moe(fields: _Fields) -> _Anatomy:
    layers, sparse, experts = fields.layers, _sparse_layers(fields), fields.size("num_experts")
    attention, cached = _grouped(fields)
    if fields.flag("use_sliding_window"):
        raise ConfigError("use_sliding_window = true: of this family only models without windows are known")
    return _Anatomy(
        [
            *_experts(fields, sparse, experts, fields.size("moe_intermediate_size")),
            *_dense(fields, layers - sparse),
            _router(fields, sparse, experts),
            ("attention", layers * attention, "attention"),
            _head(fields),
        ],
        layers * cached,
    )


def _qwen3_next(fields: _Fields) -> _Anatomy:
    layers, sparse, experts, d = fields.layers, _sparse_layers(fields), fields.size("num_experts"), fields.hidden
    full = (
        _of_type(fields, "full_attention")
        if fields.list("layer_types")
        else layers // fields.size("full_attention_interval", 4)
    )
    heads, dim = fields.size("num_attention_heads"), fields.head_dim
    attention, cached = _grouped(fields)
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    value_heads, value_dim = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    values, kernel = value_heads * value_dim, fields.size("linear_conv_kernel_dim")
    linear = d * (2 * keys + 3 * values + 2 * value_heads) + kernel * (
        2 * keys + values
    )  # q k, v z out, two gates; convolution
    return _Anatomy(
        [
            *_experts(fields, sparse, experts, fields.size("moe_intermediate_size")),
            ("shared expert", sparse * 3 * fields.size("shared_expert_intermediate_size") * d, "shared expert"),
            *_dense(fields, layers - sparse),
            _router(fields, sparse, experts),
            (f"attention, {full} layers, gated", full * (attention + d * heads * dim), "attention"),
            (f"gated DeltaNet, {layers - full} layers", (layers - full) * linear, "linear attention"),
            _head(fields),
        ],
        full * cached,
        state=(layers - full) * value_heads * fields.size("linear_key_head_dim") * value_dim,
    )


def _deepseek_v3(fields: _Fields) -> _Anatomy:
    layers, experts, d = fields.layers, fields.size("n_routed_experts"), fields.hidden
    if fields.size("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq = {fields.size('moe_layer_freq')}: only 1 is known")
    sparse, width = layers - fields.size("first_k_dense_replace", 0, 0), fields.size("moe_intermediate_size")
    if sparse < 1:
        raise ConfigError(f"first_k_dense_replace = {layers - sparse}: there are {layers} layers")
    heads, kv_rank, rope = (
        fields.size("num_attention_heads"),
        fields.size("kv_lora_rank"),
        fields.size("qk_rope_head_dim"),
    )
    nope, value, rank = fields.size("qk_nope_head_dim"), fields.size("v_head_dim"), fields.rank("q_lora_rank")
    query = d * heads * (nope + rope) if rank is None else d * rank + rank * heads * (nope + rope)
    latent = query + d * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * d
    return _Anatomy(
        [
            *_experts(fields, sparse, experts, width),
            *_shared(fields, sparse, width),
            *_dense(fields, layers - sparse),
            ("latent attention", layers * latent, "attention"),
            _router(fields, sparse, experts),
            _head(fields),
        ],
        layers * (kv_rank + rope),
    )


def _shared(fields: _Fields, sparse: int, width: int) -> list[tuple[str, float, str]]:
    count = fields.size("n_shared_experts", 0, 0)
    return [("shared expert", sparse * count * 3 * width * fields.hidden, "shared")] if count else []


def _deepseek_v4(fields: _Fields) -> _Anatomy:
    layers, experts, d, width = (
        fields.layers,
        fields.size("n_routed_experts"),
        fields.hidden,
        fields.size("moe_intermediate_size"),
    )
    heads, dim, kv = fields.size("num_attention_heads"), fields.size("head_dim"), fields.size("num_key_value_heads")
    rank, out_rank, groups = fields.size("q_lora_rank"), fields.size("o_lora_rank"), fields.size("o_groups")
    attention = d * rank + rank * heads * dim + d * kv * dim + heads * dim * out_rank + groups * out_rank * d
    ratios = fields.list("compress_ratios")
    if ratios is None or len(ratios) < layers:
        raise ConfigError(f"compress_ratios: it must have a number for each of the {layers} layers")
    indexers, ratios = fields.size("index_n_heads"), ratios[:layers]
    # Keys and values of several positions in one, with a gate: where windows overlap (a ratio of 4) twice as wide, and
    # with an indexer.
    overlapping, plain = ratios.count(4), sum(ratio not in (0, 4) for ratio in ratios)
    indexer = rank * indexers * fields.size("index_head_dim") + d * indexers + 4 * d * fields.size("index_head_dim")
    compressor = overlapping * (4 * d * dim + indexer) + plain * 2 * d * dim
    return _Anatomy(
        [
            *_experts(fields, layers, experts, width),
            *_shared(fields, layers, width),
            (f"attention, {heads} heads of {dim}", layers * attention, "attention"),
            ("compressor and indexer", compressor, "attention"),
            _router(fields, layers, experts),
            _head(fields),
        ],
        None,
    )


ARCHITECTURES: dict[str, Callable[[_Fields], _Anatomy]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
}
