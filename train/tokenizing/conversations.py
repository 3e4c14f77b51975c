"""Reads conversations from the rows of instruction datasets, in the usual shapes.

    messages                            a list of {role, content}, optionally with tool calls
    conversations                       a list of {from, value}: human, gpt, system, tool
    prompt + response and the like      two columns; the prompt may be a list of messages (Nemotron: input, output)

and optionally a column of system prompts and one of tool definitions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneformer.errors import InputError
from laneformer.infer.text.chat_template import check_messages

MESSAGES = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("input", "output"),
)
SYSTEM, TOOLS = ("system_prompt", "system"), "tools"
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Shape:
    """The columns of a dataset that hold a conversation: a list of messages, or a prompt and its answer."""

    columns: tuple[str, ...]
    """One column of messages, or the columns of prompt and answer."""
    beside: tuple[str, ...]
    """Further columns of the dataset: those of SYSTEM and TOOLS, and "input" with instruction and output."""

    @classmethod
    def find(cls, columns: Sequence[str], chosen: Sequence[str] = ()) -> "Shape":
        """The shape of a dataset with these columns. chosen: one column of messages, or a prompt and its answer.

        Raises InputError for an unknown shape.
        """
        for candidate in [chosen] if chosen else [*((name,) for name in MESSAGES), *PAIRS]:
            if set(candidate) <= set(columns):
                extra = ("input",) if tuple(candidate) == ("instruction", "output") else ()
                return cls(
                    tuple(candidate),
                    tuple(name for name in (*SYSTEM, TOOLS, *extra) if name in columns and name not in candidate),
                )
        what = f"no column {' and '.join(map(repr, chosen))}" if chosen else "no conversations in a known shape"
        raise InputError(
            f"{what}; name the column of messages with --column, or use --prompt-column and --answer-column; choose"
            f" from {', '.join(columns)}"
        )

    def read(self, row: Mapping[str, Any]) -> Conversation | None:
        """The conversation of a row; None if it has no messages, or a message without text.

        Raises InputError for a row of another shape.
        """
        if any(row[name] is None for name in self.columns):
            return None
        if len(self.columns) == 1:
            messages = _messages(row[self.columns[0]])
        else:
            prompt, answer = (row[name] for name in self.columns)
            if isinstance(prompt, str):
                more = row["input"] if "input" in self.beside else None
                messages = [{"role": "user", "content": f"{prompt}\n\n{more}" if more else prompt}]
            else:
                messages = _messages(prompt)
            messages.append({"role": "assistant", "content": answer})
        system = next((row[name] for name in SYSTEM if name in self.beside and row[name]), None)
        if system and messages and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        if not messages:
            return None
        check_messages(messages)
        messages = [message for message in messages if message["role"] != "system" or message.get("content")]
        if not messages or any(message.get("content") is None for message in messages):
            return None
        return Conversation(messages, _tools(row[TOOLS]) if TOOLS in self.beside else None)


def _messages(value: Any) -> list[dict[str, Any]]:
    """A list of messages with role and content, without the null fields that tables pad rows with."""
    # A table may hold the list as a list per field.
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise InputError(f"messages must be a list, not {type(value).__name__}")
    return [_message(i, each) for i, each in enumerate(value)]


def _message(i: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"messages[{i}] must be an object with a role and content, not {type(value).__name__}")
    message = _without_nulls(value)
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if speaker not in SPEAKERS:
            raise InputError(f"messages[{i}] is from {speaker!r}; expected one of {', '.join(SPEAKERS)}")
        message["role"] = SPEAKERS[speaker]
        if "value" in message:
            message["content"] = message.pop("value")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    else:
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_text(i, part) for part in message["content"])
    return message


def _text(i: int, part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise InputError(f"messages[{i}].content has a part that is not text; remove such rows")
    return part["text"]


def _tools(value: Any) -> list[Any] | None:
    try:
        value = json.loads(value) if isinstance(value, str) and value else value
    except ValueError as error:
        raise InputError(f"{TOOLS} must be a list of tool definitions: {error}") from None
    return _without_nulls(value) or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
