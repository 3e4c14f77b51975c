"""Layout of a model in the GPU kernel: the tilings of its products, the packed weights, the memory of a CTA.

The layout follows from the model's plan (custom_calls/plan.py). Modules that differ only in their weights and windows
are of one kind, and the kernel contains code once for each kind. Weights are packed once, in the order in which each
warp reads them. custom_calls/gpu/header.py writes the same numbers into a header of the kernel, so packing and kernel
always agree.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.kinds import Kind, Tiler, signature
from laneformer.custom_calls.gpu.memory import SLOT_LINES, Memory, parts_of
from laneformer.custom_calls.gpu.ops import kernel, problems
from laneformer.custom_calls.gpu.ops.kernel import Lane, OpKernel, Stage
from laneformer.custom_calls.gpu.ops.streams import GatherStreamsKernel
from laneformer.custom_calls.gpu.stages import stages
from laneformer.custom_calls.gpu.tiling import Machine, Tiling
from laneformer.custom_calls.gpu.variants import check
from laneformer.custom_calls.plan import Dtype, Plan
from laneformer.ops import HeadKind, Module, Product, Rotary, Value

SPLIT_KEYS = 64  # keys from which attention uses another CTA
FEW_SLOTS = 5  # slots of the ring for which a head of many rows leaves room by computing its rows in turns
TURNS = (1, 2, 4, 8, 16)
MOST_ROWS = 8  # rows of a pass; kMaxRows of gpu/kernel/params.h
STEPS = ("begin", "embed", "final", "head", "op")  # as in gpu/kernel/params.h; "op" is the first op of a layer
WIDTH = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


@dataclass(frozen=True)
class Layout:
    """A model on one of several devices, which has some of the lanes. Raises ValueError for ops that the kernel does
    not support, and for an invalid number of rows or requests.
    """

    plan: Plan
    machine: Machine
    lanes_here: int
    """Lanes of one device."""
    peer_ctas: int = 0
    """CTAs that emulate the lanes of other devices, to run one rank alone on a GPU. Only that rank's weights are packed
    then. See gpu/kernel/peers.h.
    """
    bf12: Collection[str] = ()
    """Paths of the matrices packed in 12 bits: all or none of a product's."""
    codes: Mapping[str, Codes] = field(default_factory=dict)
    """Formats of quantized matrices, by path."""
    rows: int = 1
    """Most rows of a pass."""
    requests: int = 1
    """Requests of a call, each in its own slot; at most `rows`."""
    drafts: bool = False
    """Whether passes may have drafts if a call has several requests. With one request, passes of several rows may."""
    variants: Collection[str] = ()
    """Variants of the kernel; see custom_calls/gpu/variants.py."""

    def __post_init__(self):
        if not 1 <= self.rows <= MOST_ROWS:
            raise ValueError(f"a pass has 1 to {MOST_ROWS} rows, got {self.rows}")
        if self.rows > 1 and self.peer_ctas:
            raise ValueError(
                "passes of several rows need devices for all lanes, but some lanes are emulated: omit"
                f" {self.rows_option}"
            )
        if not 1 <= self.requests <= self.rows:
            raise ValueError(f"the number of slots must be 1 to {self.rows}, the rows of a pass, got {self.requests}")
        for number, layer in enumerate(self.plan.ops.layers):
            for problem in problems(layer, self.plan.ops.hidden_size):
                raise ValueError(f"the GPU kernel cannot run layer {number}: {problem}; use backend xla")
        if not any(kernel(op).attends for layer in self.plan.ops.layers for op in layer.ops):
            raise ValueError("the GPU kernel needs attention in at least one layer; use backend xla")
        if len({signature(dataclasses.replace(module, ops=())) for module in self.modules}) > 1:
            raise ValueError("the GPU kernel needs a norm of the sum in all modules or in none; use backend xla")
        check(self)

    @property
    def table(self):
        return self.plan.schedule

    @property
    def modules(self) -> list[Module]:
        """The modules of all layers, in the order of the schedule's time."""
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
    def rows_option(self) -> str:
        """The command-line option that sets several rows."""
        return "--parallel" if self.requests > 1 else "--draft-max"

    @cached_property
    def stages(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each layer."""
        return tuple(stages(layer, self.codes) for layer in self.plan.ops.layers)

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The number of each product by layer and stage, in their order. The head has the next number."""
        places = [
            (layer, at)
            for layer, own in enumerate(self.stages)
            for at, stage in enumerate(own)
            if isinstance(stage.op, Product)
        ]
        return {place: number for number, place in enumerate(places)}

    @cached_property
    def ctas(self) -> int:
        """CTAs of a lane. Each has rows of the residual stream, so that an edge of the stream is a barrier."""
        rows = -(-self.hidden // max(1, self.machine.ctas // self.lanes_here))
        return -(-self.hidden // rows)

    @property
    def stream_rows(self) -> int:
        """Rows (channels) of the residual stream in each CTA."""
        return -(-self.hidden // self.ctas)

    @cached_property
    def tiler(self) -> Tiler:
        return Tiler(self.machine, self.ctas, self.hidden, self.plan.weight_dtype, self.bf12, self.codes)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of attention, then the kinds of feed-forward networks, each in the order of their first layers."""
        return tuple(itertools.chain(*self.of_modules))

    @cached_property
    def of_modules(self) -> list[tuple[Kind, ...]]:
        """Two entries: the kinds of attention, and the kinds of feed-forward networks."""
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
        """The kinds of the two modules of each layer."""
        return tuple(
            tuple(next(kind for kind in kinds if layer in kind.layers) for kinds in self.of_modules)
            for layer in range(self.num_layers)
        )

    def first_stage(self, layer: int, module: int) -> int:
        """The number of a module's first stage among those of its layer."""
        return sum(len(kind.stages) for kind in self.kinds_of[layer][:module])

    def _place(self, layer: int, number: int) -> tuple[int, int]:
        """The module that contains stage `number` of a layer, and the number of the stage in that module."""
        module = self.stages[layer][number].module
        return module, number - self.first_stage(layer, module)

    def tiling(self, layer: int, number: int) -> Tiling:
        """The tiling of stage `number` of a layer. Raises ValueError if the stage multiplies no matrix."""
        module, own = self._place(layer, number)
        tiling = self.kinds_of[layer][module].tilings[own]
        if tiling is None:
            raise ValueError(f"stage {number} of layer {layer} multiplies no matrix")
        return tiling

    @cached_property
    def memory(self) -> Memory:
        return Memory(self)

    @cached_property
    def head(self) -> Tiling:
        """The tiling of the head. Its rows are computed in turns if their sums would take the ring's memory."""
        head = self.plan.ops.head
        ctas = self.ctas * (1 if head.kind == HeadKind.VOCAB_PARALLEL else self.lanes)
        columns = self.hidden * (self.lanes if head.kind == HeadKind.LANE else 1)

        def in_turns(turns: int) -> Tiling:
            return replace(
                self.tiler.product(head.weight.path, head.weight.shape[0], columns, ctas * turns), turns=turns
            )

        # The room is counted for one row of a pass, because the order of sums may depend on the turns.
        enough = FEW_SLOTS if self.machine.bulk_copies else 1

        def room(tiling: Tiling) -> int:
            return min(self.memory.slots_with(tiling, 1), enough)

        one = in_turns(1)
        if one.units or (isinstance(one.format, Codes) and one.format.factors) or room(one) == enough:
            return one  # exceptions and factors are packed in the order of all rows of a CTA, without turns
        return max(map(in_turns, TURNS), key=lambda tiling: (room(tiling), -tiling.turns))

    @cached_property
    def head_mixture(self) -> Tiling | None:
        """The tiling of the mixture of streams that the head reads; None with one stream. Its lines precede the head's
        lines.
        """
        gather = self.plan.ops.head.gather
        return GatherStreamsKernel(gather).tiling(None, self.tiler) if gather else None

    @property
    def gather_lines(self) -> int:
        """Lines of `head_mixture` in the memory of a warp, or 0."""
        return self.head_mixture.lines if self.head_mixture else 0

    @property
    def streams(self) -> int:
        """Number of residual streams if modules mix several, otherwise 0."""
        gather = self.plan.ops.head.gather
        return gather.count if gather else 0

    @property
    def join_floats(self) -> int:
        """Floats, for one row of a pass, that define how a module's output joins the streams."""
        return self.streams * (1 + self.streams)

    @property
    def head_rows(self) -> int:
        """Rows of the head in each CTA."""
        return self.head.rows * self.head.turns

    @property
    def head_parts(self) -> int:
        """Number of parts of the head's steps in a pass of several rows. The sums of one part are read before the next
        part is computed: with as many parts as rows, they take the memory of one row.
        """
        return parts_of(self.head, self.rows)

    @property
    def drafting(self) -> bool:
        """Whether passes may have drafts."""
        return self.rows > 1 and (self.drafts or self.requests == 1)

    @property
    def draft_ints(self) -> int:
        """Words in shared memory for a CTA's drafts, and for its slots if there are several; see drafts.h and
        requests.h in custom_calls/gpu/kernel/pass/.
        """
        drafts = self.drafting * (3 * self.rows + 9 + 2 * MOST_ROWS + 1 + self.machine.warps)
        if self.requests == 1:
            return drafts
        shared = self.drafting * (2 * self.requests + self.rows)
        return 7 * self.requests + 6 * self.rows + 3 + self.requests * drafts + shared

    @cached_property
    def tilings(self) -> list[Tiling]:
        """The tilings of all kinds, of the head's mixture and of the head."""
        return [*self.tilings_before_head, self.head]

    @property
    def layer_tilings(self) -> list[Tiling]:
        return [tiling for kind in self.kinds for tiling in kind.tilings if tiling]

    @property
    def tilings_before_head(self) -> list[Tiling]:
        return [*self.layer_tilings, *([self.head_mixture] if self.head_mixture else [])]

    @cached_property
    def lane(self) -> Lane:
        """What the sizes of ops depend on."""
        width = WIDTH[self.plan.cache_dtype]
        return Lane(self.machine, self.ctas, self.stream_rows, width, self.plan.ops.context)

    @cached_property
    def kernels(self) -> list[tuple[OpKernel, Tiling | None]]:
        """The ops of all kinds of modules, and their tilings."""
        return [
            (stage.kernel, tiling)
            for kind in self.kinds
            for stage, tiling in zip(kind.stages, kind.tilings, strict=True)
        ]

    @cached_property
    def first_kept(self) -> tuple[int, ...]:
        """The number of each layer's first array among the arrays that layers keep."""
        return tuple(itertools.accumulate(map(len, self.plan.kept[:-1]), initial=0))

    @cached_property
    def rotations(self) -> dict[tuple[Rotary, int], int]:
        """The tables of rotations, one for each rotary embedding and head size: index of the first float of each."""
        kernels = sorted((each for each, _ in self.kernels), key=lambda each: not each.attends)
        wanted = dict.fromkeys(table for each in kernels for table in each.rotations())
        places, end = {}, 0
        for rotary, head_dim in wanted:
            places[rotary, head_dim] = end
            end += self.plan.ops.context * head_dim
        return places

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The steps of a pass, one for each op: number of the step in STEPS, and the layer or -1. Op n of a layer is
        step number `STEPS.index("op") + n`.
        """
        first = STEPS.index("op")
        layers = [(first + op, layer) for layer, own in enumerate(self.stages) for op in range(len(own))]
        together = self.lanes > 1 and self.plan.ops.head.kind != HeadKind.VOCAB_PARALLEL
        final = [(STEPS.index("final"), -1)] if together or self.streams else []
        return [(STEPS.index("embed"), -1), *layers, *final, (STEPS.index("head"), -1)]

    @property
    def kept_floats(self) -> int:
        """Floats of the residual streams that a CTA keeps between launches, with one launch per op."""
        return (1 + self.table.history + self.streams) * self.stream_rows + self.join_floats

    def _padded(self, lines: int) -> int:
        """Lines rounded up to whole slots of the ring."""
        return -(-lines // SLOT_LINES) * SLOT_LINES

    @cached_property
    def layer_starts(self) -> tuple[int, ...]:
        """The first line of each layer in a pass, and last the end of all layers."""
        starts = [0]
        for kinds in self.kinds_of:
            starts.append(starts[-1] + sum(kind.lines for kind in kinds))
        return tuple(starts)

    def module_start(self, layer: int, module: int) -> int:
        """The first line of a module in a pass."""
        return self.layer_starts[layer] + sum(kind.lines for kind in self.kinds_of[layer][:module])

    @cached_property
    def courses(self) -> list[tuple[int, int, bool]]:
        """The parts of a pass of a model with experts that are read without interruption, the head's last: first line,
        number of lines, and whether chosen experts follow.
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
        """Lines of the head and its mixture, padded to whole slots."""
        return self._padded(self.gather_lines + self.head.all_lines)

    @cached_property
    def expert_starts(self) -> tuple[int, ...]:
        """The first line of each layer's experts in the memory of a warp, and last the end of all experts."""
        starts = [self.layer_lines + self.head_lines]
        for kinds in self.kinds_of:
            starts.append(starts[-1] + sum(kind.stored_lines for kind in kinds))
        return tuple(starts)

    @property
    def row_lines(self) -> int:
        """Total lines in the memory of a warp."""
        return self.expert_starts[-1]

    def line(self, layer: int, op: int) -> int:
        """The first line of a layer's product in the memory of each warp."""
        module, own = self._place(layer, op)
        kind = self.kinds_of[layer][module]
        if not self.tiling(layer, op).pieces:
            return self.module_start(layer, module) + kind.lines_before(own)
        before = sum(other.stored_lines for other in self.kinds_of[layer][:module])
        before += sum(tiling.stored_lines for at, tiling in kind.of_experts if at < own)
        return self.expert_starts[layer] + before

    @property
    def line_words(self) -> int:
        """Words of a line: 16 bytes for each thread of a warp."""
        return self.machine.warp_size * 4

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed weights in words of 32 bits: [lanes, CTAs, warps, words of a warp]."""
        lanes = self.lanes_here if self.peer_ctas else self.lanes
        return (lanes, self.ctas, self.machine.warps, self.row_lines * self.line_words)

    def offset(self, layer: int, op: int) -> int:
        """The first word of a layer's product in the memory of each warp."""
        return self.line(layer, op) * self.line_words

    @property
    def head_offset(self) -> int:
        """The first word of the head in the memory of each warp."""
        return (self.layer_lines + self.gather_lines) * self.line_words

    @property
    def stream_bytes(self) -> int:
        """Bytes of weights that all lanes read for one token, padding included."""
        lanes, ctas, warps, _ = self.packed_shape
        lines = (self.layer_lines + self.head_lines) * ctas * warps + self._expert_lines
        return lanes * lines * self.line_words * 4

    @property
    def _expert_lines(self) -> int:
        """Lines of experts that all warps of a lane read for a token."""
        return sum(tiling.read_lines for kinds in self.kinds_of for kind in kinds for _, tiling in kind.of_experts)

    @property
    def expert_share(self) -> float:
        """Share of `stream_bytes` that is experts. Each row of a pass reads its own experts."""
        return self._expert_lines * self.line_words * 4 * self.packed_shape[0] / self.stream_bytes

    @property
    def any_experts(self) -> bool:
        """Whether the model has experts."""
        return any(kind.of_experts for kind in self.kinds)

    @property
    def spares(self) -> int:
        """CTAs on all devices that compute no op and write to host memory: one on each device, or none."""
        devices = 1 if self.peer_ctas else self.lanes // self.lanes_here
        return devices * ("spare-writer" in self.variants)

    @cached_property
    def triples(self) -> dict[str, int]:
        """Boards whose values travel in threes, which only products write and read: name, and rows of each CTA that
        writes them.
        """
        if "triples" not in self.variants:
            return {}
        found = {"kStreamBoard": self.stream_rows, "kOtherStreamBoard": self.stream_rows}
        others = set()
        for kind in self.kinds:
            for stage, tiling in zip(kind.stages, kind.tilings, strict=True):
                product = stage.op if isinstance(stage.op, Product) and not stage.op.blocks else None
                if tiling and stage.writes and product and not stage.of_head and not stage.first:
                    rows = tiling.rows // 2 if product.gated else tiling.rows
                    if found.setdefault(stage.writes, rows) != rows:
                        others.add(stage.writes)
                elif stage.writes:
                    others.add(stage.writes)
                others |= {stage.queries, stage.latents, stage.index, *(() if product else (stage.reads,))}
        return {name: rows for name, rows in found.items() if name not in others}

    def staged_with(self, head: Tiling) -> int:
        """Floats of shared memory into which a warp brings its part of a vector from a board of threes."""
        if not self.triples:
            return 0
        readers = [
            tiling
            for kind in self.kinds
            for stage, tiling in zip(kind.stages, kind.tilings, strict=True)
            if tiling and (stage.op.reads is Value.STREAM or stage.reads in self.triples)
        ]
        return max(tiling.segment_columns for tiling in [*readers, head])

    @property
    def staged_floats(self) -> int:
        return self.staged_with(self.head)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.machine.warps * self.machine.warp_size

    @property
    def grid(self) -> int:
        """CTAs of a device: those of its lanes, the spare one that writes to the host, those that emulate lanes."""
        return self.lanes_here * self.ctas + (self.spares > 0) + self.peer_ctas
