"""Measurements between steps: held-out loss per set, statistics of the lanes, text samples, programming problems."""

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Self

import jax

from laneformer.errors import ConfigError, InputError, LaneformerError, one_line
from laneformer.infer.engine.engine import Engine
from laneformer.infer.evaluate.humaneval import evaluate
from laneformer.infer.evaluate.problems import load_problems
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.sandbox.sandbox import HarnessError
from laneformer.interrupts import Stopped, StopSignals
from laneformer.processes import all_agree
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.data.batches import HeldOut, Rows
from laneformer.train.metrics.held import Bf12Statistic
from laneformer.train.metrics.run_log import RunLog
from laneformer.train.samples import LiveEngine, Samples, read_tokenizer
from laneformer.train.step import Trainer

Params = dict[str, jax.Array]


def due(config: TrainConfig, phase: Phase, sets: Mapping[str, HeldOut], step: int) -> list[str]:
    """Names of the measurements that are due after this step of a phase, in the order in which they are made.

    sets: held-out text by tag.
    """
    watch, model, every = config.watch, phase.model, config.validate_every if sets else 0
    # No kernel holds experts in 12 bits; with several residual streams, the lanes are equal.
    lanes = watch.lanes and model.num_lanes > 1 and model.residual_streams is None
    planned = {
        "validation": every,
        "bf12": every if model.num_experts is None else 0,
        "lanes": every if lanes else 0,
        "samples": watch.samples_every,
        "humaneval": watch.humaneval_every,
    }
    return [name for name, every in planned.items() if every and (step == phase.last_step or step % every == 0)]


class Evaluation:
    """The measurements of one phase. Every process of the job must call `measure` with the same steps."""

    def __init__(
        self,
        config: TrainConfig,
        phase: Phase,
        trainer: Trainer,
        sets: dict[str, HeldOut],
        problems: "Problems | None" = None,
    ):
        """sets: held-out text by tag. Raises InputError for prompts that do not fit the model."""
        self.config, self.phase, self.trainer, self.sets = config, phase, trainer, sets
        watch = config.watch
        self.live = LiveEngine(phase.model, trainer.mesh, trainer.precision, config.run_folder / "tokenizer.json")
        self.kinds: dict[str, Callable[[Params, int], Any]] = {"validation": self._validation, "lanes": self._lanes}
        if phase.model.num_experts is None:
            statistic = Bf12Statistic(phase.model, trainer.mesh)
            self.kinds["bf12"] = lambda params, step: statistic(params)
        if watch.samples_every:
            samples = Samples(self.live, watch.prompts, max_new_tokens=watch.sample_tokens)
            self.kinds["samples"] = lambda params, step: samples.draw(trainer.held(params))
        if problems is not None:
            solve = problems.solve
            self.kinds["humaneval"] = lambda params, step: solve(self.live.holding(trainer.held(params)), step)

    def due(self, step: int) -> bool:
        """Whether anything is measured after this step."""
        return bool(due(self.config, self.phase, self.sets, step))

    def measure(self, params: Params, step: int, log: RunLog, stop: StopSignals, done: Collection[str] = ()) -> bool:
        """Makes and logs the measurements that are due after this step, except those in `done`.

        A measurement that fails is reported by a warning. A signal in `stop` ends the current one and leaves out the
        rest. Returns whether that happened, on every process of the job.
        """
        alone = jax.process_count() == 1
        for name in due(self.config, self.phase, self.sets, step):
            if name in done:
                continue
            if stop if alone else not all_agree(not stop):
                return True
            try:
                # A process of a job cannot leave a measurement alone: the others would wait for it.
                with stop.at_once() if alone else nullcontext():
                    found = self.kinds[name](params, step)
            except Stopped:
                return True
            except Exception as error:
                if not alone:
                    raise
                kind = "" if isinstance(error, LaneformerError) else f"{type(error).__name__}: "
                log.warn(step, f"measurement {name} failed: {kind}{one_line(error)}")
                continue
            if name == "samples":
                log.sample(step, found)
            else:
                log.record(step, {name: found}, *self._lines(name, found))
        return False

    def _lines(self, name: str, found: dict) -> list[str]:
        """Lines about a measurement for the terminal."""
        if name == "humaneval":
            return [f"{found['passed']} of {found['total']} programming problems solved"]
        lines = []
        for tag, values in found.items() if name == "validation" else ():
            also = f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
            lines.append(f"validation loss {values['loss']:.4f}{also}" + (f" ({tag})" if len(self.sets) > 1 else ""))
        return lines

    def _validation(self, params: Params, step: int) -> dict[str, dict[str, float]]:
        """By set: mean loss in nats per token, and bits per byte if every token of its text counts."""
        return {tag: self._held_out_loss(params, held_out) for tag, held_out in self.sets.items()}

    def _held_out_loss(self, params: Params, held_out: HeldOut) -> dict[str, float]:
        sums = [jax.device_get(self.trainer.evaluate(params, self._put(rows))) for rows in held_out.batches]
        found = {"loss": float(sum(s["nll"] for s in sums) / sum(s["weight"] for s in sums))}
        if held_out.tokens_per_byte is not None:
            found["bits_per_byte"] = found["loss"] / math.log(2) * held_out.tokens_per_byte
        return found

    def _lanes(self, params: Params, step: int) -> dict[str, list[float | None]]:
        """Statistics of the lanes by time in the schedule, and of their experts by layer with experts.

        See `Laneformer.lane_statistics`.
        """
        rows = next(iter(self.sets.values())).batches[0]
        found = {name: x.tolist() for name, x in jax.device_get(self.trainer.lanes(params, self._put(rows))).items()}
        ratio = [landed / own if own else None for landed, own in zip(found["landed"], found["own"], strict=True)]
        experts = {"experts_in_common": found["in_common"]} if "in_common" in found else {}
        return {"similarity": found["similarity"], "landed_over_own": ratio, **experts}

    def _put(self, rows: Rows):
        return self.trainer.put_batch(lambda span: {key: values[span] for key, values in rows.items()}, rows)


