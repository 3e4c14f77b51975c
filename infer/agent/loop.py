"""An agent's loop: ask for code, write it to a copy of the task, run the tests in the sandbox, report the failure."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infer.agent.answers import Edits, read_edits
from infer.agent.client import Model, Reply
from infer.agent.task import FAILURE, MOST_OUTPUT, Task, test_program
from infer.evaluate.answers import whole_statements
from infer.evaluate.scoring import Judge
from infer.sandbox.sandbox import Outcome
from laneformer.errors import InputError

FIRST, DECODE, TESTS, WAITING = "prompt, up to the first token", "decode", "tests", "waiting"
REQUEST = """{text}

These are the files. Leave {tests} as they are, they are the tests.

{files}
Answer with every file that you change or add, whole, each in a code block with its name after the opening fence, as in
```python {example}
"""
FAILED = """The tests fail:
```
{output}
```
{notes}Answer with the corrected files, whole, in the same form."""
COMPLETION_STOPS = ("\nif __name__", "\n# test", "\nimport unittest", "\n```")  # OpenAI allows four


@dataclass(frozen=True)
class Turn:
    """One round of asking and testing. Times in seconds."""

    number: int
    reply: Reply
    written: tuple[str, ...]
    """Names of the files that the answer changed."""
    notes: tuple[str, ...]
    outcome: Outcome
    output: str
    """Output of the tests if they fail."""
    tests: float
    """Time in the sandbox, including its start."""
    total: float


@dataclass
class Run:
    """A task and the turns of solving it."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    verdict: Literal["passed", "failed", "interrupted", "error"] = "error"
    wall: float = 0.0
    """Seconds from the first request to the end."""

    @property
    def tokens(self) -> int | None:
        """Number of generated tokens; None if the server did not report it."""
        counts = [turn.reply.tokens for turn in self.turns]
        return None if None in counts else sum(counts)

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first token of each answer; None if unknown."""
        seconds = sum(turn.reply.decode for turn in self.turns)
        return (
            None
            if not self.tokens or not seconds
            else sum(max(turn.reply.tokens - 1, 0) for turn in self.turns) / seconds or None
        )

    @property
    def split(self) -> dict[str, float]:
        """The parts of the wall time, in seconds, which add up to it."""
        parts = {
            FIRST: sum(turn.reply.first for turn in self.turns),
            DECODE: sum(turn.reply.decode for turn in self.turns),
            TESTS: sum(turn.tests for turn in self.turns),
        }
        if self.verdict in ("interrupted", "error"):
            parts["a turn that did not end"] = self.wall - sum(turn.total for turn in self.turns)
        return parts | {WAITING: self.wall - sum(parts.values())}


class Workspace:
    """The copy of a task to which the model's answers are written."""

    def __init__(self, task: Task, folder: Path):
        self.task, self.folder, self.files = task, folder, dict(task.files)
        for name in self.files:
            self._write(name)

    def apply(self, edits: Edits) -> None:
        """Writes the files. Raises InputError for a name that the file system refuses."""
        for name, text in edits.files.items():
            self.files[name] = text.encode(errors="replace")
            self._write(name)

    def _write(self, name: str) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[name])
        except OSError as error:
            raise InputError(
                f"cannot write {path} ({error.strerror}): free space, or choose another --workspace"
            ) from None

    def test(self, judge: Judge, seconds: float) -> tuple[Outcome, str]:
        """Runs the tests in the sandbox; the outcome, and their output if they fail."""
        outcome = judge.run(test_program(self.files, self.task.command), seconds, MOST_OUTPUT + len(FAILURE) + 2)
        return outcome, outcome.error.removeprefix(f"{FAILURE}: ").strip()


def check_start(workspace: Workspace, judge: Judge, seconds: float) -> None:
    """Raises InputError for a task whose tests pass from the start, or that has none."""
    outcome, output = workspace.test(judge, seconds)
    if outcome.verdict == "passed":
        raise InputError(f"the tests of {workspace.task.name} already pass: add a test that fails")
    if "\nRan 0 tests" in f"\n{output}":
        raise InputError(f"{workspace.task.name}: unittest finds no test in {', '.join(workspace.task.tests)}: add one")


