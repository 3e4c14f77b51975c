"""Pictures of an ablation. A layout family has the same colour in all of them, delays are shades of it, and names are
next to the data.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import laneformer as lf
from laneformer.errors import InputError
from laneformer.layout import LAYOUTS
from laneformer.train.ablate.grid import Grid
from laneformer.train.ablate.results import DEVICES, PER_NODE, Summary

# The most distinct colours are for the layouts compared most often; a new layout gets one of MORE_COLORS.
COLORS = {
    "tp": "#222222",
    "parallel": "#8c564b",
    "ladder": "#2ca02c",
    "desync": "#e377c2",
    "kraken": "#9467bd",
    "dtp": "#1f77b4",
    "laneformer": "#d62728",
    "none": "#ff7f0e",
}
MORE_COLORS = ("#17becf", "#bcbd22", "#7f7f7f", "#e7ba52", "#637939", "#ad494a")
Panel = Callable[[Any], None]  # draws into its axes


def draw(grid: Grid, found: Sequence[Summary], folder: Path) -> dict[Path, str]:
    """Writes the pictures that the results allow; returns file -> title. Raises InputError without matplotlib."""
    pictures: dict[str, tuple[str, list[Panel]]] = {
        "curves": ("loss over training, mean over seeds", [_curves(found), _curves_minus(grid, found)]),
        "loss": (f"final validation loss, {_seeds(found)}", [_against_delay(grid, found), _against_size(grid, found)]),
        "frontier": (
            "quality of the small model against speed of the large one",
            [_frontier(grid, found, device) for device in DEVICES],
        ),
        "exposed": ("exchanges that a token waits for", [_exposed(found)]),
    }
    if any(s.lanes > 1 and s.mean_by_time("similarity") for s in found):
        pictures["lanes"] = (
            "lanes by depth after training, mean over seeds",
            [_by_depth(found, *what) for what in _DEPTH],
        )
    if probed := [s for s in found if any(result.probe for result in s.results)]:
        pictures["probe"] = (
            "sensitivity to delays by layer, trained models of the first seed",
            [_probe(probed, late) for late in (True, False)],
        )
    return {
        _save(folder / f"{name}.png", f"{grid.name}: {title}", panels): title
        for name, (title, panels) in pictures.items()
    }


def color(s: Summary) -> np.ndarray:
    """The family's colour; for dtp, lighter for shorter delays."""
    from matplotlib.colors import to_rgb

    others = [name for name in LAYOUTS if name not in COLORS]
    name = COLORS.get(s.family) or MORE_COLORS[others.index(s.family) % len(MORE_COLORS)]
    base = np.array(to_rgb(name))
    if s.family != "dtp" or not s.delay:
        return base
    light = 0.6 * (1 - min(1.0, np.log2(1 + s.delay) / np.log2(1 + len(s.schedule.own) / 2)))
    return base + light * (1 - base)


def _save(path: Path, title: str, panels: Sequence[Panel]) -> Path:
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # a dependency of matplotlib
    except ImportError:
        raise InputError("pictures need matplotlib; install it with pip install -e '.[plots]'") from None
    figure = Figure(figsize=(6.6 * len(panels) + 1.4 * (len(panels) == 1), 5.4), layout="constrained")
    figure.suptitle(title, fontsize="large")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        panel(axes)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    # 128 colours take a third of the size.
    Image.open(drawn).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    return path


def _seeds(found: Sequence[Summary]) -> str:
    most = max(len(s.losses) for s in found)
    return f"mean and single runs of {most} seeds" if most > 1 else "one seed"


