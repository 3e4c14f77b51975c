"""Sandboxes of the levels that this machine supports, and runs of programs in them."""

import shutil
from functools import cache

import pytest

from laneformer.errors import ConfigError
from laneformer.infer.sandbox.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_seconds=5, wall_seconds=20)
ISOLATING = ("bwrap", "unshare")


@cache
def usual_level() -> str:
    """The level "auto", or "rlimits" if this machine supports no level that isolates programs."""
    try:
        Sandbox().close()
    except ConfigError:
        return "rlimits"
    return "auto"


def open_sandbox(level: str) -> Sandbox:
    """A sandbox of a level. Skips the test if bubblewrap is not installed or the machine forbids unshare. A bubblewrap
    that is installed must work.
    """
    if level == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        return Sandbox(level)
    except ConfigError as error:
        if level == "unshare":
            pytest.skip(str(error))
        raise


def verdict(box: Sandbox, solution: str, test: str = "", limits: Limits = LIMITS) -> tuple[str, str]:
    """Runs a program and returns its verdict and its error."""
    outcome = box.run(solution, test, limits)
    return outcome.verdict, outcome.error


def attack(box: Sandbox, code: str, limits: Limits = LIMITS) -> None:
    """Runs code that itself asserts that its attacks fail, and asserts that it ends normally."""
    assert verdict(box, code, "", limits) == ("passed", "")
