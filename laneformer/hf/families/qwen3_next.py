"""Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the fourth; experts with a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from laneformer.config import DeltaNetSizes, ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.dimensions import (
    Dimensions,
    Part,
    dense_layers,
    grouped_attention,
    head,
    routed_experts,
    router,
    sparse_layers,
)
from laneformer.hf.families import llama, qwen3_moe
from laneformer.hf.families.llama import EXPERT_NAMES, FULL, make_family, without_layer
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import read_formats
from laneformer.hf.rope import interleave, rotated_channels
from laneformer.hf.safetensors import Source

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

LINEAR = "linear_attention"
SIZES = {  # field of DeltaNetSizes -> its name in config.json, and its default
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", 4),
}
SHARED = "feed_forward.shared"
NAMES = EXPERT_NAMES | {
    f"{SHARED}.w1": "mlp.shared_expert.gate_proj",
    f"{SHARED}.w3": "mlp.shared_expert.up_proj",
    f"{SHARED}.w2": "mlp.shared_expert.down_proj",
    f"{SHARED}_gate": "mlp.shared_expert_gate",
}


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, sparse, d = read_formats(fields), fields.layers, sparse_layers(fields), fields.hidden
    experts = fields.size("num_experts")
    full = layers - len(delta_layers(fields))
    attention, cached = grouped_attention(fields)
    gate = d * fields.size("num_attention_heads") * fields.head_dim
    delta_net, state = _delta_net(fields)
    shared = 3 * fields.size("shared_expert_intermediate_size") * d
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, sparse, experts, fields.size("moe_intermediate_size"), formats.of("routed")),
            Part("shared expert", sparse * shared, formats.of("shared expert")),
            *dense_layers(fields, layers - sparse, formats),
            router(fields, sparse, experts, formats),
            Part(f"attention, {full} layers, gated", full * (attention + gate), formats.of("attention")),
            Part(
                f"gated DeltaNet, {layers - full} layers", (layers - full) * delta_net, formats.of("linear attention")
            ),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=full * cached,
        state=(layers - full) * state,
    )


def _delta_net(fields: Fields) -> tuple[int, int]:
    """Number of weights in one layer (q and k; v, z and out; two gates; convolution), and of values in its state."""
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    keys, value_heads = fields.size("linear_num_key_heads") * key_dim, fields.size("linear_num_value_heads")
    values, kernel = value_heads * value_dim, fields.size("linear_conv_kernel_dim")
    weights = fields.hidden * (2 * keys + 3 * values + 2 * value_heads) + kernel * (2 * keys + values)
    return weights, value_heads * key_dim * value_dim


def delta_layers(fields: Fields) -> tuple[int, ...]:
    """The DeltaNet layers of `layer_types`, by default all but every full_attention_interval-th layer."""
    interval = fields.size("full_attention_interval", 4)
    types = fields.sequence("layer_types") or [
        FULL if (n + 1) % interval == 0 else LINEAR for n in range(fields.layers)
    ]
    if len(types) != fields.layers:
        raise ConfigError(f"layer_types has {len(types)} entries: name the type of each of the {fields.layers} layers")
    for n, kind in enumerate(types):
        if kind not in (FULL, LINEAR):
            raise ConfigError(f"layer_types[{n}] = {kind!r} is not supported; supported are {FULL}, {LINEAR}")
    return tuple(n for n, kind in enumerate(types) if kind == LINEAR)


def more(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig; defaults are those of transformers."""
    found = qwen3_moe.experts(fields)
    return found | {
        "num_experts": fields.size("num_experts", 512),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 10),
        "moe_intermediate_size": fields.size("moe_intermediate_size", 512),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "shared_expert_intermediate_size": fields.size("shared_expert_intermediate_size", 512),
        "shared_expert_gate": True,
        "rotary_dim": rotated_channels(fields, fields.size("head_dim", 256), 0.25),
        "delta_net": DeltaNetSizes(**{name: fields.size(*usual) for name, usual in SIZES.items()}),
        "delta_layers": delta_layers(fields),
    }


