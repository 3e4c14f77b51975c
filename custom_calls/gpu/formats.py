"""The formats of weights in the GPU kernel: how the vectors of a product's step, each the weights of 16 bytes of every
thread in the plan's dtype, become lines of 16 bytes. custom_calls/gpu/kernel/formats.h has a struct for each format,
which reads what is made here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from custom_calls.plan import Dtype, Plan
from laneformer.formats import BF12_END, BF12_MOST_EXCEPTIONS, BF12_TABLE, FORMATS, bf12_table

UNIT_SHIFT, THREAD_SHIFT, SLOT_SHIFT = 19, 13, 8
"""Places in an exception's word, as in gpu/kernel/formats.h: unit, thread, slot, high byte."""
MOST_UNITS = (1 << 32 - UNIT_SHIFT) - 1
"""Units of a warp in a product."""
_LISTED = 1 << 24  # marks an exception while a product is packed


@dataclass(frozen=True)
class Plain:
    """Weights as they are: a vector is a line."""

    dtype: Dtype

    @property
    def struct(self) -> str:
        """Its struct in formats.h."""
        return f"Plain<k{self.dtype.name.title()}>"

    @property
    def per(self) -> int:
        """Weights of a vector."""
        return 128 // FORMATS[self.dtype.name].bits

    def lines(self, vectors: int) -> int:
        """Lines of the vectors of a step."""
        return vectors

    def units(self, vectors: int) -> int:
        """Units that a step's vectors fill."""
        return 0

    def cluster(self, group: int) -> int:
        """Neighbours, of the threads of a row, that have the columns of a block side by side."""
        return group

    def lines_beside(self, vectors: int, steps: int, cluster: int) -> int:
        """Lines of a product beside those of its steps."""
        return 0

    def encode(self, matrix: jax.Array, table: jax.Array | None) -> jax.Array:
        """The matrix as unsigned integers, ready to be dealt to threads; zeros are padding."""
        return jax.lax.bitcast_convert_type(matrix, f"uint{8 * matrix.dtype.itemsize}")

    def pack(self, steps: jax.Array) -> jax.Array:
        """Uint32 [..., steps, lines, threads, 4] of what `encode` made, dealt [..., steps, vectors, threads, per]."""
        return steps if steps.dtype == jnp.uint32 else joined(steps, 2)

    def listed(self, steps: jax.Array) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Bf12:
    """bfloat16 in 12 bits (laneformer/formats.py): units of four vectors in three lines. What fills no unit of a step
    stays bfloat16.

    A unit has a line of codes, a word for each vector, and two of low bytes, two words for each. `places`: the nibble
    of a word that has the index of each weight of the vector, and the one whose bit 3 is its sign.
    """

    places: tuple[tuple[int, ...], tuple[int, ...]]

    struct, per = "Bf12", 8
    vectors, unit_lines = 4, 3

    @classmethod
    def of(cls, selector_bits: int) -> "Bf12":
        """selector_bits: of a byte in the device's byte permutation, whose order of nibbles the codes have."""
        if selector_bits == 8:  # the low nibbles of all bytes at once, then the high ones
            own = (0, 2, 4, 6, 1, 3, 5, 7)
            return cls((own, own))
        return cls((tuple(range(8)), (1, 3, 5, 7, 0, 2, 4, 6)))

    def units(self, vectors: int) -> int:
        return vectors // self.vectors

    def lines(self, vectors: int) -> int:
        return self.units(vectors) * self.unit_lines + vectors % self.vectors

    def cluster(self, group: int) -> int:
        return group

    def lines_beside(self, vectors: int, steps: int, cluster: int) -> int:
        return 0

    def encode(self, matrix: jax.Array, table: jax.Array) -> jax.Array:
        """Uint32: low byte, code << 8, high byte << 16, and a mark on exceptions."""
        bits = jax.lax.bitcast_convert_type(matrix, jnp.uint16).astype(jnp.uint32)
        high, numbers = bits >> 8, jnp.arange(BF12_TABLE, dtype=jnp.uint32)
        codes = jnp.full(128, _LISTED, jnp.uint32).at[table].set(numbers << 8)[high & 0x7F]
        signs = jnp.where(codes == _LISTED, 0, high >> 7 << 11)
        return bits & 0xFF | codes | signs | high << 16

    def pack(self, steps: jax.Array) -> jax.Array:
        inside = self._inside(steps)
        codes = jnp.zeros(inside.shape[:-1], jnp.uint32)
        for weight, (index, sign) in enumerate(zip(*self.places, strict=True)):
            code = inside[..., weight] >> 8
            codes |= (code & 7) << 4 * index | (code >> 3 & 1) << 4 * sign + 3
        low = joined(inside & 0xFF, 4)  # [..., units, 4 vectors, threads, 2]
        low = low.reshape(*low.shape[:-3], 2, 2, *low.shape[-2:]).swapaxes(-3, -2)
        low = low.reshape(*low.shape[:-2], 4)
        lines = jnp.concatenate([codes.swapaxes(-1, -2)[..., None, :, :], low], -3)
        lines = lines.reshape(*lines.shape[:-4], -1, *lines.shape[-2:])
        rest = steps[..., self.units(steps.shape[-3]) * self.vectors :, :, :]
        return jnp.concatenate([lines, joined((rest >> 16 & 0xFF) << 8 | rest & 0xFF, 2)], -3)

    def listed(self, steps: jax.Array) -> jax.Array:
        """Words of the exceptions of each warp in the order of its units, BF12_END for all other weights, uint32 [...,
        weights in units]. steps: as for `pack`, of whole warps.
        """
        inside = self._inside(steps)
        count, units, vectors, threads, per = inside.shape[-5:]

        def along(axis: int, size: int, shift: int) -> jax.Array:
            return jnp.arange(size, dtype=jnp.uint32).reshape(-1, *[1] * axis) << shift

        unit = jnp.arange(count * units, dtype=jnp.uint32).reshape(count, units, 1, 1, 1) << UNIT_SHIFT
        words = unit | along(1, threads, THREAD_SHIFT) | along(2, vectors, SLOT_SHIFT + 3) | along(0, per, SLOT_SHIFT)
        found = jnp.where(inside & _LISTED > 0, words | inside >> 16 & 0xFF, jnp.uint32(BF12_END))
        return found.reshape(*inside.shape[:-5], -1)

    def _inside(self, steps: jax.Array) -> jax.Array:
        """[..., steps, units, 4 vectors, threads, 8]"""
        *lead, vectors, threads, per = steps.shape
        units = self.units(vectors)
        return steps[..., : units * self.vectors, :, :].reshape(*lead, units, self.vectors, threads, per)


