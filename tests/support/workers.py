"""Folders that the worker processes of a test run share."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def shared_folder(tmp_path_factory) -> Path:
    """The folder of this test run, which all of its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """Path of a folder filled by `make`, which only the first worker to request the folder calls. The other workers
    wait until it is done. Tests must not change the folder.
    """
    folder = shared_folder(tmp_path_factory) / name
    done = folder.with_suffix(".made")
    with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
