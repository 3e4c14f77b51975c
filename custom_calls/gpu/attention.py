"""The sizes of attention in the GPU kernel; custom_calls/gpu/kernel/attention.h has the same numbers as constants."""

from dataclasses import dataclass

from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.ops import Attend, CompressedAttend, CompressedKeep, Compressor, LatentAttend

MAX_SPLITS = 16  # splits of the keys; each CTA must merge all of them
# Compressed attention has few keys and merges each channel once: its most splits, and fewest keys of a split
MORE_SPLITS, LEAST_KEYS = 32, 16
MOST_KEY_THREADS = 32  # threads that share a key
MOST_SUMS = 64  # sums of a thread in registers
BUCKETS, LEAST_PLACES = 1 << 11, 32  # as in gpu/kernel/mixers/compressed_keep.h
WARP_KEYS = 4  # keys of an index that a warp has in registers at the same time


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of attention in one lane."""

    heads: int
    """Query heads."""
    groups: int
    """Groups of query heads, each of which has its own tasks: one group for each key head. If all heads share the
    latents, as many as there are CTAs for with the most splits of the keys.
    """
    key_dim: int
    """Channels of a key."""
    value_dim: int
    """Channels of a value."""
    splits: int
    """Most splits of the keys."""
    shared: bool
    """Whether all heads have the same keys, which are also their values."""

    @classmethod
    def of(cls, op: Attend | LatentAttend | CompressedAttend, ctas: int, width: int) -> "AttentionSizes":
        """The sizes of an op. ctas: CTAs of a lane. width: bytes of a number in the cache."""
        if isinstance(op, CompressedAttend):
            return CompressedSizes.of(op, ctas, width)
        if isinstance(op, Attend):
            return cls(op.heads, op.kv_heads, op.head_dim, op.head_dim, _splits(ctas, op.kv_heads), False)
        most = max(1, ctas // MAX_SPLITS)
        groups = max(n for n in range(1, op.heads + 1) if n <= most and op.heads % n == 0)
        return cls(op.heads, groups, op.rank + op.rotating, op.rank, _splits(ctas, groups), True)

    @property
    def merged_heads(self) -> int:
        """Heads whose results a CTA has at the same time: all heads, or the one head of a block of the next product."""
        return 1 if self.shared else self.heads

    @property
    def merged_floats(self) -> int:
        """Floats of the merged results in shared memory, for one row of a pass."""
        return self.merged_heads * self.value_dim

    @property
    def part_words(self) -> int:
        """Words of the board with the results of the splits."""
        return self.heads * self.splits * (self.value_dim + 2 + self.value_dim % 2)

    def floats(self, rows: int, machine: Machine, width: int) -> int:
        """Floats of a CTA's attention in shared memory. rows: rows of a pass. width: bytes of a number in the cache."""
        new = (1 if self.shared else 2) * rows
        return self._task_floats(new, machine, width) + 2 * self.splits * self.merged_heads

    def _task_floats(self, new: int, machine: Machine, width: int) -> int:
        """Floats of a task in shared memory: queries, vectors that the pass itself adds, and the warps' sums. new:
        number of these vectors.
        """
        group_heads = self.heads // self.groups
        at_once = max(1, min(group_heads, MOST_SUMS // _own(self.key_dim, width)))
        return (group_heads + new) * self.key_dim + machine.warps * at_once * (self.value_dim + 2)


@dataclass(frozen=True)
class CompressedSizes(AttentionSizes):
    """The sizes of compressed attention. Each group has as many heads as a thread has sums for."""

    op: CompressedAttend

    @classmethod
    def of(cls, op: CompressedAttend, ctas: int, width: int) -> "CompressedSizes":
        at_once = max(1, MOST_SUMS // _own(op.head_dim, width))
        groups = min(n for n in range(1, op.heads + 1) if op.heads % n == 0 and op.heads // n <= at_once)
        return cls(op.heads, groups, op.head_dim, op.head_dim, _splits(ctas, groups, MORE_SPLITS), True, op)

    @property
    def merged_floats(self) -> int:
        """0, because results are merged on a board."""
        return 0

    @property
    def most_listed(self) -> int:
        """Most chosen entries that a task reads; 0 without an index."""
        return max(LEAST_KEYS, -(-(self.op.window + self.op.index.most) // self.splits)) if self.op.index else 0

    def floats(self, rows: int, machine: Machine, width: int) -> int:
        new = (rows - 1) // self.op.ratio + 1 if self.op.ratio else 0  # entries that a pass may complete
        task, index = self._task_floats(rows + new, machine, width), self.op.index
        if not index:
            return task
        stride = index.channels + 1 - index.channels % 2
        scores = index.heads * (stride + 1) + (new + machine.warps * WARP_KEYS) * index.channels
        choice = 2 * BUCKETS + 2 * machine.warps + 2 + LEAST_PLACES
        return max(task, scores, choice) + self.most_listed


def _own(key_dim: int, width: int) -> int:
    """Number of channels of a key in each thread."""
    per = 16 // width if key_dim * width % 16 == 0 else 1
    pieces, threads = key_dim // per, 1
    while threads < MOST_KEY_THREADS and -(-pieces // threads) > 4:
        threads *= 2
    return -(-pieces // threads) * per


def _splits(ctas: int, groups: int, most: int = MAX_SPLITS) -> int:
    """Number of splits of the keys: as many as there are CTAs for, at most `most`."""
    return max(1, min(most, ctas // groups))


def rotated(op: Attend | LatentAttend | CompressedAttend | CompressedKeep | Compressor) -> int:
    """Number of channels of a head in a table of rotations."""
    return op.head_dim if isinstance(op, Attend) else 2 * len(op.rotary.frequencies)
