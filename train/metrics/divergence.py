"""Detects from the recorded losses alone that a run has diverged, and reports what to look at."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from laneformer.checkpoint import STEPS, complete_steps
from laneformer.errors import LaneformerError

WINDOW = 20  # steps in a median
SHOWN = 5  # number of last steps that the message lists


class DivergedError(LaneformerError):
    """The run diverged; its checkpoints are intact."""


class Divergence:
    """Reads the step records of a run in order and raises DivergedError when continuing is pointless.

    This is so if `max_skipped` consecutive steps were not finite, or if the median of the last 20 losses is more than
    `max_rise` nats above the lowest such median of the phase. Both conditions depend only on the records, so a resumed
    run that reads metrics.jsonl first decides as if it had never stopped.
    """

    def __init__(self, run: Path, *, max_skipped: int, max_rise: float):
        """run: folder whose checkpoints the message names."""
        self.run, self.max_skipped, self.max_rise = run, max_skipped, max_rise
        self.skipped = 0  # skipped steps of the whole run
        self._in_a_row = 0
        self._good = 0  # last step at which nothing was wrong
        self._recent: deque[dict] = deque(maxlen=max(SHOWN, max_skipped + 1))
        self._phase: str | None = None
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._lowest: tuple[float, int] | None = None  # median, step

    def update(self, record: dict) -> None:
        """Adds a step record; ignores others. A step is skipped if marked so or if its loss is not finite."""
        if "loss" not in record:
            return
        if record.get("phase") != self._phase:
            self._start_phase(record.get("phase"))
        self._recent.append(record)
        if record.get("skipped") or not _finite(record["loss"]):
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row >= self.max_skipped:
                raise self._diverged(
                    f"the loss or its gradient was not finite in {self._in_a_row} steps in a row", "max_skipped"
                )
            return
        self._in_a_row = 0
        self._losses.append(record["loss"])
        if len(self._losses) < WINDOW:
            self._good = record["step"]
            return
        median = statistics.median(self._losses)
        if self._lowest is None or median < self._lowest[0]:
            self._lowest = (median, record["step"])
        rise = median - self._lowest[0]
        if rise > self.max_rise:
            raise self._diverged(
                f"the median loss of {WINDOW} steps is {median:.3f}, {rise:.3f} nats above the lowest of the phase "
                f"({self._lowest[0]:.3f} at step {self._lowest[1]})",
                "max_rise",
            )
        if max(median, record["loss"]) - self._lowest[0] <= self.max_rise / 10:  # the median alone lags by ten steps
            self._good = record["step"]

    def _start_phase(self, name: str | None) -> None:
        self._phase, self._lowest = name, None
        self._losses.clear()

    def _diverged(self, what: str, limit: str) -> DivergedError:
        step, last = self._recent[-1]["step"], list(self._recent)[-SHOWN:]
        saved = [n for n in complete_steps(self.run) if n <= self._good]
        good = (
            f"the last good checkpoint is {self.run / STEPS / str(saved[-1])}"
            if saved
            else "no earlier checkpoint is left"
        )
        return DivergedError(
            f"diverged at step {step}: {what}.\nSteps {last[0]['step']} to {step}: loss {_numbers(last, 'loss')};"
            f" gradient norm {_numbers(last, 'grad_norm')}; learning rate {_numbers(last[-1:], 'learning_rate')}.\nAll"
            f" was well until step {self._good}; {good}.\nTry a lower optimizer.learning_rate or clip_norm, or a longer"
            f" optimizer.warmup_steps, in another folder (--run); look at the text of steps {self._good + 1} to {step};"
            f" if this is expected, raise watch.{limit} and run the"
            " same command again."
        )


def _numbers(records: Sequence[dict], key: str) -> str:
    return ", ".join(f"{record[key]:.4g}" if _finite(record[key]) else "not finite" for record in records)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
