"""The training loop: resumes exactly, measures, validates, saves, and stops cleanly when asked to."""

import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import laneformer as lf
from laneformer.errors import CheckpointError, ConfigError, InputError, LaneformerError
from laneformer.mesh import keep_freed_memory
from train.checkpoint import Checkpoints, saved_steps, versions
from train.config import TrainConfig, check_same_run, recorded
from train.data import Batches, Prefetch, validation_batches
from train.metrics import MetricsLog
from train.shards import TokenStore
from train.step import State, Trainer

METRICS = "metrics.jsonl"  # of a run folder


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}, which is saved")
        self.signal = number


def train(config: TrainConfig) -> None:
    """Runs `config` to its last step, from the newest checkpoint of its folder if there is one.

    Leaves RUN/{run.json, tokenizer.json, metrics.jsonl, checkpoints/STEP}. The same config gives bitwise the same losses and weights
    however often it is stopped, on the same number of devices; on others to rounding. Raises LaneformerError for a user's mistake and
    Interrupted after SIGINT or SIGTERM.
    """
    if config.mesh.host_devices:
        lf.use_host_devices(config.mesh.host_devices)
        keep_freed_memory()
    store = TokenStore.open(config.data.path)
    if config.model.vocab_size < store.manifest.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the {store.manifest.vocab_size} tokens of {store.path}: "
            f"set --model.vocab-size {store.manifest.vocab_size}"
        )
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane)
    data = Batches(store, "train", seq_len=config.data.sequence_length, batch_size=config.data.batch_size, seed=config.data.seed)
    validation = _validation(config, store)
    run = config.run_folder
    run.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_only_one(run))
        _record_run(run, config, store)
        trainer = Trainer(config, mesh)
        checkpoints = Checkpoints(config, store.manifest.tokenizer_sha256)
        stack.callback(checkpoints.close)
        state = checkpoints.restore(trainer)
        first = 0 if state is None else int(state.step)
        if first >= config.steps:
            print(f"{run}: all {config.steps} steps are done; nothing to do")
            return
        print(_greeting(config, store, trainer, first))
        stop = stack.enter_context(_stop_signals())
        metrics = stack.enter_context(MetricsLog(run / METRICS, first))
        batches = Prefetch(lambda step: trainer.put_batch(lambda rows: data.batch_at(step, rows)), itertools.count(first))
        stream = stack.enter_context(batches)
        bar = tqdm(total=config.steps, initial=first, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
        stack.callback(bar.close)
        run_loop = _Loop(config, trainer, checkpoints, data, validation, metrics, bar)
        run_loop.run(trainer.init() if state is None else state, stream, stop)
        print(f"{run}: {config.steps} steps done, last checkpoint in {run / 'checkpoints' / str(config.steps)}")


class _Loop:
    """One step after another; the metrics of a step are fetched while the next one runs."""

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        checkpoints: Checkpoints,
        data: Batches,
        validation: list[np.ndarray],
        metrics: MetricsLog,
        bar: tqdm,
    ):
        self.config, self.trainer, self.checkpoints, self.data, self.validation = config, trainer, checkpoints, data, validation
        self.metrics, self.bar = metrics, bar
        self.tokens_per_step = config.data.batch_size * config.data.sequence_length
        self.speeds: list[float] = []

    def run(self, state: State, stream: Prefetch, stop: list[int]) -> None:
        pending, step, last_fetch = None, None, time.perf_counter()
        while True:
            asked = time.perf_counter()
            try:
                before, batch = next(stream)
            except (LaneformerError, OSError):  # of the data: whoever repairs it goes on from here
                if pending is not None:
                    self._fetch(*pending, last_fetch)
                    self._save(state, step)
                    self.checkpoints.wait()
                raise
            wait = time.perf_counter() - asked
            state, values = self.trainer.step(state, batch)
            if pending is not None:
                last_fetch = self._fetch(*pending, last_fetch)
            step = before + 1
            pending = (step, values, wait)
            self.checkpoints.check()
            done, stopping = step == self.config.steps, bool(stop)
            validating = bool(self.validation) and (done or step % self.config.validate_every == 0)
            saving = done or stopping or step % self.config.save_every == 0
            if validating or saving:
                self._fetch(*pending, last_fetch)
                pending = None
                if validating:
                    self._validate(state, step)
                if saving:
                    self._save(state, step)
                last_fetch = time.perf_counter()
            if done or stopping:
                self.checkpoints.wait()
            if done:
                return
            if stopping:
                raise Interrupted(stop[0], step)

    def _fetch(self, step: int, values: dict, wait: float, last_fetch: float) -> float:
        """Waits for a step, records it, and returns the time at which it was done."""
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        now = time.perf_counter()
        seconds = now - last_fetch
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise InputError(
                f"the loss is {values['loss']} at step {step} (gradient norm {values['grad_norm']}): lower optimizer.learning_rate or "
                f"lengthen optimizer.warmup_steps; checkpoints up to the last save are intact"
            )
        self.speeds.append(self.tokens_per_step / seconds)
        self.metrics.write(
            step, **values, tokens=step * self.tokens_per_step, epoch=self.data.epoch_of(step), step_seconds=seconds, data_wait_seconds=wait
        )
        recent = sorted(self.speeds[-50:])
        speed = f"{recent[len(recent) // 2]:,.0f} tok/s"
        self.bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed}", refresh=False)
        self.bar.update(1)
        if step % self.config.log_every == 0 and self.bar.disable:
            left = (self.config.steps - step) * self.tokens_per_step / recent[len(recent) // 2]
            print(f"step {step}/{self.config.steps}  loss {values['loss']:.4f}  {speed}  {left:.0f} s left", flush=True)
        return now

    def _save(self, state: State, step: int) -> None:
        self.metrics.sync()
        self.checkpoints.save(state, step)

    def _validate(self, state: State, step: int) -> None:
        """Mean loss over the held-out batches, in nats per token and in bits per byte of their text."""
        losses = [float(self.trainer.evaluate(state.params, self.trainer.put_batch(batch.__getitem__))) for batch in self.validation]
        loss, store = sum(losses) / len(losses), self.data.store
        bits_per_byte = loss / math.log(2) * store.tokens("validation") / store.text_bytes("validation")
        self.metrics.write(step, validation_loss=loss, validation_bits_per_byte=bits_per_byte)
        self.bar.write(f"step {step}: validation loss {loss:.4f}, {bits_per_byte:.4f} bits per byte")


def _validation(config: TrainConfig, store: TokenStore) -> list[np.ndarray]:
    """The held-out batches; none where none are asked for or the store has no such split."""
    if config.data.validation_batches == 0 or "validation" not in store.splits:
        return []
    return validation_batches(
        store, "validation", seq_len=config.data.sequence_length, batch_size=config.data.batch_size,
        max_batches=config.data.validation_batches,
    )  # fmt: skip


@contextmanager
def _only_one(run: Path) -> Iterator[None]:
    """Holds the run's lock, which the system gives back even after a kill. Raises ConfigError if another process has it."""
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {run}: wait for it, or give another folder with --run") from None
        yield


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM append to; a second SIGINT interrupts at once."""
    received: list[int] = []

    def ask(number, _frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record_run(run: Path, config: TrainConfig, store: TokenStore) -> None:
    """Writes run.json and tokenizer.json for a new run, or checks that this is the run that the folder holds.

    A run is new until its first step is recorded: what failed before that binds nobody to its settings.
    """
    record, metrics = run / "run.json", run / METRICS
    if saved_steps(run) or (metrics.exists() and metrics.stat().st_size):
        try:
            before = json.loads(record.read_text(encoding="utf-8"))
            settings, tokenizer, tokens = before["config"].copy(), before["tokenizer_sha256"], before["train_tokens_sha256"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{record} is damaged or missing ({error!r}): put it back, or choose another folder with --run") from None
        check_same_run(settings, config, run)
        store.require_tokenizer(tokenizer)
        if tokens != store.digest("train"):
            raise InputError(f"{store.path} holds other tokens than those {run} began with: tokenize the same text, or choose another "
                             "folder with --run")
        return
    shutil.copyfile(store.path / "tokenizer.json", run / "tokenizer.json")
    contents = {
        "config": recorded(config),
        "tokenizer_sha256": store.manifest.tokenizer_sha256,
        "train_tokens_sha256": store.digest("train"),
        "versions": versions(),
    }
    part = run / "run.json.part"
    part.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    os.replace(part, record)


def _greeting(config: TrainConfig, store: TokenStore, trainer: Trainer, first: int) -> str:
    devices = trainer.mesh.devices
    tokens = config.steps * config.data.batch_size * config.data.sequence_length
    schedule = config.model.schedule
    return "\n".join([
        f"{config.name}: {lf.parameter_count(config.model):,} parameters, {config.model.num_lanes} lanes, layout {config.model.layout} "
        f"({schedule.num_reductions} reductions per pass for {schedule.num_modules} modules)",
        f"on {devices.size} x {devices.flat[0].device_kind} (data {devices.shape[0]} x lane {devices.shape[1]}), "
        f"products in {trainer.precision.compute}",
        f"{tokens:,} tokens = {tokens / store.tokens('train'):.2f} epochs of {store.path} ({store.tokens('train'):,} tokens), "
        f"{config.steps} steps of {config.data.batch_size} x {config.data.sequence_length}",
        f"going on after step {first} of {config.run_folder}" if first else f"new run in {config.run_folder}",
    ])  # fmt: skip
