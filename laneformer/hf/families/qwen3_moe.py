"""Qwen3-MoE: Qwen3's attention, and experts in every layer except those that the config names as dense."""

from typing import Any

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
from laneformer.hf.families.llama import EXPERT_NAMES, make_family
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import read_formats


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, sparse, experts = (read_formats(fields), fields.layers, sparse_layers(fields), num_experts(fields))
    attention, cached = grouped_attention(fields)
    if fields.flag("use_sliding_window"):
        raise ConfigError("use_sliding_window = true: Qwen3-MoE is supported without windows only")
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, sparse, experts, fields.size("moe_intermediate_size"), formats.of("routed")),
            *dense_layers(fields, layers - sparse, formats),
            router(fields, sparse, experts, formats),
            Part("attention", layers * attention, formats.of("attention")),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=layers * cached,
    )


def num_experts(fields: Fields) -> int:
    """Number of experts. transformers 5 writes it under Mixtral's name, num_local_experts."""
    return fields.size("num_experts", fields.size("num_local_experts", 128))


def experts(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig; defaults are those of transformers."""
    fields.refuse_other_routers()
    if fields.flag("use_sliding_window"):
        raise ConfigError("use_sliding_window = true: Qwen3-MoE is supported without windows only")
    step, dense = fields.size("decoder_sparse_step", 1), fields.sequence("mlp_only_layers") or []
    return {
        "num_experts": num_experts(fields),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 8),
        "moe_intermediate_size": fields.size("moe_intermediate_size", 768),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "mlp_only_layers": tuple(n for n in range(fields.layers) if (n + 1) % step or n in dense),
    }


FAMILY = make_family(
    "Qwen3-MoE",
    EXPERT_NAMES,
    dimensions=dimensions,
    longest=32768,
    defaults={"qk_norm": True},
    refused=("attention_bias",),
    more=experts,
)
