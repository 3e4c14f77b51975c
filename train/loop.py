"""The training loop: runs the phases in order, resumes exactly, validates, saves, and stops cleanly on a signal."""

import math
import signal
import time
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Self

import jax
from jax.sharding import Mesh

import laneformer as lf
from laneformer.errors import ConfigError, LaneformerError
from laneformer.interrupts import Stopped, StopSignals, stop_signals
from laneformer.mesh import DATA, LANE, keep_freed_memory
from laneformer.processes import fail_together, join_job
from laneformer.train.checkpoint import Checkpoints
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.data.batches import Batches, HeldOut, Prefetch, validation_sets
from laneformer.train.distill import Distillation, annealed
from laneformer.train.evaluation import Evaluation, Problems, due
from laneformer.train.initial import check_initial, read_state
from laneformer.train.metrics.profiler import Profile
from laneformer.train.metrics.run_log import RunLog, measured
from laneformer.train.program.program import save_program
from laneformer.train.run_folder import Stores, any_of, only_one, open_stores, record_run
from laneformer.train.step import State, Trainer, precision_of


class Interrupted(Exception):
    """The run stopped after a signal; its state is saved."""

    def __init__(self, number: int, step: int):
        after = f"after step {step}, which is saved" if step else "before the first step"
        super().__init__(f"stopped by {signal.Signals(number).name} {after}")
        self.signal = number


def train(config: TrainConfig) -> None:
    """Runs `config` to the end of its last phase, starting at the newest checkpoint in its folder, if any.

    Writes RUN/{run.json, tokenizer.json, metrics.jsonl, program/, checkpoints/STEP}. On the same number of devices the
    same config gives bitwise equal losses and weights, however often the run is stopped. On another number of devices
    they agree to rounding. Raises LaneformerError for a user's mistake and Interrupted after SIGINT or SIGTERM.
    """
    if config.mesh.host_devices:
        lf.use_host_devices(config.mesh.host_devices)
        keep_freed_memory()
    if config.mesh.distributed:
        join_job()
    run, speaks = config.run_folder, jax.process_index() == 0
    with ExitStack() as stack:
        with fail_together():
            stores = open_stores(config)
            data = {phase.name: PhaseData.open(phase, stores) for phase in config.phases}
            mesh = _mesh(config)
            distillation = Distillation(config, mesh, precision_of(config, mesh))
            if config.initial is not None:
                check_initial(config, any_of(stores).manifest.tokenizer_sha256)
            if speaks:
                stack.enter_context(only_one(run))
                record_run(config, stores)
        checkpoints = Checkpoints(config, any_of(stores).manifest.tokenizer_sha256)
        stack.callback(checkpoints.close)
        state = checkpoints.restore(lambda step: Trainer(config, config.phase_at(step - 1), mesh).abstract_state())
        first = 0 if state is None else int(state.step)
        last = config.phase_at(first - 1)  # the phase of the last step
        made = measured(run, first)
        missing = set(due(config, last, data[last.name].held_out, first)) - made if first else set()
        if first >= config.total_steps and not missing:
            if speaks:
                print(f"{run}: all {config.total_steps} steps are done, nothing to do")
            return
        with fail_together():
            distillation.record(run, new=first == 0)
        if speaks:
            print(_greeting(config, stores, mesh, first))
        stop = stack.enter_context(stop_signals())
        with fail_together():
            log = stack.enter_context(RunLog(config, mesh, first, stop))
            problems = _problems(config, first, stop)
            stack.enter_context(problems or nullcontext())
        loop = _Loop(config, mesh, data, distillation, checkpoints, log, stop, problems)
        if missing and state is not None:
            loop.measure_again(last, state, made)
        for phase in config.phases:
            if first < phase.last_step:
                state = loop.run(phase, state, max(first, phase.first_step))
        if speaks:
            print(
                f"{run}: {config.total_steps} steps done, last checkpoint in"
                f" {run / 'checkpoints' / str(config.total_steps)}"
            )


@dataclass(frozen=True)
class PhaseData:
    """The data of a phase: training batches, and held-out batches by tag."""

    batches: Batches
    held_out: dict[str, HeldOut]

    @classmethod
    def open(cls, phase: Phase, stores: Stores) -> Self:
        """Opens the data of `phase`. Raises InputError or ConfigError if the stores cannot supply it."""
        train, extra = ([stores[path] for path in paths] for paths in (phase.data.path, phase.data.validation_path))
        # A later phase that reads the same folder reads it in another order.
        seed = phase.data.seed + 1_000_003 * phase.index
        return cls(Batches(phase.data, train, seed, phase.batch_of), validation_sets(phase.data, train, extra))


