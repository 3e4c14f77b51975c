"""How the GPU kernel lays a model out: the tilings of its products, the packed weights, the memory of a CTA.

All of it follows from the model's plan (custom_calls/plan.py). Modules that differ in their weights and windows alone
are of one kind; the kernel has its code once for each kind. Weights are packed once into the order in which each warp
reads them; custom_calls/gpu/header.py writes the same numbers into the file that the kernel is compiled with, so that
the two cannot disagree.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from custom_calls.gpu.attention import AttentionSizes, rotated
from custom_calls.gpu.codes import Codes
from custom_calls.gpu.kinds import Kind, Tiler, signature
from custom_calls.gpu.stages import Stage, stages
from custom_calls.gpu.supported import unknown
from custom_calls.gpu.tiling import Machine, Tiling
from custom_calls.plan import Dtype, Plan
from laneformer.ops import (
    ENTRIES,
    Attend,
    CompressedAttend,
    CompressedKeep,
    Compressor,
    DeltaNet,
    HeadKind,
    LatentAttend,
    Module,
    Op,
    Product,
    Rotary,
)

# Lines in a slot of the stream's ring: 4 KiB. Each warp issues its own copies; one thread would need larger ones
SLOT_LINES = 8
SPLIT_KEYS = 64  # keys that are worth another CTA in attention
FEW_SLOTS = 5  # of the ring; a head of many rows is computed in turns to leave room for as many
ORDER_BYTES = 104  # of a warp's orders, without its pieces
TURNS = (1, 2, 4, 8, 16)
MOST_ROWS = 8  # of a pass; kMaxRows of gpu/kernel/params.h
STEPS = ("begin", "embed", "final", "head", "op")  # as in gpu/kernel/params.h; ops of a layer follow each other
ATTENDS = Attend | LatentAttend | CompressedAttend
WIDTH = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


@dataclass(frozen=True)
class Layout:
    """A model on one device of several, which has some of its lanes. Raises ValueError for ops that the kernel does
    not have.
    """

    plan: Plan
    machine: Machine
    lanes_here: int
    peer_ctas: int = 0
    """CTAs that play the lanes of other devices, for one rank alone on a GPU; only its weights are then packed. See
    gpu/kernel/peers.h.
    """
    bf12: Collection[str] = ()
    """Paths of matrices packed in 12 bits, all of a product or none."""
    codes: Mapping[str, Codes] = field(default_factory=dict)
    """Formats of quantized matrices, by path."""
    rows: int = 1
    """Most rows of a pass."""
    requests: int = 1
    """Requests that a call serves, each in a slot; at most as many as rows."""
    drafts: bool = False
    """Whether passes may have drafts where a call serves several requests; passes of several rows of one always may."""

    def __post_init__(self):
        if not 1 <= self.rows <= MOST_ROWS:
            raise ValueError(f"a pass has 1 to {MOST_ROWS} rows, got {self.rows}")
        if self.rows > 1 and self.peer_ctas:
            raise ValueError(
                f"passes of several rows need devices for all lanes, none emulated: leave {self._rows_option} out"
            )
        if not 1 <= self.requests <= self.rows:
            raise ValueError(f"each slot needs a row of a pass: at most {self.rows}, got {self.requests}")
        for number, layer in enumerate(self.plan.ops.layers):
            for problem in unknown(layer, self.plan.ops.hidden_size):
                raise ValueError(f"the GPU kernel cannot run layer {number}: {problem}; use backend xla")
        if not any(isinstance(op, ATTENDS) for op in self._ops):
            raise ValueError("the GPU kernel attends in one layer at least; use backend xla")
        if len({signature(dataclasses.replace(module, ops=())) for module in self.modules}) > 1:
            raise ValueError("the GPU kernel needs modules that differ in their ops and weights alone; use backend xla")

    @property
    def table(self):
        return self.plan.schedule

    @property
    def _ops(self) -> Iterator[Op]:
        return (op for layer in self.plan.ops.layers for op in layer.ops)

    @property
    def modules(self) -> list[Module]:
        """In the order of time."""
        return [module for layer in self.plan.ops.layers for module in layer.modules]

    @property
    def lanes(self) -> int:
        return self.plan.ops.lanes

    @property
    def hidden(self) -> int:
        return self.plan.ops.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.plan.ops.layers)

    @property
    def _rows_option(self) -> str:
        """What a user asks for several rows with."""
        return "--parallel" if self.requests > 1 else "--draft-max"

    @cached_property
    def stages(self) -> tuple[tuple[Stage, ...], ...]:
        """Of each layer."""
        return tuple(stages(layer, self.codes) for layer in self.plan.ops.layers)

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The number of each product of the layers, by layer and stage, in that order; that of the head follows."""
        places = [
            (layer, at)
            for layer, own in enumerate(self.stages)
            for at, stage in enumerate(own)
            if isinstance(stage.op, Product)
        ]
        return {place: number for number, place in enumerate(places)}

    @cached_property
    def ctas(self) -> int:
        """CTAs of a lane. Every one has rows of the residual stream: that makes its edges a barrier."""
        rows = -(-self.hidden // max(1, self.machine.ctas // self.lanes_here))
        return -(-self.hidden // rows)

    @property
    def stream_rows(self) -> int:
        """Rows of the residual stream that a CTA has."""
        return -(-self.hidden // self.ctas)

    @cached_property
    def tiler(self) -> Tiler:
        return Tiler(self.machine, self.ctas, self.hidden, self.plan.weight_dtype, self.bf12, self.codes)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of attention, then those of feed-forward networks, each in the order of their first layers."""
        return tuple(itertools.chain(*self.of_modules))

    @cached_property
    def of_modules(self) -> list[tuple[Kind, ...]]:
        """The kinds of attention, and those of feed-forward networks."""
        by_signature: list[dict] = [{}, {}]
        for layer, all_stages in enumerate(self.stages):
            for module, found in enumerate(by_signature):
                own = tuple(stage for stage in all_stages if stage.module == module)
                tilings = tuple(map(self.tiler.stage, own))
                found.setdefault((signature(own), tilings), (own, []))[1].append(layer)
        return [
            tuple(Kind(own, tilings, tuple(layers)) for (_, tilings), (own, layers) in found.items())
            for found in by_signature
        ]

    @cached_property
    def kinds_of(self) -> tuple[tuple[Kind, ...], ...]:
        """For each layer the kind of each of its modules."""
        return tuple(
            tuple(next(kind for kind in kinds if layer in kind.layers) for kinds in self.of_modules)
            for layer in range(self.num_layers)
        )

    def first_stage(self, layer: int, module: int) -> int:
        """The number of a module's first stage among those of its layer."""
        return sum(len(kind.stages) for kind in self.kinds_of[layer][:module])

    def _place(self, layer: int, number: int) -> tuple[int, int]:
        """The module that has a layer's stage, and the stage's number in it."""
        module = self.stages[layer][number].module
        return module, number - self.first_stage(layer, module)

    def tiling(self, layer: int, number: int) -> Tiling | None:
        """Of a layer's stage."""
        module, own = self._place(layer, number)
        return self.kinds_of[layer][module].tilings[own]

    @cached_property
    def head(self) -> Tiling:
        head = self.plan.ops.head
        ctas = self.ctas * (1 if head.kind == HeadKind.VOCAB_PARALLEL else self.lanes)
        columns = self.hidden * (self.lanes if head.kind == HeadKind.LANE else 1)

        def in_turns(turns: int) -> Tiling:
            return replace(
                self.tiler.product(head.weight.path, head.weight.shape[0], columns, ctas * turns), turns=turns
            )

        # Whatever rows a pass has, as turns may decide the order of sums.
        enough = FEW_SLOTS if self.machine.bulk_copies else 1

        def room(tiling: Tiling) -> int:
            return min(self._slots_with(tiling, 1), enough)

        one = in_turns(1)
        if one.units or (isinstance(one.format, Codes) and one.format.factors) or room(one) == enough:
            return one  # what is beside the stream is in the order of all rows of a CTA
        return max(map(in_turns, TURNS), key=lambda tiling: (room(tiling), -tiling.turns))

    @cached_property
    def head_mixture(self) -> Tiling | None:
        """Of what the head reads of several streams: its lines are those before the head's."""
        gather = self.plan.ops.head.gather
        return self.tiler.mixture(gather) if gather else None

    @property
    def gather_lines(self) -> int:
        return self.head_mixture.lines if self.head_mixture else 0

    @property
    def streams(self) -> int:
        """Residual streams where modules mix several, or 0."""
        gather = self.plan.ops.head.gather
        return gather.count if gather else 0

    @property
    def join_floats(self) -> int:
        """Of a row of a pass: how a module's output joins the streams."""
        return self.streams * (1 + self.streams)

    @property
    def head_rows(self) -> int:
        """Rows of the head that a CTA has."""
        return self.head.rows * self.head.turns

    @property
    def head_parts(self) -> int:
        """Parts of the head's steps whose sums are read one after the other where a pass has several rows: as many as
        rows, so that they take the room of one row's, or the nearest that divides them.
        """
        return _parts(self.head, self.rows)

    @property
    def drafting(self) -> bool:
        """Whether passes may have drafts."""
        return self.rows > 1 and (self.drafts or self.requests == 1)

    @property
    def draft_ints(self) -> int:
        """Words in shared memory of a CTA's drafts, and of its slots if there are several; see drafts.h and requests.h
        in custom_calls/gpu/kernel/pass/.
        """
        drafts = self.drafting * (3 * self.rows + 9 + 2 * MOST_ROWS + 1 + self.machine.warps)
        if self.requests == 1:
            return drafts
        shared = self.drafting * (2 * self.requests + self.rows)
        return 7 * self.requests + 6 * self.rows + 3 + self.requests * drafts + shared

    @cached_property
    def tilings(self) -> list[Tiling]:
        return [*self._before_head, self.head]

    @property
    def _of_layers(self) -> list[Tiling]:
        return [tiling for kind in self.kinds for tiling in kind.tilings if tiling]

    @property
    def _before_head(self) -> list[Tiling]:
        return [*self._of_layers, *([self.head_mixture] if self.head_mixture else [])]

    @cached_property
    def attends(self) -> list[ATTENDS]:
        """One of each kind."""
        return [op for kind in self.kinds for op in kind.ops if isinstance(op, ATTENDS)]

    def sizes(self, op: ATTENDS) -> AttentionSizes:
        return AttentionSizes.of(op, self.ctas, WIDTH[self.plan.cache_dtype])

    @cached_property
    def nets(self) -> list[DeltaNet]:
        """One of each kind."""
        return [op for kind in self.kinds for op in kind.ops if isinstance(op, DeltaNet)]

    @cached_property
    def compressors(self) -> list[CompressedKeep | Compressor]:
        """What makes the vectors of compressed attention, of each kind."""
        keeps = [op for kind in self.kinds for op in kind.ops if isinstance(op, CompressedKeep)]
        return [own for keep in keeps for own in (keep, keep.entries, keep.index_keys) if own]

    @cached_property
    def first_kept(self) -> tuple[int, ...]:
        """For each layer the number of its first array among those that layers keep."""
        return tuple(itertools.accumulate(map(len, self.plan.kept[:-1]), initial=0))

    @cached_property
    def rotations(self) -> dict[tuple[Rotary, int], int]:
        """Tables of rotations, one for each rotary embedding and head size: where each begins, in floats."""
        wanted = dict.fromkeys((op.rotary, rotated(op)) for op in (*self.attends, *self.compressors) if op.rotary)
        places, end = {}, 0
        for rotary, head_dim in wanted:
            places[rotary, head_dim] = end
            end += self.plan.ops.context * head_dim
        return places

    @property
    def steps(self) -> list[tuple[int, int]]:
        """A pass op by op, as (one of STEPS by number, ops of a layer from the last on; layer or -1)."""
        first = STEPS.index("op")
        layers = [(first + op, layer) for layer, own in enumerate(self.stages) for op in range(len(own))]
        together = self.lanes > 1 and self.plan.ops.head.kind != HeadKind.VOCAB_PARALLEL
        final = [(STEPS.index("final"), -1)] if together or self.streams else []
        return [(STEPS.index("embed"), -1), *layers, *final, (STEPS.index("head"), -1)]

    @property
    def kept_floats(self) -> int:
        """Floats of the residual streams that a CTA keeps between launches, where each op is one."""
        return (1 + self.table.history + self.streams) * self.stream_rows + self.join_floats

    def _padded(self, lines: int) -> int:
        return -(-lines // SLOT_LINES) * SLOT_LINES

    @cached_property
    def layer_starts(self) -> tuple[int, ...]:
        """For each layer its first line in a pass; last, the end of all layers."""
        starts = [0]
        for kinds in self.kinds_of:
            starts.append(starts[-1] + sum(kind.lines for kind in kinds))
        return tuple(starts)

    def module_start(self, layer: int, module: int) -> int:
        """The first line of a module in a pass."""
        return self.layer_starts[layer] + sum(kind.lines for kind in self.kinds_of[layer][:module])

    @cached_property
    def courses(self) -> list[tuple[int, int, bool]]:
        """The parts of a pass that a model with experts reads without a stop, the head's last: the first line, how many
        there are, and whether chosen experts follow.
        """
        ends = [
            self.module_start(layer, module) + kind.lines_before(kind.of_experts[0][0])
            for layer, kinds in enumerate(self.kinds_of)
            for module, kind in enumerate(kinds)
            if kind.of_experts
        ]
        parts = [(a, b - a, True) for a, b in itertools.pairwise([0, *ends])]
        rest = self.layer_starts[-1] - ends[-1]
        behind = [(ends[-1], rest, False)] if rest else []
        return [*parts, *behind, (self.layer_lines, self.gather_lines + self.head.all_lines, False)]

    @cached_property
    def layer_lines(self) -> int:
        """Lines of all layers, padded to whole slots."""
        return self._padded(self.layer_starts[-1])

    @cached_property
    def head_lines(self) -> int:
        return self._padded(self.gather_lines + self.head.all_lines)

    @cached_property
    def expert_starts(self) -> tuple[int, ...]:
        """For each layer the line of a warp's memory at which its experts begin; last, the end of all."""
        starts = [self.layer_lines + self.head_lines]
        for kinds in self.kinds_of:
            starts.append(starts[-1] + sum(kind.stored_lines for kind in kinds))
        return tuple(starts)

    @property
    def row_lines(self) -> int:
        """Lines in the memory of a warp."""
        return self.expert_starts[-1]

    def line(self, layer: int, op: int) -> int:
        """Line of each warp's memory at which a layer's product begins."""
        module, own = self._place(layer, op)
        kind = self.kinds_of[layer][module]
        if not kind.tilings[own].pieces:
            return self.module_start(layer, module) + kind.lines_before(own)
        before = sum(other.stored_lines for other in self.kinds_of[layer][:module])
        before += sum(tiling.stored_lines for at, tiling in kind.of_experts if at < own)
        return self.expert_starts[layer] + before

    @property
    def line_words(self) -> int:
        return self.machine.warp_size * 4

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed weights of all lanes, in words of 32 bits."""
        lanes = self.lanes_here if self.peer_ctas else self.lanes
        return (lanes, self.ctas, self.machine.warps, self.row_lines * self.line_words)

    def offset(self, layer: int, op: int) -> int:
        """Word of each warp's memory at which a layer's product begins."""
        return self.line(layer, op) * self.line_words

    @property
    def head_offset(self) -> int:
        return (self.layer_lines + self.gather_lines) * self.line_words

    @property
    def stream_bytes(self) -> int:
        """Bytes read for one token, by all lanes, padding included."""
        lanes, ctas, warps, _ = self.packed_shape
        lines = (self.layer_lines + self.head_lines) * ctas * warps + self._expert_lines
        return lanes * lines * self.line_words * 4

    @property
    def _expert_lines(self) -> int:
        """Lines of experts that all warps of a lane read for a token."""
        return sum(tiling.read_lines for kinds in self.kinds_of for kind in kinds for _, tiling in kind.of_experts)

    @property
    def expert_share(self) -> float:
        """Of the bytes read for one token: each row of a pass reads its own experts."""
        return self._expert_lines * self.line_words * 4 * self.packed_shape[0] / self.stream_bytes

    def _delta_floats(self, op: DeltaNet) -> int:
        task = ENTRIES * (ENTRIES + 1) + 2 * op.key_dim + 2 * ENTRIES + 2 + self.machine.warps * (4 * ENTRIES + 3)
        return max(task, op.value_heads * op.head_tiles)

    @cached_property
    def shared_floats(self) -> int:
        return self._floats_with(self.head, self.rows)

    @property
    def _merged(self) -> int:
        """Floats for each row of a pass."""
        return max([self.sizes(op).merged_floats for op in self.attends] + [op.value_heads for op in self.nets])

    def _z_in_merged(self, head: Tiling) -> bool:
        """Whether the sampler's second copy of the logits is where the layers merge attention."""
        return head.turns > 1 and head.rows * head.turns <= self._merged

    @property
    def z_in_merged(self) -> bool:
        return self._z_in_merged(self.head)

    def _floats_with(self, head: Tiling, rows: int) -> int:
        warps, tilings = self.machine.warps, [*self._before_head, head]
        width = WIDTH[self.plan.cache_dtype]

        def even(n):
            return n + n % 2

        partial = max(
            *(tiling.partial_floats(1 if tiling.pieces else rows) for tiling in self._before_head),
            head.partial_floats(),
            head.partial_floats(rows, _parts(head, rows)),
        )
        sampler = 2 * 2048 + 2 * 64 + 4 * warps + 16
        return (
            2 * even(partial)
            + 2 * even(rows * warps)
            + even(
                max(
                    sampler,
                    *(self.sizes(op).floats(rows, self.machine, width) for op in self.attends),
                    *map(self._delta_floats, self.nets),
                    3 * self.threads * bool(self.compressors),
                )
            )
            + even(rows * self._merged)
            + even(max(tiling.brought_floats for tiling in tilings))
            + even(rows * self.streams * self.stream_rows)
            + even(rows * self.join_floats)
            + even(rows * self.stream_rows)
            + even(rows * self.table.history * self.stream_rows)
            + (1 if self._z_in_merged(head) else 2) * even(rows * head.rows * head.turns)
            + 2
            + even(self.draft_ints if rows > 1 else 0)
            + (even(rows) if self.plan.tables else 0)
        )

    @cached_property
    def slots(self) -> int:
        """Slots of each warp's ring: as many as shared memory holds, up to 64 KiB for a warp. Raises ValueError for
        too few.
        """
        slots = self._slots_with(self.head, self.rows)
        if slots < (max(4, self._slots_taken(self.tilings)) if self.machine.bulk_copies else 1):
            raise ValueError(
                f"the kernel needs {4 * self.shared_floats} bytes of shared memory beside the weights' ring, which"
                f" leaves no room for it: use more devices{f' or a lower {self._rows_option}' if self.rows > 1 else ''}"
            )
        return slots

    def _slots_with(self, head: Tiling, rows: int) -> int:
        if not self.machine.bulk_copies:  # weights take no shared memory
            return int(4 * self._floats_with(head, rows) <= self.machine.shared_bytes)
        each = self.machine.warps * (SLOT_LINES * self.machine.warp_size * 16 + 8)
        beside = 128 + self.machine.warps * self._order_bytes + 4 * self._floats_with(head, rows)
        return min(16, (self.machine.shared_bytes - beside) // each)

    @staticmethod
    def _slots_taken(tilings: list[Tiling]) -> int:
        """Slots among which the lines may be that products take at once."""
        return -(-(max((tiling.taken for tiling in tilings), default=0) + SLOT_LINES - 1) // SLOT_LINES)

    @property
    def ahead_slots(self) -> int:
        """Slots of each warp's ring that may hold weights behind a router whose experts are unknown, or being read;
        docs/gpu.md counts what that covers.
        """
        of_experts = [tiling for tiling in self._of_layers if tiling.pieces]
        return max(0, min(self.slots * 3 // 5, self.slots - self._slots_taken(of_experts)))

    @property
    def any_experts(self) -> bool:
        return any(kind.of_experts for kind in self.kinds)

    @property
    def barrier_bytes(self) -> int:
        each = 8 * self.slots + self._order_bytes
        return -(-self.machine.warps * each // 128) * 128 if self.machine.bulk_copies else 0

    @property
    def most_pieces(self) -> int:
        """Pieces of chosen experts that a warp reads for a layer, at most; a thread orders each."""
        pieces = self.rows * max(sum(tiling.pieces.each for _, tiling in kind.of_experts) for kind in self.kinds)
        if pieces > self.machine.warp_size:
            raise ValueError(
                f"passes of {self.rows} rows would read {pieces} parts of experts in a warp of"
                f" {self.machine.warp_size} threads: lower {self._rows_option}"
            )
        return pieces

    @property
    def _order_bytes(self) -> int:
        """Bytes of what a warp orders in a model with experts; see custom_calls/gpu/kernel/routed.h."""
        return ORDER_BYTES + 8 * self.most_pieces if self.any_experts else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        ring = (
            self.machine.warps * self.slots * SLOT_LINES * self.machine.warp_size * 16
            if self.machine.bulk_copies
            else 0
        )
        return ring + self.barrier_bytes + 4 * self.shared_floats

    @property
    def threads(self) -> int:
        return self.machine.warps * self.machine.warp_size

    @property
    def grid(self) -> int:
        return self.lanes_here * self.ctas + self.peer_ctas


def _parts(head: Tiling, wanted: int) -> int:
    """Parts of a head's steps: the fewest from `wanted` on, or else the most."""
    if head.segments > 1:
        return 1
    takes = head.steps // head.together
    divisors = [n for n in range(1, min(takes, 4 * wanted) + 1) if takes % n == 0]
    return next((n for n in divisors if n >= wanted), divisors[-1])
