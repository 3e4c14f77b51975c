"""What the worker processes of one test run share."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def shared_folder(tmp_path_factory) -> Path:
    """The folder of this test run, the same for all of its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder's path that `make` fills, called by the first worker that asks; the others wait for it. Read only."""
    folder = shared_folder(tmp_path_factory) / name
    done = folder.with_suffix(".made")
    with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
