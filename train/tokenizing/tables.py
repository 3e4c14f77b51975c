"""A source of documents: rows of local JSON, CSV, Parquet or text files, whose columns may differ."""

import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from laneformer.errors import InputError
from laneformer.train.tokenizing.documents import HIDDEN, ROW_WITHOUT, Document, digest, named, once
from laneformer.train.tokenizing.formats import Unreadable, read_rows
from laneformer.train.tokenizing.rows import BadRows, RowReader

FIRST_ROWS = 256  # rows of a file in which the columns must occur


class Tables:
    """The rows of local files, file by file. A row is a document: a text or, with `chat`, a conversation.

    Rows that cannot be read, and files without the columns, are skipped and reported to `bad`.
    """

    without = ROW_WITHOUT

    def __init__(self, kind: str, data_files: Sequence[str], columns: Sequence[str], *, chat: bool, bad: BadRows):
        """kind: format of the files, one of formats.KINDS. data_files: files, folders and patterns; a file that is
        named twice is read once.

        Raises InputError if no file has a row with the columns.
        """
        self.name = f"{kind} files {', '.join(data_files)}"
        self.kind, self.bad, self.reader = kind, bad, RowReader(columns, chat)
        self.files = once(file for pattern in data_files for file in _found(pattern))
        self._require_columns()
        self.origin = {
            "dataset": kind,
            "config": "",
            "split": "train",
            "columns": list(columns),
            "data_files": list(data_files),
            "revision": None,
        }

    def documents(self, start: int = 0) -> Iterator[Document | None]:
        unit = -1
        for file in self.files:
            for place, row in read_rows(file, self.kind, self.reader):
                unit += 1
                if unit < start:
                    continue
                where = f"{file}, {place}" if place else str(file)
                try:
                    if isinstance(row, Unreadable):
                        raise InputError(row.reason)
                    yield Document.of(unit, self.reader.content(row), where)
                except InputError as error:
                    self.bad.add(unit, where, str(error))
                    yield None

    def identity(self) -> str:
        """Digest that identifies the text without reading it: names, sizes and times of the files."""
        local = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        return digest(repr((self.kind, "train", list(self.reader.chosen), local, None)).encode()).hex()

    def _require_columns(self) -> None:
        """Raises InputError unless the first rows of some file have the columns."""
        names: dict[str, None] = {}
        unreadable, lacking = "", ""
        for file in self.files:
            for _, row in itertools.islice(read_rows(file, self.kind, self.reader), FIRST_ROWS):
                if isinstance(row, Unreadable):
                    unreadable = unreadable or f"{file}: {row.reason}"
                    continue
                names |= dict.fromkeys(row)
                try:
                    self.reader.columns(list(names))
                    return
                except InputError as error:
                    lacking = str(error)
        if lacking:
            raise InputError(f"dataset {self.kind} has {lacking}")
        raise InputError(f"nothing to read in {self.name}: {unreadable or 'no rows'}; check --data-files and --column")


def _found(pattern: str) -> Iterator[Path]:
    """The files of a name or pattern in sorted order; of a folder, all without hidden names."""
    names = sorted(glob.glob(pattern, recursive=True)) or [pattern]
    for path in map(Path, names):
        if path.is_dir():
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if not named(name, HIDDEN))
                yield from (Path(folder, name) for name in sorted(files) if not named(name, HIDDEN))
        elif path.exists():
            yield path
        else:
            raise InputError(f"no file is named {pattern}; correct --data-files")
