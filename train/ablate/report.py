"""The report of a grid, in its folder: report.md with a table and its explanation, results.jsonl, and pictures."""

import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax

import laneformer as lf
from laneformer.errors import InputError
from laneformer.train.ablate import plots
from laneformer.train.ablate.grid import Grid
from laneformer.train.ablate.listing import others
from laneformer.train.ablate.results import (
    CONTEXT,
    DEVICES,
    LAST,
    PER_NODE,
    RESULTS,
    Result,
    Summary,
    collect,
    missing,
    read_measured,
    summarize,
    within_models,
)

REPORT = "report.md"


def write_report(grid: Grid, measured: Path | None = None) -> str:
    """Writes the report of the finished cells, and returns the table. Raises InputError if no cell is finished or a
    record is damaged.
    """
    results = collect(grid)
    found = summarize(grid, results, read_measured(measured, grid))
    try:
        pictures = plots.draw(grid, found, grid.folder) if found else {}
        shown = [f"![{title}]({file.name})" for file, title in pictures.items()]
    except InputError as error:  # a report without pictures is better than none
        shown = [f"No pictures: {error}."]
    lines = [
        f"# Ablation {grid.name}",
        "",
        *_conditions(grid, results),
        "",
        *table(grid, found, results),
        "",
        *_legend(grid),
        "",
        *_within_models(grid, found),
        *_diagnostics(found),
        "",
        "\n\n".join(shown),
        "",
    ]
    part = grid.folder / (REPORT + ".part")
    part.write_text("\n".join(lines), encoding="utf-8")
    os.replace(part, grid.folder / REPORT)
    written = f"{grid.folder / REPORT}, {RESULTS} next to it, {len(shown)} pictures"
    return "\n".join([*table(grid, found, results), "", written])


def _conditions(grid: Grid, results: Sequence[Result]) -> list[str]:
    base, phases = grid.base, grid.base.phases
    tokens = sum(phase.steps * phase.tokens_per_step for phase in phases)
    left = len(grid.cells) - len(results)
    return [
        f"{len(results)} of {len(grid.cells)} cells are finished"
        + (f"; **{left} are missing**" if left else "")
        + f". Every cell: {tokens:,} tokens in {base.total_steps:,} steps, the same rows of"
        f" {', '.join(map(str, base.data.path))}, {_orders(grid)}; the seed affects only the initial weights. Model:"
        f" {lf.parameter_count(base.model):,} parameters, {base.model.num_hidden_layers} layers, hidden size"
        f" {base.model.hidden_size}, {base.model.num_lanes} lanes unless stated otherwise; {base.optimizer.kind},"
        f" learning rate {base.optimizer.learning_rate:g}. Written {time.strftime('%Y-%m-%d')} with jax"
        f" {jax.__version__}, Python {platform.python_version()}.",
        *([f"{count} folders of cells have other settings and are not counted."] if (count := others(grid)) else []),
    ]


def _orders(grid: Grid) -> str:
    if not grid.orders:
        return "in the same order"
    return f"in {len(grid.orders)} order{'s' * (len(grid.orders) > 1)} for every seed"


