"""The sizes of attention in the GPU kernel: custom_calls/gpu/kernel/attention.h has the same as constants."""

from dataclasses import dataclass

from custom_calls.gpu.tiling import Machine
from laneformer.ops import Attend, LatentAttend

MAX_SPLITS = 16  # of the keys: merging them costs every CTA
MOST_KEY_THREADS = 32
MOST_SUMS = 64  # of a thread, in registers


@dataclass(frozen=True)
class AttentionSizes:
    """Of one lane."""

    heads: int
    groups: int
    """Tasks with the same keys' positions, each of some query heads: one for each key head, or, where all heads have
    the same latents, as many as there are CTAs for when the keys have the most splits.
    """
    key_dim: int
    value_dim: int
    splits: int
    """Of the keys, at most."""
    shared: bool
    """Whether all heads have the same keys, which are their values too."""

    @classmethod
    def of(cls, op: Attend | LatentAttend, ctas: int) -> "AttentionSizes":
        if isinstance(op, Attend):
            return cls(op.heads, op.kv_heads, op.head_dim, op.head_dim, _splits(ctas, op.kv_heads), False)
        most = max(1, ctas // MAX_SPLITS)
        groups = max(n for n in range(1, op.heads + 1) if n <= most and op.heads % n == 0)
        return cls(op.heads, groups, op.rank + op.rotating, op.rank, _splits(ctas, groups), True)

    @property
    def merged_heads(self) -> int:
        """Heads whose results a CTA has at the same time: all, or that of one block of a product."""
        return 1 if self.shared else self.heads

    @property
    def merged_floats(self) -> int:
        return self.merged_heads * self.value_dim

    @property
    def part_words(self) -> int:
        """Words of the board that has the splits' results."""
        return self.heads * self.splits * (self.value_dim + 2 + self.value_dim % 2)

    def floats(self, rows: int, machine: Machine, width: int) -> int:
        """Shared memory of a CTA. rows: of a pass; width: bytes of a number in the cache."""
        per = 16 // width if self.key_dim * width % 16 == 0 else 1
        pieces, threads = self.key_dim // per, 1
        while threads < MOST_KEY_THREADS and -(-pieces // threads) > 4:
            threads *= 2
        own = -(-pieces // threads) * per
        group_heads = self.heads // self.groups
        at_once = max(1, min(group_heads, MOST_SUMS // own))
        new = (1 if self.shared else 2) * rows
        return (
            (group_heads + new) * self.key_dim
            + machine.warps * at_once * (self.value_dim + 2)
            + 2 * self.splits * self.merged_heads
        )


def _splits(ctas: int, groups: int) -> int:
    """As many as there are CTAs for."""
    return max(1, min(MAX_SPLITS, ctas // groups))


def rotated(op: Attend | LatentAttend) -> int:
    """Channels of a head in a table of rotations."""
    return op.head_dim if isinstance(op, Attend) else op.rotating
