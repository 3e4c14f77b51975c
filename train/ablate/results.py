"""Results of the finished cells of a grid, one record each, and their summary by variant."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scipy.special import stdtrit

from laneformer.errors import InputError
from laneformer.infer.roofline.devices import make_node
from laneformer.infer.roofline.model import Work, token
from laneformer.layout import Schedule, parse_layout
from laneformer.train.ablate.grid import Cell, Grid, Variant, run_name
from laneformer.train.ablate.probe import PROBE
from laneformer.train.ablate.run import finished, why_unfinished
from laneformer.train.metrics.records import read_lines
from laneformer.train.metrics.run_log import METRICS

RESULTS = "results.jsonl"
DEVICES = {"h200": "H200", "mi300x": "MI300X"}  # devices on which the speed is projected
PER_NODE = 8
LAST = 20  # last steps over which figures of experts are averaged
CONTEXT = 1536  # positions before the projected token, as in `infer roofline`


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished cell. Losses in nats per token; `similarity` and `landed_over_own` by time in the schedule, as in
    metrics.jsonl.
    """

    variant: str
    seed: int
    order: int | None
    """Seed of the order of the data; None for the base's."""
    layout: str
    lanes: int
    model: dict
    """Fields of the base's model that the variant changes."""
    steps: int
    tokens: int
    loss: float
    """Loss of the last validation on the first set."""
    bits_per_byte: float | None
    validation: dict
    """The last validation on every set."""
    curve: list[list[float]]
    """[tokens, loss] of every validation on the first set."""
    similarity: list[float | None]
    landed_over_own: list[float | None]
    experts: dict[str, float] | None
    """Means over layers of the last steps' figures in metrics.jsonl, and of the last `experts_in_common`; None for a
    model without experts.
    """
    probe: dict | None
    """Content of probe.json (train/ablate/probe.py)."""
    seconds: float
    """Wall time of the cell's processes, compiling and measuring included."""
    folder: str

    @property
    def run(self) -> str:
        """The name of the run among those of its variant."""
        return run_name(self.seed, self.order)

    @property
    def diverged(self) -> bool:
        """Whether the loss is not a number, so that no mean can contain it."""
        return not math.isfinite(self.loss)


def read_result(cell: Cell) -> Result | None:
    """Result of a cell; None if it is not finished. Raises InputError for a damaged record."""
    if not finished(cell):
        return None
    lines = read_lines(cell.folder / METRICS)
    tokens = {line["step"]: line["tokens"] for line in lines if "loss" in line}
    checks = [(line["step"], line["validation"]) for line in lines if "validation" in line]
    if not checks:
        raise InputError(
            f"{cell.folder} has no validation; give data with held-out text and data.validation_batches of at least 1"
        )
    first = next(iter(checks[-1][1]))
    lanes = [line["lanes"] for line in lines if "lanes" in line]
    probe = cell.folder / PROBE
    last = checks[-1][1][first]
    return Result(
        variant=cell.variant.name,
        seed=cell.seed,
        order=cell.order,
        layout=cell.config.model.layout,
        lanes=cell.config.model.num_lanes,
        model=cell.variant.model,
        steps=cell.config.total_steps,
        tokens=tokens[cell.config.total_steps],
        loss=last["loss"],
        bits_per_byte=last.get("bits_per_byte"),
        validation=checks[-1][1],
        curve=[[tokens[step], found[first]["loss"]] for step, found in checks if first in found],
        similarity=lanes[-1]["similarity"] if lanes else [],
        landed_over_own=lanes[-1]["landed_over_own"] if lanes else [],
        experts=_experts(lines, lanes),
        probe=json.loads(probe.read_text(encoding="utf-8")) if probe.exists() else None,
        seconds=sum(sum(line["time"].values()) for line in lines if "time" in line),
        folder=cell.folder.name,
    )


def _experts(lines: Sequence[dict], lanes: Sequence[dict]) -> dict[str, float] | None:
    """The field `experts` of a Result. lines: records of a run. lanes: its statistics of the lanes."""
    last = [line["experts"] for line in lines if "experts" in line][-LAST:]
    if not last:
        return None
    found = {name: statistics.mean(x for step in last for x in step[name]) for name in last[0]}
    shared = lanes[-1].get("experts_in_common") if lanes else None
    return found | ({"in_common": statistics.mean(shared)} if shared else {})


def collect(grid: Grid) -> list[Result]:
    """Results of the finished cells, also written to results.jsonl. Raises InputError if no cell is finished."""
    found = [result for cell in grid.cells if (result := read_result(cell)) is not None]
    if not found:
        raise InputError(
            f"no cell of grid {grid.name} is finished in {grid.folder}; train first, without --report-only"
        )
    part = grid.folder / (RESULTS + ".part")
    part.write_text("".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in found), encoding="utf-8")
    os.replace(part, grid.folder / RESULTS)
    return found


