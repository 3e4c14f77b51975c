"""Draws the pictures of the roofline as one PNG, marked as projected."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, InputError
from laneformer.infer.roofline.agent import AgentTask
from laneformer.infer.roofline.devices import Node, make_node
from laneformer.infer.roofline.model import PUBLIC_SHARES, Work, check_devices, token, token_of_bytes
from laneformer.infer.roofline.published import MoeModel
from laneformer.infer.roofline.sweeps import contexts, layouts_of

PUBLIC_DEVICES = 8
# Prefixes of the names of parts; all other parts are attention.
KINDS = ("routed experts", "shared expert", "dense layer", "router", "head")
Panel = Callable[[Any], None]  # draws into the axes that are its argument


def draw(path: Path, title: str, panels: Sequence[Panel], assumptions: str) -> None:
    """Writes the panels as a PNG. Raises InputError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--png needs matplotlib: pip install -e '.[plots]'") from None
    figure = Figure(figsize=(6 * len(panels), 5.4), layout="constrained")
    figure.suptitle(f"{title}\nprojected, not measured", fontsize="large")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.grid(alpha=0.3)
    figure.supxlabel(assumptions, fontsize=7, wrap=True, color="0.3")
    figure.savefig(path, format="png", dpi=110)


def laneformer_panels(config: ModelConfig, node: Node, work: Work, options: dict) -> list[Panel]:
    """Panels of the speed against context for several numbers of devices, against lanes for up to three layouts, and of
    every layout. options: arguments of `make_node`.
    """
    return [
        _context_panel(config, node, work, options),
        _lanes_panel(config, node, work, options),
        _layout_panel(config, node, work),
    ]


def _context_panel(config: ModelConfig, node: Node, work: Work, options: dict) -> Panel:
    at = contexts(config.max_position_embeddings)

    def draw(axes):
        for i, count in enumerate(_device_counts(config, node)):
            there = make_node(**options | {"devices": count})
            found = [token(config, there, replace(work, context=context)) for context in at]
            axes.plot(
                at,
                [t.rate for t in found],
                "o-",
                color=f"C{i}",
                markersize=3,
                label=f"{count} devices" if count > 1 else "1 device",
            )
            axes.plot(at, [t.ceiling for t in found], ":", color=f"C{i}")
        axes.plot([], [], ":", color="0.4", label="ceiling: reading alone")
        axes.set(
            title=f"Layout {config.layout}, {config.num_lanes} lanes",
            xlabel="context, tokens",
            ylabel="tokens per second",
            ylim=(0, 1.25 * axes.dataLim.y1),
        )
        axes.legend(fontsize="small", loc="upper center", ncols=3)

    return draw


def _device_counts(config: ModelConfig, node: Node) -> list[int]:
    """Numbers of devices to draw: powers of two that divide the lanes, and the number of the node."""
    counts = {node.devices}
    for power in range(config.num_lanes.bit_length()):
        try:
            check_devices(config, 2**power)
        except ConfigError:
            continue
        if node.per_node is None or 2**power <= node.per_node:
            counts.add(2**power)
    return sorted(counts)


def _lanes_panel(config: ModelConfig, node: Node, work: Work, options: dict) -> Panel:
    def draw(axes):
        limit = min(config.num_attention_heads, node.per_node or config.num_attention_heads)
        for i, layout in enumerate(dict.fromkeys((config.layout, "tp", "none"))):
            points = []
            for power in range(limit.bit_length()):
                try:
                    cut = config.replace(num_lanes=2**power, layout=layout)
                except ConfigError:
                    continue
                points.append((2**power, token(cut, make_node(**options | {"devices": 2**power}), work)))
            axes.plot([n for n, _ in points], [t.rate for _, t in points], "osD"[i] + "-", color=f"C{i}", label=layout)
            if i == 0:
                axes.plot(
                    [n for n, _ in points],
                    [t.ceiling for _, t in points],
                    ":",
                    color="0.4",
                    label="ceiling: reading alone",
                )
                axes.set_xscale("log", base=2)
                axes.set_xticks([n for n, _ in points], [str(n) for n, _ in points])
        axes.set(
            title=f"Context {work.context:,}",
            xlabel="lanes, one per device",
            ylabel="tokens per second",
            ylim=(0, None),
        )
        axes.legend(fontsize="small")

    return draw


