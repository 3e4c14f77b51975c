"""Extracts programs from the texts of a model: completions of a prompt, and chat answers with code blocks."""

import builtins
from dataclasses import dataclass

from laneformer.infer.evaluate.needed import defines, names_of, needed, split_future
from laneformer.infer.evaluate.problems import Problem
from laneformer.infer.evaluate.spans import Work, apart, between_fences, programs, whole_statements, without_reasoning

# Strings that end a completion: EvalPlus's (evalplus/provider/utility.py), for comparable scores.
STOPS = ("\nif __name__", "\ndef main(", "\nprint(")
FUNCTION_STOPS = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")  # the prompt starts the function
SCRIPT_STOPS = ('\n"""', "\nassert")  # the prompt is a docstring; helper functions may come first
REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code"
    " block:\n```\n{}\n```\n"
)
# EvalPlus's beginning of a chat answer, which it gives the model, and the end of the code block (provider/utility.py).
PREFILL = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding"
    " tests:\n```python\n"
)
CHAT_STOPS = ("\n```\n",)
MOST_PARTS = 8  # code blocks that are tried as completions of the prompt


@dataclass(frozen=True)
class Answer:
    """A program in the two forms that evaluation tools read."""

    solution: str
    """The whole program."""
    completion: str
    """The text that completes the problem's prompt to a program."""


def stop_strings(problem: Problem) -> tuple[str, ...]:
    """The strings that end the completion of a problem's prompt."""
    return (*STOPS, *(SCRIPT_STOPS if defines(problem.prompt, problem.entry_point) is None else FUNCTION_STOPS))


def from_completion(problem: Problem, text: str) -> Answer:
    """The program that consists of the prompt and its completion, without unfinished statements at the end.

    If that does not define the function, as when the completion is an answer in a code block, the first program in the
    text that does.
    """
    whole = problem.prompt + text
    solution = whole_statements(whole, Work().parse)
    if not defines(solution, problem.entry_point):
        found = _choose(problem, whole, first=True)
        if found is not None and defines(found, problem.entry_point):
            return Answer(found, "\n" + found)
    if len(solution) < len(problem.prompt):  # not a program: keep the text, which will fail
        solution = whole
    return Answer(solution, solution[len(problem.prompt) :])


def from_chat(problem: Problem, text: str) -> Answer:
    """The program in a chat answer that defines the function, after `Problem.context`: of several, the longest, then
    the first, as in EvalPlus; one whose function returns nothing counts only if there is no other. Names that it lacks
    come from other blocks. Reasoning that is part of the text is no program.

    An answer that does not define the function is read as a completion of the prompt.
    """
    text = without_reasoning(text)
    if found := _choose(problem, text):
        return Answer(found, "\n" + found)
    for part in (*between_fences(text)[:MOST_PARTS], text):
        answer = from_completion(problem, part)
        if defines(answer.solution, problem.entry_point):
            return answer
    return answer


def sanitized(problem: Problem, text: str) -> str:
    """The part of a program, or of a text with a program in it, that the tests can reach: the function, what it needs,
    and `Problem.context`. The text itself if nothing in it defines the function.
    """
    code = _choose(problem, without_reasoning(text))
    if code is None:
        return text
    futures, code = split_future(code)
    context = problem.context
    rest = code.removeprefix(context)
    part = needed(rest, {problem.entry_point} | names_of(problem.test)[1])
    return text if part is None else futures + context + part


def _choose(problem: Problem, text: str, *, first: bool = False) -> str | None:
    """The program in a text that defines the function, with `Problem.context`; None if none does. first: choose the
    first of several, instead of the longest.
    """
    found = []
    for shape in (text, apart(text)):
        for span in programs(shape, problem.entry_point):
            if (gives := defines(span.code, problem.entry_point)) is not None:
                found.append((gives, span))
        if any(gives for gives, _ in found):
            break
    if not found:
        return None
    _, best = max(found, key=lambda each: (each[0], 0 if first else each[1].size))
    futures, code = split_future(best.code)
    context = problem.context
    if missing := names_of(context + code)[1] - vars(builtins).keys():
        for part in between_fences(text)[:MOST_PARTS]:
            if names_of(part)[0] & missing:
                context += needed(part, missing) or ""
    own = code.lstrip("\n")
    if problem.context.strip() and own.startswith(problem.context.strip()):
        code = own[len(problem.context.strip()) :].lstrip("\n")
    return futures + context + code
