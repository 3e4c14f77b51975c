"""Requests in OpenAI's forms, read and checked, and errors in OpenAI's form. A parameter is obeyed or refused, never
ignored.
"""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPLETION_TOKENS = 16  # default of a completion, as OpenAI's; a chat may fill the context
MOST_TOP_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256  # the text of each token is compared with all stops
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout",
}
# Parameters that are not supported, with the values that have no effect, which clients send by default.
ABSENT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "verbosity": (),
    "web_search_options": (),
}
LABELS = ("user", "safety_identifier", "prompt_cache_key")  # identify the user; any text, without effect
NESTED = "the request is nested too deeply"
MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}  # known to templates


class ApiError(Exception):
    """An error as answer: HTTP status, and a body that OpenAI's clients can read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Call:
    """A checked request for a completion or a chat completion."""

    chat: bool
    prompt: str | list[int] | list[dict[str, Any]]
    """Text or token ids; the messages of a chat."""
    model: str | None
    max_tokens: int | None
    sampling: dict[str, float]
    """Fields of infer.Sampling; by default the temperature is 1 and the seed random, as OpenAI's."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """Stop tokens besides the model's."""
    ignore_eos: bool
    logprobs: int | None
    """Number of most likely tokens to report at each position; None for no log-probabilities at all."""
    return_token_ids: bool
    return_timeline: bool
    """Whether to report the text and time of each token."""
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def prompt_param(self) -> str:
        """The name of the parameter that holds the prompt."""
        return "messages" if self.chat else "prompt"


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, NESTED) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, 'the body must be a JSON object, as in {"prompt": "..."}')
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_call(fields: dict[str, Any], chat: bool) -> Call:
    """The request in the fields of a body. Raises ApiError, which names the parameter."""
    left = {name: value for name, value in fields.items() if value is not None}
    prompt = _messages(left) if chat else _prompt(left)
    stream = _take(left, "stream", bool, False)
    usage, continuous = _stream_options(left, stream)
    given = {name: value for name, kind in SAMPLING.items() if (value := _take(left, name, kind)) is not None}
    limit = _max_tokens(left, chat)
    call = Call(
        chat=chat,
        prompt=prompt,
        model=_take(left, "model", str),
        max_tokens=limit if chat or limit else COMPLETION_TOKENS,
        sampling={"temperature": 1.0, "seed": secrets.randbits(53), **given},
        stop=_stop(left),
        stop_token_ids=_stop_token_ids(left),
        ignore_eos=_take(left, "ignore_eos", bool, False),
        logprobs=_chat_logprobs(left) if chat else _count(left, "logprobs", None, 0, MOST_TOP_LOGPROBS),
        return_token_ids=_take(left, "return_token_ids", bool, False),
        return_timeline=_take(left, "return_timeline", bool, False),
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
    )
    for name in LABELS:
        _take(left, name, str)
    for name, value in left.items():
        if name not in ABSENT:
            raise ApiError(400, f"unknown parameter {name}", param=name, code="unknown_parameter")
        if value not in ABSENT[name]:
            raise ApiError(
                400,
                f"{name} = {_shown(value)} is not supported: leave {name} out",
                param=name,
                code="unsupported_parameter",
            )
    return call


def _take(left: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Removes a parameter from the fields and returns its checked value."""
    value = left.pop(name, default)
    if value is default:
        return value
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not right or (kind is float and not math.isfinite(value)):
        wanted = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}[kind]
        raise _wrong(name, value, wanted)
    return value


def _count(left: dict[str, Any], name: str, default: int | None, least: int, most: int | None = None) -> int | None:
    value = _take(left, name, int, default)
    if value is not None and (value < least or (most is not None and value > most)):
        raise _wrong(
            name,
            value,
            f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}",
        )
    return value


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name} = {_shown(value)}: give {wanted}", param=name)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _prompt(left: dict[str, Any]) -> str | list[int]:
    prompt = left.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and (isinstance(prompt[0], str) or _is_ids(prompt[0])):
        [prompt] = prompt
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        raise ApiError(
            400,
            "several prompts in one request are not supported: send one request per prompt",
            param="prompt",
            code="unsupported_parameter",
        )
    if not isinstance(prompt, str) and not _is_ids(prompt):
        raise _wrong("prompt", prompt, "a text, or a list of token ids")
    return prompt


def _messages(left: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, without null fields and with the parts of a text joined, as templates expect."""
    messages = left.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least one message")
    made = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"messages[{i}]", message, "an object with a role and content")
        kept = {name: value for name, value in message.items() if value is not None and value != []}
        for name in kept.keys() - MESSAGE_FIELDS:
            raise ApiError(
                400,
                f"messages[{i}].{name} is not supported: leave it out",
                param=f"messages[{i}].{name}",
                code="unsupported_parameter",
            )
        if "content" in kept:
            kept["content"] = _content(kept["content"], f"messages[{i}].content")
        elif "tool_calls" not in kept:
            raise _wrong(f"messages[{i}].content", message.get("content"), "a text")
        made.append(kept)
    return made


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise _wrong(name, content, 'a text, or parts {"type": "text", "text": ...}, the only ones that are supported')
    return "\n".join(texts)


def _max_tokens(left: dict[str, Any], chat: bool) -> int | None:
    limit = _count(left, "max_tokens", None, 1)
    newer = _count(left, "max_completion_tokens", None, 1) if chat else None
    if limit is not None and newer is not None and limit != newer:
        raise ApiError(
            400,
            f"max_tokens = {limit} and max_completion_tokens = {newer} mean the same: give only one",
            param="max_tokens",
        )
    return limit if newer is None else newer


def _stop(left: dict[str, Any]) -> tuple[str, ...]:
    stop = left.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or len(stop) > MOST_STOPS
        or not all(isinstance(s, str) and 1 <= len(s) <= LONGEST_STOP for s in stop)
    ):
        raise _wrong("stop", stop, f"a text of 1 to {LONGEST_STOP} characters, or a list of up to {MOST_STOPS}")
    return tuple(stop)


def _stop_token_ids(left: dict[str, Any]) -> tuple[int, ...]:
    ids = left.pop("stop_token_ids", [])
    if not _is_ids(ids) or len(ids) > MOST_STOPS:
        raise _wrong("stop_token_ids", ids, f"a list of up to {MOST_STOPS} token ids")
    return tuple(ids)


def _chat_logprobs(left: dict[str, Any]) -> int | None:
    wanted, top = _take(left, "logprobs", bool, False), _count(left, "top_logprobs", None, 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise ApiError(400, f"top_logprobs = {top} needs logprobs = true", param="top_logprobs")
    return (top or 0) if wanted else None


def _stream_options(left: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    """Whether to report usage at the end, and with each event."""
    options = _take(left, "stream_options", dict, {})
    if options and not stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    options = {f"stream_options.{name}": value for name, value in options.items() if value is not None}
    usage = _take(options, "stream_options.include_usage", bool, False)
    continuous = _take(options, "stream_options.continuous_usage_stats", bool, False)
    if options.pop("stream_options.include_obfuscation", False) is not False:
        raise ApiError(400, "stream_options.include_obfuscation is not supported: leave it out", param="stream_options")
    for name in options:
        raise ApiError(400, f"unknown parameter {name}", param=name, code="unknown_parameter")
    return usage, continuous
