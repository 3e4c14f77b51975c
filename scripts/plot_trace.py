"""`python -m scripts.plot_trace TRACE`: where the time of a token goes, from what `infer bench --trace` wrote; a table
and a picture.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from laneformer.errors import InputError, run_command
from scripts.picture import pyplot, save

FIRST, DRAWS = "embed", "head"  # ops that begin a pass, and that only a pass which draws a token has
BETWEEN = "between ops"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what the workers of a decode kernel (threads of a CPU, CTAs of a GPU) did during a token."""

    trace: tyro.conf.Positional[Path]
    """File of `python -m infer bench --trace`, .json or .json.gz."""
    layer: int | None = None
    """The one to draw; by default one in the middle."""
    out: Path | None = None
    """Picture to write, .png or .svg; by default the trace's name with .png."""
    picture: bool = True
    """Without, the table alone, which needs no matplotlib."""


@dataclass(frozen=True)
class Span:
    op: str
    layer: int | None
    begin: float
    end: float
    """Microseconds."""


@dataclass(frozen=True)
class Trace:
    """The tokens that were drawn after the first one, whose pass has the prompt in it."""

    kind: str
    """Of the workers."""
    ops: list[str]
    """In the order in which they first come."""
    passes: list[dict[int, list[Span]]]
    """By worker, each pass of a token."""

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Raises InputError for a file that is no trace, or has no such token."""
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                events = json.load(file)["traceEvents"]
            kind = next(e["args"]["name"].split()[0] for e in events if e["name"] == "thread_name")
            workers: dict[int, list[Span]] = {e["tid"]: [] for e in events if e["name"] == "thread_name"}
            for e in events:
                if e["ph"] == "X":
                    workers[e["tid"]].append(
                        Span(e["name"], e.get("args", {}).get("layer"), e["ts"], e["ts"] + e["dur"])
                    )
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration, EOFError, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is no trace of `python -m infer bench --trace` ({error!r})") from None
        drawn = {worker: _drawn(spans) for worker, spans in workers.items()}
        count = min(map(len, drawn.values()))
        if count == 0:
            raise InputError(f"{path} has no token after the first: trace at least two (--output-tokens)")
        return cls(
            kind,
            list(dict.fromkeys(span.op for spans in drawn.values() for one in spans for span in one)),
            [{worker: spans[n] for worker, spans in drawn.items()} for n in range(count)],
        )

    @property
    def lengths(self) -> np.ndarray:
        """Of each pass, from the first worker's begin to the last one's end; microseconds, float64 [passes]."""
        spans = [[span for own in one.values() for span in own] for one in self.passes]
        return np.array([max(s.end for s in one) - min(s.begin for s in one) for one in spans])

    def times(self) -> dict[str, np.ndarray]:
        """By op, and between ops: microseconds in each pass by each worker, float64 [passes, workers]."""
        table = {
            op: np.array(
                [[sum(s.end - s.begin for s in own if s.op == op) for own in one.values()] for one in self.passes]
            )
            for op in self.ops
        }
        whole = np.array([[own[-1].end - own[0].begin for own in one.values()] for one in self.passes])
        return table | {BETWEEN: whole - sum(table.values())}


def _drawn(spans: list[Span]) -> list[list[Span]]:
    """A worker's passes that draw a token, all but the first of them."""
    passes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        if span.op == FIRST:
            passes.append([])
        if passes:
            passes[-1].append(span)
    return [one for one in passes if any(span.op == DRAWS for span in one)][1:]


def table(trace: Trace) -> str:
    """Microseconds of a token by op: of the mean worker and of the slowest one, medians over the tokens; Markdown."""
    times, whole = trace.times(), float(np.median(trace.lengths))
    rows = [f"| op | us of a token, mean {trace.kind} | slowest {trace.kind} | share |", "|---|---|---|---|"]
    for op, us in times.items():
        mean = float(np.median(us.mean(1)))
        rows.append(f"| {op} | {mean:,.1f} | {float(np.median(us.max(1))):,.1f} | {mean / whole:.1%} |")
    rows.append(f"| a token, {len(trace.passes)} of them, {len(trace.passes[0])} {trace.kind}s | {whole:,.1f} | | |")
    return "\n".join(rows)


def draw(trace: Trace, layer: int | None):
    """The times as one bar; below it a layer of the median token, workers in rows. Raises InputError for a layer that
    is not there.
    """
    layers = sorted(
        {span.layer for own in trace.passes[0].values() for span in own if span.layer is not None and span.op != DRAWS}
    )
    layer = layers[len(layers) // 2] if layer is None else layer
    if layer not in layers:
        raise InputError(f"--layer {layer}: the trace has layers {layers[0]} to {layers[-1]}")
    plt = pyplot()
    figure, (bar, rows) = plt.subplots(2, 1, figsize=(9, 5), height_ratios=(1, 3.5), layout="constrained")
    colors = {op: color for op, color in zip([*trace.ops, BETWEEN], plt.get_cmap("tab10").colors * 2, strict=False)} | {
        BETWEEN: "#dddddd"
    }
    left = 0.0
    for op, us in trace.times().items():
        mean = float(np.median(us.mean(1)))
        bar.barh(0, mean, left=left, color=colors[op], label=f"{op} {mean:,.0f}")
        left += mean
    bar.set(
        yticks=[], xlim=(0, left), xlabel=f"us of a token, mean {trace.kind}, medians of {len(trace.passes)} tokens"
    )
    bar.legend(ncols=6, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)

    lengths = trace.lengths
    one = trace.passes[int(np.argsort(lengths)[len(lengths) // 2])]
    shown = {worker: [span for span in own if span.layer == layer] for worker, own in one.items()}
    begin = min(span.begin for own in shown.values() for span in own)
    for row, own in enumerate(shown.values()):
        for span in own:
            rows.barh(row, span.end - span.begin, left=span.begin - begin, height=0.9, color=colors[span.op])
    rows.set(xlabel=f"us, layer {layer} of the median token", ylabel=trace.kind, ylim=(len(shown) - 0.5, -0.5))
    rows.yaxis.get_major_locator().set_params(integer=True)
    return figure


def run(options: Options) -> str:
    """The table and the picture's name."""
    trace = Trace.read(options.trace)
    if not options.picture:
        return table(trace)
    name = options.trace.name.removesuffix(".gz").removesuffix(".json")
    out = save(draw(trace, options.layer), options.out or options.trace.with_name(f"{name}.png"))
    return f"{table(trace)}\n\n{out}"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.plot_trace", arguments)


if __name__ == "__main__":
    sys.exit(main())
