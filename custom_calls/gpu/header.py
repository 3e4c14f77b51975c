"""The header model.h, for which the kernel is compiled.

It has the numbers of a layout, a struct for each op of each kind of module, whose constants are the fields of the op
(laneformer/ops.py), how it is tiled and where its small weights are, the list of each kind's ops
(custom_calls/gpu/kernel/ops.h), and a struct for the fields that modules have beside their ops.
"""

import dataclasses
import math
from collections.abc import Iterator
from enum import IntEnum
from typing import get_args

import numpy as np

from laneformer.custom_calls.gpu import edges
from laneformer.custom_calls.gpu.attention import LEAST_KEYS, CompressedSizes, rotated
from laneformer.custom_calls.gpu.kinds import Kind
from laneformer.custom_calls.gpu.layout import SLOT_LINES, SPLIT_KEYS, Layout
from laneformer.custom_calls.gpu.supported import Router
from laneformer.custom_calls.ops_header import alternatives, fields, sizes
from laneformer.custom_calls.plan import kept_of
from laneformer.ops import (
    ENTRIES,
    TRACE_NAMES,
    Attend,
    CompressedAttend,
    CompressedKeep,
    DeltaNet,
    Head,
    HeadKind,
    LatentAttend,
    Module,
    Norm,
    Op,
    Product,
    ProductName,
    Value,
    Weight,
    trace_name,
)


