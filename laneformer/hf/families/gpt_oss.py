"""gpt-oss: grouped-query attention with sinks, a window in every other layer, experts in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.dimensions import Dimensions, Part, grouped_attention, head, layers_of_type, routed_experts, router
from laneformer.hf.families import llama
from laneformer.hf.families.llama import FULL, SLIDING, layer_types, make_family, without_layer
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import read_formats
from laneformer.hf.safetensors import Cut, Source

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

ROPE = {  # default, if the config has neither rope_scaling nor rope_parameters
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = llama.NAMES | {"feed_forward.router": "mlp.router"}
# Weight -> tensor of all experts, and its rows (first, step): rows of gate and up alternate.
EXPERTS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "w1": ("gate_up_proj", (0, 2)),
    "w3": ("gate_up_proj", (1, 2)),
    "w2": ("down_proj", None),
}


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, experts = read_formats(fields), fields.layers, fields.size("num_local_experts")
    attention, cached = grouped_attention(fields)
    sliding = layers_of_type(fields, "sliding_attention")
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, layers, experts, fields.size("intermediate_size"), formats.of("routed")),
            router(fields, layers, experts, formats),
            Part("attention", layers * attention, formats.of("attention")),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=(layers - sliding) * cached,
        kv_window=(sliding * cached, fields.size("sliding_window")) if sliding else (0, 0),
    )


def more(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig; defaults are those of transformers."""
    fields.refuse_other_routers()
    fields.get("initial_context_length")  # the same as rope_scaling.original_max_position_embeddings
    biased = fields.flag("attention_bias", True)
    found = {
        "qkv_bias": biased,
        "out_bias": biased,
        "attention_sinks": True,
        "num_experts": fields.size("num_local_experts", fields.size("num_experts", 128)),
        "num_experts_per_tok": fields.size("num_experts_per_tok", fields.size("experts_per_token", 4)),
        "moe_intermediate_size": fields.size("intermediate_size"),
        "router_bias": True,
        "expert_bias": True,
        "swiglu_limit": fields.get("swiglu_limit", 7.0),
        "swiglu_alpha": fields.get("swiglu_alpha", ModelConfig.swiglu_alpha),
    }
    if fields.is_null("head_dim"):
        found["head_dim"] = None
    if fields.is_null("num_key_value_heads"):
        found["num_key_value_heads"] = fields.size("num_attention_heads")
    return found


def windows(fields: Fields) -> tuple[int | None, list[str]]:
    """A window on the layers that `layer_types` names, by default on every other layer, starting with the first."""
    window = fields.optional_size("sliding_window", 128)
    types = layer_types(fields, [FULL if n % 2 else SLIDING for n in range(fields.layers)])
    if window is None and SLIDING in types:
        raise ConfigError(f"sliding_window = null, but layer_types has {SLIDING}: set sliding_window to its keys")
    return window, types


def sources(config: ModelConfig, table: "Mapping[str, Weight]") -> dict[str, Source]:
    """The source of each weight, by path: as for a Llama, except for sinks and experts."""
    own = {path: source for path, weight in table.items() if (source := _source(path, weight.shape))}
    rest = {path: weight for path, weight in table.items() if path not in own}
    return llama.sources(config, rest, NAMES) | own


def _source(path: str, shape: tuple[int, ...]) -> Source | None:
    """The source of one weight; None if it is the same as for a Llama. shape: shape of the weight, lane-first."""
    prefix, name = without_layer(path)
    if name == "attention.sinks":
        lanes, heads = shape
        return Source(f"{prefix}self_attn.sinks", (lanes * heads,), cut="rows", lanes=lanes, vector=True)
    matrix = name.removeprefix("feed_forward.").removesuffix("_bias")
    if matrix not in EXPERTS:
        return None
    tensor, every = EXPERTS[matrix]
    file_name, added = f"{prefix}mlp.experts.{tensor}", matrix == "w2"
    lanes, experts, own_rows, *columns = shape
    rows = own_rows if added else 2 * lanes * own_rows
    cut: Cut
    if name.endswith("_bias"):
        cut = "whole" if added else "rows"
        return Source(f"{file_name}_bias", (experts, rows), cut=cut, lanes=lanes, every=every, vector=True)
    cut = "columns" if added else "rows"
    size = (experts, rows, lanes * columns[0] if added else columns[0])
    return Source(file_name, size, cut=cut, lanes=lanes, every=every, transposed=True)


FAMILY = replace(
    make_family(
        "gpt-oss",
        NAMES,
        dimensions=dimensions,
        longest=131072,
        defaults={"num_key_value_heads": 8, "head_dim": 64},
        theta=150000.0,
        norm_eps=1e-5,
        windows=windows,
        rope=ROPE,
        more=more,
    ),
    sources=sources,
)
