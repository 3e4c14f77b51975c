"""DeepSeek V3, and Kimi K2 with the same architecture: latent attention, experts with a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from laneformer.config import LatentAttention, ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.dimensions import Dimensions, Part, dense_layers, head, routed_experts, router
from laneformer.hf.families import llama
from laneformer.hf.families.llama import EXPERT_NAMES, make_family, without_layer
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import Formats, read_formats
from laneformer.hf.rope import interleave
from laneformer.hf.safetensors import Source

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

NAMES = EXPERT_NAMES | {
    "feed_forward.shared.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.w3": "mlp.shared_experts.up_proj",
    "feed_forward.shared.w2": "mlp.shared_experts.down_proj",
}
# Path of a weight, without the layer -> name in files, without model.layers.N. All lanes share the tensors of SHARED;
# each lane has its share of the rows of those in BY_HEAD.
SHARED = {
    "attention.wq_a": "self_attn.q_a_proj.weight",
    "attention.q_norm": "self_attn.q_a_layernorm.weight",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm": "self_attn.kv_a_layernorm.weight",
    "feed_forward.correction": "mlp.gate.e_score_correction_bias",
}
BY_HEAD = {
    "attention.wq": "self_attn.q_proj.weight",
    "attention.wq_b": "self_attn.q_b_proj.weight",
    "attention.wkv_b": "self_attn.kv_b_proj.weight",
}
OF_TRAINING = ("qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers")


def dimensions_v3(fields: Fields) -> Dimensions:
    formats, layers, experts = read_formats(fields), fields.layers, fields.size("n_routed_experts")
    sparse, width = layers - _dense_layers(fields, 0), fields.size("moe_intermediate_size")
    return Dimensions(
        layers=layers,
        parts=(
            routed_experts(fields, sparse, experts, width, formats.of("routed")),
            *shared_experts(fields, sparse, width, formats),
            *dense_layers(fields, layers - sparse, formats),
            Part("latent attention", layers * _latent_attention(fields), formats.of("attention")),
            router(fields, sparse, experts, formats),
            head(fields, formats),
        ),
        formats=formats.rule,
        kv_full=layers * (fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")),
    )


def _dense_layers(fields: Fields, default: int) -> int:
    """Number of layers with an MLP instead of experts, the first ones. Raises ConfigError for unsupported values."""
    if fields.size("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq = {fields.size('moe_layer_freq')}: only 1 is supported")
    dense = fields.size("first_k_dense_replace", default, 0)
    if dense >= fields.layers:
        raise ConfigError(f"first_k_dense_replace = {dense} must be less than num_hidden_layers = {fields.layers}")
    return dense


def more_v3(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig; defaults are those of transformers. Raises ConfigError for unsupported values."""
    for name, known, default in (("scoring_func", "sigmoid", "sigmoid"), ("topk_method", "noaux_tc", "noaux_tc")):
        if (value := fields.get(name, default)) != known:
            raise ConfigError(f"{name} = {value!r}: only models with {name} = {known!r} are supported")
    fields.flag("rope_interleave", True)  # see `_variant`
    fields.given(*OF_TRAINING)
    shared = fields.size("n_shared_experts", 1, 0) * fields.size("moe_intermediate_size", 2048)
    return {
        "head_dim": None,
        "num_key_value_heads": fields.size("num_attention_heads"),
        "latent_attention": LatentAttention(
            q_lora_rank=fields.optional_size("q_lora_rank", 1536),
            kv_lora_rank=fields.size("kv_lora_rank", 512),
            qk_nope_head_dim=fields.size("qk_nope_head_dim", 128),
            qk_rope_head_dim=fields.size("qk_rope_head_dim", 64),
            v_head_dim=fields.size("v_head_dim", 128),
        ),
        "num_experts": fields.size("n_routed_experts", 256),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 8),
        "moe_intermediate_size": fields.size("moe_intermediate_size", 2048),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "mlp_only_layers": tuple(range(_dense_layers(fields, 3))),
        "scoring_func": "sigmoid",
        "router_correction": True,
        "n_group": fields.size("n_group", 8),
        "topk_group": fields.size("topk_group", 4),
        "routed_scaling_factor": fields.get("routed_scaling_factor", 2.5),
        "shared_expert_intermediate_size": shared or None,
    }


