"""The tools that the agent offers to a model: read and write files of the task, and run its tests."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laneformer.infer.agent.answers import LONGEST_NAME, Edits, plain, refusal
from laneformer.infer.agent.task import MOST_OUTPUT
from laneformer.infer.agent.turns import Call, Workspace
from laneformer.infer.sandbox.sandbox import Outcome
from laneformer.infer.text.values import read_object

MOST_TEXT = 20_000  # characters of a file in the result of a call
PASSED = "The tests pass."


def _function(name: str, description: str, **properties: str) -> dict[str, Any]:
    """A tool in OpenAI's form. properties: name -> description of each argument; all are required strings."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _function("read_file", "Read a file of the task.", path="Name of the file"),
    _function("write_file", "Write a file of the task, whole.", path="Name of the file", content="All of its text"),
    _function("run_tests", "Run the tests. Returns what fails."),
)


@dataclass
class Work:
    """The effects of the tool calls of one answer."""

    calls: list[Call]
    written: list[str]
    """Names of the files that were written."""
    outcome: Outcome | None = None
    """Outcome of the last run of the tests; None if they did not run."""
    output: str = ""
    """Output of the last run of the tests."""
    tests: float = 0.0
    """Seconds in the sandbox."""


def execute(
    asked: Sequence[tuple[str, str, str]], workspace: Workspace, run_tests: Callable[[], tuple[Outcome, str]]
) -> Work:
    """Executes calls in order, up to a run of the tests that passes.

    asked: (id, name, arguments) of each call. The result of a call that cannot be executed is a line with the reason.
    Raises InputError or HarnessError as `Workspace.apply` and the sandbox do.
    """
    work = Work([], [])
    for id, name, arguments in asked:
        began = time.perf_counter()
        result = _execute(name, read_object(arguments or "{}"), workspace, run_tests, work)
        work.calls.append(Call(id or f"call_{len(work.calls)}", name, arguments, result, time.perf_counter() - began))
        if name == "run_tests" and work.outcome is not None and work.outcome.verdict == "passed":
            break
    return work


def _execute(
    name: str,
    values: dict[str, Any] | None,
    workspace: Workspace,
    run_tests: Callable[[], tuple[Outcome, str]],
    work: Work,
) -> str:
    """Executes one call and returns its result. values: the arguments, None if they are not a JSON object."""
    known = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in TOOLS}
    if name not in known:
        return f"error: unknown tool {name[:40]}; the tools are {', '.join(known)}"
    wanted = known[name]
    if values is None or {*values} != {*wanted} or not all(isinstance(value, str) for value in values.values()):
        return f"error: the arguments must be {json.dumps(dict.fromkeys(wanted, '...'))}"
    if name == "run_tests":
        began = time.perf_counter()
        work.outcome, work.output = run_tests()
        work.tests += time.perf_counter() - began
        return PASSED if work.outcome.verdict == "passed" else work.output[:MOST_OUTPUT] or work.outcome.verdict
    path = plain(values["path"])
    return _read(path, workspace) if name == "read_file" else _write(path, values["content"], workspace, work)


def _read(path: str, workspace: Workspace) -> str:
    if path not in workspace.files:
        return f"error: no file {path[:LONGEST_NAME]}; the files are {', '.join(workspace.files)}"
    text = workspace.files[path].decode(errors="replace")
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n({len(text) - MOST_TEXT:,} characters more)"


def _write(path: str, text: str, workspace: Workspace, work: Work) -> str:
    if path in workspace.task.tests:
        return f"error: {path} stays as it is: it is one of the tests"
    if (why := refusal(path, workspace.files)) is not None:
        return f"error: {path[:LONGEST_NAME]} was not written: {why}"
    workspace.apply(Edits({path: text}))
    work.written.append(path)
    return f"wrote {path}, {len(text.splitlines()):,} lines"
