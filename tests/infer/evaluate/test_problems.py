"""Reading problems from data files. test_published_sets.py reads the published files."""

import gzip
import json
import sys
import types

import pytest

from laneformer.errors import ConfigError, InputError
from laneformer.infer.evaluate.problems import HUB, REPAIRS, load_problems
from tests.support.evaluation_cases import ADD, FIRST_MBPP, LEAST, TWICE, write_jsonl


def test_humaneval_file_is_read(tmp_path):
    problems = load_problems(write_jsonl(tmp_path / "he.jsonl", [ADD, TWICE]))
    add, _ = problems
    assert (problems.kind, problems.name, len(problems), problems.notes) == ("HumanEval", "he.jsonl", 2, ())
    assert problems["HumanEval/0"] is add and add.entry_point == "add" and add.seconds == 5
    assert add.reference == ADD["prompt"] + ADD["canonical_solution"] and add.test.endswith("\ncheck(add)\n")
    assert [problem.task_id for problem in problems.first(1)] == ["HumanEval/0"]


def test_mbpp_file_is_read(tmp_path):
    problems = load_problems(write_jsonl(tmp_path / "mbpp.jsonl", [LEAST, FIRST_MBPP]))
    least, area = problems
    assert problems.kind == "MBPP" and problems[7] is problems["7"] is problems["Mbpp/7"] is least
    assert (
        least.prompt == '"""\nWrite a function to find the least of some numbers. \nassert least([3, 1, 2]) == 1\n"""\n'
    )
    assert (least.entry_point, area.entry_point) == ("least", "area")  # not `round`, which the test calls first
    assert "assert least([5]) == 5" in least.test


def test_plus_sets_are_read(tmp_path):
    problems = load_problems(
        write_jsonl(tmp_path / "a.jsonl", [{**ADD, "test": "def check(candidate):\n    inputs = []\n"}])
    )
    assert problems.kind == "HumanEval+" and problems["HumanEval/0"].seconds == 60
    problems = load_problems(write_jsonl(tmp_path / "b.jsonl", [{**LEAST, "test": "assert least([9]) == 9\n"}]))
    assert problems.kind == "MBPP+" and "least([9])" in problems[7].test and "least([5])" not in problems[7].test
    assert not problems.notes


def test_defective_tests_are_repaired(tmp_path):
    (none_passed, _, _), (all_passed, _, _), *_ = REPAIRS
    roots = "def check(candidate):\n    inputs = [[[2, 1]]]\n    for inp in inputs:\n"
    find_zero = {
        **ADD,
        "task_id": "HumanEval/32",
        "entry_point": "find_zero",
        "test": f"def _poly(xs, x): return xs[0] + xs[1] * x\n{roots}{none_passed}\n",
    }
    problems = load_problems(write_jsonl(tmp_path / "a.jsonl", [find_zero]))
    assert outcome(problems["HumanEval/32"], "def find_zero(xs): return -xs[0] / xs[1]")
    assert not outcome(
        problems["HumanEval/32"], "def find_zero(xs): return -3 * xs[0]"
    )  # the result is below zero, but not near it
    assert problems.notes == (
        "HumanEval/32: test repaired (no solution passed: coefficients and result in the wrong places)",
    )
    compare = (
        "def assertion(out, exp):\n    if isinstance(out, bool):\n        exact_match = out == exp\n   "
        f" else:\n{all_passed}"
    )
    found = {
        "task_id": 737,
        "prompt": "Find a.",
        "code": "def found(s):\n    return 'a' in s",
        "test_list": ["assert found('a')"],
    }
    found["test"] = compare + "assertion(found('a'), True)\nassertion(found('b'), False)\n"
    problems = load_problems(write_jsonl(tmp_path / "b.jsonl", [found]))
    assert outcome(problems[737], problems[737].reference) and outcome(
        problems[737], "def found(s): return 1 if 'a' in s else None"
    )
    for wrong in ("def found(s): return object()", "def found(s): return None", "def found(s): return True"):
        assert not outcome(problems[737], wrong)
    assert "every solution passed" in problems.notes[0]


