"""The header model.h, for which the kernel is compiled.

It has the numbers of a layout, a struct for each op of each kind of module, whose constants are the fields of the op
(laneformer/ops.py), how it is tiled and where its small weights are, the list of each kind's ops
(custom_calls/gpu/kernel/ops.h), and a struct for the fields that modules have beside their ops.
"""

from collections.abc import Iterator
from typing import get_args

from laneformer.custom_calls.gpu import edges
from laneformer.custom_calls.gpu.kinds import Kind
from laneformer.custom_calls.gpu.layout import SPLIT_KEYS, Layout
from laneformer.custom_calls.gpu.memory import SLOT_LINES
from laneformer.custom_calls.gpu.ops.struct import (
    Facts,
    Names,
    OpStruct,
    by_layer,
    fields_of,
    literal,
    struct_lines,
    title,
)
from laneformer.ops import ENTRIES, TRACE_NAMES, HeadKind, Op, ProductName, Value, kept_by, trace_name


def model_header(layout: Layout) -> str:
    """The file model.h for a layout."""
    ops = layout.plan.ops
    numbers = {
        "kLanes": layout.lanes,
        "kLanesHere": layout.lanes_here,
        "kPeerCtas": layout.peer_ctas,
        "kCtas": layout.ctas,
        "kWarps": layout.machine.warps,
        "kLayers": layout.num_layers,
        "kHidden": layout.hidden,
        "kStreamRows": layout.stream_rows,
        "kStreams": layout.streams,
        "kKeptFloats": layout.kept_floats,
        "kVocab": ops.vocab_size,
        "kSlotLines": SLOT_LINES,
        "kSlots": layout.memory.slots,
        "kAheadSlots": layout.memory.ahead_slots,
        "kBarrierBytes": layout.memory.barrier_bytes,
        "kLayerLines": layout.layer_lines,
        "kHeadLines": layout.head_lines,
        "kLayerPadding": layout.layer_lines - layout.layer_starts[-1],
        "kHeadPadding": layout.head_lines - layout.gather_lines - layout.head.all_lines,
        "kGatherLines": layout.gather_lines,
        "kHeadTurns": layout.head.turns,
        "kHeadRows": layout.head_rows,
        "kHeadParts": layout.head_parts,
        "kPassRows": layout.rows,
        "kRequests": layout.requests,
        "kDraftInts": layout.draft_ints,
        "kSharedFloats": layout.memory.shared_floats,
        "kSplitKeys": SPLIT_KEYS,
        "kEntries": ENTRIES,
        "kMailSlots": edges.mail_slots(layout),
        "kPassTags": edges.pass_tags(layout),
        "kHistory": layout.table.history,
        "kNumSums": len(layout.table.sums),
        "kLaneWords": edges.lane_words(layout),
        "kSpares": layout.spares,
        "kStagedFloats": layout.staged_floats,
        "kStreamTriples": layout.triples.get("kStreamBoard", 0),
    }
    numbers |= edges.places(edges.boards(layout))[0]
    numbers |= edges.places(edges.shared(layout))[0]
    truths = {
        "kAnyMean": any(total.stream_mean for total in layout.table.sums),
        "kListed": any(tiling.units for tiling in layout.tilings),
        "kAnyExperts": layout.any_experts,
        "kByToken": bool(layout.plan.tables),
        "kZInMerged": layout.memory.z_in_merged,
        "kDrafting": layout.drafting,
    }
    dtypes = {
        "kWeights": layout.plan.weight_dtype,
        "kEmbedding": layout.plan.weight_dtype,
        "kCache": layout.plan.cache_dtype,
    }
    functions: list[tuple[list[str], str]] = []
    if layout.any_experts:
        numbers |= {
            "kRowLines": layout.row_lines,
            "kMostPieces": layout.memory.most_pieces,
            "kCourseParts": len(layout.courses) - 1,
        }
        functions += _courses(layout)
    lines = [
        "// Written by custom_calls/gpu/header.py.",
        "#pragma once",
        f"#define LF_KEPT {sum(map(len, layout.plan.kept))}",
        *(["#define LF_EXPERTS 1"] if layout.any_experts else []),
        *(["#define LF_OUT_OF_LINE 1"] if "out-of-line" in layout.variants else []),
        '#include "ops.h"',
        "namespace laneformer {",
        "namespace gpu {",
        *(_enumeration(names) for names in (Value, HeadKind, ProductName)),
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        *(f"constexpr bool {name} = {literal(value)};" for name, value in truths.items()),
        *(f"constexpr Dtype {name} = k{value.name.title()};" for name, value in dtypes.items()),
        f"constexpr float kEmbeddingMultiplier = {literal(float(layout.plan.ops.embedding_multiplier))};",
        *_kinds(layout),
        *_head_struct(layout),
        *_head_mixture(layout),
        *_modules_struct(layout),
        *(line for before, function in functions for line in (*before, function)),
        "struct Event { int landing, module; float weight; int parts, num_parts; };",
        "struct Sum { int width, complete_at; bool stream_mean; int parts, num_parts; };",
        "struct Part { int module; float weight; };",
        *_tables(layout),
        "}  // namespace gpu",
        "}  // namespace laneformer",
    ]
    return "\n".join(lines) + "\n"


