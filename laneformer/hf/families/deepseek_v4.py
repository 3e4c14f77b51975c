"""DeepSeek V4: four residual streams, attention to compressed entries, and experts, which a table chooses in the first
layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from laneformer.config import CompressedAttention, ModelConfig, ResidualStreams, RopeScaling
from laneformer.errors import ConfigError
from laneformer.hf.dimensions import Dimensions, Part, head, routed_experts, router
from laneformer.hf.families.deepseek import shared_experts
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import Rules, Scheme, read_formats
from laneformer.hf.rope import read_rope, rotated_channels
from laneformer.hf.safetensors import Cut, Source

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

OVERLAP = 4  # the ratio whose windows overlap
RATIOS = (0, OVERLAP, 128)
RATES = {"compressed_sparse_attention": OVERLAP, "heavily_compressed_attention": 128}
"""Type of a layer in transformers -> its ratio."""
HASHED = "hash_moe"
# Name of a tensor in transformers' files, if it is neither that of the published files after "model." nor attn.norm
RENAMED = {
    "model.embed_tokens.weight": "embed.weight",
    **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "scale", "base")},
}
# Path of a weight, without the layer -> name in files, without layers.N
NAMES = {
    "tok_embeddings": "embed.weight",
    "norm": "norm.weight",
    "lm_head": "head.weight",
    "attention_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    **{f"attention.{name}": f"attn.{name}.weight" for name in ("wq_a", "q_norm", "wkv", "kv_norm")},
    "attention.indexer.wq": "attn.indexer.wq_b.weight",
    "attention.indexer.weights": "attn.indexer.weights_proj.weight",
    "feed_forward.router": "ffn.gate.weight",
    "feed_forward.correction": "ffn.gate.bias",
    "feed_forward.by_token": "ffn.gate.tid2eid",
}
STREAMS = {"attention_streams": "hc_attn", "ffn_streams": "hc_ffn", "head_streams": "hc_head"}
OF_STREAMS = {"mix": "fn", "factors": "scale", "offsets": "base"}
COMPRESSORS = {"attention.compressor": "attn.compressor", "attention.index_compressor": "attn.indexer.compressor"}
CUT: dict[str, tuple[str, Cut]] = {  # tensors of which each lane has its share
    "attention.wq_b": ("attn.wq_b.weight", "rows"),
    "attention.sinks": ("attn.attn_sink", "rows"),
    "attention.wo_a": ("attn.wo_a.weight", "rows"),
    "attention.wo_b": ("attn.wo_b.weight", "columns"),
    **{f"feed_forward.shared.{w}": (f"ffn.shared_experts.{w}.weight", "rows") for w in ("w1", "w3")},
    "feed_forward.shared.w2": ("ffn.shared_experts.w2.weight", "columns"),
}


# Matrices that the published files store in 16 or 32 bits; the others are FP8 or FP4.
NEVER_PACKED = (".router", ".mix", "compressor.wkv", "compressor.wgate", "indexer.weights")
COMPRESSED = "compressed-tensors"  # the quant_method that scripts.quantize writes
EXPERTS = "ffn.experts"  # part of the names of experts' modules
EXPERT_DTYPES = {"fp4": "mxfp4", "fp8": "fp8"}
"""Value of expert_dtype -> format."""


def config_from(fields: Fields, num_lanes: int | None) -> ModelConfig:
    """The ModelConfig, in `num_lanes` lanes, by default 1. Defaults are those of the published V4 Flash."""
    fields.require("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name, known in (
        *(("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("attention_bias", False)),
        ("num_key_value_heads", 1),
    ):
        if (value := fields.get(name, known)) != known:
            raise ConfigError(f"{name} = {value!r}: only models with {name} = {known!r} are supported")
    fields.given("num_nextn_predict_layers", "expert_dtype")  # for drafts and packed experts; not used here
    longest = fields.size("max_position_embeddings", 1048576)
    thetas, scaling = _rope(fields, longest)
    if scaling is not None:
        scaling = dataclasses.replace(scaling, attention_factor=1.0)  # cos and sin are not scaled
    width = fields.size("moe_intermediate_size", 2048)
    shared = fields.size("n_shared_experts", 1, 0) * width
    return ModelConfig(
        **fields.given("tie_word_embeddings"),
        bos_token_id=fields.begin_token,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.hidden,
        intermediate_size=width,
        num_hidden_layers=fields.layers,
        num_attention_heads=fields.size("num_attention_heads"),
        num_key_value_heads=1,
        head_dim=fields.size("head_dim", 512),
        max_position_embeddings=longest,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope_theta=thetas[0],
        hidden_act=fields.activation(),
        compressed_attention=_attention(fields, thetas[1], scaling),
        residual_streams=ResidualStreams(
            count=fields.size("hc_mult", 4),
            iterations=fields.size("hc_sinkhorn_iters", 20),
            eps=fields.get("hc_eps", 1e-6),
        ),
        num_experts=fields.size("n_routed_experts", 256),
        num_experts_per_tok=fields.size("num_experts_per_tok", 6),
        moe_intermediate_size=width,
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scoring_func="sqrtsoftplus",
        router_correction=True,
        hash_layers=_hash_layers(fields),
        routed_scaling_factor=fields.get("routed_scaling_factor", 1.5),
        swiglu_limit=fields.get("swiglu_limit", 10.0),
        swiglu_alpha=1.0,
        swiglu_plus_one=False,
        shared_expert_intermediate_size=shared or None,
        eos_token_id=fields.end_tokens,
        num_lanes=1 if num_lanes is None else num_lanes,
        layout="tp",
    )


def _rope(fields: Fields, longest: int) -> tuple[tuple[float, float], RopeScaling | None]:
    """The bases of layers without and with a ratio, and the scaling of the latter. transformers writes an object for
    each of the two.
    """
    parts = fields.mapping("rope_parameters") or {}
    if not all(isinstance(parts.get(name), Mapping) for name in ("main", "compress")):
        bases = fields.get("rope_theta", 10000.0), fields.get("compress_rope_theta", 160000.0)
        return bases, read_rope(fields, longest, partial=True)[1]
    fields.given("rope_theta", "compress_rope_theta")  # the objects repeat them
    main, compress = (Fields({"rope_parameters": parts[name]}) for name in ("main", "compress"))
    theta, unscaled = read_rope(main, longest, partial=True)
    if unscaled is not None:
        raise ConfigError(f"rope_parameters.main has rope_type {unscaled.type!r}: only 'default' is supported")
    compress_theta, scaling = read_rope(compress, longest, 160000.0, partial=True)
    return (theta, compress_theta), scaling


def _ratios(fields: Fields) -> list[Any]:
    """The ratio of each layer; transformers writes types of layers, and the ratio of each type."""
    ratios, types = fields.sequence("compress_ratios"), fields.sequence("layer_types")
    if ratios is not None:
        return ratios
    if types is None:
        raise ConfigError("compress_ratios missing: add it")
    known = {"sliding_attention": 0} | RATES | dict(fields.mapping("compress_rates") or {})
    for n, kind in enumerate(types):
        if kind not in known:
            raise ConfigError(f"layer_types[{n}] = {kind!r} is not supported; supported are {', '.join(known)}")
    return [known[kind] for kind in types]


def _hash_layers(fields: Fields) -> int:
    """Number of the first layers that look up their experts."""
    kinds = fields.sequence("mlp_layer_types")
    if kinds is None:
        return fields.size("num_hash_layers", 3, 0)
    count = kinds.count(HASHED)
    if kinds != [HASHED] * count + ["moe"] * (len(kinds) - count):
        raise ConfigError(f"mlp_layer_types = {kinds}: write {HASHED} for the first layers and moe for the others")
    return count


def _rotated(fields: Fields, head_dim: int) -> int:
    share = fields.get("partial_rotary_factor")
    usual = 64 if share is None else rotated_channels(Fields({"partial_rotary_factor": share}), head_dim, 1) or head_dim
    return fields.size("qk_rope_head_dim", usual)


def _attention(fields: Fields, theta: float, scaling: RopeScaling | None) -> CompressedAttention:
    ratios = _ratios(fields)
    if len(ratios) < fields.layers:
        raise ConfigError(f"compress_ratios = {ratios!r} must have a number for each of the {fields.layers} layers")
    for n, ratio in enumerate(ratios[: fields.layers]):
        if ratio not in RATIOS:
            raise ConfigError(f"compress_ratios[{n}] = {ratio!r} is not supported; supported are 0, 4, 128")
    return CompressedAttention(
        ratios=tuple(ratios[: fields.layers]),
        window=fields.size("sliding_window", 128),
        q_lora_rank=fields.size("q_lora_rank", 1024),
        qk_rope_head_dim=_rotated(fields, fields.size("head_dim", 512)),
        o_groups=fields.size("o_groups", 8),
        o_lora_rank=fields.size("o_lora_rank", 1024),
        overlap_ratio=OVERLAP,
        index_heads=fields.size("index_n_heads", 64),
        index_head_dim=fields.size("index_head_dim", 128),
        index_topk=fields.size("index_topk", 512),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def sources(config: ModelConfig, table: "Mapping[str, Weight]") -> dict[str, Source]:
    """The source of each weight, by path. All lanes compute the same positions and entries. Each lane has its share of
    the heads, of their groups, and of every expert's columns.
    """
    return {path: _source(path, weight.shape) for path, weight in table.items()}


def _source(path: str, shape: tuple[int, ...]) -> Source:
    prefix, name = "", path
    if path.startswith("layers."):
        _, n, name = path.split(".", 2)
        prefix = f"layers.{n}."
    if name in NAMES:
        return Source(f"{prefix}{NAMES[name]}", shape, vector=len(shape) == 1, integers=name.endswith("by_token"))
    block, _, matrix = name.rpartition(".")
    if block in STREAMS:
        return Source(f"{prefix}{STREAMS[block]}_{OF_STREAMS[matrix]}", shape, vector=len(shape) == 1)
    if block in COMPRESSORS:
        own = "ape" if matrix == "positions" else f"{matrix}.weight"
        return Source(f"{prefix}{COMPRESSORS[block]}.{own}", shape, vector=len(shape) == 1)
    lanes = shape[0]
    if name in CUT:
        file_name, cut = CUT[name]
        whole = (shape[1], lanes * shape[2]) if cut == "columns" else (lanes * shape[1], *shape[2:])
        return Source(f"{prefix}{file_name}", whole, cut=cut, lanes=lanes, vector=len(whole) == 1)
    experts, rows, columns = shape[1:]
    cut = "columns" if matrix == "w2" else "rows"
    size = (rows, lanes * columns) if matrix == "w2" else (lanes * rows, columns)
    return Source(f"{prefix}ffn.experts.*.{matrix}.weight", (experts, *size), cut=cut, lanes=lanes, experts=experts)


def dimensions(fields: Fields) -> Dimensions:
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
            *shared_experts(fields, layers, width, formats),
            Part(f"attention, {heads} heads of {dim}", layers * _wide_attention(fields), formats.of("attention")),
            Part("compressor and indexer", _compressors(fields), formats.of("attention")),
            router(fields, layers, experts, formats),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=None,
    )


def _wide_attention(fields: Fields) -> int:
    """Number of weights in one layer's attention, without its compressor."""
    d, heads, dim = fields.hidden, fields.size("num_attention_heads"), fields.size("head_dim")
    rank, out_rank, groups = fields.size("q_lora_rank"), fields.size("o_lora_rank"), fields.size("o_groups")
    kv = fields.size("num_key_value_heads")
    return d * rank + rank * heads * dim + d * kv * dim + heads * dim * out_rank + groups * out_rank * d


