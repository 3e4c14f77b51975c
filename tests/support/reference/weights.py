"""Random weights of the reference's models."""

import math

import numpy as np

from tests.support.reference.model import head_size, lanes_of, norm_after_name


def random_weights(config, seed):
    """Random float32 weights with the names and shapes that `config` requires, scaled so that logits differ by a few
    units.
    """
    rng = np.random.default_rng(seed)
    D, V, F, L = config["hidden_size"], config["vocab_size"], config["intermediate_size"], lanes_of(config)
    q_rows = config["num_attention_heads"] * head_size(config) // L
    kv_rows = config["num_key_value_heads"] * head_size(config) // L
    assert config["num_key_value_heads"] % L == 0, "num_key_value_heads must be a multiple of num_lanes"
    shared = config.get("replicated_rmsn_scale", True)
    tied = config.get("tie_word_embeddings", False)
    kind = config.get("lm_head_type") or "replicate"
    weights = {}

    def normal(name, std, *shape):
        weights[name] = (std * rng.standard_normal(shape)).astype(np.float32)

    def norm(name, shared):
        shape = (D,) if shared else (L, D)
        weights[f"{name}.weight" if shared else f"{name}.scale"] = (1 + 0.3 * rng.standard_normal(shape)).astype(
            np.float32
        )

    normal("model.tok_embeddings.weight", 2 / math.sqrt(D) if tied else 1.0, V, D)
    for n in range(config["num_hidden_layers"]):
        name = f"model.layers.{n}"
        if config.get("norm_before", True):
            norm(f"{name}.attention_norm", shared)
        normal(f"{name}.attention.wq.weight", 1.5 / math.sqrt(D), L, q_rows, D)
        if config.get("attention_gate"):
            normal(f"{name}.attention.wg.weight", 1.5 / math.sqrt(D), L, q_rows, D)
        normal(f"{name}.attention.wk.weight", 1.5 / math.sqrt(D), L, kv_rows, D)
        normal(f"{name}.attention.wv.weight", 1 / math.sqrt(D), L, kv_rows, D)
        normal(f"{name}.attention.wo.weight", 1 / math.sqrt(L * q_rows), L, D, q_rows)
        if config.get("out_bias"):
            normal(f"{name}.attention.wo.bias", 0.5, L, D)
        if config.get("attention_sinks"):
            normal(f"{name}.attention.sinks", 1.0, L, config["num_attention_heads"] // L)
        if config.get("norm_before", True):
            norm(f"{name}.ffn_norm", shared)
        if config.get("norm_after"):
            for m in (2 * n, 2 * n + 1):
                norm(norm_after_name(m), shared or config["norm_after"] == "sum")
        normal(f"{name}.feed_forward.w1.weight", 1 / math.sqrt(D), L, F // L, D)
        if config.get("gated_mlp", True):
            normal(f"{name}.feed_forward.w3.weight", 1 / math.sqrt(D), L, F // L, D)
        normal(f"{name}.feed_forward.w2.weight", 1 / math.sqrt(F), L, D, F // L)
    norm("model.norm", shared or config.get("pre_norm_lane_agg", False))
    if not tied and kind == "replicate":
        normal("lm_head.weight", 2 / math.sqrt(D), V, D)
    elif not tied and kind == "lane":
        normal("lm_head.linear.weight", 2 / math.sqrt(L * D), V, L * D)
    elif not tied:
        normal("lm_head.weight", 2 / math.sqrt(D), L, V // L, D)
    return weights
