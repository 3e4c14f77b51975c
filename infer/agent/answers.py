"""Extracts files from an answer: each code block is the content of the file that it names, or of the only file to
edit.
"""

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from laneformer.infer.evaluate.problems import parse

BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})([^\n]*)\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"[\w./-]*\w\.\w+")
LONGEST_NAME = 200  # bytes; file systems allow 255 for a part of a path


@dataclass(frozen=True)
class Edits:
    """Files to write, and notes for the model about files that cannot be written."""

    files: dict[str, str]
    """Name -> complete content."""
    notes: tuple[str, ...] = ()


def read_edits(text: str, editable: Collection[str], protected: Collection[str], added: Collection[str] = ()) -> Edits:
    """The files of an answer in a chat.

    editable: existing files that the answer may change; it may also add files. protected: files that it must not
    change. added: files that earlier answers have added.
    """
    named: dict[str, str] = {}
    unnamed, notes, end = [], [], 0
    known = {*editable, *protected}
    for block in BLOCK.finditer(text):
        name = _name(block[2], text[end : block.start()], block[3], known)
        end = block.end()
        if name is None:
            unnamed.append(block[3])
        elif name in protected:
            notes.append(f"{name} stays as it is: it is one of the tests.")
        elif (why := refusal(name, {*known, *added, *named})) is not None:
            notes.append(f"{name[:LONGEST_NAME]} was not written: {why}.")
        else:
            named[name] = block[3]
    if not named and not notes:
        if not unnamed and _is_program(text):
            unnamed = [text]  # the answer is code without fences
        if unnamed and len(editable) == 1:
            [name] = editable
            named[name] = max(unnamed, key=len)  # shorter blocks are usage examples
        elif unnamed:
            notes.append("No code block had a file's name after its opening fence.")
        else:
            notes.append("The answer had no code block.")
    return Edits(named, tuple(dict.fromkeys(notes)))


def _name(info: str, before: str, code: str, known: Collection[str]) -> str | None:
    """The file that a block names: after the fence, alone in the line before the fence, or in a comment in the block's
    first line; None if it names no file.

    info: text after the opening fence. before: text before the block. known: files of the task.
    """
    if found := NAME.search(info):
        return plain(found[0])
    line = before.rstrip().rpartition("\n")[2]
    names = NAME.findall(line)
    if len(names) == 1 and (plain(names[0]) in known or line.strip(" \t*#:`_") == names[0]):
        return plain(names[0])
    first = re.match(rf"(?:#|//)[ \t]*({NAME.pattern})[ \t]*\n", code)
    return plain(first[1]) if first else None


def _is_program(text: str) -> bool:
    """Whether a text is Python with at least one statement that is not an expression, as a single word would be."""
    try:
        return any(not isinstance(statement, ast.Expr) for statement in parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def plain(name: str) -> str:
    """The normal form of a file name, for comparisons and for writing."""
    return str(PurePosixPath(name))


def refusal(name: str, files: Collection[str]) -> str | None:
    """The reason why a file in the workspace must not have this name; None if it may. name: in its plain form. files:
    files in the workspace.
    """
    path = PurePosixPath(name)
    if not name.isprintable():
        return "a name must have printable characters alone"
    if not path.name:
        return "it has no name"
    if path.is_absolute() or ".." in path.parts or any(part.startswith(".") for part in path.parts):
        return "a name must lead to a file inside the task's folder"
    if len(name.encode()) > LONGEST_NAME:
        return f"its name has more than {LONGEST_NAME} bytes"
    if any(path in PurePosixPath(each).parents for each in files):
        return "it is a folder"
    above = next((str(parent) for parent in path.parents if str(parent) in files), None)
    return None if above is None else f"{above} is a file, not a folder"
