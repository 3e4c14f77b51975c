"""`python -m scripts.plot RUN...`: plots the records of training runs as PNG or SVG."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from laneformer.commands.picture import pyplot, save
from laneformer.errors import InputError, run_command
from laneformer.train.metrics.records import read_lines

MARKERS = "osD^vP*X"
TIMES = 5  # records of the lanes to show for a single run
COMMON = 0.98  # share of the values inside the picture; spikes may be outside


@dataclass(frozen=True, kw_only=True)
class Options:
    """Plot the records of one or several training runs against tokens."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or metrics.jsonl files."""
    panels: tuple[Literal["loss", "optimizer", "speed", "lanes", "experts"], ...] = ("loss",)
    """loss: training and validation loss; optimizer: learning rate and gradient norm; speed: tokens per second and, if
    recorded, model FLOPs utilization; lanes: similarity of the lanes' streams and size of landed parts, by depth;
    experts: load of the fullest expert, and entropy of the routers, means over layers.
    """
    out: Path | None = None
    """Picture to write, .png or .svg (default: named after the panels, such as loss.png, in the first run's folder)."""
    window: int = 20
    """Steps of the running mean."""


class Run:
    """The records of one run, by kind. Raises InputError if it has no training steps."""

    def __init__(self, path: Path, color: str):
        self.file, self.color = path / "metrics.jsonl" if path.is_dir() else path, color
        self.name = self.file.absolute().parent.name
        lines = read_lines(self.file)
        self.steps = [line for line in lines if "loss" in line]
        if not self.steps:
            raise InputError(f"{self.file} has no training steps; give the folder of a run that has started")
        self.tokens = {line["step"]: line["tokens"] for line in self.steps}
        self.validations = [line for line in lines if "validation" in line]
        self.lanes = [line for line in lines if "lanes" in line]
        self.skipped = [line["tokens"] for line in self.steps if line.get("skipped")]
        changes = [(a, b) for a, b in pairwise(self.steps) if a.get("phase") != b.get("phase")]
        self.borders = [(before["tokens"], after["phase"]) for before, after in changes]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and value of every step with a number under `key`."""
        return _columns((line["tokens"], line[key]) for line in self.steps if line.get(key) is not None)

    def validation(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss of every validation on `tag`."""
        return _columns(
            (self.tokens[r["step"]], r["validation"][tag]["loss"]) for r in self.validations if tag in r["validation"]
        )


