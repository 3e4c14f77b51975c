"""Reads the files of a checkpoint, which may come from anyone: without blocking on a pipe, and JSON only to a limited
depth.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from laneformer.errors import CheckpointError

MOST_BYTES = 1 << 30  # largest file that is read at once
DEEPEST = 100  # most levels of nesting in a JSON file


def read_file(file: Path) -> bytes:
    """The content of a regular file. Raises FileNotFoundError, or CheckpointError if it is not a regular file or larger
    than MOST_BYTES.
    """
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is not a regular file: copy it again")
        if found.st_size > MOST_BYTES:
            raise CheckpointError(f"{file} has {found.st_size:,} bytes, more than {MOST_BYTES:,}: copy it again")
        return opened.read()


def parse_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads` of UTF-8 text. Also raises ValueError for values nested deeper than DEEPEST levels."""
    too_deep = ValueError(f"nested deeper than {DEEPEST} levels")
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text, **options)
    except RecursionError:
        raise too_deep from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [part for each in level for part in _parts(each)]
    if level:
        raise too_deep
    return value


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def refuse_link_loops(folder: Path) -> None:
    """Raises CheckpointError, naming the link, if the folder, a parent or a file in it is a link back to itself."""
    for path in (*reversed(folder.parents), folder):
        _refuse_loop(path)
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_symlink():
                _refuse_loop(entry)


def _refuse_loop(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path} is a symbolic link that leads back to itself: replace it by the file or folder that it should"
                " name"
            ) from None
