"""Runs model-written programs in isolation, tests them from outside, and reports how each one ended.

Every program runs in a fresh interpreter without privileges, network or access to the files of the machine. CPU time,
memory, processes, open files and output are limited, and it can write only to a file system of 64 MiB in memory. A
filter of system calls refuses sockets, namespaces and calls that reach into other processes. Tests run in a separate
sandbox (judge.py), which calls the program by message and compares its answers. A program can therefore reach neither
its tests nor its verdict.

The sandbox shares the kernel of the machine. It does not protect against kernel exploits, and does not limit the total
memory of all processes of a program. For code of unknown users, run everything in a virtual machine.
"""

import binascii
import contextlib
import functools
import itertools
import json
import logging
import marshal
import math
import os
import re
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

from laneformer.errors import ConfigError, LaneformerError
from laneformer.infer.sandbox import levels
from laneformer.infer.sandbox.levels import ENVIRONMENT, LEVELS, Level, interpreter

log = logging.getLogger(__name__)
Verdict = Literal["passed", "failed", "syntax", "timeout", "memory", "killed"]
VERDICTS = 2
"""Version of the method of judging, for reports: 1 ran the tests in the program's process, 2 calls it by message."""
REPORT_BYTES = 1 << 16
LAST_SECONDS = 5.0  # from the end of a program's pipes to the end of the program
BROKEN = "broken"  # key of a report: why the program could not answer further requests
NAMESPACES = (
    "if the system forbids user namespaces, allow them (Ubuntu: an AppArmor profile for bwrap, or"
    " sysctl kernel.apparmor_restrict_unprivileged_userns=0; containers: run with the right to unshare)"
)


@functools.cache
def _text(*names: str) -> str:
    """Modules of this folder, joined and compiled, as a text for `python -c`, which works without this package. The
    modules use a copy of the built-in functions, so a model's program cannot replace the functions that they call.
    """
    texts = [files("laneformer.infer.sandbox").joinpath(f"{name}.py").read_text(encoding="utf-8") for name in names]
    joined = "\n".join(re.sub(r"^from laneformer\.infer\.sandbox.*\n", "", text, flags=re.MULTILINE) for text in texts)
    own = f"import builtins\n__builtins__ = {{**vars(builtins)}}\n{joined}"
    code = binascii.b2a_base64(marshal.dumps(compile(own, " ".join(names), "exec", optimize=2)), newline=False)
    return f"import binascii, marshal\nexec(marshal.loads(binascii.a2b_base64({code!r})))\n"


