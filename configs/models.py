"""Named models. `python -m infer bench --checkpoint NAME` runs them with random weights; recipes train them."""

from laneformer.config import ModelConfig, RopeScaling

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

# The same with sliding windows, first at a context of 256 positions, then of 1,024.
TINY = STDLIB.replace(sliding_window=64, sliding_window_n_layers=4)
TINY_LONG = TINY.replace(
    max_position_embeddings=1024,
    sliding_window=256,
    rope_scaling=RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=256),
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

# Published (Kog, "Laneformer 2B"), but for the size of the window.
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

# The model of `make run` with 8 experts of half the columns in each layer, of which a token uses two: as many weights
# per token.
MOE_TINY = STDLIB.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)

# 1.03 billion weights, of which a token uses a fifth. The proportions of OLMoE (arXiv 2409.02060), 64 small experts of
# which a token uses 8, in 8 lanes.
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

# By the name of the recipe that trains it, as its last phase leaves it.
MODELS: dict[str, ModelConfig] = {
    "stdlib": STDLIB,
    "tiny": TINY_LONG,
    "stdlib_int4": STDLIB,
    "laneformer_120m": LANEFORMER_120M,
    "laneformer_350m": LANEFORMER_350M_LONG,
    "laneformer_2b": LANEFORMER_2B,
    "moe_tiny": MOE_TINY,
    "moe_1b_a200m": MOE_1B_A200M,
}