def _courses(layout: Layout) -> Iterator[tuple[list[str], str]]:
    """Functions of the number of a part of the weights that no router chooses, in `Layout.courses`."""
    for name, values in zip(
        ("part_line", "part_lines", "experts_follow"), zip(*layout.courses, strict=True), strict=True
    ):
        yield by_layer(name, dict(enumerate(map(int, values))), len(values), "Course")


def _head_struct(layout: Layout) -> Iterator[str]:
    constants, functions = fields_of(layout.plan.places, {0: layout.plan.ops.head})
    functions["product"] = {0: len(layout.numbers)}
    aliases = {"Weights": layout.head.format.struct}
    return struct_lines("Head", layout.head.fields | constants, functions, aliases, layout.num_layers)


def _head_mixture(layout: Layout) -> Iterator[str]:
    """What the head reads of several streams: a list of one op, or of none."""
    gather, tiling = layout.plan.ops.head.gather, layout.head_mixture
    if gather and tiling:
        constants, functions = fields_of(layout.plan.places, {0: gather})
        constants |= tiling.fields | {"kTiled": True, "kChosen": False, "kSumSets": 1}
        aliases = {"Weights": tiling.format.struct}
        yield from struct_lines("HeadMixture", constants, functions | {"product": {0: 0}}, aliases, layout.num_layers)
    yield f"using HeadGather = Ops<{'HeadMixture' if gather else ''}>;"


def _modules_struct(layout: Layout) -> Iterator[str]:
    """Functions in it are of the module, by time."""
    constants, functions = fields_of(layout.plan.places, dict(enumerate(layout.modules)))
    return struct_lines("Modules", constants, functions, {}, len(layout.modules))


def _kinds(layout: Layout) -> Iterator[str]:
    """The ops of each kind of modules, and a struct for each module of a layer: its kinds, that which a layer has, and
    the first line of the module.
    """
    facts = Facts(
        num_layers=layout.num_layers,
        boards=edges.places(edges.boards(layout))[0],
        places=layout.plan.places,
        rotations=layout.rotations,
        first_kept=layout.first_kept,
        products=layout.numbers,
        line=layout.line,
    )
    for index, kind in enumerate(layout.kinds):
        yield from _structs(layout, kind, index, facts)

    def listed(first: int, count: int) -> str:
        return f"Kinds<{', '.join(f'Kind{index}' for index in range(first, first + count))}>"

    first = 0
    for module, name in enumerate(("Attentions", "FeedForwards")):
        own = layout.of_modules[module]
        functions = {
            "kind_of": {layer: index for index, kind in enumerate(own) for layer in kind.layers},
            "first_line": {layer: layout.module_start(layer, module) for layer in range(layout.num_layers)},
        }
        functions = {name: dict(sorted(values.items())) for name, values in functions.items()}
        yield from struct_lines(name, {}, functions, {"All": listed(first, len(own))}, layout.num_layers)
        first += len(own)
    yield f"using AllKinds = {listed(0, first)};"


