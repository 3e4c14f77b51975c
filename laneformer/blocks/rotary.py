"""Rotary position embedding (Su et al., arXiv 2104.09864) on interleaved pairs, and its published scalings to longer
contexts.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.config import ModelConfig, RopeScaling, RotaryOptions
from laneformer.ops import Rotary

Tables = tuple[jax.Array, jax.Array]
"""cos and sin of each position's angles, float32 [s, pairs of channels]."""
Rotations = Mapping[RotaryOptions, Tables]
"""The tables of all rotations of a model."""


def rotary_frequencies(options: RotaryOptions) -> tuple[np.ndarray, float]:
    """The frequency of each pair of rotated channels in radians per position, float32 [channels / 2], and the factor on
    cos and sin.
    """
    half, theta, scaling = options.channels // 2, options.theta, options.scaling
    frequencies: np.ndarray = theta ** (-np.arange(half, dtype=np.float64) / half)
    factor = 1.0
    if scaling is not None:
        frequencies = _STRETCH[scaling.type](frequencies, scaling, theta)
        factor = _yarn_attention_factor(scaling) if scaling.type == "yarn" else 1.0
    return frequencies.astype(np.float32), factor


def _linear(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Divides the frequencies of long wavelengths by the factor and keeps those of short ones. Between them the result
    is linear in the turns per original context.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    blended: np.ndarray = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    return blended


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """Like llama3, but linear in the index of the pair (arXiv 2309.00071, section 3.2)."""

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return len(frequencies) * math.log(wavelength) / math.log(theta)

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    stretched = np.clip((np.arange(len(frequencies)) - low) / ((high - low) or 1e-3), 0.0, 1.0)
    blended: np.ndarray = (1 - stretched) * frequencies + stretched * frequencies / scaling.factor
    return blended


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.temperature(scaling.mscale) / scaling.temperature(scaling.mscale_all_dim)
    return scaling.temperature(1.0)


_STRETCH = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def rotations(config: ModelConfig, positions_s: jax.Array) -> Rotations:
    """The tables of all rotations of a model at these positions."""
    kinds = dict.fromkeys(layer.attention.rotary for layer in config.layers)
    return {kind: rotary_tables(kind, positions_s) for kind in kinds if kind}


def rotary_tables(options: RotaryOptions, positions_s: jax.Array) -> Tables:
    """cos and sin of each position's angles, float32 [s, channels / 2]."""
    frequencies, factor = rotary_frequencies(options)
    angles = positions_s.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotary_op(options: RotaryOptions, channels: int | None = None) -> Rotary:
    """The rotation as an op refers to it. channels: channels of the op's heads, of which the last may not rotate; by
    default those that rotate.
    """
    frequencies, factor = rotary_frequencies(options)
    still = (channels or options.channels) // 2 - len(frequencies)
    return Rotary((*frequencies.tolist(), *(0.0,) * still), factor)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Rotates the pairs (x[2i], x[2i+1]) of x [..., s, heads, head_dim] by the angles of their positions, in float32.
    The tables [s, pairs] cover the first 2 * pairs channels; the others are unchanged.
    """
    cos, sin = (table[:, None, :] for table in tables)
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], tables), x[..., rotated:]], -1)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_last(x: jax.Array, tables: Tables) -> jax.Array:
    """Like `rotate`, but the tables cover the last channels instead of the first."""
    still = x.shape[-1] - 2 * tables[0].shape[-1]
    return jnp.concatenate([x[..., :still], rotate(x[..., still:], tables)], -1)
