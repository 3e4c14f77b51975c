"""A tiny dense Llama, its initial weights, 100 batches and recipes, in NumPy alone: the common start of this project's
trainer and of the independent trainer in torch_trainer.py.
"""

from dataclasses import dataclass

import numpy as np

STEPS, BATCH, LENGTH = 100, 8, 32
CONFIG = {  # config.json of a Llama
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Recipe:
    """An optimizer whose learning rate warms up linearly, stays constant and decays linearly. The fields are named as
    in OptimizerConfig.
    """

    kind: str = "adamw"
    learning_rate: float = 4e-3
    warmup_steps: int = 10
    decay_fraction: float = 0.3
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Largest norm of the gradient. Some of the 100 gradients have larger norms, some smaller ones."""


def initial_weights() -> dict[str, np.ndarray]:
    """Tensors of the checkpoint by name, float32. Gains are near 1, so that a wrong decay of them shows."""
    c, random = CONFIG, np.random.default_rng(7)
    d, f, kv = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * c["num_key_value_heads"]
    kv //= c["num_attention_heads"]
    shapes = {"model.embed_tokens": (c["vocab_size"], d), "model.norm": (d,), "lm_head": (c["vocab_size"], d)}
    for n in range(c["num_hidden_layers"]):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        layer |= {f"self_attn.{name}_proj": (rows, d) for name, rows in (("q", d), ("k", kv), ("v", kv), ("o", d))}
        layer |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = random.standard_normal(shape) * (0.1 if len(shape) == 1 else 0.05)
        return np.asarray(values + (len(shape) == 1), np.float32)

    return {f"{name}.weight": draw(shape) for name, shape in shapes.items()}


def batch(step: int) -> np.ndarray:
    """Token ids of a step, int32 [8, 33]; steps count from 0. Each row counts up by its own stride, and one token in
    eight is noise.
    """
    random = np.random.default_rng(1000 + step)
    strides, starts = random.integers(1, 5, (BATCH, 1)), random.integers(0, 63, (BATCH, 1))
    ids = (starts + strides * np.arange(LENGTH + 1)) % 63 + 1
    noise = random.integers(1, 64, ids.shape)
    return np.where(random.random(ids.shape) < 1 / 8, noise, ids).astype(np.int32)
