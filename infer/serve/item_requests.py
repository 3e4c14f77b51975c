"""Converts requests in the form of OpenAI's Responses API to requests for a chat. A conversation is a list of items.
All tools are functions. The server keeps no conversations, so each request contains the whole conversation.
"""

from typing import Any, NamedTuple

from laneformer.infer.serve.body import ApiError, printable, shown, wrong
from laneformer.infer.serve.grammars import ITEMS_FORM
from laneformer.infer.text.values import read_object

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
# Parameters of a chat that do not exist here.
NEVER = ("messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "return_token_ids", "return_timeline")
ABSENT = ("previous_response_id", "conversation", "prompt", "context_management")  # not supported, with any value
WITHOUT_EFFECT = ("truncation",)


class Asked(NamedTuple):
    """A request, converted to a request for a chat."""

    chat: dict[str, Any]
    """Fields of the request for a chat."""
    repeated: dict[str, Any]
    """Fields of the request that its answer repeats."""
    ignored: list[str]
    """Names of parameters without effect."""


def read_items(fields: dict[str, Any]) -> Asked:
    """The request in the fields of a body. Raises ApiError with the name of the parameter. `read_call` then checks the
    parameters that a chat also has.
    """
    left, ignored = {name: value for name, value in fields.items() if value is not None}, []
    for name in ABSENT:
        if name in left:
            raise ApiError(
                400,
                f"{name} is not supported, because this server keeps no conversations: send all items in input",
                param=name,
                code="unsupported_parameter",
            )
    for name in NEVER:
        if name in left:
            raise ApiError(400, f"unknown parameter {name}", param=name, code="unknown_parameter")
    ignored += [name for name in WITHOUT_EFFECT if left.pop(name, "disabled") != "disabled"]
    asked = {name: left.get(name) for name in ("instructions", "temperature", "top_p", "user", "reasoning")}
    asked |= {"tools": left.get("tools", []), "tool_choice": left.get("tool_choice", "auto")}
    asked |= {"parallel_tool_calls": left.get("parallel_tool_calls", True), "metadata": left.get("metadata", {})}
    form = _take_form(left, ignored)
    asked["text"] = {"format": form}
    made = {ITEMS_FORM: _as_of_chat(form), "messages": _messages(left, ignored)}
    made |= {**_limits(left), **_included(left, ignored)}
    asked["max_output_tokens"] = made.get("max_completion_tokens")
    tools = left.pop("tools", [])
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of tools")
    made["tools"] = [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools)]
    if "tool_choice" in left:
        made["tool_choice"] = _choice(left.pop("tool_choice"))
    return Asked({**left, **made}, asked, ignored)


def _messages(left: dict[str, Any], ignored: list[str]) -> list[dict[str, Any]]:
    """The messages of the chat, from `input` and `instructions`. Adds the names of fields without effect to `ignored`.
    Raises ApiError.
    """
    items, instructions = left.pop("input", None), left.pop("instructions", None)
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise wrong("input", items, "a string, or a list of at least one item")
    if not isinstance(instructions, str | None):
        raise wrong("instructions", instructions, "a string")
    made: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    thought = ""  # reasoning that belongs to the next message
    for i, item in enumerate(items):
        path = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in ITEMS:
            if isinstance(kind, str):
                raise ApiError(400, f"{path}.type = {shown(kind)} is not supported: give {', '.join(ITEMS)}",
                               param=f"{path}.type", code="unsupported_parameter")  # fmt: skip
            raise wrong(path, item, 'an item, as in {"role": "user", "content": ...}')
        if kind == "reasoning":
            thought += _joined(item.get("content") or [], f"{path}.content", ("reasoning_text",), "")
            continue
        if kind == "function_call_output":
            content = _joined(item.get("output"), f"{path}.output", TEXT_PARTS)
            made.append({"role": "tool", "tool_call_id": _text_of(item, "call_id", path), "content": content})
            continue
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise wrong(f"{path}.role", role, ", ".join(ROLES))
            message = {"role": role, "content": _joined(item.get("content"), f"{path}.content", TEXT_PARTS)}
        else:
            function = {name: _text_of(item, name, path) for name in ("name", "arguments")}
            if read_object(function["arguments"] or "{}") is None:
                raise wrong(f"{path}.arguments", function["arguments"], "a JSON object in a string")
            call = {"id": _text_of(item, "call_id", path), "type": "function", "function": function}
            message = {"role": "assistant", "tool_calls": [call]}
        assistant = message["role"] == "assistant"
        if assistant and thought:
            message["reasoning_content"] = thought
        if kind == "function_call" and not thought and made and made[-1]["role"] == "assistant":
            made[-1].setdefault("tool_calls", []).append(call)  # calls and text of one answer are one message
        else:
            made.append(message)
        thought = "" if assistant else thought
    if thought:
        ignored.append("the reasoning at the end of input")
    if not made:
        raise wrong("input", items, "at least one message")
    return made


def _text_of(item: dict[str, Any], name: str, path: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise wrong(f"{path}.{name}", value, "a string")
    return value


def _joined(content: Any, path: str, kinds: tuple[str, ...], between: str = "\n") -> str:
    """The content of an item: a text, or the joined texts of parts. kinds: types of the parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
    ]
    if len(texts) != len(parts):
        raise wrong(path, content, f"a string, or parts of type {', '.join(kinds)} with a text")
    return between.join(texts)


def _limits(left: dict[str, Any]) -> dict[str, Any]:
    limit = left.pop("max_output_tokens", None)
    if limit is None:
        return {}
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise wrong("max_output_tokens", limit, "a whole number of at least 1")
    return {"max_completion_tokens": limit}


def _take_form(left: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The form of the answer, from `text`; by default {"type": "text"}."""
    text = left.pop("text", {})
    if not isinstance(text, dict):
        raise wrong("text", text, 'an object, as in {"format": {"type": "text"}}')
    for name, value in text.items():
        path = f"text.{printable(name)}"
        if name == "verbosity" and value is not None:
            ignored.append(path)
        elif value is not None and name != "format":
            raise ApiError(400, f"{path} = {shown(value)} is not supported: leave it out", param=path,
                           code="unsupported_parameter")  # fmt: skip
    return text.get("format") or {"type": "text"}


def _as_of_chat(form: Any) -> Any:
    """A form as a chat's `response_format`, in which the schema is in an inner object."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}


def _included(left: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The parameters of a chat for `include` and `top_logprobs`. Only log-probabilities can be included."""
    included, top = left.pop("include", []), left.pop("top_logprobs", 0)
    if not isinstance(included, list):
        raise wrong("include", included, f'a list, as in ["{LOGPROBS}"]')
    for name in included:
        if name == "reasoning.encrypted_content":
            ignored.append("include: reasoning.encrypted_content")
        elif name != LOGPROBS:
            raise ApiError(400, f"include = {shown(name)} is not supported: leave it out", param="include",
                           code="unsupported_parameter")  # fmt: skip
    return {"logprobs": True, "top_logprobs": top} if top or LOGPROBS in included else {}


def _tool(tool: Any, path: str, ignored: list[str]) -> dict[str, Any]:
    """A tool in the form of a chat's tools."""
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(path, tool, 'an object {"type": "function", "name": ..., "parameters": ...}')
    if tool["type"] != "function":
        return tool  # `read_tools` refuses it
    rest = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": rest}


def _choice(choice: Any) -> Any:
    """A `tool_choice` in the form of a chat."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
