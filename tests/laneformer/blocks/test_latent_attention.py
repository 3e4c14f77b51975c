"""Latent attention: both forms and gradients against one written out head by head, and configs that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import ConfigError, ModelConfig, Precision
from laneformer.blocks.block import Memory
from laneformer.blocks.latent_attention import LatentAttention
from laneformer.config import LatentAttention as Options
from laneformer.config import LatentAttentionOptions, RopeScaling, RotaryOptions
from laneformer.decoder import decoder_ops
from laneformer.ops import without_kernel
from laneformer.weights import attention_flops_per_token, kv_bytes_per_token

LANES, HEADS, LENGTH = 2, 3, 20
SIZES = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 7}
POSITIONS = np.arange(LENGTH)[:, None] * [1.0, 0.3, 0.1]
TABLES = np.float32(np.cos(POSITIONS)), np.float32(np.sin(POSITIONS))
ROTARY = RotaryOptions(6, 1.0)  # stands for these tables


def options(rank: int | None) -> LatentAttentionOptions:
    sizes = {"hidden_size": 8, "num_lanes": LANES, "heads": HEADS, **SIZES}
    return LatentAttentionOptions(scale=0.4, q_lora_rank=rank, rotary=ROTARY, **sizes)


def weights_of(own: LatentAttentionOptions) -> dict[str, np.ndarray]:
    rng, table = np.random.default_rng(0), LatentAttention.table(own, "at")
    return {path.removeprefix("at."): rng.normal(size=weight.shape) / 2 for path, weight in table.items()}


def reference(xp, own: LatentAttentionOptions, w: dict, h_lbsd, segments_bs=None):
    """The output [l, b, s, d], head by head. xp: numpy, which computes in float64, or jax.numpy."""

    def norm(x, gain):
        return x / xp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

    def turn(x):
        cos, sin = xp.cos(POSITIONS), xp.sin(POSITIONS)
        even, odd = x[..., 0::2], x[..., 1::2]
        return xp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    seen, lanes = xp.tril(xp.ones((LENGTH, LENGTH), bool)), []
    if segments_bs is not None:
        seen = seen & (segments_bs[:, :, None] == segments_bs[:, None])
    for lane, h in enumerate(h_lbsd):
        if own.q_lora_rank is None:
            queries = h @ w["wq"][lane].T
        else:
            queries = norm(h @ w["wq_a"].T, w["q_norm"]) @ w["wq_b"][lane].T
        x, z = (h @ w["wkv_a"].T)[..., :5], turn((h @ w["wkv_a"].T)[..., 5:])
        both, out = norm(x, w["kv_norm"]) @ w["wkv_b"][lane].T, []
        for head in range(HEADS):
            q, kv = queries[..., 10 * head : 10 * head + 10], both[..., 11 * head : 11 * head + 11]
            scores = q[..., :4] @ kv[..., :4].swapaxes(1, 2) + turn(q[..., 4:]) @ z.swapaxes(1, 2)
            p = xp.where(seen, xp.exp(own.scale * scores), 0)
            out.append(p / p.sum(-1, keepdims=True) @ kv[..., 4:])
        lanes.append(xp.concatenate(out, -1) @ w["wo"][lane].T)
    return xp.stack(lanes)


def block(w: dict, own: LatentAttentionOptions) -> LatentAttention:
    return LatentAttention({name: jnp.asarray(array, "float32") for name, array in w.items()}, own, Precision())


H = np.random.default_rng(1).normal(size=(LANES, 2, LENGTH, 8))


@pytest.mark.parametrize("rank", [None, 9])
def test_both_forms_equal_float64(rank):
    """All positions at once, and with a cache in parts of 1 and 9 positions."""
    own = options(rank)
    w = weights_of(own)
    expected = reference(np, own, w, H)
    attention = block({name: jax.device_put(np.float32(array)) for name, array in w.items()}, own)
    call = jax.jit(lambda attention, *args: attention(*args))
    found, kept = call(attention, np.float32(H), {ROTARY: TABLES})
    assert kept == {}
    np.testing.assert_allclose(found, expected, atol=3e-5)
    [kept] = LatentAttention.state(own)
    assert (kept.name, kept.shape) == ("latents", (11,))
    cache, start = {"latents": np.zeros((LANES, 2, 32, 11), np.float32)}, 0
    for part in (1, 9, 9, 1):
        rows = slice(start, start + part)
        tables = [table[rows] for table in TABLES]
        found, cache = call(attention, np.float32(H[:, :, rows]), {ROTARY: tables}, Memory(cache, np.int32(start)))
        np.testing.assert_allclose(found, expected[:, :, rows], atol=3e-5)
        start += part


def test_gradients_equal_the_reference():
    """Gradients of every weight, with several documents."""
    own, segments_bs = options(9), np.int32(np.arange(LENGTH) > [[8], [3]])
    w = {name: jax.device_put(np.float32(array)) for name, array in weights_of(own).items()}

    def ours(w):
        return jnp.sin(block(w, own)(jnp.float32(H), {ROTARY: TABLES}, segments_bs=segments_bs)[0]).mean()

    def theirs(w):
        return jnp.sin(reference(jnp, own, w, jnp.float32(H), segments_bs)).mean()

    found, expected = (jax.jit(jax.grad(f))(w) for f in (ours, theirs))
    for name in w:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=3e-6, err_msg=name)


USUAL = {"vocab_size": 16, "hidden_size": 10, "intermediate_size": 12, "num_hidden_layers": 2, "layout": "tp"}
USUAL |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def config(**changes) -> ModelConfig:
    return ModelConfig(**USUAL | {"latent_attention": Options(q_lora_rank=3, **SIZES)} | changes)


def test_scale_bytes_and_flops_follow_the_config():
    yarn = RopeScaling(type="yarn", factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
    first = config(rope_scaling=yarn, num_lanes=2).layers[0].attention
    assert (first.heads, first.latent_norm_eps) == (2, 1e-6)
    assert first.scale == pytest.approx(10**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    for scaling in (None, RopeScaling(type="linear", factor=4.0), dataclasses.replace(yarn, mscale_all_dim=None)):
        assert config(rope_scaling=scaling).layers[0].attention.scale == pytest.approx(10**-0.5)
    assert kv_bytes_per_token(config(), 3, 2) == 2 * 2 * 4 * 11, "four entries of 11 values in both layers"
    assert kv_bytes_per_token(config(num_lanes=2), 3, 2) == 2 * 2 * 2 * 4 * 11, "a copy in each lane"
    assert attention_flops_per_token(config(), 3) == 2 * 2 * 4 * (10 + 7) * 2, "two keys on average"
    assert without_kernel(decoder_ops(config())) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 with latent_attention"),
        ({"qk_norm": True}, "qk_norm = True is an option of grouped-query attention"),
        ({"sliding_window": 4}, "sliding_window = 4 is an option"),
        ({"head_dim": 16}, "head_dim = 16 is an option"),
        ({"attention_gate": True}, "attention_gate = True is an option"),
        ({"num_lanes": 3}, "num_lanes = 3 does not divide"),
        ({"latent_attention": {"kv_lora_rank": 5}}, "give q_lora_rank, kv_lora_rank"),
    ],
)
def test_wrong_configs_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("name", "value"), [("q_lora_rank", 0), ("kv_lora_rank", 2**17), ("qk_rope_head_dim", 3), ("latent_norm_eps", 0.0)]
)
def test_wrong_sizes_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        Options(**SIZES | {name: value})
