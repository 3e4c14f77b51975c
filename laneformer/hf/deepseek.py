"""DeepSeek V3 (with Kimi K2, of the same architecture): latent attention. DeepSeek V4: one wide key-value head, joined
positions and an indexer.
"""

from laneformer.errors import ConfigError
from laneformer.hf.dimensions import Dimensions, Part, dense_layers, head, routed_experts, router
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.quantization import Formats, read_formats


def dimensions_v3(fields: Fields) -> Dimensions:
    formats, layers, experts = read_formats(fields), fields.layers, fields.size("n_routed_experts")
    if fields.size("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq = {fields.size('moe_layer_freq')}: only 1 is supported")
    sparse, width = layers - fields.size("first_k_dense_replace", 0, 0), fields.size("moe_intermediate_size")
    if sparse < 1:
        raise ConfigError(f"first_k_dense_replace = {layers - sparse} must be less than num_hidden_layers = {layers}")
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, sparse, experts, width, formats.of("routed")),
            *_shared_experts(fields, sparse, width, formats),
            *dense_layers(fields, layers - sparse, formats),
            Part("latent attention", layers * _latent_attention(fields), formats.of("attention")),
            router(fields, sparse, experts, formats),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=layers * (fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")),
    )


def _latent_attention(fields: Fields) -> int:
    """Weights of one layer. A null q_lora_rank is a query matrix without a rank."""
    d, heads, kv_rank = fields.hidden, fields.size("num_attention_heads"), fields.size("kv_lora_rank")
    nope, rope, value = (fields.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = fields.optional_size("q_lora_rank")
    query = d * heads * (nope + rope) if rank is None else d * rank + rank * heads * (nope + rope)
    return query + d * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * d


def _shared_experts(fields: Fields, layers: int, width: int, formats: Formats) -> list[Part]:
    count = fields.size("n_shared_experts", 0, 0)
    weights = layers * count * 3 * width * fields.hidden
    return [Part("shared expert", weights, formats.of("shared"))] if count else []


def dimensions_v4(fields: Fields) -> Dimensions:
    formats, layers, experts = read_formats(fields), fields.layers, fields.size("n_routed_experts")
    width, heads, dim = (
        fields.size("moe_intermediate_size"),
        fields.size("num_attention_heads"),
        fields.size("head_dim"),
    )
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, layers, experts, width, _expert_format(fields) or formats.of("routed")),
            *_shared_experts(fields, layers, width, formats),
            Part(f"attention, {heads} heads of {dim}", layers * _wide_attention(fields), formats.of("attention")),
            Part("compressor and indexer", _compressors(fields), formats.of("attention")),
            router(fields, layers, experts, formats),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=None,
    )


def _wide_attention(fields: Fields) -> int:
    """Weights of one layer's attention without its compressor."""
    d, heads, dim = fields.hidden, fields.size("num_attention_heads"), fields.size("head_dim")
    rank, out_rank, groups = fields.size("q_lora_rank"), fields.size("o_lora_rank"), fields.size("o_groups")
    kv = fields.size("num_key_value_heads")
    return d * rank + rank * heads * dim + d * kv * dim + heads * dim * out_rank + groups * out_rank * d


def _compressors(fields: Fields) -> int:
    """Weights of all layers that join the keys and values of several positions, with a gate. Where windows overlap (a
    ratio of 4) the matrices are twice as wide and there is an indexer.
    """
    d, dim, layers, ratios = fields.hidden, fields.size("head_dim"), fields.layers, fields.sequence("compress_ratios")
    if ratios is None or len(ratios) < layers:
        raise ConfigError(f"compress_ratios = {ratios!r}: write a number for each of the {layers} layers")
    rank, heads, size = fields.size("q_lora_rank"), fields.size("index_n_heads"), fields.size("index_head_dim")
    indexer = rank * heads * size + d * heads + 4 * d * size
    overlapping, plain = ratios[:layers].count(4), sum(ratio not in (0, 4) for ratio in ratios[:layers])
    return overlapping * (4 * d * dim + indexer) + plain * 2 * d * dim


def _expert_format(fields: Fields) -> str | None:
    """Format of the routed experts, which have their own beside the quantization of the rest."""
    if fields.mapping("quantization_config") is None:
        return None
    dtype = fields.word("expert_dtype", "fp4")  # as vLLM reads configs without it
    if dtype not in ("fp4", "fp8"):
        raise ConfigError(f"unknown expert_dtype {dtype!r}; choose fp4, fp8")
    return {"fp4": "mxfp4", "fp8": "fp8"}[dtype]


V3 = Family(name="DeepSeek V3", dimensions=dimensions_v3)
KIMI_K2 = Family(name="Kimi K2", dimensions=dimensions_v3)
V4 = Family(name="DeepSeek V4", dimensions=dimensions_v4)
