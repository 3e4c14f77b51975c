"""A stage: commands with a time limit, their environment, and their outcome. Needs only Python."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    "scripts.tokenize": "tokenizers",
    "pytest": "xdist",
}
GRACE = 60  # seconds in which a stage that can resume saves


@dataclass(frozen=True)
class Stage:
    """Commands to run one after another, or together. Every `{name}` in them is replaced by a value: `{out}` by the
    folder of the results.
    """

    name: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=lambda: CACHE)
    together: bool = False
    may_time_out: bool = False
    """Whether running out of time is no verdict instead of a failure, as for a checker that has found nothing so far.
    """
    resumes: bool = False
    """Whether the commands save and end at SIGTERM, and resume when they run again."""
    if_failed: tuple[str, ...] = ()
    """Stages to run next if this one failed, to diagnose it."""
    lacks: str = ""
    """Input that the stage needs and the user did not give; the stage is then left out."""
    usual: bool = True
    """Whether the stage runs without --stages."""

    def log(self, number: int) -> str:
        """Name of the file with the output of a command."""
        return f"{self.name}{'' if len(self.commands) == 1 else f'-{number}'}.log"


@dataclass(frozen=True)
class Outcome:
    stage: str
    status: str
    """passed, failed, out of time, no verdict, unfinished (of a stage that resumes), or left out"""
    seconds: float
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.status in ("failed", "out of time")


def missing(stage: Stage) -> list[str]:
    """Programs and packages that a stage needs and this machine lacks, except those that an earlier stage builds."""
    programs = {command[0] for command in stage.commands if not command[0].startswith("{out}/")}
    packages = {package for program, package in NEEDED.items() if any(program in command for command in stage.commands)}
    lacking = [program for program in programs if not shutil.which(program, path=SEARCH)]
    return sorted(
        lacking
        + [f"{package} (pip install it, or --wheels)" for package in packages if not importlib.util.find_spec(package)]
    )


def filled(command: Iterable[str], words: Mapping[str, object]) -> list[str]:
    """The command with every `{name}` of `words` replaced by its value."""
    return [_filled(word, words) for word in command]


def _filled(word: str, words: Mapping[str, object]) -> str:
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def run(stage: Stage, words: Mapping[str, object], seconds: float, environment: dict[str, str]) -> Outcome:
    """Runs a stage's commands one after another, or together, for at most `seconds`.

    Their output goes to FOLDER/<stage>[-number].log; if the stage resumes it is appended, otherwise it replaces the
    file.
    """
    if stage.lacks:
        return Outcome(stage.name, "left out", 0, stage.lacks)
    if lacking := missing(stage):
        return Outcome(stage.name, "failed", 0, f"not found: {', '.join(lacking)}")
    start, running, states = time.monotonic(), [], []
    environment = environment | dict(zip(stage.environment, filled(stage.environment.values(), words), strict=True))

    def finish(number: int, process: subprocess.Popen) -> None:
        try:
            states.append((number, process.wait(max(0.1, start + seconds - time.monotonic()))))
        except subprocess.TimeoutExpired:
            _stop(process, stage.resumes)
            states.append((number, None))

    try:
        for number, command in enumerate(stage.commands):
            running.append(_start(stage, number, command, words, environment))
            if not stage.together:
                finish(number, running[-1])
                if states[-1][1] is None:
                    break
        if stage.together:
            for number, process in enumerate(running):
                finish(number, process)
    finally:  # this process may be stopped
        for process in running:
            if process.poll() is None:
                _stop(process, stage.resumes)
    return Outcome(stage.name, *_verdict(stage, states, seconds, time.monotonic() - start))


def _start(
    stage: Stage, number: int, command: tuple[str, ...], words: Mapping[str, object], environment: dict[str, str]
) -> subprocess.Popen:
    """Starts a command with its output in its log."""
    with (Path(str(words["out"])) / stage.log(number)).open("ab" if stage.resumes else "wb") as log:
        return subprocess.Popen(
            filled(command, words),
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


def _verdict(stage: Stage, states: list[tuple[int, int | None]], limit: float, took: float) -> tuple[str, float, str]:
    """Status, seconds and detail of a stage. states: (number, exit code) by command, code None if out of time."""
    failed = [f"command {number}: status {code}" for number, code in states if code]
    if failed:
        return "failed", took, "; ".join(failed)
    if all(code is not None for _, code in states):
        return "passed", took, ""
    late = "unfinished" if stage.resumes else "no verdict" if stage.may_time_out else "out of time"
    return late, took, f"over {limit:.0f} s"
