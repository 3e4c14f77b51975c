"""A grid of cells that train in a second, one with a new layout, and files of finished cells without training."""

import dataclasses
import json

from laneformer.layout import LAYOUTS, Landing, Own, Payload, Schedule
from laneformer.train.ablate.grid import Cell, Grid, variant
from laneformer.train.ablate.probe import PROBE
from laneformer.train.config import MeshConfig
from laneformer.train.metrics.records import read_lines
from tests.support.tiny_recipe import changed, tiny


def twice(n: int, lanes: int) -> Schedule:
    """The schedule of a new layout, which exchanges outputs in the first layer alone."""
    return Schedule("twice", tuple(map(Own, range(2 * n))), tuple(Landing(m, Payload(((m, 1.0),))) for m in (0, 1)))


def grid(**changes) -> Grid:
    base = changed(
        tiny(), mesh=MeshConfig(), steps=12, validate_every=6, save_every=3, model=tiny().model.replace(num_lanes=4)
    )
    fields = {"variants": (variant("tp"), variant("twice")), "seeds": (0,), "probe": {"tp": (0, 2)}}
    return Grid(**{"name": "tiny", "base": base, "projected": base.model, **fields, **changes})


def registered() -> Grid:
    """The grid, after its layout has been added to the table, as in a user's recipe."""
    LAYOUTS["twice"] = twice
    return grid()


def pretend(
    cell: Cell,
    losses: list[float],
    *,
    lanes: dict | None = None,
    probe: dict | None = None,
    experts: dict | None = None,
) -> None:
    """Writes the files of a finished cell. losses: validation losses, evenly spaced over the cell's steps."""
    total = cell.config.total_steps
    (cell.folder / "checkpoints" / str(total)).mkdir(parents=True)
    records = []
    for i, loss in enumerate(losses, 1):
        step = total * i // len(losses)
        more = {"experts": experts} if experts else {}
        records.append({"step": step, "loss": 9.0, "tokens": 100 * step, "step_seconds": 0.5, **more})
        records.append({"step": step, "validation": {"store": {"loss": loss, "bits_per_byte": 2 * loss}}})
    records += [{"step": total, "lanes": lanes}] if lanes else []
    records.append({"step": total, "time": {"step": 30.0, "other": 30.0}})
    (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if probe:
        (cell.folder / PROBE).write_text(json.dumps(probe))


def at(folder, **changes) -> Grid:
    """The grid with its runs in `folder`."""
    made = grid(**changes)
    return dataclasses.replace(made, base=dataclasses.replace(made.base, run=folder))


def final_loss(cell: Cell) -> float:
    """Last validation loss of a cell, which has one validation set."""
    checks = [line["validation"] for line in read_lines(cell.folder / "metrics.jsonl") if "validation" in line]
    (found,) = checks[-1].values()
    return found["loss"]
