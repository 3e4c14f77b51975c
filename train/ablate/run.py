"""Trains the cells of a grid in a few concurrent processes, any of which may fail or be killed."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from laneformer.errors import InputError
from laneformer.train.ablate.grid import Cell
from laneformer.train.ablate.probe import PROBE
from laneformer.train.metrics.run_log import METRICS
from laneformer.train.run_folder import TokenStore

LOG = "log.txt"  # file in a cell's folder: the output of its process
FAILED = "failed.txt"  # file in a cell's folder: why its last process failed
POLL = 0.5  # seconds between polls of the processes
PRINT_EVERY = 60  # seconds between lines about progress without a terminal
TAIL = 8192  # bytes at the end of metrics.jsonl that hold the last records
GRACE = 120  # seconds for a stopped cell to save


@dataclass
class Progress:
    """Progress of a cell, from the end of its metrics."""

    step: int = 0
    loss: float | None = None
    validation: float | None = None
    step_seconds: float | None = None


def progress(cell: Cell) -> Progress:
    """Reads the last records of the cell's run."""
    file = cell.folder / METRICS
    if not file.exists():
        return Progress()
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL))
        lines = opened.read().split(b"\n")[1 if file.stat().st_size > TAIL else 0 : -1]
    found, seconds = Progress(), []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a damaged line, which is reported when the run is opened
        found.step = max(found.step, record.get("step", 0))
        found.loss = record.get("loss", found.loss)
        if "validation" in record:
            found.validation = next(iter(record["validation"].values()))["loss"]
        if "step_seconds" in record:
            seconds.append(record["step_seconds"])
    found.step_seconds = statistics.median(seconds) if seconds else None
    return found


def finished(cell: Cell) -> bool:
    """Whether the cell is trained on the present tokens to the last step, saved, and probed if the grid requires it."""
    total = cell.config.total_steps
    if not (cell.folder / "checkpoints" / str(total)).is_dir() or progress(cell).step < total:
        return False
    return _same_tokens(cell) and (not cell.probe or (cell.folder / PROBE).exists())


def why_unfinished(cell: Cell) -> str:
    """One line on why a cell is not finished."""
    try:
        return f"failed, {(cell.folder / FAILED).read_text(encoding='utf-8').strip()}"
    except OSError:
        step, total = progress(cell).step, cell.config.total_steps
    if not step:
        return "not trained yet"
    return f"at step {step} of {total}" if step < total else "trained on other tokens, or not probed"


def _same_tokens(cell: Cell) -> bool:
    """False if the data has other tokens now, which the trainer refuses. Missing data leaves a result valid."""
    try:
        recorded = json.loads((cell.folder / "run.json").read_text(encoding="utf-8"))["train_tokens_sha256"]
        now = {
            phase.name: [TokenStore.open(path).digest("train") for path in phase.data.path]
            for phase in cell.config.phases
        }
    except (OSError, ValueError, KeyError, InputError):
        return True
    return recorded == now


@dataclass
class Job:
    """A cell in training, and its process."""

    cell: Cell
    slot: int
    process: subprocess.Popen
    started: float


class Runner:
    """Trains cells in separate processes, one per slot.

    slots: environment variables of each concurrent process, which select its devices. command: returns the command line
    that trains a cell.
    """

    def __init__(self, cells: Sequence[Cell], slots: Sequence[dict[str, str]], command: Callable[[Cell], list[str]]):
        self.cells, self.slots, self.command = list(cells), list(slots), command
        self.done = [cell for cell in self.cells if finished(cell)]
        self.waiting = [cell for cell in self.cells if cell not in self.done]
        self.jobs: list[Job] = []
        self.failed: dict[Cell, str] = {}
        self.spent: list[float] = []  # seconds of every cell that this runner trained to its end
        self.board = Board(self)

    def run(self) -> int | None:
        """Trains the cells that are not finished. Returns the number of the signal that stopped it, or None."""
        with _stop_signals() as received, self.board:
            try:
                while (self.waiting or self.jobs) and not received:
                    self._start()
                    time.sleep(POLL)
                    self._collect()
                    self.board.update()
            finally:
                if self.jobs:
                    self._stop(received)
        return received[0] if received else None

    def _start(self) -> None:
        free = sorted(set(range(len(self.slots))) - {job.slot for job in self.jobs})
        for slot in free[: len(self.waiting)]:
            cell = self.waiting.pop(0)
            cell.folder.mkdir(parents=True, exist_ok=True)
            before = progress(cell).step
            (cell.folder / FAILED).unlink(missing_ok=True)
            with open(cell.folder / LOG, "ab") as log:
                process = subprocess.Popen(
                    self.command(cell),
                    env={**os.environ, **self.slots[slot]},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
                )
            self.jobs.append(Job(cell, slot, process, time.monotonic()))
            self.board.print(f"{cell.name}: {f'resumes after step {before}' if before else 'starts'}")

    def _collect(self) -> None:
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            seconds = time.monotonic() - job.started
            if job.process.returncode == 0:
                self.done.append(job.cell)
                self.spent.append(seconds)
                loss = progress(job.cell).validation
                final = "" if loss is None else f", validation loss {loss:.4f}"
                self.board.print(
                    f"{job.cell.name}: done in {seconds:.0f} s{final}; {len(self.done)} of {len(self.cells)}"
                )
            else:
                self.failed[job.cell] = reason = _reason(job)
                (job.cell.folder / FAILED).write_text(reason + "\n", encoding="utf-8")
                self.board.print(f"{job.cell.name}: FAILED, {reason} (see {job.cell.folder / LOG})")

    def _stop(self, received: list[int]) -> None:
        """Makes the processes save and end; kills them at a second signal or after GRACE seconds."""
        asked = len(received)
        self.board.print(f"stopping: {len(self.jobs)} cells save first")
        for job in self.jobs:
            job.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while any(job.process.poll() is None for job in self.jobs):
            if len(received) > max(asked, 1) or time.monotonic() > deadline:
                for job in self.jobs:
                    job.process.kill()
                    job.process.wait()
            time.sleep(0.05)


