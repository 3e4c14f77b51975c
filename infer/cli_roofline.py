"""python -m infer roofline: how fast a model could answer on hardware that need not be there; everything is projected."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from infer import roofline_plot, roofline_report, roofline_sweeps
from infer.bench_source import model_config
from infer.roofline import Token, Work, bytes_by_part, token, token_of_bytes, weights_in_memory
from infer.roofline_agent import AgentTask, agent_table, usual_rates
from infer.roofline_devices import DEVICES, LAUNCH, make_node
from infer.roofline_moe import find_moe
from infer.roofline_references import references
from infer.roofline_table import MEASURED, PROJECTED, Table
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError

USUAL_CONTEXT = 1536  # the mean of `infer bench`: a prompt of 512 and 2,048 tokens after it
USUAL_DEVICES = 8
PLAIN = ("plain tensor parallelism: 2 exchanges a layer", "operations of a layer as in a dense one", "nothing is read during waits")
SCHEMA = "laneformer.roofline/1"

Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
GBs = Annotated[float | None, tyro.conf.arg(metavar="GB/S")]
Microseconds = Annotated[float | None, tyro.conf.arg(metavar="US")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
Sweep = Literal["layout", "lanes", "delay", "context", "precision"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Project the speed at batch 1 of one model on one node: bytes per token by part, the ceiling, and what waiting adds."""

    checkpoint: str = ""
    """HF folder or its config.json, training run, or a recipe as `python -m train` takes it. No weights are read."""
    moe: str = ""
    """A mixture-of-experts model by name, or all: qwen3-coder-next, gpt-oss-120b, deepseek-v4-flash, kimi-k2.6."""
    gigabytes: Number = None
    """Or only the bytes that one token reads, 10^9 bytes."""
    layers: Integer = None
    """With --gigabytes: layers, so that waits are counted."""
    lanes: Integer = None
    """Cut a dense checkpoint into so many lanes. A Laneformer has its own number."""
    layout: str = ""
    """Another layout than the model's, as in tp or "dtp(4)"."""
    device: str = "h200"
    """h100, h200, b200, rubin, mi300x, mi355x or mi450; or custom, with figures of your own."""
    devices: Integer = None
    """Devices of the node; by default one per lane, as many as its fast links join, and 8 for the other models."""
    bandwidth: GBs = None
    """Memory bandwidth of one device, 10^9 bytes per second, in place of the table's: a measured one, of which all counts."""
    bandwidth_share: Number = None
    """Share of the bandwidth that reads reach; by default 0.8 of the table's, 1 of --bandwidth."""
    link: GBs = None
    """Bandwidth from one device to the others, one direction, in place of the table's."""
    exchange_us: Microseconds = None
    """Latency of one exchange between devices, without the time of its bytes, in place of the table's."""
    sync_us: Microseconds = None
    """From the end of one operation to the start of one that needs its result, in place of the table's."""
    launches: float = 0
    """Kernel launches per token; a persistent kernel has none."""
    launch_us: float = 1e6 * LAUNCH
    """Time of one launch."""
    precision: str = "bfloat16"
    """Of the weights: float32, bfloat16, float16, fp8, int8, int4 (4.5 bits), mxfp4 (4.25 bits). MoE models have their own mixture."""
    kv_precision: str = "bfloat16"
    """Of keys and values."""
    context: Integer = None
    """Positions before the token; by default 1536, or the model's longest context if that is shorter."""
    kv_megabytes: Number = None
    """With --moe NAME: what one token reads and writes of cache and state, 10^6 bytes, in place of the table's or where it is unknown."""
    rate: Number = None
    """Tokens per second that are known: for the share of the bandwidth, and the time of a dependent operation that explains them."""
    rate_status: Literal["measured", "simulated"] = MEASURED
    """Where --rate is from."""
    sweep: tuple[Sweep, ...] = ()
    """Tables of the speed against these, as in layout lanes."""
    agent: bool = False
    """Where the time of an agent's task goes at several speeds."""
    task: tyro.conf.OmitArgPrefixes[AgentTask] = AgentTask()  # noqa: RUF009  frozen
    """The task of --agent."""
    references: bool = False
    """Public figures of others beside what the same arithmetic gives here."""
    json: File = None
    """Write all tables to this file."""
    png: File = None
    """Draw the speed against context, lanes and layouts, or of the MoE models; with --agent the split of its time."""