class HarnessError(LaneformerError):
    """The sandbox or the harness failed, not the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    cpu_seconds: float
    """CPU time, rounded up to whole seconds."""
    wall_seconds: float
    """Elapsed time in seconds, for programs that sleep or wait."""
    memory_bytes: int = 4 << 30
    """Address space of each process."""
    processes: int = 64
    """Number of processes and threads together."""
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of each file that the program writes."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    verdict: Verdict
    """syntax: the solution does not compile; memory: MemoryError; killed: by a signal such as SIGSEGV."""
    error: str
    """The reason in one line; "" if the program passed."""
    cpu_seconds: float | None
    """CPU time of solution and tests, without the start of the interpreter; None if the program did not report it."""


class Sandbox:
    """Runs programs from any number of threads. `close` it, or use it in a `with` block."""

    def __init__(self, level: str = "auto"):
        """level: "bwrap" (bubblewrap), "unshare" (the same isolation by util-linux), "rlimits" (resource limits only),
        or "auto" (bwrap if installed, else unshare).

        Runs a self-test. Raises ConfigError for a level that is unknown, not installed, or fails its self-test.
        """
        self.level = _choose(level)
        self._runs = itertools.count(os.getpid() * 97)  # concurrent evaluations start with different users
        self._running: set[subprocess.Popen] = set()
        self._judge: _JudgeProcess | None = None
        self._closed, self._lock = False, threading.Lock()
        self._stage = Path(tempfile.mkdtemp(prefix="laneformer-", dir="/tmp"))
        try:
            levels.prepare(self._stage, self.level)
            self._self_test()
        except BaseException:
            self.close()
            raise

    @property
    def report(self) -> dict[str, Any]:
        """The facts about the sandbox that a score depends on: the level, the version of its tool, network access, the
        interpreter, and the method of judging.
        """
        tool = self.level.tools[0] if self.level.tools else None
        version = (
            tool
            and subprocess.run(
                [levels.tool(tool), "--version"], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        return {
            "level": self.level.name,
            "version": version,
            "network": self.level.network,
            "self_test": "passed",
            "python": f"{interpreter()} {'.'.join(map(str, sys.version_info[:3]))}",
            "verdicts_version": VERDICTS,
        }

    def run(
        self,
        solution: str,
        test: str,
        limits: Limits,
        *,
        longest_error: int = 500,
        entry_point: str | None = None,
        context: str = "",
    ) -> Outcome:
        """Runs `solution`, then `test` in a separate process. The verdict is "passed" if neither raises nor ends its
        process early.

        context: a program that runs before the test and defines names for it. `entry_point` and all other names that
        the test uses are those of the solution, whose functions and objects the test calls by message. longest_error:
        limit on `Outcome.error`, in characters. The limits apply to the solution and to the test separately.

        Raises HarnessError if the program could not be started, and after `close`.
        """
        judge = self._judging()
        bounds = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(limits.cpu_seconds),
            # Without isolation, all processes of the user count.
            "RLIMIT_NPROC": limits.processes if self.level.tools else 8 * limits.processes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_FSIZE": limits.file_bytes,
            # With a limit of 0, the kernel would still start a program that collects core files: man 5 core.
            "RLIMIT_CORE": 1,
        }
        common = {"limits": bounds, "alarm": math.ceil(limits.wall_seconds) + 5, "longest_error": longest_error}
        spec = {"test": test, "context": context, "entry_point": entry_point, **common}
        spec["program"] = {"solution": solution, "path": [self.level.site(self._stage)], **common}
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile())
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._stage))
            file.write(json.dumps(spec).encode())
            file.flush()
            modes = itertools.cycle(("rb", "wb"))
            ends = [stack.enter_context(open(end, next(modes), 0)) for _ in range(4) for end in os.pipe()]
            take_request, send_request, take_reply, send_reply, take_report, send_report, take_error, send_error = ends
            os.set_blocking(take_error.fileno(), False)
            began = time.monotonic()
            judge.take(file, send_request, take_reply, send_report)
            process = self._start(self._command("child"), folder, take_request, send_reply, send_error)
            for end in ends:
                if end not in (take_report, take_error):
                    end.close()
            report, status = self._wait(process, take_report.fileno(), began + limits.wall_seconds)
            took = time.monotonic() - began
            return _outcome(report, (take_error.read(REPORT_BYTES) or b"") + judge.error(), status, limits, took)

    def close(self) -> None:
        """Kills running programs. No program can be run after this."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)
            if self._judge is not None:
                self._judge.close()
        shutil.rmtree(self._stage, ignore_errors=True)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _command(self, module: str, *args: str) -> list[str]:
        """The command that runs a module of this folder in a sandbox."""
        run = next(self._runs)
        prelude = self.level.prelude(self._stage, run)
        launch = "" if prelude is None else f"{_text('launch')}enter({prelude!r})\n"
        # Without site (-S), because it would run files of this machine in every sandbox. child.py does the rest of its
        # work.
        return [*self.level.command(self._stage, run), "-BSP", "-c", launch + _text("wire", module), *args]

    def _judging(self) -> "_JudgeProcess":
        """The process that runs the tests. Starts it if none is running."""
        with self._lock:
            if self._closed:
                raise HarnessError("the sandbox was closed")
            if self._judge is not None and self._judge.ended:
                self._judge.close()
                self._judge = None
            if self._judge is None:
                self._judge = _JudgeProcess(self._command("judge", self.level.site(self._stage)), self._stage)
            return self._judge

    def _start(self, command: list[str], folder: str, stdin, stdout, stderr) -> subprocess.Popen:
        with self._lock:
            if self._closed:
                raise HarnessError("the sandbox was closed")
            process = _popen(command, folder, stdin, stdout, stderr)
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen, report: int, deadline: float) -> tuple[bytes, int | None]:
        """Waits for a program. Returns the judge's report, and the exit status of the program or None if it did not end
        by itself. report: descriptor of the report. deadline: time.monotonic().
        """
        handle, text, ended = os.pidfd_open(process.pid), b"", False
        try:
            poll = select.poll()
            poll.register(report, select.POLLIN)
            poll.register(handle, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0 and text.count(b"\n") < 2:
                ready = {each for each, _ in poll.poll(1000 * left)}
                if report in ready:
                    part = os.read(report, REPORT_BYTES)
                    text += part
                    if not part:
                        break
                elif handle in ready:  # its answers are still judged, but its children may keep the pipes open
                    ended = True
                    poll.unregister(handle)
                    self._end(process)
            found = _verdict(text)
            if not ended and time.monotonic() < deadline and (not found or BROKEN in found):
                poll.unregister(report)  # wait briefly for the program to end, to report how it ended
                ended = bool(poll.poll(1000 * LAST_SECONDS))
        finally:
            os.close(handle)
            self._end(process)
            with self._lock:
                self._running.discard(process)
            status = process.wait()
        return text, status if ended else None

    def _end(self, process: subprocess.Popen) -> None:
        with self._lock:  # before the process is reaped, so that its id cannot belong to another process
            _kill(process)

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
                    f"{NAMESPACES}; or use --sandbox rlimits in a virtual machine"
                    if self.level.tools
                    else "check that this Python and its numpy work"
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
                log.warning("bubblewrap is not installed (apt install bubblewrap): using unshare")
            return level
    raise ConfigError(
        f"sandbox {name} needs {missing[0]}, which is not installed: install bubblewrap (apt install bubblewrap)."
        " --sandbox rlimits runs the model's programs with access to your files and network: use it only in a virtual"
        " machine"
    )


def _kill(process: subprocess.Popen) -> None:
    """Kills a process and its group. Its namespace ends with it."""
    os.killpg(process.pid, signal.SIGKILL)


def _popen(command: list[str], folder: str | Path, stdin, stdout, stderr) -> subprocess.Popen:
    """Starts a process. Without preexec_fn, Python uses vfork and exec, which is safe beside the threads of JAX. Raises
    HarnessError.
    """
    how = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "cwd": folder}
    try:
        return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **how)
    except OSError as error:
        raise HarnessError(
            f"no program could be started ({error}): free memory or processes, then run the command again"
        ) from None


