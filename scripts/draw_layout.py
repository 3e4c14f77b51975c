"""`python -m scripts.draw_layout LAYOUT`: draws lanes, modules and landings from a layout's schedule table."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from laneformer.commands.picture import pyplot, save
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, run_command
from laneformer.layout import LAYOUTS, Payload, Schedule

ATTENTION, MLP, HIDDEN, EXPOSED, INK = "#4c78a8", "#72b7b2", "#f2a541", "#d1495b", "#333333"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw when each module's output is added to its own lane, and when the parts of other lanes land."""

    layout: tyro.conf.Positional[str] = "laneformer"
    """Layout with its arguments, as in dtp(4) or desync(2)."""
    layers: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Number of layers."""
    lanes: Annotated[int, tyro.conf.arg(metavar="L")] = 3
    """Number of lanes."""
    delay: int = 1
    """broadcast_delay of the layout laneformer, in layers."""
    early: bool = True
    """use_early_comm of the layout laneformer."""
    out: Path = Path("layout.svg")
    """Picture to write, .svg or .png."""


def schedule_of(options: Options) -> Schedule:
    """The schedule of the layout, for a model with these layers and lanes. Raises ConfigError for a bad option."""
    if options.layers < 1 or options.lanes < 1:
        raise ConfigError(f"--layers and --lanes must be at least 1, got {options.layers} and {options.lanes}")
    small = ModelConfig(
        vocab_size=8,
        hidden_size=2 * options.lanes,
        intermediate_size=options.lanes,
        num_hidden_layers=options.layers,
        num_attention_heads=options.lanes,
        num_key_value_heads=options.lanes,
        num_lanes=options.lanes,
        layout=options.layout,
        broadcast_delay=options.delay,
        use_early_comm=options.early,
    )
    return small.schedule


def payload_label(payload: Payload) -> str:
    """Names of the modules in a reduction: a0 is the attention of layer 0, m0 its MLP."""
    names = "+".join(f"{'m' if m % 2 else 'a'}{m // 2}" for m, _ in payload.parts)
    return names if len(payload.parts) <= 4 else f"{names.split('+')[0]}…{names.split('+')[-1]}"


def draw(options: Options) -> Path:
    """Writes the picture and returns its path."""
    plt = pyplot()
    from matplotlib.patches import FancyBboxPatch, Patch

    schedule, lanes = schedule_of(options), options.lanes
    modules = schedule.num_modules
    spans = sorted((p.complete_at, landing.at, p) for landing in schedule.landings for p in [landing.payload])
    rows: list[float] = []  # time at which each row of the exchange band is free again
    placed = []
    for start, end, payload in spans:
        row = next((i for i, free in enumerate(rows) if free < start + 0.9), len(rows))
        rows[row : row + 1] = [end + 0.9]
        placed.append((row, start, end, payload))
    band = 0.55 * max(len(rows), 1)
    height = lanes * 1.0 + band
    figure, axes = plt.subplots(figsize=(max(7, 0.95 * (modules + 2.2)), 0.75 * height + 1.4), layout="constrained")
    top = height
    exposed = {(landing.at, landing.payload) for landing in schedule.exposed}
    for lane in range(lanes):
        y = top - lane - 0.7
        axes.annotate(
            "", (modules + 0.75, y), (-0.9, y), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
        )
        axes.text(-1.0, y, f"lane {lane}", ha="right", va="center", fontsize=9)
        for m in range(modules):
            name, color = (f"MLP {m // 2}", MLP) if m % 2 else (f"attn {m // 2}", ATTENTION)
            axes.add_patch(FancyBboxPatch((m - 0.36, y + 0.16), 0.72, 0.36, boxstyle="round,pad=0.02", color=color))
            axes.text(m, y + 0.34, name, ha="center", va="center", fontsize=7, color="white")
            own = schedule.own[m]
            together = any(schedule.own_lands_with(m, landing) for landing in schedule.landings)
            if not together:  # otherwise the own part is in the landing
                axes.annotate(
                    "",
                    (own.at + 0.42, y),
                    (m + 0.3, y + 0.15),
                    arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.9},
                )
                if not math.isclose(own.scale, 1.0):
                    scale = "√L" if math.isclose(own.scale, math.sqrt(lanes)) else f"{own.scale:.2f}"
                    axes.text(own.at + 0.46, y + 0.07, f"×{scale}", fontsize=6)
    for row, start, end, payload in placed:
        y = band - 0.4 - 0.5 * row
        color = EXPOSED if (end, payload) in exposed else HIDDEN
        axes.add_patch(
            FancyBboxPatch(
                (start + 0.42, y - 0.12), max(end - start, 0) + 0.2, 0.26, boxstyle="round,pad=0.01", color=color
            )
        )
        text = payload_label(payload) + (f" ({payload.channels:.0%})" if payload.channels < 1 else "")
        text += " + mean x" if payload.stream_mean_at is not None else ""
        axes.text((start + end) / 2 + 0.52, y, text, ha="center", va="center", fontsize=6)
        axes.plot([end + 0.62] * 2, [y + 0.14, top - 0.7], color=color, linewidth=1.0, linestyle=":", zorder=0)
        for lane in range(lanes):
            axes.plot(end + 0.62, top - lane - 0.7, "o", color=color, markersize=4.5)
    if not placed:
        axes.text(modules / 2, band - 0.4, "no exchange before the head", ha="center", va="center", fontsize=8)
    axes.text(-1.0, band - 0.4, "exchange", ha="right", va="center", fontsize=9)
    axes.legend(
        handles=[
            Patch(color=HIDDEN, label="sum over lanes, hidden behind modules"),
            Patch(color=EXPOSED, label="exposed: every lane waits"),
        ],
        loc="lower center",
        bbox_to_anchor=(0.5, -0.09),
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    axes.set_title(
        f"{schedule.name if '(' not in options.layout else options.layout}: {modules} modules, {lanes} lanes, "
        f"{schedule.num_reductions} reductions, {len(schedule.exposed)} of {len(schedule.landings)} landings exposed",
        fontsize=10,
    )
    axes.set(xlim=(-1.9, modules + 0.9), ylim=(-0.25, height + 0.1))
    axes.axis("off")
    plt.close(figure)
    return save(figure, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    description = f"{Options.__doc__} Layouts: {', '.join(LAYOUTS)}."
    return run_command(draw, Options, "python -m scripts.draw_layout", arguments, description)


if __name__ == "__main__":
    sys.exit(main())
