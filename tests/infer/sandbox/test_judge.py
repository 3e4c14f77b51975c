"""Tests of a program that they call by message: they work as if they ran in the program's process."""

import os
import signal
import time

import pytest

from laneformer.infer.sandbox.sandbox import Limits, Sandbox
from tests.support.sandboxes import LIMITS, verdict


@pytest.fixture(scope="module")
def box():
    with Sandbox("rlimits") as made:  # no isolation: the programs here are our own
        yield made


SEEN = {
    "arguments by name": ("def f(a, *, b=2): return a + b", "assert f(1) == 3 and f(a=1, b=5) == 6"),
    "kinds of numbers": (
        "def f(x): return [True, 1, 1.0, 1j, -0.0]",
        "assert [type(x) for x in f(0)] == [bool, int, float, complex, float] and str(f(0)[4]) == '-0.0'",
    ),
    "changed argument": ("def f(x): x.sort()", "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]"),
    "argument that stays": ("def f(x): return sorted(x)", "x = [3, 1, 2]\nassert f(x) == [1, 2, 3] and x == [3, 1, 2]"),
    "changed argument inside": (
        "def f(x): x[0]['k'].add(2); x[1].append(x[0])",
        "x = ({'k': {1}}, [])\nf(x)\nassert x == ({'k': {1, 2}}, [{'k': {1, 2}}]) and x[1][0] is x[0]",
    ),
    "changed before an exception": (
        "def f(x): x.clear(); raise ValueError('no')",
        "x = [1]\ntry: f(x)\nexcept ValueError as error: assert str(error) == 'no'\nassert x == []",
    ),
    "argument returned": ("def f(x): return x, x", "x = [1]\na, b = f(x)\nassert a is b is x"),
    "iterator": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert [*itertools.islice(f(), 3)] == [0, 1, 2] and f() != [0]",
    ),
    "map": ("f = lambda x: map(abs, x)", "assert [*f([-1, 2])] == [1, 2]"),
    "views": ("f = lambda x: x.keys()", "assert f({1: 2}) == {1} and sorted(f({2: 1, 1: 1})) == [1, 2]"),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\nf = lambda: [P(1, 2)]",
        "assert f() == [(1, 2)]",
    ),
    "enumeration": (
        "import enum\nclass E(enum.IntEnum): A = 3\nf = lambda: E.A",
        "assert f() == 3 and type(f()) is int",
    ),
    "numpy": (
        "import numpy\ndef f(x): return numpy.sort(x), numpy.float64(0.5), numpy.int64(3)",
        "import numpy\na, b, c = f(numpy.array([2, 1]))\nassert a.tolist() == [1, 2] and b == 0.5 and c == 3",
    ),
    "types": ("f = lambda x: type(x)", "assert f(1) is int and f('') is str"),
    "exception of the program": (
        "class E(KeyError): pass\ndef f(): raise E('k')",
        "try: f()\nexcept KeyError as error: assert type(error).__name__ == 'E' and str(error) == \"'k'\"\n"
        "else: raise SystemExit",
    ),
    "objects": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "    def swap(self): self.a, self.b = self.b, self.a\n"
        "def f(pairs): return sum(p.a for p in pairs)",
        "p = Pair(1, 2)\nassert f([p, Pair(5, 6)]) == 6\np.swap()\np.b = [p.a]\n"
        "assert p.a == 2 and p.b == [2] and p == p and p != Pair(2, 1)",
    ),
    "closure": ("def f(n): return lambda x: x + n", "add = f(3)\nassert add(1) == 4 and add(2) == 5"),
    "shadowed built-in": ("def sorted(x): return 3\nf = sorted", "assert f([]) == 3 and sorted([2, 1]) == [1, 2]"),
    "module that the program imports": ("import math\nf = math.sqrt", "assert math.isclose(f(4), 2)"),
    "truth of an object": ("import re\nf = lambda s: re.search('a', s)", "assert f('ba') and f('b') is None"),
    "large integers": ("f = lambda n: 7 ** n", "assert f(30000) == 7 ** 30000 and f(2) == 49"),
    "odd texts": ("f = lambda s: s[::-1]", "assert f('a\\ud800\\U00010000') == '\\U00010000\\ud800a'"),
    "recursion": ("def f(n): return n and f(n - 1)", "try: f(10**5)\nexcept RecursionError: pass\nassert f(5) == 0"),
    "prints": ("def f(): print('x' * 10**6); return 1", "print('y')\nassert f() == 1"),
}


@pytest.mark.parametrize("name", SEEN)
def test_tests_work_as_if_they_ran_in_the_program(box, name):
    assert verdict(box, *SEEN[name]) == ("passed", "")


FAILURES = [
    ("f = lambda: 1", "assert f() == 2, 'no'", "AssertionError: no"),
    ("f = lambda: {}['k']", "f()", "KeyError: 'k'"),
    ("class E(Exception): __str__ = lambda self: 'why'\ndef f(): raise E", "f()", "E: why"),
    ("def f(): raise SystemExit(3)", "f()", "SystemExit: 3"),
    ("x = 1", "f()", "NameError: name 'f' is not defined"),
    ("f = lambda x: 1", "f(object())", "TypeError: the test passes a object to the program: pass plain data"),
    ("f = lambda: 1", "def check(:", "SyntaxError: invalid syntax (<test>, line 1)"),
    ("def f(): return f()", "f()", "RecursionError: maximum recursion depth exceeded"),
]


@pytest.mark.parametrize("solution, test, error", FAILURES)
def test_failures_name_their_exception(box, solution, test, error):
    assert verdict(box, solution, test) == ("failed", error)


def test_tests_have_the_limits_of_programs(box):
    limits = Limits(cpu_seconds=1, wall_seconds=30)
    assert verdict(box, "", "while True: pass", limits) == ("timeout", "the tests took more than 1 s of CPU time")
    assert verdict(box, "f = lambda: 1", "x = bytearray(6 << 30)")[0] == "memory"
    assert verdict(box, "def f(): return bytearray(6 << 30)", "f()")[0] == "memory"
    outcome = box.run("f = lambda: sum(range(10**6))", "f()\nsum(range(10**6))", LIMITS)
    assert outcome.verdict == "passed" and 0.01 < outcome.cpu_seconds < 5


def test_tests_do_not_influence_each_other(box):
    spoil = "import math, builtins\nmath.isclose = builtins.abs = lambda *_: 0"
    assert verdict(box, "", spoil)[0] == "passed"
    assert verdict(box, "", "import math\nassert math.isclose(1, 1) and abs(-3) == 3")[0] == "passed"
    draw = "import random, numpy\nassert f(random.random(), float(numpy.random.rand())) == 0"
    drawn = {verdict(box, "def f(*x): raise ValueError(x)", draw)[1] for _ in range(3)}
    assert len(drawn) == 3, "forks of one process must draw different numbers"


def test_dead_judge_is_replaced(box):
    assert verdict(box, "", "assert True")[0] == "passed"
    first = box._judge
    os.killpg(first._process.pid, signal.SIGKILL)
    while not first.ended:
        time.sleep(0.01)
    assert verdict(box, "", "assert True")[0] == "passed" and box._judge is not first
