"""metrics.jsonl: one line per step and validation, and no step twice, however often a run is resumed."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from laneformer.errors import InputError, writing

SPEED = ("tokens_per_second", "mfu")  # `scalars` puts these and all *_seconds into the group "time"


class Sink(Protocol):
    """A further destination of records besides the file (train/metrics/sinks.py)."""

    where: str
    """Folder or address at which to view them."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the numbers of a step, named as by `scalars`."""

    def text(self, step: int, texts: dict[str, str]) -> None:
        """Writes the texts of a step, by name."""

    def close(self) -> None:
        """Returns when all records are delivered."""


class MetricsLog:
    """Appends records {"step": n, ...} to a JSONL file, after dropping those of steps that a resumed run repeats."""

    def __init__(self, path: Path, resumed_at: int, sinks: Sequence[Sink] = ()):
        """resumed_at: last step to keep. sinks: also receive every record. Open sinks that read `last_step(path)`
        before this log.
        """
        self.path, self.sinks = path, sinks
        kept = [line for line in read_lines(path) if line["step"] <= resumed_at]
        part = path.with_name(path.name + ".part")
        with writing(path):
            part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(part, path)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, step: int, **values) -> None:
        """Writes a record, line-buffered. Floats keep all digits, so that equal lines mean bitwise equal losses; floats
        that are not finite become null.

        Raises LaneformerError, as `sync` does, if the file cannot be written.
        """
        with writing(self.path):
            self._file.write(json.dumps({"step": step, **_finite(values)}, allow_nan=False) + "\n")
        for sink in self.sinks:
            sink.write(step, scalars(values))

    def sync(self) -> None:
        """Returns when all records are on disk, as they must be before the checkpoint of their last step."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with writing(self.path):
            self._file.close()


def read_lines(path: Path) -> list[dict]:
    """Records of a metrics file, without a truncated last line; empty if there is no file.

    Raises InputError for a line that is not a record.
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
            raise InputError(f"{path}, line {number}, is damaged; remove that line, or move the file away") from None
    return records


def last_step(path: Path) -> int:
    """Step of the last record of a metrics file, 0 if there is none. Raises InputError as `read_lines` does."""
    lines = read_lines(path)
    return lines[-1]["step"] if lines else 0


def scalars(values: dict) -> dict[str, float]:
    """Numbers of a record under the names that dashboards group by; texts and nulls are left out.

    loss -> train/loss; step_seconds, tokens_per_second, mfu -> time/...; nested values keep their names:
    validation/TAG/loss, epoch/TAG, time/compile, lanes/similarity/07 (module 7).
    """

    def flatten(name: str, value) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flatten(f"{name}/{key}", inner)
        elif isinstance(value, list | tuple):
            digits = len(str(len(value) - 1))
            for i, inner in enumerate(value):
                yield from flatten(f"{name}/{i:0{digits}}", inner)
        elif isinstance(value, int | float):
            yield name, float(value)

    out: dict[str, float] = {}
    for key, value in values.items():
        group = "time/" if key.endswith("_seconds") or key in SPEED else "train/"
        out |= flatten(key if isinstance(value, dict) else group + key, value)
    return out


def _finite(value):
    """The value with None for every float that is not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
