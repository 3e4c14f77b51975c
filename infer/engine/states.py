"""Recurrent states between backend xla's form (laneformer/state.py) and that of the decode kernels (`kept_of` in
custom_calls/plan.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from custom_calls.plan import ENTRIES, Plan
from laneformer import ModelConfig
from laneformer.ops import DeltaNet
from laneformer.state import make_cache

Layers = list[dict[str, jax.Array]]


def recurrent_ops(plan: Plan) -> dict[int, DeltaNet]:
    """By layer."""
    return {layer: op for layer, ops in enumerate(plan.ops.layers) for op in ops.ops if isinstance(op, DeltaNet)}


def for_model(plan: Plan, config: ModelConfig, layers: Layers, mesh=None) -> Layers:
    """What the layers of a kernel keep of an empty text, as backend xla's."""
    ops = recurrent_ops(plan)
    empty = make_cache(config, 1, 1, plan.cache_dtype.name, mesh).layers if ops else layers
    return [empty[number] if number in ops else layer for number, layer in enumerate(layers)]


def for_kernel(plan: Plan, found: Layers, layers: Layers, length: int) -> Layers:
    """The inverse, of `length` positions, a multiple of ENTRIES. layers: those of a kernel that were given before."""
    ops = recurrent_ops(plan)
    return [
        layer | _kept(ops[number], layer, jnp.int32(length)) | {"entries": layers[number]["entries"]}
        if number in ops
        else layer
        for number, layer in enumerate(found)
    ]


@partial(jax.jit, static_argnums=0)
def _kept(op: DeltaNet, of_model: dict[str, jax.Array], length: jax.Array) -> dict[str, jax.Array]:
    """What a layer keeps, without entries: inputs [l, 1, 1, heads, ring, channels of a head] from [l, 1, 1, t,
    channels], and state [l, 1, 1, heads, tiles, key_dim, 16] from [l, 1, 1, heads, ratio, key_dim, value_dim].
    """
    inputs, state = of_model["inputs"], of_model["state"]
    lanes, before = inputs.shape[0], inputs.shape[3]
    ends = np.cumsum([op.key_heads * op.key_dim] * 2)
    parts = [part.reshape(*inputs.shape[:4], op.key_heads, -1) for part in jnp.split(inputs, ends, -1)]
    by_head = jnp.moveaxis(jnp.concatenate(parts, -1), 3, 4)
    ring = jnp.zeros((*by_head.shape[:4], before + ENTRIES, by_head.shape[-1]), inputs.dtype)
    ring = ring.at[..., (length - before + jnp.arange(before)) % (before + ENTRIES), :].set(by_head)
    state = jnp.pad(state, [(0, 0)] * 6 + [(0, 16 * op.head_tiles - op.value_dim)])
    tiles = jnp.moveaxis(state.reshape(*state.shape[:6], op.head_tiles, 16), 6, 5)
    tiles = tiles.reshape(*tiles.shape[:4], op.ratio * op.head_tiles, op.key_dim, 16)
    return {"base": jnp.full((lanes, 1, 1, op.key_heads), length), "inputs": ring, "state": tiles}