def joined(parts: jax.Array, count: int) -> jax.Array:
    """Uint32 of `count` neighbours on the last axis, the first in the lowest bits."""
    parts = parts.astype(jnp.uint32).reshape(*parts.shape[:-1], parts.shape[-1] // count, count)
    words = parts[..., 0]
    for i in range(1, count):
        words |= parts[..., i] << 32 // count * i
    return words


@dataclass
class Bf12Choice:
    """Which products are packed in 12 bits, and by which tables."""

    tables: dict[str, np.ndarray] = field(default_factory=dict)
    """Of each matrix, by path; those of a product have one."""
    left: int = 0
    """Matrices that have too many exceptions."""

    @classmethod
    def of(cls, plan: Plan, weights: Iterable[tuple[str, np.ndarray | jax.Array]]) -> "Bf12Choice":
        """By all bfloat16 weights of a model, which it reads one by one."""
        wanted = {path for paths in product_weights(plan) for path in paths}
        return cls.by(plan, {path: _counts(weight) for path, weight in weights if path in wanted})

    @classmethod
    def of_sample(cls, plan: Plan, weights: np.ndarray | jax.Array) -> "Bf12Choice":
        """All products, by some weights that have the distribution of all."""
        counts = _counts(weights)
        return cls.by(plan, {path: counts for paths in product_weights(plan) for path in paths})

    @classmethod
    def by(cls, plan: Plan, counts: Mapping[str, np.ndarray]) -> "Bf12Choice":
        """counts: of e >> 1 in each matrix, int64 [128]."""
        found = cls()
        for group in product_weights(plan):
            total = sum(counts[path] for path in group)
            table = bf12_table(total)
            if total.sum() - total[table].sum() <= BF12_MOST_EXCEPTIONS * total.sum():
                found.tables |= dict.fromkeys(group, table)
            else:
                found.left += len(group)
        return found


def product_weights(plan: Plan) -> list[list[str]]:
    """Paths of the matrices of each product; the head is the last."""
    return [*([matrix.weight.path for matrix in op.matrices] for op in plan.products), [plan.ops.head.weight.path]]


def _counts(weight: np.ndarray | jax.Array) -> np.ndarray:
    """How often e >> 1 has each value in bfloat16 weights, int64 [128]."""
    if isinstance(weight, jax.Array):
        return np.asarray(_counted(weight), np.int64)
    high = (weight.view(np.uint16).reshape(-1) >> 8 & 0x7F).astype(np.uint8)
    return np.bincount(high, minlength=128)


@jax.jit
def _counted(weight: jax.Array) -> jax.Array:
    high = jax.lax.bitcast_convert_type(weight, jnp.uint16) >> 8 & 0x7F
    return jnp.bincount(high.reshape(-1), length=128)
