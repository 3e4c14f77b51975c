"""Converts recurrent states between the form of backend xla (laneformer/state.py) and that of the decode kernels
(the `kept` arrays of laneformer/ops.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.config import ModelConfig
from laneformer.custom_calls.plan import Plan
from laneformer.ops import ENTRIES, CompressedKeep, DeltaNet
from laneformer.state import make_cache

Layers = list[dict[str, jax.Array]]


ENTRIES_OF_MODEL = {"positions": "positions", "compressed": "entries", "index_keys": "index_keys"}
"""Arrays of compressed attention: name in the kernels -> name in backend xla. `compressed` and `index_keys` each have a
second array, with the suffix _tail, for the newest positions, whose entries are not complete yet.
"""


def recurrent_ops(plan: Plan) -> dict[int, DeltaNet | CompressedKeep]:
    """The ops, by layer, whose state has one form in the kernels and another one in backend xla."""
    kinds = DeltaNet | CompressedKeep
    return {layer: op for layer, ops in enumerate(plan.ops.layers) for op in ops.ops if isinstance(op, kinds)}


def for_model(plan: Plan, config: ModelConfig, layers: Layers, mesh=None) -> Layers:
    """The kernel's arrays of each layer, for an empty text, in the form of backend xla."""
    ops = recurrent_ops(plan)
    empty = make_cache(config, 1, 1, plan.cache_dtype.name, mesh).layers if ops else layers

    def own(number: int, layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if number not in ops:
            return layer
        return empty[number] | {ENTRIES_OF_MODEL[name]: layer[name] for name in ENTRIES_OF_MODEL if name in layer}

    return [own(number, layer) for number, layer in enumerate(layers)]


def for_kernel(plan: Plan, found: Layers, layers: Layers, length: int) -> Layers:
    """The inverse of `for_model`, after `length` positions.

    found: arrays of each layer in the form of backend xla. layers: the kernel's arrays that `for_model` was given.
    length: for a model with DeltaNet a multiple of ENTRIES.
    """
    ops = recurrent_ops(plan)

    def own(number: int, layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if number not in ops:
            return layer
        if isinstance(ops[number], CompressedKeep):
            return _compressed(layer, jnp.int32(length))
        return layer | _kept(ops[number], layer, jnp.int32(length)) | {"entries": layers[number]["entries"]}

    return [own(number, layer) for number, layer in enumerate(found)]


@jax.jit
def _compressed(of_model: dict[str, jax.Array], length: jax.Array) -> dict[str, jax.Array]:
    """The kernel's arrays of a layer with compressed attention. Those of the newest vectors and gates, [l, 1, 1, t,
    channels], become rings; see `_ring`.
    """
    kept = {name: of_model[own] for name, own in ENTRIES_OF_MODEL.items() if own in of_model}
    for name in ("compressed", "index_keys"):
        if name in kept:
            tail = of_model[f"{ENTRIES_OF_MODEL[name]}_tail"]
            kept["base"] = jnp.full((tail.shape[0], 1, 1, 1), length)
            kept[f"{name}_tail"] = _ring(tail, length)
    return kept


def _ring(newest: jax.Array, length: jax.Array) -> jax.Array:
    """The t positions before `length` as a ring, [..., t + ENTRIES, channels]: position p is at p % (t + ENTRIES).
    newest: [..., t, channels].
    """
    before = newest.shape[-2]
    ring = jnp.zeros((*newest.shape[:-2], before + ENTRIES, newest.shape[-1]), newest.dtype)
    return ring.at[..., (length - before + jnp.arange(before)) % (before + ENTRIES), :].set(newest)


@partial(jax.jit, static_argnums=0)
def _kept(op: DeltaNet, of_model: dict[str, jax.Array], length: jax.Array) -> dict[str, jax.Array]:
    """The kernel's arrays of a DeltaNet layer except its entries: `base`, `inputs` [l, 1, 1, heads, ring, channels of a
    head] from [l, 1, 1, t, channels], and `state` [l, 1, 1, heads, tiles, key_dim, 16] from [l, 1, 1, heads, ratio,
    key_dim, value_dim].
    """
    inputs, state = of_model["inputs"], of_model["state"]
    lanes = inputs.shape[0]
    ends = np.cumsum([op.key_heads * op.key_dim] * 2)
    parts = [part.reshape(*inputs.shape[:4], op.key_heads, -1) for part in jnp.split(inputs, ends, -1)]
    by_head = jnp.moveaxis(jnp.concatenate(parts, -1), 3, 4)
    state = jnp.pad(state, [(0, 0)] * 6 + [(0, 16 * op.head_tiles - op.value_dim)])
    tiles = jnp.moveaxis(state.reshape(*state.shape[:6], op.head_tiles, 16), 6, 5)
    tiles = tiles.reshape(*tiles.shape[:4], op.ratio * op.head_tiles, op.key_dim, 16)
    return {"base": jnp.full((lanes, 1, 1, op.key_heads), length), "inputs": _ring(by_head, length), "state": tiles}
