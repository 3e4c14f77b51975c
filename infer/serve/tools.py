"""Reads the tools of a request: definitions, `tool_choice`, and calls in messages."""

from typing import Any

from laneformer.infer.serve.body import ApiError, printable, shown, wrong
from laneformer.infer.text.tool_calls import NAME, ToolRequest
from laneformer.infer.text.values import read_object

MOST_TOOLS = 512
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
TOOL_LABELS = ("cache_control",)  # fields without effect
CALL_LABELS = ("index", "parsed_arguments", "provider_specific_fields", "extra_content")  # clients send them back
CHOICES = ("none", "auto", "required")


def read_tools(left: dict[str, Any], ignored: list[str]) -> ToolRequest | None:
    """Removes `tools`, `tool_choice` and `parallel_tool_calls` from a chat's fields, and returns the tools; None if no
    tool may be called.

    Adds the names of fields without effect to `ignored`. Raises ApiError with the name of the parameter.
    """
    tools, choice = left.pop("tools", []), left.pop("tool_choice", "auto")
    parallel = left.pop("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise wrong("parallel_tool_calls", parallel, "true or false")
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise wrong("tools", tools, f"a list of up to {MOST_TOOLS} tools")
    read = tuple(_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in read]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"tools has function {twice} twice: give it once", param="tools")
    name = _chosen(choice)
    if name is not None and name not in names:
        raise ApiError(400, f"tool_choice names function {name}, which tools does not contain", param="tool_choice")
    if choice == "required" and not read:
        raise ApiError(400, 'tool_choice = "required" needs tools', param="tool_choice")
    if choice == "none" or not read:
        return None
    strict = frozenset(
        name for name, tool in zip(names, tools, strict=True) if tool["function"].get("strict") or tool.get("strict")
    )
    return ToolRequest(read, choice == "required" or name is not None, name, parallel and name is None, strict)


def _tool(tool: Any, path: str, ignored: list[str]) -> dict[str, Any]:
    """A checked definition with the fields that templates read, which do not include `strict`."""
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(path, tool, 'an object {"type": "function", "function": {...}}')
    if tool["type"] != "function":
        raise ApiError(
            400,
            f"{path}.type = {shown(tool['type'])} is not supported: the only tools are functions",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{path}.function", function, 'an object {"name": ..., "description": ..., "parameters": {...}}')
    _only(tool, ("type", "function", "strict"), TOOL_LABELS, path, ignored)
    _only(function, FUNCTION_FIELDS, TOOL_LABELS, f"{path}.function", ignored)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{path}.function.name", name, "1 to 64 letters, digits, periods, hyphens and underscores")
    if not isinstance(description := function.get("description") or "", str):
        raise wrong(f"{path}.function.description", description, "a string")
    for fields, where in ((tool, path), (function, f"{path}.function")):
        if not isinstance(fields.get("strict"), bool | None):
            raise wrong(f"{where}.strict", fields["strict"], "true or false")
    if not isinstance(schema, dict | None):
        raise wrong(f"{path}.function.parameters", schema, "a JSON schema, an object")
    schema = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _only(fields: dict[str, Any], known: tuple, labels: tuple, path: str, ignored: list[str]) -> None:
    """Raises ApiError for a field that is neither known nor a label. Adds labels to `ignored`, unless they are null or
    false.
    """
    for name, value in fields.items():
        if name in known or value is None or value is False:
            continue
        full = f"{path}.{printable(name)}"
        if name not in labels:
            raise ApiError(400, f"{full} is not supported: leave it out", param=full, code="unsupported_parameter")
        ignored.append(full)


def _chosen(choice: Any) -> str | None:
    """The function that a `tool_choice` names; None for one of CHOICES."""
    if choice in CHOICES:
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wanted = ", ".join(f'"{each}"' for each in CHOICES)
        raise wrong("tool_choice", choice, f'{wanted} or {{"type": "function", "function": {{"name": ...}}}}')
    return printable(function["name"])


def read_calls(calls: Any, path: str, ignored: list[str]) -> list[dict[str, Any]]:
    """The calls of a message, with arguments as objects. Raises ApiError with the name of the field."""
    if not isinstance(calls, list):
        raise wrong(path, calls, "a list of calls")
    made = []
    for i, call in enumerate(calls):
        here = f"{path}[{i}]"
        function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else 0
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(here, call, 'a call {"id": ..., "type": "function", "function": {"name", "arguments"}}')
        _only(call, ("id", "type", "function"), CALL_LABELS, here, ignored)
        _only(function, ("name", "arguments"), CALL_LABELS, f"{here}.function", ignored)
        if not isinstance(id := call.get("id") or "", str):
            raise wrong(f"{here}.id", id, "a string")
        arguments = function.get("arguments") or "{}"
        read = read_object(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(read, dict):
            raise wrong(f"{here}.function.arguments", arguments, "a JSON object in a string")
        made.append({"id": id, "type": "function", "function": {"name": function["name"], "arguments": read}})
    return made
