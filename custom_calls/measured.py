"""What a session measures once on a machine, kept beside the libraries that it compiles."""

import itertools
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from custom_calls import build
from custom_calls.library import speedup

log = logging.getLogger("custom_calls")
NAME = "measured.json"
KEPT = 50  # measurements in the file; older ones are dropped
Measurement = float | list[float]
T = TypeVar("T", float, list[float])


def bf12_gain(instructions: str, threads: int) -> float:
    """How many times as fast as with bfloat16 weights decoding is with weights in 12 bits."""
    gain, fresh = _speedup((instructions, True), (instructions, False), threads)
    if fresh:
        log.info("measured: weights in 12 bits are %.2f times as fast as in 16 here", gain)
    return gain


def amx_gain(over: str, threads: int) -> float:
    """How many times as fast as with the instruction set `over` decoding is with AMX's sums of bfloat16 weights."""
    gain, fresh = _speedup(("amx", False), (over, False), threads)
    if fresh:
        log.info("measured: with AMX one position is %.2f times as fast as with %s here", gain, over)
    return gain


def pass_prices(what: str, measure: Callable[[], list[float]]) -> list[float]:
    """What passes cost over the first one: no less than 1, nor than a pass of fewer rows. what: the session. measure:
    seconds of passes of rising numbers of rows.
    """

    def judged() -> tuple[list[float], bool]:
        seconds = measure()
        return seconds, all(b >= 0.95 * a for a, b in itertools.pairwise(seconds))  # more rows are not faster

    seconds, fresh = _known(f"passes {what}", judged)
    prices = np.maximum.accumulate(np.divide(seconds, seconds[0])).tolist()
    if fresh:
        log.info("measured: passes of several rows cost %s of one", ", ".join(f"{price:.2f}" for price in prices))
    return prices


def _speedup(way: tuple[str, bool], over: tuple[str, bool], threads: int) -> tuple[float, bool]:
    """`speedup` of this machine, and whether it was measured now."""
    return _known(f"{way} {over} {threads}", lambda: speedup(way, over, threads))


def _known(what: str, measure: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
    """A measurement, made on the first call for these libraries and this processor; whether it was now. measure: also
    returns whether to keep it, which one that other processes disturbed is not.
    """
    path, key = build.cache() / NAME, f"{build.key()} {_processor()} {what}"
    known = _read(path)
    if key in known:
        return known[key], False
    found, steady = measure()
    if steady:
        _write(path, known | {key: found})
    return found, True


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path) -> dict[str, Measurement]:
    """{} if there is no such file, or not one of these."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and all(map(_fits, known.values())) else {}


def _fits(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and all(isinstance(one, float) for one in value))


def _write(path: Path, known: dict[str, Measurement]) -> None:
    """Replaces the file at once; a cache that cannot be written is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{NAME}.{os.getpid()}")
        unfinished.write_text(json.dumps(dict(list(known.items())[-KEPT:]), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.debug("%s was not written: %s", path, error)
