"""What every kind of block states about itself: its weights, what it keeps between tokens, and what it computes."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx
from jax.sharding import PartitionSpec as P

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
    initial: Literal["normal", "output", "embedding", "ones", "zeros"]
    """Fresh values: normal for a matrix that reads the stream, output for one that writes to it."""
    group: Literal["matrix", "embedding", "vector"]
    """Kind of update: matrix of a layer; embedding table or head; vector (norm or bias), which does not decay."""
    part: str
    """One of PARTS."""
    share: float = 1.0
    """Share of it that one token multiplies: experts used / experts, 0 for a table of rows to look up."""
    looked_up: int = 0
    """Values that one token looks up in it, beside `share`."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def read(self) -> int:
        """Values that one token multiplies."""
        return round(self.size * self.share)


@dataclass(frozen=True, kw_only=True)
class KeptArray:
    """An array that a block keeps between tokens: an entry per position, [l, b, t, *shape]."""

    name: str
    num_lanes: int
    shape: tuple[int, ...]
    """Shape of one position's entry in one lane."""
    window: int | None
    """Positions that a token reads, its own included; None for all."""

    def values_per_token(self, context: int) -> int:
        """Values that one token writes and, with `context` earlier positions, reads."""
        positions = min(context, self.window - 1) if self.window else context
        return self.num_lanes * math.prod(self.shape) * (1 + positions)


class Block(nnx.Module):
    """A kind of block: made of its weights by name, its options, and a Precision.

    The static methods state its facts for given options, without an instance.
    """

    @staticmethod
    def table(options: Any, path: str) -> dict[str, Weight]:
        """Path -> Weight of every weight of a block at `path` in the module tree, in the order of the forward pass."""
        raise NotImplementedError

    @staticmethod
    def state(options: Any) -> tuple[KeptArray, ...]:
        """The arrays kept between tokens; by default none."""
        return ()

    @staticmethod
    def context_flops(options: Any, length: int) -> float:
        """FLOPs per token, in a forward pass over a sequence of `length` tokens, beyond the products with weights."""
        return 0.0
