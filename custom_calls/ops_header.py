"""The C++ structs of laneformer/ops.py, as the header plan_ops.h: python custom_calls/ops_header.py prints it.

custom_calls/build.py writes it beside the objects that include it (custom_calls/common/plan.h). The last dataclass of
ops.py and all that it contains have structs. A struct has the fields of its dataclass in the same order, which is that
of a plan's words, a member function for each `size`, and a member `visit` that calls a function with the name and the
value of each field; custom_calls/common/plan.cc decodes words by it. A union of dataclasses such as Op also has a
macro: EACH_OP(F) is F(kind) for each of its kinds. Whole numbers of ops.py are constants.

Nothing here imports JAX or NumPy: an installation runs this file by itself.
"""

import ast
import dataclasses
import enum
import importlib.util
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OPS = Path(__file__).resolve().parent.parent / "laneformer" / "ops.py"  # by its path: the package may need JAX
SCALARS = {int: "int", float: "float", bool: "bool"}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/"}
# Tables of a plan, to which its words refer, and enumerations that other headers have: types of common/plan.h
BY_HAND = {"Weight": "Array", "Rotary": "RotaryIndex", "Activation": "Activation"}


@cache
def fields(kind: type) -> list[tuple[str, typing.Any]]:
    """Names and types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def sizes(kind: type) -> list[str]:
    """Names of a dataclass's `size` properties, those of its bases first."""
    return [name for base in reversed(kind.__mro__) for name, value in vars(base).items() if _is_size(value)]


def _is_size(value) -> bool:
    return type(value).__name__ == "size"  # of an ops.py that was loaded by its path, maybe


def alternatives(kind) -> tuple[list, bool] | None:
    """Of a union of types: those but None, and whether None is one. None for any other type."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return None
    members = typing.get_args(kind)
    return [member for member in members if member is not types.NoneType], types.NoneType in members


def ops_header(source: Path = OPS) -> str:
    """The file plan_ops.h for the dataclasses, enumerations and whole numbers of a file.

    Raises TypeError for a field or a size that C++ cannot have.
    """
    spec = importlib.util.spec_from_file_location("laneformer_ops", source)
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)
    lines = ["// Written by custom_calls/ops_header.py from laneformer/ops.py, which says what the fields are.", ""]
    contained = _contained([kind for kind in vars(ops).values() if dataclasses.is_dataclass(kind)][-1])
    for name, kind in vars(ops).items():
        if name in BY_HAND:
            continue
        if isinstance(kind, int):
            lines += [f"constexpr int {_constant(name)} = {kind};", ""]
        if alternatives(kind):
            kinds = alternatives(kind)[0]
            each = " ".join(f"F({_type(one)})" for one in kinds)
            lines += [f"using {name} = {_variant(kinds)};", f"#define EACH_{name.upper()}(F) {each}", ""]
        elif kind in contained:
            lines += [*_struct(kind), ""]
        elif isinstance(kind, type) and issubclass(kind, enum.Enum) and kind.__module__ == spec.name:
            lines += [*_enumeration(kind), ""]
    return "\n".join(lines)


def _contained(kind) -> list[type]:
    """A dataclass and all that its fields contain, or the dataclasses of any other type of a field."""
    if found := alternatives(kind):
        return [one for each in found[0] for one in _contained(each)]
    if typing.get_origin(kind) is tuple:
        return _contained(typing.get_args(kind)[0])
    if not dataclasses.is_dataclass(kind) or kind.__name__ in BY_HAND:
        return []
    return [kind, *(one for _, field in fields(kind) for one in _contained(field))]


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
    for name in sizes(kind):
        yield f"  int64_t {name}() const {{ return {_size(kind, name)}; }}"
    yield "};"


def _size(kind: type, name: str) -> str:
    """The C++ expression of a `size`."""
    source = textwrap.dedent(inspect.getsource(inspect.getattr_static(kind, name).fget))
    result = ast.parse(source).body[0].body[-1]
    types_of = dict(fields(kind))

    def translated(node: ast.expr) -> str:
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return f"({translated(left)} {OPERATORS[type(op)]} {translated(right)})"
            case ast.IfExp(ast.Attribute(ast.Name("self"), flag), then, otherwise) if types_of.get(flag) is bool:
                return f"({flag} ? {translated(then)} : {translated(otherwise)})"
            case ast.Attribute(ast.Name("self"), member) if types_of.get(member) is int:
                return f"(int64_t){member}"
            case ast.Attribute(ast.Name("self"), member) if member in sizes(kind):
                return f"{member}()"
            case ast.Name(constant) if constant.isupper():
                return _constant(constant)
            case ast.Constant(int(number)):
                return str(number)
        raise TypeError(
            f"{kind.__name__}.{name}: {ast.unparse(node)} has no translation to C++; write +, -, *, // or"
            " `a if flag else b` of fields that are int, sizes and whole numbers"
        )

    if not isinstance(result, ast.Return) or result.value is None:
        raise TypeError(f"{kind.__name__}.{name}: the getter of a size must be one return")
    return translated(result.value)


def _constant(name: str) -> str:
    """ENTRIES -> kEntries."""
    return "k" + name.title().replace("_", "")


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