def _columns(pairs: Iterable[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    columns = np.array(list(pairs), float).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def draw(options: Options) -> Path:
    """Writes the picture and returns its path."""
    if not options.runs:
        raise InputError("no run given; name at least one run folder")
    if options.window < 1:
        raise InputError(f"--window must be at least 1, got {options.window}")
    runs = [Run(path, f"C{i}") for i, path in enumerate(options.runs)]
    rows = [_ROWS[panel](runs, options.window) for panel in options.panels]
    plt = pyplot()
    heights = [4.5 if panel == "loss" else 3.0 for panel in options.panels]
    figure = plt.figure(figsize=(9, sum(heights)), layout="constrained")
    folds = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for fold, parts in zip(folds, rows, strict=True):
        for axes, part in zip(fold.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            part(axes)
            axes.grid(alpha=0.3)
    plt.close(figure)
    return save(figure, options.out or runs[0].file.parent / f"{'-'.join(options.panels)}.png")


Part = Callable[..., None]  # draws into the given axes


def _loss(runs: list[Run], window: int) -> list[Part]:
    tags = list(dict.fromkeys(tag for run in runs for record in run.validations for tag in record["validation"]))
    markers = dict(zip(tags, MARKERS * len(tags), strict=False))

    def draw(axes):
        tops = []
        for run in runs:
            tokens, losses = run.curve("loss")
            if len(losses):
                tops.append(max(losses[0], np.quantile(losses, COMMON)))
            checks = {tag: run.validation(tag) for tag in tags}
            last = [f"{tag} {values[-1]:.3f}" for tag, (_, values) in checks.items() if len(values)]
            _faint_and_mean(
                axes, tokens, losses, window, run.color, run.name + (f" (last: {', '.join(last)})" if last else "")
            )
            for tag, (at, values) in checks.items():
                axes.plot(at, values, markers[tag], color=run.color, markeredgecolor="black", markersize=5)
        for tag, marker in markers.items():
            axes.plot([], [], marker, color="white", markeredgecolor="black", markersize=5, label=f"validation, {tag}")
        if tops:  # so that a spike does not flatten the rest
            low, top = axes.dataLim.y0, max(tops)
            room = 0.05 * max(top - low, 0.1)
            axes.set_ylim(low - room, top + room)
        _mark_borders_and_skips(axes, runs, names=True)
        _tokens_below(axes)
        title = f"Loss: training, mean of {window} steps" + (", and validation" if tags else "")
        axes.set(ylabel="cross-entropy, nats per token", title=title)
        axes.legend(loc="upper right", fontsize="small")

    return [draw]


def _optimizer(runs: list[Run], window: int) -> list[Part]:
    def rate(axes):
        for run in runs:
            axes.plot(*run.curve("learning_rate"), color=run.color, linewidth=1.6, label=run.name)
        _mark_borders_and_skips(axes, runs)
        _tokens_below(axes)
        axes.set(title="Learning rate", ylim=(0, None))
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        if len(runs) > 1:
            axes.legend(fontsize="small")

    def norm(axes):
        from matplotlib.ticker import LogLocator

        for run in runs:
            _faint_and_mean(axes, *run.curve("grad_norm"), window, run.color, run.name)
        _mark_borders_and_skips(axes, runs)
        _tokens_below(axes)
        axes.set_title("Gradient norm")
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return [rate, norm]


def _speed(runs: list[Run], window: int) -> list[Part]:
    def part(key: str, title: str, scale: float, unit: str) -> Part:
        def draw(axes):
            top = 0.0
            for run in runs:
                tokens, values = run.curve(key)
                if len(values):
                    median = f"{run.name}: median {scale * np.median(values):,.4g}{unit}"
                    _faint_and_mean(axes, tokens, scale * values, window, run.color, median)
                    top = max(top, scale * np.quantile(values, COMMON))
            _tokens_below(axes)
            axes.set(title=title, ylim=(0, 1.1 * top or None))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}{unit}")
            axes.legend(loc="lower right", fontsize="small")

        return draw

    parts = {"tokens_per_second": ("Tokens per second", 1, ""), "mfu": ("Model FLOPs utilization", 100, " %")}
    recorded = [key for key in parts if any(len(run.curve(key)[0]) for run in runs)]
    if not recorded:
        raise InputError(f"{', '.join(str(run.file) for run in runs)}: no record of the speed; choose other --panels")
    return [part(key, *parts[key]) for key in recorded]


def _lanes(runs: list[Run], window: int) -> list[Part]:
    """The lanes by depth: several records of a single run, or the last record of each of several runs."""
    if not any(run.lanes for run in runs):
        raise InputError(
            f"{', '.join(str(run.file) for run in runs)}: no record of the lanes; train with validation and watch.lanes"
        )
    if len(runs) == 1:
        records = runs[0].lanes
        chosen = sorted({round(i) for i in np.linspace(0, len(records) - 1, TIMES)})
        shades = np.linspace(1, 0.15, len(chosen))[::-1]
        curves = [
            (
                runs[0].color,
                shade,
                f"{runs[0].tokens[records[i]['step']] / 1e6:,.3g} million tokens",
                records[i]["lanes"],
            )
            for i, shade in zip(chosen, shades, strict=True)
        ]
    else:
        curves = [(run.color, 1.0, run.name, run.lanes[-1]["lanes"]) for run in runs if run.lanes]

    def part(key: str, title: str) -> Part:
        def draw(axes):
            for color, shade, label, values in curves:
                numbers = np.array(values[key], float)  # null: nan, which leaves a gap
                axes.plot(numbers, "o-", color=color, alpha=shade, markersize=3, linewidth=1.4, label=label)
            axes.set(xlabel="module (even: attention, odd: MLP, last: head)", title=title)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(fontsize="x-small")

        return draw

    return [part("similarity", "Mean cosine between lanes"), part("landed_over_own", "Parts of other lanes / own part")]


def _experts(runs: list[Run], window: int) -> list[Part]:
    def part(key: str, title: str) -> Part:
        def draw(axes):
            for run in recorded:
                found = _columns((line["tokens"], np.mean(line["experts"][key])) for line in run.steps)
                _faint_and_mean(axes, *found, window, run.color, run.name)
            _mark_borders_and_skips(axes, recorded)
            _tokens_below(axes)
            axes.set(title=title)
            axes.legend(fontsize="small")

        return draw

    recorded = [run for run in runs if "experts" in run.steps[0]]
    if not recorded:
        raise InputError(
            f"{', '.join(str(run.file) for run in runs)}: no record of experts; choose runs whose model has num_experts"
        )
    return [part("fullest", "Fullest expert / even load"), part("entropy", "Entropy of the routers, nats")]


_ROWS = {"loss": _loss, "optimizer": _optimizer, "speed": _speed, "lanes": _lanes, "experts": _experts}


def _faint_and_mean(axes, tokens: np.ndarray, values: np.ndarray, window: int, color: str, label: str) -> None:
    """Draws every value faintly, and the mean over `window` steps."""
    axes.plot(tokens, values, color=color, alpha=0.2, linewidth=0.8)
    if len(values):
        weights = np.full(min(window, len(values)), 1 / min(window, len(values)))
        axes.plot(
            *(np.convolve(x, weights, mode="valid") for x in (tokens, values)), color=color, linewidth=1.6, label=label
        )


def _mark_borders_and_skips(axes, runs: list[Run], names: bool = False) -> None:
    """Draws a vertical line at the start of each phase, optionally with its name, and a cross for each skipped step."""
    across = axes.get_xaxis_transform()
    owners: dict[tuple[float, str], list[str]] = {}
    for run in runs:
        for border in run.borders:
            owners.setdefault(border, []).append(run.color)
        if run.skipped:
            axes.plot(
                run.skipped, [0.02] * len(run.skipped), "x", color=run.color, markersize=5, transform=across, zorder=3
            )
    for (at, name), colors in owners.items():
        color = colors[0] if len(runs) > 1 == len(colors) else "0.4"
        axes.axvline(at, color=color, linewidth=1, linestyle="--")
        if names:
            label = axes.text(
                at,
                0.04,
                f" {name} ",
                color=color,
                fontsize="small",
                va="bottom",
                ha="right",
                rotation=90,
                transform=across,
            )
            label.set_bbox({"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0})
    if names and any(run.skipped for run in runs):
        axes.plot([], [], "x", color="0.4", label="skipped step")


def _tokens_below(axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:,.6g}")
    axes.set_xlabel("million tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(draw, Options, "python -m scripts.plot", arguments)


if __name__ == "__main__":
    sys.exit(main())
