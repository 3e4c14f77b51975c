"""The formats of weights in the GPU kernel. A format turns the vectors of a product's step into lines. A vector is 16
bytes of weights of each thread in the plan's dtype; a line is 16 bytes of each thread in memory.
custom_calls/gpu/kernel/formats.h has a struct for each format, which reads the lines.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls.plan import Dtype, Plan
from laneformer.formats import BF12_END, BF12_MOST_EXCEPTIONS, BF12_TABLE, FORMATS, bf12_table
from laneformer.ops import Product
from laneformer.quantized import Quantized

UNIT_SHIFT, THREAD_SHIFT, SLOT_SHIFT = 19, 13, 8
"""First bits of the fields in an exception's word, as in gpu/kernel/formats.h: unit, thread, slot; below, high byte."""
MOST_UNITS = (1 << 32 - UNIT_SHIFT) - 1
"""Most units of a warp in a product."""
_LISTED = 1 << 24  # marks an exception while a product is packed

AnyWeight = np.ndarray | jax.Array | Quantized | Quantized[jax.Array]
"""A weight as a session takes it."""


@dataclass(frozen=True)
class Plain:
    """Weights in a plain dtype: each vector is a line."""

    dtype: Dtype

    @property
    def struct(self) -> str:
        """Name of the format's struct in formats.h."""
        return f"Plain<k{self.dtype.name.title()}>"

    @property
    def per(self) -> int:
        """Weights of a thread in a vector."""
        return 128 // FORMATS[self.dtype.name].bits

    def lines(self, vectors: int) -> int:
        """Number of lines for the vectors of a step."""
        return vectors

    def units(self, vectors: int) -> int:
        """Number of units that the vectors of a step fill."""
        return 0

    def cluster(self, group: int) -> int:
        """Number of neighbouring threads, of the `group` threads of a row, whose columns are next to each other."""
        return group

    def lines_beside(self, vectors: int, steps: int, cluster: int) -> int:
        """Number of lines of a product beside the lines of its steps."""
        return 0

    def encode(self, matrix: jax.Array, table: jax.Array | None) -> jax.Array:
        """The matrix as unsigned integers, ready to be dealt to threads. Padding is 0."""
        return jax.lax.bitcast_convert_type(matrix, f"uint{8 * matrix.dtype.itemsize}")

    def pack(self, steps: jax.Array) -> jax.Array:
        """Packs encoded and dealt weights [..., steps, vectors, threads, per] into lines, uint32 [..., steps, lines,
        threads, 4].
        """
        return steps if steps.dtype == jnp.uint32 else joined(steps, 2)

    def listed(self, steps: jax.Array) -> None:
        """None: this format has no list of exceptions."""


@dataclass(frozen=True)
class Bf12:
    """bfloat16 in 12 bits (laneformer/formats.py): units of four vectors in three lines. Vectors of a step that do not
    fill a unit stay bfloat16.

    A unit has one line of codes, with a word for each vector, and two lines of low bytes, with two words for each
    vector.
    """

    places: tuple[tuple[int, ...], tuple[int, ...]]
    """For each weight of a vector, the nibble of the code word that contains its index, and the nibble whose bit 3 is
    its sign.
    """

    struct, per = "Bf12", 8
    vectors, unit_lines = 4, 3

    @classmethod
    def of(cls, selector_bits: int) -> "Bf12":
        """The format for a device whose byte permutation selects a byte with `selector_bits` bits. The codes have the
        order of nibbles that this permutation needs.
        """
        if selector_bits == 8:  # the permutation takes the low nibbles of all bytes, then the high nibbles
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
        """The matrix as uint32: low byte | code << 8 | high byte << 16, with the bit _LISTED set in exceptions."""
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
        """A word for each weight in a unit of each warp, in the order of its units: the exception, or BF12_END for all
        other weights; uint32 [..., weights in units]. steps: as for `pack`, for whole warps.
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
        """The weights in units, [..., steps, units, 4 vectors, threads, 8]."""
        *lead, vectors, threads, per = steps.shape
        units = self.units(vectors)
        return steps[..., : units * self.vectors, :, :].reshape(*lead, units, self.vectors, threads, per)


def joined(parts: jax.Array, count: int) -> jax.Array:
    """Joins each `count` neighbours on the last axis to a uint32, the first in the lowest bits."""
    parts = parts.astype(jnp.uint32).reshape(*parts.shape[:-1], parts.shape[-1] // count, count)
    words = parts[..., 0]
    for i in range(1, count):
        words |= parts[..., i] << 32 // count * i
    return words


@dataclass
class Bf12Choice:
    """Which products are packed in 12 bits, and with which tables."""

    tables: dict[str, np.ndarray] = field(default_factory=dict)
    """The table of each packed matrix, by path. The matrices of a product share a table."""
    left: int = 0
    """Number of matrices that are not packed, because they have too many exceptions."""

    @classmethod
    def of(cls, plan: Plan, weights: Iterable[tuple[str, AnyWeight]]) -> "Bf12Choice":
        """The choice for the bfloat16 weights of a model, which are read one by one."""
        wanted = {path for paths in product_weights(plan) for path in paths}
        plain = ((path, weight) for path, weight in weights if not isinstance(weight, Quantized))
        return cls.by(plan, {path: _counts(weight) for path, weight in plain if path in wanted})

    @classmethod
    def of_sample(cls, plan: Plan, weights: np.ndarray | jax.Array) -> "Bf12Choice":
        """The choice for a model whose matrices all have the distribution of `weights`."""
        counts = _counts(weights)
        return cls.by(plan, {path: counts for paths in product_weights(plan) for path in paths})

    @classmethod
    def by(cls, plan: Plan, counts: Mapping[str, np.ndarray]) -> "Bf12Choice":
        """The choice for weights with these counts. counts: how often e >> 1 has each value in each matrix, by path,
        int64 [128]; e is the exponent of a weight.
        """
        found = cls()
        for group in product_weights(plan):
            total = np.sum([counts[path] for path in group], axis=0)
            table = bf12_table(total)
            if total.sum() - total[table].sum() <= BF12_MOST_EXCEPTIONS * total.sum():
                found.tables |= dict.fromkeys(group, table)
            else:
                found.left += len(group)
        return found


def product_weights(plan: Plan) -> list[list[str]]:
    """Paths of the matrices of each product, the head's last."""
    return [*([matrix.weight.path for matrix in op.matrices] for op in plan.products), [plan.ops.head.weight.path]]


def _counts(weight: np.ndarray | jax.Array) -> np.ndarray:
    """How often e >> 1 has each value in bfloat16 weights, int64 [128]; e is the exponent of a weight."""
    if isinstance(weight, jax.Array):
        return np.asarray(_counted(weight), np.int64)
    high = (weight.view(np.uint16).reshape(-1) >> 8 & 0x7F).astype(np.uint8)
    return np.bincount(high, minlength=128)


@jax.jit
def _counted(weight: jax.Array) -> jax.Array:
    high = jax.lax.bitcast_convert_type(weight, jnp.uint16) >> 8 & 0x7F
    return jnp.bincount(high.reshape(-1), length=128)


def in_one_format(op: Product, formats: Mapping[str, object]) -> list[Product]:
    """Splits a product into products of one format each, which write one after the other. formats: formats of some
    matrices, by path; all other matrices have the same format.
    """
    runs = itertools.groupby(op.matrices, lambda matrix: formats.get(matrix.weight.path))
    return [replace(op, matrices=tuple(matrices)) for _, matrices in runs]