def test_loose_comparisons_are_repaired(tmp_path):
    """Repaired tests compare lengths and copy inputs, as EvalPlus's evaluator does. Without the repairs, wrong programs
    of both kinds passed.
    """
    (close, _, _), (reference, _, _) = REPAIRS[2:]
    test = (
        "import numpy as np\ndef assertion(out, exp, atol):\n    if out != exp and atol != 0:\n"
        f"{close}    else:\n        assert out == exp\n"
    )
    half = {**LEAST, "code": "def least(xs):\n    return min(xs) / 3", "test_list": ["assert least([3]) == 1"]}
    half["test"] = (
        test + "for inp, exp in (([[1, 2]], 0.333333), ([[6, 9]], 2.0)):\n    assertion(least(*inp), exp, 1e-3)\n"
    )
    problem = load_problems(write_jsonl(tmp_path / "a.jsonl", [half]))[7]
    for right in (problem.reference, "import numpy\ndef least(xs): return numpy.float64(min(xs) / 3)"):
        assert outcome(problem, right)
    for wrong in ("[]", "[min(xs) / 3]", "__import__('numpy').array([[min(xs) / 3]])", "[[]]"):
        assert not outcome(problem, f"def least(xs): return {wrong}")
    total = {**LEAST, "code": "def least(xs):\n    return sorted(xs)", "test_list": ["assert least([3]) == [3]"]}
    total["test"] = f"{test}ref_func = sorted\nfor inp in ([[2, 1]], [[5, 4]]):\n    assertion(least{reference}\n"
    problems = load_problems(write_jsonl(tmp_path / "b.jsonl", [total]))
    assert outcome(problems[7], problems[7].reference)
    assert not outcome(problems[7], "def least(xs):\n    xs.clear()\n    return []")
    assert len(problems.notes) == 2 and problems.notes[1].startswith("Mbpp/7: test repaired")


def outcome(problem, solution):
    names = {}
    try:
        exec(solution, names)
        exec(problem.test, names)
    except AssertionError:
        return False
    return True


def test_every_file_format_is_read(tmp_path):
    rows = [ADD, TWICE]
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    listed = tmp_path / "a.json"
    listed.write_text(json.dumps(rows))
    assert load_problems(plain).problems == load_problems(packed).problems == load_problems(listed).problems


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "contains no problems"),
        (b"{'a'}\n", "line 1 is not JSON"),
        (b'{"task_id": 1}\n{"task', "line 2 is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "is not JSON"),
        (b"\x1f\x8b" + b"broken", "damaged gzip"),
        (gzip.compress(b"{}\n", mtime=0)[:-6], "damaged gzip"),
        (b'{"question": 1}', "has the fields question"),
        (b'{"prompt": 1, "entry_point": 1, "canonical_solution": 1, "test": 1, "plus_input": []}', "-OriginFmt"),
        (json.dumps({**ADD, "prompt": 3}).encode(), "is not a complete HumanEval file"),
        (json.dumps({**LEAST, "test_list": []}).encode(), "is not a complete MBPP file"),
        (json.dumps({**LEAST, "code": "def ("}).encode(), "is not a complete MBPP file"),
        ((json.dumps(ADD) + "\n").encode() * 2, "appears more than once"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_problems(path)


def test_data_set_names_are_loaded_with_datasets(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return [LEAST] if "mbpp" in path else [ADD]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert {load_problems(name).kind for name in HUB} == {"HumanEval", "MBPP"}
    assert asked == list(HUB.values())
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: 1 / 0))
    with pytest.raises(InputError, match="could not be loaded"):
        load_problems("humaneval")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install"):
        load_problems("humaneval")
    with pytest.raises(InputError, match=r"humanevil.* humaneval, humaneval\+"):
        load_problems("humanevil")
