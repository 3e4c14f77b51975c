"""`python -m train.ablate RECIPE`: trains a grid of variants and seeds, and reports speed against loss by layout.

It resumes after any interruption, and never trains a finished cell again.
"""

import ctypes
import dataclasses
import fnmatch
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from laneformer.errors import ConfigError, as_run, run_command
from laneformer.train.ablate.grid import Cell, Grid
from laneformer.train.ablate.listing import listing
from laneformer.train.ablate.probe import probe
from laneformer.train.ablate.report import write_report
from laneformer.train.ablate.run import Runner
from laneformer.train.config import TrainConfig
from laneformer.train.loop import Interrupted, train
from laneformer.train.recipes import find_recipe, list_recipes, read_options
from laneformer.train.run_folder import only_one

HOUSE = "laneformer.recipes.ablations"
PROGRAM = "python -m train.ablate"
COMPILED = "compiled"  # in a grid's folder: folder of compiled programs, which the seeds of a variant share


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train the unfinished cells of a grid, and write report.md, results.jsonl and pictures into its folder."""

    run: Path | None = None
    """Folder of the grid (default: runs/ablations/NAME)."""
    jobs: int = 1
    """Concurrent processes on a CPU, each with an equal share of the cores."""
    devices: tuple[str, ...] = ()
    """GPUs of each concurrent process, as in CUDA_VISIBLE_DEVICES: --devices 0 1 2 3, or --devices 0,1 2,3."""
    seeds: tuple[int, ...] = ()
    """Seeds to train, instead of the recipe's."""
    orders: tuple[int, ...] = ()
    """Seeds of the order of the data, each with every seed, instead of the recipe's."""
    only: tuple[str, ...] = ()
    """Patterns of names of variants to train and report, in addition to the reference: --only 'dtp*' none."""
    dry_run: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(aliases=("--list",))] = False
    """List the cells, their tokens and their expected time, and train nothing."""
    report_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write the report of the finished cells, and train nothing."""
    measured: Path | None = None
    """Measured speeds for the report: a JSON file of {variant: tokens per second}, see docs/ablations.md."""
    cell: str = ""
    """Folder name of a single cell to train, in this process."""
    base: tyro.conf.FlagConversionOff[TrainConfig]
    """Training run that all cells share."""

    def __post_init__(self):
        if self.jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, got {self.jobs}")
        if self.jobs > 1 and self.devices:
            raise ConfigError("--jobs is for CPUs and --devices for GPUs; give one of them")
        if self.measured is not None and not self.measured.is_file():
            raise ConfigError(f"--measured {self.measured} does not exist; give a JSON file of speeds")


def read(arguments: Sequence[str]) -> tuple[Options, Grid]:
    """Reads RECIPE [options] into options and the grid they describe; prints help and exits on --help.

    Raises ConfigError for an unknown recipe or option, an invalid value, or --only that matches no variant.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            f"usage: {PROGRAM} RECIPE [--jobs N | --devices SET ...] [--list] [--report-only] [--base.option value"
            f" ...]\n       {PROGRAM} RECIPE --help\n\nrecipes:\n{list_recipes(HOUSE)}"
        )
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(f"{arguments[0]} precedes the recipe; write {PROGRAM} RECIPE [options]")
    grid = find_recipe(arguments[0], HOUSE, Grid)
    options = read_options(Options(base=grid.base), f"{PROGRAM} {arguments[0]}", arguments[1:])
    base = dataclasses.replace(options.base, run=options.run) if options.run else options.base
    variants = grid.variants
    if options.only:
        variants = tuple(
            v for v in variants if v.name == grid.reference or any(fnmatch.fnmatchcase(v.name, p) for p in options.only)
        )
        if all(v.name == grid.reference for v in variants) and not any(
            fnmatch.fnmatchcase(grid.reference, p) for p in options.only
        ):
            known = ", ".join(v.name for v in grid.variants)
            raise ConfigError(f"--only {' '.join(options.only)} matches no variant; choose from {known}")
    kept = {v.name for v in variants}
    probes = {name: delays for name, delays in grid.probe.items() if name in kept}
    return options, dataclasses.replace(
        grid,
        base=base,
        variants=variants,
        probe=probes,
        seeds=options.seeds or grid.seeds,
        orders=options.orders or grid.orders,
    )


def run(options: Options, grid: Grid, arguments: Sequence[str]) -> int:
    """Lists, reports or trains, as the options say. Returns the exit status: 0, 1 if a cell failed, 130 or 143 after a
    signal.
    """
    if options.cell:
        train_cell(grid, options.cell)
        return 0
    if options.dry_run:
        print(listing(grid, slots(options, grid)))
        return 0
    if options.report_only:
        print(write_report(grid, options.measured))
        return 0
    grid.folder.mkdir(parents=True, exist_ok=True)
    with only_one(grid.folder):
        print(listing(grid, slots(options, grid), short=True), flush=True)
        runner = Runner(grid.cells, slots(options, grid), lambda cell: command(cell, arguments))
        stopped = runner.run()
        print(runner.board.summary())
        for cell, reason in runner.failed.items():
            print(f"failed: {cell.name}: {reason}", file=sys.stderr)
        if stopped:
            print(as_run(f"stopped; resume with: {PROGRAM} {shlex.join(arguments)}"), file=sys.stderr)
            return 128 + stopped
        if runner.done:
            print(write_report(grid, options.measured))
        return 1 if runner.failed else 0


def slots(options: Options, grid: Grid) -> list[dict[str, str]]:
    """Environment variables of each concurrent process."""
    if options.devices:
        return [{"CUDA_VISIBLE_DEVICES": given} for given in options.devices]
    share = max(1, (os.cpu_count() or 1) // options.jobs)
    # Threads of XLA:CPU's pool. Host devices set their own (laneformer/mesh.py).
    return [{} if options.jobs == 1 or grid.base.mesh.host_devices else {"PJRT_NPROC": str(share)}] * options.jobs


def command(cell: Cell, arguments: Sequence[str]) -> list[str]:
    """The command line that trains one cell."""
    return [sys.executable, "-m", "laneformer.train.ablate", *arguments, "--cell", cell.folder.name]


def train_cell(grid: Grid, folder: str) -> None:
    """Trains or resumes the cell whose folder has this name, and probes it. Raises as `train` does."""
    cell = next((cell for cell in grid.cells if cell.folder.name == folder), None)
    if cell is None:
        raise ConfigError(f"--cell {folder}: grid {grid.name} has no such cell; choose a folder of --list")
    jax.config.update("jax_compilation_cache_dir", str((grid.folder / COMPILED).absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    train(cell.config)
    if cell.probe:
        probe(cell)


def _die_with_parent() -> None:
    """Makes the system kill this process when the grid's process ends, so that the next grid can resume the cell."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a killed run can resume


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when done, 1 if a cell failed, 2 after a user's mistake, 130 or 143 after a signal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)

    def command() -> int:
        options, grid = read(arguments)
        if options.cell:
            _die_with_parent()
        try:
            return run(options, grid, arguments)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return 128 + stopped.signal

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
