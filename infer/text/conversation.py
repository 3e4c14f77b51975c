"""Converts the conversation of a request to the form that a chat template can write.

OpenAI's clients send the arguments of calls as JSON text, but templates read them as objects. A developer message
becomes a system message if the template has no role "developer". For a template that cannot write tools, tools are
described in words: their definitions in the system message, and calls and results as text, in the format of Hermes,
which many models were trained on.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laneformer.errors import InputError
from laneformer.infer.text.tool_calls import HARMONY, ToolRequest
from laneformer.infer.text.values import json_text, read_object

if TYPE_CHECKING:
    from laneformer.infer.text.chat_template import ChatTemplate

NO_FORMAT = (
    "tool_choice = {choice}: the chat template has no tool format, so only a grammar can require a call; use"
    " \"auto\", or a template that reads tools, or pip install 'laneformer[grammar]'"
)
TOOLS_IN_WORDS = """\
# Tools

You may call functions. These are their signatures, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between these tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def encode(
    chat: "ChatTemplate", messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None, values: Mapping[str, Any]
) -> list[int]:
    """Token ids of the prompt for an answer to these messages. Raises InputError as `ChatTemplate.encode` does, and if
    the prompt must begin a required call but the template has no tool format.
    """
    messages, opening = [_message(message, chat) for message in messages], ""
    if chat.tool_format is None:
        if tools is not None and tools.required and tools.opened:
            choice = '"required"' if tools.name is None else json_text(tools.name)
            raise InputError(NO_FORMAT.format(choice=choice))
        messages, definitions = in_words(messages, tools), None
    else:
        definitions = None if tools is None else [*tools.tools]
        opening = "" if tools is None else chat.tool_format.opening(tools)
    return chat.encode(messages, add_generation_prompt=True, tools=definitions, values=values, opening=opening)


def _message(message: Mapping[str, Any], chat: "ChatTemplate") -> dict[str, Any]:
    made = dict(message)
    if made.get("role") == "developer" and not chat.has_developer:
        made["role"] = "system"
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
        both = chat.tool_format is HARMONY and made.get("reasoning_content")  # gpt-oss's template accepts only one
        made["content"] = "" if both else made.get("content", "")
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = read_object(arguments or "{}")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def in_words(messages: Sequence[Mapping[str, Any]], tools: ToolRequest | None) -> list[dict[str, Any]]:
    """The conversation with tool definitions, calls and tool messages replaced by text."""
    made: list[dict[str, Any]] = []
    results: list[str] = []  # results of one answer, which are one message
    for i, message in enumerate(messages):
        kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message.get('content', '')}\n</tool_response>")
            if messages[i + 1 : i + 2] and messages[i + 1]["role"] == "tool":
                continue
            kept, results = {"role": "user", "content": "\n".join(results)}, []
        elif calls := message.get("tool_calls"):
            texts = [
                f"<tool_call>\n{json_text({key: call['function'][key] for key in ('name', 'arguments')})}\n</tool_call>"
                for call in calls
            ]
            kept["content"] = "\n".join([*([kept["content"]] if kept.get("content") else []), *texts])
        made.append(kept)
    if tools is not None:
        text = TOOLS_IN_WORDS.format(tools="\n".join(map(json_text, tools.tools)))
        if made[0]["role"] == "system":
            made[0]["content"] = f"{made[0].get('content', '')}\n\n{text}"
        else:
            made.insert(0, {"role": "system", "content": text})
    return made
