"""The turns of an agent's run, with their times, and the copy of the task that they change."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from laneformer.errors import InputError
from laneformer.infer.agent.answers import Edits
from laneformer.infer.agent.client import Reply
from laneformer.infer.agent.task import FAILURE, MOST_OUTPUT, Task, test_program
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.sandbox.sandbox import Outcome

FIRST, DECODE, TESTS, WAITING = "prompt, up to the first token", "decode", "tests", "waiting"


@dataclass(frozen=True)
class Call:
    """A tool call that was executed."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them; a JSON object if they are valid."""
    result: str
    """The result that was sent to the model."""
    seconds: float


@dataclass(frozen=True)
class Turn:
    """One answer and its effects. Times are in seconds."""

    number: int
    reply: Reply
    written: tuple[str, ...]
    """Names of the files that the answer changed."""
    notes: tuple[str, ...]
    """Notes for the model about files that were not written."""
    outcome: Outcome | None
    """Outcome of the tests; None if they did not run."""
    output: str
    """Output of the tests if they fail."""
    tests: float
    """Time in the sandbox, including the start of the sandbox."""
    total: float
    """Time of the whole turn."""
    calls: tuple[Call, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the tests passed."""
        return self.outcome is not None and self.outcome.verdict == "passed"


@dataclass
class Run:
    """A task, and the turns of one attempt to solve it."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    verdict: Literal["passed", "failed", "interrupted", "error"] = "error"
    wall: float = 0.0
    """Seconds from the first request to the end."""

    @property
    def tokens(self) -> int | None:
        """Number of generated tokens; None if the server did not report it."""
        return _sum_of_known(turn.reply.tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of all prompts; None if the server did not report it."""
        return _sum_of_known(turn.reply.prompt_tokens for turn in self.turns)

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens that the server did not compute; None if the server did not report it."""
        return _sum_of_known(turn.reply.cached for turn in self.turns)

    @property
    def rate(self) -> float | None:
        """Tokens per second while decoding, without the first token of each answer; None if unknown."""
        seconds = sum(turn.reply.decode for turn in self.turns)
        return (
            None
            if not self.tokens or not seconds
            else sum(max((turn.reply.tokens or 0) - 1, 0) for turn in self.turns) / seconds or None
        )

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens per pass over the weights, without the first token of each answer; None if the server
        did not report drafts.
        """
        found = [turn.reply.drafting for turn in self.turns if turn.reply.drafting is not None]
        if len(found) < len(self.turns) or not (passes := sum(one["passes"] for one in found)):
            return None
        return 1 + sum(one["accepted_tokens"] for one in found) / passes

    @property
    def split(self) -> dict[str, float]:
        """The parts of the wall time, in seconds. They add up to it."""
        parts = {
            FIRST: sum(turn.reply.first for turn in self.turns),
            DECODE: sum(turn.reply.decode for turn in self.turns),
            TESTS: sum(turn.tests for turn in self.turns),
        }
        if self.verdict in ("interrupted", "error"):
            parts["a turn that did not end"] = self.wall - sum(turn.total for turn in self.turns)
        return parts | {WAITING: self.wall - sum(parts.values())}


def _sum_of_known(counts: Iterable[int | None]) -> int | None:
    """The sum of the counts; None if one is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


class Workspace:
    """The copy of a task that the model's answers are written to."""

    def __init__(self, task: Task, folder: Path):
        """Writes the files of the task to `folder`. Raises InputError if that fails."""
        self.task, self.folder, self.files = task, folder, dict(task.files)
        for name in self.files:
            self._write(name)

    def apply(self, edits: Edits) -> None:
        """Writes the files of an answer. Raises InputError for a name that the file system refuses."""
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
        """Runs the tests in the sandbox. Returns the outcome, and the output of the tests if they fail. seconds: limit
        on CPU time, on a machine of nominal speed.
        """
        outcome = judge.run(test_program(self.files, self.task.command), seconds, MOST_OUTPUT + len(FAILURE) + 2)
        return outcome, outcome.error.removeprefix(f"{FAILURE}: ").strip()