def _layout_panel(config: ModelConfig, node: Node, work: Work) -> Panel:
    def draw(axes):
        found = {name: token(config.replace(layout=name), node, work) for name in layouts_of(config)}
        names = sorted(found, key=lambda name: found[name].rate)
        bars = axes.barh(
            names, [found[n].rate for n in names], color=["C0" if n == config.layout else "0.7" for n in names]
        )
        axes.bar_label(bars, [f"{found[n].rate:,.0f}" for n in names], padding=3, fontsize="small")
        axes.axvline(found[config.layout].ceiling, linestyle=":", color="0.4", label="ceiling: reading alone")
        axes.set(
            title=f"Every layout, {node.name}, context {work.context:,}",
            xlabel="tokens per second",
            xlim=(0, 1.15 * found[config.layout].ceiling),
        )
        axes.legend(fontsize="small", loc="lower right")

    return draw


def moe_panels(models: Sequence[MoeModel], node: Node, device: str) -> list[Panel]:
    """Panels of the bytes by part and of the speeds of each model, weights only. device: key of the nominal figures to
    draw; they are for eight devices.
    """
    public = node.devices == PUBLIC_DEVICES and any(device in model.nominal for model in models)

    names = [model.name for model in models]

    def parts(axes):
        left = [0.0] * len(models)
        for i, kind in enumerate((*KINDS, "attention")):
            sizes = [sum(p.bytes for p in model.parts if _kind(p.name) == kind) / 1e9 for model in models]
            axes.barh(names, sizes, left=left, color=f"C{i}", label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.bar_label(axes.containers[-1], [f"{size:.2f} GB" for size in left], padding=3, fontsize="small")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(title="Weights read for one token", xlabel="GB")
        axes.legend(fontsize="small", loc="upper right")

    def speeds(axes):
        rows = range(len(models))
        ceilings = [node.total_bandwidth / model.weight_bytes for model in models]
        low, high = ([part * ceiling for ceiling in ceilings] for part in PUBLIC_SHARES)
        of_ceiling = " to ".join(f"{100 * part:.0f}" for part in PUBLIC_SHARES)
        axes.hlines(
            rows, low, high, color="C0", linewidth=14, label=f"{of_ceiling}% of the ceiling, as measured elsewhere"
        )
        axes.plot(ceilings, rows, "|", color="0.3", markersize=14, label="ceiling: reading alone")
        summed = [token_of_bytes(model.weight_bytes, node, model.layers).rate for model in models]
        axes.plot(summed, rows, "D", color="C1", label="with waits, plain tensor parallelism")
        if public:
            nominal = [model.nominal.get(device) for model in models]
            axes.plot(nominal, rows, "*", color="C3", markersize=11, label="public nominal figure")
        axes.set_yticks(rows, names)
        axes.set_ylim(-0.9, len(models) - 0.1)
        axes.invert_yaxis()
        axes.set(title=f"Speed on {node.name}, weights alone", xlabel="tokens per second", xlim=(0, None))
        axes.legend(fontsize="small", loc="lower right")

    return [parts, speeds]


def _kind(part: str) -> str:
    """The kind of a part, by its name."""
    return next((kind for kind in KINDS if part.startswith(kind)), "attention")


def agent_panel(task: AgentTask, rates: dict[str, tuple[float, str]]) -> Panel:
    """A panel of the split of the task's time at each speed. rates: name -> (tokens per second, origin)."""

    def draw(axes):
        names = list(rates)
        splits = [task.split(rates[name][0]) for name in names]
        totals = [sum(split) for split in splits]
        left = [0.0] * len(names)
        for i, what in enumerate(("generating", "tools", "tests")):
            shares = [100 * split[i] / total for split, total in zip(splits, totals, strict=True)]
            axes.barh(names, shares, left=left, label=what, color=f"C{i}")
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.bar_label(axes.containers[-1], [f"{total:,.0f} s" for total in totals], padding=3, fontsize="small")
        axes.invert_yaxis()
        rounds = f"{task.iterations} rounds of {task.tool_seconds:g} s tools, {task.test_seconds:g} s tests"
        axes.set(title=f"An agent's task: {task.tokens:,} tokens,\n{rounds}", xlabel="% of its time", xlim=(0, 115))
        axes.set_xticks(range(0, 101, 20))
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, -0.28), ncols=3)

    return draw
