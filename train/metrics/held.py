"""Measures how many weights the tables of bf12 cover (docs/bf12.md); the gain of bf12 in decoding depends on it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from laneformer.config import ModelConfig
from laneformer.decoder import decoder_ops
from laneformer.formats import BF12_MOST_EXCEPTIONS, bf12_table


class Bf12Statistic:
    """Counts the weights that, rounded to bfloat16, are exceptions of bf12.

    The matrices of one product share a table, as in the kernels.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None):
        ops = decoder_ops(config)
        products = (product for layer in ops.layers for product in layer.products)
        weights = (tuple(matrix.weight for matrix in product.matrices) for product in products)
        groups = dict.fromkeys(tuple(weight.cut_from or weight.path for weight in group) for group in weights)
        self.groups = (*groups, (ops.head.weight.path,))
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def __call__(self, params: dict[str, jax.Array]) -> dict[str, float]:
        """Counts the exceptions in `params`, weights by path. Every process of a job must call it.

        exceptions: their share of the weights of all products. most: the largest share in one product. left: number of
        products with too many exceptions for bf12.
        """
        found = {path: _counts(params[path], self._everywhere) for group in self.groups for path in group}
        found = jax.device_get(found)
        counts = np.array([sum(found[path].astype(np.int64) for path in group) for group in self.groups])
        sizes = counts.sum(1)
        listed = sizes - np.array([row[bf12_table(row)].sum() for row in counts])
        return {
            "exceptions": float(listed.sum() / sizes.sum()),
            "most": float((listed / sizes).max()),
            "left": int((listed > BF12_MOST_EXCEPTIONS * sizes).sum()),
        }


@partial(jax.jit, static_argnames="everywhere")
def _counts(weight: jax.Array, everywhere: NamedSharding | None) -> jax.Array:
    """Number of weights for each value of e >> 1, e being the exponent's bits: int32 [128]."""
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.bfloat16), jnp.uint16)
    counts = jnp.bincount((bits.reshape(-1) >> 8 & 0x7F).astype(jnp.int32), length=128)
    return counts if everywhere is None else jax.lax.with_sharding_constraint(counts, everywhere)
