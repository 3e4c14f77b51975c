"""A stage: commands with a time limit, their environment, and their outcome. Needs only Python."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from laneformer.commands.lab.gpu_check import cores

ROOT = Path(__file__).resolve().parents[3]
PYTHON = sys.executable
SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
# Stages share compiled programs. Tests do not: reading a half-written program warns, and warnings are errors there.
CACHE = {"JAX_COMPILATION_CACHE_DIR": "{out}/xla", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
# Packages that commands need and that a machine may lack.
NEEDED = {
    "infer": "tyro",
    "train": "tyro",
    "train.bench": "tyro",
    "scripts.gpu_rank": "tyro",
    "scripts.gpu_decode": "tyro",
    "scripts.gpu_rows": "tyro",
    "scripts.gpu_check.ladder": "tyro",
    "scripts.gpu_check.torch_graph": "torch",
    "scripts.tokenize": "tokenizers",
    "pytest": "xdist",
}
NOT_FOUND = 127  # exit status of a shell for a program that is not found
MOST_SAID = 240  # characters of the last line of a failed command in its outcome
GRACE = 60  # seconds in which a stage that can resume saves


@dataclass(frozen=True)
class Stage:
    """Commands to run one after another, or together. Every `{name}` in them is replaced by a value: `{out}` by the
    folder of the results.
    """

    name: str
    seconds: int
    """Time limit."""
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=lambda: CACHE)
    expected: int = 0
    """Seconds that the stage is planned to take."""
    each: int = 0
    """Time limit of each command, seconds; 0 for that of the stage."""
    together: bool = False
    stops: bool = False
    """Whether a failed command leaves out the stage's other commands."""
    may_time_out: bool = False
    """Whether running out of time is no verdict instead of a failure, as for a checker that has found nothing so far.
    """
    resumes: bool = False
    """Whether the commands save and end at SIGTERM, and resume when they run again."""
    optional: bool = False
    """Whether the stage is left out, not failed, on a machine that lacks its programs or packages."""
    excuses: tuple[str, ...] = ()
    """Words in the output of a tool that cannot work on this machine; the stage is then left out, not failed."""
    dumps: bool = False
    """Whether errors and hangs on the GPU leave a core dump, which cuda-gdb prints into the log."""
    if_failed: tuple[str, ...] = ()
    """Stages to run next if this one failed, to diagnose it."""
    ends: bool = False
    """Whether the other stages are left out if this one failed."""
    takes_rest: bool = False
    """Whether the stage may run until the end of the call."""
    lacks: str = ""
    """Input that the stage needs and the user did not give; the stage is then left out."""
    call: int = 0
    """Number of the call that the stage belongs to; 0 if it runs only with --stages, or if another stage failed."""

    def log(self, number: int) -> str:
        """Name of the file with the output of a command."""
        return f"{self.name}{'' if len(self.commands) == 1 else f'-{number}'}.log"


@dataclass(frozen=True)
class Outcome:
    stage: str
    status: str
    """passed, failed, out of time, no verdict, unfinished (of a stage that resumes), left out, running or stopped"""
    seconds: float
    detail: str = ""
    logs: list[str] = field(default_factory=list)
    """Names of the files with the output of commands that failed."""

    @property
    def bad(self) -> bool:
        return self.status in ("failed", "out of time")


def missing(stage: Stage) -> list[str]:
    """Programs and packages that a stage needs and this machine lacks, except those that an earlier stage builds."""
    commands = (command for command in stage.commands if not command[0].startswith("{out}/"))
    return sorted({each for command in commands for each in _lacking(command)})


def _lacking(command: Sequence[str]) -> list[str]:
    """The program and the packages that a command needs and this machine lacks."""
    programs = [] if shutil.which(command[0], path=SEARCH) else [command[0]]
    packages = {package for program, package in NEEDED.items() if program in command}
    absent = sorted(package for package in packages if not importlib.util.find_spec(package))
    return programs + [f"{package} (pip install it, or --wheels)" for package in absent]


def filled(command: Iterable[str], words: Mapping[str, object]) -> list[str]:
    """The command with every `{name}` of `words` replaced by its value."""
    return [_filled(word, words) for word in command]


def _filled(word: str, words: Mapping[str, object]) -> str:
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


