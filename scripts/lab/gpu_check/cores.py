"""Core dumps: a stage that fails or hangs on the GPU leaves one, and cuda-gdb prints where each warp is. Needs only
Python.

The variables are those of NVIDIA's manual of CUDA-GDB ("GPU core dump support"). Memory is left out of the dumps, so
they are small and written within seconds.
"""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

SECONDS = 25  # that a dump and its explanation may take
WAIT, GDB = 5, 15  # seconds for a dump to be written, and for cuda-gdb
LEFT_OUT = ("nonrelocated_elf_images", "global_memory", "shared_memory", "local_memory", "constbank_memory", "abort")
SHOWN = ("info cuda kernels", "info cuda warps")
CORE, PIPE = ".cudacore", ".corepipe"


def variables(out: Path, stage: str) -> dict[str, str]:
    """Environment of commands that dump at an error, and when a byte is written into their pipe.

    A process that has dumped continues (skip_abort), so that it still reports what its kernel recorded.
    """
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_FILE": f"{out}/{stage}.%p{CORE}",
        "CUDA_COREDUMP_PIPE": f"{out}/{stage}.%p{PIPE}",
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(f"skip_{each}" for each in LEFT_OUT),
    }


def explain(out: Path, stage: str, log: Path, hangs: bool) -> None:
    """Appends to the log where the warps of a failed stage are. hangs: its command still runs, and is asked for a dump.

    Dumps that an earlier command of the stage left are explained only once.
    """
    pipes = list(out.glob(f"{stage}.*{PIPE}"))
    if hangs and sum(_ask(pipe) for pipe in pipes):
        until = time.monotonic() + WAIT
        while time.monotonic() < until and not _unexplained(out, stage):
            time.sleep(0.1)
        time.sleep(max(0.0, min(1.0, until - time.monotonic())))  # it may be written still
    found = _unexplained(out, stage)
    with log.open("a", encoding="utf-8") as file:
        for core in found:
            file.write(f"\n{_of(core)}\n")
        if hangs and not found:
            why = (
                "its process did not write one" if pipes else "its process has no pipe for it, so CUDA has not started"
            )
            file.write(f"\nno core dump: {why}\n")
    for pipe in pipes:
        pipe.unlink(missing_ok=True)


def _unexplained(out: Path, stage: str) -> list[Path]:
    return sorted(path for path in out.glob(f"{stage}.*{CORE}") if not _explained(path).exists())


def _explained(core: Path) -> Path:
    """The file with what cuda-gdb printed about a dump."""
    return core.with_name(core.name + ".txt")


def _ask(pipe: Path) -> bool:
    """Asks a process for a dump; False if it does not read its pipe."""
    with contextlib.suppress(OSError):  # no reader
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False


def _of(core: Path) -> str:
    """What cuda-gdb prints about a dump."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    debugger = shutil.which("cuda-gdb", path=search)
    if debugger is None:
        text = f"core dump {core.name}: not found: cuda-gdb"
    else:
        shown = [word for line in (f"target cudacore {core}", *SHOWN) for word in ("-ex", line)]
        try:
            done = subprocess.run(
                [debugger, "-batch", *shown],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=GDB,
                stdin=subprocess.DEVNULL,
            )
            text = f"core dump {core.name}:\n{done.stdout}{done.stderr}"
        except subprocess.TimeoutExpired:
            text = f"core dump {core.name}: cuda-gdb needed over {GDB} s"
    _explained(core).write_text(text, encoding="utf-8")
    return text
