"""Saves and restores a run with Orbax, asynchronously and atomically, on any mesh."""

import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import flax
import jax
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as keeping

from laneformer.checkpoint import META, PARAMS, STEPS, fingerprint
from laneformer.errors import CheckpointError, one_line
from laneformer.hf import config_to_hf
from laneformer.processes import all_agree
from laneformer.train.config import TrainConfig, recorded
from laneformer.train.step import State

OPTIMIZER = "optimizer"  # moments and step counter; inference reads only params and meta


class Checkpoints:
    """The saved steps of one run: RUN/checkpoints/STEP/{params, optimizer, meta}.

    A step's folder gets its name when its last file is written, so a kill at any moment leaves only complete steps. A
    restored state must have the fingerprint recorded when it was saved.
    """

    def __init__(self, config: TrainConfig, tokenizer_sha256: str):
        self.run = config.run_folder.absolute()
        self.saving: int | None = None  # the last step that `save` was given
        kept = [keeping.LatestN(config.keep), keeping.CustomSteps([phase.last_step for phase in config.phases])]
        kept += [keeping.EveryNSteps(config.keep_every)] if config.keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keeping.AnyPreservationPolicy(kept),
            enable_async_checkpointing=True,
            create=True,
            cleanup_tmp_directories=True,
        )
        self.manager = ocp.CheckpointManager(self.run / STEPS, options=options)
        self.config = config
        self.meta = {
            "param_dtype": "float32",
            "tokenizer_sha256": tokenizer_sha256,
            "run": recorded(config),
            "versions": versions(),
        }

    def save(self, state: State, step: int) -> None:
        """Starts to write the state and returns once the state is copied. Raises CheckpointError if any save failed."""
        self.wait()
        self.saving = step
        needed, free = sum(x.nbytes for x in jax.tree.leaves(state)), shutil.disk_usage(self.run).free
        if free < needed:
            raise self._failed(f"it needs {needed:,} bytes and the disk has {free:,} left")
        optimizer = {"state": state.optimizer, "step": state.step}
        phase = self.config.phase_at(step - 1)
        meta = self.meta | {
            "config": config_to_hf(phase.model),
            "step": step,
            "phase": phase.name,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "fingerprint": {PARAMS: fingerprint(state.params), OPTIMIZER: fingerprint(optimizer)},
        }
        items = {
            PARAMS: ocp.args.StandardSave(state.params),
            OPTIMIZER: ocp.args.StandardSave(optimizer),
            META: ocp.args.JsonSave(meta),
        }
        with self._saving():
            if not self.manager.save(step, args=ocp.args.Composite(**items)):
                raise self._failed("a later step is saved")

    def restore(self, wanted: Callable[[int], State]) -> State | None:
        """Restores the newest readable step with the shapes and shardings of wanted(step); None if nothing is saved.

        Reports newer, damaged steps and moves them aside. Raises CheckpointError, and moves nothing, if no step is
        readable.
        """
        damaged: dict[int, str] = {}
        for step in reversed(saved_steps(self.run)):
            state = None
            try:
                state = self._read(step, wanted(step))
            except Exception as error:  # Orbax raises any type that its threads raise, even a bare Exception
                damaged[step] = one_line(error)
            if not all_agree(state is not None):
                damaged.setdefault(step, "another process could not read its part")
                continue
            for number, reason in damaged.items():
                self._move_aside(number, reason)
            return state
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(
                f"no checkpoint in {self.run / STEPS} can be read ({reasons}); restore a copy, or start again in"
                " another folder with --run"
            )
        return None

    def check(self) -> None:
        """Raises CheckpointError if the save in the background has failed."""
        with self._saving():
            self.manager.check_for_errors()

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises CheckpointError if it failed."""
        with self._saving():
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and ends the threads that save."""
        with self._saving():
            self.manager.close()

    def _read(self, step: int, wanted: State) -> State:
        items = {
            PARAMS: ocp.args.StandardRestore(wanted.params),
            OPTIMIZER: ocp.args.StandardRestore({"state": wanted.optimizer, "step": wanted.step}),
            META: ocp.args.JsonRestore(),
        }
        found = self.manager.restore(step, args=ocp.args.Composite(**items))
        for item in (PARAMS, OPTIMIZER):
            if fingerprint(found[item]) != found[META]["fingerprint"][item]:
                raise CheckpointError(f"{item} differs from what was saved: its fingerprint does not match")
        return State(found[PARAMS], found[OPTIMIZER]["state"], found[OPTIMIZER]["step"])

    def _move_aside(self, step: int, reason: str) -> None:
        if jax.process_index() == 0:
            names = (f"damaged-{step}" + (f"-{n}" if n else "") for n in itertools.count())
            aside = next(self.run / name for name in names if not (self.run / name).exists())
            print(f"warning: the checkpoint of step {step} is damaged ({reason}); moved to {aside}", file=sys.stderr)
            os.rename(self.run / STEPS / str(step), aside)
        all_agree(True)
        self.manager.reload()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns any error from Orbax into a CheckpointError that names the step being saved."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failed(one_line(error)) from error

    def _failed(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"cannot save step {self.saving} in {self.run / STEPS}: {reason}; fix that and run the same command again"
            " to resume from the last checkpoint"
        )


def saved_steps(run: Path) -> list[int]:
    """Saved steps of a run, ascending, damaged ones included."""
    folder = run / STEPS
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def versions() -> dict[str, str | None]:
    """Versions of packages and Python, and the project's git commit, None without a git repository."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "commit": commit,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "orbax": ocp.__version__,
    }
