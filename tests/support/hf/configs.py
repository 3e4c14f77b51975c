"""config.json of mixtures of experts with their published dimensions, and configs with missing or null fields."""

from hypothesis import strategies as st

from laneformer.infer.roofline.published import DEEPSEEK_V4_FLASH as V4
from laneformer.infer.roofline.published import GPT_OSS_120B as GPT
from laneformer.infer.roofline.published import KIMI_K2_6 as KIMI
from laneformer.infer.roofline.published import QWEN3_CODER_NEXT as QWEN

K2 = KIMI["text_config"]
INT4 = K2["quantization_config"]
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129_280,
    "num_attention_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32_000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
}
MIXTURES = {
    "qwen3_next": QWEN,
    "gpt_oss": GPT,
    "deepseek_v4": V4,
    "deepseek_v3": V3,
    "kimi_k2": K2,
    "kimi_k25": KIMI,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN_MOE,
}

DROPPED = "dropped"


def with_missing(draw, fields: dict) -> dict:
    """The fields without some of them and with some set to null, as Hypothesis draws. draw: draws from a strategy."""
    chosen = {name: draw(st.sampled_from([value, None, DROPPED])) for name, value in fields.items()}
    return {name: value for name, value in chosen.items() if value is not DROPPED}
