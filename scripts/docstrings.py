r"""Writes small conversations from Python source: a request from a docstring, answered with the function's code.

    python -m scripts.docstrings --out data/stdlib.jsonl /usr/lib/python3.11
    python -m scripts.tokenize --out data/stdlib_chat --chat --tokenizer data/stdlib/tokenizer.json \
        --dataset json --data-files data/stdlib.jsonl

This is instruction data without a download, to try the instruction phase; it teaches the form of answers, not a skill.
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
    """Folder to search for *.py files, without tests and site-packages."""
    out: Path
    """File to write, *.jsonl."""
    longest: int = 1500
    """Longest function to include, in characters."""


def conversations(source: str) -> Iterator[list[dict[str, str]]]:
    """A user's request and the assistant's code for every function with a docstring and a body."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escape sequences in the source
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)) and len(node.body) > 1:
            request = " ".join(docstring.split("\n\n")[0].split())
            node.decorator_list, node.body = [], node.body[1:]
            yield [
                {"role": "user", "content": f"Write {node.name}({ast.unparse(node.args)}). {request}"},
                {"role": "assistant", "content": ast.unparse(node)},
            ]


def write(options: Options) -> str:
    """Writes the file and returns a line that sums it up. Raises InputError if there is nothing to write."""
    files = [
        file
        for file in sorted(options.source.rglob("*.py"))
        if not {"test", "tests", "site-packages"} & set(file.parts)
    ]
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    found = [pair for text in texts for pair in conversations(text) if len(pair[1]["content"]) <= options.longest]
    if not found:
        raise InputError(f"{options.source} has no documented functions in *.py files; give a folder of Python source")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_name(options.out.name + ".part")
    part.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in found), encoding="utf-8")
    os.replace(part, options.out)
    return f"{options.out}: {len(found):,} conversations from {len(files):,} files"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(write, Options, "python -m scripts.docstrings", arguments)


if __name__ == "__main__":
    sys.exit(main())
