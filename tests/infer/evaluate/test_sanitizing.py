"""Answers as models write them, and whether the solution in them is right.

answers.jsonl: `passes` is whether the solution is right, `evalplus` the verdict of EvalPlus 0.3.1 (its `sanitize`, then
the tests below).
"""

import json
import time
from pathlib import Path

import pytest

from laneformer.infer.evaluate.answers import from_chat, from_completion, sanitized
from laneformer.infer.evaluate.needed import LONGEST, needed
from laneformer.infer.evaluate.problems import load_problems
from tests.support.evaluation_cases import write_jsonl

ANSWERS = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()]
SUM = {
    "task_id": "HumanEval/900",
    "prompt": (
        "\n\ndef add(x: int, y: int):\n"
        '    """Add two numbers x and y\n    >>> add(2, 3)\n    5\n    """\n'
    ),
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n    assert candidate(2, 3) == 5\n",
}  # fmt: skip
MAKE = {"chat": from_chat, "completion": from_completion}
RIGHT = "def add(x, y):\n    return x + y\n"


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    return load_problems(write_jsonl(tmp_path_factory.mktemp("d") / "he.jsonl", [SUM]))["HumanEval/900"]


def passes(problem, program):
    names = {"__name__": "answer"}
    try:
        exec(compile(program, "answer", "exec"), names)
        exec(problem.test, names)
    except BaseException:  # also SystemExit
        return False
    return True


@pytest.mark.parametrize("answer", ANSWERS, ids=[each["name"] for each in ANSWERS])
def test_right_solutions_pass(problem, answer):
    solution = MAKE[answer["form"]](problem, answer["answer"]).solution
    program = sanitized(problem, solution)
    assert passes(problem, program) == answer["passes"]
    assert sanitized(problem, program) == program or not answer["passes"]


def test_whatever_evalplus_passes_passes():
    """The one exception is an answer that consists of reasoning."""
    assert len(ANSWERS) > 160
    assert [each["name"] for each in ANSWERS if each["evalplus"] and not each["passes"]] == ["think never closed"]


def test_helpers_of_the_prompt_stay(tmp_path):
    helped = {**SUM, "prompt": "import math\n\ndef zero():\n    return 0\n\n\ndef add(x, y):\n    '''Sum.'''\n"}
    problem = load_problems(write_jsonl(tmp_path / "he.jsonl", [helped]))["HumanEval/900"]
    code = "from __future__ import annotations\ndef add(x: X, y):\n    return x + y + zero()\n"
    answer = from_chat(problem, f"```python\n{code}```")
    for program in (answer.solution, sanitized(problem, answer.solution)):
        assert passes(problem, program)
    completed = from_completion(problem, "    return math.floor(x + y + zero())\n\nexit()\n")
    assert not passes(problem, completed.solution) and passes(problem, sanitized(problem, completed.solution))


def test_classes_that_the_tests_use_stay(tmp_path):
    row = {
        "task_id": 601,
        "prompt": "Write a function to add a pair.",
        "code": "class Pair(object):\n    def __init__(self, a, b):\n        self.a = a\n        self.b = b\n"
        "def add(pair):\n    return pair.a + pair.b\n",
        "test_imports": [],
        "test_list": ["assert add(Pair(5, 24)) == 29"],
    }
    problem = load_problems(write_jsonl(tmp_path / "mbpp.jsonl", [row]))[601]
    program = sanitized(problem, row["code"] + "assert add(1)\n")
    assert passes(problem, program) and "class Pair" in program and "assert" not in program


def test_what_is_needed_is_exact():
    code = (
        "import os, math\nimport re\nA = 1\nB = A\nC = input()\n\ndef f(x):\n    C = x\n    return B + C\n\n"
        "def g():\n    return f(C)\n\nfor i in range(3):\n    f(i)\n"
    )
    assert needed(code, {"f"}) == "A = 1\nB = A\ndef f(x):\n    C = x\n    return B + C\n"
    assert needed("x = = 1", {"x"}) is None


HEAD = "def add(x, y):\n    return "
HOSTILE = {
    "parentheses": HEAD + "(" * 15000,
    "signs": HEAD + "-" * 15000 + "1",
    "lambda": HEAD + "lambda:" * 2250 + "1",
    "sum": HEAD + "1" + "+1" * 2250,
    "attributes": HEAD + "x" + ".a" * 7500,
    "strings in strings": HEAD + "f'{" * 5000,
    "headers": "".join(" " * n + "if x:\n" for n in range(99)) + RIGHT,
    "definitions": "def add(x, y): return (\n" * 1000,
    "quotes": 'def add(x, y):\n"""\n' * 750,
    "fences": "```python\ndef add(x,y):\n" * 1000,
    "marks": "<think>" * 5000,
    "null": HEAD + "1\0",
    "surrogate": HEAD + "'\ud800'",
    "digits": HEAD + "9" * 25000,
    "ticks": "`` ` " * 6250,
    "larger": RIGHT * (LONGEST // 10),
}


QUICK = ("parentheses", "null")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_hostile_texts_are_bounded(problem, name):
    began = time.process_time()
    for make in MAKE.values():
        assert isinstance(sanitized(problem, make(problem, HOSTILE[name]).solution), str)
    assert time.process_time() - began < 5
