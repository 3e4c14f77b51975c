"""The driver's side of an engine: a process that is stopped between requests, so that its threads cannot spin."""

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from laneformer.commands.lab.peers.environments import Engine
from laneformer.commands.lab.peers.protocol import Task
from laneformer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CLOSING = 10  # seconds for a process to end before it is killed


class EngineError(ConfigError):
    """An engine ended or did not answer."""

    def __init__(self, engine: str, text: str):
        super().__init__(f"{engine} {text}")
        self.engine = engine


class Process:
    """An engine with a loaded model. A context manager."""

    def __init__(self, engine: Engine, python: str, task: Task, seconds: float):
        """task: settings, whose option is replaced by the engine's. seconds: limit for loading and for each answer.

        Raises EngineError if the engine ends or does not answer.
        """
        self.name, self.seconds = engine.name, seconds
        self._log = Path(task.folder) / f"{engine.name}.log"
        self._rest = b""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | dict(engine.variables) | {"PYTHONPATH": paths}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", engine.module, replace(task, option=engine.option).text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            self.conditions = self._answer("loading")["ready"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def decode(self, prompt: int, tokens: int) -> dict:
        """The engine's answer to `decode`, see scripts/lab/peers/protocol.py. Raises
        EngineError."""
        return self._request(f"decode {prompt} {tokens}", f"decoding {tokens} tokens")

    def first(self, prompt: int) -> dict:
        """The engine's answer to a prompt of `prompt` tokens. Raises EngineError."""
        return self._request(f"first {prompt}", f"computing a prompt of {prompt} tokens")

    def serve(self, verb: str, *arguments: object) -> dict:
        """The answer to `verb` by an engine that serves requests, see scripts/lab/peers/protocol.py. Raises
        EngineError."""
        return self._request(" ".join(map(str, (verb, *arguments))), f"serving requests ({verb})")

    def _request(self, line: str, doing: str) -> dict:
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, which reading detects
        answer = self._answer(doing)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the process in any state."""
        self._process.stdin.close()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _answer(self, doing: str) -> dict:
        """Reads the next line of the process as JSON. Raises EngineError. doing: what the process does, for errors."""
        output, until = self._process.stdout.fileno(), time.monotonic() + self.seconds
        while b"\n" not in self._rest:
            if not select.select([output], [], [], max(0, until - time.monotonic()))[0]:
                self._signal(signal.SIGKILL)
                raise EngineError(self.name, f"did not answer in {self.seconds:.0f} s while {doing}; see {self._log}")
            read = os.read(output, 1 << 16)
            if not read:
                raise EngineError(self.name, f"ended while {doing}: {self._end()}")
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _end(self) -> str:
        """How the process ended, and the last line of its output."""
        status = self._process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        if status == -signal.SIGKILL:
            how += ", perhaps out of memory"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"{how}; {last} ({self._log})"

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
