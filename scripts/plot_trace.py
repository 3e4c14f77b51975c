"""`python -m scripts.plot_trace TRACE`: shows where the time of a token went, from a trace of `infer bench --trace`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from laneformer.commands.picture import pyplot, save
from laneformer.errors import InputError, run_command
from laneformer.files import parse_json, read_file, unzip

FIRST, DRAWS = "embed", "head"  # first op of a pass, and the op that only passes with a drawn token have
BETWEEN = "between ops"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show the time of a token by op and worker of a decode kernel (threads of a CPU, CTAs of a GPU)."""

    trace: tyro.conf.Positional[Path]
    """File of `python -m infer bench --trace`, .json or .json.gz."""
    layer: int | None = None
    """Layer to draw (default: the middle one)."""
    out: Path | None = None
    """Picture to write, .png or .svg (default: the trace's name with .png)."""
    picture: bool = True
    """Draw the picture, which needs matplotlib; otherwise only print the table."""


@dataclass(frozen=True)
class Span:
    op: str
    layer: int | None
    begin: float
    end: float
    """End of the span; both times in microseconds."""


@dataclass(frozen=True)
class Trace:
    """Passes of all drawn tokens except the first, whose pass includes the prompt."""

    kind: str
    """Kind of worker: thread or CTA."""
    ops: list[str]
    """Names of ops in order of first appearance."""
    passes: list[dict[int, list[Span]]]
    """Spans by worker, for each pass."""

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Reads a trace. Raises InputError for another kind of file, or a trace of fewer than two tokens."""
        try:
            events = parse_json(unzip(read_file(path)))["traceEvents"]
            kind = next(e["args"]["name"].split()[0] for e in events if e["name"] == "thread_name")
            workers: dict[int, list[Span]] = {e["tid"]: [] for e in events if e["name"] == "thread_name"}
            for e in events:
                if e["ph"] == "X":
                    workers[e["tid"]].append(
                        Span(e["name"], e.get("args", {}).get("layer"), e["ts"], e["ts"] + e["dur"])
                    )
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise InputError(
                f"{path} is not a trace ({error!r}); give a file of `python -m infer bench --trace`"
            ) from None
        drawn = {worker: _drawn(spans) for worker, spans in workers.items()}
        count = min(map(len, drawn.values()))
        if count == 0:
            raise InputError(f"{path} has no token after the first; trace at least two (--output-tokens)")
        return cls(
            kind,
            list(dict.fromkeys(span.op for spans in drawn.values() for one in spans for span in one)),
            [{worker: spans[n] for worker, spans in drawn.items()} for n in range(count)],
        )

    @property
    def lengths(self) -> np.ndarray:
        """Microseconds of each pass, from the first begin to the last end of any worker: float64 [passes]."""
        spans = [[span for own in one.values() for span in own] for one in self.passes]
        return np.array([max(s.end for s in one) - min(s.begin for s in one) for one in spans])

    def times(self) -> dict[str, np.ndarray]:
        """Microseconds of each worker in each pass, by op and between ops: float64 [passes, workers]."""
        table = {
            op: np.array(
                [[sum(s.end - s.begin for s in own if s.op == op) for own in one.values()] for one in self.passes]
            )
            for op in self.ops
        }
        whole = np.array([[own[-1].end - own[0].begin for own in one.values()] for one in self.passes])
        return table | {BETWEEN: whole - sum(table.values())}


def _drawn(spans: list[Span]) -> list[list[Span]]:
    """A worker's passes that draw a token, without the first."""
    passes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        if span.op == FIRST:
            passes.append([])
        if passes:
            passes[-1].append(span)
    return [one for one in passes if any(span.op == DRAWS for span in one)][1:]


def table(trace: Trace) -> str:
    """Markdown table: microseconds of a token by op, of the mean and the slowest worker, medians over tokens."""
    times, whole = trace.times(), float(np.median(trace.lengths))
    rows = [f"| op | us of a token, mean {trace.kind} | slowest {trace.kind} | share |", "|---|---|---|---|"]
    for op, us in times.items():
        mean = float(np.median(us.mean(1)))
        rows.append(f"| {op} | {mean:,.1f} | {float(np.median(us.max(1))):,.1f} | {mean / whole:.1%} |")
    rows.append(f"| a token, {len(trace.passes)} of them, {len(trace.passes[0])} {trace.kind}s | {whole:,.1f} | | |")
    return "\n".join(rows)


def draw(trace: Trace, layer: int | None):
    """Draws a bar of the times by op, and below it one layer of the median token with a row for each worker. Raises
    InputError for an unknown layer.
    """
    layers = sorted(
        {span.layer for own in trace.passes[0].values() for span in own if span.layer is not None and span.op != DRAWS}
    )
    layer = layers[len(layers) // 2] if layer is None else layer
    if layer not in layers:
        raise InputError(f"--layer must be between {layers[0]} and {layers[-1]}, got {layer}")
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
    """Draws the picture; returns the table and the picture's path."""
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
