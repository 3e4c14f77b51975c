"""The prompts for the model: the task, and the earlier turns that `--history` selects."""

import json
from typing import Any, Literal

from laneformer.errors import InputError
from laneformer.infer.agent.client import Model, Reply
from laneformer.infer.agent.task import Task
from laneformer.infer.agent.turns import Turn, Workspace
from laneformer.infer.text.values import read_object

History = Literal["auto", "whole", "last"]
Prompt = str | list[dict[str, Any]]

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
TOOL_REQUEST = """{text}

These are the files: {files}. Leave {tests} as they are, they are the tests.
Use the tools: read files, write the files that you change or add, and run the tests until they pass.
"""
TOOLS_FAILED = """The tests fail:
```
{output}
```
{notes}Correct the files with the tools."""
MARGIN = 1.25  # factor on estimated tokens, because output of tests has more tokens per character than other text


class Conversation:
    """The prompt of each turn: messages in a chat, otherwise Python text that ends where the file to write begins."""

    def __init__(self, workspace: Workspace, model: Model, history: History, room: int, tools: bool = False):
        """room: limit on the tokens of an answer. tools: whether the model has tools. Raises InputError for a task that
        this model cannot answer.
        """
        self._workspace, self._model, self._history, self._room = workspace, model, history, room
        self._tools = tools
        task = workspace.task
        if model.mode != "chat" and len(task.editable) != 1:
            raise InputError(
                f"{task.name}: a model without chat writes one file, but the task has "
                f"{', '.join(task.editable) or 'none'} to write: give a task with one file, or a chat model"
            )
        self.prompt: Prompt = self._request() if model.mode == "chat" else _unfinished(task)

    def add(self, turn: Turn) -> None:
        """Makes the prompt of the next turn. If the history is whole and fits the context, the prompt continues the
        previous prompt and its answer. Otherwise it contains only the last turn, and later turns are added to that.
        """
        longer = self._longer(turn)
        if not self._is_whole(turn.reply) or not self._fits(longer, turn.reply):
            longer = self._short(turn)
        self.prompt = longer

    def _is_whole(self, reply: Reply) -> bool:
        """Whether the prompt should contain all earlier turns."""
        if self._history != "auto":
            return self._history == "whole"
        if self._tools:  # earlier turns contain the files that were read
            return True
        keeps = (self._model.conditions or {}).get(
            "prefix_cache", True
        )  # our server reports cached tokens even without a prefix cache
        return reply.cached is not None and bool(keeps)

    def _fits(self, prompt: Prompt, reply: Reply) -> bool:
        """Whether a prompt leaves room for an answer, by an estimate. True if the sizes are unknown. reply: the answer
        to the previous prompt.
        """
        context = self._model.context
        if context is None or reply.prompt_tokens is None or reply.tokens is None:
            return True
        before = _characters(self.prompt)
        added = _characters(prompt) - before - len(reply.text)
        return reply.prompt_tokens * (1 + MARGIN * added / before) + reply.tokens + self._room <= context

    def _longer(self, turn: Turn) -> Prompt:
        """The previous prompt, its answer and the failure."""
        if isinstance(self.prompt, list):
            return self.prompt + self._answered(turn)
        [target] = self._workspace.task.editable
        failing = f"\n\n# These tests fail:\n{_failure(turn)}\n\n# {target}, corrected:\n"
        return self.prompt + turn.reply.text + failing

    def _request(self) -> list[dict[str, Any]]:
        """The messages of the first prompt of a chat."""
        task, tests = self._workspace.task, ", ".join(self._workspace.task.tests)
        if self._tools:
            text = TOOL_REQUEST.format(text=task.text, tests=tests, files=", ".join(self._workspace.files))
            return [{"role": "user", "content": text}]
        files = "".join(f"{name}\n```\n{_text(content)}\n```\n\n" for name, content in task.files.items())
        example = task.editable[0] if task.editable else "name.py"
        content = REQUEST.format(text=task.text, tests=tests, files=files, example=example)
        return [{"role": "user", "content": content}]

    def _answered(self, turn: Turn) -> list[dict[str, Any]]:
        """The messages that a turn adds: the answer, and the results of its calls or the output of the tests."""
        notes = "".join(f"{note}\n" for note in turn.notes)
        if not turn.calls:
            form = TOOLS_FAILED if self._tools else FAILED
            return [
                {"role": "assistant", "content": turn.reply.text or "(nothing)"},
                {"role": "user", "content": form.format(output=turn.output, notes=notes)},
            ]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in turn.calls
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": call.result} for call in turn.calls]
        thought = {"reasoning_content": turn.reply.reasoning} if turn.reply.reasoning else {}
        return [{"role": "assistant", "content": turn.reply.text, **thought, "tool_calls": calls}, *results]

    def _short(self, turn: Turn) -> Prompt:
        """A prompt with the last turn only."""
        task = self._workspace.task
        if isinstance(self.prompt, list):
            return self._request() + self._answered(turn)
        [target] = task.editable
        failing = _text(self._workspace.files[target])
        return (
            f"{_head(task)}# {target}, which fails these tests:\n{failing}\n\n{_failure(turn)}\n\n# {target},"
            " corrected:\n"
        )


def _unfinished(task: Task) -> str:
    [target] = task.editable
    return f"{_head(task)}# {target}\n{_text(task.files[target])}\n\n# {target}, complete:\n"


def _head(task: Task) -> str:
    tests = "\n\n".join(f"# {name}\n{_text(task.files[name])}" for name in task.tests)
    return f'"""\n{task.text}\n"""\n\n{tests}\n\n'


def _failure(turn: Turn) -> str:
    return "\n".join(f"# {line}" for line in turn.output.splitlines())


def _text(content: bytes) -> str:
    try:
        return content.decode().rstrip("\n")
    except UnicodeDecodeError:
        return f"({len(content):,} bytes that are no text)"


def _object(arguments: str) -> str:
    """The arguments of a call as a JSON object, because servers accept nothing else in a message."""
    return "{}" if read_object(arguments) is None else arguments


def _characters(prompt: Prompt) -> int:
    """Number of characters in a prompt."""
    if isinstance(prompt, str):
        return len(prompt)
    called = (json.dumps(message["tool_calls"]) for message in prompt if "tool_calls" in message)
    return sum(len(message["content"]) for message in prompt) + sum(map(len, called))