def table(grid: Grid, found: Sequence[Summary], results: Sequence[Result]) -> list[str]:
    """One row per variant, as Markdown. A run that failed, diverged or is not finished is named with the reason."""
    measured = any(s.measured is not None for s in found)
    heads = [
        "layout",
        "lanes",
        "delay",
        "validation loss",
        f"minus {grid.reference}",
        "runs",
        "reduces per pass",
        "exposed",
    ]
    heads += [f"tok/s {PER_NODE}x {name}, projected" for name in DEVICES.values()] + ["tok/s measured"] * measured
    reasons = {v.name: _reasons(missing(grid, v, results)) for v in grid.variants}
    if any(reasons.values()):
        heads.append("not counted")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for s in found:
        alone = f" ({s.devices} devices)" if s.devices != PER_NODE else ""
        cells = [
            s.name,
            str(s.lanes),
            "never" if s.delay is None else str(s.delay),
            number(s.mean, s.spread),
            _difference(grid, s),
            str(len(s.losses)),
            str(s.schedule.num_reductions),
            str(len(s.schedule.exposed)),
            *(f"{s.speed[name]:,.0f}{alone}" for name in DEVICES),
            *([f"{s.measured:,.0f}" if s.measured else ""] * measured),
            *([reasons[s.name]] * any(reasons.values())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for name in reasons.keys() - {s.name for s in found}:  # no run counts
        lines.append(f"| {' | '.join([name, *[''] * (len(heads) - 2), reasons[name]])} |")
    return lines


def _reasons(missing: dict[str, str]) -> str:
    """Why runs are not counted, in a cell of a table; runs with equal reasons together."""
    runs: dict[str, list[str]] = {}
    for run, reason in missing.items():
        runs.setdefault(reason, []).append(run)
    return "; ".join(f"seed {', '.join(those)}: {reason}" for reason, those in runs.items()).replace("|", "/")


def number(mean: float, spread: float | None, sign: str = "") -> str:
    """A mean and its spread or half of its interval, as in 4.1234 ± 0.0056."""
    return f"{mean:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _difference(grid: Grid, s: Summary) -> str:
    return "" if s.name == grid.reference else _marked(s)


def _marked(s: Summary) -> str:
    if s.difference is None:
        return ""
    text = number(s.difference, s.margin, "+")
    return f"**{text}**" if s.clear else text


def _within_models(grid: Grid, found: Sequence[Summary]) -> list[str]:
    """A section that compares layouts within the models that are not the reference's; empty without such models."""
    pairs = within_models(grid, found)
    if not pairs:
        return []
    return [
        "## Layouts within other models",
        "",
        (
            f"Like the column minus {grid.reference}, but compared with the variant that has the same model and the"
            f" layout of {grid.reference}."
        ),
        "",
        "| variant | compared with | difference | seeds |",
        "|---|---|---|---|",
        *(f"| {s.name} | {other.name} | {_marked(s)} | {len(s.differences)} |" for other, s in pairs),
        "",
    ]


def _legend(grid: Grid) -> list[str]:
    model = grid.projected
    return [
        (
            "- **validation loss**: nats per token on the held-out text after the last step, mean ± standard deviation"
            " over runs. Lower is better."
        ),
        (
            f"- **minus {grid.reference}**: mean difference to {grid.reference} with the same seed and order of the"
            " data, ± half of its 95 % interval by Student's t, from three runs on. Bold where the interval excludes 0;"
            " of twenty equal variants one is bold by chance."
        ),
        (
            "- **runs**: runs that count in the means. **not counted**: the others by seed (and order of the data),"
            " with the reason. A variant of which some runs diverged is worse than its means say."
        ),
        ("- **delay**: modules (half layers) until the other lanes have a module's output, at the longest."),
        (
            "- **reduces per pass**, **exposed**: all-reduces of one forward pass of the trained model, and how many of"
            " them every lane waits for, because no module runs in between. A replicate or lane head adds one to both."
        ),
        (
            f"- **projected**: not measured. The roofline ({CONTEXT:,} positions of context, bfloat16; see"
            f" docs/roofline.md) for a model of {lf.parameter_count(model):,} parameters and {model.num_hidden_layers}"
            " layers with the variant's layout, a lane per device. The losses in this table are not that model's."
        ),
    ]


def _diagnostics(found: Sequence[Summary]) -> list[str]:
    """Sections on the lanes by depth and on the probes."""
    lines = []
    rows = [(s, [x for x in s.mean_by_time("similarity") if x is not None]) for s in found if s.lanes > 1]
    rows = [(s, similarity) for s, similarity in rows if similarity]
    if rows:
        lines += [
            "## Lanes by depth",
            "",
            (
                "Mean cosine between the streams of two lanes, as module 1, the middle module and the head's norm read"
                " them (1: the lanes are copies of each other), and the ratio of landed parts to own part (root mean"
                " squares) in the middle half of the modules."
            ),
            "",
            "| layout | cosine at module 1 | middle | end | landed / own |",
            "|---|---|---|---|---|",
        ]
        for s, similarity in rows:
            ratio = s.mean_by_time("landed_over_own")
            middle = [x for x in ratio[len(ratio) // 4 : 3 * len(ratio) // 4] if x is not None]
            landed = f"{sum(middle) / len(middle):.2f}" if middle else ""
            lines.append(
                f"| {s.name} | {similarity[1]:.3f} | {similarity[len(similarity) // 2]:.3f} | {similarity[-1]:.3f} |"
                f" {landed} |"
            )
    figures = [(s, [result.experts for result in s.results if result.experts]) for s in found]
    if figures := [(s, experts) for s, experts in figures if experts]:
        lines += [
            "",
            "## Experts",
            "",
            (
                f"Means over layers, lanes and the last {LAST} steps of training: load of the fullest expert over the"
                " even load, experts of a layer that no token of a batch uses, entropy of the routers in nats; and, at"
                " the last validation, the share of a token's experts that two lanes both use."
            ),
            "",
            "| layout | fullest / even | unused | entropy | in common |",
            "|---|---|---|---|---|",
        ]
        for s, experts in figures:
            names = ("fullest", "dead", "entropy", "in_common")
            cells = [f"{statistics.mean(x[name] for x in experts):.2f}" if name in experts[0] else "" for name in names]
            lines.append(f"| {s.name} | {' | '.join(cells)} |")
    probes = [(s, result.probe) for s in found for result in s.results if result.probe]
    if probes:
        layers = len(next(iter(probes[0][1]["by_layer"].values())))
        lines += [
            "",
            "## Sensitivity to delays by layer",
            "",
            (
                "Rise in loss, in 0.001 nats, of the trained model of the first seed when the exchanges of one layer"
                " alone land after another delay than it was trained with. Same weights, same held-out tokens. This"
                " measures how much a trained model depends on that exchange, not what training with the delay would"
                " reach."
            ),
            "",
            f"| trained as | delay of one layer | {' | '.join(f'layer {n}' for n in range(layers))} |",
            "|---" * (layers + 2) + "|",
        ]
        for s, probe in probes:
            for delay, losses in probe["by_layer"].items():
                cells = [f"{1000 * (loss - probe['loss']):+.1f}" for loss in losses]
                lines.append(f"| {s.name} | {delay} | {' | '.join(cells)} |")
    return lines
