"""Reads the text of a PTX module: its functions with their statements, constants and shared memory."""

import re
from dataclasses import dataclass, field


class Unsupported(ValueError):
    """PTX that the translator does not know. The message has the statement."""


@dataclass(frozen=True)
class Variable:
    """A parameter, or an array in memory."""

    name: str
    type: str
    """Type of an element: b8, u32, f32, ..."""
    align: int
    count: int
    """Number of elements; 0 if the size is given at the launch."""
    values: tuple[str, ...] = ()
    """Initial values of the first elements; the others are 0."""

    @property
    def bytes(self) -> int:
        return self.count * width(self.type) // 8


@dataclass(frozen=True)
class Instruction:
    text: str
    guard: str
    """The predicate without which it does nothing: a name, with "!" if it is negated; "" if there is none."""
    form: str
    """Mnemonic and modifiers, as in "add.s32"."""
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Brace:
    """The begin or end of a scope."""

    text: str


@dataclass(frozen=True)
class Registers:
    type: str
    names: tuple[str, ...]
    count: int | None
    """For a row of registers with one name, its length."""


@dataclass(frozen=True)
class Local:
    """A variable of the thread or, in a call, a parameter or result."""

    variable: Variable


Statement = Instruction | Label | Brace | Registers | Local


@dataclass
class Function:
    name: str
    results: list[Variable]
    parameters: list[Variable]
    body: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    functions: list[Function] = field(default_factory=list)
    constants: list[Variable] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)


def width(type: str) -> int:
    """Bits of a type: 32 of f32 or f16x2."""
    found = re.fullmatch(r"[busf](\d+)(?:x(\d))?", type)
    if not found:
        raise Unsupported(f"type {type}")
    return int(found[1]) * int(found[2] or 1)


STATEMENT = re.compile(
    r"""\s*(?:
    \.(?:version|target|address_size|file|loc|section)\b[^\n]*
    | (?P<label>[$\w]+):(?!:)
    | (?P<brace>[{}])
    | (?P<text>(?:[^;{}]|\{[^;{}]*\})+)(?:;|(?P<opens>\{))  # {a, b} without semicolons is an operand or a list
    | ;)""",
    re.VERBOSE,
)
LINKED = r"(?:\.(?:visible|weak|extern)\s+)*"
HEAD = re.compile(
    rf"{LINKED}\.(?:func|entry)\s*(?:\((?P<results>.*?)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<given>.*?)\))?"
    r"(?:\s*\.(?:noinline|noreturn|maxntid|minnctapersm|reqntid)[\s\d,]*)*(?P<opens>\{)?"
)
VARIABLE = re.compile(
    rf"{LINKED}\.(?P<space>const|global|shared|local|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$%]+)(?:\[(?P<count>\d*)\])?(?:\s*=\s*(?P<values>.*))?"
)
INSTRUCTION = re.compile(r"(?:@(?P<guard>!?[%\w$]+)\s+)?(?P<form>[a-z][\w.:]*)(?:\s+(?P<operands>.*))?")


def statements(text: str):
    """The statements of a module, each with white space joined; "{", "}" and "label:" count as statements. The head of
    a function ends with its "{".
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).rstrip()
    at = 0
    while at < len(text):
        found = STATEMENT.match(text, at)
        if not found:
            raise Unsupported(text[at : at + 200])
        at = found.end()
        if found["label"]:
            yield found["label"] + ":"
        elif found["brace"]:
            yield found["brace"]
        elif found["text"] and found["text"].strip():
            yield " ".join(found["text"].split()) + (found["opens"] or "")


def parse(text: str) -> Module:
    module, rest = Module(), statements(text)
    for statement in rest:
        if found := HEAD.fullmatch(statement):
            if found["opens"]:  # otherwise it is only declared
                function = Function(found["name"], variables(found["results"]), variables(found["given"]))
                function.body = [parsed for one in body(rest) if (parsed := parse_statement(one))]
                module.functions.append(function)
        elif (found := VARIABLE.fullmatch(statement)) and found["space"] in ("const", "global", "shared"):
            (module.shared if found["space"] == "shared" else module.constants).append(variable(found))
        else:
            raise Unsupported(statement)
    return module


def body(rest):
    """The statements up to the "}" of the "{" that was read last."""
    depth = 1
    for statement in rest:
        depth += {"{": 1, "}": -1}.get(statement, 0)
        if depth == 0:
            return
        yield statement


def variable(found: re.Match) -> Variable:
    values = tuple(one.strip() for one in (found["values"] or "").strip("{} ").split(",") if one.strip())
    count = 1 if found["count"] is None else int(found["count"] or 0)
    return Variable(found["name"], found["type"], int(found["align"] or width(found["type"]) // 8), count, values)


def variables(text: str | None) -> list[Variable]:
    """The parameters in a function's head."""
    found = [VARIABLE.fullmatch(one.strip()) for one in (text or "").split(",") if one.strip()]
    if not all(found):
        raise Unsupported(text)
    return [variable(one) for one in found]


def parse_statement(text: str) -> Statement | None:
    """One statement of a function; None for hints to ptxas."""
    if text in ("{", "}"):
        return Brace(text)
    if text.endswith(":"):
        return Label(text[:-1])
    if text.startswith(".pragma "):
        return None
    if found := re.fullmatch(r"\.reg \.(\w+) (%?[\w$]+)<(\d+)>", text):
        return Registers(found[1], (found[2],), int(found[3]))
    if found := re.fullmatch(r"\.reg \.(\w+) ([%\w$, ]+)", text):
        return Registers(found[1], tuple(found[2].replace(" ", "").split(",")), None)
    if found := VARIABLE.fullmatch(text):
        if found["space"] in ("local", "param"):
            return Local(variable(found))
    elif found := INSTRUCTION.fullmatch(text):
        return Instruction(text, found["guard"] or "", found["form"], operands(found["operands"] or ""))
    raise Unsupported(text)


def operands(text: str) -> tuple[str, ...]:
    """The operands of an instruction; commas within brackets do not separate them."""
    return tuple(one.strip() for one in re.findall(r"(?:[^,\[({]|\[[^\]]*\]|\{[^}]*\}|\([^)]*\))+", text))
