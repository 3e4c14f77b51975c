"""Finds tool calls in an answer, in the format of the model's chat template.

Each format is a line of FORMATS. It is recognised by strings in the template's text, and has a parser. A parser is a
generator over an answer that arrives in pieces. It yields when it needs more text, and decides only by the text read so
far, so that the result does not depend on how the text is cut. Text that looks like a call but cannot be parsed remains
content. White space beside a call is dropped.

The web process imports this file, so it may use the standard library only.
"""

import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from laneformer.infer.text.channels import FUNCTIONS, Channels, Part
from laneformer.infer.text.values import json_text, kinds_of, read_object, typed

SPACE = " \t\r\n"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # name of a function: OpenAI's characters and the period
MOST_FAILED = 64  # after this many openings that did not begin a call, the rest of the answer is content
JSON_STEP = re.compile(r'["{}\[\]]')
STRING_STEP = re.compile(r'["\\]')


class ToolCall(NamedTuple):
    """A function call that the model requests."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request, and which of them the answer may or must call."""

    tools: tuple[Mapping[str, Any], ...]
    """The tools in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    required: bool = False
    """Whether the answer must begin with a call."""
    name: str | None = None
    """The only function that may be called; None for any. Only if a call is required."""
    parallel: bool = True
    """Whether the answer may contain several calls; otherwise the first call ends it."""
    strict: frozenset[str] = frozenset()
    """Functions whose arguments must fit their schemas."""
    opened: bool = True
    """Whether a required call begins in the prompt."""

    @property
    def strict_path(self) -> str:
        """Path of the request parameter that makes the first strict function strict."""
        n = next(n for n, tool in enumerate(self.tools) if tool["function"]["name"] in self.strict)
        return f"tools[{n}].function.strict"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each function's arguments, by the function's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


class Read(NamedTuple):
    """Text and calls that became certain with a piece of an answer."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    part: Part = Part.CONTENT
    """The part that the text belongs to."""


class Reader(Protocol):
    """Separates the calls of an answer from its text, token by token."""

    finished: bool
    """Whether the answer is complete, because only one call was allowed."""

    def add(self, token: int, text: str, part: Part) -> Read:
        """Reads the next token. text: the text that became printable with it. part: the part that the text belongs
        to.
        """

    def end(self, tail: str) -> Read:
        """Ends the answer. tail: the content that was still held back."""


class Found(NamedTuple):
    """Calls that a parser found."""

    calls: tuple[tuple[str, dict[str, Any]], ...]
    """Name and arguments of each call."""
    end: int
    """Position after the calls in the text."""


class Text:
    """The text of an answer so far, and whether the answer has ended."""

    def __init__(self):
        self.text = ""
        self.ended = False


