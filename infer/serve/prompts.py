"""Prompts of chats, in the engine process: their tokens, and the grammar of the answer if tools or a form need one."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from laneformer.errors import InputError, LaneformerError
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.tool_calls import ToolRequest

if TYPE_CHECKING:
    from laneformer.infer.engine.engine import Engine
    from laneformer.infer.text.chat_template import ChatTemplate

MOST_SECONDS = 1.0  # time for finding the schemas that cannot be enforced
LATE = InputError("the schemas before it took too long to compile: simplify them")


class Prompt(NamedTuple):
    """The prompt of a chat, and the constraints on its answer."""

    ids: list[int]
    tools: ToolRequest | None
    grammar: Grammar | None
    notes: tuple[str, ...] = ()
    """Warnings for the client."""


def prompt_of(
    engine: "Engine",
    chat: "ChatTemplate",
    encoded: Callable[[ToolRequest | None], list[int]],
    tools: ToolRequest | None,
    form: Grammar | None,
) -> Prompt:
    """Encodes a conversation.

    encoded: returns its token ids with the given tools. tools: the request's tools. form: grammar of the answer's form.
    A required call, strict functions, or a form together with tools need a grammar of the whole answer. If the engine
    supports no grammars, the prompt ends with the beginning of a required call. Raises LaneformerError with the name of
    the parameter.
    """
    if form is not None:
        engine.check_constraint(form)
    if tools is None or not (tools.required or tools.strict or form is not None):
        return Prompt(encoded(tools), tools, form)
    why = engine.why_no_constraint(tools.strict_path if tools.strict else "tool_choice")
    if why is not None and tools.strict:
        path = tools.strict_path
        raise type(why)(str(why) if str(why).startswith(path) else f"{path} = true: {why}")
    if why is not None:
        return Prompt(encoded(tools), tools, form)
    unopened = replace(tools, opened=False)
    ids = encoded(unopened)
    parts = chat.channels(ids)
    if tools.required and (parts is None or not parts.may_reason) and chat.tool_format is not None:
        unopened, ids = tools, encoded(tools)  # begin the call in the prompt: reading is faster than generating
    grammar, notes = _usable(engine, chat, unopened, ids, form)
    return Prompt(ids, unopened, grammar, notes)


def _usable(
    engine: "Engine", chat: "ChatTemplate", tools: ToolRequest, ids: Sequence[int], form: Grammar | None
) -> tuple[Grammar, tuple[str, ...]]:
    """The grammar of the answer, and warnings. A schema that cannot be enforced raises LaneformerError if its function
    is strict; otherwise the function's arguments may be any object.
    """
    loose = set() if tools.required else {*tools.schemas} - tools.strict

    def checked(functions: ToolRequest, loose: set[str]) -> Grammar:
        grammar = chat.call_grammar(ids, functions, loose=loose, form=form, name="tools")
        engine.check_constraint(grammar)
        return grammar

    with suppress(LaneformerError):
        return checked(tools, loose), ()
    notes, end = [], time.perf_counter() + MOST_SECONDS
    for n, tool in enumerate(tools.tools):  # find the schemas that fail
        name = tool["function"]["name"]
        if name in loose or (tools.name or name) != name:
            continue
        alone = replace(tools, tools=(tool,), required=True, name=name, opened=False)
        late = time.perf_counter() > end
        problem = LATE if late else _problem(partial(checked, alone, set()))
        if problem is not None:
            path = f"tools[{n}].function.parameters"
            line = str(problem).removeprefix("tools ").removeprefix("cannot be used: ")
            if name in tools.strict:
                raise type(problem)(f"{path} cannot be enforced, which strict = true requires: {line}")
            loose.add(name)
            notes.append(f"{path} is not enforced: {line}")
    return checked(tools, loose), tuple(notes)


def _problem(check: Callable[[], object]) -> LaneformerError | None:
    """The error that `check` raises, if any."""
    try:
        check()
    except LaneformerError as error:
        return error
    return None
