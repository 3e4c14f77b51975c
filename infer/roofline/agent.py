"""The time of an agent's task, and the share of it that generating tokens takes."""

import math
from dataclasses import dataclass

from laneformer.errors import ConfigError
from laneformer.infer.roofline.table import PROJECTED, Column, Table

SPEEDS = (30.0, 100.0, 300.0, 1000.0, 3000.0)  # tokens per second, for comparison


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """A task: rounds of generating, running tools and running tests. The times are examples: measure your own."""

    tokens: int = 50_000
    """Number of tokens that the whole task generates."""
    iterations: int = 10
    """Number of rounds."""
    tool_seconds: float = 1.0
    """Time of tools in each round (edits, searches, reading prompts), s; an example, not a measurement."""
    test_seconds: float = 5.0
    """Time of builds and tests in each round, s; an example, not a measurement."""

    def check(self) -> None:
        """Raises ConfigError for a value outside its range."""
        if self.tokens < 1 or self.iterations < 1:
            raise ConfigError(f"--tokens and --iterations must be at least 1, got {self.tokens} and {self.iterations}")
        for name, value in (("tool", self.tool_seconds), ("test", self.test_seconds)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name}-seconds must be at least 0, got {value:g}")

    def split(self, rate: float) -> tuple[float, float, float]:
        """Seconds of generating, of tools and of tests. rate: tokens per second."""
        return self.tokens / rate, self.iterations * self.tool_seconds, self.iterations * self.test_seconds

    @property
    def even_rate(self) -> float | None:
        """Tokens per second at which generating takes as long as tools and tests together; None if these take no
        time.
        """
        _, *rest = self.split(1)
        return self.tokens / sum(rest) if sum(rest) else None


def agent_table(task: AgentTask, rates: dict[str, tuple[float, str]]) -> Table:
    """A table of the split of the task's time at each speed. rates: name -> (tokens per second, origin). Raises
    ConfigError for a task with a value outside its range.
    """
    task.check()
    rows = []
    for name, (rate, origin) in rates.items():
        generating, tools, tests = task.split(rate)
        total = generating + tools + tests
        longest = max((generating, "generating"), (tools, "tools"), (tests, "tests"))[1]
        rows.append((name, rate, origin, generating, tools, tests, total, 100 * generating / total, longest))
    even = task.even_rate
    limit = (
        "nothing else takes time"
        if even is None
        else f"generating takes more than half of the time below {even:,.0f} tok/s"
    )
    seconds = [Column(f"{what} s", ",.1f", PROJECTED) for what in ("generating", "tools", "tests", "total")]
    return Table(
        "agent",
        f"An agent's task of {task.tokens:,} tokens in {task.iterations} rounds: {limit}",
        (
            Column("speed"),
            Column("tok/s", ",.0f"),
            Column("origin"),
            *seconds,
            Column("generating %", ".0f", PROJECTED),
            Column("longest"),
        ),
        rows,
        f"{task.tool_seconds:g} s of tools and {task.test_seconds:g} s of tests a round, one after the other, the same"
        " at every speed; reading prompts belongs to the tools; a constant speed",
    )


def usual_rates() -> dict[str, tuple[float, str]]:
    """Speeds for comparison, in the form of the argument of `agent_table`."""
    return {f"{rate:,.0f} tok/s": (rate, "example") for rate in SPEEDS}
