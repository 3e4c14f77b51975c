"""Mixtral: grouped-query attention, experts in every layer (arXiv 2401.04088)."""

from laneformer.hf.dimensions import Dimensions, Part, grouped_attention, head, routed_experts, router
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.quantization import read_formats


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, experts = read_formats(fields), fields.layers, fields.size("num_local_experts")
    attention, cached = grouped_attention(fields)
    window = fields.optional_size("sliding_window")
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, layers, experts, fields.size("intermediate_size"), formats.of("routed")),
            router(fields, layers, experts, formats),
            Part("attention", layers * attention, formats.of("attention")),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=0 if window else layers * cached,
        kv_window=(layers * cached, window) if window else (0, 0),
    )


FAMILY = Family(name="Mixtral", dimensions=dimensions)
