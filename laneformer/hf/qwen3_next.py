"""Qwen3-Next: three of four layers gated DeltaNet, the fourth gated attention; experts beside a shared one."""

from laneformer.hf.dimensions import (
    Dimensions,
    Part,
    dense_layers,
    grouped_attention,
    head,
    layers_of_type,
    routed_experts,
    router,
    sparse_layers,
)
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.quantization import read_formats


def dimensions(fields: Fields) -> Dimensions:
    formats, layers, sparse, d = read_formats(fields), fields.layers, sparse_layers(fields), fields.hidden
    experts = fields.size("num_experts")
    if fields.sequence("layer_types"):
        full = layers_of_type(fields, "full_attention")
    else:
        full = layers // fields.size("full_attention_interval", 4)
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
    """Weights of one layer (q k, v z out, two gates; convolution) and values of its state."""
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    keys, value_heads = fields.size("linear_num_key_heads") * key_dim, fields.size("linear_num_value_heads")
    values, kernel = value_heads * value_dim, fields.size("linear_conv_kernel_dim")
    weights = fields.hidden * (2 * keys + 3 * values + 2 * value_heads) + kernel * (2 * keys + values)
    return weights, value_heads * key_dim * value_dim


FAMILY = Family(name="Qwen3-Next", dimensions=dimensions)
