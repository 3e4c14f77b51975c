"""Layouts, configs and samplings with which every decode kernel is tested."""

from laneformer.config import CompressedAttention, LatentAttention, ResidualStreams, RopeScaling
from laneformer.infer.sampling import Sampling

LAYOUTS = [
    ("tp", 2),
    ("tp", 3),
    ("parallel", 3),
    ("ladder", 2),
    ("desync(1)", 2),
    ("desync(2)", 3),
    ("desync(4)", 2),
    ("spd(0, 2)", 3),
    ("caat(0.3)", 2),
    ("caat(1)", 3),
    ("kraken", 2),
    ("kraken", 5),
    ("track(1)", 2),
    ("track(2)", 3),
    ("dtp(0)", 2),
    ("dtp(1)", 3),
    ("dtp(2)", 8),
    ("dtp(3)", 2),
    ("dtp(9)", 2),
    ("none", 3),
    ("tp", 1),
    ("desync(2)", 1),
]


CONFIGS = {
    "dense": {"lanes": 1},
    "delay 0": {"broadcast_delay": 0},
    "delay 1": {"broadcast_delay": 1, "lanes": 3},
    "delay 2": {"broadcast_delay": 2, "lanes": 8, "num_hidden_layers": 5},
    "delay longer than the model": {"broadcast_delay": 4, "lanes": 5},
    "not early": {"broadcast_delay": 1, "use_early_comm": False, "lanes": 5},
    "no attention comm": {"broadcast_delay": 1, "use_attention_comm": False, "lanes": 3},
    "no mlp comm": {"broadcast_delay": 1, "use_mlp_comm": False},
    "lane head": {"lm_head_type": "lane", "lanes": 3},
    "vocab head": {"lm_head_type": "vocab_parallel", "lanes": 5, "vocab_size": 95},
    "vocab head, few tokens": {"lm_head_type": "vocab_parallel", "lanes": 8, "vocab_size": 24},
    "norm of the sum": {"pre_norm_lane_agg": True, "lanes": 3},
    "norms of lanes": {"replicated_rmsn_scale": False, "lanes": 3},
    "norms of lanes, vocab head": {"replicated_rmsn_scale": False, "lm_head_type": "vocab_parallel"},
    "norms of lanes, lane head": {"replicated_rmsn_scale": False, "lm_head_type": "lane"},
    "norms of lanes, norm of the sum": {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True},
    "tied": {"tie_word_embeddings": True, "lanes": 3},
    "tied, norm of the sum": {"tie_word_embeddings": True, "pre_norm_lane_agg": True},
    "first layers slide": {"sliding_window": 5, "sliding_window_n_layers": 2},
    "last layers slide": {"sliding_window": 17, "sliding_window_n_layers": -1},
    "window of one": {"sliding_window": 1, "sliding_window_n_layers": 3, "unclamped_layers": (1,)},
    "a list of sliding layers": {"sliding_window": 3, "swa_layers": (0, 2)},
    "smallest heads": {"head_dim": 2},
    "odd heads": {"head_dim": 24, "heads": 3, "kv_heads": 3},
    "large heads": {"head_dim": 130, "heads": 4, "kv_heads": 2},
    "one channel more than vectors": {"hidden_size": 33, "ff": 17, "vocab_size": 49},
    "smallest": {"hidden_size": 1, "ff": 1, "head_dim": 2, "vocab_size": 40, "heads": 1, "norm_eps": 1e-2},
    "whole vectors": {"hidden_size": 64, "ff": 32, "head_dim": 16, "vocab_size": 64},
    "gated attention": {"attention_gate": True, "lanes": 3, "heads": 4, "kv_heads": 2},
    "geglu": {"hidden_act": "gelu_pytorch_tanh"},
    "exact geglu": {"hidden_act": "gelu", "lanes": 3, "ff": 17},
    "squared relu": {"hidden_act": "relu2", "gated_mlp": False, "lanes": 3, "ff": 17},
    "gated squared relu": {"hidden_act": "relu2"},
    "mlp without a gate": {"gated_mlp": False, "ff": 32},
    "quick gelu": {"hidden_act": "quick_gelu", "lanes": 1},
    "norms after": {"norm_after": "lane", "broadcast_delay": 1, "lanes": 3},
    "norms after alone": {"norm_before": False, "norm_after": "lane", "layout": "tp"},
    "norms of lanes after": {"norm_after": "lane", "layout": "desync(2)", "lanes": 3, "replicated_rmsn_scale": False},
    "norms of sums": {"norm_before": False, "norm_after": "sum", "layout": "tp", "lanes": 3},
    "norms of late sums": {"norm_after": "sum", "layout": "ladder", "replicated_rmsn_scale": False},
    "norms after of one lane": {"norm_before": False, "norm_after": "sum", "lanes": 1},
    "softcaps, scaled embedding and scores": {
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 3.0,
        "embedding_multiplier": 3.5,
        "attention_multiplier": 0.6,
    },
    "softcap of a lane head": {"final_logit_softcapping": 3.0, "lm_head_type": "lane", "lanes": 3},
    "softcap of a vocab head": {"final_logit_softcapping": 3.0, "lm_head_type": "vocab_parallel"},
    "layers that slide rotate otherwise": {
        "sliding_window": 5,
        "swa_layers": (0, 2),
        "rope_local_base_freq": 30.0,
        "rope_scaling": RopeScaling(type="linear", factor=3.0),
    },
    "eps and theta": {"norm_eps": 0.1, "rope_theta": 50.0},
    "llama3 rope": {"rope_scaling": RopeScaling(type="llama3", factor=4.0, original_max_position_embeddings=8)},
    "yarn rope": {"rope_scaling": RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=8)},
}