def _compressors(fields: Fields) -> int:
    """Number of weights in all layers' compressors, which combine the keys and values of several positions with a gate.
    With overlapping windows (a ratio of 4), the matrices are twice as wide and there is an indexer.
    """
    d, dim, layers, ratios = fields.hidden, fields.size("head_dim"), fields.layers, fields.sequence("compress_ratios")
    if ratios is None or len(ratios) < layers:
        raise ConfigError(f"compress_ratios = {ratios!r} must have a number for each of the {layers} layers")
    rank, heads, size = fields.size("q_lora_rank"), fields.size("index_n_heads"), fields.size("index_head_dim")
    indexer = rank * heads * size + d * heads + 4 * d * size
    overlapping, plain = ratios[:layers].count(4), sum(ratio not in (0, 4) for ratio in ratios[:layers])
    return overlapping * (4 * d * dim + indexer) + plain * 2 * d * dim


def _expert_format(fields: Fields) -> str | None:
    """The format of the routed experts, or None if it is that of the other matrices."""
    quantization = fields.mapping("quantization_config")
    if quantization is None or quantization.get("quant_method") == COMPRESSED:
        return None
    return EXPERT_DTYPES[_expert_dtype(fields)]


def _expert_dtype(fields: Fields) -> str:
    quantization = fields.mapping("quantization_config") or {}
    dtype = fields.word("expert_dtype", str(quantization.get("expert_dtype", "fp4")))  # fp4 is vLLM's default, too
    if dtype not in EXPERT_DTYPES:
        raise ConfigError(f"unknown expert_dtype {dtype!r}; choose {', '.join(EXPERT_DTYPES)}")
    return dtype


