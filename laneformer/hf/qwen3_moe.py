"""Qwen3-MoE: Qwen3's attention, experts in every layer but those that the config names as dense."""

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
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.quantization import read_formats


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, sparse, experts = (
        read_formats(fields),
        fields.layers,
        sparse_layers(fields),
        fields.size("num_experts"),
    )
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


FAMILY = Family(name="Qwen3-MoE", dimensions=dimensions)
