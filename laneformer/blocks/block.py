"""The interface of all blocks: each kind of block states its weights, what it keeps between tokens, and its ops."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer import ops
from laneformer.blocks.rotary import Rotations
from laneformer.formats import FORMATS
from laneformer.ops import Norm, Op
from laneformer.precision import Precision
from laneformer.quantized import Quantized
from laneformer.routing import Routing

PARTS = ("attention", "MLP", "norms", "head")
"""The parts of a model in reports of bytes, in the order of the reports."""

Initial = Literal["normal", "output", "embedding", "ones", "zeros", "convolution", "decay", "step", "experts"]
"""Rule for fresh values: normal for a matrix that reads the stream, output for one that writes to it. The last four
rules are defined in laneformer/blocks/delta_net.py and experts.py.
"""
Group = Literal["matrix", "embedding", "vector"]
"""Optimizer group: matrix of a layer; embedding table or head; vector (norm or bias), without weight decay."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of the model."""

    file_name: str
    """Name in a checkpoint of the Laneformer family."""
    shape: tuple[int, ...]
    """Shape. The first axis is the lane if every lane has its own share."""
    spec: P
    """Mesh axis of each dimension: lane, data or None."""
    initial: Initial
    group: Group
    part: str
    """Part in reports of bytes, one of PARTS."""
    share: float = 1.0
    """Share of the values that one token multiplies: experts used / experts, or 0 for a table whose rows are looked up.
    """
    looked_up: int = 0
    """Values that one token looks up, in addition to those that it multiplies."""
    below: int | None = None
    """For initial = experts: upper bound (exclusive) of the drawn expert numbers."""
    dtype: str | None = None
    """Fixed dtype, independent of the other weights; None for the dtype of the other weights."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def read(self) -> int:
        """Values that one token multiplies."""
        return round(self.size * self.share)


def weight_of_op(
    table: dict[str, Weight], path: str, of_experts: bool = False, plus: float = 0.0, small: bool = False
) -> ops.Weight:
    """The weight at `path` as an op refers to it: with the shape of one lane's share, if every lane has its own.

    of_experts: the next axis numbers the experts. plus, small: see ops.Weight.
    """
    weight = table[path]
    lane_sharded = weight.spec[0] == "lane"
    shape = weight.shape[lane_sharded:]
    return ops.Weight(path, shape[of_experts:], lane_sharded, shape[0] if of_experts else None, plus, small=small)


def attention_weight(
    path: str, shape: tuple[int, ...], spec: P, initial: Initial, group: Group, dtype: str | None = None
) -> Weight:
    """A weight of an attention block at `path`. Its name in a checkpoint follows its path. A weight that starts as ones
    counts as a norm.
    """
    part = "norms" if initial == "ones" else "attention"
    file_name = f"model.{path}.weight"
    return Weight(file_name=file_name, shape=shape, spec=spec, initial=initial, group=group, part=part, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class KeptArray:
    """An array [l, b, t, *shape] that a block keeps between tokens: one entry per position, or one entry that every
    token updates. If all lanes keep the same values, each lane has a copy.
    """

    name: str
    num_lanes: int
    shape: tuple[int, ...]
    """Shape of one position's entry in one lane."""
    window: int | None = None
    """Newest positions that a token reads, including its own; None for all."""
    every: int = 1
    """Positions per entry."""
    most: int | None = None
    """Largest number of entries that a token reads; None for all."""
    fixed: bool = False
    """Whether the array has a single entry (t = 1) that every token reads and rewrites: a recurrent state, zero before
    the first token.
    """
    dtype: str | None = None
    """Fixed dtype; None for the dtype of the cache."""

    def values_per_token(self, context: int) -> int:
        """Values that one token writes, plus those that it reads after `context` earlier positions."""
        entries = 1 if self.fixed else min(context, self.window - 1) if self.window else context // self.every
        entries = entries if self.most is None else min(entries, self.most)
        return round(self.num_lanes * math.prod(self.shape) * (1 / self.every + entries))

    def bytes_per_token(self, context: int, bytes_per_value: float) -> float:
        """Bytes of `values_per_token`. bytes_per_value: bytes of one value in the cache's dtype."""
        return self.values_per_token(context) * (FORMATS[self.dtype].bytes if self.dtype else bytes_per_value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The state of a layer that a block reads before it computes new tokens."""

    arrays: dict[str, jax.Array]
    """Kept arrays, by the name of their `KeptArray`."""
    start: jax.Array
    """Position of the first new token, int32 scalar."""
    count: jax.Array | None = None
    """Number of new tokens that are text, int32 scalar; None for all. The others are padding: they do not change fixed
    arrays, and later tokens overwrite their entries.
    """


class QuantizedParam(nnx.Module):
    """A quantized weight. `weight[...]` is its `Quantized` record, as `param[...]` of an nnx.Param is its array."""

    def __init__(self, record: Quantized[jax.Array]):
        for name, array in record.arrays.items():
            setattr(self, name, nnx.Param(array))
        self.facts = (record.kind, record.group, record.columns)
        self.names = tuple(record.arrays)

    def __getitem__(self, index: Any) -> Quantized[jax.Array]:
        kind, group, columns = self.facts
        return Quantized(kind, group=group, columns=columns, **{name: getattr(self, name)[...] for name in self.names})


Weights = Mapping[str, jax.Array | Quantized[jax.Array]]
"""Weights by their names in a module, or by their paths in a model."""
Plain = nnx.Param[jax.Array]
"""A weight that is never quantized, as an attribute of a module; `weight[...]` is its array."""
Held = Plain | QuantizedParam
"""A weight that may be quantized, as an attribute of a module."""


def hold(weight: jax.Array | Quantized[jax.Array]) -> Held:
    """Wraps a weight so that a module can have it as an attribute."""
    return QuantizedParam(weight) if isinstance(weight, Quantized) else nnx.Param(weight)


def within(weights: Weights, prefix: str) -> Weights:
    """The weights whose paths begin with the prefix and a dot, keyed by the rest of their paths."""
    return {
        path.removeprefix(prefix + "."): weight for path, weight in weights.items() if path.startswith(prefix + ".")
    }


def plain(weight: jax.Array | Quantized[jax.Array]) -> jax.Array:
    """The array of a weight that cannot be quantized. Raises TypeError if it is."""
    if isinstance(weight, Quantized):
        raise TypeError(f"a weight that cannot be quantized is {weight.name}")
    return weight


class Block(nnx.Module):
    """Base class of all blocks. Each weight is an attribute under its name, whose type the subclass states.

    The static methods describe a block with given options, without an instance. A subclass must define the abstract
    ones.
    """

    options: Any
    precision: Precision

    def __init__(self, weights: Weights, options: Any, precision: Precision):
        """weights: by name. options: the dataclass of laneformer/config/options.py that belongs to the class."""
        for name, weight in weights.items():
            setattr(self, name, hold(weight))
        self.options, self.precision = options, precision

    def products(self, names: Sequence[str], h_lbsd: jax.Array) -> list[jax.Array]:
        """h times each of the named matrices [l, rows, d]: a list of [l, b, s, rows] in the accumulate dtype.

        The backward pass keeps them in the activation dtype. If that is narrow and no matrix is quantized, one product
        computes the rows of all matrices: h is read once, and one gradient of h is written.
        """
        weights: list[jax.Array | Quantized[jax.Array]] = [getattr(self, name)[...] for name in names]

        def kept(weight: jax.Array | Quantized[jax.Array]) -> jax.Array:
            y = self.precision.block_einsum("lbsd,lod->lbso", h_lbsd, weight)
            return self.precision.widened(checkpoint_name(y, "product"))

        arrays = [weight for weight in weights if not isinstance(weight, Quantized)]
        if not self.precision.narrow or len(arrays) < len(weights):
            return [kept(weight) for weight in weights]
        ends = list(itertools.accumulate(weight.shape[1] for weight in arrays))
        return jnp.split(kept(jnp.concatenate(arrays, 1)), ends[:-1], -1)

    @staticmethod
    @abstractmethod
    def table(options: Any, path: str) -> dict[str, Weight]:
        """Path -> Weight of every weight of a block at `path` in the module tree, in the order of the forward pass."""

    @staticmethod
    def state(options: Any) -> tuple[KeptArray, ...]:
        """The arrays kept between tokens; by default none."""
        return ()

    @staticmethod
    @abstractmethod
    def ops(options: Any, path: str, norm: Norm | None) -> tuple[Op, ...]:
        """The ops of a decode step of a block at `path`, with the weights of `table`; see laneformer/ops.py.

        norm: norm of the stream that the block reads, if any.
        """

    @staticmethod
    def context_flops(options: Any, length: int) -> float:
        """FLOPs per token other than products with weights, in a forward pass over a sequence of `length` tokens."""
        return 0.0


class Mixer(Block):
    """A block in which tokens read earlier ones: the attention of a layer, or what it has instead."""

    @abstractmethod
    def __call__(
        self, h_lbsd: jax.Array, rotary: Rotations, memory: Memory | None = None, segments_bs: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h [l, b, s, d] -> o [l, b, s, d], and the arrays that `state` lists; {} without a memory.

        rotary: the tables of the positions, by rotation. memory: the state before the first token, if there is one.
        segments: see `Laneformer.__call__`.
        """


class FeedForward(Block):
    """A block that computes each token alone."""

    @abstractmethod
    def __call__(self, h_lbsd: jax.Array) -> jax.Array:
        """h [l, b, s, d] -> o [l, b, s, d]."""

    def routed(self, h_lbsd: jax.Array, ids_bs: jax.Array | None = None) -> tuple[jax.Array, Routing | None]:
        """The block's output [l, b, s, d], and its router's decisions (None without a router). ids: tokens, int [b, s].

        A block with a router overrides this method.
        """
        return self(h_lbsd), None
