"""The log of a run in training: records, dashboards, lines on the terminal, and the check for divergence."""

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from laneformer.errors import LaneformerError, printable
from laneformer.interrupts import StopSignals
from laneformer.train.config import Phase, TrainConfig, recorded
from laneformer.train.flops import model_flops_utilization
from laneformer.train.metrics.clock import Clock
from laneformer.train.metrics.divergence import Divergence
from laneformer.train.metrics.records import MetricsLog, Sink, last_step, read_lines
from laneformer.train.metrics.sinks import TensorBoard, WeightsAndBiases
from laneformer.train.planning.cluster import peak_flops
from laneformer.train.samples import texts

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # files of a run folder


def measured(run: Path, step: int) -> set[str]:
    """Names of the measurements after this step that the files of a run have."""
    names = {name for line in read_lines(run / METRICS) if line["step"] == step for name in line}
    return names | {"samples" for line in read_lines(run / SAMPLES) if line["step"] == step}


class RunLog:
    """Writes the records of a run and checks them for divergence.

    Every process has a RunLog, so that all stop at the same divergence; only process 0 writes and prints.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, first: int, stop: StopSignals):
        """first: step after which the run resumes. stop: receives SIGPIPE when the reader of the output has closed it.

        Raises InputError if a requested dashboard is not installed.
        """
        self.stop = stop
        self.config, self.devices, self.writes = config, mesh.devices.flat, jax.process_index() == 0
        run = config.run_folder
        before = [line for line in read_lines(run / METRICS) if line["step"] <= first]
        self.clock = Clock(before)
        self.divergence = Divergence(run, max_skipped=config.watch.max_skipped, max_rise=config.watch.max_rise)
        for record in before:
            self.divergence.update(record)
        spent = self.clock.total()
        self._peak, self._spent = peak_flops(self.devices[0].device_kind), spent["step"] + spent["data"]
        self._speeds: list[float] = []
        self._last = 0  # last step that this process recorded, 0 before the first
        self._stack = ExitStack()
        self.bar = tqdm(
            total=config.total_steps,
            initial=first,
            unit="step",
            dynamic_ncols=True,
            disable=not (self.writes and sys.stderr.isatty()),
        )
        self._stack.callback(self.bar.close)
        self.samples: MetricsLog | None = None
        if self.writes:
            sinks = self._sinks(run, first)
            self.metrics = self._stack.enter_context(MetricsLog(run / METRICS, first, sinks))
            if config.watch.samples_every:
                self.samples = self._stack.enter_context(MetricsLog(run / SAMPLES, first))

    def step(self, phase: Phase, step: int, values: dict, epochs: dict[str, float], wait: float) -> None:
        """Records a finished step. values: loss, grad_norm, ...; wait: seconds spent waiting for data.

        Raises DivergedError.
        """
        self._last, spent = step, self.clock.total()
        seconds, self._spent = spent["step"] + spent["data"] - self._spent, spent["step"] + spent["data"]
        if not values["skipped"]:
            del values["skipped"]
        speed = phase.tokens_per_step / seconds
        record = {
            "phase": phase.name,
            **values,
            "tokens": phase.tokens_at(step),
            "epoch": epochs,
            "tokens_per_second": speed,
        }
        if self._peak:
            record["mfu"] = model_flops_utilization(
                phase.model, phase.data.sequence_length, speed, len(self.devices), self._peak
            )
        self._write(step, record | {"step_seconds": seconds, "data_wait_seconds": wait})
        self._speeds.append(speed)
        recent = sorted(self._speeds[-50:])
        speed = recent[len(recent) // 2]
        with self._output():
            self.bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} tok/s", refresh=False)
            self.bar.update(1)
        if step % self.config.log_every == 0:
            self._write(step, {"time": self.clock.interval()})
            left = (phase.last_step - step) * phase.tokens_per_step / speed
            self._print(
                f"step {step}/{self.config.total_steps}  loss {values['loss']:.4f}  {_experts(values)}{speed:,.0f}"
                f" tok/s  {left:.0f} s left"
            )
        self.divergence.update({"step": step, **record})

    def record(self, step: int, record: dict, *lines: str) -> None:
        """Writes measurements made after a step to the file, and lines about them to the terminal."""
        self._write(step, record)
        for line in lines if self.writes else ():
            with self._output():
                self.bar.write(f"step {step}: {line}")

    def warn(self, step: int, line: str) -> None:
        """Writes a warning about a step to the terminal."""
        if self.writes:
            with self._output():
                self.bar.write(f"warning: step {step}: {line}", file=sys.stderr)

    def sync(self) -> None:
        """Returns when all records are on disk."""
        if self.writes:
            self.metrics.sync()

    def sample(self, step: int, records: list[dict]) -> None:
        """Writes the text samples drawn after a step to the file, and to the terminal."""
        if self.samples is not None:
            for record in records:
                self.samples.write(step, **record)
        for name, text in texts(records).items() if self.writes else ():
            with self._output():
                self.bar.write(f"step {step}: {name}\n{textwrap.indent(printable(text), '  | ')}")
        for sink in self.metrics.sinks if self.writes else ():
            sink.text(step, texts(records))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with self._stack, suppress(LaneformerError, OSError):  # a full disk is already reported
            if self._last:
                self._write(self._last, {"time": self.clock.interval()})

    def _write(self, step: int, record: dict) -> None:
        if self.writes:
            self.metrics.write(step, **record)

    def _print(self, line: str) -> None:
        if self.writes and self.bar.disable:
            with self._output():
                print(line, flush=True)

    @contextmanager
    def _output(self) -> Iterator[None]:
        """A context for writing to the terminal. If the reader has closed it, as `| head` does, the run stops as after
        a signal.
        """
        try:
            yield
        except BrokenPipeError:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BrokenPipeError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self.stop.append(signal.SIGPIPE)

    def _sinks(self, run: Path, first: int) -> list[Sink]:
        sinks: list[Sink] = []
        if self.config.watch.tensorboard:
            sinks.append(TensorBoard(run / "tensorboard", first))
        if self.config.watch.wandb:
            sinks.append(
                WeightsAndBiases(
                    run,
                    project=self.config.watch.wandb,
                    name=self.config.name,
                    config=recorded(self.config),
                    last_step=last_step(run / METRICS),
                )
            )
        for sink in sinks:
            self._stack.callback(sink.close)
            self._print(f"also logging to {sink.where}")
        return sinks


def _experts(values: dict) -> str:
    """Text about the experts for the line of a step; "" without experts.

    It has the load of the fullest expert of any layer, and the number of experts, summed over layers, that no token
    uses.
    """
    if "experts" not in values:
        return ""
    fullest, dead = max(values["experts"]["fullest"]), sum(values["experts"]["dead"])
    return f"fullest expert {fullest:.2f} x even{f', {dead:.3g} unused' if dead else ''}  "
