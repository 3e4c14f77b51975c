"""The report of `infer roofline`: tables of bytes by part, time by summand, and speeds of each model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laneformer.config import ModelConfig
from laneformer.infer.roofline import plot, sweeps
from laneformer.infer.roofline.agent import agent_table, usual_rates
from laneformer.infer.roofline.devices import DEVICES, Node, make_node
from laneformer.infer.roofline.model import (
    PUBLIC_SHARES,
    Term,
    Token,
    Work,
    bytes_by_part,
    token,
    token_of_bytes,
    weights_in_memory,
)
from laneformer.infer.roofline.options import PUBLISHED, Options
from laneformer.infer.roofline.published import MODELS_READ, MoeModel
from laneformer.infer.roofline.references import MI300X_READ, references, share, share_of_spec
from laneformer.infer.roofline.table import PROJECTED, Column, Table

USUAL_CONTEXT = 1536  # mean context of `infer bench`: a prompt of 512 tokens and an answer of 2,048
USUAL_DEVICES = 8
USUAL_PRECISION = "bfloat16"
PLAIN = (
    "plain tensor parallelism: 2 exchanges per layer",
    "operations per layer as in a dense model",
    "nothing is read during waits",
)

_SHARES = "shares of the ceiling that Kog measured on 8 H200 and 8 MI300X with another model"


def bytes_table(parts: Mapping[str, float | None], title: str, assumed: str) -> Table:
    """A table of the bytes of each part and its share. parts: part -> bytes, None if unknown."""
    known = sum(size for size in parts.values() if size is not None)
    rows = [(name, size and size / 1e9, size and 100 * size / known) for name, size in parts.items()]
    columns = (Column("part"), Column("GB/token", ",.4f", PROJECTED), Column("%", ".1f", PROJECTED))
    return Table("bytes", title, columns, [*rows, ("together", known / 1e9, 100.0)], assumed)


def time_table(found: Token, assumed: Sequence[str]) -> Table:
    """A table of the summands of a token's time, and of the speed if each were the only one."""
    rows = [
        (
            term.name,
            term.detail,
            1e6 * term.seconds,
            100 * term.seconds / found.seconds,
            1 / term.seconds if term.seconds else "-",
        )
        for term in (*found.terms, Term("together", "", found.seconds))
    ]
    columns = (
        Column("summand"),
        Column("how"),
        Column("us/token", ",.2f", PROJECTED),
        Column("%", ".1f", PROJECTED),
        Column("alone tok/s", ",.0f", PROJECTED),
    )
    return Table(
        "time", f"Time of one token on {found.node.name}", columns, rows, "; ".join((*assumed, *found.node.assumptions))
    )


def speed_table(found: Token, known: tuple[float, str] | None, in_memory: float | None) -> Table:
    """A table of speeds: the ceiling, the sum of all terms, the public shares of the ceiling, and a known speed.

    known: (tokens per second, status), or None. in_memory: bytes of all weights, None if unknown.
    """
    speeds = [
        ("ceiling: reading alone", found.ceiling, PROJECTED),
        ("sum of all summands", found.rate, PROJECTED),
        *((f"{100 * part:.1f}% of the ceiling", part * found.ceiling, PROJECTED) for part in PUBLIC_SHARES),
    ]
    if known is not None:
        rate, status = known
        sync = found.sync_for(rate)
        why = "" if sync is None else f", explained by --sync-us {1e6 * sync:.2f}"
        speeds.append((f"given as {status}{why}", rate, status))
    rows = []
    for name, rate, status in speeds:
        of_spec = share_of_spec(rate, found)
        rows.append((name, rate, 100 * share(rate, found), None if of_spec is None else 100 * of_spec, status))
    columns = (
        Column("speed"),
        Column("tok/s", ",.0f"),
        Column("% of effective", ".1f"),
        Column("% of specified", ".1f"),
        Column("status"),
    )
    return Table(
        "speed",
        f"Speed on {found.node.name}; {_memory(found.node, in_memory)}",
        columns,
        rows,
        f"batch 1; {_SHARES}; effective bandwidth {found.node.bandwidth / 1e12:,.3f} TB/s a device",
    )


def _memory(node: Node, size: float | None) -> str:
    if size is None or node.memory is None:
        return "whether the weights fit in memory is unknown"
    room = node.devices * node.memory
    return (
        f"weights of {size / 1e9:,.2f} GB {'fit in' if size <= room else 'DO NOT FIT in'} {room / 1e9:,.0f} GB of"
        " memory"
    )


def laneformer_assumptions(work: Work) -> tuple[str, ...]:
    """The assumptions of `token`, besides those about the node."""
    return (
        f"weights: {work.words}; keys and values {work.kv}",
        "bytes spread evenly over the devices",
        "nothing is read during waits",
        "exchanges of float32, pushed to every other device",
    )