class _Loop:
    """Runs step after step; fetches the metrics of a step while the next one runs."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        data: dict[str, PhaseData],
        distillation: Distillation,
        checkpoints: Checkpoints,
        log: RunLog,
        stop: StopSignals,
        problems: Problems | None,
    ):
        self.config, self.mesh, self.data, self.distillation = config, mesh, data, distillation
        self.checkpoints, self.log, self.stop, self.problems = checkpoints, log, stop, problems
        self.asked_by_any = False  # whether a fetched step reported that some process asked to stop

    def run(self, phase: Phase, state: State | None, first: int) -> State:
        """Runs the phase from step `first` to its end. Raises Interrupted after a signal."""
        clock, data = self.log.clock, self.data[phase.name]
        self.phase, self.batches = phase, data.batches
        trainer = self.trainer = Trainer(self.config, phase, self.mesh, data.batches.keys)
        self.evaluation = Evaluation(self.config, phase, trainer, data.held_out, self.problems)
        with clock("compile"):
            self._compile(annealed(self.config, phase, first))
            self.asked = {wish: trainer.put_asked(wish) for wish in (False, True)}
            if state is None:
                state = trainer.init() if self.config.initial is None else read_state(self.config, trainer)
            elif first == phase.first_step and phase.index > 0:
                state = trainer.adopt(state, self.config.phases[phase.index - 1])

        def batch(step: int):
            return trainer.put_batch(lambda rows: self.batches.batch_at(step - phase.first_step, rows))

        with Prefetch(batch, range(first, phase.last_step)) as stream, ExitStack() as stack:
            watch = self.config.watch
            profile = None
            if watch.profile_at:
                folder = self.config.run_folder / "profile"
                profile = stack.enter_context(Profile(folder, watch.profile_at, watch.profile_steps))
            return self._steps(state, stream, profile)

    def measure_again(self, phase: Phase, state: State, made: Collection[str]) -> None:
        """Makes the measurements after the last step that an interruption has prevented. made: the others.

        Raises Interrupted after a signal.
        """
        data, step = self.data[phase.name], int(state.step)
        trainer = Trainer(self.config, phase, self.mesh, data.batches.keys)
        evaluation = Evaluation(self.config, phase, trainer, data.held_out, self.problems)
        with self.log.clock("eval"):
            stopped = evaluation.measure(state.params, step, self.log, self.stop, made)
        if stopped:
            raise self._interrupted(step)

    def _compile(self, phase: Phase) -> None:
        """Compiles the step and records its program. phase: the current phase, with the layout of this step."""
        trainer = self.trainer if phase is self.phase else Trainer(self.config, phase, self.mesh, self.batches.keys)
        lowered = trainer.lower_step()
        self.step, self.compiled = lowered.compile(), phase
        if self.log.writes:
            save_program(lowered, self.step, self.config.run_folder / "program", phase.name, self.mesh)

    def _steps(self, state: State, stream: Prefetch, profile: Profile | None) -> State:
        clock = self.log.clock
        pending: tuple[int, dict, float] | None = None  # a step that is not logged yet: see `_fetch`
        while True:
            waiting = time.perf_counter()
            try:
                with clock("data"):
                    before, batch = next(stream)
            except (LaneformerError, OSError):  # damaged data: save, so that the run resumes here after a repair
                if pending is not None and jax.process_count() == 1:
                    self._fetch(*pending)
                    self._save(state, pending[0])
                    self.checkpoints.wait()
                raise
            wait = time.perf_counter() - waiting
            if (now := annealed(self.config, self.phase, before)) != self.compiled:
                if pending is not None:
                    with clock("step"):
                        self._fetch(*pending)
                    pending = None
                with clock("compile"):
                    self._compile(now)
            with clock("step"):
                if profile:
                    profile.on_step(before + 1, state)
                state, values = self.step(state, self.distillation.teach(batch), self.asked[bool(self.stop)])
                if pending is not None:
                    self._fetch(*pending)
            step = before + 1
            pending = (step, values, wait)
            self.checkpoints.check()
            done, stopping = step == self.phase.last_step, self._stopping()
            saving = done or stopping or step % self.config.save_every == 0
            if saving or self.evaluation.due(step):
                with clock("step"):
                    self._fetch(*pending)
                pending = None
                if saving:  # before measuring, which may fail
                    self._save(state, step)
                with clock("eval"):
                    ended = self.evaluation.measure(state.params, step, self.log, self.stop)
                stopping = stopping or ended or self._stopping()
                if stopping and not saving:
                    self._save(state, step)
            if done or stopping:
                with clock("save"):
                    self.checkpoints.wait()
            if stopping:
                raise self._interrupted(step)
            if done:
                return state

    def _interrupted(self, step: int) -> Interrupted:
        return Interrupted(self.stop[0] if self.stop else signal.SIGTERM, step)

    def _stopping(self) -> bool:
        """Whether to stop after this step. Several processes agree, because all read the answer from the same step."""
        return bool(self.stop) if jax.process_count() == 1 else self.asked_by_any

    def _fetch(self, step: int, values: dict, wait: float) -> None:
        """Waits for the metrics of `step` and logs them. wait: seconds that the loop waited for the step's batch."""
        values = jax.tree.map(lambda value: value.tolist(), jax.device_get(values))
        self.asked_by_any |= bool(values.pop("asked"))
        self.log.step(self.phase, step, values, self.batches.epochs_at(step - self.phase.first_step), wait)

    def _save(self, state: State, step: int) -> None:
        with self.log.clock("save"):
            self.log.sync()
            self.checkpoints.save(state, step)


