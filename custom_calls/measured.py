"""What a session measures once on a machine, kept beside the libraries that it compiles."""

import json
import logging
import os
import platform
from pathlib import Path

from custom_calls import build
from custom_calls.library import speedup

log = logging.getLogger("custom_calls")
NAME = "measured.json"
KEPT = 50  # measurements in the file; older ones are dropped


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


def _speedup(way: tuple[str, bool], over: tuple[str, bool], threads: int) -> tuple[float, bool]:
    """`speedup` of this machine, measured on the first call for these libraries and arguments; whether it was now."""
    path, key = build.cache() / NAME, f"{build.key()} {_processor()} {way} {over} {threads}"
    known = _read(path)
    fresh = key not in known
    if fresh:
        known[key] = speedup(way, over, threads)
        _write(path, known)
    return known[key], fresh


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path) -> dict[str, float]:
    """{} if there is no such file, or not one of these."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    fits = isinstance(known, dict) and all(isinstance(value, float) for value in known.values())
    return known if fits else {}


def _write(path: Path, known: dict[str, float]) -> None:
    """Replaces the file at once; a cache that cannot be written is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{NAME}.{os.getpid()}")
        unfinished.write_text(json.dumps(dict(list(known.items())[-KEPT:]), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.debug("%s was not written: %s", path, error)
