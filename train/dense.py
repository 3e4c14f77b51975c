"""A plain dense Llama in Flax NNX, as a user of Flax would write it: the baseline of `python -m train.bench`."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from laneformer.config import ModelConfig

INITIAL = nnx.initializers.normal(0.02)


class DenseBlock(nnx.Module):
    """Attention and SwiGLU, each after its norm (pre-norm)."""

    def __init__(self, config: ModelConfig, dtype: str, rngs: nnx.Rngs):
        d, f, self.head_dim = config.hidden_size, config.intermediate_size, config.head_size
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, kernel_init=INITIAL, rngs=rngs)

        self.attention_norm, self.mlp_norm = (
            nnx.RMSNorm(d, epsilon=config.norm_eps, dtype=dtype, rngs=rngs) for _ in range(2)
        )
        self.q, self.k, self.v, self.o = linear(d, heads), linear(d, kv_heads), linear(d, kv_heads), linear(heads, d)
        self.gate, self.up, self.down = linear(d, f), linear(d, f), linear(f, d)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        h = self.attention_norm(x)
        q, k, v = (w(h).reshape(*h.shape[:2], -1, self.head_dim) for w in (self.q, self.k, self.v))
        library: Literal["cudnn", "xla"] = "xla"
        if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
            library = "cudnn"
        a = jax.nn.dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True, implementation=library
        )
        x = x + self.o(a.reshape(*h.shape[:2], -1))
        h = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class DenseModel(nnx.Module):
    """Logits float32 [b, s, v] of ids [b, s]; float32 weights, products in `dtype`."""

    def __init__(self, config: ModelConfig, dtype: str, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, dtype=dtype, embedding_init=INITIAL, rngs=rngs)
        self.blocks = nnx.List([DenseBlock(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, kernel_init=INITIAL, rngs=rngs
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        e = self.config.head_size
        angles = jnp.arange(ids.shape[1])[:, None] / self.config.rope_theta ** (jnp.arange(0, e, 2) / e)
        rotary = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x)).astype(jnp.float32)


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the two halves of each head [b, s, h, k] as pairs (RoPE, arXiv 2104.09864)."""
    cos, sin = rotary
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def dense_step(
    config: ModelConfig, dtype: str, learning_rate: float, clip_norm: float
) -> Callable[[jax.Array], jax.Array]:
    """A function that does one AdamW step on ids [b, s + 1] and returns the mean loss; it holds model and optimizer."""
    model = DenseModel(config, dtype, nnx.Rngs(0))
    transformation = optax.chain(
        optax.clip_by_global_norm(clip_norm), optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model: DenseModel, optimizer: nnx.Optimizer, ids: jax.Array) -> jax.Array:
        def loss_of(model: DenseModel) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return lambda ids: step(model, optimizer, ids)