def _names_at_end(
    axes, found: Sequence[Summary], ys: Sequence[float], xs: Sequence[float] | None = None, names: Sequence[str] = ()
) -> None:
    """Writes names right of the axes, moved apart if they overlap and joined to the ends of their curves (or to xs)."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    ends = [(axes.get_xlim()[1] if xs is None else xs[i], y) for i, y in enumerate(ys)]
    heights = axes.transAxes.inverted().transform(axes.transData.transform(ends))[:, 1] if ends else np.empty(0)
    gap, order = 0.042, np.argsort(heights, kind="stable")
    places = heights[order]
    for _ in range(300):
        for i in range(len(places) - 1):
            overlap = gap - (places[i + 1] - places[i])
            if overlap > 0:
                places[i : i + 2] += -overlap / 2, overlap / 2
    count = np.arange(len(places))
    places = np.minimum(np.maximum(places, gap * (count + 0.5)), 1 - gap * (len(places) - count - 0.5))
    for place, i in zip(places, order, strict=True):
        line = {
            "arrowstyle": "-",
            "color": color(found[i]),
            "linewidth": 0.6,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 2,
        }
        axes.annotate(
            names[i] if names else found[i].name,
            ends[i],
            (1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=color(found[i]),
            arrowprops=line,
            annotation_clip=False,
        )


def _style(s: Summary) -> str:
    """Variants of a layout with other lanes or knobs are dashed."""
    return "--" if "," in s.name else "-"


def _mean_curve(s: Summary) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in millions, and loss as the mean over seeds, at every validation."""
    curves = np.array([result.curve for result in s.results], float)
    return curves[0, :, 0] / 1e6, curves[:, :, 1].mean(0)


def _curves(found: Sequence[Summary]) -> Panel:
    def draw(axes):
        ends = []
        for s in found:
            tokens, losses = _mean_curve(s)
            axes.plot(tokens, losses, _style(s), marker=".", markersize=4, color=color(s), linewidth=1.3)
            ends.append(losses[-1])
        axes.set(xlabel="million tokens", ylabel="validation loss, nats per token", title="All layouts")
        _names_at_end(axes, found, ends)

    return draw


def _curves_minus(grid: Grid, found: Sequence[Summary]) -> Panel:
    """Differences between the curves and the reference's, which are too small for the left picture."""

    def draw(axes):
        reference = [s for s in found if s.name == grid.reference]
        pairs = [(s, other) for other in reference for s in found if s is not other and s.differences]
        ends = []
        for s, other in pairs:
            runs = sorted(s.losses.keys() & other.losses.keys())
            both = [[next(r for r in side.results if r.run == run).curve for run in runs] for side in (s, other)]
            mine, theirs = (np.array(curves, float).reshape(len(runs), -1, 2)[:, :, 1] for curves in both)
            minus = (mine - theirs).mean(0)
            axes.plot(_mean_curve(s)[0], minus, _style(s), marker=".", markersize=4, color=color(s), linewidth=1.3)
            ends.append(minus[-1])
        axes.axhline(0, color="#222222", linewidth=1.3)
        axes.set(
            xlabel="million tokens",
            ylabel=f"validation loss minus that of {grid.reference}, nats",
            title=f"Minus {grid.reference}, seed by seed",
        )
        _names_at_end(axes, [s for s, _ in pairs], ends)

    return draw


def _points(axes, s: Summary, x: float) -> None:
    """Draws every seed as a small mark and the mean as a large one, at x."""
    axes.plot([x] * len(s.losses), list(s.losses.values()), "_", color=color(s), markersize=9, markeredgewidth=1.2)
    axes.vlines(x, min(s.losses.values()), max(s.losses.values()), color=color(s), linewidth=1.2)
    axes.plot([x], [s.mean], "o", color=color(s), markersize=6)


def _reference_band(axes, grid: Grid, found: Sequence[Summary]) -> None:
    for s in found:
        if s.name == grid.reference:
            axes.axhspan(min(s.losses.values()), max(s.losses.values()), color="0.9", zorder=0)


