"""`python -m train RECIPE --dry-run --sweep mesh`: estimates which mesh suits a recipe on 8 to 1,024 devices."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import laneformer as lf
from laneformer.errors import ConfigError, read_options, writing
from laneformer.mesh import DATA, LANE
from laneformer.model import Remat
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.flops import train_flops_per_token
from laneformer.train.planning.cluster import Device, find_device, speeds_of
from laneformer.train.planning.estimate import Estimate, estimate
from laneformer.train.planning.plan import DAY, USABLE, ClusterConfig, Times, device_of
from laneformer.train.program.program import gigabytes
from laneformer.train.recipes import parse

TRILLION = 1e12
ASSUMED = (
    "projected by counting, not compiled and not measured; of two figures the first is without overlap of computing and"
    " exchanges, the second with complete overlap"
)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Options of --sweep in addition to the recipe's."""

    sweep: Literal["mesh"] = "mesh"
    """mesh: try every mesh of data and lane axes, each with the `accumulate` and `remat` that suit it best."""
    gpus: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of devices."""
    price: float | None = None
    """Price of a GPU-hour; adds the cost of a trillion tokens, in its currency (default: no cost)."""
    best: bool = False
    """Show only the fastest mesh for each number of devices."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    json: Path | None = None
    """File to write all figures to."""

    def __post_init__(self):
        if not self.gpus or min(self.gpus) < 1:
            raise ConfigError(f"--gpus must be numbers of at least 1, got {self.gpus}")
        if self.price is not None and not 0 < self.price < math.inf:
            raise ConfigError(f"--price must be a positive number, got {self.price}")
        if self.cluster.nodes is not None:
            raise ConfigError(f"--cluster.nodes {self.cluster.nodes} with --sweep: give numbers of devices with --gpus")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mesh with one choice of `accumulate` (parts of a batch) and `remat` (recomputation)."""

    device: Device
    efficiency: float
    phase: Phase
    """The first phase, with this point's `accumulate`."""
    remat: Remat
    data: int
    lane: int
    figures: Estimate

    @property
    def devices(self) -> int:
        return self.data * self.lane

    @property
    def fits(self) -> bool:
        return self.figures.memory <= USABLE * self.device.memory

    @cached_property
    def times(self) -> Times:
        """Projected seconds per step."""
        speeds = speeds_of(self.device, {DATA: self.data, LANE: self.lane}, self.efficiency)
        if speeds is None:
            raise ConfigError(f"the speeds of a {self.device.kind} are unknown; choose a GPU with --cluster.device")
        exchanges = {"links": 0.0, "network": 0.0}
        for (kind, axis), sent in self.figures.sent.items():
            link, seconds = speeds.exchange_seconds(kind, axis, sent)
            exchanges[link] += seconds
        products = self.figures.flops / speeds.products
        device = products + self.figures.traffic / speeds.memory
        return Times(device=device, products=products, **exchanges, overlaps=None)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds per step without overlap, and with complete overlap."""
        return self.times.in_turn, self.times.overlapped

    def as_json(self, price: float | None) -> dict:
        days = [self.days(s) for s in self.seconds]
        flops = train_flops_per_token(self.phase.model, self.phase.data.sequence_length) * self.phase.tokens_per_step
        return {
            "devices": self.devices,
            "data": self.data,
            "lane": self.lane,
            "lanes_per_device": self.phase.model.num_lanes // self.lane,
            "accumulate": self.phase.accumulate,
            "remat": self.remat,
            "memory": self.figures.memory,
            "state": self.figures.state,
            "fits": self.fits,
            "step_seconds": list(self.seconds),
            "bound": self.times.bound,
            "mfu": [flops / (s * self.devices * self.device.peak) for s in self.seconds],
            "days_per_trillion_tokens": days,
            "cost_per_trillion_tokens": price and [24 * price * self.devices * d for d in days],
        }

    def days(self, seconds: float) -> float:
        """Days that a trillion tokens take, given the seconds of a step."""
        return TRILLION / self.phase.tokens_per_step * seconds / DAY


def meshes(lanes: int, devices: int) -> Iterator[tuple[int, int]]:
    """(data, lane) of every mesh that uses all devices."""
    for lane in range(1, min(lanes, devices) + 1):
        if lanes % lane == 0 and devices % lane == 0:
            yield devices // lane, lane


def points(config: TrainConfig, device: Device, efficiency: float, data: int, lane: int) -> list[Point]:
    """Every choice of parts and recomputation on one mesh; empty if the batch does not divide over the data axis."""
    first, found = config.phases[0], []
    rows, rest = divmod(first.data.batch_size, data)
    for parts in (n for n in range(1, rows + 1) if rest == 0 and rows % n == 0):
        phase = dataclasses.replace(first, accumulate=parts)
        for remat in get_args(Remat):
            figures = estimate(dataclasses.replace(config, remat=remat), phase, {DATA: data, LANE: lane})
            found.append(
                Point(
                    device=device,
                    efficiency=efficiency,
                    phase=phase,
                    remat=remat,
                    data=data,
                    lane=lane,
                    figures=figures,
                )
            )
    return found


def fastest(found: Sequence[Point]) -> Point | None:
    """The point that fits with the shortest step without overlap, to three digits; None if no point fits.

    Of equal steps it is the one with the fewest parts, then with the least memory.
    """

    def order(p: Point) -> tuple[float, int, float]:
        return float(f"{p.times.in_turn:.3g}"), p.phase.accumulate, p.figures.memory

    return min((p for p in found if p.fits), key=order, default=None)


def least_memory(found: Sequence[Point]) -> Point | None:
    """The point that needs the least memory; None if there is none."""
    return min(found, key=lambda p: p.figures.memory, default=None)


def why_not(config: TrainConfig, device: Device, data: int, found: Sequence[Point]) -> str:
    """The reason why no choice fits on a mesh with `data` devices on the data axis."""
    least = least_memory(found)
    if least is None:
        return f"a batch of {config.data.batch_size} sequences does not divide into {data} shares"
    figures = least.figures
    return (
        f"state {gigabytes(figures.state)} and at least {gigabytes(figures.temporary)} for one sequence"
        f" exceed {USABLE:.0%} of {gigabytes(device.memory)}"
    )


def sweep(config: TrainConfig, options: SweepConfig) -> tuple[list[dict], str]:
    """All figures of the fastest choice on every mesh, and the table, both for the first phase only.

    Raises ConfigError for options that `estimate` does not count, and for a cluster without known speeds.
    """
    cluster = options.cluster
    largest = max(options.gpus)
    device = device_of(cluster, largest, math.ceil(largest / find_device(cluster.device, largest).per_node))
    if device.peak_flops is None:
        raise ConfigError(f"--sweep needs known speeds, but cluster.device = {cluster.device!r} has none; choose a GPU")
    rows, records = [], []
    for count in options.gpus:
        tried = [
            (mesh, points(config, device, cluster.efficiency, *mesh)) for mesh in meshes(config.model.num_lanes, count)
        ]
        every = [point for _, found in tried for point in found]
        shown = fastest(every) or least_memory(every)
        for (data, lane), found in tried:
            point = fastest(found)
            if point is None:
                mesh = {"devices": count, "data": data, "lane": lane, "fits": False}
                records.append(mesh | {"why": why_not(config, device, data, found)})
            else:
                records.append(point.as_json(options.price) | {"best": point is shown})
            if not options.best or shown is None or (shown.data, shown.lane) == (data, lane):
                rows.append(records[-1])
    return records, _describe(config, device, options, rows)


def _describe(config: TrainConfig, device: Device, options: SweepConfig, rows: Sequence[dict]) -> str:
    first = config.phases[0]
    lines = [
        (
            f"{config.name}, {first.name}: {lf.parameter_count(first.model):,} parameters, {first.model.layout},"
            f" {first.data.batch_size:,} x {first.data.sequence_length:,} tokens per step, on {device.kind}"
            f" ({device.peak / 1e12:,.0f} TFLOP/s, {gigabytes(device.memory)})"
        ),
        ASSUMED,
        "",
    ]
    titles = ["GPUs", "data x lane", "lanes/GPU", "parts", "remat", "memory", "seconds per step", "MFU", "bound by"]
    titles += ["days per 1T tokens"] + (["cost per 1T tokens"] if options.price else [])
    cells = [titles]
    for row in rows:
        head = [f"{row['devices']:,}", f"{row['data']} x {row['lane']}"]
        if not row["fits"]:
            cells.append([*head, f"{config.model.num_lanes // row['lane']}", f"does not fit: {row['why']}"])
            continue
        mark = " *" if row["best"] and not options.best else ""
        cells.append([*head[:1], head[1] + mark, f"{row['lanes_per_device']}", f"{row['accumulate']}", row["remat"]])
        cells[-1] += [gigabytes(row["memory"]), _pair(row["step_seconds"], ".3g"), _pair(row["mfu"], ".1%")]
        cells[-1] += [row["bound"], _pair(row["days_per_trillion_tokens"], ",.3g")]
        if options.price:
            cells[-1].append(_pair(row["cost_per_trillion_tokens"], ",.0f"))
    widths = [max(len(row[n]) for row in cells if len(row) > n and len(row) == len(titles)) for n in range(len(titles))]
    table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells]
    link, network = device.link or 0, device.network or 0
    notes = [
        (
            f"* the shortest step without overlap; parts and remat are chosen for each mesh, the global batch is the"
            f" recipe's. Products at {options.cluster.efficiency:.0%} of the peak; memory, links"
            f" ({link / 1e9:,.0f} GB/s) and network ({network / 1e9:,.0f} GB/s per GPU) at full"
            " speed; without saving and validating"
        )
    ]
    return "\n".join([*lines, *table, "", *notes])


def _pair(values: Sequence[float], form: str) -> str:
    """Text of [no overlap, complete overlap]."""
    low, high = (format(value, form) for value in values)
    return low if low == high else f"{low}, {high}"


def mesh_sweep(arguments: Sequence[str]) -> str:
    """The table for RECIPE --dry-run --sweep mesh [--gpus N ...] [--price P] [--cluster.option value] [--json FILE]
    [--section.option value].
    """
    rest = [argument for argument in arguments if argument != "--dry-run"]
    program = "python -m train RECIPE --dry-run"
    # tyro returns the other arguments too, which its types do not say
    found: Any = read_options(SweepConfig, program, rest, return_unknown_args=True, add_help=False)
    options: SweepConfig = found[0]
    config = parse(found[1])
    records, text = sweep(config, options)
    if options.json is not None:
        with writing(options.json, "name another file with --json"):
            options.json.write_text(json.dumps({"projected": True, "meshes": records}, indent=1) + "\n")
    return text
