"""Runs programs that a model wrote in isolation, and reports how each ended.

Every program runs in a fresh interpreter without privileges, network or home, with limits on CPU time, memory,
processes, open files and output; in the level `bwrap` it can only write to 64 MiB of memory. It shares the kernel: this
does not protect against kernel exploits, and does not limit the memory of all its processes together. Tests run in the
program's process, so a malicious program can read its tests or forge its verdict. For code of unknown users run all of
it in a virtual machine.
"""

import itertools
import json
import logging
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from infer.sandbox.levels import ENVIRONMENT, LEVELS, PLACES, Level, interpreter
from laneformer.errors import ConfigError, LaneformerError

log = logging.getLogger(__name__)
CHILD = files("infer.sandbox").joinpath("child.py").read_text(encoding="utf-8")
Verdict = Literal["passed", "failed", "syntax", "timeout", "memory", "killed"]
REPORT_BYTES = 1 << 16
NAMESPACES = (
    "if the system forbids user namespaces, allow them (Ubuntu: an AppArmor profile for bwrap, or"
    " sysctl kernel.apparmor_restrict_unprivileged_userns=0; containers: run with the right to unshare)"
)


class HarnessError(LaneformerError):
    """The sandbox or the harness failed, not the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    cpu_seconds: float
    """CPU time, rounded up to whole seconds."""
    wall_seconds: float
    """Elapsed time, for programs that sleep or wait."""
    memory_bytes: int = 4 << 30
    """Address space of each process."""
    processes: int = 64
    """Processes and threads together."""
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of each file that it writes."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    verdict: Verdict
    """syntax: the solution does not compile; memory: MemoryError; killed: by a signal such as SIGSEGV."""
    error: str
    """The reason in one line; "" if the program passed."""
    cpu_seconds: float | None
    """CPU time of solution and tests, without the start of the interpreter. None if the program did not report it."""


class Sandbox:
    """Runs programs from any number of threads; `close` it, or use it in a `with` block."""

    def __init__(self, level: str = "auto"):
        """level: "bwrap" (bubblewrap), "unshare" (weaker), "rlimits" (resource limits alone) or "auto": bwrap if
        installed, else unshare.

        Runs a self-test. Raises ConfigError for a level that is unknown, not installed, or fails its self-test.
        """
        self.level = _choose(level)
        self._runs = itertools.count(os.getpid() * 97)  # two evaluations at a time start at different users
        self._running: set[subprocess.Popen] = set()
        self._closed, self._lock = False, threading.Lock()
        self._stage = Path(tempfile.mkdtemp(prefix="laneformer-", dir="/tmp"))
        try:
            for place in (".", *PLACES):
                (self._stage / place).mkdir(exist_ok=True)
                (self._stage / place).chmod(0o755)  # regardless of the umask
            self._self_test()
        except BaseException:
            self.close()
            raise

    @property
    def report(self) -> dict[str, Any]:
        """What a score depends on: the level, the version of its tool, network access, the interpreter."""
        tool = self.level.tools[0] if self.level.tools else None
        version = (
            tool and subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        )
        return {
            "level": self.level.name,
            "version": version,
            "network": self.level.network,
            "self_test": "passed",
            "python": f"{interpreter()} {'.'.join(map(str, sys.version_info[:3]))}",
        }

    def run(
        self, solution: str, test: str, limits: Limits, *, longest_error: int = 500, entry_point: str | None = None
    ) -> Outcome:
        """Runs `solution`, then `test` with the solution's names and Python's original built-in functions; passed if
        neither raises or ends the program. longest_error: in characters. entry_point: a function whose results must not
        contain objects of the solution's classes that redefine operators, because these could equal anything.

        Raises HarnessError if the program could not be started, and after `close`.
        """
        if self._closed:
            raise HarnessError("the sandbox was closed")
        nonce = secrets.token_hex(16)
        spec = {
            "solution": solution,
            "test": test,
            "path": [self.level.site(self._stage)],
            "longest_error": longest_error,
            "entry_point": entry_point,
        }
        spec["limits"] = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(limits.cpu_seconds),
            # Without isolation all processes of the user count.
            "RLIMIT_NPROC": limits.processes if self.level.tools else 8 * limits.processes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_CORE": 0,
        }
        spec["alarm"] = math.ceil(limits.wall_seconds) + 5
        request = json.dumps(spec).encode()
        command = [*self.level.command(self._stage, next(self._runs)), "-B", "-s", "-P", "-c", CHILD, str(len(request))]
        with (
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            tempfile.TemporaryDirectory(dir=self._stage) as folder,
        ):
            stdin.write(request + nonce.encode())
            stdin.flush()
            began = time.monotonic()
            status = self._wait(self._start(command, folder, stdin, stdout, stderr), limits.wall_seconds)
            took = time.monotonic() - began
            stdout.seek(0)
            stderr.seek(0)
            return _judge(stdout.read(REPORT_BYTES), stderr.read(REPORT_BYTES), status, nonce, limits, took)

    def close(self) -> None:
        """Kills running programs; no more can be run."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)
        shutil.rmtree(self._stage, ignore_errors=True)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self, command: list[str], folder: str, stdin, stdout, stderr) -> subprocess.Popen:
        with self._lock:
            if self._closed:
                raise HarnessError("the sandbox was closed")
            try:
                # Without preexec_fn this is vfork and exec, which is safe in a process whose other threads run JAX.
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=ENVIRONMENT,
                    cwd=folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise HarnessError(
                    f"no program could be started ({error}): free memory or processes, then run the command again"
                ) from None
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen, seconds: float) -> int | None:
        """The exit status; None if the program exceeded its time."""
        handle, ended = os.pidfd_open(process.pid), []
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            ended = poll.poll(1000 * seconds)
        finally:
            os.close(handle)
            with self._lock:  # before it is reaped, while no other process can have its id
                _kill(process)
                self._running.discard(process)
            status = process.wait()
        return status if ended else None

    def _self_test(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            probes = [
                ("runs a program", "import numpy", "assert numpy.arange(3).sum() == 3", True),
                ("notices an early end", "import os; os._exit(0)", "", False),
            ]
            if not self.level.network:
                reach = (
                    f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 5)\nexcept OSError: pass\n"
                )
                probes.append(("keeps the network out", reach + "else: raise SystemExit", "", True))
            for path in self.level.hidden(self._stage):
                seen = (
                    f"import os; assert not os.path.exists({path!r}) or os.path.isdir({path!r}) and not"
                    f" os.listdir({path!r})"
                )
                probes.append((f"hides {path}", seen, "", True))
            for what, solution, test, passes in probes:
                remedy = (
                    f"{NAMESPACES}, or choose another --sandbox"
                    if self.level.tools
                    else "this Python or its numpy does not work"
                )
                try:
                    outcome = self.run(solution, test, Limits(cpu_seconds=20, wall_seconds=90))
                except HarnessError as error:
                    raise ConfigError(f"sandbox {self.level.name} does not work here ({error}): {remedy}") from None
                if (outcome.verdict == "passed") != passes:
                    raise ConfigError(
                        f"sandbox {self.level.name} failed its self-test ({what}: {outcome.verdict} {outcome.error}):"
                        f" {remedy}"
                    )


