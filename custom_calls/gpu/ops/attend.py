"""Attention to cached keys and values, and the sizes of all kinds of attention; custom_calls/gpu/kernel/attention.h has
the same numbers as constants.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from laneformer.custom_calls.gpu.ops.kernel import Lane, OpKernel
from laneformer.custom_calls.gpu.ops.product import projected
from laneformer.custom_calls.gpu.ops.struct import OpStruct, score_scale
from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.ops import Attend, CompressedAttend, LatentAttend, Layer, Rotary

MAX_SPLITS = 16  # splits of the keys; each CTA must merge all of them
MOST_KEY_THREADS = 32  # threads that share a key
MOST_SUMS = 64  # sums of a thread in registers

A = TypeVar("A", bound=Attend | LatentAttend | CompressedAttend)


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
        return self.task_floats(new, machine, width) + 2 * self.splits * self.merged_heads

    def task_floats(self, new: int, machine: Machine, width: int) -> int:
        """Floats of a task in shared memory: queries, vectors that the pass itself adds, and the warps' sums. new:
        number of these vectors.
        """
        group_heads = self.heads // self.groups
        at_once = max(1, min(group_heads, MOST_SUMS // own_channels(self.key_dim, width)))
        return (group_heads + new) * self.key_dim + machine.warps * at_once * (self.value_dim + 2)


def own_channels(key_dim: int, width: int) -> int:
    """Number of channels of a key in each thread."""
    per = 16 // width if key_dim * width % 16 == 0 else 1
    pieces, threads = key_dim // per, 1
    while threads < MOST_KEY_THREADS and -(-pieces // threads) > 4:
        threads *= 2
    return -(-pieces // threads) * per


def splits_of(ctas: int, groups: int, most: int = MAX_SPLITS) -> int:
    """Number of splits of the keys: as many as there are CTAs for, at most `most`."""
    return max(1, min(most, ctas // groups))


class AttentionKernel(OpKernel[A], ABC):
    """What all kinds of attention have in common."""

    attends: ClassVar = True
    keeps: ClassVar = True

    @abstractmethod
    def sizes(self, lane: Lane) -> AttentionSizes:
        """The sizes of the op in a lane."""

    @property
    def rotary(self) -> Rotary | None:
        return self.op.rotary

    @property
    def rotating(self) -> int:
        """Channels of a head in a table of rotations."""
        return self.op.rotary.channels if self.op.rotary else 0

    def boards(self, lane: Lane, tiling) -> dict[str, int]:
        return {"kPartsBoard": self.sizes(lane).part_words}

    def merged_floats(self, lane: Lane) -> int:
        return self.sizes(lane).merged_floats

    def task_floats(self, lane: Lane, rows: int) -> int:
        return self.sizes(lane).floats(rows, lane.machine, lane.width)

    def rotations(self) -> list[tuple[Rotary, int]]:
        return [(self.rotary, self.rotating)] if self.rotary else []

    def add_constants(
        self, struct: OpStruct, scale: float, options: dict[str, Any], softcap: float | None = None
    ) -> None:
        """Adds the constants of attention, after those of its kind, `options`."""
        sizes = self.sizes(struct.lane)
        struct.names.attended = struct.name
        struct.constants |= options | {
            "kGroups": sizes.groups,
            "kKeyDim": sizes.key_dim,
            "kValueDim": sizes.value_dim,
            "kMaxSplits": sizes.splits,
            "kMergedHeads": sizes.merged_heads,
            "kSharedKeys": sizes.shared,
            "kScale": score_scale(scale),
            "kSoftcap": math.log2(math.e) * (softcap or 0.0),
            "kRotated": self.rotary is not None,
        }
        struct.add_rotations(self.rotary, self.rotating)
        struct.add_cache()


class AttendKernel(AttentionKernel[Attend]):
    kinds: ClassVar = (Attend,)

    @property
    def rotating(self) -> int:
        return self.op.head_dim

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, channels = self.op, projected(layer)
        if channels != op.projected or op.heads % op.kv_heads:
            yield f"{op.heads} query and {op.kv_heads} key heads of {op.head_dim} do not fit {channels} channels"

    def signature(self) -> object:
        return dataclasses.replace(self.op, window=None)

    def sizes(self, lane: Lane) -> AttentionSizes:
        op = self.op
        return AttentionSizes(
            op.heads, op.kv_heads, op.head_dim, op.head_dim, splits_of(lane.ctas, op.kv_heads), shared=False
        )

    def header(self, struct: OpStruct) -> None:
        op = self.op
        of_all = {
            name: norm is not None and norm.gain.shape[0] > op.head_dim
            for name, norm in (("kQNormOfAll", op.q_norm), ("kKNormOfAll", op.k_norm))
        }
        self.add_constants(struct, op.scale, of_all, op.attn_logit_softcapping)
