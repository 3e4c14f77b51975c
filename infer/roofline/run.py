"""What `infer roofline` tells of one model: its tables, notes and pictures. Apart from the command's options, for it
needs JAX.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from infer.engine.sources import model_config
from infer.roofline import plot, sweeps
from infer.roofline import report as tables
from infer.roofline.agent import agent_table, usual_rates
from infer.roofline.devices import DEVICES, make_node
from infer.roofline.hf_config import ConfigFile
from infer.roofline.model import Token, Work, bytes_by_part, token, token_of_bytes, weights_in_memory
from infer.roofline.options import Options
from infer.roofline.published import MoeModel, find_moe
from infer.roofline.references import references
from infer.roofline.table import PROJECTED, Table
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.config import config_from_hf

USUAL_CONTEXT = 1536  # the mean of `infer bench`: a prompt of 512 and 2,048 tokens after it
USUAL_DEVICES = 8
PLAIN = (
    "plain tensor parallelism: 2 exchanges a layer",
    "operations of a layer as in a dense one",
    "nothing is read during waits",
)
SCHEMA = "laneformer.roofline/1"


@dataclass
class Report:
    """What is printed, written and drawn."""

    tables: list[Table]
    notes: list[str]
    speeds: dict[str, tuple[float, str]]
    """Name -> tokens per second and their status, for the agent's task."""
    panels: list[plot.Panel]
    title: str = "An agent's task"
    assumptions: str = "speeds are examples"


def run(options: Options, file: ConfigFile | None) -> int:
    """file: the config.json that was given, if one was."""
    report = Report([], [], {}, [])
    if options.references:
        report.tables.append(references())
    if file is not None and file.is_moe:
        report_moe(options, report, [file.moe()])
    elif options.checkpoint or file is not None:
        report_laneformer(options, report, file)
    elif options.moe:
        report_moe(options, report, find_moe(options.moe))
    elif options.gigabytes is not None:
        report_bytes(options, report)
    if options.agent:
        rates = usual_rates() | report.speeds
        report.tables.append(agent_table(options.task, rates))
        report.panels.append(plot.agent_panel(options.task, rates))
    print("\n\n".join(table.text() for table in report.tables))
    for note in report.notes:
        print(f"Note: {note}")
    if options.json:
        record = {
            "schema": SCHEMA,
            "asked": dataclasses.asdict(options),
            "tables": [table.record() for table in report.tables],
            "notes": report.notes,
        }
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    if options.png:
        plot.draw(options.png, report.title, report.panels, report.assumptions)
    return 0


def node_options(options: Options, devices: int) -> dict:
    """Arguments of `make_node`."""

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


def find_config(options: Options, given: ConfigFile | None) -> ModelConfig:
    """The model of --checkpoint, or of a config.json. Raises ConfigError or CheckpointError."""
    if given is not None:
        try:
            config = config_from_hf(given.values, options.lanes)
        except ConfigError as error:
            raise ConfigError(f"{given.file}: {error}") from None
    else:
        file = Path(options.checkpoint)
        if file.is_file() and file.name != "config.json":
            raise ConfigError(f"--checkpoint {file}: a file must be called config.json, as in an HF folder")
        config = model_config(str(file.parent) if file.is_file() else options.checkpoint, options.lanes)
    return config.replace(layout=options.layout) if options.layout else config


def report_laneformer(options: Options, report: Report, file: ConfigFile | None) -> None:
    """A model that this package runs."""
    config = find_config(options, file)
    context = min(USUAL_CONTEXT, config.max_position_embeddings) if options.context is None else options.context
    work = Work(options.precision, options.kv_precision, context)
    limit = DEVICES[options.device].per_node if options.device in DEVICES else config.num_lanes
    most = max(n for n in range(1, min(limit, config.num_lanes) + 1) if config.num_lanes % n == 0)
    described = node_options(options, most)
    node = make_node(**described)
    found = token(config, node, work)
    assumed = tables.laneformer_assumptions(work)
    name = f"{options.checkpoint or file.name}, {config.num_lanes} lanes, layout {config.layout}"
    report.tables += [
        tables.bytes_table(bytes_by_part(config, work), f"Bytes of one token of {name}", assumed[0]),
        tables.time_table(found, assumed),
        tables.speed_table(found, known_rate(options), weights_in_memory(config, work)),
    ]
    tables_of = {
        "layout": lambda: sweeps.by_layout(config, node, work),
        "lanes": lambda: sweeps.by_lanes(config, node, work, described),
        "delay": lambda: sweeps.by_delay(config, node, work),
        "context": lambda: sweeps.by_context(config, node, work),
        "precision": lambda: sweeps.by_precision(config, node, work),
    }
    report.tables += [tables_of[wanted]() for wanted in options.sweep]
    finish(options, report, name, found)
    report.panels += plot.laneformer_panels(config, node, work, described)


def report_moe(options: Options, report: Report, models: list[MoeModel]) -> None:
    """Mixture-of-experts models."""
    work = Work(options.precision, options.kv_precision, USUAL_CONTEXT if options.context is None else options.context)
    node = make_node(**node_options(options, USUAL_DEVICES))
    for model in models:
        parts = tables.moe_parts(model, work)
        if options.kv_megabytes is not None:
            parts = dict([*parts.items()][:-1]) | {"cache and state, given": 1e6 * options.kv_megabytes}
        found = token_of_bytes(sum(size for size in parts.values() if size is not None), node, model.layers)
        assumed = tables.moe_assumptions(model)
        report.tables += [
            tables.bytes_table(parts, f"Bytes of one token of {model.name}", assumed),
            tables.time_table(found, PLAIN),
            tables.speed_table(found, known_rate(options), model.checkpoint),
        ]
        if "precision" in options.sweep:
            report.tables.append(sweeps.moe_by_precision(model, node))
        if None in parts.values():
            report.notes.append(
                f"{model.name}: what it reads of its cache is not known and not counted: give --kv-megabytes."
            )
        finish(options, report, model.name, found)
    if public := [model for model in models if model.nominal]:
        report.tables.append(tables.nominal_table(public, node))
        report.notes += tables.differences(public)
    report.panels += plot.moe_panels(models, node, options.device)


def known_rate(options: Options) -> tuple[float, str] | None:
    """A speed that is known and its status."""
    return None if options.rate is None else (options.rate, options.rate_status)


def report_bytes(options: Options, report: Report) -> None:
    """A number of bytes."""
    node = make_node(**node_options(options, USUAL_DEVICES))
    found = token_of_bytes(1e9 * options.gigabytes, node, options.layers)
    assumed = PLAIN if options.layers else ("no waits counted: give --layers for them",)
    report.tables += [tables.time_table(found, assumed), tables.speed_table(found, known_rate(options), None)]
    finish(options, report, f"{options.gigabytes:g} GB per token", found)


def finish(options: Options, report: Report, name: str, found: Token) -> None:
    """The speeds that the agent's task takes over, and the picture's title."""
    report.speeds[f"{name}, {found.node.name}"] = found.rate, PROJECTED
    if options.rate is not None:
        report.speeds[f"{name}, given"] = options.rate, options.rate_status
    report.assumptions = "; ".join(found.node.assumptions)
    report.title = (
        f"{name} on {found.node.name}" if options.moe != "all" else f"Mixture-of-experts models on {found.node.name}"
    )