class Ended(NamedTuple):
    """How a command ended."""

    number: int
    code: int | None
    """Exit status; None if it ran out of time."""
    said: str = ""
    """Last line of its output, of a command that failed."""


def run(stage: Stage, words: Mapping[str, object], seconds: float, environment: dict[str, str]) -> Outcome:
    """Runs a stage's commands one after another, or together, for at most `seconds`; a core dump may take
    cores.SECONDS more.

    Their output goes to FOLDER/<stage>[-number].log; if the stage resumes it is appended, otherwise it replaces the
    file.
    """
    if stage.lacks:
        return Outcome(stage.name, "left out", 0, stage.lacks)
    if stage.optional and (lacking := missing(stage)):
        return Outcome(stage.name, "left out", 0, f"not found: {', '.join(lacking)}")
    start, ended = time.monotonic(), []
    running: dict[int, subprocess.Popen] = {}
    out = Path(str(words["out"]))
    environment = environment | dict(zip(stage.environment, filled(stage.environment.values(), words), strict=True))
    if stage.dumps:
        environment |= cores.variables(out, stage.name)

    def finish(number: int, process: subprocess.Popen) -> Ended:
        log, left = out / stage.log(number), start + seconds - time.monotonic()
        try:
            code = process.wait(max(0.1, min(left, stage.each) if stage.each else left))
        except subprocess.TimeoutExpired:
            code = None
        said = last_line(log) if code != 0 else ""
        if stage.dumps and code != 0:
            cores.explain(out, stage.name, log, hangs=code is None)
        if code is None:
            _stop(process, stage.resumes)
        return Ended(number, code, said)

    try:
        for number, command in enumerate(filled(each, words) for each in stage.commands):
            if lacking := _lacking(command):
                ended.append(Ended(number, NOT_FOUND, f"not found: {', '.join(lacking)}"))
                (out / stage.log(number)).write_text(ended[-1].said + "\n")
            else:
                running[number] = _start(stage, number, command, out, environment)
                if not stage.together:
                    ended.append(finish(number, running[number]))
            failed = bool(ended) and ended[-1].code != 0
            if not stage.together and failed and (stage.stops or time.monotonic() >= start + seconds):
                break
        if stage.together:
            ended += [finish(number, process) for number, process in running.items()]
    finally:  # this process may be stopped
        for process in running.values():
            if process.poll() is None:
                _stop(process, stage.resumes)
    took = time.monotonic() - start
    for excuse in stage.excuses:
        if any(each.code and excuse in text_of(out / stage.log(each.number)) for each in ended):
            return Outcome(stage.name, "left out", took, f"this machine does not allow it: {excuse}")
    bad = [stage.log(each.number) for each in ended if each.code != 0]
    outcome = Outcome(stage.name, *_verdict(stage, ended, seconds, took))
    return replace(outcome, logs=bad) if outcome.bad else outcome


def text_of(path: Path, most: int = 1 << 20) -> str:
    """The end of a file, at most that many bytes; "" without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    lines = [line.strip() for line in text_of(log, 4096).splitlines() if line.strip()]
    return lines[-1][:MOST_SAID] if lines else ""


def _start(stage: Stage, number: int, command: list[str], out: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Starts a command with its output in its log."""
    with (out / stage.log(number)).open("ab" if stage.resumes else "wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _stop(process: subprocess.Popen, saves: bool) -> None:
    """Ends a command and its children. saves: let it save first, for at most GRACE seconds."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if saves:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):  # stuck in the driver
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _verdict(stage: Stage, ended: list[Ended], limit: float, took: float) -> tuple[str, float, str]:
    """Status, seconds and detail of a stage."""
    failed = [each for each in ended if each.code]
    late = [each for each in ended if each.code is None]
    details = [f"command {each.number}: status {each.code}{each.said and f': {each.said}'}" for each in failed]
    if late and stage.each:
        details += [f"command {each.number}: over {stage.each} s{each.said and f': {each.said}'}" for each in late]
    elif late:
        details.append(f"over {limit:.0f} s")
    if failed or (late and stage.each):
        return "failed", took, "; ".join(details)
    if not late:
        return "passed", took, ""
    status = "unfinished" if stage.resumes else "no verdict" if stage.may_time_out else "out of time"
    return status, took, details[0]
