"""What every kind of block states about itself: its weights, what it keeps between tokens, and its ops."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer import ops
from laneformer.formats import FORMATS
from laneformer.ops import Norm, Op, Rotary
from laneformer.quantized import Quantized
from laneformer.routing import Routing

PARTS = ("attention", "MLP", "norms", "head")
"""What reports of bytes distinguish, in their order."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of the model."""

    file_name: str
    """Name in a checkpoint of the Laneformer family."""
    shape: tuple[int, ...]
    """Lane-first where every lane has its own share."""
    spec: P
    """Mesh axis (lane, data) of each dimension."""
    initial: Literal["normal", "output", "embedding", "ones", "zeros", "convolution", "decay", "step", "experts"]
    """Fresh values: normal for a matrix that reads the stream, output for one that writes to it; the last four are
    those of laneformer/blocks/delta_net.py and experts.py.
    """
    group: Literal["matrix", "embedding", "vector"]
    """Kind of update: matrix of a layer; embedding table or head; vector (norm or bias), which does not decay."""
    part: str
    """One of PARTS."""
    share: float = 1.0
    """Share of it that one token multiplies: experts used / experts, 0 for a table of rows to look up."""
    looked_up: int = 0
    """Values that one token looks up in it, beside `share`."""
    below: int | None = None
    """Fresh values of experts: numbers below this."""
    dtype: str | None = None
    """Its dtype whatever that of the others is; None: theirs."""

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
    """A block's weight as its ops name it: the share of one lane, where each lane has its own. of_experts: each expert
    has one. plus, small: as in ops.Weight.
    """
    weight = table[path]
    lane_sharded = weight.spec[0] == "lane"
    shape = weight.shape[lane_sharded:]
    return ops.Weight(path, shape[of_experts:], lane_sharded, shape[0] if of_experts else None, plus, small=small)


def attention_weight(path: str, shape: tuple[int, ...], spec: P, initial: str, group: str, **others) -> Weight:
    """One of an attention block at that path, whose file has the same name; norms start as ones."""
    part = "norms" if initial == "ones" else "attention"
    file_name = f"model.{path}.weight"
    return Weight(file_name=file_name, shape=shape, spec=spec, initial=initial, group=group, part=part, **others)


@dataclass(frozen=True, kw_only=True)
class KeptArray:
    """An array that a block keeps between tokens: an entry per position, or one that every token changes,
    [l, b, t, *shape]. Where all lanes keep the same, each has a copy.
    """

    name: str
    num_lanes: int
    shape: tuple[int, ...]
    """Shape of one position's entry in one lane."""
    window: int | None = None
    """Positions that a token reads, its own included; None for all."""
    every: int = 1
    """Positions that share an entry."""
    most: int | None = None
    """Entries that a token reads at most; None for all."""
    fixed: bool = False
    """One entry, t = 1, which every token reads and writes again: a recurrent state, zero before the first token."""
    dtype: str | None = None
    """Its dtype; by default that of the cache."""

    def values_per_token(self, context: int) -> int:
        """Values that one token writes and, with `context` earlier positions, reads."""
        entries = 1 if self.fixed else min(context, self.window - 1) if self.window else context // self.every
        entries = entries if self.most is None else min(entries, self.most)
        return round(self.num_lanes * math.prod(self.shape) * (1 / self.every + entries))

    def bytes_per_token(self, context: int, bytes_per_value: float) -> float:
        """Bytes of `values_per_token`. bytes_per_value: of the cache's dtype."""
        return self.values_per_token(context) * (FORMATS[self.dtype].bytes if self.dtype else bytes_per_value)


class Memory(NamedTuple):
    """What a layer kept, as a block reads it before new tokens."""

    arrays: dict[str, jax.Array]
    """By the names of its `KeptArray`s."""
    start: jax.Array
    """Position of the first new token, int32 scalar."""
    count: jax.Array | None = None
    """How many of the new tokens are text, int32 scalar: a fixed array is that after them. The rest is padding, whose
    entries later tokens overwrite. None for all.
    """


class QuantizedParam(nnx.Module):
    """A weight that is a record; `weight[...]` gives it, as that of an nnx.Param is its array."""

    def __init__(self, record: Quantized):
        for name, array in record.arrays.items():
            setattr(self, name, nnx.Param(array))
        self.facts = (record.kind, record.group, record.columns)
        self.names = tuple(record.arrays)

    def __getitem__(self, index) -> Quantized:
        kind, group, columns = self.facts
        return Quantized(kind, group=group, columns=columns, **{name: getattr(self, name)[...] for name in self.names})


def hold(weight: jax.Array | Quantized) -> nnx.Param | QuantizedParam:
    """A weight as an attribute of a module."""
    return QuantizedParam(weight) if isinstance(weight, Quantized) else nnx.Param(weight)


class Block(nnx.Module):
    """A kind of block: made of its weights by name, its options, and a Precision.

    Attributes: `options`, `precision`, and each weight under its name. The static methods state its facts for given
    options, without an instance; a kind must define the abstract ones.
    """

    def routed(self, h_lbsd: jax.Array, ids_bs: jax.Array | None = None) -> tuple[jax.Array, Routing | None]:
        """Its output [l, b, s, d], and what its router decided; by default it has none. ids: the tokens, int."""
        return self(h_lbsd), None

    def products(self, names: Sequence[str], h_lbsd: jax.Array) -> list[jax.Array]:
        """h times each of the named matrices [l, rows, d]: [l, b, s, rows], as the backward pass keeps it, widened.

        Where that is narrow, one product has the rows of all: h is read once, and one gradient of h is written.
        """
        weights = [getattr(self, name)[...] for name in names]

        def kept(weight: jax.Array | Quantized) -> jax.Array:
            y = self.precision.block_einsum("lbsd,lod->lbso", h_lbsd, weight)
            return self.precision.widened(checkpoint_name(y, "product"))

        if not self.precision.narrow or any(isinstance(weight, Quantized) for weight in weights):
            return [kept(weight) for weight in weights]
        ends = list(itertools.accumulate(weight.shape[1] for weight in weights))
        return jnp.split(kept(jnp.concatenate(weights, 1)), ends[:-1], -1)

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
    def ops(options: Any, path: str, norm: Norm | None, rotary: Rotary) -> tuple[Op, ...]:
        """The ops of a decode step of a block at `path`, with the weights of `table`; see laneformer/ops.py.

        norm: of the stream that the block reads, if any. rotary: the model's positions.
        """

    @staticmethod
    def context_flops(options: Any, length: int) -> float:
        """FLOPs per token, in a forward pass over a sequence of `length` tokens, beyond the products with weights."""
        return 0.0