Parser = Callable[[Text, int, Mapping[str, Mapping[str, Any]]], Generator[None, None, Found | None]]
"""A parser's arguments are the text, the position after an opening, and the schemas of the functions' arguments. It
returns calls, or None if no call follows the opening.
"""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes calls."""

    name: str
    marks: tuple[str, ...]
    """Strings that a template of this format contains, all of them."""
    without: tuple[str, ...]
    """Strings that a template of this format does not contain."""
    openings: tuple[str, ...]
    """Texts that begin a call."""
    closings: tuple[str, ...]
    """Texts that may follow a call and are not content."""
    parse: Parser | None
    """Parser of the calls; None for harmony, whose calls are messages."""
    head: str
    """Text of a call of function {name} up to its arguments."""
    tail: str = ""
    """Text after the arguments of a call."""
    begin: str = ""
    """Text before the first call."""
    between: str = ""
    """Text between two calls."""
    finish: str = ""
    """Text after the last call."""
    tagged: bool = False
    """Whether arguments are written as tags instead of JSON."""
    spelled: tuple[str, ...] = ()
    """Special tokens of the format, whose names must appear in the text of the answer."""
    bare: bool = False
    """Whether an answer may begin with the JSON object of a call. It must name a function of the request."""
    short_ids: bool = False
    """Whether the template requires ids of nine letters and digits."""

    @property
    def chained(self) -> bool:
        """Whether several calls are a list after one opening; otherwise each call has an opening."""
        return not self.head.startswith(self.openings)

    def opening(self, request: ToolRequest) -> str:
        """The beginning of the required call with which the prompt ends, up to the start of a token; "" if the request
        requires no call.
        """
        if not request.required or not request.opened:
            return ""
        before, _, behind = (self.begin + self.head).partition("{name}")
        return before.removesuffix(' "') if request.name is None else f"{before}{request.name}{behind}".rstrip(" ")

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        """A `ToolCall` with a random id."""
        return ToolCall(secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}", name,
                        json_text(arguments))  # fmt: skip


# ---- steps of parsers


def _space(source: Text, at: int) -> Generator[None, None, int]:
    """The position after white space at `at`."""
    while True:
        while at < len(source.text) and source.text[at] in SPACE:
            at += 1
        if at < len(source.text) or source.ended:
            return at
        yield


def _word(source: Text, at: int, words: Iterable[str]) -> Generator[None, None, int | None]:
    """The position after the first of `words` that the text has at `at`; None if it has none of them there."""
    for word in words:
        while len(source.text) - at < len(word) and not source.ended and word.startswith(source.text[at:]):
            yield
        if source.text.startswith(word, at):
            return at + len(word)
    return None


def _name(source: Text, at: int) -> Generator[None, None, str]:
    """The name of a function at `at`; "" if the text has none there."""
    while True:
        found = NAME.match(source.text, at)
        if found is None and at < len(source.text):
            return ""
        if source.ended or (found is not None and found.end() < len(source.text)):
            return found[0] if found else ""
        yield


def _json(source: Text, at: int) -> Generator[None, None, int | None]:
    """The position after the JSON object or array that begins at `at`; None if none begins there or it does not end.

    Only brackets and strings are checked.
    """
    while at >= len(source.text) and not source.ended:
        yield
    if source.text[at : at + 1] not in ("{", "["):
        return None
    open_ones, quoted = [], False
    while True:
        found = (STRING_STEP if quoted else JSON_STEP).search(source.text, at)
        escaped = found is not None and found[0] == "\\"
        if found is None or (escaped and found.end() == len(source.text)):
            if source.ended:
                return None
            at = len(source.text) if found is None else found.start()
            yield
            continue
        at = found.end() + escaped
        if found[0] == '"':
            quoted = not quoted
        elif found[0] in "{[":
            open_ones.append(found[0])
        elif found[0] in "}]":
            if open_ones.pop() + found[0] not in ("{}", "[]"):
                return None
            if not open_ones:
                return at


def _named_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments in the JSON object of a call; None if it is not one."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not NAME.fullmatch(name):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    return (name, arguments) if isinstance(arguments, dict) else None


# ---- formats


def _object_call(source: Text, at: int, schemas: Mapping[str, Any]) -> Generator[None, None, Found | None]:
    """Parses {"name": ..., "arguments" or "parameters": {...}}."""
    at = yield from _space(source, at)
    if (end := (yield from _json(source, at))) is None:
        return None
    call = _named_call(read_object(source.text[at:end]))
    return None if call is None else Found((call,), end)


def _mistral(source: Text, at: int, schemas: Mapping[str, Any]) -> Generator[None, None, Found | None]:
    """Parses [{"name": ..., "arguments": {...}}, ...], or NAME[CALL_ID]ID[ARGS]{...}, where [CALL_ID]ID and [ARGS] are
    optional.
    """
    at = yield from _space(source, at)
    name = yield from _name(source, at)
    if name:
        at += len(name)
        behind = yield from _word(source, at, ("[CALL_ID]",))
        if behind is not None:
            at = behind + len((yield from _name(source, behind)))
        behind = yield from _word(source, at, ("[ARGS]",))
        at = yield from _space(source, at if behind is None else behind)
    if (end := (yield from _json(source, at))) is None:
        return None
    if name:
        arguments = read_object(source.text[at:end])
        return None if arguments is None else Found(((name, arguments),), end)
    wrapped = read_object('{"calls": ' + source.text[at:end] + "}") or {"calls": None}
    values = wrapped["calls"] if isinstance(wrapped["calls"], list) else [wrapped["calls"]]
    calls = tuple(call for value in values if (call := _named_call(value)) is not None)
    return Found(calls, end) if values and len(calls) == len(values) else None


FUNCTION_START, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
TAG_NAME = re.compile(r"[^<>\n]{1,256}>")


def _coder(source: Text, at: int, schemas: Mapping[str, Any]) -> Generator[None, None, Found | None]:
    """Parses <function=NAME> <parameter=NAME> text </parameter> ... </function>. A line end at the start and at the end
    of a text is dropped.

    A text ends at the first </parameter> that is followed by another parameter or the function's end.
    """
    at = yield from _space(source, at)
    if not source.text.startswith(FUNCTION_START, at - len(FUNCTION_START)) or at < len(FUNCTION_START):
        if (behind := (yield from _word(source, at, (FUNCTION_START,)))) is None:
            return None
        at = behind
    if not NAME.fullmatch(name := (yield from _tag(source, at))):
        return None
    at += len(name) + 1
    arguments: dict[str, Any] = {}
    root = schemas.get(name, {})
    properties = root.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    while True:
        at = yield from _space(source, at)
        if (end := (yield from _word(source, at, (FUNCTION_END,)))) is not None:
            return Found(((name, arguments),), end)
        if (behind := (yield from _word(source, at, (PARAMETER,)))) is None:
            return None
        if not (parameter := (yield from _tag(source, behind))):
            return None
        at = behind + len(parameter) + 1
        look, schema = at, properties.get(parameter)
        if "string" not in (kinds_of(schema, root) or ("string",)):  # JSON, whose strings may contain </parameter>
            inside = yield from _space(source, at)
            look = (yield from _json(source, inside)) or at
        while True:
            if (end := source.text.find(PARAMETER_END, look)) < 0:
                if source.ended:
                    return None
                look = max(at, len(source.text) - len(PARAMETER_END) + 1)
                yield
                continue
            look = end + len(PARAMETER_END)
            behind = yield from _space(source, look)
            if (yield from _word(source, behind, (PARAMETER, FUNCTION_END))) is not None:
                break
        value = source.text[at:end].removeprefix("\n").removesuffix("\n")
        arguments[parameter] = typed(value, schema, root)
        at = look


def _tag(source: Text, at: int) -> Generator[None, None, str]:
    """The name in a tag, from `at` up to ">"; "" if it is not a name."""
    while True:
        if found := TAG_NAME.match(source.text, at):
            return found[0][:-1]
        if source.ended or "\n" in source.text[at : at + 257] or len(source.text) - at > 257:
            return ""
        yield


TAG_TOKENS = ("<tool_call>", "</tool_call>")
HARMONY = ToolFormat("harmony", ("<|channel|>", FUNCTIONS), (), (), (), None,
                     head="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")  # fmt: skip
HERMES = ToolFormat("hermes", ("<tool_call>", '"arguments"'), ("<arg_key>", "<invoke", "<tool_calls>"),
                    ("<tool_call>",), ("</tool_call>",), _object_call,
                    head='<tool_call>\n{"name": "{name}", "arguments": ', tail="}\n</tool_call>",
                    between="\n", spelled=TAG_TOKENS)  # fmt: skip
FORMATS = (  # a template has the first format that fits
    HARMONY,
    ToolFormat("qwen3-coder", ("<tool_call>", FUNCTION_START, PARAMETER), (), ("<tool_call>", FUNCTION_START),
               ("</tool_call>",), _coder, head="<tool_call>\n<function={name}>\n", tail="\n</tool_call>", between="\n",
               tagged=True, spelled=TAG_TOKENS),
    HERMES,
    ToolFormat("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), (), ("[TOOL_CALLS]",), (), _mistral,
               head="[TOOL_CALLS]{name}[ARGS]", spelled=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), short_ids=True),
    ToolFormat("mistral", ("[TOOL_CALLS]",), (), ("[TOOL_CALLS]",), (), _mistral, begin="[TOOL_CALLS] [",
               head='{"name": "{name}", "arguments": ', tail="}", between=", ", finish="]", spelled=("[TOOL_CALLS]",),
               short_ids=True),
    ToolFormat("llama3", ('{"name": function name, "parameters":',), (), ("<|python_tag|>",), (";",), _object_call,
               head='{"name": "{name}", "parameters": ', tail="}", between="; ", spelled=("<|python_tag|>",),
               bare=True),
)  # fmt: skip


def find_format(source: str, variables: Iterable[str]) -> ToolFormat | None:
    """The format of a chat template; None if the template does not read tools, or writes calls in an unknown format.

    source: the template's text. variables: names that the template reads.
    """
    if "tools" not in variables:
        return None
    plain = source.replace('\\"', '"')  # quotes are escaped in strings of the template's expressions
    return next((each for each in FORMATS if all(mark in plain for mark in each.marks)
                 and not any(mark in plain for mark in each.without)), None)  # fmt: skip


# ---- readers


class TextReader:
    """Finds calls in the content of an answer. A call is reported when it is complete."""

    def __init__(self, tool_format: ToolFormat, request: ToolRequest):
        self._format, self._schemas, self._parallel = tool_format, request.schemas, request.parallel
        if tool_format.parse is None:
            raise ValueError(f"calls in {tool_format.name} are messages, not text")
        self._parse, self._source = tool_format.parse, Text()
        self._out: list[str] = []
        self._calls: list[ToolCall] = []
        self._openings = re.compile("|".join(map(re.escape, tool_format.openings)))
        self.finished = False
        self._run = self._read()
        self._feed(tool_format.opening(request))  # the beginning of the call, which is part of the prompt

    def add(self, token: int, text: str, part: Part) -> Read:
        return self._feed(text) if part is Part.CONTENT else Read(text, (), part)

    def end(self, tail: str) -> Read:
        if self._source.ended:
            return Read("")
        self._source.ended = True
        return self._feed(tail)

    def _feed(self, text: str) -> Read:
        self._out, self._calls = [], []
        self._source.text += text
        if not self.finished:
            next(self._run, None)
        return Read("".join(self._out), tuple(self._calls))

    def _read(self) -> Generator[None, None, None]:
        source, at, failed = self._source, 0, 0
        may_be_bare = self._format.bare
        while True:
            start = yield from self._opening(at, may_be_bare) if failed < MOST_FAILED else self._rest(at)
            if start is None:
                return
            begin, bare = start
            found = yield from self._parse(source, begin.end, self._schemas)
            if found is None or (bare and not all(name in self._schemas for name, _ in found.calls)):
                self._out.append(source.text[begin.kept : begin.start + 1])
                at, may_be_bare, failed = begin.start + 1, False, failed + 1
                continue
            calls = found.calls if self._parallel else found.calls[:1]
            self._calls += [self._format.call(*call) for call in calls]
            if not self._parallel:
                self.finished = True
                return
            at = yield from self._behind(found.end)
            may_be_bare = self._format.bare

    def _behind(self, at: int) -> Generator[None, None, int]:
        """The position after white space and closings."""
        while True:
            at = yield from _space(self._source, at)
            if (end := (yield from _word(self._source, at, self._format.closings))) is None:
                return at
            at = end

    def _opening(self, at: int, may_be_bare: bool) -> Generator[None, None, "tuple[_Start, bool] | None"]:
        """Passes content on up to the next opening. Returns the opening and whether it is a bare JSON object; None at
        the end of the text.
        """
        source = self._source
        if may_be_bare:
            begin = yield from _space(source, at)
            if source.text.startswith("{", begin):
                return _Start(at, begin, begin), True
        while True:
            found = self._openings.search(source.text, at)
            stop = len(source.text) if found is None else found.start()
            if found is None and not source.ended:
                stop -= self._partial(source.text[at:])
            kept = at + len(source.text[at:stop].rstrip(SPACE))
            if found is None and source.ended:
                kept = stop
            self._out.append(source.text[at:kept])
            at = kept
            if found is not None:
                return _Start(kept, found.start(), found.end()), False
            if source.ended:
                return None
            source.text, at = source.text[at:], 0  # drop the text that was passed on
            yield

    def _partial(self, text: str) -> int:
        """Number of characters at the end of a text that may be the beginning of an opening."""
        return max((n for word in self._format.openings for n in range(1, min(len(word), len(text) + 1))
                    if text.endswith(word[:n])), default=0)  # fmt: skip

    def _rest(self, at: int) -> Generator[None, None, None]:
        """Passes on the rest of the answer as content."""
        while True:
            self._out.append(self._source.text[at:])
            self._source.text, at = "", 0
            if self._source.ended:
                return
            yield


class _Start(NamedTuple):
    """The position of an opening in a text."""

    kept: int
    """Start of the white space before the opening."""
    start: int
    end: int


class HarmonyReader:
    """Finds function calls in an answer with channels: messages whose tokens are Part.CALL."""

    def __init__(self, channels: Channels, request: ToolRequest):
        """channels: made for the same prompt as the channels whose parts `add` receives."""
        self._channels, self._parallel = channels, request.parallel
        self._open, self._text, self._name = False, "", ""
        self.finished = False
        self._follow()

    def _follow(self) -> None:
        self._open = self._channels.part is Part.CALL
        self._name = (self._channels.recipient or "").removeprefix(FUNCTIONS)

    def add(self, token: int, text: str, part: Part) -> Read:
        if part is Part.CALL:
            self._text, text = self._text + text, ""
        mark = self._channels.add(token) is Part.MARK
        read = self._close() if mark and self._open else Read(text, (), part)
        if mark:
            self._follow()
        return read

    def end(self, tail: str) -> Read:
        read = self._close() if self._open else Read("")
        self._open = False
        return read._replace(text=read.text + tail)

    def _close(self) -> Read:
        text, self._text = self._text, ""
        arguments = read_object(text or "{}")
        if arguments is None or not NAME.fullmatch(self._name):
            return Read(text)
        self.finished = not self._parallel
        return Read("", (HARMONY.call(self._name, arguments),))
