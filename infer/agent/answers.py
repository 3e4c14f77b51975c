"""From what a model wrote to files: a code block goes into the file that it names, one without a name where only one
can be meant.
"""

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from infer.evaluate.problems import parse

BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})([^\n]*)\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"[\w./-]*\w\.\w+")
LONGEST_NAME = 200


@dataclass(frozen=True)
class Edits:
    """Files to write, and what has to be told of those that cannot be."""

    files: dict[str, str]
    """Name -> whole content."""
    notes: tuple[str, ...] = ()


def read_edits(text: str, editable: Collection[str], protected: Collection[str]) -> Edits:
    """The files of a chat's answer.

    editable: files that are there and may be changed; new ones may come. protected: files that stay as they are.
    """
    named, unnamed, notes, end = {}, [], [], 0
    known = {*editable, *protected}
    for block in BLOCK.finditer(text):
        name = _name(block[2], text[end : block.start()], block[3], known)
        end = block.end()
        if name is None:
            unnamed.append(block[3])
        elif name in protected:
            notes.append(f"{name} stays as it is: it is one of the tests.")
        elif (why := _refusal(name)) is not None:
            notes.append(f"{name[:LONGEST_NAME]} was not written: {why}.")
        else:
            named[name] = block[3]
    if not named and not notes:
        if not unnamed and _is_program(text):
            unnamed = [text]  # a model that writes code and nothing else
        if unnamed and len(editable) == 1:
            [name] = editable
            named[name] = max(unnamed, key=len)  # others show how it is used
        elif unnamed:
            notes.append("No code block had a file's name after its opening fence.")
        else:
            notes.append("The answer had no code block.")
    return Edits(named, tuple(dict.fromkeys(notes)))


def _name(info: str, before: str, code: str, known: Collection[str]) -> str | None:
    """The file that a block is for: named after the fence, alone in the line before it, or in a comment that is its
    first line.
    """
    if found := NAME.search(info):
        return _plain(found[0])
    line = before.rstrip().rpartition("\n")[2]
    found = NAME.findall(line)
    if len(found) == 1 and (_plain(found[0]) in known or line.strip(" \t*#:`_") == found[0]):
        return _plain(found[0])
    first = re.match(rf"(?:#|//)[ \t]*({NAME.pattern})[ \t]*\n", code)
    return _plain(first[1]) if first else None


def _is_program(text: str) -> bool:
    try:
        return any(not isinstance(statement, ast.Expr) for statement in parse(text).body)  # a word is an expression too
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _plain(name: str) -> str:
    return name.removeprefix("./")


def _refusal(name: str) -> str | None:
    """Why a name cannot be that of a file in the workspace; None if it can."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or any(part.startswith(".") for part in path.parts):
        return "a name must lead to a file inside the task's folder"
    return f"its name has more than {LONGEST_NAME} characters" if len(name) > LONGEST_NAME else None
