"""What the commands do before they open an engine."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import jax

from infer.engine.engine import Engine
from laneformer.errors import ConfigError
from laneformer.mesh import use_host_devices
from laneformer.processes import GroupError, join_job


def show_log() -> None:
    """What the engine says of its choices goes to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("infer", "laneformer"):
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger().handlers = []  # one that an imported library made would print each line again


def take_devices(count: int, distributed: bool = False) -> None:
    """Splits the CPU into so many devices, for where there is no GPU; or joins the other processes of the job that the
    devices belong to.

    Call before the first JAX operation. Raises ConfigError.
    """
    if count < 1:
        raise ConfigError(f"--devices {count}: give at least 1")
    if distributed:
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, and nobody here asks it
        join_job()
        if count < jax.process_count():
            raise ConfigError(
                f"--devices {count}: each of the job's {jax.process_count()} processes needs one, so give the number of"
                " all their GPUs"
            )
        if not speaks():
            logging.disable(logging.INFO)
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for the rest of the process
    elif count > 1:
        use_host_devices(count)


def speaks() -> bool:
    """Whether this process tells the user what all processes of the job have done."""
    return jax.process_index() == 0


@contextlib.contextmanager
def lead(engine: Engine) -> Iterator[None]:
    """What the process does that speaks, with what it generates. Raises ConfigError if another one is lost."""
    try:
        with engine.leading():
            yield
    except GroupError as error:
        raise ConfigError(str(error)) from None


def follow(engine: Engine) -> int:
    """What the others do: they generate with the first one until that has done. Raises ConfigError if it has gone."""
    try:
        engine.follow()
    except GroupError as error:
        raise ConfigError(str(error)) from None
    return 0