def _against_delay(grid: Grid, found: Sequence[Summary]) -> Panel:
    """Variants with as many lanes as the base: a column each, in groups of equal delay."""

    def draw(axes):
        shown = [s for s in found if s.lanes == grid.base.model.num_lanes]
        shown.sort(key=lambda s: (s.delay is None, s.delay, s.mean))
        _reference_band(axes, grid, shown)
        for column, s in enumerate(shown):
            _points(axes, s, column)
        groups: dict[int | None, list[int]] = {}
        for column, s in enumerate(shown):
            groups.setdefault(s.delay, []).append(column)
        for delay, columns in groups.items():
            axes.axvline(columns[-1] + 0.5, color="0.8", linewidth=0.8)
            label = "never" if delay is None else str(delay)
            axes.text(
                np.mean(columns),
                0.985,
                label,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=9,
                weight="bold",
            )
        axes.set_xticks(
            range(len(shown)), [s.name for s in shown], rotation=40, ha="right", rotation_mode="anchor", fontsize=8
        )
        for tick, s in zip(axes.get_xticklabels(), shown, strict=True):
            tick.set_color(color(s))
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.03, y=0.12)
        axes.set(
            ylabel="final validation loss, nats per token",
            xlim=(-0.5, len(shown) - 0.5),
            title=f"By delay in modules (bold), {grid.base.model.num_lanes} lanes; grey: range of {grid.reference}",
        )

    return draw


def _against_size(grid: Grid, found: Sequence[Summary]) -> Panel:
    """Loss of layouts that were trained with several numbers of DeltaNet layers, or of lanes if none has DeltaNet."""
    field = "delta_layers" if any(s.results[0].model.get("delta_layers") for s in found) else "num_lanes"
    what = "layers with DeltaNet" if field == "delta_layers" else "lanes"

    def size(s: Summary) -> int:
        return s.lanes if field == "num_lanes" else len(s.results[0].model.get(field, ()))

    def draw(axes):
        layouts: dict[str, list[Summary]] = {}
        for s in found:
            layouts.setdefault(
                s.results[0].layout if not s.variant.model.keys() - {"layout", field} else s.name, []
            ).append(s)
        layouts = {
            name: sorted(group, key=size) for name, group in layouts.items() if len({size(s) for s in group}) > 1
        }
        _reference_band(axes, grid, found)
        for name, group in layouts.items():
            axes.plot([size(s) for s in group], [s.mean for s in group], "-", color=color(group[-1]), linewidth=1)
            for s in group:
                _points(axes, s, size(s))
            last = group[-1]
            axes.annotate(
                name,
                (size(last), last.mean),
                (10, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=color(last),
            )
        counts = sorted({size(s) for group in layouts.values() for s in group})
        axes.set(
            xlabel=what,
            ylabel="final validation loss, nats per token",
            title=f"Against {what} (grey: range of {grid.reference})",
        )
        if counts:
            if field == "num_lanes":
                axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(n) for n in counts])
            axes.margins(x=0.2, y=0.15)
        else:
            axes.text(
                0.5,
                0.5,
                f"no layout was trained with\nseveral numbers of {what}",
                transform=axes.transAxes,
                ha="center",
                color="0.4",
            )

    return draw


def _frontier(grid: Grid, found: Sequence[Summary], device: str) -> Panel:
    """Loss against projected speed, with as many devices as the base has lanes; the line joins the Pareto-optimal
    variants.
    """

    def draw(axes):
        lanes = grid.base.model.num_lanes
        minus = {s.name: s.difference for s in found if s.lanes == lanes and s.difference is not None}
        shown = [s for s in found if s.name in minus]
        speed = {s.name: s.speed[device] for s in shown}
        best = [s for s in shown if not any(speed[o.name] >= speed[s.name] and o.mean < s.mean for o in shown)]
        best.sort(key=lambda s: speed[s.name])
        line = [speed[s.name] for s in best], [minus[s.name] for s in best]
        axes.plot(*line, "-", color="0.75", linewidth=4, zorder=0)
        for s in shown:
            x, y = speed[s.name], minus[s.name]
            axes.errorbar(x, y, yerr=s.margin, fmt="none", color=color(s), capsize=3, alpha=0.45)
            axes.plot(x, y, "o", color=color(s), markersize=6)
        axes.axhline(0, color="#222222", linewidth=0.8)
        devices = shown[0].devices if shown else PER_NODE
        size = f"{lf.parameter_count(grid.projected) / 1e9:.3g}B"
        axes.set(
            xlabel=f"tokens per second of {size} parameters, projected",
            title=f"{devices} x {DEVICES[device]}",
            ylabel=f"final validation loss minus that of {grid.reference}, nats",
        )
        axes.margins(x=0.06, y=0.1)
        _names_at_end(axes, shown, [minus[s.name] for s in shown], [speed[s.name] for s in shown])

    return draw