def moe_parts(model: MoeModel, work: Work) -> dict[str, float | None]:
    """Bytes by part, including the cache and state of earlier positions."""
    parts = {f"{part.name} ({part.format})": part.bytes for part in model.parts}
    return parts | {f"cache and state at context {work.context:,}": model.kv_bytes(work.context, work.kv)}


def moe_assumptions(model: MoeModel) -> str:
    """The sources of a model's bytes, and an assumption."""
    read = f"read {MODELS_READ}; " if model.nominal else ""  # other models are read from a file just now
    return f"dimensions from {model.source}; {model.precision_source}; {read}experts cut evenly over the devices"


def public_nodes() -> dict[str, Node]:
    """The nodes of the public figures, with the bandwidths that those figures assume."""
    return {"h200": make_node("h200", 8), "mi300x": make_node("mi300x", 8, bandwidth=MI300X_READ)}


def nominal_table(models: Sequence[MoeModel], asked: Node) -> Table:
    """A table of public nominal figures and of bottom-up figures, weights only, on the public nodes and on `asked`, the
    node of the options.
    """
    rows = []
    nodes = public_nodes()
    if not any(
        asked.name == node.name and math.isclose(asked.bandwidth, node.bandwidth, rel_tol=0.02)
        for node in nodes.values()
    ):
        nodes[""] = asked
    for model in models:
        for name, node in nodes.items():
            ceiling = node.total_bandwidth / model.weight_bytes
            nominal = model.nominal.get(name)
            implied = nominal and PUBLIC_SHARES[1] * node.total_bandwidth / nominal
            rows.append(
                (
                    model.name,
                    node.name if name else f"asked: {node.name}",
                    nominal,
                    implied and implied / 1e9,
                    model.weight_bytes / 1e9,
                    ceiling,
                    *(part * ceiling for part in PUBLIC_SHARES),
                    nominal and 100 * (PUBLIC_SHARES[1] * ceiling / nominal - 1),
                )
            )
    low, high = (f"{100 * part:.1f}% tok/s" for part in PUBLIC_SHARES)
    columns = (
        Column("model"),
        Column("node"),
        Column("nominal tok/s", ",.0f", PROJECTED),
        Column("its GB/token", ",.2f", PROJECTED),
        Column("bottom-up GB", ",.2f", PROJECTED),
        Column("ceiling tok/s", ",.0f", PROJECTED),
        Column(low, ",.0f", PROJECTED),
        Column(high, ",.0f", PROJECTED),
        Column("to nominal %", "+.1f", PROJECTED),
    )
    return Table(
        "nominal",
        "Public nominal figures beside weights counted part by part",
        columns,
        rows,
        f"{_SHARES}; 80% of 4.8 TB/s and 4.2 of 5.3 TB/s as in the public figures; nominal figures are"
        f" {100 * PUBLIC_SHARES[1]:.1f}% of a ceiling on both machines, though Kog's own share on H200 was lower; no"
        " cache, no uneven experts, no waits: more layers than that model's 15 give a lower share",
    )


def differences(models: Sequence[MoeModel]) -> list[str]:
    """One line per model that explains why its nominal and bottom-up figures differ."""
    return [f"{model.name}: nominal from {model.nominal_rule}; {model.difference}." for model in models]


@dataclass
class Report:
    """The tables, notes and pictures that the command prints, writes and draws."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    speeds: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Name -> (tokens per second, status), for the table of the agent's task."""
    panels: list[plot.Panel] = field(default_factory=list)
    title: str = "An agent's task"
    assumptions: str = "speeds are examples"


def make_report(
    options: Options, model: ModelConfig | Sequence[MoeModel] | None, name: str, packed: Mapping[str, float]
) -> Report:
    """The report for the options.

    model: the model of --checkpoint or CONFIG.json, the models of --moe, or None for --gigabytes and without a model.
    name, packed: name and `Work.packed` of a model that is a ModelConfig.
    """
    report = Report()
    if options.references:
        report.tables.append(references())
    if isinstance(model, ModelConfig):
        _report_laneformer(options, report, model, name, packed)
    elif model is not None:
        _report_moe(options, report, model)
    elif options.gigabytes is not None:
        _report_bytes(options.gigabytes, options, report)
    if options.agent:
        rates = usual_rates() | report.speeds
        report.tables.append(agent_table(options.task, rates))
        report.panels.append(plot.agent_panel(options.task, rates))
    return report


