"""The agent's loop: ask for code, write it to a copy of the task, run the tests in the sandbox, report the failure."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from laneformer.errors import InputError
from laneformer.infer.agent.answers import Edits, read_edits
from laneformer.infer.agent.client import Model, Reply
from laneformer.infer.agent.conversation import Conversation, History, Prompt
from laneformer.infer.agent.task import Task
from laneformer.infer.agent.tools import TOOLS, execute
from laneformer.infer.agent.turns import Run, Turn, Workspace
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.evaluate.spans import whole_statements
from laneformer.infer.sandbox.sandbox import Outcome

COMPLETION_STOPS = ("\nif __name__", "\n# test", "\nimport unittest", "\n```")  # at most four, OpenAI's limit


def check_start(workspace: Workspace, judge: Judge, seconds: float) -> None:
    """Raises InputError for a task whose tests pass at the start, or that has no tests."""
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
    history: History,
    options: dict[str, Any],
    tools: bool,
    progress: Callable[[int, int], None],
    report: Callable[[Turn, Prompt], None],
) -> None:
    """Fills `run` turn by turn, so that finished turns are kept if it is interrupted.

    history: earlier turns that a prompt contains. options: options of the requests. tools: whether the model has tools.
    progress: called with the turn and the number of characters so far. report: called with each finished turn and its
    prompt. Raises InputError or HarnessError if the server or the sandbox fails.
    """
    conversation = Conversation(workspace, model, history, options["max_tokens"], tools)
    options = {**options, "tools": [*TOOLS]} if tools else options
    stops = () if model.mode == "chat" else COMPLETION_STOPS
    began = time.perf_counter()
    try:
        for number in range(1, max_turns + 1):
            start = time.perf_counter()
            prompt = conversation.prompt
            reply = model.ask(prompt, stops, partial(progress, number), **options)
            turn = _act(number, reply, workspace, model, lambda: workspace.test(judge, test_seconds), start)
            run.turns.append(turn)
            report(turn, prompt)
            if turn.passed:
                run.verdict = "passed"
                return
            conversation.add(turn)
        run.verdict = "failed"
    except KeyboardInterrupt:
        run.verdict = "interrupted"
    finally:
        run.wall = time.perf_counter() - began


def _act(
    number: int,
    reply: Reply,
    workspace: Workspace,
    model: Model,
    run_tests: Callable[[], tuple[Outcome, str]],
    start: float,
) -> Turn:
    """Carries out an answer: executes its tool calls, or writes its files and runs the tests. start: time at which the
    turn started.
    """
    if reply.calls:
        work = execute(reply.calls, workspace, run_tests)
        end = time.perf_counter()
        written = tuple(dict.fromkeys(work.written))
        return Turn(number, reply, written, (), work.outcome, work.output, work.tests, end - start, tuple(work.calls))
    task = workspace.task
    chat = model.mode == "chat"
    answered = (reply.text, task.editable, task.tests, workspace.files)
    edits = read_edits(*answered) if chat else _continued(task, reply.text)
    workspace.apply(edits)
    testing = time.perf_counter()
    outcome, output = run_tests()
    end = time.perf_counter()
    return Turn(number, reply, tuple(edits.files), edits.notes, outcome, output, end - testing, end - start)


def _continued(task: Task, text: str) -> Edits:
    """The edits of an answer in completion mode, which is the content of the only file."""
    [target] = task.editable
    return Edits({target: whole_statements(text)})
