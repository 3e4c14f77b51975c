"""Sandboxes of each level that this machine can run."""

import shutil
from functools import cache

import pytest

from infer.sandbox.sandbox import Limits, Sandbox
from laneformer.errors import ConfigError

LIMITS = Limits(cpu_seconds=5, wall_seconds=20)
ISOLATING = ("bwrap", "unshare")


@cache
def usual_level() -> str:
    """The level auto; resource limits where this machine isolates nothing."""
    try:
        Sandbox().close()
    except ConfigError:
        return "rlimits"
    return "auto"


def open_sandbox(level: str) -> Sandbox:
    """A sandbox of a level. Bubblewrap must work if it is installed; a machine may forbid unshare. Skips otherwise."""
    if level == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        return Sandbox(level)
    except ConfigError as error:
        if level == "unshare":
            pytest.skip(str(error))
        raise


def verdict(box: Sandbox, solution: str, test: str = "", limits: Limits = LIMITS) -> tuple[str, str]:
    """The verdict and the error of a program."""
    outcome = box.run(solution, test, limits)
    return outcome.verdict, outcome.error


def attack(box: Sandbox, code: str, limits: Limits = LIMITS) -> None:
    """Runs code that must run to its end; it asserts that what it tries fails."""
    assert verdict(box, code, "", limits) == ("passed", "")
