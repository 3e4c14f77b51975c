"""Writes the C++ of a PTX module: a function for each of its functions."""

import bisect
import re

from tests.support.emulator.ptx.forms import C_TYPES, form
from tests.support.emulator.ptx.parse import (
    Brace,
    Function,
    Instruction,
    Label,
    Local,
    Registers,
    Statement,
    Unsupported,
    Variable,
    operands,
    parse,
    width,
)

SPECIAL = {
    "%tid.x": "emulator::self()->thread",
    "%ctaid.x": "emulator::self()->cta",
    "%laneid": "emulator::self()->lane",
    "%globaltimer": "nanoseconds()",
}
# Reads of what others write: a loop around one must let the others run.
POLLS = re.compile(r"ld\.(volatile|relaxed)\b|mbarrier\.try_wait\b|call\b")
ACCESS = re.compile(
    r"(?P<kind>ld|st)(?:\.(?:volatile|relaxed\.(?:gpu|sys)))?(?:\.(?P<space>global|shared|shared::cta|local|param|const))?"
    r"(?:\.(?:nc|cg|ca|cs))?(?:\.v(?P<count>[24]))?\.(?P<type>b128|[busf](?:8|16|32|64))"
)
ATOMIC = re.compile(
    r"(?P<kind>atom|red)\.(?:(?P<space>shared|shared::cta|global)\.)?(?P<what>add\.[us]|exch\.b)(?P<bits>32|64)"
)
PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k(?P<columns>16|32)\.row\.col\.s32\.s8\.s8\.s32")


def translate(text: str) -> str:
    """C++ of a module, for use after runtime.h. A kernel of the module becomes a function of a pointer to its
    parameters, with the kernel's name. Raises Unsupported for what it does not know.
    """
    module = parse(text)
    symbols = {one.name: address_of(one) for one in module.constants}
    if any(one.count for one in module.shared) or len(module.shared) > 1:
        raise Unsupported("shared memory of a fixed size")
    symbols |= {one.name: "kSharedBase" for one in module.shared}
    heads = {function.name: head_of(function) for function in module.functions}
    return "\n".join(
        [
            *map(constant, module.constants),
            *(f"{head};" for head in heads.values()),
            *(Writer(function, symbols).write(heads[function.name]) for function in module.functions),
            "",
        ]
    )


def c_name(name: str) -> str:
    """The C++ name of a PTX name. Its end keeps it apart from the names of runtime.h."""
    return re.sub(r"\W", "", name) + "_"


def address_of(variable: Variable) -> str:
    return f"(uint64_t)(uintptr_t){c_name(variable.name)}"


def head_of(function: Function) -> str:
    given = ", ".join(f"char* {c_name(one.name)}" for one in function.results + function.parameters)
    return f"static void {c_name(function.name)}({given})"


def constant(variable: Variable) -> str:
    numbers = [number(value, variable.type) for value in variable.values]
    head = f"alignas({max(variable.align, 16)}) static const {C_TYPES[f'b{width(variable.type)}']}"
    return f"{head} {c_name(variable.name)}[{variable.count}] = {{{', '.join(numbers)}}};"


def number(text: str, type: str) -> str:
    """C++ of the bits of a literal."""
    if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", text):
        return f"0x{found[1]}ull"
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text) and type not in ("f32", "f64"):
        return f"(uint{max(8, width(type))}_t){text.removesuffix('U')}{'ll' if text.startswith('-') else 'ull'}"
    raise Unsupported(f"{text} as {type}")


def is_literal(text: str) -> bool:
    return text[0].isdigit() or text[0] == "-"


