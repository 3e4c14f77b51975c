"""How the GPU kernel lays a model out: the tiling of its products, the packed weights, the memory of the edges.

All of it follows from the model's plan (custom_calls/plan.py). Layers that differ in their weights and windows alone
are of one kind; the kernel has its code once for each kind. Weights are packed once into the order in which each warp
reads them; custom_calls/gpu/header.py writes the same numbers into the file that the kernel is compiled with, so that
the two cannot disagree.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from custom_calls.gpu.codes import Codes
from custom_calls.gpu.formats import MOST_UNITS, Bf12, Plain
from custom_calls.library import ring_slots
from custom_calls.plan import Dtype, Plan
from laneformer.ops import Activation, Attend, HeadKind, Layer, Module, Op, Product, Rotary, Value, Weight

# Lines in a slot of the stream's ring: 4 KiB. Each warp issues its own copies; one thread would need larger ones
SLOT_LINES = 8
SPLIT_KEYS = 64  # keys that are worth another CTA in attention
MAX_SPLITS = 16  # of a key/value head's keys: merging them costs every CTA
MAX_VECTORS = 4  # of a product's vector in a thread's registers
MAX_TENSOR_VECTORS = 12  # the same by tensor cores, as bytes
MAX_TENSOR_HELD = 24  # scales of weights in registers at the same time, by tensor cores
MOST_MORE = 2  # lines of scales beside those of a step, by tensor cores
# Instructions that a warp of an H200 may issue while it reads a line: 128 multiprocessors of 4 schedulers at 1.98 GHz
# and 4.3 TB/s, both assumed
ISSUE_SLOTS = 121
MAX_TOGETHER = 4  # rows of a thread in registers at the same time
STEPS = ("begin", "embed", "final", "head", "op")  # as in gpu/kernel/params.h; ops of a layer follow each other
WIDTH = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


@dataclass(frozen=True)
class Machine:
    """What the layout must know of a GPU."""

    warp_size: int
    ctas: int
    """CTAs that can be resident together and are worth using: at most one on each multiprocessor."""
    warps: int
    """Warps of a CTA."""
    shared_bytes: int
    """Shared memory of a CTA, at most."""
    bulk_copies: bool
    """Whether the weights stream through a ring in shared memory."""

    @property
    def selector_bits(self) -> int:
        """Bits by which a byte permutation names a byte: NVIDIA's have 4, AMD's 8."""
        return 4 if self.warp_size == 32 else 8


H200 = Machine(warp_size=32, ctas=128, warps=8, shared_bytes=232_448, bulk_copies=True)
MI300X = Machine(warp_size=64, ctas=256, warps=8, shared_bytes=65_536, bulk_copies=False)


@dataclass(frozen=True)
class Tiling:
    """How a matrix of one lane is shared out over CTAs, warps and threads. The names are those of
    custom_calls/gpu/kernel/product.h.
    """

    all_rows: int
    columns: int
    ctas: int
    rows: int
    group: int
    vectors: int
    segments: int
    steps: int
    together: int
    warps: int
    warp_size: int
    format: Plain | Bf12 | Codes

    @property
    def lines(self) -> int:
        vectors = self.together * self.vectors
        return self._takes * self.format.lines(vectors) + self.format.lines_beside(vectors, self._takes, self.cluster)

    @property
    def cluster(self) -> int:
        """Neighbouring threads whose columns of a vector are side by side."""
        return self.format.cluster(self.group)

    @property
    def units(self) -> int:
        """Units of a warp that are coded; see gpu/formats.py."""
        return self._takes * self.format.units(self.together * self.vectors)

    @property
    def coded(self) -> float:
        """Share of the weights that is in them."""
        return self.units * Bf12.vectors / (self.segments * self.steps * self.vectors)

    @property
    def _takes(self) -> int:
        """Times that a warp takes lines from its stream."""
        return self.segments * self.steps // self.together

    @property
    def padded_rows(self) -> int:
        return self.steps * (self.warp_size // self.group)

    @property
    def fields(self) -> dict[str, int]:
        """The constants of the product's struct."""
        names = ("all_rows", "rows", "columns", "group", "cluster", "vectors", "segments", "steps", "together", "lines")
        return {name.title().replace("_", ""): getattr(self, name) for name in names}

    def deal(self, matrix: jax.Array) -> jax.Array:
        """[..., all rows, columns] -> [..., CTAs, warps, *dealt]: what each thread has of each step's vectors, in all
        segments.
        """
        *lead, rows, columns = matrix.shape
        per = self.format.per
        wide = self.warps * self.segments * self.vectors * self.group * per
        matrix = jnp.pad(matrix, [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows), (0, wide - columns)])
        matrix = matrix.reshape(*lead, self.ctas, self.rows, wide)
        matrix = jnp.pad(matrix, [(0, 0)] * (len(lead) + 1) + [(0, self.padded_rows - self.rows), (0, 0)])
        of_rows = (self.ctas, self.steps, self.warp_size // self.group)
        of_columns = (self.vectors, self.group // self.cluster, per // 2, self.cluster, 2)
        parts = matrix.reshape(*lead, *of_rows, self.warps, self.segments, *of_columns)
        n = len(lead)
        cta, step, row, warp, segment, vector, cluster, pair, member, element = range(n, n + 10)
        order = (*range(n), cta, warp, segment, step, vector, row, cluster, member, pair, element)
        return parts.transpose(order).reshape(*lead, self.ctas, self.warps, *self.dealt)

    @property
    def granule(self) -> int:
        """Columns of a vector that a cluster has under one scale."""
        return self.cluster * self.format.per * self.format.joined // self.format.halves

    def deal_granules(self, grid: jax.Array) -> jax.Array:
        """[..., all rows, granules] -> [..., CTAs, warps, takes, scales of each's vectors, clusters of a warp]: as
        `deal`, of what the columns of a granule share.
        """
        *lead, rows, columns = grid.shape
        halves, clusters = self.format.halves, self.group // self.cluster
        vectors = self.vectors // self.format.joined
        granules = self.warps * self.segments * vectors * clusters * halves
        grid = jnp.pad(grid, [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows), (0, granules - columns)])
        grid = grid.reshape(*lead, self.ctas, self.rows, granules)
        grid = jnp.pad(grid, [(0, 0)] * (len(lead) + 1) + [(0, self.padded_rows - self.rows), (0, 0)])
        of_rows = (self.ctas, self.steps, self.warp_size // self.group)
        parts = grid.reshape(*lead, *of_rows, self.warps, self.segments, vectors, clusters, halves)
        n = len(lead)
        cta, step, row, warp, segment, vector, cluster, half = range(n, n + 8)
        parts = parts.transpose(*range(n), cta, warp, segment, step, vector, half, row, cluster)
        each = self.format.scales(self.together * self.vectors)
        return parts.reshape(*lead, self.ctas, self.warps, self.dealt[0], each, self.warp_size // self.cluster)

    def deal_rows(self, values: jax.Array) -> jax.Array:
        """[..., all rows, 1] -> [..., CTAs, warps, n]: the rows of a CTA one after the other."""
        *lead, rows, _ = values.shape
        each = -(-self.rows // self.warps)
        values = jnp.pad(values[..., 0], [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows)])
        values = values.reshape(*lead, self.ctas, self.rows)
        values = jnp.pad(values, [(0, 0)] * (len(lead) + 1) + [(0, each * self.warps - self.rows)])
        return values.reshape(*lead, self.ctas, self.warps, each)

    @property
    def partial_floats(self) -> int:
        """Floats of the warps' sums, and of the rows' factors."""
        factors = isinstance(self.format, Codes) and self.format.factors
        return self.warps * self.padded_rows + factors * self.rows

    @property
    def cost(self) -> float:
        """Of quantized weights, to compare tilings: the longer of the time to read the lines and that to issue the
        instructions of their codes. A segment more counts as a sixteenth, for it adds all sums once more.
        """
        codes = math.prod(self.dealt[:2]) * self.format.per
        return max(self.lines, codes * self.format.instructions / ISSUE_SLOTS) * (15 + self.segments)

    @property
    def brought_floats(self) -> int:
        """Floats by way of which warps bring the vector, as bytes and the power of two of each 32 columns."""
        by_tensor = isinstance(self.format, Codes) and self.format.by_tensor
        return by_tensor * self.warps * self.vectors * 25

    @property
    def dealt(self) -> tuple[int, ...]:
        """Steps, vectors of each, threads, weights of a vector."""
        return self._takes, self.together * self.vectors, self.warp_size, self.format.per


def tile(
    all_rows: int, columns: int, ctas: int, machine: Machine, format: Plain | Bf12 | Codes, unit: int = 1
) -> Tiling:
    """The tiling that reads the fewest padded bytes; unit: rows that must stay together. How columns are shared out,
    and so the order of sums, is the same in bfloat16 and Bf12.
    """
    rows = -(-all_rows // unit // ctas) * unit
    vectors_per_warp = math.ceil(columns / (format.per * machine.warps))
    by_tensor = isinstance(format, Codes) and format.by_tensor

    def with_group(group: int) -> Tiling:
        vectors = -(-vectors_per_warp // group)
        segments = -(-vectors // (MAX_TENSOR_VECTORS if by_tensor else MAX_VECTORS))
        vectors = -(-vectors // segments)
        vectors += by_tensor * (vectors % 2)  # a tile has two
        steps = -(-rows // (machine.warp_size // group))
        return Tiling(
            *(all_rows, columns, ctas, rows, group, vectors, segments, steps, 1, machine.warps, machine.warp_size),
            replace(format, joined=math.gcd(max(1, format.block // 32), vectors)) if by_tensor else format,
        )

    def taking(tiling: Tiling) -> list[Tiling]:
        return [
            replace(tiling, steps=-(-tiling.steps // together) * together, together=together)
            for together in range(1, MAX_TOGETHER + 1)
            if together == 1 or not by_tensor or together * tiling.vectors * format.halves <= MAX_TENSOR_HELD
        ]

    groups = [with_group(4)] if by_tensor else [with_group(1 << log) for log in range(machine.warp_size.bit_length())]
    if isinstance(format, Codes):
        options = itertools.chain(*map(taking, groups))
        options = (
            replace(one, format=replace(one.format, more=more))
            for one in options
            for more in range(MOST_MORE + 1 if by_tensor else 1)
        )
        return min(options, key=lambda one: (one.cost, -one.together, one.format.more))
    tiling = min(groups, key=lambda one: (one.segments * one.steps * one.vectors, one.segments, one.group))
    return min(taking(tiling), key=lambda one: (one.lines, -one.together))


@dataclass(frozen=True)
class Kind:
    """Layers whose ops differ in their weights and windows alone."""

    ops: tuple[Op, ...]
    """Those of its first layer."""
    modules: tuple[int, ...]
    """For each op the module of its layer: 0 attention, 1 feed-forward."""
    tilings: tuple[Tiling | None, ...]
    """For each op that is a product."""
    layers: tuple[int, ...]

    @property
    def lines(self) -> int:
        """Lines that a warp reads for a layer."""
        return sum(tiling.lines for tiling in self.tilings if tiling)

    def lines_before(self, op: int) -> int:
        return sum(tiling.lines for tiling in self.tilings[:op] if tiling)

    def ends_module(self, op: int) -> bool:
        """Whether it is its module's last op."""
        return self.modules[op] not in self.modules[op + 1 :]


def _signature(value):
    """What the kernel is compiled for: an op without the weights' names and the window."""
    if isinstance(value, Weight):
        return value.shape, value.lane_sharded
    if isinstance(value, Attend) and value.window is not None:
        return _signature(dataclasses.replace(value, window=None))
    if dataclasses.is_dataclass(value):
        return type(value), *(_signature(getattr(value, field.name)) for field in dataclasses.fields(value))
    return tuple(map(_signature, value)) if isinstance(value, tuple) else value


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
    bf12: Collection[int] = ()
    """Products packed in 12 bits, by their numbers; the head's is the last."""
    codes: Mapping[int, Codes] = field(default_factory=dict)
    """Quantized products, by their numbers."""

    def __post_init__(self):
        for number, layer in enumerate(self.plan.ops.layers):
            for problem in _unknown(layer, self.plan.ops.hidden_size):
                raise ValueError(f"the GPU kernel cannot run layer {number}: {problem}; use backend xla")
        if len({_signature(dataclasses.replace(module, ops=())) for module in self.modules}) > 1:
            raise ValueError("the GPU kernel needs modules that differ in their ops and weights alone; use backend xla")

    @property
    def table(self):
        return self.plan.schedule

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

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """The number of each product of the layers, by layer and op, as in Plan.products."""
        places = (
            (layer, number)
            for layer, ops in enumerate(self.plan.ops.layers)
            for number, op in enumerate(ops.ops)
            if isinstance(op, Product)
        )
        return {place: number for number, place in enumerate(places)}

    def _tile(self, number: int, all_rows: int, columns: int, ctas: int, unit: int = 1) -> Tiling:
        """The tiling of a product, by its number, in its format."""
        if number in self.codes:
            format = replace(self.codes[number], selector_bits=self.machine.selector_bits)
            tilings = (tile(all_rows, columns, ctas, self.machine, way, unit) for way in format.ways)
            return min(tilings, key=lambda tiling: tiling.cost)
        if number in self.bf12:
            tiling = tile(all_rows, columns, ctas, self.machine, Bf12.of(self.machine.selector_bits), unit)
            if 0 < tiling.units <= MOST_UNITS:
                return tiling
        return tile(all_rows, columns, ctas, self.machine, Plain(self.plan.weight_dtype), unit)

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
    def kinds(self) -> tuple[Kind, ...]:
        """In the order of their first layers."""
        by_signature: dict = {}
        for number, layer in enumerate(self.plan.ops.layers):
            tilings = tuple(
                self._tile(self.numbers[number, at], op.rows, op.columns, self.ctas, 2 if op.gated else 1)
                if isinstance(op, Product)
                else None
                for at, op in enumerate(layer.ops)
            )
            by_signature.setdefault((_signature(layer), tilings), []).append(number)

        def kind(layers: list[int], tilings: tuple[Tiling | None, ...]) -> Kind:
            layer = self.plan.ops.layers[layers[0]]
            modules = tuple(number for number, module in enumerate(layer.modules) for _ in module.ops)
            return Kind(layer.ops, modules, tilings, tuple(layers))

        return tuple(kind(layers, tilings) for (_, tilings), layers in by_signature.items())

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """For each layer the index of its kind."""
        found = {layer: index for index, kind in enumerate(self.kinds) for layer in kind.layers}
        return tuple(found[layer] for layer in range(self.num_layers))

    @cached_property
    def head(self) -> Tiling:
        head = self.plan.ops.head
        ctas = self.ctas * (1 if head.kind == HeadKind.VOCAB_PARALLEL else self.lanes)
        columns = self.hidden * (self.lanes if head.kind == HeadKind.LANE else 1)
        return self._tile(len(self.numbers), head.weight.shape[0], columns, ctas)

    @cached_property
    def tilings(self) -> list[Tiling]:
        return [tiling for kind in self.kinds for tiling in kind.tilings if tiling] + [self.head]

    @cached_property
    def attends(self) -> list[Attend]:
        """One of each kind."""
        return [op for kind in self.kinds for op in kind.ops if isinstance(op, Attend)]

    @cached_property
    def rotations(self) -> dict[tuple[Rotary, int], int]:
        """Tables of rotations, one for each rotary embedding and head size: where each begins, in floats."""
        wanted = dict.fromkeys((op.rotary, op.head_dim) for op in self.attends if op.rotary)
        places, end = {}, 0
        for rotary, head_dim in wanted:
            places[rotary, head_dim] = end
            end += self.plan.ops.context * head_dim
        return places

    @property
    def steps(self) -> list[tuple[int, int]]:
        """A pass op by op, as (one of STEPS by number, ops of a layer from the last on; layer or -1)."""
        first = STEPS.index("op")
        layers = [
            (first + op, layer) for layer, kind in enumerate(self.kind_of) for op in range(len(self.kinds[kind].ops))
        ]
        together = self.lanes > 1 and self.plan.ops.head.kind != HeadKind.VOCAB_PARALLEL
        final = [(STEPS.index("final"), -1)] if together else []
        return [(STEPS.index("embed"), -1), *layers, *final, (STEPS.index("head"), -1)]

    @property
    def kept_floats(self) -> int:
        """Floats of the residual stream that a CTA keeps between launches, where each op is one."""
        return (1 + self.table.history) * self.stream_rows

    def _padded(self, lines: int) -> int:
        return -(-lines // SLOT_LINES) * SLOT_LINES

    @cached_property
    def layer_starts(self) -> tuple[int, ...]:
        """For each layer its first line in a pass; last, the end of all layers."""
        starts = [0]
        for kind in self.kind_of:
            starts.append(starts[-1] + self.kinds[kind].lines)
        return tuple(starts)

    @cached_property
    def layer_lines(self) -> int:
        """Lines of all layers, padded to whole slots."""
        return self._padded(self.layer_starts[-1])

    @cached_property
    def head_lines(self) -> int:
        return self._padded(self.head.lines)

    @property
    def line_words(self) -> int:
        return self.machine.warp_size * 4

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed weights of all lanes, in words of 32 bits."""
        lanes = self.lanes_here if self.peer_ctas else self.lanes
        return (lanes, self.ctas, self.machine.warps, (self.layer_lines + self.head_lines) * self.line_words)

    def offset(self, layer: int, op: int) -> int:
        """Word of each warp's stream at which a layer's product begins."""
        return (self.layer_starts[layer] + self.kinds[self.kind_of[layer]].lines_before(op)) * self.line_words

    @property
    def head_offset(self) -> int:
        return self.layer_lines * self.line_words

    @property
    def stream_bytes(self) -> int:
        """Bytes read for one token, by all lanes, padding included."""
        return math.prod(self.packed_shape) * 4

    def max_splits(self, op: Attend) -> int:
        """Splits of a key/value head's keys: as many as there are CTAs for."""
        return max(1, min(MAX_SPLITS, self.ctas // op.kv_heads))

    def _attention_floats(self, op: Attend) -> int:
        group_heads, width = op.heads // op.kv_heads, WIDTH[self.plan.cache_dtype]
        per = 16 // width if op.head_dim * width % 16 == 0 else 1
        pieces, threads = op.head_dim // per, 1
        while threads < 16 and -(-pieces // threads) > 4:
            threads *= 2
        own = -(-pieces // threads) * per
        at_once = max(1, min(group_heads, 64 // own))
        return (
            (group_heads + 2) * op.head_dim
            + self.machine.warps * at_once * (op.head_dim + 2)
            + 2 * self.max_splits(op) * op.heads
        )

    @cached_property
    def shared_floats(self) -> int:
        warps, rows = self.machine.warps, self.stream_rows

        def even(n):
            return n + n % 2

        partial = max(tiling.partial_floats for tiling in self.tilings)
        sampler = 2 * 2048 + 2 * 64 + 4 * warps + 16
        return (
            2 * even(partial)
            + 2 * even(warps)
            + even(max(sampler, *map(self._attention_floats, self.attends)))
            + even(max(op.heads * op.head_dim for op in self.attends))
            + even(max(tiling.brought_floats for tiling in self.tilings))
            + even(rows)
            + even(self.table.history * rows)
            + 2 * even(self.head.rows)
            + 2
        )

    @cached_property
    def slots(self) -> int:
        """Slots of each warp's ring: as many as shared memory holds, up to 64 KiB for a warp. Raises ValueError for
        too few.
        """
        if not self.machine.bulk_copies:
            return 1
        each = self.machine.warps * (SLOT_LINES * self.machine.warp_size * 16 + 8)
        slots = min(16, (self.machine.shared_bytes - 128 - 4 * self.shared_floats) // each)
        if slots < 4:
            raise ValueError(
                f"the kernel needs {4 * self.shared_floats} bytes of shared memory beside the weights' ring, which"
                " leaves no room for it: use more devices"
            )
        return slots

    @property
    def barrier_bytes(self) -> int:
        return -(-8 * self.machine.warps * self.slots // 128) * 128 if self.machine.bulk_copies else 0

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

    @cached_property
    def mail_slots(self) -> int:
        """Slots of the ring of lane exchanges; a power of two, so that sequence numbers may wrap around."""
        return 1 << (ring_slots(self.table.exchanges) - 1).bit_length()

    @property
    def pass_tags(self) -> int:
        """Tags that a pass takes; a power of two, so that they may wrap around."""
        return 1 << (2 * self.num_layers + 2).bit_length()

    def _channels(self, value: Value) -> int:
        """Most channels that a product writes of such a value."""
        products = (op for kind in self.kinds for op in kind.ops if isinstance(op, Product))
        return max(op.channels for op in products if op.writes is value)

    def boards(self) -> Iterator[tuple[str, int]]:
        """Memory between the CTAs of a lane, in words."""
        yield "StreamBoard", self.hidden
        yield "OtherStreamBoard", self.hidden
        yield "ProjectedBoard", self._channels(Value.PROJECTED)
        yield (
            "PartsBoard",
            max(op.heads * self.max_splits(op) * (op.head_dim + 2 + op.head_dim % 2) for op in self.attends),
        )
        yield "HiddenBoard", self._channels(Value.HIDDEN)
        yield "HeadBoard", self.head.columns
        # Of each CTA a sum over its rows, for ops and for each event of the schedule.
        yield "RowSumsBoard", self.ctas * (1 + sum(map(len, self.table.events)))

    def shared(self) -> Iterator[tuple[str, int]]:
        """Memory between the lanes, on each device, in words. The first word is the call's failure."""
        vocab, packets = self.plan.ops.vocab_size, self.lanes * self.ctas
        yield "Abort", 16
        yield "CheckIn", packets
        yield "Packets", 2 * packets * 6
        yield "LargestZ", 2 * packets
        yield "Z", 2 * vocab
        yield "Logits", 2 * vocab
        yield "Mail", self.mail_slots * self.lanes * self.hidden

    @staticmethod
    def places(parts: Iterator[tuple[str, int]]) -> tuple[dict[str, int], int]:
        at, places = 0, {}
        for name, words in parts:
            places[name] = at
            at += -(-words // 16) * 16
        return places, at

    @property
    def lane_words(self) -> int:
        return self.places(self.boards())[1]

    @property
    def shared_words(self) -> int:
        return self.places(self.shared())[1]


# What a module passes on from op to op, for each of a layer's two
CHAINS = ((Value.STREAM, Value.PROJECTED, Value.ATTENDED, Value.OUTPUT), (Value.STREAM, Value.HIDDEN, Value.OUTPUT))


def _unknown(layer: Layer, hidden: int) -> Iterator[str]:
    """What a layer has that the kernel has not."""
    for module, chain in zip(layer.modules, CHAINS, strict=True):
        steps = [(op.reads, op.writes) for op in module.ops]
        values = [module.ops[0].reads, *(op.writes for op in module.ops)]  # twice after an op in place
        if steps != list(itertools.pairwise(values)) or tuple(value for value, _ in itertools.groupby(values)) != chain:
            yield f"its ops are {' '.join(f'{a.name} -> {b.name}' for a, b in steps)}"
    for op in layer.ops:
        if isinstance(op, Attend):
            projected = layer.attention.ops[0].channels
            if projected != op.projected or op.heads % op.kv_heads:
                yield f"{op.heads} query and {op.kv_heads} key heads of {op.head_dim} do not fit {projected} channels"
        if not isinstance(op, Product):
            continue
        if op.chosen or op.limit is not None or op.up_offset:
            yield f"product {op.name.name} is of experts, or has limits"
        if op.norm and op.reads is not Value.STREAM:
            yield f"product {op.name.name} reads {op.reads.name} with a norm"
        if op.writes is Value.OUTPUT and (op.gated or op.activation is not Activation.NONE):
            yield f"product {op.name.name} writes OUTPUT {'gated' if op.gated else f'through {op.activation.name}'}"
        if op.writes is Value.OUTPUT and op.rows != hidden:
            yield f"product {op.name.name} writes {op.rows} of {hidden} channels"
        if len({matrix.bias is None for matrix in op.matrices}) > 1:
            yield f"product {op.name.name} has biases for some of its matrices"
