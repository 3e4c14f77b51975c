"""The statements of a program that a function needs: what EvalPlus calls sanitizing, from Python's own syntax tree.

Tests call one function. Self-written assertions, examples, reads of standard input and endless demonstrations at the
top level of the program do not belong to it.
"""

import ast
import symtable
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from laneformer.infer.evaluate.problems import parse

LONGEST, MOST_STATEMENTS = 1 << 17, 1000  # characters of a program, statements at its top level
# Methods that change the object that they belong to.
MUTATORS = {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem",
            "popleft", "register", "remove", "reverse", "setdefault", "sort", "update"}  # fmt: skip
DYNAMIC = frozenset(("eval", "exec", "globals", "locals", "vars"))  # find names in texts
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign


@dataclass
class Statement:
    """A statement at the top level of a program."""

    node: ast.stmt
    text: str
    binds: set[str] = field(default_factory=set)
    """Names that it gives a value at the top level."""
    uses: set[str] = field(default_factory=set)
    """Names of the top level that it, or a function in it, reads."""
    changes: set[str] = field(default_factory=set)
    """Names whose objects it changes: by an item, an attribute or a method."""

    @property
    def name(self) -> str | None:
        """The name that a definition defines."""
        return self.node.name if isinstance(self.node, Definition) else None

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)


