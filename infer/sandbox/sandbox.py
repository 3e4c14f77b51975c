"""Runs programs that a model wrote, shut in, and says how each ended.

Every program runs in a fresh interpreter without rights, network or home, with limits on CPU time, memory, processes,
open files and output, and in the level `bwrap` without a writable place but 64 MiB of memory. It shares the kernel:
this is no boundary against attacks on the kernel, and no bound on the memory of all its processes together. A program
that sets out to can read its own tests or forge its own verdict, as they run in one process. Code of unknown people
belongs into a virtual machine around all this.
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
    "where the system forbids user namespaces to ordinary users, allow them (Ubuntu: an AppArmor profile for bwrap, or"
    " sysctl kernel.apparmor_restrict_unprivileged_userns=0; containers: run with the right to unshare)"
)


class HarnessError(LaneformerError):
    """The sandbox or the harness failed, which says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_seconds: float
    """Of the processor; the system counts whole seconds, so it is rounded up."""
    wall_seconds: float
    """Of the clock, for programs that sleep or wait."""
    memory_bytes: int = 4 << 30
    """Address space of each process."""
    processes: int = 64
    """Processes and threads together."""
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of any file it writes."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    verdict: Verdict
    """syntax: the solution does not compile; memory: MemoryError; killed: by a signal, such as that of an invalid
    memory access.
    """
    error: str
    """What went wrong, in a line; "" if it passed."""
    cpu_seconds: float | None
    """Of solution and tests, without the interpreter's start. None where the program did not live to tell."""


class Sandbox:
    """A way to run programs, made once and used from any number of threads; `close` it, or use it in a `with` block."""

    def __init__(self, level: str = "auto"):
        """level: "bwrap" (bubblewrap), "unshare" (weaker), "rlimits" (resource limits alone) or "auto": bwrap if
        installed, else unshare.

        Runs a self-test. Raises ConfigError for a level that is unknown, not installed, or does not keep programs in
        here.
        """
        self.level = _choose(level)
        self._runs = itertools.count(os.getpid() * 97)  # two evaluations at a time begin at different users
        self._running: set[subprocess.Popen] = set()
        self._closed, self._lock = False, threading.Lock()
        self._stage = Path(tempfile.mkdtemp(prefix="laneformer-", dir="/tmp"))
        try:
            for place in (".", *PLACES):
                (self._stage / place).mkdir(exist_ok=True)
                (self._stage / place).chmod(0o755)  # whatever the umask
            self._self_test()
        except BaseException:
            self.close()
            raise

    @property
    def report(self) -> dict[str, Any]:
        """What a score depends on: the level, the tool's version, whether there was a network, the interpreter."""
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
        """Runs `solution`, then `test` with the names that it has made, but Python's own built-in functions; passed if
        neither raises or ends the program. longest_error: in characters. entry_point: a function whose results must not
        be objects of the solution's own classes that redefine operators, because these could equal anything.

        Raises HarnessError where the program could not be started, and after `close`.
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
            "RLIMIT_NPROC": (
                limits.processes if self.level.tools else 8 * limits.processes
            ),  # here all processes of the user count
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
        """Ends what is running; no more runs."""
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
                # Without preexec_fn this is vfork and exec: safe in a process whose other threads run JAX.
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
                    f"no program could be started ({error}): free memory or processes, and go on"
                ) from None
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen, seconds: float) -> int | None:
        """The exit status, None after the time was up."""
        handle, ended = os.pidfd_open(process.pid), []
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            ended = poll.poll(1000 * seconds)
        finally:
            os.close(handle)
            with self._lock:  # before it is reaped, while its number is certain to be its own
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
        raise ConfigError("model-written programs are run on Linux only: write the samples here and score them there")
    if name != "auto" and name not in LEVELS:
        raise ConfigError(f"sandbox = {name!r}: known are auto, {', '.join(LEVELS)}")
    wanted = [LEVELS[name]] if name != "auto" else [LEVELS["bwrap"], LEVELS["unshare"]]
    for level in wanted:
        missing = [tool for tool in level.tools if shutil.which(tool) is None]
        if not missing:
            if level is not wanted[0]:
                log.warning(
                    "bubblewrap is not installed (apt install bubblewrap): unshare shuts programs in, and hides fewer"
                    " files"
                )
            return level
    raise ConfigError(
        f"sandbox {name} needs {missing[0]}, which is not installed: install bubblewrap (apt install bubblewrap)."
        " --sandbox rlimits runs the model's programs with your rights, your files and your network: only inside a"
        " virtual machine"
    )


def _kill(process: subprocess.Popen) -> None:
    """The process, and what it left behind in its group; its namespace ends with it."""
    os.killpg(process.pid, signal.SIGKILL)


def _judge(report: bytes, stderr: bytes, status: int | None, nonce: str, limits: Limits, took: float) -> Outcome:
    """The outcome from what the child wrote and how it ended."""
    lines = report.splitlines()
    if not lines:
        if status is None:
            raise HarnessError(f"a program did not start within {limits.wall_seconds:.0f} s: the machine is overloaded")
        raise HarnessError(
            f"a program did not start: {stderr.decode(errors='replace').strip()[-500:] or f'status {status}'}"
        )
    try:
        said = json.loads(lines[1]) if len(lines) == 2 else {}
        verdict, error, cpu = said.get("verdict"), str(said.get("error", "")), said.get("cpu")
    except (ValueError, AttributeError):  # not what the child writes
        said, verdict, error, cpu = {}, None, "", None
    if verdict == "passed" and said.get("nonce") == nonce:
        return Outcome("passed", "", cpu)
    if verdict in ("failed", "syntax", "memory"):
        return Outcome(verdict, error, cpu)
    if status is None:
        return Outcome("timeout", f"no end after {limits.wall_seconds:.0f} s", None)
    ended_by = (
        -status if status < 0 else status - 128 if status > 128 else 0
    )  # a shell's and bubblewrap's way to tell a signal
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and took >= limits.cpu_seconds):
        return Outcome("timeout", f"more than {math.ceil(limits.cpu_seconds)} s of CPU time", None)
    if ended_by in set(signal.Signals):
        return Outcome("killed", signal.Signals(ended_by).name, None)
    return Outcome("failed", f"the program ended, with status {status}, before the tests did", None)