def _exposed(found: Sequence[Summary]) -> Panel:
    def draw(axes):
        names, rows = [s.name for s in found], np.arange(len(found))
        reductions, exposed = (
            [count(s.schedule) for s in found] for count in (lambda s: s.num_reductions, lambda s: len(s.exposed))
        )
        axes.barh(rows, reductions, color=[0.35 * color(s) + 0.65 for s in found])
        bars = axes.barh(rows, exposed, color=[color(s) for s in found])
        texts = [
            f"{e} waited for, {r - e} hidden" if r >= e else f"{e} waited for"
            for e, r in zip(exposed, reductions, strict=True)
        ]
        for bar, reduction, text in zip(bars, reductions, texts, strict=True):
            axes.text(
                max(reduction, bar.get_width()) + 0.2, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=8
            )
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.margins(x=0.38)
        axes.set(
            xlabel="all-reduces per token of the trained model, without the head's",
            title="Exposed exchanges per token (dark: every lane waits)",
        )

    return draw


_DEPTH = (
    ("similarity", "mean cosine between the streams of two lanes", "Similarity of the lanes", "linear"),
    ("landed_over_own", "root mean square, others' parts / own part", "Size of landed parts", "log"),
)


def _by_depth(found: Sequence[Summary], key: str, unit: str, title: str, scale: str) -> Panel:
    def draw(axes):
        shown, ends = [], []
        for s in found:
            values = np.array([np.nan if x is None else x for x in s.mean_by_time(key)], float)
            if scale == "log":
                values[values < 1e-3] = np.nan  # rounding, where nothing lands
            known = np.flatnonzero(np.isfinite(values))
            if s.lanes > 1 and known.size:
                axes.plot(values, _style(s), marker=".", markersize=4, color=color(s), linewidth=1.2)
                shown.append(s)
                ends.append(values[known[-1]])
        axes.set(
            xlabel="module (even: attention, odd: MLP, last: the final norm)", ylabel=unit, title=title, yscale=scale
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        _names_at_end(axes, shown, ends)

    return draw


def _probe(found: Sequence[Summary], late: bool) -> Panel:
    """Rise of the loss when one layer alone is exchanged late, or at once."""

    def draw(axes):
        curves = []
        for s in found:
            probe = next(result.probe for result in s.results if result.probe)
            for delay, losses in probe["by_layer"].items():
                if (int(delay) > 0) == late:
                    name = f"{s.name}, {delay} late" if late else s.name
                    curves.append((s, name, [1000 * (loss - probe["loss"]) for loss in losses]))
        for i, (s, _, rises) in enumerate(curves):
            style = ("-", "--", ":", "-.")[i % 4] if late else "-"
            axes.plot(rises, style, marker="o", markersize=4, color=color(s), linewidth=1.3)
        axes.axhline(0, color="#222222", linewidth=0.8)
        axes.set(
            xlabel="layer",
            ylabel="rise of the validation loss, 0.001 nats",
            title=f"One layer's exchanges alone land {'late' if late else 'at once'}",
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        if curves:
            _names_at_end(
                axes,
                [s for s, _, _ in curves],
                [rises[-1] for _, _, rises in curves],
                names=[name for _, name, _ in curves],
            )

    return draw
