"""gpt-oss: grouped-query attention with sinks, every other layer in a window, experts in every layer."""

from laneformer.hf.dimensions import Dimensions, Part, grouped_attention, head, layers_of_type, routed_experts, router
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.quantization import read_formats


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


FAMILY = Family(name="gpt-oss", dimensions=dimensions)
