"""Named models. `python -m infer bench --checkpoint NAME` runs them with random weights; recipes train Laneformers."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from laneformer.config import (
    CompressedAttention,
    DeltaNetSizes,
    LatentAttention,
    ModelConfig,
    ResidualStreams,
    RopeScaling,
)

# The model of `make run`: 6 layers in 8 lanes with the published layout (delay 2).
STDLIB = ModelConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=256,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
    bos_token_id=0,
    eos_token_id=(0,),
)

# STDLIB with sliding windows: TINY at a context of 256 positions, TINY_LONG at 1,024.
TINY = STDLIB.replace(sliding_window=64, sliding_window_n_layers=4)
TINY_LONG = TINY.replace(
    max_position_embeddings=1024,
    sliding_window=256,
    rope_scaling=RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=256),
)

# STDLIB with gated DeltaNet in two of three layers.
DELTA_TINY = STDLIB.replace(
    delta_net=DeltaNetSizes(key_heads=8, value_heads=8, key_dim=24, value_dim=24), delta_layers=(0, 1, 3, 4)
)

LANEFORMER_120M = ModelConfig(
    vocab_size=32_000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
)

LANEFORMER_350M = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
    sliding_window=512,
    sliding_window_n_layers=16,
)
LANEFORMER_350M_LONG = LANEFORMER_350M.replace(
    max_position_embeddings=131_072,
    rope_scaling=RopeScaling(type="yarn", factor=32.0, original_max_position_embeddings=4096),
)

# Published (Kog, "Laneformer 2B"), except for the size of the window.
LANEFORMER_2B = ModelConfig(
    vocab_size=32_000,
    hidden_size=3072,
    intermediate_size=12_288,
    num_hidden_layers=15,
    num_attention_heads=32,
    num_key_value_heads=16,
    max_position_embeddings=4096,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
    sliding_window_n_layers=10,
    bos_token_id=1,
    eos_token_id=(2,),
    sliding_window=512,  # ours: 512 or 2,048 fit what is published; the smaller reads fewer keys per token
)

# The sizes of Llama 3 (arXiv 2407.21783) in 8 lanes.
LANEFORMER_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    rope_theta=500_000.0,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
)
LANEFORMER_70B = LANEFORMER_8B.replace(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64
)

# STDLIB with 8 experts in each layer, each with half the columns. A token uses two of them, so as many weights as in
# STDLIB.
MOE_TINY = STDLIB.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)

# MOE_TINY with latent attention and DeepSeek-V3's router: groups of experts, and a shared expert as wide as the others.
LATENT_TINY = MOE_TINY.replace(
    latent_attention=LatentAttention(
        q_lora_rank=96, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24
    ),
    mlp_only_layers=(0,),
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    shared_expert_intermediate_size=256,
)

# MOE_TINY with four residual streams, attention to a window and to entries of 4 or 32 positions, and a router as in
# DeepSeek-V4. Experts chosen by token (hash_layers) are left out, because they cannot be trained.
V4_TINY = MOE_TINY.replace(
    num_key_value_heads=1,
    head_dim=24,
    layout="tp",
    compressed_attention=CompressedAttention(
        ratios=(0, 4, 32, 4, 32, 4),
        window=64,
        q_lora_rank=96,
        qk_rope_head_dim=8,
        o_groups=8,
        o_lora_rank=24,
        index_heads=4,
        index_head_dim=16,
        index_topk=64,
    ),
    residual_streams=ResidualStreams(count=4),
    scoring_func="sqrtsoftplus",
    swiglu_limit=10.0,
    swiglu_alpha=1.0,
    swiglu_plus_one=False,
    shared_expert_intermediate_size=256,
)

# 1.03 billion weights; a token uses a fifth of them. The proportions are those of OLMoE (arXiv 2409.02060): 64 small
# experts, 8 per token; in 8 lanes.
MOE_1B_A200M = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=4096,
    num_lanes=8,
    layout="laneformer",
    broadcast_delay=2,
    qk_norm=True,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=256,
)

# Published mixtures of experts, as one lane. With random weights their routing is uniform.
GPT_OSS_20B = ModelConfig(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    layout="tp",
    sliding_window=128,
    swa_layers=tuple(range(0, 24, 2)),
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(
        type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False
    ),
    norm_eps=1e-5,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=2880,
    router_bias=True,
    expert_bias=True,
    swiglu_limit=7.0,
    eos_token_id=(200_002,),
)
GPT_OSS_120B = GPT_OSS_20B.replace(num_hidden_layers=36, num_experts=128, swa_layers=tuple(range(0, 36, 2)))
QWEN3_30B_A3B = ModelConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40_960,
    layout="tp",
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    bos_token_id=151_643,
    eos_token_id=(151_645,),
)
QWEN3_NEXT_80B = ModelConfig(  # also Qwen3-Coder-Next, except for its rope_theta
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5120,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=262_144,
    layout="tp",
    rope_theta=1e7,
    rotary_dim=64,
    norm_eps=1e-6,
    norm_plus_one=True,
    qk_norm=True,
    attention_gate=True,
    delta_net=DeltaNetSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    delta_layers=tuple(n for n in range(48) if n % 4 < 3),
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    shared_expert_gate=True,
    bos_token_id=151_643,
    eos_token_id=(151_645,),
)
# Twelve layers of QWEN3_NEXT_80B: 21.0 GB in FP8, for devices with less memory.
QWEN3_NEXT_20B = QWEN3_NEXT_80B.replace(num_hidden_layers=12, delta_layers=tuple(n for n in range(12) if n % 4 < 3))
# QWEN3_NEXT_20B with fewer experts to choose from, in bfloat16: a token reads 2.2 GB.
QWEN3_NEXT_12 = QWEN3_NEXT_20B.replace(num_experts=64, max_position_embeddings=16_384)
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    latent_attention=LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    max_position_embeddings=163_840,
    layout="tp",
    rope_scaling=RopeScaling(
        type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    norm_eps=1e-6,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    mlp_only_layers=(0, 1, 2),
    scoring_func="sigmoid",
    router_correction=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    shared_expert_intermediate_size=2048,
    bos_token_id=0,
    eos_token_id=(1,),
)
# Four layers of DeepSeek V3 with fewer experts to choose from, and a smaller vocabulary: a token reads 2.6 GB.
DEEPSEEK_V3_4 = DEEPSEEK_V3.replace(
    vocab_size=16_384, num_hidden_layers=4, num_experts=16, mlp_only_layers=(), max_position_embeddings=16_384
)
_V4_ATTENTION = CompressedAttention(
    ratios=(0, 0, *(4, 128) * 20, 4),
    window=128,
    q_lora_rank=1024,
    qk_rope_head_dim=64,
    o_groups=8,
    o_lora_rank=1024,
    index_heads=64,
    index_head_dim=128,
    index_topk=512,
    rope_scaling=RopeScaling(type="yarn", factor=16.0, original_max_position_embeddings=65_536, attention_factor=1.0),
)
DEEPSEEK_V4_FLASH = ModelConfig(
    vocab_size=129_280,
    hidden_size=4096,
    intermediate_size=2048,
    num_hidden_layers=43,
    num_attention_heads=64,
    num_key_value_heads=1,
    head_dim=512,
    compressed_attention=_V4_ATTENTION,
    residual_streams=ResidualStreams(count=4),
    max_position_embeddings=1_048_576,
    layout="tp",
    norm_eps=1e-6,
    num_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    scoring_func="sqrtsoftplus",
    router_correction=True,
    hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    swiglu_alpha=1.0,
    swiglu_plus_one=False,
    shared_expert_intermediate_size=2048,
)
# Eight layers of DeepSeek V4 Flash with fewer experts to choose from, and a smaller vocabulary: a token reads 2.0 GB.
DEEPSEEK_V4_8 = DEEPSEEK_V4_FLASH.replace(
    vocab_size=16_384,
    num_hidden_layers=8,
    compressed_attention=dataclasses.replace(_V4_ATTENTION, ratios=_V4_ATTENTION.ratios[:8]),
    num_experts=32,
    max_position_embeddings=20_480,
)
KIMI_K2 = DEEPSEEK_V3.replace(
    vocab_size=163_840,
    num_attention_heads=64,
    num_key_value_heads=64,
    max_position_embeddings=131_072,
    rope_theta=50_000.0,
    rope_scaling=RopeScaling(
        type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
    ),
    num_experts=384,
    mlp_only_layers=(0,),
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.827,
    bos_token_id=163_584,
    eos_token_id=(163_585,),
)
# Layers with the latent attention of Kimi K2, which is most of their work at a long context.
KIMI_K2_LATENTS = ModelConfig(
    vocab_size=4096,
    hidden_size=7168,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=64,
    num_key_value_heads=64,
    latent_attention=KIMI_K2.latent_attention,
    max_position_embeddings=20_480,
    layout="tp",
    rope_theta=50_000.0,
    rope_scaling=KIMI_K2.rope_scaling,
)
MOONLIGHT_16B = KIMI_K2.replace(
    hidden_size=2048,
    intermediate_size=11_264,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    latent_attention=LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    max_position_embeddings=8192,
    rope_scaling=None,
    norm_eps=1e-5,
    num_experts=64,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    routed_scaling_factor=2.446,
    shared_expert_intermediate_size=2 * 1408,
)


class PackedModel(NamedTuple):
    """A model some of whose matrices are quantized. Recipes may return one."""

    config: ModelConfig
    formats: Mapping[str, str] = MappingProxyType({})
    """Path of a matrix without the layer -> mxfp4, in groups of 32, or fp8, in blocks of 128 x 128."""


def packed(config: ModelConfig, **matrices: tuple[str, ...]) -> PackedModel:
    """The model with quantized matrices: packed(config, fp8=paths, mxfp4=paths)."""
    return PackedModel(config, {path: format for format, paths in matrices.items() for path in paths})


EXPERTS = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
SHARED_EXPERT = tuple(f"feed_forward.shared.{name}" for name in ("w1", "w3", "w2"))
LATENT = tuple(f"attention.{name}" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo"))
BESIDE = ("attention.wg", "attention.win", *SHARED_EXPERT)
COMPRESSED = tuple(f"attention.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq"))
# Matrices in the precision in which they are published, all else in bfloat16. Only the experts of moonlight_16b, which
# are published in bfloat16, are in fp8, to fit into 24 GiB of memory.
PACKED: dict[str, PackedModel] = {
    "gpt_oss_20b": packed(GPT_OSS_20B, mxfp4=EXPERTS),
    "gpt_oss_120b": packed(GPT_OSS_120B, mxfp4=EXPERTS),
    "qwen3_next_80b": packed(QWEN3_NEXT_80B, fp8=EXPERTS + ATTENTION + BESIDE),
    "qwen3_next_20b": packed(QWEN3_NEXT_20B, fp8=EXPERTS + ATTENTION + BESIDE),
    "qwen3_next_12": PackedModel(QWEN3_NEXT_12),
    "qwen3_30b_a3b": packed(QWEN3_30B_A3B, fp8=EXPERTS + ATTENTION),
    "deepseek_v3": packed(DEEPSEEK_V3, fp8=EXPERTS + SHARED_EXPERT + LATENT),
    "deepseek_v3_4": packed(DEEPSEEK_V3_4, fp8=EXPERTS + SHARED_EXPERT + LATENT),
    "deepseek_v4_flash": packed(DEEPSEEK_V4_FLASH, mxfp4=EXPERTS, fp8=SHARED_EXPERT + COMPRESSED),
    "deepseek_v4_8": packed(DEEPSEEK_V4_8, mxfp4=EXPERTS, fp8=SHARED_EXPERT + COMPRESSED),
    "kimi_k2": packed(KIMI_K2, fp8=EXPERTS + SHARED_EXPERT + LATENT),
    "kimi_k2_latents": PackedModel(KIMI_K2_LATENTS),
    "moonlight_16b": packed(MOONLIGHT_16B, fp8=EXPERTS),
}

# Every named model. A model that a recipe trains has the recipe's name and is as in the recipe's last phase.
MODELS: dict[str, ModelConfig] = {
    "stdlib": STDLIB,
    "tiny": TINY_LONG,
    "stdlib_int4": STDLIB,
    "delta_tiny": DELTA_TINY,
    "laneformer_120m": LANEFORMER_120M,
    "laneformer_350m": LANEFORMER_350M_LONG,
    "laneformer_2b": LANEFORMER_2B,
    "laneformer_8b": LANEFORMER_8B,
    "laneformer_70b": LANEFORMER_70B,
    "moe_tiny": MOE_TINY,
    "latent_tiny": LATENT_TINY,
    "v4_tiny": V4_TINY,
    "moe_1b_a200m": MOE_1B_A200M,
    **{name: model.config for name, model in PACKED.items()},
}
