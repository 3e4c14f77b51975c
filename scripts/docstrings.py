r"""Small conversations from Python source: asked for a function by its docstring, the assistant answers with code.

    python -m scripts.docstrings --out data/stdlib.jsonl /usr/lib/python3.11
    python -m scripts.tokenize --out data/stdlib_chat --chat --tokenizer data/stdlib/tokenizer.json \
        --dataset json --data-files data/stdlib.jsonl

Instruction data that needs no download, to try the instruction phase with; it teaches the form, not a skill.
"""

import ast
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from laneformer.errors import InputError, run_command


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write one JSON line {"messages": [...]} for every documented function in a folder of Python files."""

    source: tyro.conf.Positional[Path]
    """Folder that is searched through for *.py; tests and site-packages are left out."""
    out: Path
    """File to write, *.jsonl."""
    longest: int = 1500
    """Functions with more characters are left out."""


def conversations(source: str) -> Iterator[list[dict[str, str]]]:
    """A user's wish and the assistant's code for every function with a docstring and a body of its own."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of other people's escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)) and len(node.body) > 1:
            wish = " ".join(said.split("\n\n")[0].split())
            node.decorator_list, node.body = [], node.body[1:]
            yield [
                {"role": "user", "content": f"Write {node.name}({ast.unparse(node.args)}). {wish}"},
                {"role": "assistant", "content": ast.unparse(node)},
            ]


def write(options: Options) -> str:
    """Writes the file and returns a line that says what it holds. Raises InputError where there is nothing to write."""
    files = [
        file
        for file in sorted(options.source.rglob("*.py"))
        if not {"test", "tests", "site-packages"} & set(file.parts)
    ]
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    found = [pair for text in texts for pair in conversations(text) if len(pair[1]["content"]) <= options.longest]
    if not found:
        raise InputError(f"{options.source} has no documented functions in *.py files: give a folder of Python source")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_name(options.out.name + ".part")
    part.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in found), encoding="utf-8")
    os.replace(part, options.out)
    return f"{options.out}: {len(found):,} conversations from {len(files):,} files"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    return run_command(write, Options, "python -m scripts.docstrings", arguments)


if __name__ == "__main__":
    sys.exit(main())