def needed(code: str, names: Iterable[str]) -> str | None:
    """The statements that the definitions of `names` need, each with what it needs itself, in their order.

    If a function is defined several times, its first definition that returns a value counts, as in EvalPlus.
    Assignments and loops count if they set or change a needed name. Returns None for a text that is not a program, or
    too large or too deep for the parser.
    """
    try:
        statements = _statements(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kept = _kept(statements, set(names))
    return "".join(statement.text + "\n" for n, statement in enumerate(statements) if n in kept)


def defines(code: str, name: str) -> bool | None:
    """Whether a program defines `name` at its top level with a body that gives a value. False for a function without
    one, such as a signature with a docstring; None if nothing defines the name.
    """
    try:
        statements = _statements(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [_gives(statement.node) for statement in statements if name in statement.binds and not statement.is_import]
    return any(found) if found else None


def split_future(code: str) -> tuple[str, str]:
    """The `from __future__` imports of a program, which must be its first statements, and the rest of it."""
    if "__future__" not in code:
        return "", code
    try:
        imports = [node for node in parse(code).body if isinstance(node, ast.ImportFrom)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", code
    lines = code.split("\n")
    found = []
    for node in (each for each in imports if each.module == "__future__"):
        place = slice(node.lineno - 1, node.end_lineno)
        found += lines[place]
        lines[place] = [""] * len(lines[place])
    return "".join(line + "\n" for line in found), "\n".join(lines) if found else code


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Names that a program defines, and those that it uses and does not define; empty if it is not a program."""
    try:
        statements = _statements(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(), set()
    defined = set().union(*(each.binds for each in statements))
    return defined, set().union(*(each.uses for each in statements)) - defined


def _statements(code: str) -> list[Statement]:
    """The statements of a program. Raises SyntaxError, ValueError, RecursionError or MemoryError, ValueError also for
    a program of more than LONGEST or MOST_STATEMENTS.
    """
    lines = [line.encode() for line in code.split("\n")]
    if len(code) > LONGEST:
        raise ValueError(f"the program has {len(code)} characters")
    found, nodes = [], parse(code).body
    if len(nodes) > MOST_STATEMENTS:
        raise ValueError(f"the program has {len(nodes)} statements")
    for node in nodes:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        part = lines[first - 1 : node.end_lineno]
        part[-1] = part[-1][: node.end_col_offset]
        if first == node.lineno:
            part[0] = part[0][node.col_offset :]
        statement = Statement(node, b"\n".join(part).decode())
        _describe(statement)
        found.append(statement)
    return found


def _describe(statement: Statement) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            top = symtable.symtable(statement.text, "<answer>", "exec")
        except SyntaxError:  # for example a name that is a parameter twice
            return
    tables, set_within = [top], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_set = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                statement.uses.add(symbol.get_name())
            if is_set and table is top:
                statement.binds.add(symbol.get_name())
            elif is_set and symbol.is_declared_global():
                set_within.add(symbol.get_name())
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            statement.changes.add(_root(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            statement.changes.add(_root(node.func))
    statement.changes = statement.changes & (statement.uses | statement.binds) | set_within
    statement.uses |= set_within


def _root(node: ast.AST) -> str:
    """The name at the beginning of an expression like a.b[c](d).e; "" if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _kept(statements: list[Statement], names: set[str]) -> set[int]:
    """Numbers of the statements that are needed."""
    chosen = _definitions(statements)
    by_name = defaultdict(list)
    for n, statement in enumerate(statements):
        if n in chosen or not isinstance(statement.node, Definition):
            for name in statement.binds | statement.changes:
                by_name[name].append(n)
        if isinstance(statement.node, Definition):
            for decorator in statement.node.decorator_list:  # @area.register, where `area` is a function
                by_name[_root(decorator)].append(n)
    functions = {own: statements[n] for n in chosen if (own := statements[n].name) is not None}
    filling = _filling(statements, functions, names)
    everything = set().union(*(each.binds for each in statements if each.is_import or each.name))
    kept = {n for n, each in enumerate(statements) if _is_always_kept(each)}
    waiting, seen = list(names) + [name for n in kept for name in statements[n].uses], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in DYNAMIC and not by_name[name]:
            waiting += everything
        for n in (*by_name[name], *filling[name]):
            if n not in kept and (n in filling[name] or _counts(statements[n], name, names, functions)):
                kept.add(n)
                waiting += statements[n].uses | statements[n].binds
    return kept


def _definitions(statements: list[Statement]) -> set[int]:
    """Numbers of the definitions that count: for each name the first that gives a value, else the last."""
    by_name: dict[str, list[int]] = {}
    for n, statement in enumerate(statements):
        if statement.name is not None:
            by_name.setdefault(statement.name, []).append(n)
    return {next((n for n in found if _gives(statements[n].node)), found[-1]) for found in by_name.values()}


def _filling(statements: list[Statement], functions: dict[str, Statement], names: set[str]) -> dict[str, list[int]]:
    """Calls at the top level, such as `fill_table()`, of functions that set or change a name: name -> numbers. A
    function that needs one of `names` is an example of their use.
    """
    found = defaultdict(list)
    for n, statement in enumerate(statements):
        node = statement.node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            called = functions.get(node.value.func.id)
            if called is None or statement.uses & names:
                continue
            reached, waiting = set(), [called.name]
            while waiting:
                name = waiting.pop()
                if name not in reached and name in functions:
                    waiting += functions[name].uses
                reached.add(name)
            if not reached & (names | {"input", "exit", "quit", "print"}):
                for name in called.changes:
                    found[name].append(n)
    return found


def _is_always_kept(statement: Statement) -> bool:
    """Whether a statement changes what other statements mean: star imports, `__future__`, and the recursion limit."""
    node = statement.node
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__" or any(each.name == "*" for each in node.names)
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and (getattr(node.value.func, "attr", None) or getattr(node.value.func, "id", None)) == "setrecursionlimit"
    )


def _counts(statement: Statement, name: str, names: set[str], functions: dict[str, Statement]) -> bool:
    """Whether a needed name needs a statement that binds or changes it, or is decorated with it."""
    node = statement.node
    if statement.is_import:
        return True
    if isinstance(node, Definition):
        decorated = any(_root(each) == name for each in node.decorator_list)
        return statement.name == name or (decorated and name in functions)
    if isinstance(node, ast.Delete) and name in statement.binds:
        return False
    if statement.binds & names:
        return name not in functions or not isinstance(node, ast.Assign | ast.AnnAssign) or _passes_on(node.value, name)
    if isinstance(node, ast.Assert) or (statement.uses & names and not isinstance(node, Assignment)):  # an example
        return False
    if isinstance(node, ast.If) and "__name__" in statement.uses:
        return False
    if isinstance(node, ast.Expr):  # table.update(...), but not print(table.pop())
        direct = isinstance(node.value, ast.Call) and _root(node.value) == name and name not in functions
        return direct or name in statement.binds
    if name in functions and isinstance(node, ast.Assign | ast.AnnAssign) and name in statement.binds:
        return _passes_on(node.value, name)
    return True


def _passes_on(value: ast.expr | None, name: str) -> bool:
    """Whether an expression uses a function other than by calling it, as in `f = cache(f)`."""
    if value is None:
        return False
    called = {id(each.func) for each in ast.walk(value) if isinstance(each, ast.Call)}
    return any(isinstance(each, ast.Name) and each.id == name and id(each) not in called for each in ast.walk(value))


def _gives(node: ast.AST) -> bool:
    """Whether a statement that defines a name is more than a signature: not a function that returns nothing."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    return any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) for each in ast.walk(node))
