"""The shared memory of a CTA in the GPU kernel: the ring of weights, its barriers, and the arrays of the ops."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from laneformer.custom_calls.gpu.tiling import Tiling

# Lines in a slot of the stream's ring, 4 KiB. Each warp issues its own copies; a single thread would need larger ones.
SLOT_LINES = 8
ORDER_BYTES = 104  # bytes for the orders of a warp, without its pieces


@dataclass(frozen=True)
class Memory:
    """The shared memory of a CTA."""

    layout: Any
    """The Layout."""

    @cached_property
    def shared_floats(self) -> int:
        """Floats of a CTA's arrays in shared memory, beside the ring."""
        return self._floats_with(self.layout.head, self.layout.rows)

    @property
    def _merged(self) -> int:
        """Floats of merged attention in shared memory for one row of a pass."""
        return max(each.merged_floats(self.layout.lane) for each, _ in self.layout.kernels)

    def _z_in_merged(self, head: Tiling) -> bool:
        """Whether the sampler's second copy of the logits uses the memory in which layers merge attention."""
        return head.turns > 1 and head.rows * head.turns <= self._merged

    @property
    def z_in_merged(self) -> bool:
        return self._z_in_merged(self.layout.head)

    def _floats_with(self, head: Tiling, rows: int) -> int:
        warps, tilings = self.layout.machine.warps, [*self.layout.tilings_before_head, head]

        def even(n):
            return n + n % 2

        partial = max(
            *(tiling.partial_floats(1 if tiling.pieces else rows) for tiling in self.layout.tilings_before_head),
            head.partial_floats(),
            head.partial_floats(rows, parts_of(head, rows)),
        )
        sampler = 2 * 2048 + 2 * 64 + 4 * warps + 16
        return (
            2 * even(partial)
            + 2 * even(rows * warps)
            + even(max(sampler, *(each.task_floats(self.layout.lane, rows) for each, _ in self.layout.kernels)))
            + even(rows * self._merged)
            + even(max(tiling.brought_floats for tiling in tilings))
            + even(warps * self.layout.staged_with(head))
            + even(rows * self.layout.streams * self.layout.stream_rows)
            + even(rows * self.layout.join_floats)
            + even(rows * self.layout.stream_rows)
            + even(rows * self.layout.table.history * self.layout.stream_rows)
            + (1 if self._z_in_merged(head) else 2) * even(rows * head.rows * head.turns)
            + 2
            + even(self.layout.draft_ints if rows > 1 else 0)
            + (even(rows) if self.layout.plan.tables else 0)
        )

    @cached_property
    def slots(self) -> int:
        """Slots of each warp's ring: as many as fit in shared memory, at most 16 (64 KiB). Raises ValueError if too few
        fit.
        """
        slots = self.slots_with(self.layout.head, self.layout.rows)
        if slots < (max(4, self._slots_taken(self.layout.tilings)) if self.layout.machine.bulk_copies else 1):
            or_rows = f" or a lower {self.layout.rows_option}" if self.layout.rows > 1 else ""
            raise ValueError(
                f"the kernel needs {4 * self.shared_floats} bytes of shared memory, which leaves too little for the"
                f" weights' ring: use more devices{or_rows}"
            )
        return slots

    def slots_with(self, head: Tiling, rows: int) -> int:
        if not self.layout.machine.bulk_copies:  # weights take no shared memory
            return int(4 * self._floats_with(head, rows) <= self.layout.machine.shared_bytes)
        each = self.layout.machine.warps * (SLOT_LINES * self.layout.machine.warp_size * 16 + 8)
        beside = 128 + self.layout.machine.warps * self._order_bytes + 4 * self._floats_with(head, rows)
        return min(16, (self.layout.machine.shared_bytes - beside) // each)

    @staticmethod
    def _slots_taken(tilings: list[Tiling]) -> int:
        """Most slots over which the lines that a product takes at once are spread."""
        return -(-(max((tiling.taken for tiling in tilings), default=0) + SLOT_LINES - 1) // SLOT_LINES)

    @property
    def ahead_slots(self) -> int:
        """Slots of each warp's ring that may contain weights ordered ahead of a router's experts, while these are
        unknown or being read. docs/gpu.md lists the waits that this covers.
        """
        of_experts = [tiling for tiling in self.layout.layer_tilings if tiling.pieces]
        return max(0, min(self.slots * 3 // 5, self.slots - self._slots_taken(of_experts)))

    @property
    def barrier_bytes(self) -> int:
        """Bytes in shared memory for the barriers of the rings and the orders of the warps."""
        each = 8 * self.slots + self._order_bytes
        return -(-self.layout.machine.warps * each // 128) * 128 if self.layout.machine.bulk_copies else 0

    @property
    def most_pieces(self) -> int:
        """Most pieces of chosen experts that a warp reads in a layer. Each is ordered by its own thread. Raises
        ValueError if there are more than threads.
        """
        pieces = self.layout.rows * max(
            sum(tiling.pieces.each for _, tiling in kind.of_experts) for kind in self.layout.kinds
        )
        if pieces > self.layout.machine.warp_size:
            raise ValueError(
                f"passes of {self.layout.rows} rows would read {pieces} parts of experts in a warp of"
                f" {self.layout.machine.warp_size} threads: lower {self.layout.rows_option}"
            )
        return pieces

    @property
    def _order_bytes(self) -> int:
        """Bytes of a warp's orders in a model with experts, otherwise 0; see custom_calls/gpu/kernel/routed.h."""
        return ORDER_BYTES + 8 * self.most_pieces if self.layout.any_experts else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        ring = (
            self.layout.machine.warps * self.slots * SLOT_LINES * self.layout.machine.warp_size * 16
            if self.layout.machine.bulk_copies
            else 0
        )
        return ring + self.barrier_bytes + 4 * self.shared_floats


def parts_of(head: Tiling, wanted: int) -> int:
    """Number of parts of a head's steps: the smallest divisor of the steps that is at least `wanted`, otherwise the
    largest divisor.
    """
    if head.segments > 1:
        return 1
    takes = head.steps // head.together
    divisors = [n for n in range(1, min(takes, 4 * wanted) + 1) if takes % n == 0]
    return next((n for n in divisors if n >= wanted), divisors[-1])
