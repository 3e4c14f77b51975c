"""Reads the files of a checkpoint, which may come from anyone: without blocking on a pipe, and JSON only to a limited
depth.
"""

import errno
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laneformer.errors import CheckpointError, InputError

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


def unzip(raw: bytes) -> bytes:
    """The content of gzipped bytes; other bytes unchanged. Raises InputError if it is damaged or larger than
    MOST_BYTES, of which a small file can hold many times as much.
    """
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"damaged gzip data ({error}): get it again") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"gzip data of more than {MOST_BYTES:,} bytes: unpack it and give a part of it")
    return content


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


def files_inside(folder: Path, names: Iterable[str]) -> list[Path]:
    """Those of the named files that the folder has, to be copied with it.

    Raises CheckpointError for a symbolic link that leads out of the folder, because the copy of a folder that someone
    else published must not contain other files of this machine, and for anything but regular files. The links of a
    Hugging Face cache, from snapshots/REVISION to the folder blobs, are followed.
    """
    real = folder.resolve()
    places = [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]
    files = [folder / name for name in names if os.path.lexists(folder / name)]
    for file in files:
        content = Path(os.path.realpath(file))  # unlike resolve(), without an error for a loop
        if not any(content.is_relative_to(place) for place in places):
            raise CheckpointError(f"{file} is a symbolic link to {content}, outside of its folder: copy the file there")
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file: copy it again")
    return files


def check_folder(folder: Path) -> None:
    """Raises CheckpointError if a folder that a library will read has a symbolic link out of it or to a folder, or a
    pipe, on which the library would wait. A folder that does not exist is left to the library.
    """
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        files_inside(folder, [os.path.relpath(os.path.join(place, name), folder) for name in (*links, *names)])


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