def _node_options(options: Options, devices: int) -> dict:
    """Arguments of `make_node`. devices: default of --devices."""

    def scaled(value: float | None, scale: float) -> float | None:
        return None if value is None else value * scale

    return {
        "device": options.device,
        "devices": devices if options.devices is None else options.devices,
        "bandwidth": scaled(options.bandwidth, 1e9),
        "share": options.bandwidth_share,
        "link": scaled(options.link, 1e9),
        "exchange": scaled(options.exchange_us, 1e-6),
        "sync": scaled(options.sync_us, 1e-6),
        "launches": options.launches,
        "launch": 1e-6 * options.launch_us,
    }


def _report_laneformer(
    options: Options, report: Report, config: ModelConfig, name: str, packed: Mapping[str, float]
) -> None:
    """Adds the tables and pictures of a model that this package runs."""
    context = min(USUAL_CONTEXT, config.max_position_embeddings) if options.context is None else options.context
    published = options.precision == PUBLISHED
    work = Work(
        USUAL_PRECISION if published else options.precision, options.kv_precision, context, packed if published else {}
    )
    limit = DEVICES[options.device].per_node if options.device in DEVICES else config.num_lanes
    most = max(n for n in range(1, min(limit, config.num_lanes) + 1) if config.num_lanes % n == 0)
    described = _node_options(options, most)
    node = make_node(**described)
    found = token(config, node, work)
    assumed = laneformer_assumptions(work)
    name = f"{name}, {config.num_lanes} lanes, layout {config.layout}"
    report.tables += [
        bytes_table(bytes_by_part(config, work), f"Bytes of one token of {name}", assumed[0]),
        time_table(found, assumed),
        speed_table(found, _known_rate(options), weights_in_memory(config, work)),
    ]
    tables_of = {
        "layout": lambda: sweeps.by_layout(config, node, work),
        "lanes": lambda: sweeps.by_lanes(config, node, work, described),
        "delay": lambda: sweeps.by_delay(config, node, work),
        "context": lambda: sweeps.by_context(config, node, work),
        "precision": lambda: sweeps.by_precision(config, node, work),
    }
    report.tables += [tables_of[wanted]() for wanted in options.sweep]
    _finish(options, report, name, found)
    report.panels += plot.laneformer_panels(config, node, work, described)


def _report_moe(options: Options, report: Report, models: Sequence[MoeModel]) -> None:
    """Adds the tables and pictures of mixture-of-experts models."""
    context = USUAL_CONTEXT if options.context is None else options.context
    work = Work(kv=options.kv_precision, context=context)
    node = make_node(**_node_options(options, USUAL_DEVICES))
    for model in models:
        parts = moe_parts(model, work)
        if options.kv_megabytes is not None:
            parts = dict([*parts.items()][:-1]) | {"cache and state, given": 1e6 * options.kv_megabytes}
        found = token_of_bytes(sum(size for size in parts.values() if size is not None), node, model.layers)
        assumed = moe_assumptions(model)
        report.tables += [
            bytes_table(parts, f"Bytes of one token of {model.name}", assumed),
            time_table(found, PLAIN),
            speed_table(found, _known_rate(options), model.checkpoint),
        ]
        if "precision" in options.sweep:
            report.tables.append(sweeps.moe_by_precision(model, node))
        if None in parts.values():
            report.notes.append(
                f"{model.name}: the bytes read from its cache are unknown and not counted; give them with"
                " --kv-megabytes."
            )
        _finish(options, report, model.name, found)
    if public := [model for model in models if model.nominal]:
        report.tables.append(nominal_table(public, node))
        report.notes += differences(public)
    report.panels += plot.moe_panels(models, node, options.device)


def _report_bytes(gigabytes: float, options: Options, report: Report) -> None:
    """Adds the tables of a token that reads this many bytes."""
    node = make_node(**_node_options(options, USUAL_DEVICES))
    found = token_of_bytes(1e9 * gigabytes, node, options.layers)
    assumed = PLAIN if options.layers else ("waits are not counted; give --layers to count them",)
    report.tables += [time_table(found, assumed), speed_table(found, _known_rate(options), None)]
    _finish(options, report, f"{gigabytes:g} GB per token", found)


def _known_rate(options: Options) -> tuple[float, str] | None:
    """The tokens per second of --rate, and their status."""
    return None if options.rate is None else (options.rate, options.rate_status)


def _finish(options: Options, report: Report, name: str, found: Token) -> None:
    """Adds the speeds for the agent's task, and sets the title and the assumptions of the picture."""
    report.speeds[f"{name}, {found.node.name}"] = found.rate, PROJECTED
    if options.rate is not None:
        report.speeds[f"{name}, given"] = options.rate, options.rate_status
    report.assumptions = "; ".join(found.node.assumptions)
    title = "Mixture-of-experts models" if options.moe == "all" else name
    report.title = f"{title} on {found.node.name}"