def _structs(layout: Layout, kind: Kind, index: int, facts: Facts) -> Iterator[str]:
    """A struct for each op of a kind of modules, and their list."""
    names: list[str] = []
    shared = Names()
    for number, (stage, tiling) in enumerate(zip(kind.stages, kind.tilings, strict=True)):
        numbers = {layer: layout.first_stage(layer, stage.module) + number for layer in kind.layers}
        name = f"{stage.kernel.label}{index}"
        while name in names:  # a part in another format
            name += "_"
        names.append(name)
        struct = OpStruct(
            name,
            index,
            layout.lane,
            {layer: layout.stages[layer][at] for layer, at in numbers.items()},
            numbers,
            tiling,
            kind.lines_before(number),
            facts,
            kind.ops[number + 1] if number + 1 < len(kind.ops) else None,
            shared,
        )
        of_layers = {layer: own.op for layer, own in struct.stages.items()}
        struct.constants, struct.functions = struct.fields_of(of_layers)
        struct.constants |= _of_stage(layout, kind, number, facts)
        stage.kernel.header(struct)
        yield from struct.lines()
    yield f"using Kind{index} = Ops<{', '.join(names)}>;"


def _of_stage(layout: Layout, kind: Kind, number: int, facts: Facts) -> dict:
    """The constants that all ops have: what they read and write, and of which kind they are."""
    stage, tiling = kind.stages[number], kind.tilings[number]
    op, chosen = stage.op, tiling is not None and tiling.pieces is not None
    kinds = {f"kIs{each.__name__}": isinstance(op, each) for each in get_args(Op)}
    return {
        "kModule": stage.module,
        "kEndsModule": number + 1 == len(kind.stages),
        "kFrom": facts.boards.get(stage.reads, -1),
        "kTo": facts.boards.get(stage.writes, -1) + stage.first,
        "kFromTriples": layout.triples.get("kStreamBoard" if op.reads is Value.STREAM else stage.reads, 0),
        "kToTriples": layout.triples.get(stage.writes, 0),
        "kReads": op.reads,
        "kWrites": op.writes,
        "kTraced": TRACE_NAMES.index(trace_name(op)),
        **kinds,
        "kIsRouter": stage.kernel.routes,
        "kBases": kept_by(op)["base"].shape[0] if "base" in kept_by(op) else 0,
        "kAttends": stage.kernel.keeps,
        "kTiled": tiling is not None,
        "kChosen": chosen,
        "kStreamed": tiling is not None and not chosen,
    }


def _tables(layout: Layout) -> Iterator[str]:
    parts: list[tuple[int, float]] = []

    def place(pairs) -> tuple[int, int]:
        parts.extend(pairs)
        return len(parts) - len(pairs), len(pairs)

    events, starts = [], [0]
    for at_time in layout.table.events:
        for event in at_time:
            first, count = place(event.apart)
            events.append(f"{{{event.payload}, {event.module}, {literal(event.weight)}, {first}, {count}}}")
        starts.append(len(events))
    sums = []
    for total in layout.table.sums:
        first, count = place(total.parts)
        sums.append(f"{{{total.width}, {total.complete_at}, {int(total.stream_mean)}, {first}, {count}}}")
    yield f"LF_CONSTANT int kEventsAt[] = {{{', '.join(map(str, starts))}}};"
    yield f"LF_CONSTANT Event kEvents[] = {{{', '.join(events) or '{}'}}};"
    yield f"LF_CONSTANT Sum kSums[] = {{{', '.join(sums) or '{}'}}};"
    yield f"LF_CONSTANT Part kParts[] = {{{', '.join(f'{{{m}, {literal(w)}}}' for m, w in parts) or '{}'}}};"


def _name(member) -> str:
    return title(member.name)


def _enumeration(members) -> str:
    return f"enum class {members.__name__} {{ {', '.join(f'k{_name(m)} = {int(m)}' for m in members)} }};"