@dataclass(frozen=True)
class Summary:
    """One variant over its runs (seeds and orders of the data), compared with the reference. Runs that diverged count
    in no mean. Spreads are sample standard deviations, None with fewer than two runs.
    """

    variant: Variant
    family: str
    """Name of the variant's layout, without arguments."""
    lanes: int
    schedule: Schedule
    delay: int | None
    """Longest delay in modules, from `delay_of`."""
    losses: dict[str, float]
    """Final loss by run."""
    reference: dict[str, float]
    """Final loss of the reference by run."""
    speed: dict[str, float]
    """Projected tokens per second, by device of DEVICES."""
    devices: int
    """Devices that the lanes are spread over in the projection."""
    measured: float | None
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        return self.variant.name

    @cached_property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())

    @cached_property
    def spread(self) -> float | None:
        return _spread(self.losses.values())

    @cached_property
    def differences(self) -> list[float]:
        """Loss minus the reference's loss with the same seed and order of the data."""
        return [loss - self.reference[run] for run, loss in self.losses.items() if run in self.reference]

    @cached_property
    def difference(self) -> float | None:
        return statistics.mean(self.differences) if self.differences else None

    @cached_property
    def margin(self) -> float | None:
        """Half of the 95 % interval of the mean difference, by Student's t; None with fewer than three runs."""
        n, spread = len(self.differences), _spread(self.differences)
        return float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n) if n >= 3 and spread is not None else None

    @cached_property
    def clear(self) -> bool:
        """Whether the 95 % interval of the mean difference excludes 0."""
        return self.margin is not None and self.difference is not None and abs(self.difference) > self.margin

    def mean_by_time(self, key: str) -> list[float | None]:
        """Mean over seeds of `similarity` or `landed_over_own`, by time in the schedule."""
        columns = zip(*(getattr(result, key) for result in self.results), strict=True)
        return [None if any(x is None for x in column) else statistics.mean(column) for column in columns]


def _spread(values) -> float | None:
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else None


def summarize(grid: Grid, results: Sequence[Result], measured: dict[str, float] | None = None) -> list[Summary]:
    """The variants that have results that did not diverge, in the grid's order. measured: tokens per second by
    variant.
    """
    found = []
    for v in grid.variants:
        mine = tuple(result for result in results if result.variant == v.name and not result.diverged)
        if not mine:
            continue
        model, projected = grid.model(v), grid.projected_model(v)
        devices = max(n for n in range(1, PER_NODE + 1) if projected.num_lanes % n == 0)
        work = Work(context=min(CONTEXT, projected.max_position_embeddings))
        found.append(
            Summary(
                v,
                parse_layout(model.layout)[0],
                model.num_lanes,
                model.schedule,
                delay_of(model.schedule),
                {result.run: result.loss for result in mine},
                {
                    result.run: result.loss
                    for result in results
                    if result.variant == grid.reference and not result.diverged
                },
                {name: token(projected, make_node(name, devices), work).rate for name in DEVICES},
                devices,
                (measured or {}).get(v.name),
                mine,
            )
        )
    return found


def missing(grid: Grid, v: Variant, results: Sequence[Result]) -> dict[str, str]:
    """Why runs of a variant are not counted, by run."""
    found = {}
    known = {(result.variant, result.run): result for result in results}
    for cell in grid.cells:
        if cell.variant is v:
            run = run_name(cell.seed, cell.order)
            result = known.get((v.name, run))
            if result is None:
                found[run] = why_unfinished(cell)
            elif result.diverged:
                found[run] = f"diverged, validation loss {result.loss}"
    return found


def within_models(grid: Grid, found: Sequence[Summary]) -> list[tuple[Summary, Summary]]:
    """Comparisons of layouts within models that differ from the reference's in more than the layout.

    Each is a pair (base, s): base has the reference's layout, and s has the same model as base with another layout. The
    reference losses of s are those of base.
    """

    def key(model: dict) -> list:
        return sorted((name, str(value)) for name, value in model.items() if name != "layout")

    of_grid = next(v.model for v in grid.variants if v.name == grid.reference)
    pairs = []
    for s in found:
        if key(s.variant.model) == key(of_grid) or s.variant.model["layout"] == of_grid["layout"]:
            continue
        for other in found:
            if other.variant.model["layout"] == of_grid["layout"] and key(other.variant.model) == key(s.variant.model):
                pairs.append((other, dataclasses.replace(s, reference=other.losses)))
    return pairs


def delay_of(schedule: Schedule) -> int | None:
    """The longest delay, in modules, until a module's output reaches the other lanes; None if nothing is exchanged.

    Outputs and channels that are never sent do not count.
    """
    if not schedule.landings:
        return None
    longest, synced = 0, -1
    for landing in schedule.landings:
        first = min(m for m, _ in landing.payload.parts)
        if landing.payload.stream_mean_at is not None:  # a mean carries everything since the last mean
            first, synced = synced + 1, landing.at
        longest = max(longest, landing.at - first)
    return longest


def read_measured(file: Path | None, grid: Grid) -> dict[str, float]:
    """Variant -> tokens per second, from a JSON file of that form or from the records of `infer bench --layouts`.

    Raises InputError for any other file, or a variant that the grid does not have.
    """
    if file is None:
        return {}
    try:
        speeds = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(speeds, list):
            pairs = [
                (r["conditions"]["model"]["layout"], r["metrics"]["decode_tps"]["sustained_median"]) for r in speeds
            ]
            if len(speeds := dict(pairs)) < len(pairs):
                raise ValueError("several records of one layout, measure one backend at one context")
        found = {str(name): float(speed) for name, speed in speeds.items()}
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        expected = "{variant: tokens per second} or the records of infer bench --layouts"
        raise InputError(f"--measured {file}: {error}; give a JSON file of {expected}") from None
    unknown = sorted(found.keys() - {v.name for v in grid.variants})
    if unknown:
        known = ", ".join(v.name for v in grid.variants)
        raise InputError(f"--measured {file}: grid {grid.name} has no variant {', '.join(unknown)}; choose {known}")
    return found