class Writer:
    """Writes one function. symbols: C++ of the addresses that names stand for."""

    def __init__(self, function: Function, symbols: dict[str, str]):
        self.function, self.used = function, set()
        self.symbols = symbols | {one.name: address_of(one) for one in function.results + function.parameters}
        self.symbols |= {one.variable.name: address_of(one.variable) for one in function.body if isinstance(one, Local)}
        declared = [one for one in function.body if isinstance(one, Registers)]
        self.rows = {one.names[0]: one.count for one in declared if one.count is not None}
        self.names = {name for one in declared if one.count is None for name in one.names}
        self.backward = polling_branches(function.body)

    def write(self, head: str) -> str:
        lines = [self.statement(index, one) for index, one in enumerate(self.function.body)]
        rows = [one for one in self.function.body if isinstance(one, Registers) and one.count is not None]
        declared = [self.declaration(row) for row in rows]
        return "\n".join([f"{head} {{", *filter(None, declared), *lines, "}"])

    def declaration(self, row: Registers) -> str:
        """Declares those of a row of registers that are used."""
        names = [name for i in range(row.count) if (name := c_name(f"{row.names[0]}{i}")) in self.used]
        return f"{register_type(row.type)} {', '.join(names)};" if names else ""

    def statement(self, index: int, one: Statement) -> str:
        match one:
            case Label():
                return f"{c_name(one.name)}:;"
            case Brace():
                return one.text
            case Registers(count=None):  # of inline assembly: the scope in C++ is that of PTX
                return f"{register_type(one.type)} {', '.join(map(c_name, one.names))};"
            case Registers():
                return ""
            case Local():
                return f"alignas({max(one.variable.align, 8)}) char {c_name(one.variable.name)}[{one.variable.bytes}];"
        code = self.instruction(one)
        if index in self.backward:
            code = f"emulator::yield(); {code}"
        if one.guard:
            negated, name = "!" * one.guard.startswith("!"), one.guard.lstrip("!")
            return f"if ({negated}{self.register(name)}) {{ {code} }}"
        return code

    def instruction(self, one: Instruction) -> str:
        mnemonic, values = one.form.partition(".")[0], one.operands
        try:
            if mnemonic == "mov":
                return self.move(one.form.removeprefix("mov."), *values)
            if mnemonic == "call" and one.form in ("call", "call.uni"):
                return self.call(values)
            if one.form in ("bra", "bra.uni"):
                return f"goto {c_name(*values)};"
            for pattern, write in ((ACCESS, self.access), (ATOMIC, self.atomic), (PRODUCT, self.product)):
                if found := pattern.fullmatch(one.form):
                    return write(found, *values)
            return self.by_table(one.form, values)
        except (Unsupported, TypeError, KeyError) as error:
            raise Unsupported(f"{one.text}: {error}") from error

    def by_table(self, name: str, values: tuple[str, ...]) -> str:
        row, in_lane = form(name), ""
        if name.startswith("shfl") and "|" in values[0]:  # the second result: whether the lane exists
            first, second = values[0].split("|")
            values, in_lane = (first, *values[1:]), self.assign(second, "pred", "true")
        if len(values) != len(row.operands):
            raise Unsupported("number of operands")
        checks, found = [], []
        for value, type in zip(values, row.operands, strict=True):
            if type.startswith("#="):
                checks.append(self.required(value, type[2:]))
                found.append("")
            else:
                found.append(self.operand(value, type))
        code = re.sub(r"\{(\d)\}", lambda m: found[int(m[1])], row.code)
        if not row.code.endswith(";"):
            code = self.assign(values[0], row.operands[0], code)
        return "".join(checks) + code + in_lane

    def required(self, value: str, wanted: str) -> str:
        """A check, now or when it runs, that an operand has the only value that the emulator knows."""
        if value == wanted:
            return ""
        if is_literal(value) or not value.startswith("%"):
            raise Unsupported(f"operand {value}, not {wanted}")
        return f'if ({self.register(value)} != (uint32_t){wanted}) stop("an operand is not {wanted}"); '

    # ---- operands

    def register(self, name: str) -> str:
        row = re.fullmatch(r"(.*?)(\d+)", name)
        if name not in self.names and not (row and int(row[2]) < self.rows.get(row[1], 0)):
            raise Unsupported(f"operand {name}")
        self.used.add(c_name(name))
        return c_name(name)

    def operand(self, text: str, type: str) -> str:
        """C++ of an operand's value."""
        if type == "[s]":
            return self.shared_address(text)
        if type.startswith("["):
            return f"(uint64_t*)shared({self.shared_address(text)}, {type[1:-1]})"
        if type == "u64" and text.startswith("["):
            return self.address(text)
        if type == "pred":
            if text in ("0", "1", "-1"):
                return str(text != "0").lower()
            return "!" * text.startswith("!") + self.register(text.lstrip("!"))
        bits = self.bits(text, type)
        if type in ("f32", "f64"):
            return f"as_{type}({bits})"
        return f"({C_TYPES[type]}){bits}"

    def bits(self, text: str, type: str) -> str:
        """C++ of the bits of an operand, as an unsigned number of at least the type's width."""
        if text in SPECIAL:
            return SPECIAL[text]
        if is_literal(text):
            return number(text, type)
        name, _, offset = text.partition("+")
        if name in self.symbols:
            return f"({self.symbols[name]} + ({offset or 0}))"
        return self.register(text)

    def assign(self, target: str, type: str, code: str) -> str:
        if target == "_":
            return f"(void)({code});"
        if type in ("f32", "f64"):
            return f"{self.register(target)} = bits_of(({C_TYPES[type]})({code}));"
        return f"{self.register(target)} = ({C_TYPES[type]})({code});"

    def base_and_offset(self, text: str) -> tuple[str, str]:
        found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not found:
            raise Unsupported(f"address {text}")
        name = found[1]
        base = name if is_literal(name) else self.symbols.get(name) or self.register(name)
        return base, found[2] or "0"

    def shared_address(self, text: str) -> str:
        base, offset = self.base_and_offset(text)
        return f"(uint32_t)({base} + ({offset}))"

    def address(self, text: str) -> str:
        base, offset = self.base_and_offset(text)
        return f"({base} + ({offset}))"

    def place(self, space: str | None, address: str, bytes: int) -> str:
        """C++ of the host's address of an access."""
        if space in ("shared", "shared::cta"):
            return f"shared({self.shared_address(address)}, {bytes})"
        return f"aligned({self.address(address)}, {bytes})"

    # ---- instructions with lists of operands

    def move(self, type: str, target: str, source: str) -> str:
        if target.startswith("{"):
            parts = operands(target[1:-1])
            each = width(type) // len(parts)
            whole = f"const auto t = {self.operand(source, type)};"
            return (
                f"{{ {whole} {' '.join(self.assign(p, f'u{each}', f't >> {i * each}') for i, p in enumerate(parts))} }}"
            )
        if source.startswith("{"):
            parts = operands(source[1:-1])
            each = width(type) // len(parts)
            whole = C_TYPES[f"b{width(type)}"]
            joined = (f"({whole}){self.operand(p, f'u{each}')} << {i * each}" for i, p in enumerate(parts))
            return self.assign(target, type, " | ".join(joined))
        if type == "pred":
            return self.assign(target, type, self.operand(source, type))
        if type not in C_TYPES:
            raise Unsupported(f"type {type}")
        return f"{self.register(target)} = {self.bits(source, type)};"

    def access(self, found: re.Match, first: str, second: str) -> str:
        """A load or a store of one or several neighbouring values."""
        load, type, count = found["kind"] == "ld", found["type"], int(found["count"] or 1)
        values, address = (first, second) if load else (second, first)
        values = operands(values[1:-1]) if values.startswith("{") else (values,)
        if len(values) != count:
            raise Unsupported("number of values")
        bytes = count * width(type) // 8
        place = self.place(found["space"], address, bytes)
        element = C_TYPES[type if type[0] == "s" else f"b{width(type)}"]  # signed numbers are extended by their sign
        if load:
            reads = "emulator::read((const void*)t); " * (
                bytes == 16 and found["space"] in (None, "shared", "shared::cta")
            )
            moves = (f"{self.register(value)} = t[{i}];" for i, value in enumerate(values) if value != "_")
        else:
            reads, moves = "", (f"t[{i}] = {self.bits(value, type)};" for i, value in enumerate(values))
        kept = "if (!loses_word()) " if not load and "relaxed.sys" in found[0] else ""
        return f"{{ auto* t = ({element}*){place}; {reads}{kept}{{ {' '.join(moves)} }} }}"

    def atomic(self, found: re.Match, *values: str) -> str:
        """An addition or exchange, also with other devices, which have their own threads of the host."""
        *target, address, value = values
        if len(target) != (found["kind"] == "atom"):
            raise Unsupported("number of operands")
        type, bytes = f"u{found['bits']}", int(found["bits"]) // 8
        place = self.place(found["space"], address, bytes)
        function = "__atomic_fetch_add" if found["what"].startswith("add") else "__atomic_exchange_n"
        given = self.operand(value, type)
        if found["what"].startswith("exch") and bytes == 8:
            given = f"loses_word() ? *(uint64_t*){place} : {given}"
        old = f"{function}(({C_TYPES[type]}*){place}, {given}, __ATOMIC_SEQ_CST)"
        return self.assign(target[0], type, old) if target else f"{old};"

    def product(self, found: re.Match, *values: str) -> str:
        """A product of matrices of bytes."""
        sums, a, b, before = (operands(value[1:-1]) for value in values)
        words = int(found["columns"]) // 8
        if [len(one) for one in (sums, a, b, before)] != [4, words, words // 2, 4]:
            raise Unsupported("number of registers")
        given = ", ".join(f"{{{', '.join(self.operand(one, 'b32') for one in part)}}}" for part in (a, b, before))
        results = " ".join(self.assign(one, "b32", f"d[{i}]") for i, one in enumerate(sums))
        return f"{{ uint32_t d[4]; multiply_bytes<{words}>({given}, d); {results} }}"

    def call(self, values: tuple[str, ...]) -> str:
        lists = [operands(one[1:-1]) if one.startswith("(") else None for one in values]
        name = next(value for value, given in zip(values, lists, strict=True) if given is None)
        arguments = [c_name(one) for given in lists if given for one in given]
        return f"{c_name(name)}({', '.join(arguments)});"


def register_type(type: str) -> str:
    return "bool" if type == "pred" else f"uint{width(type)}_t"


def polling_branches(body: list[Statement]) -> set[int]:
    """Places of the branches back over a read of what others write."""
    places = {one.name: index for index, one in enumerate(body) if isinstance(one, Label)}
    polls = [index for index, one in enumerate(body) if isinstance(one, Instruction) and is_poll(one)]
    found = set()
    for index, one in enumerate(body):
        if isinstance(one, Instruction) and one.form in ("bra", "bra.uni"):
            first = bisect.bisect_left(polls, places[one.operands[0]])
            if first < len(polls) and polls[first] <= index:
                found.add(index)
    return found


def is_poll(one: Instruction) -> bool:
    return bool(POLLS.match(one.form)) or "%globaltimer" in one.operands
