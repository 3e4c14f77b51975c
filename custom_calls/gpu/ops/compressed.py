"""Compressed attention. The stage that makes entries follows the first product of the queries, and is computed while
that product's edge is open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from laneformer.custom_calls.gpu.ops.attend import MOST_SUMS, AttentionKernel, AttentionSizes, own_channels, splits_of
from laneformer.custom_calls.gpu.ops.kernel import Lane, ModuleStages, OpKernel, Stage
from laneformer.custom_calls.gpu.ops.struct import OpStruct
from laneformer.custom_calls.gpu.ops.supported import in_words, steps_of
from laneformer.custom_calls.gpu.tiling import Machine, Tiling
from laneformer.ops import CompressedAttend, CompressedKeep, Compressor, Layer, Product, Rotary, Value, kept_by

MORE_SPLITS, LEAST_KEYS = 32, 16  # few keys, and each channel is merged once: most splits, fewest keys of a split
BUCKETS, LEAST_PLACES = 1 << 11, 32  # as in gpu/kernel/mixers/compressed_keep.h
WARP_KEYS = 4  # keys of an index that a warp has in registers at the same time

# The ops of a module, in layers without and with an index
ORDERS = tuple(
    [
        (Product, Value.STREAM, Value.PROJECTED),
        (Product, Value.STREAM, Value.HIDDEN),
        (Product, Value.HIDDEN, Value.QUERIES),
        *index,
        (CompressedKeep, Value.PROJECTED, Value.PROJECTED),
        (CompressedAttend, Value.QUERIES, Value.ATTENDED),
        (Product, Value.ATTENDED, Value.PROJECTED),
        (Product, Value.PROJECTED, Value.OUTPUT),
    ]
    for index in ([], [(Product, Value.HIDDEN, Value.INDEX)])
)


def _even(channels: int) -> int:
    return channels + channels % 2


class CompressedKeepKernel(OpKernel[CompressedKeep]):
    kinds: ClassVar = (CompressedKeep,)
    keeps: ClassVar = True

    @property
    def _compressors(self) -> list[Compressor]:
        return [own for own in (self.op.entries, self.op.keys) if own]

    def add_stages(self, module: ModuleStages) -> None:
        stage = Stage(self, module.module, reads=module.boards.get(self.op.reads, ""), writes="kEntriesBoard")
        behind = next(n for n, other in enumerate(module.found) if other.op.reads is Value.HIDDEN)
        module.found.insert(behind, stage)

    def words(self, stage: Stage) -> int:
        return sum(_even(own.channels) for own in self._compressors)

    def task_floats(self, lane: Lane, rows: int) -> int:
        return 3 * lane.machine.warps * lane.machine.warp_size

    def rotations(self) -> list[tuple[Rotary, int]]:
        rotaries = (self.op.rotary, *(own.rotary for own in self._compressors))
        return [(rotary, rotary.channels) for rotary in rotaries]

    def header(self, struct: OpStruct) -> None:
        struct.names.keep = struct.name
        struct.aliases |= {"Entries": f"Entries{struct.kind}", "Keys": f"Keys{struct.kind}"}
        place = 0  # on the board
        arrays = [*kept_by(self.op)]
        for name, field, array in (("Entries", "entries", "compressed"), ("Keys", "keys", "index_keys")):
            of_layers = {layer: getattr(stage.op, field) for layer, stage in struct.stages.items()}
            own: Compressor | None = getattr(self.op, field)
            part = struct.part(f"{name}{struct.kind}", {"kChannels": 0, "kRatio": 1})
            if own:
                part.constants, part.functions = part.fields_of(of_layers)
                part.add_rotations(own.rotary, own.rotary.channels)
                part.constants |= {"kPlace": place, "kArray": arrays.index(array)}
                place += _even(own.channels)
            part.constants["kGiven"] = own is not None
            struct.before += part.lines()
        struct.add_rotations(self.op.rotary, self.op.rotary.channels)
        struct.constants["kArray"] = arrays.index("positions")
        struct.add_cache()


@dataclass(frozen=True)
class CompressedSizes(AttentionSizes):
    """The sizes of compressed attention. Each group has as many heads as a thread has sums for."""

    op: CompressedAttend

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
        task, index = self.task_floats(rows + new, machine, width), self.op.index
        if not index:
            return task
        stride = index.channels + 1 - index.channels % 2
        scores = index.heads * (stride + 1) + (new + machine.warps * WARP_KEYS) * index.channels
        choice = 2 * BUCKETS + 2 * machine.warps + 2 + LEAST_PLACES
        return max(task, scores, choice) + self.most_listed


class CompressedAttendKernel(AttentionKernel[CompressedAttend]):
    kinds: ClassVar = (CompressedAttend,)
    own_order: ClassVar = True

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, ops = self.op, layer.attention.ops
        if steps_of(ops) != ORDERS[bool(op.index)]:
            yield in_words(steps_of(ops))
            return
        groups = next(one for one in ops if isinstance(one, Product) and one.reads is Value.ATTENDED)
        if groups.blocks is None or groups.columns != groups.blocks.step or groups.columns % op.head_dim:
            yield f"product {groups.name.name} does not read groups of whole heads"
        if op.head_dim % 2:
            yield f"heads of compressed attention have {op.head_dim} channels, an odd number"
        keep = next(one for one in ops if isinstance(one, CompressedKeep))
        if bool(keep.keys) != bool(op.index):
            yield "compressed attention keeps keys without an index, or has an index without keys"

    def add_stages(self, module: ModuleStages) -> None:
        board = module.boards[Value.ATTENDED] = "kAttendedBoard"  # ATTENDED of other attention is on no board
        reads, index = module.boards.get(self.op.reads, ""), module.boards.get(Value.INDEX, "")
        keep = module.first(CompressedKeep)
        module.found.append(Stage(self, module.module, reads=reads, writes=board, keep=keep, index=index))

    def sizes(self, lane: Lane) -> CompressedSizes:
        op = self.op
        at_once = max(1, MOST_SUMS // own_channels(op.head_dim, lane.width))
        groups = min(n for n in range(1, op.heads + 1) if op.heads % n == 0 and op.heads // n <= at_once)
        splits = splits_of(lane.ctas, groups, MORE_SPLITS)
        return CompressedSizes(op.heads, groups, op.head_dim, op.head_dim, splits, True, op)

    def words(self, stage: Stage) -> int:
        return self.op.heads * self.op.head_dim

    def boards(self, lane: Lane, tiling: Tiling | None) -> dict[str, int]:
        op = self.op
        scores = {"kScoresBoard": -(-lane.context // op.ratio)} if op.index and op.ratio else {}
        return super().boards(lane, tiling) | scores

    def header(self, struct: OpStruct) -> None:
        struct.aliases["Keep"] = struct.names.keep
        index = self.op.index
        numbers = (index.heads, index.channels, index.first, index.most) if index else (0, 0, 0, 0)
        names = ("kIndexHeads", "kIndexChannels", "kIndexFirst", "kIndexMost")
        struct.constants |= dict(zip(names, numbers, strict=True))
        struct.constants |= {"kIndex": struct.board(struct.stage.index), "kLeastKeys": LEAST_KEYS}
        struct.constants["kMostListed"] = self.sizes(struct.lane).most_listed
        self.add_constants(struct, self.op.scale, {})
