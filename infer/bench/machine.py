"""The hardware and software that a figure was measured with."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import jax
import jaxlib
import numpy as np

from laneformer.infer.engine.backend import device_name, on_host

ROOT = Path(__file__).resolve().parents[2]
TELLING = ("memory_bytes", "clocks", "driver")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def hardware() -> dict:
    """Facts about host and accelerators, except the accelerators' name and number. A value is None if unknown."""
    gpu = {} if on_host() else nvidia()
    return {
        "host_cpu": device_name(jax.devices("cpu")[0]),
        "host_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": gpu.get("memory_bytes"),
        "interconnect": None,
        "driver": gpu.get("driver"),
        "power_cap_w": gpu.get("power_cap_w"),
        "clocks": _cpu_clocks() if on_host() else gpu.get("clocks"),
    }


def software() -> dict:
    """Versions of the software. `git_sha` is the commit of this source tree, None outside a git repository."""
    inside = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel") == str(ROOT)
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") if inside else None
    return {
        "git_sha": _output("git", "-C", str(ROOT), "rev-parse", "HEAD") if inside else None,
        "dirty": None if changed is None else bool(changed),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "python": platform.python_version(),
        "os": platform.platform(),
    }


def utc_now() -> str:
    """The current date and time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def accelerator() -> dict:
    """Name, memory in bytes, clocks and driver of the first device, which identify it; None for unknown ones."""
    known = {} if on_host() else nvidia()
    return {"device": device_name(jax.devices()[0])} | {name: known.get(name) for name in TELLING}


def nvidia() -> dict:
    """Driver, power cap, memory and clocks of the first NVIDIA GPU; {} without nvidia-smi."""
    fields = "driver_version,power.limit,memory.total,clocks.sm,clocks.max.sm,clocks.mem"
    line = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0")
    try:
        driver, cap, mebibytes, sm, most, memory = (word.strip() for word in (line or "").split(","))
    except ValueError:
        return {}
    watts = float(cap) if cap.replace(".", "", 1).isdigit() else None
    return {
        "driver": driver,
        "power_cap_w": watts,
        "memory_bytes": int(mebibytes) << 20 if mebibytes.isdigit() else None,
        "clocks": f"SM {sm} of {most} MHz, memory {memory} MHz, after the runs",
    }


def _cpu_clocks() -> str | None:
    try:
        return f"governor {GOVERNOR.read_text(encoding='utf-8').strip()}"
    except OSError:
        return None


def _output(*command: str) -> str | None:
    """The output of a program, without surrounding white space; None if the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None
