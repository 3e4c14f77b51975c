"""The C++ structs of laneformer/ops.py, as the header plan_ops.h: python custom_calls/ops_header.py prints it.

custom_calls/build.py writes it beside the objects that include it (custom_calls/common/plan.h). Each struct has the
fields of its dataclass in the same order, which is that of a plan's words, and a member `visit` that calls a function
with the name and the value of each; custom_calls/common/plan.cc decodes words by it. Of a union of dataclasses such as
Op there is also the macro EACH_OP(F), which is F(kind) for each of them.

Nothing here imports JAX or NumPy: an installation runs this file by itself.
"""

import dataclasses
import enum
import importlib.util
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OPS = Path(__file__).resolve().parent.parent / "laneformer" / "ops.py"  # by its path: the package may need JAX
SCALARS = {int: "int", float: "float", bool: "bool"}
# Tables of a plan, to which its words refer, and enumerations that other headers have: types of common/plan.h
BY_HAND = {"Weight": "Array", "Rotary": "RotaryIndex", "Activation": "Activation"}


@cache
def fields(kind: type) -> list[tuple[str, typing.Any]]:
    """Names and types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def alternatives(kind) -> tuple[list, bool] | None:
    """Of a union of types: those but None, and whether None is one. None for any other type."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return None
    members = typing.get_args(kind)
    return [member for member in members if member is not types.NoneType], types.NoneType in members


def ops_header(source: Path = OPS) -> str:
    """The file plan_ops.h for the dataclasses and enumerations of a file."""
    spec = importlib.util.spec_from_file_location("laneformer_ops", source)
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)
    lines = ["// Written by custom_calls/ops_header.py from laneformer/ops.py, which says what the fields are.", ""]
    for name, kind in vars(ops).items():
        if name in BY_HAND:
            continue
        if alternatives(kind):
            kinds = alternatives(kind)[0]
            each = " ".join(f"F({_type(one)})" for one in kinds)
            lines += [f"using {name} = {_variant(kinds)};", f"#define EACH_{name.upper()}(F) {each}", ""]
        elif isinstance(kind, type) and kind.__module__ == spec.name:
            lines += [*(_enumeration(kind) if issubclass(kind, enum.Enum) else _struct(kind)), ""]
    return "\n".join(lines)


def _enumeration(kind: type[enum.IntEnum]) -> Iterator[str]:
    members = ", ".join(f"{member.name.lower()} = {int(member)}" for member in kind)
    yield f"enum class {kind.__name__} : int32_t {{ {members} }};"
    yield f"constexpr int count_of({kind.__name__}) {{ return {len(kind)}; }}"


def _struct(kind: type) -> Iterator[str]:
    yield f"struct {kind.__name__} {{"
    yield from (f"  {_type(of)} {name}{{}};" for name, of in fields(kind))
    yield "  template <class Visitor>"
    yield "  void visit(Visitor&& visitor) {"
    yield from (f'    visitor("{kind.__name__}.{name}", {name});' for name, _ in fields(kind))
    yield "  }"
    yield "};"


def _type(kind) -> str:
    if kind in SCALARS:
        return SCALARS[kind]
    if found := alternatives(kind):
        kinds, optional = found
        inner = _type(kinds[0]) if len(kinds) == 1 else _variant(kinds)
        return f"std::optional<{inner}>" if optional else inner
    if typing.get_origin(kind) is tuple:
        item, rest = typing.get_args(kind)
        if rest is not Ellipsis:
            raise TypeError(f"{kind} has no C++ type; write a dataclass, or tuple[X, ...]")
        return f"std::vector<{_type(item)}>"
    if not dataclasses.is_dataclass(kind) and not issubclass(kind, enum.IntEnum):
        raise TypeError(f"{kind} has no C++ type; use int, float, bool, an IntEnum or a dataclass")
    return BY_HAND.get(kind.__name__, kind.__name__)


def _variant(kinds: list[type]) -> str:
    return f"std::variant<{', '.join(map(_type, kinds))}>"


if __name__ == "__main__":
    print(ops_header())
