"""Measures the load of other processes while an engine is measured."""

import os
import time
from collections.abc import Callable
from pathlib import Path

PROC_STAT = Path("/proc/stat")
QUIET = 0.1  # cores that other processes may use during a sample


def beside(request: Callable[[], dict]) -> tuple[dict, float]:
    """Runs a request of an engine; returns its answer and the cores that other processes used meanwhile."""
    busy, cpu, start = busy_seconds(), time.process_time(), time.perf_counter()
    answer = request()
    seconds = time.perf_counter() - start
    return answer, (busy_seconds() - busy - answer["cpu_seconds"] - (time.process_time() - cpu)) / seconds


def busy_seconds() -> float:
    """Seconds of processor time used by all processes, or withheld by the host of a virtual machine."""
    user, nice, system, _, _, irq, soft, stolen = (int(word) for word in PROC_STAT.read_text().split()[1:9])
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def quiet(one: dict) -> bool:
    """Whether the machine was otherwise idle in a round."""
    return all(one[who]["foreign_cores"] <= QUIET for who in ("ours", "peer"))