def _rules(fields: Fields) -> Rules:
    """The packing of all matrices, unless quantization_config is that of compressed-tensors and states it itself. In
    published files quantization_config does not apply to routed experts in FP4. Raises ConfigError for settings other
    than the published ones: FP8 in blocks of 128 x 128, and experts in FP4 or FP8.
    """
    quantization = Fields(fields.mapping("quantization_config") or {})
    if quantization.get("quant_method") == COMPRESSED:
        return []
    for name, known in (("quant_method", ("fp8",)), ("fmt", ("e4m3",)), ("scale_fmt", ("ue8m0", "float"))):
        if (value := quantization.get(name, known[0])) not in known:
            raise ConfigError(
                f"quantization_config.{name} = {value!r} of DeepSeek V4 is not supported; supported are"
                f" {', '.join(known)}"
            )
    if (block := quantization.get("weight_block_size", [128, 128])) != [128, 128]:
        raise ConfigError(f"quantization_config.weight_block_size = {block!r} of DeepSeek V4 must be [128, 128]")
    experts = [(EXPERTS, Scheme("fp4"))] if _expert_dtype(fields) == "fp4" else []
    return [*experts, ("*", Scheme("fp8", block=(128, 128)))]


def _renamed(name: str) -> str:
    found = RENAMED.get(name, name.removeprefix("model."))
    return found.replace(".attn.norm.weight", ".attn.kv_norm.weight")


FAMILY = Family(
    name="DeepSeek V4",
    dimensions=dimensions,
    config_from=config_from,
    sources=sources,
    ignored=lambda fields: ("mtp.",),
    never_packed=NEVER_PACKED,
    rules=_rules,
    renamed=_renamed,
)