class _JudgeProcess:
    """The process that runs tests. It dies with the thread that started it, so a dedicated thread starts it and waits
    for it.
    """

    def __init__(self, command: list[str], folder: Path):
        self._control, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process: subprocess.Popen | None = None
        self._failure: HarnessError | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._host, args=(command, folder), daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def _host(self, command: list[str], folder: Path) -> None:
        try:
            self._process = _popen(command, folder, self._other, subprocess.DEVNULL, self._stderr)
        except HarnessError as error:
            self._failure = error
        finally:
            self._other.close()
            self._started.set()
        if self._process is not None:
            self._process.wait()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def take(self, *handles) -> None:
        """Passes the descriptors of one program to the process: the spec's file, requests, replies, report."""
        with contextlib.suppress(OSError):  # the process has ended, so no report will arrive
            socket.send_fds(self._control, [b"."], [handle.fileno() for handle in handles])

    def error(self) -> bytes:
        """Standard error of the process before it began to serve; empty after `close`."""
        return b"" if self._stderr.closed else os.pread(self._stderr.fileno(), REPORT_BYTES, 0)

    def close(self) -> None:
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):  # the process ended in the meantime
                _kill(self._process)
        self._thread.join()
        self._control.close()
        self._stderr.close()


def _verdict(report: bytes) -> dict[str, Any]:
    """The verdict in a judge's report; empty if the report has none."""
    lines = report.splitlines()
    return json.loads(lines[1]) if len(lines) == 2 else {}


def _outcome(report: bytes, stderr: bytes, status: int | None, limits: Limits, took: float) -> Outcome:
    """The outcome of a program.

    report: the judge's report. stderr: standard error of the program and of the judge. status: the program's exit
    status, None if it did not end. took: elapsed seconds. Raises HarnessError if the program did not start.
    """
    late = took >= limits.wall_seconds
    if not report:
        if late:
            raise HarnessError(
                f"a program did not start within {limits.wall_seconds:.0f} s: reduce the load of this machine"
            )
        said = "; ".join(dict.fromkeys(stderr.decode(errors="replace").split("\n"))).strip("; ")
        raise HarnessError(f"a program did not start: {said[-500:] or f'status {status}'}")
    found = _verdict(report)
    if found and BROKEN not in found:
        most = 2 * math.ceil(limits.cpu_seconds) + 2  # a bound, because the program itself reports its part of the time
        return Outcome(found["verdict"], found["error"], min(found["cpu"], most))
    if late and status is None:
        return Outcome("timeout", f"no end after {limits.wall_seconds:.0f} s", None)
    if status is None:
        return Outcome("failed", found.get(BROKEN) or "the tests ended without a verdict", None)
    # A shell and bubblewrap report a signal as 128 + its number.
    ended_by = -status if status < 0 else status - 128 if status > 128 else 0
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and took >= limits.cpu_seconds):
        return Outcome("timeout", f"more than {math.ceil(limits.cpu_seconds)} s of CPU time", None)
    if ended_by in set(signal.Signals):
        return Outcome("killed", signal.Signals(ended_by).name, None)
    return Outcome("failed", f"the program ended with status {status} before the tests were done", None)
