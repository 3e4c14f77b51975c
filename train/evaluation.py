"""Measurements between steps: held-out loss per set, statistics of the lanes, text samples, programming problems."""

import json
import math
from pathlib import Path

import jax

from infer.evaluate.humaneval import evaluate
from infer.evaluate.problems import load_problems
from infer.evaluate.scoring import Judge
from laneformer.errors import ConfigError, InputError
from train.config import Phase, TrainConfig, WatchConfig
from train.data.batches import HeldOut, Rows
from train.metrics.held import Bf12Statistic
from train.metrics.run_log import RunLog
from train.samples import LiveEngine, Samples
from train.step import Trainer

Params = dict[str, jax.Array]


class Evaluation:
    """The measurements of one phase. Every process of the job must call `measure` with the same steps."""

    def __init__(self, config: TrainConfig, phase: Phase, trainer: Trainer, sets: dict[str, HeldOut]):
        """sets: held-out text by tag. Raises InputError for prompts that do not fit the model."""
        self.config, self.phase, self.trainer, self.sets = config, phase, trainer, sets
        # No kernel holds experts in 12 bits.
        self.bf12 = Bf12Statistic(phase.model, trainer.mesh) if phase.model.num_experts is None else None
        watch, run = config.watch, config.run_folder
        live = LiveEngine(phase.model, trainer.mesh, trainer.precision, run / "tokenizer.json")
        self.samples = Samples(live, watch.prompts, max_new_tokens=watch.sample_tokens) if watch.samples_every else None
        self.problems = Problems(live, watch, run / "humaneval") if watch.humaneval_every else None

    def close(self) -> None:
        """Releases the sandbox of the programming problems."""
        if self.problems is not None:
            self.problems.judge.close()

    def due(self, step: int) -> bool:
        """Whether anything is measured after this step."""
        return any(self._due(step, every) for every in self._every())

    def measure(self, params: Params, step: int, log: RunLog) -> None:
        """Runs the measurements that are due after this step, and logs them."""
        if self.sets and self._due(step, self.config.validate_every):
            log.record(step, {"validation": {tag: self._validate(params, tag, step, log) for tag in self.sets}})
            if self.bf12 is not None:
                log.record(step, {"bf12": self.bf12(params)})
            model = self.phase.model  # with several residual streams, the lanes are equal
            if self.config.watch.lanes and model.num_lanes > 1 and model.residual_streams is None:
                log.record(step, {"lanes": self._lanes(params)})
        if self.samples is not None and self._due(step, self.config.watch.samples_every):
            log.sample(step, self.samples.draw(self.trainer.held(params)))
        if self.problems is not None and self._due(step, self.config.watch.humaneval_every):
            found = self.problems.solve(self.trainer.held(params), step)
            log.record(step, {"humaneval": found}, f"{found['passed']} of {found['total']} programming problems solved")

    def _every(self) -> list[int]:
        """Steps between the requested measurements."""
        watch, asked = self.config.watch, [self.config.validate_every] * bool(self.sets)
        return asked + [every for every in (watch.samples_every, watch.humaneval_every) if every]

    def _due(self, step: int, every: int) -> bool:
        return step == self.phase.last_step or step % every == 0

    def _validate(self, params: Params, tag: str, step: int, log: RunLog) -> dict[str, float]:
        """Mean loss on the set `tag` in nats per token, and bits per byte if every token of its text counts."""
        held_out = self.sets[tag]
        sums = [jax.device_get(self.trainer.evaluate(params, self._put(rows))) for rows in held_out.batches]
        found = {"loss": float(sum(s["nll"] for s in sums) / sum(s["weight"] for s in sums))}
        line = f"validation loss {found['loss']:.4f}"
        if held_out.tokens_per_byte is not None:
            found["bits_per_byte"] = found["loss"] / math.log(2) * held_out.tokens_per_byte
            line += f", {found['bits_per_byte']:.4f} bits per byte"
        log.record(step, {}, line + (f" ({tag})" if len(self.sets) > 1 else ""))
        return found

    def _lanes(self, params: Params) -> dict[str, list[float | None]]:
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
    """Programming problems solved with weights that are being trained, greedily: see infer/evaluate/humaneval.py."""

    def __init__(self, live: LiveEngine, watch: WatchConfig, folder: Path):
        """folder: where to write STEP.json with every verdict.

        Raises ConfigError or InputError in a job of several processes, without a tokenizer, or without a sandbox.
        """
        if jax.process_count() > 1:
            raise ConfigError(
                "watch.humaneval_every works in one process only; leave it out, and evaluate checkpoints with python -m"
                " infer humaneval"
            )
        if live.tokenizer is None:
            raise InputError(
                "watch.humaneval_every needs a tokenizer, and the data has no readable tokenizer.json; leave it out"
            )
        self.live, self.folder, self.tokens = live, folder, watch.humaneval_tokens
        problems = load_problems(watch.humaneval)
        self.problems = problems.first(watch.humaneval_problems) if watch.humaneval_problems else problems
        self.judge = Judge()

    def solve(self, params: Params, step: int) -> dict[str, float]:
        """Writes all verdicts and returns passed, total and pass@1 of the model with the weights `params`."""
        report = evaluate(
            self.live.holding(params), self.problems, max_new_tokens=self.tokens, judge=self.judge
        ).as_json()
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{step}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return {name: report[name] for name in ("passed", "total", "pass@1")}
