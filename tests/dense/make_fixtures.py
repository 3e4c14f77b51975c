"""Writes the folders next to this file, and two of tests/moe: tiny random models and what Hugging Face transformers
computes for them.

Not part of the test run. It needs torch and transformers (the versions used are in README.md):

    python tests/dense/make_fixtures.py [FOLDER ...]

Every parameter is random, norm gains and biases too, so that a swapped or forgotten one shows in the logits.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

HERE = Path(__file__).parent
SMALLEST_MARGIN = 0.02  # gap between the two best logits under which rounding could change a greedy token

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,  # so small that the 4 pairs meet all three cases: kept, mixed, divided
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
# Sequences have 40 tokens: windows of these models leave most of them out of sight.
SMALL = SHAPE | {"hidden_size": 32, "head_dim": 4, "intermediate_size": 48, "vocab_size": 64}
WIDE_HEADS = SMALL | {"hidden_size": 24, "head_dim": 6}  # 8 heads of 6 are not 24
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
QWEN2_WINDOW = {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}


def plain_rope(theta):
    """rope_parameters without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


def without(rope, *names):
    """The rope settings less some of them, as older configs hold them."""
    return {key: value for key, value in rope.items() if key not in names}


# name -> (config class, its fields, arguments of save_pretrained, old spelling of the rotary fields or None)
MODELS = {
    "llama2": (
        LlamaConfig,
        {
            **SHAPE,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_parameters": plain_rope(1e4),
        },
        {"max_shard_size": "120KB"},
        None,
    ),
    "llama3": (
        LlamaConfig,
        {**SHAPE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE},
        {},
        {"rope_theta": 100.0, "rope_scaling": without(LLAMA3_ROPE, "rope_theta")},
    ),
    "llama_yarn": (
        LlamaConfig,
        {**SHAPE, "hidden_size": 48, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": YARN_ROPE},
        {},
        {"rope_theta": 100.0, "rope_scaling": without(YARN_ROPE, "rope_theta")},
    ),
    "llama_linear": (
        LlamaConfig,
        {
            **SHAPE,
            "hidden_size": 48,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": LINEAR_ROPE,
        },
        {},
        {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "qwen2": (
        Qwen2Config,
        {**without(SHAPE, "head_dim"), **QWEN2_WINDOW, "tie_word_embeddings": True, "rope_parameters": plain_rope(1e6)},
        {},
        {"rope_theta": 1e6, **QWEN2_WINDOW},
    ),
    "qwen3": (
        Qwen3Config,
        {**SHAPE, "hidden_size": 48, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": plain_rope(1e6)},
        {},
        None,
    ),
    "arcee": (ArceeConfig, {**SMALL, "tie_word_embeddings": False, "rope_parameters": plain_rope(1e4)}, {}, None),
    "llama_relu2": (
        LlamaConfig,
        {**SMALL, "hidden_act": "relu2", "tie_word_embeddings": False, "rope_parameters": plain_rope(1e4)},
        {},
        None,
    ),
    "qwen3_gelu": (
        Qwen3Config,
        {**SMALL, "hidden_act": "gelu", "tie_word_embeddings": False, "rope_parameters": plain_rope(1e6)},
        {},
        None,
    ),
    "qwen2_gelu_tanh": (
        Qwen2Config,
        {
            **without(SMALL, "head_dim"),
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        None,
    ),
    "mistral": (
        MistralConfig,
        MixtralConfig,
        {**WIDE_HEADS, "sliding_window": 7, "tie_word_embeddings": False, "rope_parameters": plain_rope(1e4)},
        {},
        {"rope_theta": 1e4},
    ),
    "ministral": (
        MinistralConfig,
        {
            **WIDE_HEADS,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": plain_rope(1e5),
        },
        {},
        None,
    ),
    "qwen2_window": (
        Qwen2Config,
        {
            **without(SMALL, "head_dim"),
            **WINDOW,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        {"rope_theta": 1e6},
    ),
    "qwen3_window": (
        Qwen3Config,
        {
            **WIDE_HEADS,
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        None,
    ),
    "smollm3": (
        SmolLM3Config,
        {
            **without(SMALL, "head_dim"),
            **WINDOW,
            "no_rope_layers": [1, 1],
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(2e6),
        },
        {},
        None,
    ),
    "smollm3_nope": (
        SmolLM3Config,
        {
            **without(SMALL, "head_dim"),
            "no_rope_layers": [1, 0],
            "tie_word_embeddings": True,
            "rope_parameters": plain_rope(2e6),
        },
        {},
        None,
    ),
    "olmo2": (
        Olmo2Config,
        {**without(SMALL, "head_dim"), "tie_word_embeddings": False, "rope_parameters": plain_rope(5e5)},
        {},
        None,
    ),
    "exaone4": (
        Exaone4Config,
        {
            **without(SMALL, "head_dim"),
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        None,
    ),
    "gemma": (GemmaConfig, {**SMALL, "head_dim": 8, "rope_parameters": plain_rope(1e4)}, {}, None),
    "gemma2": (
        Gemma2Config,
        {
            **SMALL,
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e4),
        },
        {},
        {"rope_theta": 1e4, "cache_implementation": "hybrid"},
    ),
    "gemma3_linear": (
        Gemma3TextConfig,
        {
            **SMALL,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 5,
            "tie_word_embeddings": False,
            "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": plain_rope(30.0)},
        },
        {},
        None,
    ),
}
MOE = {  # in tests/moe
    "mixtral": (
        MixtralConfig,
        {
            **WIDE_HEADS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        None,
    ),
    "qwen3_moe_mixed": (
        Qwen3MoeConfig,
        {
            **SMALL,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,  # an MLP in the first layer
            "tie_word_embeddings": False,
            "rope_parameters": plain_rope(1e6),
        },
        {},
        None,
    ),
}
MODELS |= MOE


def randomise(model, config):
    """Draws every parameter again: matrices scaled by their inputs, gains around 1, biases around 0."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            value = 0.5 * noise
        elif "embed_tokens" in name:
            value = (2 / config.hidden_size**0.5 if config.tie_word_embeddings else 1.0) * noise
        else:
            wide = 2.0 if "lm_head" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            value = wide / parameter.shape[1] ** 0.5 * noise
        with torch.no_grad():
            parameter.copy_(value)


@torch.no_grad()
def compute(model, vocab):
    """-> what io.npz holds: logits of two random rows, and a greedy continuation without a cache."""
    ids = torch.randint(vocab, (2, 40))
    logits = model(ids, use_cache=False).logits
    sequence, margins = ids[:1, :8], []
    for _ in range(12):
        best = model(sequence, use_cache=False).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        sequence = torch.cat([sequence, best.indices[:1][None]], dim=1)
    return {
        "input_ids": ids.numpy(),
        "logits": logits.numpy(),
        "greedy_prompt": sequence[0, :8].numpy(),
        "greedy_ids": sequence[0, 8:].numpy(),
        "greedy_margin": np.array(margins, np.float32),
    }


def write(name):
    """Tries seeds until the greedy tokens are clear and various, then writes the folder and reads it back."""
    config_class, fields, save_arguments, old_spelling = MODELS[name]
    config = config_class(**fields)
    for seed in range(1000):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        randomise(model, config)
        io = compute(model, config.vocab_size)
        if io["greedy_margin"].min() >= SMALLEST_MARGIN and len(set(io["greedy_ids"].tolist())) >= 8:
            break
    else:
        sys.exit(f"{name}: no seed gives clear greedy tokens")

    folder = (HERE.parent / "moe" if name in MOE else HERE) / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **save_arguments)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "io.npz", **io)
    check(folder, io, AutoConfig.from_pretrained(folder))

    if old_spelling:
        old = without(json.loads((folder / "config.json").read_text()), "rope_parameters", "dtype", "layer_types")
        old |= {"torch_dtype": "float32", **old_spelling}
        (folder / "config_old_style.json").write_text(json.dumps(old, indent=2, sort_keys=True) + "\n")
        check(folder, io, AutoConfig.from_pretrained(folder / "config_old_style.json"))
    if sliding(config):
        check_that_windows_matter(folder, io)
    print(f"{name}: seed {seed}, logits std {io['logits'].std():.2f}, smallest margin {io['greedy_margin'].min():.3f}")


@torch.no_grad()
def check(folder, io, config):
    """The saved folder, read under `config`, gives the saved logits."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    np.testing.assert_allclose(model(torch.tensor(io["input_ids"])).logits.numpy(), io["logits"], atol=1e-5)


def sliding(config):
    """Whether any layer of the model has a window."""
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) is not None and "sliding_attention" in types


@torch.no_grad()
def check_that_windows_matter(folder, io):
    """Every position from the window on has other logits under a window that no context exceeds."""
    config = AutoConfig.from_pretrained(folder)
    window, config.sliding_window = config.sliding_window, config.max_position_embeddings
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    difference = np.abs(model(torch.tensor(io["input_ids"])).logits.numpy() - io["logits"]).max((0, 2))
    assert difference[:window].max() < 1e-5 and difference[window:].min() > 1e-2, difference


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        write(name)
