"""Saves and restores a run with Orbax: asynchronous, atomic, on any mesh."""

import logging
import os
import platform
import subprocess
import time
from pathlib import Path

import flax
import jax
import optax
import orbax.checkpoint as ocp

from laneformer.checkpoint import META, PARAMS, STEPS, complete_steps
from laneformer.errors import CheckpointError
from laneformer.hf_config import config_to_hf
from train.config import TrainConfig, recorded
from train.step import State, Trainer

log = logging.getLogger("laneformer")

OPTIMIZER = "optimizer"  # moments and the step counter, beside the params and meta that inference reads


class Checkpoints:
    """The saved steps of one run: RUN/checkpoints/STEP/{params, optimizer, meta}.

    A step's folder gets its name when its last file is written, so a kill at any moment leaves only complete ones.
    """

    def __init__(self, config: TrainConfig, tokenizer_sha256: str):
        self.run, self.config = config.run_folder.absolute(), config
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=True, create=True)
        self.manager = ocp.CheckpointManager(self.run / STEPS, options=options)
        self.meta = {
            "config": config_to_hf(config.model),
            "param_dtype": "float32",
            "tokenizer_sha256": tokenizer_sha256,
            "run": recorded(config),
            "versions": versions(),
        }

    def save(self, state: State, step: int) -> None:
        """Starts writing the state and returns once it is copied. Raises CheckpointError if this or the previous save failed."""
        items = {
            PARAMS: ocp.args.StandardSave(state.params),
            OPTIMIZER: ocp.args.StandardSave({"state": state.optimizer, "step": state.step}),
            META: ocp.args.JsonSave(self.meta | {"step": step, "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}),
        }
        try:
            self.manager.save(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot save step {step} in {self.run / STEPS}: {_first_line(error)}") from error

    def restore(self, trainer: Trainer) -> State | None:
        """The newest step that can be read, on the trainer's mesh; None if nothing was ever saved.

        A damaged step is moved aside, reported, and the one before it taken. Raises CheckpointError if none can be read.
        """
        steps = complete_steps(self.run)
        for step in reversed(steps):
            wanted = trainer.abstract_state()
            items = {
                PARAMS: ocp.args.StandardRestore(wanted.params),
                OPTIMIZER: ocp.args.StandardRestore({"state": wanted.optimizer, "step": wanted.step}),
            }
            try:
                found = self.manager.restore(step, args=ocp.args.Composite(**items))
            except (OSError, ValueError, KeyError) as error:
                aside = self.run / f"damaged-{step}"
                log.warning("checkpoint of step %d is damaged (%s): moved to %s", step, _first_line(error), aside)
                os.rename(self.run / STEPS / str(step), aside)
                self.manager.reload()
                continue
            return State(found[PARAMS], found[OPTIMIZER]["state"], found[OPTIMIZER]["step"])
        if steps:
            raise CheckpointError(f"no checkpoint in {self.run / STEPS} can be read; to start anew, choose another folder with --run")
        return None

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises CheckpointError if it failed."""
        try:
            self.manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot save in {self.run / STEPS}: {_first_line(error)}") from error

    def close(self) -> None:
        """Waits for the last save and ends its threads."""
        self.manager.close()


def versions() -> dict[str, str | None]:
    """What computed this run: packages, Python, and the project's git commit where there is one."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
