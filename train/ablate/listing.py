"""The listing of a grid: its cells, their tokens, and the time to train them."""

import statistics
from collections.abc import Sequence

import laneformer as lf
from laneformer.train.ablate.grid import CELLS, Cell, Grid
from laneformer.train.ablate.run import duration, finished, progress
from laneformer.train.metrics.records import read_lines
from laneformer.train.metrics.run_log import METRICS


def listing(grid: Grid, slots: Sequence[dict[str, str]], *, short: bool = False) -> str:
    """The cells as a table, one row each, and their totals. short: only the totals."""
    states = {cell: _state(cell) for cell in grid.cells}
    todo = [cell for cell, state in states.items() if state != "done"]
    started = sum(state.startswith("step") for state in states.values())
    tokens = sum(phase.steps * phase.tokens_per_step for phase in grid.base.phases)
    minutes, source = _minutes(grid, [cell for cell in grid.cells if cell not in todo])
    of_orders = f" x {len(grid.orders)} orders" if grid.orders else ""
    lines = [
        (
            f"{grid.name}: {len(grid.variants)} variants x {len(grid.seeds)} seeds{of_orders} = {len(grid.cells)} cells"
            f" of {tokens:,} tokens ({grid.base.total_steps} steps), {lf.parameter_count(grid.base.model):,}"
            f" parameters; in {grid.folder}"
        ),
        f"{len(grid.cells) - len(todo)} cells are finished, {started} to resume, {len(todo) - started} new"
        + (f"; {other} folders with other settings are left alone" if (other := others(grid)) else ""),
    ]
    if todo and minutes is not None:
        whole = duration(60 * minutes * len(todo) / len(slots))
        lines.append(f"about {duration(60 * minutes)} per cell ({source}): {whole} with {len(slots)} at a time")
    elif todo:
        lines.append("time: unknown until the first cell is done")
    if short:
        return "\n".join(lines)
    width = max(len(cell.name) for cell in states)
    rows = [f"  {'cell':<{width}}  {'state':<12}  reduces  exposed  folder"]
    for cell, state in states.items():
        schedule = cell.config.model.schedule
        rows.append(
            f"  {cell.name:<{width}}  {state:<12}  {schedule.num_reductions:>7}  {len(schedule.exposed):>7} "
            f" {cell.folder.name}"
        )
    return "\n".join([*rows, "", *lines])


def _state(cell: Cell) -> str:
    if finished(cell):
        return "done"
    step = progress(cell).step
    return f"step {step}" if step else "new"


def others(grid: Grid) -> int:
    """Number of folders that belong to no cell of the grid."""
    folder, ours = grid.folder / CELLS, {cell.folder.name for cell in grid.cells}
    return sum(path.name not in ours for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else 0


def _minutes(grid: Grid, done: Sequence[Cell]) -> tuple[float | None, str]:
    """Minutes per cell, and the source of the figure."""
    seconds = [
        sum(sum(line["time"].values()) for line in read_lines(cell.folder / METRICS) if "time" in line) for cell in done
    ]
    if seconds:
        return statistics.median(seconds) / 60, "median of the finished cells"
    return grid.minutes, "on the hardware that the recipe names"
