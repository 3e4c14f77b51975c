"""Published mixture-of-experts models: the fields of their config.json that determine what a token reads, and their
public nominal figures.
"""

from dataclasses import dataclass, field
from typing import Any

from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.hf import dimensions_from_hf
from laneformer.hf.dimensions import Dimensions, Part

MODELS_READ = "2026-11"  # date when the sources below were read


@dataclass(frozen=True, kw_only=True)
class MoeModel:
    """One model at batch 1: the bytes that a token reads, and the public figures."""

    name: str
    dimensions: Dimensions
    source: str
    """Source of the dimensions."""
    precision_source: str
    """Source of the formats."""
    checkpoint: float | None = None
    """Bytes of the published checkpoint; None if unknown."""
    nominal: dict[str, float] = field(default_factory=dict)
    """Key of a device -> public nominal tokens per second on 8 of them, at 0.357 of the effective bandwidth."""
    nominal_rule: str = ""
    """The rule that gives the bytes behind the nominal figure, found by trial."""
    difference: str = ""
    """The reason why the bottom-up figure differs."""

    @property
    def layers(self) -> int:
        return self.dimensions.layers

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.dimensions.parts

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that one token reads."""
        return sum(part.bytes for part in self.parts)

    def kv_bytes(self, context: int, precision: str) -> float | None:
        """Bytes of the cache that one token reads, plus those of the float32 state that it reads and writes; None if
        unknown.
        """
        found = self.dimensions
        if found.kv_full is None:
            return None if context else 0.0
        per_position, window = found.kv_window
        cached = FORMATS[precision].bytes * (found.kv_full * context + per_position * min(context, window))
        return cached + 2 * FORMATS["float32"].bytes * found.state * (context > 0)


QWEN3_CODER_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151_936,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            *(
                f"model.layers.{n}.{name}"
                for n in range(48)
                for name in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_ba")
            ),
        ],
    },
}
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "vocab_size": 201_088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "vocab_size": 129_280,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last one is for the block of multi-token prediction
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
KIMI_K2_6: dict[str, Any] = {
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
}

MOE: dict[str, MoeModel] = {
    model.name: model
    for model in (
        MoeModel(
            name="qwen3-coder-next",
            dimensions=dimensions_from_hf(QWEN3_CODER_NEXT),
            source="config.json copies on huggingface.co, as amd/Qwen3-Coder-Next-MXFP4",
            precision_source=(
                "FP8 matrices, BF16 router and head: an assumption, the types of the tensors were not checked"
            ),
            nominal={"h200": 3650, "mi300x": 4000},
            nominal_rule="3.0 B weights at 1 byte = 3.00 GB",
            difference="3 B leaves out the output head (0.31 B, here in BF16) and rounds 3.25 B down",
        ),
        MoeModel(
            name="gpt-oss-120b",
            dimensions=dimensions_from_hf(GPT_OSS_120B),
            source="docs.nvidia.com megatron-bridge gpt-oss",
            precision_source="experts MXFP4 at 4.25 bit, the rest BF16; OpenAI's card: 60.8 GiB checkpoint",
            checkpoint=60.8 * 2**30,
            nominal={"h200": 2200, "mi300x": 2400},
            nominal_rule="experts at 4.25 bit, the rest BF16 with the head = 5.00 GB",
            difference="the same rule as here; '5.1 B FP4' as a label would be 4,303 / 4,706 tok/s",
        ),
        MoeModel(
            name="deepseek-v4-flash",
            dimensions=dimensions_from_hf(DEEPSEEK_V4_FLASH),
            source=(
                "docs.nvidia.com automodel page; config copy"
                " inference-optimization/DeepSeek-V4-Flash-bf16-dequantized-5layers; the primary model card was not"
                " read"
            ),
            precision_source=(
                "experts FP4, the rest FP8, some BF16 (anemll FP4-FP8 package page); which are BF16 is an assumption"
            ),
            nominal={"h200": 1160, "mi300x": 1270},
            nominal_rule="routed and shared 7.575 B at 4.25 bit and 5.425 B in FP8 = 9.45 GB",
            difference=(
                "the nominal figure takes 13 B with the shared experts in FP4; here these are FP8 and head and router"
                " BF16. '13 B FP8' as a label would be 844 / 923 tok/s"
            ),
        ),
        MoeModel(
            name="kimi-k2.6",
            dimensions=dimensions_from_hf(KIMI_K2_6),
            source="docs.nvidia.com kimi_provider, dimensions of K2; the primary model card was not read",
            precision_source=(
                "INT4 in groups of 32 in the routed experts, the rest BF16 (eatang/Kimi-K2.5-2layer, unsloth.ai)"
            ),
            checkpoint=595e9,
            nominal={"h200": 325, "mi300x": 355},
            nominal_rule="routed 21.14 B at 4.5 bit and the rest of 32 B in BF16 = 33.6 GB",
            difference=(
                "32 B counts the embedding table, of which a token reads one row. 'Bounded near 2,000 tok/s on H200' is"
                " a ceiling at half a byte for every weight: 2.1 times from BF16 outside of the experts, 2.8 times from"
                " the share"
            ),
        ),
    )
}


def find_moe(name: str) -> list[MoeModel]:
    """The model called `name`, or every model for "all". Raises ConfigError for an unknown name."""
    if name == "all":
        return list(MOE.values())
    if name not in MOE:
        raise ConfigError(f"unknown model --moe {name}; choose {', '.join(MOE)}, all")
    return [MOE[name]]