def model_header(layout: Layout) -> str:
    """The file model.h for a layout."""
    ops = layout.plan.ops
    numbers = {
        "Lanes": layout.lanes,
        "LanesHere": layout.lanes_here,
        "PeerCtas": layout.peer_ctas,
        "Ctas": layout.ctas,
        "Warps": layout.machine.warps,
        "Layers": layout.num_layers,
        "Hidden": layout.hidden,
        "StreamRows": layout.stream_rows,
        "Streams": layout.streams,
        "KeptFloats": layout.kept_floats,
        "Vocab": ops.vocab_size,
        "SlotLines": SLOT_LINES,
        "Slots": layout.slots,
        "AheadSlots": layout.ahead_slots,
        "BarrierBytes": layout.barrier_bytes,
        "LayerLines": layout.layer_lines,
        "HeadLines": layout.head_lines,
        "LayerPadding": layout.layer_lines - layout.layer_starts[-1],
        "HeadPadding": layout.head_lines - layout.gather_lines - layout.head.all_lines,
        "GatherLines": layout.gather_lines,
        "HeadTurns": layout.head.turns,
        "HeadRows": layout.head_rows,
        "HeadParts": layout.head_parts,
        "PassRows": layout.rows,
        "Requests": layout.requests,
        "DraftInts": layout.draft_ints,
        "SharedFloats": layout.shared_floats,
        "SplitKeys": SPLIT_KEYS,
        "Entries": ENTRIES,
        "MailSlots": edges.mail_slots(layout),
        "PassTags": edges.pass_tags(layout),
        "History": layout.table.history,
        "NumSums": len(layout.table.sums),
        "LaneWords": edges.lane_words(layout),
        "Spares": layout.spares,
        "StagedFloats": layout.staged_floats,
        "StreamTriples": layout.triples.get("StreamBoard", 0),
    }
    numbers |= edges.places(edges.boards(layout))[0]
    numbers |= {f"{name}At": place for name, place in edges.places(edges.shared(layout))[0].items()}
    truths = {
        "AnyMean": any(total.stream_mean for total in layout.table.sums),
        "Listed": any(tiling.units for tiling in layout.tilings),
        "AnyExperts": layout.any_experts,
        "ByToken": bool(layout.plan.tables),
        "ZInMerged": layout.z_in_merged,
        "Drafting": layout.drafting,
    }
    dtypes = {
        "Weights": layout.plan.weight_dtype,
        "Embedding": layout.plan.weight_dtype,
        "Cache": layout.plan.cache_dtype,
    }
    functions = []
    if layout.any_experts:
        numbers |= {
            "RowLines": layout.row_lines,
            "MostPieces": layout.most_pieces,
            "CourseParts": len(layout.courses) - 1,
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
        *(f"constexpr int k{name} = {value};" for name, value in numbers.items()),
        *(f"constexpr bool k{name} = {_literal(value)};" for name, value in truths.items()),
        *(f"constexpr Dtype k{name} = k{value.name.title()};" for name, value in dtypes.items()),
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
        yield _by_layer(name, dict(enumerate(map(int, values))), len(values), "Course")


def _head_struct(layout: Layout) -> Iterator[str]:
    constants, functions = _of_fields(layout, {0: layout.plan.ops.head})
    functions["product"] = {0: len(layout.numbers)}
    aliases = {"Weights": layout.head.format.struct}
    return _struct("Head", layout.head.fields | constants, functions, aliases, layout.num_layers)


def _head_mixture(layout: Layout) -> Iterator[str]:
    """What the head reads of several streams: a list of one op, or of none."""
    gather = layout.plan.ops.head.gather
    if gather:
        constants, functions = _of_fields(layout, {0: gather})
        constants |= layout.head_mixture.fields | {"Tiled": True, "Chosen": False, "SumSets": 1}
        aliases = {"Weights": layout.head_mixture.format.struct}
        yield from _struct("HeadMixture", constants, functions | {"product": {0: 0}}, aliases, layout.num_layers)
    yield f"using HeadGather = Ops<{'HeadMixture' if gather else ''}>;"


def _modules_struct(layout: Layout) -> Iterator[str]:
    """Functions in it are of the module, by time."""
    constants, functions = _of_fields(layout, dict(enumerate(layout.modules)))
    return _struct("Modules", constants, functions, {}, len(layout.modules))


def _kinds(layout: Layout) -> Iterator[str]:
    """The ops of each kind of modules, and a struct for each module of a layer: its kinds, that which a layer has, and
    the first line of the module.
    """
    for index, kind in enumerate(layout.kinds):
        yield from _structs(layout, kind, index)

    def listed(first: int, count: int) -> str:
        return f"Kinds<{', '.join(f'Kind{index}' for index in range(first, first + count))}>"

    first = 0
    for module, title in enumerate(("Attentions", "FeedForwards")):
        own = layout.of_modules[module]
        functions = {
            "kind_of": {layer: index for index, kind in enumerate(own) for layer in kind.layers},
            "first_line": {layer: layout.module_start(layer, module) for layer in range(layout.num_layers)},
        }
        functions = {name: dict(sorted(values.items())) for name, values in functions.items()}
        yield from _struct(title, {}, functions, {"All": listed(first, len(own))}, layout.num_layers)
        first += len(own)
    yield f"using AllKinds = {listed(0, first)};"


def _structs(layout: Layout, kind: Kind, index: int) -> Iterator[str]:
    """A struct for each op of a kind of modules, and their list."""
    names, attended, router = [], None, None
    boards = edges.places(edges.boards(layout))[0]
    for number, stage in enumerate(kind.stages):
        numbers = {layer: layout.first_stage(layer, stage.module) + number for layer in kind.layers}
        op = stage.op
        name = f"{_name(op.name) if isinstance(op, Product) else type(op).__name__}{index}"
        while name in names:  # a part in another format
            name += "_"
        names.append(name)
        of_layers = {layer: layout.stages[layer][at].op for layer, at in numbers.items()}
        constants, functions = _of_fields(layout, of_layers)
        constants |= {"Module": stage.module, "EndsModule": number + 1 == len(kind.stages)}
        constants |= {"From": boards.get(stage.reads, -1), "To": boards.get(stage.writes, -1) + stage.first}
        triples = layout.triples.get("StreamBoard" if op.reads is Value.STREAM else stage.reads, 0)
        constants |= {"FromTriples": triples, "ToTriples": layout.triples.get(stage.writes, 0)}
        constants |= {"Reads": op.reads, "Writes": op.writes, "Traced": TRACE_NAMES.index(trace_name(op))}
        constants |= {f"Is{each.__name__}": isinstance(op, each) for each in get_args(Op)}
        constants["IsRouter"] = isinstance(op, Router)
        aliases, tiling = {}, kind.tilings[number]
        attends = isinstance(op, Attend | LatentAttend | CompressedAttend | DeltaNet)
        constants["Bases"] = next((kept.shape[0] for kept in kept_of(op, "float32") if kept.name == "base"), 0)
        constants["Attends"] = attends or isinstance(op, CompressedKeep)
        constants |= {"Tiled": tiling is not None, "Chosen": tiling is not None and tiling.pieces is not None}
        constants["Streamed"] = constants["Tiled"] and not constants["Chosen"]
        if isinstance(op, LatentAttend):
            of_keeps = {layer: layout.stages[layer][at].keep for layer, at in numbers.items()}
            kept, gains = _of_fields(layout, of_keeps)
            constants |= kept | {"Queries": boards[stage.queries], "Latents": boards[stage.latents]}
            functions |= gains | {"window": dict.fromkeys(kind.layers, 0)}
        if isinstance(op, CompressedKeep):
            keep, aliases = name, {"Entries": f"Entries{index}", "Keys": f"Keys{index}"}
            yield from _compressors(layout, index, of_layers)
            constants |= _rotations(layout, op) | {"Array": int(op.entries is not None)}
            functions["cache"] = {layer: layout.first_kept[layer] for layer in kind.layers}
        elif isinstance(op, CompressedAttend):
            aliases = {"Keep": keep}
            constants |= _index_constants(op, layout.sizes(op), boards.get(stage.index, -1))
        if attends:
            attended = name
            constants |= _delta_constants(op) if isinstance(op, DeltaNet) else _attend_constants(layout, op)
            functions["cache"] = {layer: layout.first_kept[layer] for layer in kind.layers}
        elif tiling:
            constants |= tiling.fields | {"FirstLine": kind.lines_before(number), "SumSets": tiling.sum_sets}
            first = {layer: layout.stages[layer][at].matrices[0] for layer, at in numbers.items()}
            bias = next(iter(first.values())).bias
            if bias:
                constants["BiasStride"] = layout.plan.places[bias.path].stride
                functions["bias"] = {layer: _at(layout, own.bias) for layer, own in first.items()}
            constants["Biased"] = bias is not None
            functions["product"] = {layer: layout.numbers.get((layer, at), 0) for layer, at in numbers.items()}
            aliases = {"Weights": tiling.format.struct}
        if isinstance(op, Router):
            router = name
            given = {"Groups": 1, "CorrectionGiven": False, "ByTokenGiven": False}
            constants = given | constants | {"Experts": op.matrix.rows}
        elif isinstance(op, Product):
            constants |= {"Channels": op.channels, "Adds": stage.adds, "Scaled": stage.adds and bool(stage.shared.gate)}
            aliases |= {"Attended": attended} if op.reads is Value.ATTENDED else {}
            aliases |= {"Router": router} if constants["Scaled"] else {}
            constants |= {"OfBlocks": op.blocks is not None, "OddHead": stage.of_head * (stage.of_head % 2)}
            if op.blocks:
                step = op.blocks.step + op.blocks.step % 2
                constants |= {"Blocks": op.blocks.count, "BlockStep": step, "BlockRows": op.rows}
        if constants["Chosen"]:
            functions["stored"] = {layer: layout.line(layer, at) for layer, at in numbers.items()}
            constants["Summed"] = op.chosen.summed
            aliases["Router"] = router
            if not op.chosen.summed:
                then = kind.ops[number + 1]
                aliases["Then"] = f"struct {_name(then.name)}{index}"
        yield from _struct(name, constants, functions, aliases, layout.num_layers)
    yield f"using Kind{index} = Ops<{', '.join(names)}>;"


def _compressors(layout: Layout, index: int, of_layers: dict[int, CompressedKeep]) -> Iterator[str]:
    """A struct for the entries and one for the index's keys, given or not. Place: on their board; Array: among those
    that the layer keeps.
    """
    place = 0
    for title, field, array in (("Entries", "entries", 2), ("Keys", "index_keys", 4)):
        of_own = {layer: getattr(op, field) for layer, op in of_layers.items()}
        own, constants, functions = next(iter(of_own.values())), {"Channels": 0, "Ratio": 1}, {}
        if own:
            constants, functions = _of_fields(layout, of_own)
            constants |= _rotations(layout, own) | {"Place": place, "Array": array}
            place += own.channels + own.channels % 2
        yield from _struct(f"{title}{index}", constants | {"Given": own is not None}, functions, {}, layout.num_layers)


def _index_constants(op: CompressedAttend, sizes: CompressedSizes, board: int) -> dict:
    index = op.index
    numbers = (index.heads, index.channels, index.first, index.most) if index else (0, 0, 0, 0)
    found = dict(zip(("IndexHeads", "IndexChannels", "IndexFirst", "IndexMost"), numbers, strict=True))
    return found | {"Index": board, "LeastKeys": LEAST_KEYS, "MostListed": sizes.most_listed}


def _rotations(layout: Layout, op) -> dict:
    return {"Rotating": rotated(op), "Rotations": layout.rotations.get((op.rotary, rotated(op)), 0)}


def _of_fields(layout: Layout, of_layers: dict[int, Op | Head | Module]) -> tuple[dict, dict]:
    """What an op's fields are in its struct: constants by name, and functions of the layer, their values by layer.

    of_layers: the op by layer, or the module by time; they differ only in their weights and windows. A number, a truth
    value, an enumeration and a `size` are constants. An integer that may be None is a function, 0 for None. A float
    that may be None is its value and a constant ...ed. A norm is constants ...ed, ...Eps and ...Stride and a function
    that returns the offset of its gain. A vector is constants ...Given and ...Stride and such a function, -1 for a
    layer that has none while others have one. Matrices, rotations, lists and the choice of experts are the layout's.
    """
    op = next(iter(of_layers.values()))
    constants, functions = {}, {}
    for field, kind in fields(type(op)):
        kinds, optional = alternatives(kind) or ([kind], False)
        value, title = getattr(op, field), _title(field)
        if kinds == [Norm]:
            constants[f"{title}ed"] = value is not None
            constants[f"{title}Eps"] = value.eps if value else 0.0
            constants[f"{title}Stride"] = layout.plan.places[value.gain.path].stride if value else 0
            functions[field] = {
                layer: _at(layout, getattr(own, field).gain) if value else 0 for layer, own in of_layers.items()
            }
        elif kinds == [Weight] and (value is None or not value.is_matrix):
            of_own = {layer: getattr(own, field) for layer, own in of_layers.items()}
            value = next(filter(None, of_own.values()), None)
            constants[f"{title}Given"] = value is not None
            constants[f"{title}Stride"] = layout.plan.places[value.path].stride if value else 0
            missing = -1 if value else 0
            functions[field] = {layer: _at(layout, own) if own else missing for layer, own in of_own.items()}
        elif kinds == [float] and optional:
            constants[f"{title}ed"], constants[title] = value is not None, float(value or 0)
        elif kinds == [int] and optional:
            functions[field] = {layer: getattr(own, field) or 0 for layer, own in of_layers.items()}
        elif isinstance(kind, type) and issubclass(kind, (int, float)):
            constants[title] = value
    return constants | {_title(name): getattr(op, name) for name in sizes(type(op))}, functions


def _attend_constants(layout: Layout, op: Attend | LatentAttend | CompressedAttend) -> dict:
    sizes = layout.sizes(op)
    of_kind = {}
    if isinstance(op, LatentAttend):  # the kernel's code of Attend runs it, without the options
        of_kind = {"ValuesEnd": 0}
        for field in dataclasses.fields(Attend):
            if isinstance(field.default, int | float):
                of_kind[_title(field.name)] = field.default
            elif field.default is None:
                of_kind[f"{_title(field.name)}Given"] = False
    if isinstance(op, Attend):
        of_kind = {
            f"{side}NormOfAll": norm is not None and norm.gain.shape[0] > op.head_dim
            for side, norm in (("Q", op.q_norm), ("K", op.k_norm))
        }
    return of_kind | {
        "Groups": sizes.groups,
        "KeyDim": sizes.key_dim,
        "ValueDim": sizes.value_dim,
        "MaxSplits": sizes.splits,
        "MergedHeads": sizes.merged_heads,
        "SharedKeys": sizes.shared,
        "Scale": _score_scale(op.scale),
        "Rotated": op.rotary is not None,
        **_rotations(layout, op),
    }


def _delta_constants(op: DeltaNet) -> dict:
    return {"Taps": op.convolution.shape[1], "QueryScale": op.key_dim**-0.5}


def _at(layout: Layout, weight: Weight) -> int:
    return layout.plan.places[weight.path].offset


def _tables(layout: Layout) -> Iterator[str]:
    parts: list[tuple[int, float]] = []

    def place(pairs) -> tuple[int, int]:
        parts.extend(pairs)
        return len(parts) - len(pairs), len(pairs)

    events, starts = [], [0]
    for at_time in layout.table.events:
        for event in at_time:
            first, count = place(event.apart)
            events.append(f"{{{event.payload}, {event.module}, {_literal(event.weight)}, {first}, {count}}}")
        starts.append(len(events))
    sums = []
    for total in layout.table.sums:
        first, count = place(total.parts)
        sums.append(f"{{{total.width}, {total.complete_at}, {int(total.stream_mean)}, {first}, {count}}}")
    yield f"LF_CONSTANT int kEventsAt[] = {{{', '.join(map(str, starts))}}};"
    yield f"LF_CONSTANT Event kEvents[] = {{{', '.join(events) or '{}'}}};"
    yield f"LF_CONSTANT Sum kSums[] = {{{', '.join(sums) or '{}'}}};"
    yield f"LF_CONSTANT Part kParts[] = {{{', '.join(f'{{{m}, {_literal(w)}}}' for m, w in parts) or '{}'}}};"


def _score_scale(scale: float) -> float:
    """The factor on scores in units of log 2. Where it is 1 / sqrt(n), rounded to float32, it is rounded only once."""
    n = round(scale**-2)
    if n > 0 and np.float32(1) / np.sqrt(np.float32(n)) == np.float32(scale):
        return math.log2(math.e) / math.sqrt(n)
    return math.log2(math.e) * scale


def _title(name: str) -> str:
    """GATE_UP, gate_up -> GateUp."""
    return name.title().replace("_", "")


def _name(member) -> str:
    return _title(member.name)


def _enumeration(members) -> str:
    return f"enum class {members.__name__} {{ {', '.join(f'k{_name(m)} = {int(m)}' for m in members)} }};"


def _literal(value) -> str:
    if isinstance(value, IntEnum):
        return f"{type(value).__name__}::k{_name(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{float(np.float32(value)).hex()}f" if isinstance(value, float) else str(value)


def _by_layer(name: str, values: dict[int, int], layers: int, prefix: str = "") -> tuple[list[str], str]:
    """A function of the layer: lines before it, and itself. Values in equal steps need no table."""
    numbers, at = list(values), list(values.values())
    step = (at[-1] - at[0]) // (numbers[-1] - numbers[0]) if len(at) > 1 else 0
    if at == [at[0] + step * (number - numbers[0]) for number in numbers]:
        start = at[0] - step * numbers[0]
        result, before = str(start) + (f" + {step} * layer" if step else ""), []
    else:
        table = f"k{prefix}{name.title().replace('_', '')}"
        listed = ", ".join(str(values.get(layer, 0)) for layer in range(layers))
        result, before = f"{table}[layer]", [f"LF_CONSTANT int {table}[] = {{{listed}}};"]
    return before, f"LF_DEVICE int {name}(int{' layer' if 'layer' in result else ''}) {{ return {result}; }}"


def _struct(name: str, constants: dict, functions: dict, aliases: dict, layers: int) -> Iterator[str]:
    """constants: by name; functions: of the layer, their values by layer; aliases: of types."""
    members = []
    for function, values in functions.items():
        before, member = _by_layer(function, values, layers, name)
        yield from before
        members.append(f"  static {member}")
    yield f"struct {name} {{"
    for constant, value in constants.items():
        kind = type(value).__name__
        yield f"  static constexpr {kind} k{constant} = {_literal(value)};"
    yield from (f"  using {alias} = {target};" for alias, target in aliases.items())
    yield from members
    yield "};"
