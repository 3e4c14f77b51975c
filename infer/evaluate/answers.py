"""From what a model wrote to a program: completions of a prompt, and answers of a chat with code blocks in them."""

import io
import re
from dataclasses import dataclass

from infer.evaluate.problems import Problem, parse

# Where a completion ends; what EvalPlus stops at (evalplus/provider/utility.py), for comparable scores.
STOPS = ("\nif __name__", "\ndef main(", "\nprint(")
FUNCTION_STOPS = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")  # the prompt has begun the function
SCRIPT_STOPS = ('\n"""', "\nassert")  # the prompt is a docstring; helper functions may come first
REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code"
    " block:\n```\n{}\n```\n"
)
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
OPEN_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """A program, in both forms that evaluators take."""

    solution: str
    """The whole program."""
    completion: str
    """What makes a program of the problem's prompt when it is put behind it."""


def stop_strings(problem: Problem) -> tuple[str, ...]:
    """Where the completion of a prompt ends."""
    return (*STOPS, *(FUNCTION_STOPS if _defines(problem.prompt, problem.entry_point) else SCRIPT_STOPS))


def from_completion(problem: Problem, text: str) -> Answer:
    """The prompt and what followed it, without unfinished statements at the end."""
    solution = whole_statements(problem.prompt + text)
    if len(solution) < len(problem.prompt):  # a text that cannot be made a program of; it stays as it is and fails
        solution = problem.prompt + text
    return Answer(solution, solution[len(problem.prompt) :])


def from_chat(problem: Problem, text: str) -> Answer:
    """The program of the last code block that defines the function, else the last block, else all of the text.

    What the prompt has before the function (imports, helpers) goes before it. An answer that does not define the
    function is taken as its continuation.
    """
    blocks = BLOCK.findall(text) or OPEN_BLOCK.findall(text) or [text]
    defining = [block for block in blocks if _defines(block, problem.entry_point)]
    code = whole_statements((defining or blocks)[-1])
    if not defining:
        return from_completion(problem, code)
    begin = re.search(rf"^def {re.escape(problem.entry_point)}\b", problem.prompt, re.MULTILINE)
    solution = problem.prompt[: begin.start() if begin else 0] + code
    return Answer(solution, "\n" + solution)


def whole_statements(text: str) -> str:
    """The longest beginning of the text, in lines, that is Python; the text itself if there is none.

    Goes back from error to error, so that it takes a few parses however long the text is.
    """
    lines = list(io.StringIO(text, newline="\n"))
    end = len(lines)
    while end:
        try:
            parse("".join(lines[:end]))
            return "".join(lines[:end])
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):  # null bytes, half characters, too deep for the parser
            return text
    return text


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^(async )?(def|class) {re.escape(name)}\b|^{re.escape(name)} *=", code, re.MULTILINE) is not None
    )
