"""Grammars of answers that call tools: text, calls whose arguments fit their schemas, and, in harmony, whole messages.

An answer that may call is free text up to the mark of a call, which is a token or plain text. An answer that must call
contains only calls. The rules are in llguidance's variant of Lark, in which `%json` is JSON that fits a schema and
`<[5]>` is token 5. infer/text/tool_calls.py reads these calls.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from laneformer.errors import InputError
from laneformer.infer.text.grammar import WHITE_SPACE, Grammar
from laneformer.infer.text.tag_grammars import TagRules
from laneformer.infer.text.tool_calls import HARMONY, ToolFormat, ToolRequest

Special = Callable[[str], int | None]
"""The id of a special token by its name; None if no special token has this name."""
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema, restricted to JSON objects, because arguments are an object. Raises InputError for a schema that no
    object fits.
    """
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InputError(f"type = {json.dumps(kind)}: arguments must be an object")
    options = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(options if isinstance(options, Mapping) else {})}
    return {**schema, "type": "object", "x-guidance": options}


def call_grammar(
    tool_format: ToolFormat,
    request: ToolRequest,
    special: Special,
    *,
    loose: Collection[str] = (),
    form: Grammar | None = None,
    reasoning: bool = False,
    name: str = "tools",
) -> Grammar:
    """The grammar of an answer to a request with tools.

    special: returns the id of a special token. loose: functions whose arguments may be any object. form: grammar of an
    answer without calls. reasoning: whether the prompt ends in a message of reasoning, in harmony. name: see `Grammar`.
    Raises InputError for a schema that the format cannot express.
    """
    made = _Rules(tool_format, request, special, loose, form is not None)
    rules = made.harmony(reasoning) if tool_format is HARMONY else made.text()
    return Grammar("lark", "\n".join(["%llguidance {}", *rules]), name, tool_format is HARMONY, form)


class _Rules:
    """The rules of one answer."""

    def __init__(
        self, tool_format: ToolFormat, request: ToolRequest, special: Special, loose: Collection[str], form: bool
    ):
        """form: whether an answer without calls follows a grammar. The rest: see `call_grammar`."""
        self._format, self._request, self._special, self._form = tool_format, request, special, form
        marks = sorted({*tool_format.spelled, *HARMONY_MARKS}, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")")
        schemas = request.schemas if request.name is None else {request.name: request.schemas[request.name]}
        self._names = {name: f"arguments_{n}" for n, name in enumerate(schemas)}
        free = " & ".join(["ANY", *(f"~(ANY {quoted(each)} ANY)" for each in tool_format.openings)])
        if tool_format.bare:  # text must not begin like a bare call
            free += " & ~(/[ \\t\\r\\n]*\\{/ ANY)"
        self._rules = ["ANY: /(?s:.*)/", f"TEXT: {free}"]
        for name, schema in schemas.items():
            self._rules += self._arguments(self._names[name], {} if name in loose else schema, name in loose)

    def _arguments(self, rule: str, schema: Mapping[str, Any], loose: bool) -> list[str]:
        if self._format.tagged:
            try:
                return TagRules(rule, schema, loose).rules
            except InputError:
                raise
            except (TypeError, AttributeError, ValueError, KeyError):  # the schema has values of wrong types
                raise InputError("it is not a JSON schema") from None
        return [f"{rule}: %json {json.dumps(arguments_schema(schema))}"]

    def _text(self, text: str) -> str:
        """A text as a sequence of quoted strings and special tokens."""
        parts = (part for part in self._marks.split(text) if part)
        found = ((part, self._special(part)) for part in parts)
        return " ".join(quoted(part) if token is None else f"<[{token}]>" for part, token in found)

    def _calls(self, rule: str, behind: str) -> None:
        """Adds the rule of one call, without the text `behind` at its beginning, which the answer already has."""
        made = self._format
        heads = {name: made.head.replace("{name}", name) for name in self._names}
        if behind and not all(head.startswith(behind) for head in heads.values()):
            raise AssertionError(f"{made.name}: a call does not begin with {behind!r}")
        options = [
            f"{self._text(head[len(behind) :])} {self._names[name]} {self._text(made.tail)}"
            for name, head in heads.items()
        ]
        self._rules.append(f"{rule}: {' | '.join(options)}")

    def text(self) -> list[str]:
        """The rules for a format whose calls are in the content."""
        start = self._only_calls() if self._request.required else self._text_and_calls()
        return [start, *self._rules]

    def _only_calls(self) -> str:
        """The first rule of an answer that must call."""
        made, opening = self._format, self._format.opening(self._request)
        self._calls("first", opening.removeprefix(made.begin))
        begin, more = "" if opening else self._text(made.begin), ""
        if self._request.parallel:
            self._calls("call", "")
            more = f"({self._text(made.between)} call)*"
        return f"start: {begin} first {more} {self._text(made.finish)}"

    def _text_and_calls(self) -> str:
        """The first rule of an answer that may call: text, calls, text and so on. A call, or the list of calls of a
        chained format, may follow any text.
        """
        made, several, ways = self._format, self._request.parallel, []
        chain = f"({self._text(made.between)} call)*" if several and made.chained else ""
        if chain or made.bare:
            self._calls("call", "")
        for n, mark in enumerate(made.openings):
            before, found, _ = (made.begin + made.head).partition(mark)
            behind = before + mark if found else ""
            begin = "" if behind else made.begin
            if behind and len(behind) < len(made.begin):
                begin, behind = made.begin[len(behind) :], made.begin
            self._calls(f"call_{n}", behind[len(made.begin) :])
            ways.append(f"{self._mark(n, mark)} {self._text(begin)} call_{n} {chain} {self._text(made.finish)}")
        text = "@form" if self._form else "TEXT"
        if made.bare:
            text += f" | call {chain}"
        if several and not made.bare and not self._form:
            return f"start: ({' | '.join(ways)})* TEXT"
        return f"start: {' | '.join([text, *ways])}"

    def _mark(self, n: int, mark: str) -> str:
        """Text up to the end of mark n; the mark alone if an answer without calls follows a grammar."""
        token = self._special(mark)
        if self._form:
            return quoted(mark) if token is None else f"<[{token}]>"
        if token is not None:
            return f"TEXT <[{token}]>"
        self._rules.append(f"mark_{n}[lazy]: TEXT {quoted(mark)}")
        return f"mark_{n}"

    def harmony(self, reasoning: bool) -> list[str]:
        """The rules of a whole answer in harmony: messages of reasoning and for the user, then the final message or
        calls.
        """
        following = self._text("<|end|><|start|>assistant")
        thought = self._text("<|channel|>analysis<|message|>")
        said = self._text("<|channel|>commentary<|message|>")
        final = self._text("<|channel|>final<|message|>")
        calls = [f"{self._text(self._format.head.replace('{name}', name))} {self._names[name]}" for name in self._names]
        more = f"({following} call)*" if self._request.parallel else ""
        ends = [f"call {more}"]
        if not self._request.required:
            ends.append(f"{final} {'@form' if self._form else 'ANY'}")
        starts = [thought] if self._form else [thought, said]  # commentary is content too, so it must follow the form
        ways = [f"{begin} ANY {following} message" for begin in starts] + ends
        return [
            f"start: {f'ANY {following} message' if reasoning else 'message'}",
            f"message: {' | '.join(ways)}",
            f"call: {' | '.join(calls)}",
            *(rule for rule in self._rules if not rule.startswith("TEXT:")),
        ]


def quoted(text: str) -> str:
    """A text as a string of Lark; "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