def _problems(config: TrainConfig, first: int, stop: StopSignals) -> Problems | None:
    """The programming problems of the run, checked. Raises Interrupted after a signal. first: steps that are done."""
    if not config.watch.humaneval_every:
        return None
    try:
        with stop.at_once():
            return Problems(config, new=first == 0)
    except Stopped:
        raise Interrupted(stop[0], first) from None


def _mesh(config: TrainConfig) -> Mesh:
    """The mesh of the run. Raises ConfigError if it is impossible, or leaves devices of a job with several processes
    unused.
    """
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane)
    if jax.process_count() > 1 and mesh.size < jax.device_count():
        lane = math.gcd(mesh.shape[LANE], jax.device_count())
        also = "" if config.mesh.lane in (None, lane) else f" --mesh.lane {lane}"
        raise ConfigError(
            f"mesh {mesh.shape[DATA]} x {mesh.shape[LANE]} uses {mesh.size} of the job's {jax.device_count()} devices;"
            f" set --mesh.data {jax.device_count() // lane}{also}, or start fewer processes"
        )
    return mesh


def _greeting(config: TrainConfig, stores: Stores, mesh: Mesh, first: int) -> str:
    devices, schedule = mesh.devices, config.model.schedule
    read = f" ({lf.parameters_per_token(config.model):,} per token)"
    per_token = "" if config.model.num_experts is None else read
    lines = [
        (
            f"{config.name}: {lf.parameter_count(config.model):,} parameters{per_token}, {config.model.num_lanes}"
            f" lanes, layout {config.model.layout} ({schedule.num_reductions} reductions per pass for"
            f" {schedule.num_modules} modules)"
        ),
        (
            f"on {devices.size} x {devices.flat[0].device_kind} (data {devices.shape[0]} x lane {devices.shape[1]}), "
            f"products in {precision_of(config, mesh).compute}"
        ),
    ]
    if unused := jax.device_count() - mesh.size:
        lines.append(
            f"{unused} of {jax.device_count()} devices are unused; set --mesh.data and --mesh.lane to use them"
        )
    for phase in config.phases:
        tokens = phase.steps * phase.tokens_per_step
        there = sum(stores[path].tokens("train") for path in phase.data.path)
        lines.append(
            f"{f'phase {phase.name}: ' if config.then else ''}{tokens:,} tokens = {tokens / there:.2f} epochs of"
            f" {', '.join(map(str, phase.data.path))} ({there:,} tokens), {phase.steps} steps of"
            f" {phase.data.batch_size} x {phase.data.sequence_length}"
        )
    lines.append(f"resuming {config.run_folder} after step {first}" if first else f"new run in {config.run_folder}")
    return "\n".join(lines)