class Problems:
    """Programming problems solved with weights that are being trained, greedily: see infer/evaluate/humaneval.py.

    `close` it, or use it in a `with` block.
    """

    def __init__(self, config: TrainConfig, new: bool):
        """Reads the problems and runs their reference solutions. new: whether the run has no step yet.

        Raises ConfigError or InputError in a job of several processes, without a tokenizer, or without a sandbox, and
        HarnessError if a reference solution fails; in a run with steps, that is a warning.
        """
        watch, run = config.watch, config.run_folder
        if jax.process_count() > 1:
            raise ConfigError(
                "watch.humaneval_every works in one process only; leave it out, and evaluate checkpoints with python -m"
                " infer humaneval"
            )
        if read_tokenizer(run / "tokenizer.json", config.model) is None:
            raise InputError(
                "watch.humaneval_every needs a tokenizer, and the data has no readable tokenizer.json; leave it out"
            )
        self.folder, self.tokens = run / "humaneval", watch.humaneval_tokens
        problems = load_problems(watch.humaneval_file)
        self.problems = problems.first(watch.humaneval_problems) if watch.humaneval_problems else problems
        self.judge = Judge()
        try:
            self.judge.verify(self.problems.problems)
        except HarnessError as error:
            if new:
                self.close()
                raise
            print(f"warning: watch.humaneval: {one_line(error)}", file=sys.stderr)
        except BaseException:
            self.close()
            raise

    def solve(self, engine: Engine, step: int) -> dict[str, float]:
        """Writes all verdicts to RUN/humaneval/STEP.json and returns passed, total and pass@1 of the engine."""
        report = evaluate(engine, self.problems, max_new_tokens=self.tokens, judge=self.judge).as_json()
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{step}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return {name: report[name] for name in ("passed", "total", "pass@1")}

    def close(self) -> None:
        """Releases the sandbox."""
        self.judge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()
