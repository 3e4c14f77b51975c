"""Reports of an agent's run: a line per turn, the split of its time, its time at other speeds, and the record."""

import importlib.metadata
import platform
from dataclasses import asdict
from typing import Any

from laneformer.infer.agent.client import Model
from laneformer.infer.agent.task import Task
from laneformer.infer.agent.turns import FIRST, TESTS, WAITING, Run, Turn
from laneformer.infer.roofline.agent import AgentTask, agent_table, usual_rates
from laneformer.infer.roofline.table import MEASURED, Column, Table

SCHEMA = "laneformer.agent/1"


def turn_line(turn: Turn, max_turns: int) -> str:
    """A turn in one line, for example "turn 2/6: passed; 312 tokens, 1,540 tok/s, first token 35 ms, decode 0.20 s,
    tests 0.31 s".
    """
    reply = turn.reply
    result: str = "no tests" if turn.outcome is None else turn.outcome.verdict
    if turn.calls:
        result = f"{', '.join(call.name for call in turn.calls)}: {result}"
    if not turn.passed and turn.output:
        result += f" ({turn.output.splitlines()[-1].strip()[:80]})"
    tokens = "tokens unknown" if reply.tokens is None else f"{reply.tokens:,} tokens"
    if reply.tokens is not None and reply.tokens > 1 and reply.decode:
        tokens += f", {(reply.tokens - 1) / reply.decode:,.0f} tok/s"
        tokens += f" at {reply.drafting['tokens_per_pass']:.2f} tokens per pass" if reply.drafting else ""
    queue = f"queue {reply.queue:.2f} s, " if reply.queue >= 0.005 else ""
    cut = ", cut off at --max-new-tokens" if reply.finish_reason == "length" else ""
    prompt = f" ({reply.cached:,} of {reply.prompt_tokens:,} tokens cached)" if reply.cached else ""
    times = f"first token {1000 * reply.first:,.0f} ms{prompt}, decode {reply.decode:.2f} s, tests {turn.tests:.2f} s"
    return f"turn {turn.number}/{max_turns}: {result}; {tokens}, {queue}{times}{cut}"


def split_table(run: Run, conditions: dict[str, Any]) -> Table:
    """The table of the parts of the wall time. conditions: the result of `conditions`."""
    rows = [(name, seconds, 100 * seconds / run.wall) for name, seconds in run.split.items()]
    columns = (Column("part"), Column("s", ",.2f", MEASURED), Column("%", ".1f", MEASURED))
    server = conditions["server"] or {}
    engine = (
        f"; {server['model']}, backend {server['backend']}, {server['devices']} x {server['device']}" if server else ""
    )
    count = "an unknown number of" if run.tokens is None else f"{run.tokens:,}"
    speed = "" if run.rate is None else f", {run.rate:,.0f} tok/s while decoding"
    if speed and run.tokens_per_pass is not None:
        speed += f" at {run.tokens_per_pass:.2f} tokens per pass (speculative decoding)"
    title = f"{run.task.name}: {run.verdict} after {len(run.turns)} turns, {count} tokens{speed}"
    prompts = "unknown" if run.prompt_tokens is None else f"{run.prompt_tokens:,} tokens"
    if run.cached_tokens is not None:
        prompts += f", {run.cached_tokens:,} of them from the server's cache"
    mode = conditions["mode"] + (" with tools" if conditions["tools"] else "")
    sampling = f"{mode}, temperature {conditions['options']['temperature']:g}"
    return Table(
        "split",
        title,
        columns,
        [*rows, ("together", run.wall, 100.0)],
        f"measured at the client of {conditions['base_url']}, model {conditions['model']}{engine}; {sampling}, "
        f"sandbox {conditions['sandbox']['level']}; history {conditions['history']}, prompts {prompts}; tokens as the"
        " server counts them; "
        "waiting: the server's queue if it reports that, connections, files",
    )


def projection(run: Run) -> Table | None:
    """A table of the time of the same loop at other generation speeds; None if the speed of this run is unknown."""
    if run.rate is None or run.tokens is None:
        return None
    split, rounds = run.split, len(run.turns)
    task = AgentTask(
        tokens=run.tokens,
        iterations=rounds,
        tool_seconds=round((split[FIRST] + split[WAITING]) / rounds, 4),
        test_seconds=round(split[TESTS] / rounds, 4),
    )
    return agent_table(task, {"this run": (run.rate, MEASURED)} | usual_rates())


def conditions(
    model: Model, judge_report: dict[str, Any], sandbox: dict[str, Any], options: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The conditions that the figures depend on.

    judge_report, sandbox: reports of the judge and of its sandbox. options: options of the requests. more: further
    conditions.
    """
    return {
        "base_url": model.base_url,
        "model": model.name,
        "mode": model.mode,
        "options": options,
        "server": model.conditions,
        **more,
        "sandbox": sandbox,
        "limits": judge_report,
        "measured_at": "client",
        "software": {"openai": importlib.metadata.version("openai"), "python": platform.python_version()},
    }


def record(run: Run, described: dict[str, Any], task: Task) -> dict[str, Any]:
    """The record for JSON. Times are in seconds. described: the result of `conditions`."""
    projected = projection(run) if run.turns else None
    return {
        "schema": SCHEMA,
        "verdict": run.verdict,
        "task": {"name": task.name, "sha256": task.sha256, "tests": list(task.tests)},
        "conditions": described,
        "wall": run.wall,
        "split": run.split,
        "tokens": run.tokens,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "tokens_per_second": run.rate,
        "tokens_per_pass": run.tokens_per_pass,
        "turns": [asdict(turn) for turn in run.turns],
        "projected": projected.record() if projected else None,
    }