def drafts_v3(fields: Fields) -> tuple[str, ...]:
    """Prefixes of the layers after the model's own, which draft further tokens."""
    count = fields.size("num_nextn_predict_layers", 0, 0, 64)
    return tuple(f"model.layers.{fields.layers + n}." for n in range(count))


def sources_v3(config: ModelConfig, table: "Mapping[str, Weight]", half_split: bool = False) -> dict[str, Source]:
    """The source of each weight, by path: as for a Llama, except for latent attention, and for the router's correction.
    half_split: whether the rotary pairs of latent attention are half-split in the files; usually they are interleaved.
    """
    own = {path: source for path, weight in table.items() if (source := _source(path, weight.shape))}
    if half_split and (sizes := config.latent_attention) is not None:
        own |= {path: _interleaved(sizes, path, source) for path, source in own.items()}
    rest = {path: weight for path, weight in table.items() if path not in own}
    return llama.sources(config, rest, NAMES) | own


def _interleaved(sizes: LatentAttention, path: str, source: Source) -> Source:
    """The source of a weight whose rows for rotary channels, the last ones of each head, are half-split in the file."""
    before = {"wq": sizes.qk_nope_head_dim, "wq_b": sizes.qk_nope_head_dim, "wkv_a": sizes.kv_lora_rank}
    first = before.get(path.rpartition(".")[2])
    if first is None:
        return source
    rotary = first + interleave(np.arange(sizes.qk_rope_head_dim), sizes.qk_rope_head_dim)
    head = np.concatenate([np.arange(first), rotary])
    starts = np.arange(0, source.shape[-2], len(head))
    return replace(source, taken=tuple(map(int, (starts[:, None] + head).reshape(-1))))


def _source(path: str, shape: tuple[int, ...]) -> Source | None:
    """The source of one weight; None if it is the same as for a Llama."""
    prefix, name = without_layer(path)
    if name in SHARED:
        return Source(f"{prefix}{SHARED[name]}", shape)
    if name in BY_HEAD:
        lanes, rows, columns = shape
        return Source(f"{prefix}{BY_HEAD[name]}", (lanes * rows, columns), cut="rows", lanes=lanes)
    return None


def _latent_attention(fields: Fields) -> int:
    """Number of weights in one layer's attention. A null q_lora_rank means a single query matrix."""
    d, heads, kv_rank = fields.hidden, fields.size("num_attention_heads"), fields.size("kv_lora_rank")
    nope, rope, value = (fields.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = fields.optional_size("q_lora_rank")
    query = d * heads * (nope + rope) if rank is None else d * rank + rank * heads * (nope + rope)
    return query + d * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * d


def shared_experts(fields: Fields, layers: int, width: int, formats: Formats) -> list[Part]:
    count = fields.size("n_shared_experts", 0, 0)
    weights = layers * count * 3 * width * fields.hidden
    return [Part("shared expert", weights, formats.of("shared"))] if count else []


def _variant(family: Family, fields: Fields) -> Family:
    half_split = not fields.flag("rope_interleave", True)
    return replace(family, sources=partial(sources_v3, half_split=True)) if half_split else family


V3 = replace(
    make_family(
        "DeepSeek V3", NAMES, dimensions_v3, longest=4096, defaults={}, refused=("attention_bias",), more=more_v3
    ),
    sources=sources_v3,
    ignored=drafts_v3,
    never_packed=(".router",),
)
V3 = replace(V3, variant=lambda fields: _variant(V3, fields))
KIMI_K2: Family = replace(V3, name="Kimi K2", variant=lambda fields: _variant(KIMI_K2, fields))
