"""Structs of the header model.h: one for each op of each kind of module. Its constants are the fields of the op
(laneformer/ops.py), how it is tiled and where its small weights are.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as member
from enum import IntEnum
from typing import Any

import numpy as np

from laneformer.custom_calls.gpu.tiling import Tiling
from laneformer.custom_calls.ops_header import alternatives, fields, sizes
from laneformer.ops import Norm, Op, Rotary, Weight


@dataclass
class OpStruct:
    """The struct of an op, while the classes of this folder fill it."""

    name: str
    kind: int
    """Number of the kind of modules that has the op."""
    lane: Any
    """The Lane of the layout."""
    stages: Mapping[int, Any]
    """The op's Stage in each layer of the kind."""
    numbers: Mapping[int, int]
    """Number of that stage among those of its layer."""
    tiling: Tiling | None
    first_line: int
    """Lines of the module before those of the op."""
    facts: "Facts"
    following: Op | None
    """The next op of the module."""
    names: "Names"
    constants: dict[str, Any] = member(default_factory=dict)
    functions: dict[str, dict[int, int]] = member(default_factory=dict)
    """Functions of the layer: their values by layer."""
    aliases: dict[str, str] = member(default_factory=dict)
    """Names of types."""
    before: list[str] = member(default_factory=list)
    """Lines before the struct."""

    @property
    def stage(self) -> Any:
        """The op's stage in the first layer of the kind."""
        return next(iter(self.stages.values()))

    def board(self, name: str) -> int:
        """First word of a board; -1 without a name."""
        return self.facts.boards.get(name, -1)

    def fields_of(self, of_layers: Mapping[int, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return fields_of(self.facts.places, of_layers)

    def part(self, name: str, constants: dict[str, Any]) -> "OpStruct":
        """The struct of a part of the op."""
        made = (self.kind, self.lane, self.stages, self.numbers, None, 0, self.facts, None, self.names)
        return OpStruct(name, *made, constants=constants)

    def add_rotations(self, rotary: Rotary | None, rotating: int) -> None:
        """Adds the table of rotations of heads with `rotating` channels."""
        place = self.facts.rotations.get((rotary, rotating), 0) if rotary else 0
        self.constants |= {"kRotating": rotating, "kRotations": place}

    def add_cache(self) -> None:
        """Adds the number of the layer's first array among those that layers keep."""
        self.functions["cache"] = {layer: self.facts.first_kept[layer] for layer in self.stages}

    def add_tiling(self) -> None:
        """Adds how the op's matrices are tiled, and their biases; nothing for an op without a matrix."""
        if self.tiling is None:
            return
        self.constants |= self.tiling.fields | {"kFirstLine": self.first_line, "kSumSets": self.tiling.sum_sets}
        biases = {layer: stage.matrices[0].bias for layer, stage in self.stages.items()}
        bias = next(iter(biases.values()))
        if bias:
            self.constants["kBiasStride"] = self.facts.places[bias.path].stride
            self.functions["bias"] = {layer: self.facts.places[own.path].offset for layer, own in biases.items()}
        self.constants["kBiased"] = bias is not None
        self.functions["product"] = {
            layer: self.facts.products.get((layer, at), 0) for layer, at in self.numbers.items()
        }
        self.aliases["Weights"] = self.tiling.format.struct

    def add_stored(self) -> None:
        """Adds the first line of each layer's experts."""
        self.functions["stored"] = {layer: self.facts.line(layer, at) for layer, at in self.numbers.items()}

    def lines(self) -> Iterator[str]:
        yield from self.before
        yield from struct_lines(self.name, self.constants, self.functions, self.aliases, self.facts.num_layers)


@dataclass
class Names:
    """Structs that later ops of the same module refer to."""

    attended: str = ""
    """The struct of its attention."""
    router: str = ""
    keep: str = ""
    """The struct that keeps compressed entries."""


@dataclass(frozen=True)
class Facts:
    """What structs contain of the layout."""

    num_layers: int
    boards: Mapping[str, int]
    """First word of each board."""
    places: Mapping[str, Any]
    """Offset and stride of each small weight, by path."""
    rotations: Mapping[tuple[Rotary, int], int]
    """First float of each table of rotations, by embedding and channels of a head."""
    first_kept: tuple[int, ...]
    """Number of each layer's first array among those that layers keep."""
    products: Mapping[tuple[int, int], int]
    """Number of each product, by layer and stage."""
    line: Callable[[int, int], int]
    """First line of a product in the memory of each warp, by layer and stage."""


def score_scale(scale: float) -> float:
    """The factor on scores in units of log 2. Where it is 1 / sqrt(n), rounded to float32, it is rounded only once."""
    n = round(scale**-2)
    if n > 0 and np.float32(1) / np.sqrt(np.float32(n)) == np.float32(scale):
        return math.log2(math.e) / math.sqrt(n)
    return math.log2(math.e) * scale


def title(name: str) -> str:
    """GATE_UP, gate_up -> GateUp."""
    return name.title().replace("_", "")


def constant(field: str) -> str:
    """kv_heads -> kKvHeads: the name of a field's constant."""
    return f"k{title(field)}"


def literal(value) -> str:
    if isinstance(value, IntEnum):
        return f"{type(value).__name__}::k{title(value.name)}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{float(np.float32(value)).hex()}f" if isinstance(value, float) else str(value)


def by_layer(name: str, values: dict[int, int], layers: int, prefix: str = "") -> tuple[list[str], str]:
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


def struct_lines(name: str, constants: dict, functions: dict, aliases: dict, layers: int) -> Iterator[str]:
    """constants: by name; functions: of the layer, their values by layer; aliases: of types."""
    members = []
    for function, values in functions.items():
        before, member = by_layer(function, values, layers, name)
        yield from before
        members.append(f"  static {member}")
    yield f"struct {name} {{"
    for each, value in constants.items():
        kind = type(value).__name__
        yield f"  static constexpr {kind} {each} = {literal(value)};"
    yield from (f"  using {alias} = {target};" for alias, target in aliases.items())
    yield from members
    yield "};"


def fields_of(places: Mapping[str, Any], of_layers: Mapping[int, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an op's fields are in its struct: constants by name, and functions of the layer, their values by layer.

    places: offset and stride of each small weight, by path. of_layers: the op by layer, or the module by time; they
    differ only in their weights and windows. A number, a truth
    value, an enumeration and a `size` are constants. An integer that may be None is a function, 0 for None. A float
    that may be None is its value and a constant ...ed. A norm is constants ...ed, ...Eps and ...Stride and a function
    that returns the offset of its gain. A vector is constants ...Given and ...Stride and such a function, -1 for a
    layer that has none while others have one. Matrices, rotations, lists and the choice of experts are the layout's.
    """
    op = next(iter(of_layers.values()))
    of_op: type = type(op)
    constants: dict[str, Any] = {}
    functions: dict[str, dict[int, int]] = {}
    for field, kind in fields(of_op):
        kinds, optional = alternatives(kind) or ([kind], False)
        value, name = getattr(op, field), constant(field)
        if kinds == [Norm]:
            constants[f"{name}ed"] = value is not None
            constants[f"{name}Eps"] = value.eps if value else 0.0
            constants[f"{name}Stride"] = places[value.gain.path].stride if value else 0
            functions[field] = {
                layer: places[getattr(own, field).gain.path].offset if value else 0 for layer, own in of_layers.items()
            }
        elif kinds == [Weight] and (value is None or not value.is_matrix):
            of_own = {layer: getattr(own, field) for layer, own in of_layers.items()}
            value = next(filter(None, of_own.values()), None)
            constants[f"{name}Given"] = value is not None
            constants[f"{name}Stride"] = places[value.path].stride if value else 0
            missing = -1 if value else 0
            functions[field] = {layer: places[own.path].offset if own else missing for layer, own in of_own.items()}
        elif kinds == [float] and optional:
            constants[f"{name}ed"], constants[name] = value is not None, float(value or 0)
        elif kinds == [int] and optional:
            functions[field] = {layer: getattr(own, field) or 0 for layer, own in of_layers.items()}
        elif isinstance(kind, type) and issubclass(kind, (int, float)):
            constants[name] = value
    return constants | {constant(each): getattr(op, each) for each in sizes(of_op)}, functions
