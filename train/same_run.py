"""Whether a config continues a recorded run: it may change what no step that is done depends on."""

import dataclasses
import fnmatch
from collections.abc import Collection
from pathlib import Path
from typing import Any

from laneformer.errors import ConfigError
from laneformer.train.config import FIRST, DistillConfig, OptimizerConfig, TrainConfig, recorded

# Fields that a resumed run may change: they affect the result by rounding at most.
_FREE = (
    "run",
    "name",
    "log_every",
    "validate_every",
    "save_every",
    "keep",
    "keep_every",
    "remat",
    "loss_chunk",
    "mesh.*",
    "watch.*",
    "initial",
    "distill.teacher",
    "distill.student",  # the name of `initial` in older runs
    "*data.path",
    "*data.validation_path",
    "*data.validation_batches",
)
# Fields of a phase that have no effect before its learning rate falls.
_OF_THE_FALL = ("steps", *(f"optimizer.{name}" for name in ("schedule", "decay", "decay_fraction", "final_fraction")))


def check_same_run(
    before: dict[str, Any], config: TrainConfig, run: Path, done: int | None = None
) -> dict[str, tuple[object, object]]:
    """The settings that differ from those in the record `before` of a run, name -> (recorded, now), except free ones.

    done: steps of the run that are done (default: all). Raises ConfigError, naming the options, if `config` would
    change one of them.
    """
    now = recorded(config)
    # Runs recorded before the section distill existed distilled nothing.
    before = {f"distill.{name}": value for name, value in dataclasses.asdict(DistillConfig()).items()} | before
    changed = {
        name: (before.get(name), now.get(name))
        for name in sorted(now.keys() | before.keys())
        if before.get(name) != now.get(name) and not any(fnmatch.fnmatchcase(name, free) for free in _FREE)
    }
    refused = _change_done_steps(changed, before, config, done)
    if refused:
        listed = ", ".join(f"{name} (was {changed[name][0]!r}, now {changed[name][1]!r})" for name in refused[:6])
        more = ""
        if any(name.split(".")[-1] == "steps" for name in refused):
            more = "; once the learning rate falls, add a phase to train longer"
        if "skip_steps" in refused:
            more = f"; to skip steps that are done, move the checkpoints after them out of {run / 'checkpoints'}"
        raise ConfigError(
            f"{run} holds a run with other settings: {listed}; restore them, or choose another folder with --run{more}"
        )
    return changed


def _change_done_steps(
    changed: Collection[str], before: dict[str, Any], config: TrainConfig, done: int | None
) -> list[str]:
    """The names in `changed` that would change a step that is done: see `check_same_run`."""
    phase_options = {"steps", "accumulate", "weights", "group"}

    def phase_of(name: str) -> str | None:
        """The phase that an option belongs to, None for the whole run."""
        parts = name.split(".")
        in_first = parts[0] in ("data", "optimizer") or name in phase_options
        return parts[1] if parts[0] == "then" else FIRST if in_first else None

    allowed, first = set(), 0
    names = list(dict.fromkeys([FIRST, *(name.split(".")[1] for name in before if name.startswith("then."))]))
    steps = [before["steps" if name == FIRST else f"then.{name}.steps"] for name in names]
    done = sum(steps) if done is None else done
    started = [name for n, name in enumerate(names) if sum(steps[:n]) < done]
    if [phase.name for phase in config.phases][: len(started)] == started:
        allowed |= {name for name in changed if phase_of(name) not in (None, *started)}
        last = config.phases[len(started) - 1]
        prefix = "" if last.name == FIRST else f"then.{last.name}."
        fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
        old = OptimizerConfig(
            **{name: before[key] for name in fields if (key := f"{prefix}optimizer.{name}") in before}
        )
        first, length = sum(steps[: len(started) - 1]), steps[len(started) - 1]
        if done - first <= min(old.steady_steps(length), last.optimizer.steady_steps(last.steps)):
            allowed |= {prefix + name for name in _OF_THE_FALL}
    if "skip_steps" in changed:
        other = dataclasses.replace(config, skip_steps=tuple(before.get("skip_steps") or ()))
        pairs = zip(other.phases, config.phases, strict=True)
        if all(a.batch_of(n) == b.batch_of(n) for a, b in pairs for n in range(min(a.steps, done - a.first_step))):
            allowed.add("skip_steps")
    return [name for name in changed if name not in allowed]
