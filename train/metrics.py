"""metrics.jsonl: one line per step and per validation, never a step twice however often a run is resumed."""

import json
import os
from pathlib import Path
from typing import Self

from laneformer.errors import InputError


class MetricsLog:
    """Appends records {"step": n, ...} to a JSONL file; opened at a step it drops what an interrupted run wrote after it."""

    def __init__(self, path: Path, resumed_at: int):
        self.path = path
        kept = [line for line in read_lines(path) if line["step"] <= resumed_at]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  a line is out as soon as it is whole

    def write(self, step: int, **values) -> None:
        """One record. Floats keep all their digits: equal lines mean bitwise equal losses."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def sync(self) -> None:
        """Returns when all records are on disk, as they must be before the checkpoint that they lead to."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict]:
    """The records of a metrics file, without a last line that was cut off; empty if there is no file.

    Raises InputError for a line that is no record.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            if line.endswith(b"\n"):
                records.append(json.loads(line))
                int(records[-1]["step"])
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}, is damaged: remove that line, or move the file away") from None
    return records