MODELS = {
    "biases and head norms": {"qkv_bias": True, "qk_norm": True, "lanes": 3},
    "biases": {"qkv_bias": True},
    "gated attention with biases and head norms": {"attention_gate": True, "qkv_bias": True, "qk_norm": True},
    "sinks and biases": {"attention_sinks": True, "qkv_bias": True, "out_bias": True, "heads": 4, "kv_heads": 2},
    "sinks of windows": {
        "attention_sinks": True,
        "sliding_window": 3,
        "swa_layers": (0, 2),
        "lanes": 3,
        "layout": "tp",
    },
    "layers without rotation": {"nope_layers": (0, 2), "sliding_window": 5, "swa_layers": (1, 2), "layout": "tp"},
    "norms over all heads": {
        "lanes": 1,
        "heads": 6,
        "kv_heads": 2,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "layout": "tp",
        "norm_before": False,
        "norm_after": "sum",
    },
    "one plus the gains, half of the channels rotate": {
        "norm_plus_one": True,
        "qk_norm": True,
        "head_dim": 8,
        "rotary_dim": 4,
        "layout": "tp",
        "norm_after": "sum",
    },
    "early sums land once": {"broadcast_delay": 1, "early_lands_twice": False},
    "fractional delay": {"layout": "dtp(1.25)"},
}


CLAMPED = {"swiglu_limit": 0.7, "swiglu_alpha": 1.0, "swiglu_plus_one": False}
EXPERTS = {
    "experts": {"num_experts": 5, "layout": "tp"},
    "shares of all experts, an MLP between": {
        "lanes": 3,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 3 * 16,
        "norm_topk_prob": False,
        "mlp_only_layers": (1,),
    },
    "lanes with different routes": {"layout": "desync(2)", "lanes": 3, "num_experts": 7, "hidden_act": "quick_gelu"},
    "one expert": {"num_experts": 3, "num_experts_per_tok": 1, "lanes": 1, "norm_after": "lane"},
    "all experts, clamped": {
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "lanes": 1,
        "moe_intermediate_size": 33,
        **CLAMPED,
    },
}
"""Models whose layers have experts."""


SHARED_EXPERTS = {
    "a shared expert": {"num_experts": 5, "layout": "tp", "lanes": 3, "shared_expert_intermediate_size": 3 * 18},
    "a clamped shared expert with a gate": {
        **CLAMPED,
        "num_experts": 4,
        "layout": "tp",
        "shared_expert_intermediate_size": 2 * 40,
        "shared_expert_gate": True,
        "mlp_only_layers": (1,),
    },
    "a small shared expert": {
        "num_experts": 3,
        "lanes": 1,
        "layout": "desync(2)",
        "hidden_act": "gelu",
        "norm_after": "lane",
        "shared_expert_intermediate_size": 7,
        "shared_expert_gate": True,
    },
}
"""Models whose layers also have an expert that every token uses."""


