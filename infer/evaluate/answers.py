"""Extracts programs from the texts of a model: completions of a prompt, and chat answers with code blocks."""

import io
import re
from dataclasses import dataclass

from infer.evaluate.problems import Problem, parse

# Strings that end a completion: EvalPlus's (evalplus/provider/utility.py), for comparable scores.
STOPS = ("\nif __name__", "\ndef main(", "\nprint(")
FUNCTION_STOPS = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")  # the prompt starts the function
SCRIPT_STOPS = ('\n"""', "\nassert")  # the prompt is a docstring; helper functions may come first
REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code"
    " block:\n```\n{}\n```\n"
)
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
OPEN_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """A program in the two forms that evaluation tools read."""

    solution: str
    """The whole program."""
    completion: str
    """The text that completes the problem's prompt to a program."""


def stop_strings(problem: Problem) -> tuple[str, ...]:
    """The strings that end the completion of a problem's prompt."""
    return (*STOPS, *(FUNCTION_STOPS if _defines(problem.prompt, problem.entry_point) else SCRIPT_STOPS))


def from_completion(problem: Problem, text: str) -> Answer:
    """The program that consists of the prompt and its completion, without unfinished statements at the end."""
    solution = whole_statements(problem.prompt + text)
    if len(solution) < len(problem.prompt):  # not a program: keep the text, which will fail
        solution = problem.prompt + text
    return Answer(solution, solution[len(problem.prompt) :])


def from_chat(problem: Problem, text: str) -> Answer:
    """The program in the last code block that defines the function, else in the last block, else in the whole text.

    The solution starts with `Problem.context`. An answer that does not define the function is read as a completion of
    the prompt.
    """
    blocks = BLOCK.findall(text) or OPEN_BLOCK.findall(text) or [text]
    defining = [block for block in blocks if _defines(block, problem.entry_point)]
    code = whole_statements((defining or blocks)[-1])
    if not defining:
        return from_completion(problem, code)
    solution = problem.context + code
    return Answer(solution, "\n" + solution)


def whole_statements(text: str) -> str:
    """The longest prefix of whole lines that is valid Python; the text itself if no prefix is.

    It goes back from one syntax error to the previous one, so that a few parses suffice for a text of any length.
    """
    lines = list(io.StringIO(text, newline="\n"))
    end = len(lines)
    while end:
        try:
            parse("".join(lines[:end]))
            return "".join(lines[:end])
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):  # null bytes, lone surrogates, too deep nesting
            return text
    return text


def _defines(code: str, name: str) -> bool:
    """Whether a program defines a function, class or variable of this name at its top level."""
    return (
        re.search(rf"^(async )?(def|class) {re.escape(name)}\b|^{re.escape(name)} *=", code, re.MULTILINE) is not None
    )
