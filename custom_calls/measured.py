"""Measurements that a session makes once on each machine. A file beside the compiled libraries keeps them."""

import itertools
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from laneformer.custom_calls import build
from laneformer.custom_calls.library import speedup

log = logging.getLogger("laneformer")
NAME = "measured.json"
KEPT = 50  # most measurements in the file; the oldest are dropped
T = TypeVar("T", float, list[float])


def bf12_gain(instructions: str, threads: int) -> float:
    """Speed of decoding with weights in 12 bits, as a multiple of the speed with bfloat16 weights."""
    gain, fresh = _speedup((instructions, True), (instructions, False), threads)
    if fresh:
        log.debug("measured: weights in 12 bits are %.2f times as fast as in 16 bits on this machine", gain)
    return gain


def amx_gain(over: str, threads: int) -> float:
    """Speed of decoding bfloat16 weights with AMX, as a multiple of the speed with the instruction set `over`."""
    gain, fresh = _speedup(("amx", False), (over, False), threads)
    if fresh:
        log.debug("measured: one position is %.2f times as fast with AMX as with %s on this machine", gain, over)
    return gain


def pass_prices(what: str, measure: Callable[[], list[float]]) -> list[float]:
    """Prices of passes with rising numbers of rows, as multiples of the time of the first pass. No price is below 1 or
    below the price of fewer rows.

    what: text that identifies the session. measure: returns the seconds of each pass.
    """

    def judged() -> tuple[list[float], bool]:
        seconds = measure()
        return seconds, all(b >= 0.95 * a for a, b in itertools.pairwise(seconds))  # more rows cannot be faster

    seconds, fresh = _known(f"passes {what}", judged)
    prices = np.maximum.accumulate(np.divide(seconds, seconds[0])).tolist()
    if fresh:
        log.debug("measured: passes take %s times as long as one row", ", ".join(f"{price:.2f}" for price in prices))
    return prices


def _speedup(way: tuple[str, bool], over: tuple[str, bool], threads: int) -> tuple[float, bool]:
    """The result of `speedup` on this machine, and whether it was measured now."""
    return _known(f"{way} {over} {threads}", lambda: speedup(way, over, threads))


def _known(what: str, measure: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
    """A measurement, and whether it was made now. It is made on the first call for this version of the library and this
    processor, and read from the file afterwards.

    what: text that identifies the measurement. measure: returns the value, and whether to keep it; a value that other
    processes disturbed is not kept.
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


def _read(path: Path) -> dict[str, Any]:
    """The measurements in the file, by key; {} if the file is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and all(map(_fits, known.values())) else {}


def _fits(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and all(isinstance(one, float) for one in value))


def _write(path: Path, known: dict[str, Any]) -> None:
    """Replaces the file atomically. If it cannot be written, the next session measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{NAME}.{os.getpid()}")
        unfinished.write_text(json.dumps(dict(list(known.items())[-KEPT:]), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.debug("%s was not written: %s", path, error)