LATENT = {"layout": "tp", "head_dim": None}
LATENTS = {
    "latent attention": LATENT
    | {
        "layout": "ladder",
        "heads": 3,
        "kv_heads": 3,
        "latent_attention": LatentAttention(
            q_lora_rank=7, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6
        ),
    },
    "latent attention of many heads without a rank of queries": LATENT
    | {
        "lanes": 1,
        "heads": 40,
        "kv_heads": 40,
        "rope_scaling": RopeScaling(
            type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0
        ),
        "latent_attention": LatentAttention(kv_lora_rank=16, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
    },
}
"""Models with latent attention, whose keys and values are computed from one vector per position."""


SIGMOIDS = {
    "a sigmoid router": {
        "num_experts": 5,
        "scoring_func": "sigmoid",
        "router_correction": True,
        "routed_scaling_factor": 2.5,
        "lanes": 3,
        "moe_intermediate_size": 3 * 12,
        "layout": "tp",
    },
    "groups of experts, latents, a shared expert": LATENTS["latent attention"]
    | {
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "scoring_func": "sigmoid",
        "router_correction": True,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": (0,),
        "shared_expert_intermediate_size": 2 * 8,
    },
}
"""Models whose routers choose experts by sigmoids."""


DELTA_NET = {
    "delta net": {
        "lanes": 2,
        "layout": "tp",
        "delta_layers": (0, 2),
        "delta_net": {"key_heads": 4, "value_heads": 8, "key_dim": 8, "value_dim": 16, "conv_kernel": 4},
    },
    "delta net of odd sizes": {
        "lanes": 3,
        "delta_layers": (1,),
        "delta_net": {"key_heads": 3, "value_heads": 9, "key_dim": 5, "value_dim": 19, "conv_kernel": 3},
        "broadcast_delay": 1,
    },
    "delta net beside gated attention": {
        "lanes": 1,
        "attention_gate": True,
        "delta_layers": (0, 1),
        "delta_net": {"key_heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 8, "conv_kernel": 2},
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "shared_expert_gate": True,
    },
}
"""Models with gated DeltaNet in all but at least one of their layers."""


COMPRESSED_SIZES = {
    "ratios": (4, 3, 0),
    "window": 5,
    "q_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "o_groups": 4,
    "o_lora_rank": 3,
    "index_heads": 3,
    "index_head_dim": 5,
    "index_topk": 2,
    "rope_scaling": RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=1.0),
}
"""Fields of CompressedAttention. Layer 0 has overlapping entries and an index, layer 1 entries that do not overlap,
layer 2 no entries.
"""

COMPRESSED = {
    "compressed attention, several streams": {
        "heads": 4,
        "num_key_value_heads": 1,
        "compressed_attention": CompressedAttention(**COMPRESSED_SIZES),
        "residual_streams": ResidualStreams(count=3, iterations=4, eps=1e-3),
        "num_experts": 5,
        "scoring_func": "sqrtsoftplus",
        "router_correction": True,
        "routed_scaling_factor": 1.5,
        "hash_layers": 1,
        **CLAMPED,
        "shared_expert_intermediate_size": 2 * 7,
        "layout": "tp",
    },
    "compressed attention of many heads": {
        "lanes": 1,
        "heads": 40,
        "num_key_value_heads": 1,
        "compressed_attention": CompressedAttention(
            ratios=(2, 0, 7),
            window=3,
            q_lora_rank=6,
            qk_rope_head_dim=2,
            o_groups=5,
            o_lora_rank=16,
            overlap_ratio=2,
            index_heads=33,
            index_head_dim=6,
            index_topk=4,
        ),
        "layout": "tp",
    },
}
"""Models with compressed attention, whose entries are each computed from several positions."""


STREAMS = {
    "several streams": {"layout": "tp", "residual_streams": ResidualStreams(count=3, iterations=4)},
    "several streams, roots and a table": {
        "layout": "tp",
        "residual_streams": ResidualStreams(count=4, iterations=20, eps=1e-3),
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "scoring_func": "sqrtsoftplus",
        "router_correction": True,
        "routed_scaling_factor": 1.5,
        "hash_layers": 1,
        "moe_intermediate_size": 2 * 12,
        "shared_expert_intermediate_size": 2 * 7,
        "lm_head_type": "lane",
    },
}
"""Models with several residual streams and ordinary attention."""


ON_CPU = SHARED_EXPERTS | LATENTS | SIGMOIDS | DELTA_NET | COMPRESSED
"""Models left out of the shared tests of the GPU kernel, whose tests of experts, latents, DeltaNet and compressed
attention have their own models.
"""


NORMED_SUMS = ("caat(0.5)", "kraken", "dtp(1)", "desync(2)")
"""Layouts whose sums no config can normalize: sums of some channels, of several modules, with a delay, and with the
mean of the streams.
"""


SAMPLINGS = [
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.7, top_k=5, seed=2**63),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=1.2, min_p=0.1),
    Sampling(temperature=2.0, top_k=8, top_p=0.5, min_p=0.02, repetition_penalty=1.3, seed=5),  # top_p within the 8
    Sampling(temperature=0.0, repetition_penalty=1.5),
]
