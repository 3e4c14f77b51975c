"""Writes the trace of a call as a timeline with one row per worker, for ui.perfetto.dev or chrome://tracing."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from laneformer.custom_calls.session import DecodeSession

WITHOUT_LAYER = ("head", "embed", "sample", "final")
MOST_OPS = 32  # spans of a layer in one token: its ops and its exchanges
PROCESS = 1


def spans_needed(layers: int, prompt_tokens: int, output_tokens: int) -> int:
    """Spans per worker that suffice to record a call: the argument of `Session.trace`."""
    return (prompt_tokens + output_tokens) * (MOST_OPS + 1) * (layers + 1)


def write_perfetto(path: str | Path, session: DecodeSession, name: str = "laneformer decode") -> int:
    """Writes the session's recorded spans in Chrome's JSON trace format, compressed if `path` ends in .gz. Returns the
    number of spans.

    Each worker is one row. Times are microseconds since the first span began. name: label of the process.
    """
    path, workers = Path(path), list(session.spans())
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, _names(name, session.worker, [worker for worker, _ in workers]))))
        for event in _events(session.ops, workers):
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")
    return sum(len(spans) for _, spans in workers)


def _names(process: str, kind: str, workers: Iterable[int]) -> Iterator[dict]:
    yield {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": process}}
    for worker in workers:
        yield {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": worker, "args": {"name": f"{kind} {worker}"}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": PROCESS, "tid": worker, "args": {"sort_index": worker}}


def _events(ops: tuple[str, ...], workers: list[tuple[int, np.ndarray]]) -> Iterator[dict]:
    origin = min((int(spans["begin_ns"].min()) for _, spans in workers if len(spans)), default=0)
    for worker, spans in workers:
        for op, layer, begin, end in spans.tolist():
            event = {
                "name": ops[op],
                "ph": "X",
                "ts": (begin - origin) / 1000,
                "dur": (end - begin) / 1000,
                "pid": PROCESS,
                "tid": worker,
            }
            yield event if ops[op] in WITHOUT_LAYER else event | {"args": {"layer": layer}}
