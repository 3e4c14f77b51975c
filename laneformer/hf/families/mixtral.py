"""Mixtral: grouped-query attention, experts in every layer (arXiv 2401.04088)."""

from dataclasses import replace
from typing import Any

from laneformer.hf.dimensions import Dimensions, Part, grouped_attention, head, routed_experts, router
from laneformer.hf.families.llama import EXPERT_NAMES, FULL, SLIDING, make_family
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import read_formats


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


def experts(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig; defaults are those of transformers."""
    fields.refuse_other_routers()
    return {
        "num_experts": fields.size("num_local_experts", 8),
        "num_experts_per_tok": fields.size("num_experts_per_tok", 2),
        "moe_intermediate_size": fields.size("intermediate_size"),
    }


def windows(fields: Fields) -> tuple[int | None, list[str]]:
    """One window on all layers; by default no window."""
    window = fields.optional_size("sliding_window")
    return window, [FULL if window is None else SLIDING] * fields.layers


NAMES = EXPERT_NAMES | {
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.w1": "block_sparse_moe.experts.*.w1",
    "feed_forward.experts.w3": "block_sparse_moe.experts.*.w3",
    "feed_forward.experts.w2": "block_sparse_moe.experts.*.w2",
}
FAMILY = replace(
    make_family(
        "Mixtral",
        NAMES,
        dimensions=dimensions,
        longest=131072,
        defaults={"num_key_value_heads": 8},
        theta=1e6,
        norm_eps=1e-5,
        windows=windows,
        more=experts,
    ),
    renamed=lambda name: name.replace(".mlp.gate.", ".block_sparse_moe.gate."),  # in the modules of transformers 5
)
