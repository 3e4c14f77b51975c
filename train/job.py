"""What the processes of a job tell each other beside the steps they do together."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from laneformer.errors import ConfigError, LaneformerError


def all_processes(true: bool) -> bool:
    """Whether it is true on every process; returns when all have asked."""
    return bool(_of_each(true).all())


@contextmanager
def together() -> Iterator[None]:
    """Leaves when every process of the job has come to the end of it; where one has met a user's mistake, all raise an
    error.

    That one its own, which names the mistake; the others a ConfigError that names the process.
    """
    mistake = None
    try:
        yield
    except (LaneformerError, OSError) as error:
        mistake = error
    refusing = np.flatnonzero(_of_each(mistake is not None))
    if mistake is not None:
        raise mistake
    if refusing.size:
        raise ConfigError(f"refused by process {', '.join(map(str, refusing))} of the job: see what it says")


def _of_each(true: bool) -> np.ndarray:
    """What each process has asked with, bool [processes]."""
    return (
        np.array([true]) if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(np.bool_(true)))
    )