def solve(
    run: Run,
    workspace: Workspace,
    model: Model,
    judge: Judge,
    *,
    max_turns: int,
    test_seconds: float,
    options: dict[str, Any],
    progress: Callable[[int, int], None],
    report: Callable[[Turn, Any], None],
) -> None:
    """Fills `run` turn by turn, so that an interruption keeps the finished turns.

    options: of the requests. progress: called with the turn and the number of characters so far. report: called with
    each finished turn and its prompt. Raises InputError or HarnessError if the server or the sandbox fails.
    """
    chat = model.mode == "chat"
    if not chat and len(run.task.editable) != 1:
        raise InputError(
            f"{run.task.name}: a model that cannot chat writes one file, and the task has "
            f"{', '.join(run.task.editable) or 'none'} to write: give a task with one, or a chat model"
        )
    began = time.perf_counter()
    try:
        for number in range(1, max_turns + 1):
            start = time.perf_counter()
            last = run.turns[-1] if run.turns else None
            prompt = chat_prompt(run.task, last) if chat else completion_prompt(workspace, last)
            reply = model.ask(
                prompt, () if chat else COMPLETION_STOPS, lambda count, turn=number: progress(turn, count), **options
            )
            edits = (
                read_edits(reply.text, run.task.editable, run.task.tests) if chat else _continued(run.task, reply.text)
            )
            workspace.apply(edits)
            testing = time.perf_counter()
            outcome, output = workspace.test(judge, test_seconds)
            end = time.perf_counter()
            turn = Turn(number, reply, tuple(edits.files), edits.notes, outcome, output, end - testing, end - start)
            run.turns.append(turn)
            report(turn, prompt)
            if outcome.verdict == "passed":
                run.verdict = "passed"
                return
        run.verdict = "failed"
    except KeyboardInterrupt:
        run.verdict = "interrupted"
    finally:
        run.wall = time.perf_counter() - began


def chat_prompt(task: Task, last: Turn | None) -> list[dict[str, str]]:
    """The task, and the last answer with its failure; earlier turns are omitted to keep the prompt short."""
    files = "".join(f"{name}\n```\n{_text(content)}\n```\n\n" for name, content in task.files.items())
    example = task.editable[0] if task.editable else "name.py"
    messages = [
        {
            "role": "user",
            "content": REQUEST.format(text=task.text, tests=", ".join(task.tests), files=files, example=example),
        }
    ]
    if last is not None:
        notes = "".join(f"{note}\n" for note in last.notes)
        messages.append({"role": "assistant", "content": last.reply.text or "(nothing)"})
        messages.append({"role": "user", "content": FAILED.format(output=last.output, notes=notes)})
    return messages


def completion_prompt(workspace: Workspace, last: Turn | None) -> str:
    """A Python text up to the file to write; from the second turn on it includes the last answer and its failure."""
    task = workspace.task
    [target] = task.editable
    tests = "\n\n".join(f"# {name}\n{_text(task.files[name])}" for name in task.tests)
    head = f'"""\n{task.text}\n"""\n\n{tests}\n\n'
    if last is None:
        return f"{head}# {target}\n{_text(task.files[target])}\n\n# {target}, complete:\n"
    failure = "\n".join(f"# {line}" for line in last.output.splitlines())
    return (
        f"{head}# {target}, which fails these tests:\n{_text(workspace.files[target])}\n\n{failure}\n\n# {target},"
        " corrected:\n"
    )


def _continued(task: Task, text: str) -> Edits:
    [target] = task.editable
    return Edits({target: whole_statements(text)})


def _text(content: bytes) -> str:
    try:
        return content.decode().rstrip("\n")
    except UnicodeDecodeError:
        return f"({len(content):,} bytes that are no text)"
