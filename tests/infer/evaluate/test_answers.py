"""Programs from completions and from chat answers."""

import ast
import time

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from laneformer.infer.evaluate.answers import from_chat, from_completion, stop_strings
from laneformer.infer.evaluate.problems import load_problems
from laneformer.infer.evaluate.spans import whole_statements
from tests.support.evaluation_cases import ADD, LEAST, write_jsonl


@pytest.fixture(scope="module")
def add(tmp_path_factory):
    return load_problems(write_jsonl(tmp_path_factory.mktemp("d") / "he.jsonl", [ADD]))["HumanEval/0"]


@pytest.fixture(scope="module")
def least(tmp_path_factory):
    return load_problems(write_jsonl(tmp_path_factory.mktemp("d") / "mbpp.jsonl", [LEAST]))[7]


def passes(problem, solution):
    names = {}
    try:
        exec(solution, names)
        exec(problem.test, names)
    except Exception:
        return False
    return True


BODY = "    return a + b\n"


@pytest.mark.parametrize(
    "rest", ["", "\n", "# done\n", "\nprint(add(1, 2)", "\nIt adds them.\n", "\n\nx = [1,\n2", '\n"""never closed\n']
)
def test_completion_ends_with_a_complete_statement(add, rest):
    answer = from_completion(add, BODY + rest)
    assert answer.solution == add.prompt + answer.completion
    assert passes(add, answer.solution)


def test_unfinished_function_fails(add):
    for text in ("    return a +", "    if a:\n", "    return (a + b", '    """', ")", "\0"):
        answer = from_completion(add, text)
        assert answer.solution == add.prompt + answer.completion and not passes(add, answer.solution)


@pytest.mark.parametrize(
    "answer",
    [
        "Sure!\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds.",
        "```\ndef add(a, b):\n    return a + b\n```",
        (
            "First try:\n```python\ndef add(a, b):\n    return a - b\n```\nbetter:\n"
            "```python\ndef add(a, b):\n    total = a + b\n    return total\n```\n"
        ),
        (
            "```python\ndef add(a, b):\n    return a + b\n```\nUse:\n```python\nprint(add(1,"
            " 2))\n```\nand\n```bash\npython add.py\n```"
        ),
        "def add(a, b):\n    return a + b\n",
        "```python\ndef add(a, b):\n    return a + b\n\nThis was cut",  # the block is not closed
        "```python\nadd = lambda a, b: a + b\n```",
        "```python\n    return a + b\n```",  # without a signature, the code continues the prompt
        "    return a + b",
        "  ```python\n  x = 1\n  ```\n```python\ndef add(a, b):\n    return a + b\n```",
    ],
)
def test_program_in_a_chat_answer_is_found(add, answer):
    found = from_chat(add, answer)
    assert passes(add, found.solution)  # it uses half(), which only the prompt defines
    assert passes(add, add.prompt + found.completion)


def test_chat_answer_without_program_is_a_completion(add):
    for text in ("", "I cannot.", "```python\n```", "```"):
        assert not passes(add, from_chat(add, text).solution)


def test_mbpp_answers_are_programs(least):
    assert passes(least, from_chat(least, "```python\ndef least(xs):\n    return min(xs)\n```").solution)
    answer = from_completion(least, "def helper(x):\n    return x\n\ndef least(xs):\n    return helper(min(xs))\n")
    assert passes(least, answer.solution) and answer.solution.startswith('"""')


def test_stop_strings_match_evalplus(add, least):
    assert "\ndef " in stop_strings(add) and "\nclass " in stop_strings(add)
    assert "\ndef " not in stop_strings(least) and "\nassert" in stop_strings(least)  # helper functions may come first


LINES = st.lists(
    st.sampled_from(
        [
            "x = 1",
            "def f():",
            "    y = 2",
            "if x:",
            "prose here",
            "(",
            ")",
            '"""',
            "",
            "z = [1,",
            "  2]",
            "try:",
            "else:",
        ]
    )
)


@given(LINES)
@example(["def f():", "    y = 2", "prose here"])
@example(["x = 1", "        y = 2"])
@example(["try:", "    y = 2"])
def test_whole_statements_is_the_longest_valid_prefix(lines):
    lines = [line + "\n" for line in lines]
    beginnings = ("".join(lines[:n]) for n in range(len(lines), 0, -1))
    assert whole_statements("".join(lines)) == next(filter(parses, beginnings), "".join(lines))


def parses(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_long_prose_is_fast():
    began = time.monotonic()
    whole_statements("def f():\n    return 1\n" + "and this is prose, line by line\n" * 5000)
    assert time.monotonic() - began < 15