@dataclass
class Report:
    """What is printed, written and drawn."""

    tables: list[Table]
    notes: list[str]
    speeds: dict[str, tuple[float, str]]
    """Name -> tokens per second and their status, for the agent's task."""
    panels: list[roofline_plot.Panel]
    title: str = "An agent's task"
    assumptions: str = "speeds are examples"


def run(options: Options) -> int:
    check(options)
    report = Report([], [], {}, [])
    if options.references:
        report.tables.append(references())
    if options.checkpoint:
        report_laneformer(options, report)
    elif options.moe:
        report_moe(options, report)
    elif options.gigabytes is not None:
        report_bytes(options, report)
    if options.agent:
        rates = usual_rates() | report.speeds
        report.tables.append(agent_table(options.task, rates))
        report.panels.append(roofline_plot.agent_panel(options.task, rates))
    print("\n\n".join(table.text() for table in report.tables))
    for note in report.notes:
        print(f"Note: {note}")
    if options.json:
        record = {
            "schema": SCHEMA, "asked": dataclasses.asdict(options), "tables": [table.record() for table in report.tables],
            "notes": report.notes,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    if options.png:
        roofline_plot.draw(options.png, report.title, report.panels, report.assumptions)
    return 0


def check(options: Options) -> None:
    """Raises ConfigError for what cannot be meant together."""
    given = {"--checkpoint": options.checkpoint, "--moe": options.moe, "--gigabytes": options.gigabytes is not None}
    models = [name for name, value in given.items() if value]
    if len(models) > 1:
        raise ConfigError(f"{' and '.join(models)}: give one model")
    if not models and not options.agent and not options.references:
        raise ConfigError("give --checkpoint, --moe or --gigabytes, or --agent or --references alone")
    if options.gigabytes is not None and not 0 < options.gigabytes < math.inf:
        raise ConfigError(f"--gigabytes {options.gigabytes:g}: it must be above 0")
    if options.rate is not None and not 0 < options.rate < math.inf:
        raise ConfigError(f"--rate {options.rate:g}: it must be above 0")
    if options.rate is not None and (not models or options.moe == "all"):
        raise ConfigError("--rate belongs to one model: give --checkpoint, --moe NAME or --gigabytes")
    if options.precision != "bfloat16" and not options.checkpoint:
        raise ConfigError("--precision is for --checkpoint: MoE models have their own mixture, beside which --sweep precision sets others")
    if options.gigabytes is not None and (options.context is not None or options.kv_precision != "bfloat16"):
        raise ConfigError("--context and --kv-precision need a model: --gigabytes counts all that a token reads")
    if options.kv_megabytes is not None and (options.moe in ("", "all") or not 0 <= options.kv_megabytes < math.inf):
        raise ConfigError(f"--kv-megabytes {options.kv_megabytes:g}: 0 or above, and only with --moe NAME")
    if options.layers is not None and (options.gigabytes is None or options.layers < 1):
        raise ConfigError(f"--layers {options.layers}: at least 1, and only with --gigabytes; the other models have their own")
    for name in ("lanes", "layout"):
        if getattr(options, name) and not options.checkpoint:
            raise ConfigError(f"--{name} is for --checkpoint: other models are known by their bytes alone")
    allowed = ("precision",) if options.moe else () if not options.checkpoint else options.sweep
    refused = [name for name in options.sweep if name not in allowed]
    if refused:
        raise ConfigError(f"--sweep {' '.join(refused)} needs a model of --checkpoint" + ("; of --moe: precision" if options.moe else ""))
    if options.png and options.png.suffix != ".png":
        raise ConfigError(f"--png {options.png}: give a name that ends in .png")
    if options.png and not (options.checkpoint or options.moe or options.agent):
        raise ConfigError("--png draws a model of --checkpoint or --moe, or the task of --agent")
    for file in filter(None, (options.json, options.png)):
        file.parent.mkdir(parents=True, exist_ok=True)


def node_options(options: Options, devices: int) -> dict:
    """Arguments of `make_node`."""

    def scaled(value: float | None, scale: float) -> float | None:
        return None if value is None else value * scale

    return {
        "device": options.device, "devices": devices if options.devices is None else options.devices,
        "bandwidth": scaled(options.bandwidth, 1e9), "share": options.bandwidth_share, "link": scaled(options.link, 1e9),
        "exchange": scaled(options.exchange_us, 1e-6), "sync": scaled(options.sync_us, 1e-6), "launches": options.launches,
        "launch": 1e-6 * options.launch_us,
    }  # fmt: skip


def find_config(options: Options) -> ModelConfig:
    """The model of --checkpoint. Raises ConfigError or CheckpointError."""
    file = Path(options.checkpoint)
    if file.is_file() and file.name != "config.json":
        raise ConfigError(f"--checkpoint {file}: a file must be called config.json, as in an HF folder")
    config = model_config(str(file.parent) if file.is_file() else options.checkpoint, options.lanes)
    return config.replace(layout=options.layout) if options.layout else config


def report_laneformer(options: Options, report: Report) -> None:
    """A model that this package runs."""
    config = find_config(options)
    context = min(USUAL_CONTEXT, config.max_position_embeddings) if options.context is None else options.context
    work = Work(options.precision, options.kv_precision, context)
    limit = DEVICES[options.device].per_node if options.device in DEVICES else config.num_lanes
    most = max(n for n in range(1, min(limit, config.num_lanes) + 1) if config.num_lanes % n == 0)
    described = node_options(options, most)
    node = make_node(**described)
    found = token(config, node, work)
    assumed = roofline_report.laneformer_assumptions(work)
    name = f"{options.checkpoint}, {config.num_lanes} lanes, layout {config.layout}"
    report.tables += [
        roofline_report.bytes_table(bytes_by_part(config, work), f"Bytes of one token of {name}", assumed[0]),
        roofline_report.time_table(found, assumed),
        roofline_report.speed_table(found, known_rate(options), weights_in_memory(config, work)),
    ]
    sweeps = {
        "layout": lambda: roofline_sweeps.by_layout(config, node, work),
        "lanes": lambda: roofline_sweeps.by_lanes(config, node, work, described),
        "delay": lambda: roofline_sweeps.by_delay(config, node, work),
        "context": lambda: roofline_sweeps.by_context(config, node, work),
        "precision": lambda: roofline_sweeps.by_precision(config, node, work),
    }
    report.tables += [sweeps[wanted]() for wanted in options.sweep]
    finish(options, report, name, found)
    report.panels += roofline_plot.laneformer_panels(config, node, work, described)


def report_moe(options: Options, report: Report) -> None:
    """Mixture-of-experts models."""
    models = find_moe(options.moe)
    work = Work(options.precision, options.kv_precision, USUAL_CONTEXT if options.context is None else options.context)
    node = make_node(**node_options(options, USUAL_DEVICES))
    for model in models:
        parts = roofline_report.moe_parts(model, work)
        if options.kv_megabytes is not None:
            parts = dict([*parts.items()][:-1]) | {"cache and state, given": 1e6 * options.kv_megabytes}
        found = token_of_bytes(sum(size for size in parts.values() if size is not None), node, model.layers)
        assumed = roofline_report.moe_assumptions(model)
        report.tables += [
            roofline_report.bytes_table(parts, f"Bytes of one token of {model.name}", assumed),
            roofline_report.time_table(found, PLAIN),
            roofline_report.speed_table(found, known_rate(options), model.checkpoint),
        ]
        if "precision" in options.sweep:
            report.tables.append(roofline_sweeps.moe_by_precision(model, node))
        if None in parts.values():
            report.notes.append(f"{model.name}: what it reads of its cache is not known and not counted: give --kv-megabytes.")
        finish(options, report, model.name, found)
    report.tables.append(roofline_report.nominal_table(models, node))
    report.notes += roofline_report.differences(models)
    report.panels += roofline_plot.moe_panels(models, node, options.device)


def known_rate(options: Options) -> tuple[float, str] | None:
    """A speed that is known and its status."""
    return None if options.rate is None else (options.rate, options.rate_status)


def report_bytes(options: Options, report: Report) -> None:
    """A number of bytes."""
    node = make_node(**node_options(options, USUAL_DEVICES))
    found = token_of_bytes(1e9 * options.gigabytes, node, options.layers)
    assumed = PLAIN if options.layers else ("no waits counted: give --layers for them",)
    report.tables += [roofline_report.time_table(found, assumed), roofline_report.speed_table(found, known_rate(options), None)]
    finish(options, report, f"{options.gigabytes:g} GB per token", found)


def finish(options: Options, report: Report, name: str, found: Token) -> None:
    """The speeds that the agent's task takes over, and the picture's title."""
    report.speeds[f"{name}, {found.node.name}"] = found.rate, PROJECTED
    if options.rate is not None:
        report.speeds[f"{name}, given"] = options.rate, options.rate_status
    report.assumptions = "; ".join(found.node.assumptions)
    report.title = f"{name} on {found.node.name}" if options.moe != "all" else f"Mixture-of-experts models on {found.node.name}"