def sources(config: ModelConfig, table: "Mapping[str, Weight]") -> dict[str, Source]:
    """The source of each weight, by path: as for Qwen3-MoE, except for attention and DeltaNet. A lane has its share of
    the key heads and the value heads that belong to them.
    """
    own = {path: source for path, weight in table.items() if (source := _source(config, path, weight.shape))}
    rest = {path: weight for path, weight in table.items() if path not in own}
    return llama.sources(config, rest, NAMES) | own


def _source(config: ModelConfig, path: str, shape: tuple[int, ...]) -> Source | None:
    """The source of one weight; None if it is the same as for Qwen3-MoE. shape: shape of the weight, lane-first."""
    prefix, name = without_layer(path)
    block, _, name = name.rpartition(".")
    if block != "attention":
        return None
    if int(path.split(".")[1]) in config.delta_layers:
        return _delta_source(config, f"{prefix}linear_attn", name, shape)
    lanes, d, e = config.num_lanes, config.hidden_size, config.head_size
    module, heads, kv = f"{prefix}self_attn", config.num_attention_heads, config.num_key_value_heads
    rotated = config.rotary_size
    match name:
        case "wq" | "wg":  # one tensor, in which each head has its rows of wq, then of wg
            taken = _rows_of_heads(heads, 2 * e, 0, e, rotated) if name == "wq" else _rows_of_heads(heads, 2 * e, e, e)
            return Source(f"{module}.q_proj.weight", (2 * heads * e, d), cut="rows", lanes=lanes, taken=taken)
        case "wk":
            taken, copies = _rows_of_heads(kv, e, 0, e, rotated), max(1, lanes // kv)
            return Source(f"{module}.k_proj.weight", (kv * e, d), None, "rows", lanes, copies, taken=taken)
        case "q_norm" | "k_norm":
            return Source(f"{module}.{name}.weight", (e,), taken=_rows_of_heads(1, e, 0, e, rotated), vector=True)
    return None


def _delta_source(config: ModelConfig, module: str, name: str, shape: tuple[int, ...]) -> Source:
    lanes = config.num_lanes
    match name:
        case "win" | "wba":
            file_name = {"win": "in_proj_qkvz", "wba": "in_proj_ba"}[name]
            return Source(f"{module}.{file_name}.weight", (lanes * shape[1], shape[2]), cut="rows", lanes=lanes)
        case "convolution":
            rows, kernel = lanes * shape[1], shape[2]
            taken = _channels_by_lane(config.delta_net, lanes)
            stored, name = (rows, 1, kernel), f"{module}.conv1d.weight"
            return Source(name, (rows, kernel), None, "rows", lanes, taken=taken, stored_shape=stored)
        case "decay" | "step":
            file_name = {"decay": "A_log", "step": "dt_bias"}[name]
            return Source(f"{module}.{file_name}", (lanes * shape[1],), cut="rows", lanes=lanes, vector=True)
        case "wo":
            return Source(f"{module}.out_proj.weight", (shape[1], lanes * shape[2]), cut="columns", lanes=lanes)
    return Source(f"{module}.{name}.weight", shape)


@cache
def _rows_of_heads(heads: int, stride: int, first: int, rows: int, rotated: int = 0) -> tuple[int, ...]:
    """Numbers of the rows first, ..., first + rows - 1 of each head, which has `stride` rows. The first `rotated` of
    them are half-split rotary pairs; they are reordered so that the channels of a pair are neighbours.
    """
    own = np.arange(rows)
    if rotated:
        own[:rotated] = interleave(own[:rotated], rotated)
    return tuple((np.arange(heads)[:, None] * stride + first + own).ravel().tolist())


@cache
def _channels_by_lane(sizes: DeltaNetSizes, lanes: int) -> tuple[int, ...]:
    """Numbers of the channels of q, k and v, lane by lane: each lane has its own q, k and v."""
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    parts = np.split(np.arange(2 * keys + values), [keys, 2 * keys])
    return tuple(np.concatenate([part.reshape(lanes, -1) for part in parts], 1).ravel().tolist())


FAMILY = replace(
    make_family(
        "Qwen3-Next",
        NAMES,
        dimensions=dimensions,
        longest=32768,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "qk_norm": True,
            "attention_gate": True,
            "norm_plus_one": True,
        },
        refused=("attention_bias",),
        partial_rotary=True,
        more=more,
    ),
    sources=sources,
    ignored=lambda fields: ("mtp.",),
)