def _reason(job: Job) -> str:
    """One line on why a process failed: its error, or its exit status and last line of output."""
    try:
        lines = (job.cell.folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if job.process.returncode == 2 and errors:
        return errors[-1][:300]
    status = job.process.returncode
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{how}: {lines[-1][:200]}" if lines else how


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yields the list of received SIGINT and SIGTERM."""
    received: list[int] = []
    before = {
        n: signal.signal(n, lambda number, _frame: received.append(number)) for n in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Board:
    """Progress on the terminal: a table that redraws itself or, without a terminal, lines as cells start and end."""

    def __init__(self, runner: Runner):
        self.runner, self.live = runner, sys.stdout.isatty()
        self.drawn, self.printed_at = 0, time.monotonic()

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *_) -> None:
        self._erase()

    def print(self, line: str) -> None:
        """Prints a line that stays above the table."""
        self._erase()
        print(line, flush=True)

    def update(self) -> None:
        """Redraws the table or, without a terminal, prints a line every PRINT_EVERY seconds."""
        if self.live:
            self._erase()
            lines = self.table(shutil.get_terminal_size())
            print("\n".join(lines), flush=True)
            self.drawn = len(lines)
        elif time.monotonic() - self.printed_at > PRINT_EVERY and self.runner.jobs:
            self.printed_at = time.monotonic()
            running = [(job.cell, progress(job.cell)) for job in self.runner.jobs]
            parts = [
                f"{c.name} {p.step}/{c.config.total_steps}" + (f" loss {p.loss:.3f}" if p.loss else "")
                for c, p in running
            ]
            print(f"{self.summary()}: {'; '.join(parts)}", flush=True)

    def summary(self) -> str:
        """Number of cells by state, and the time left."""
        r = self.runner
        counts = {"done": len(r.done), "running": len(r.jobs), "failed": len(r.failed), "waiting": len(r.waiting)}
        left = self.seconds_left()
        states = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "done")
        return f"{states} of {len(r.cells)} cells" + ("" if left is None else f", {duration(left)} left")

    def seconds_left(self) -> float | None:
        """Seconds left, estimated from the finished cells, or from the running ones before any is finished."""
        r = self.runner
        own = [left for job in r.jobs if (left := _cell_seconds_left(job)) is not None]
        known = r.spent or [
            job.cell.config.total_steps * p for job in r.jobs if (p := progress(job.cell).step_seconds) is not None
        ]
        if not known:
            return None
        return (sum(own) + len(r.waiting) * statistics.mean(known)) / max(1, len(r.slots))

    def table(self, size: os.terminal_size) -> list[str]:
        """Lines of the table: running and failed cells, then as many others as fit on the terminal."""
        r = self.runner
        rows = [("cell", "state", "step", "loss", "left")]
        for job in r.jobs:
            p, left = progress(job.cell), _cell_seconds_left(job)
            step = f"{p.step}/{job.cell.config.total_steps}"
            rows.append(
                (
                    job.cell.name,
                    "running",
                    step,
                    f"{p.loss:.4f}" if p.loss else "",
                    "" if left is None else duration(left),
                )
            )
        rows += [(cell.name, "failed", reason, "", "") for cell, reason in r.failed.items()]
        room = max(0, size.lines - len(rows) - 3)
        recent = r.done[-(room // 2) :] if room > 1 else []
        others = [
            (c.name, "done", str(c.config.total_steps), f"{progress(c).validation or 0:.4f} held out", "")
            for c in recent
        ]
        others += [(c.name, "waiting", "", "", "") for c in r.waiting]
        rows += others[:room]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        widths[2] = min(widths[2], 40)
        lines = [
            "  ".join(cell[:w].ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()[: size.columns - 1]
            for row in rows
        ]
        return [*lines, self.summary()[: size.columns - 1]]

    def _erase(self) -> None:
        if self.drawn:
            print(f"\x1b[{self.drawn}F\x1b[J", end="", flush=True)
            self.drawn = 0


def _cell_seconds_left(job: Job) -> float | None:
    p = progress(job.cell)
    return None if p.step_seconds is None else max(0, job.cell.config.total_steps - p.step) * p.step_seconds


def duration(seconds: float) -> str:
    """Seconds as text: 45 s, 12 min, 3.5 h, 2.1 days."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if unit == 'min' else 1}f} {unit}"
    return f"{seconds:.0f} s"