def _choose(name: str) -> Level:
    if sys.platform != "linux":
        raise ConfigError("model-written programs run only on Linux: write the samples here and score them there")
    if name != "auto" and name not in LEVELS:
        raise ConfigError(f"unknown sandbox = {name!r}: choose auto, {', '.join(LEVELS)}")
    wanted = [LEVELS[name]] if name != "auto" else [LEVELS["bwrap"], LEVELS["unshare"]]
    for level in wanted:
        missing = [tool for tool in level.tools if shutil.which(tool) is None]
        if not missing:
            if level is not wanted[0]:
                log.warning(
                    "bubblewrap is not installed (apt install bubblewrap): using unshare, which hides fewer files"
                )
            return level
    raise ConfigError(
        f"sandbox {name} needs {missing[0]}, which is not installed: install bubblewrap (apt install bubblewrap)."
        " --sandbox rlimits runs the model's programs with access to your files and network: use it only in a virtual"
        " machine"
    )


def _kill(process: subprocess.Popen) -> None:
    """Kills the process and its group; its namespace ends with it."""
    os.killpg(process.pid, signal.SIGKILL)


def _judge(report: bytes, stderr: bytes, status: int | None, nonce: str, limits: Limits, took: float) -> Outcome:
    """The outcome, from the child's report and how it ended."""
    lines = report.splitlines()
    if not lines:
        if status is None:
            raise HarnessError(
                f"a program did not start within {limits.wall_seconds:.0f} s: reduce the load of this machine"
            )
        raise HarnessError(
            f"a program did not start: {stderr.decode(errors='replace').strip()[-500:] or f'status {status}'}"
        )
    try:
        reported = json.loads(lines[1]) if len(lines) == 2 else {}
        verdict, error, cpu = reported.get("verdict"), str(reported.get("error", "")), reported.get("cpu")
    except (ValueError, AttributeError):  # not written by the child
        reported, verdict, error, cpu = {}, None, "", None
    if verdict == "passed" and reported.get("nonce") == nonce:
        return Outcome("passed", "", cpu)
    if verdict in ("failed", "syntax", "memory"):
        return Outcome(verdict, error, cpu)
    if status is None:
        return Outcome("timeout", f"no end after {limits.wall_seconds:.0f} s", None)
    # A shell and bubblewrap report a signal as 128 + its number.
    ended_by = -status if status < 0 else status - 128 if status > 128 else 0
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and took >= limits.cpu_seconds):
        return Outcome("timeout", f"more than {math.ceil(limits.cpu_seconds)} s of CPU time", None)
    if ended_by in set(signal.Signals):
        return Outcome("killed", signal.Signals(ended_by).name, None)
    return Outcome("failed", f"the program ended with status {status} before the tests were done", None)
