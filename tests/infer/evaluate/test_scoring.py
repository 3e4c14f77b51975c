"""Judging programs, and the statistics against direct counting and closed forms."""

import itertools
import math
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from laneformer.errors import ConfigError
from laneformer.infer.evaluate.problems import load_problems
from laneformer.infer.evaluate.scoring import LOOP_SECONDS, Judge, pass_at_k, wilson
from laneformer.infer.sandbox.sandbox import HarnessError, Outcome
from tests.support.evaluation_cases import ADD, TWICE, write_jsonl


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return load_problems(write_jsonl(tmp_path_factory.mktemp("d") / "he.jsonl", [ADD, TWICE]))


@pytest.fixture(scope="module")
def made():
    with Judge("rlimits") as judge:  # no isolation: the programs here are our own
        yield judge


@pytest.fixture
def judge(made, monkeypatch):
    """The judge in the state of a new one: no reference solution has been run."""
    monkeypatch.setattr(made, "_references", {})
    monkeypatch.setattr(made, "slowness", made.slowness)
    return made


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(n, c, k):
    c = min(c, n)
    if k > n:
        assert pass_at_k({"a": (n, c)}, k) is None
    else:
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k({"a": (n, c)}, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_the_mean_over_problems():
    assert pass_at_k({"a": (2, 1), "b": (4, 4), "c": (1, 0)}, 1) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert pass_at_k({"a": (2, 1), "b": (4, 4), "c": (1, 0)}, 2) is None
    assert pass_at_k({"a": (200, 3)}, 100) == pytest.approx(
        1 - math.prod(1 - 100 / i for i in range(198, 201))
    )  # the formula of OpenAI's code


@given(st.integers(1, 500), st.floats(0, 1))
def test_interval_inverts_the_score_test(n, share):
    """The ends of the interval solve (p - x)^2 = z^2 x (1 - x) / n."""
    low, high = wilson(share, n)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for x in (low, high):
        assert (share - x) ** 2 == pytest.approx(1.959963984540054**2 * x * (1 - x) / n, abs=1e-9)


def test_intervals_match_published_intervals():
    for passed, total, low, high in [(82, 164, 0.42, 0.58), (74, 164, 0.38, 0.53), (195, 378, 0.47, 0.57)]:
        assert [round(end, 2) for end in wilson(passed / total, total)] == [low, high]


def test_programs_get_their_verdicts(judge, problems):
    add, twice = problems
    judge.verify(problems.problems)
    programs = [
        (add, add.reference),
        (add, add.prompt + "    return a - b\n"),
        (twice, twice.reference),
        (twice, "import os; os._exit(0)"),
    ]
    found = dict(judge.outcomes(programs * 3))
    assert [found[n].verdict == "passed" for n in range(12)] == [True, False, True, False] * 3


def test_references_run_once(judge, problems, monkeypatch):
    runs, run = [], judge.sandbox.run
    monkeypatch.setattr(judge.sandbox, "run", lambda *args, **named: runs.append(args) or run(*args, **named))
    judge.verify(problems.problems)
    judge.verify(problems.problems)
    assert len(runs) == 2
    monkeypatch.setattr(judge.sandbox, "run", lambda *_, **__: Outcome("passed", "", 0.0))
    judge.verify(problems.problems)


@pytest.mark.parametrize(
    "break_it", [{"canonical_solution": "    return 0\n"}, {"test": "def check(candidate):\n    assert undefined"}]
)
def test_failed_reference_is_a_harness_error(judge, tmp_path, break_it):
    problems = load_problems(write_jsonl(tmp_path / "he.jsonl", [{**ADD, **break_it}, TWICE]))
    with pytest.raises(HarnessError, match=r"1 of 2 reference solutions fail.*HumanEval/0 \(failed"):
        judge.verify(problems.problems)


def test_harness_errors_are_raised(judge, problems, monkeypatch):
    judge.verify(problems.problems)
    runs, run = [], judge.sandbox.run

    def breaks(*args, **named):
        runs.append(args)
        if len(runs) > 2:
            raise HarnessError("a program did not start: no memory")
        return run(*args, **named)

    monkeypatch.setattr(judge.sandbox, "run", breaks)
    with pytest.raises(HarnessError, match="no memory"):
        list(judge.outcomes([(problem, problem.reference) for problem in problems] * 5))


def test_limits_follow_the_machine_and_the_reference(judge, problems):
    add, twice = problems
    assert judge.slowness >= 1
    judge.slowness, judge._references = 1.0, {add: 0.01, twice: 3.0}
    assert judge.limits(add).cpu_seconds == 5 and judge.limits(twice).cpu_seconds == 12
    judge.slowness = 10.0  # on a core that is ten times slower, programs get ten times as long
    assert judge.limits(add).cpu_seconds == 50 and judge.limits(add).wall_seconds > 200


def test_slow_core_raises_limits(monkeypatch):
    monkeypatch.setattr("laneformer.infer.evaluate.scoring.LOOP_SECONDS", LOOP_SECONDS / 50)
    with Judge("rlimits") as judge:
        assert judge.slowness > 10 and judge.report["slowness"] == judge.slowness


def test_workers_are_limited_to_cores(judge):
    cores = len(os.sched_getaffinity(0))
    assert judge.workers == cores
    for workers in (0, cores + 1):
        with pytest.raises(ConfigError, match=f"workers must be 1 to {cores}, .* got {workers};"):
            Judge("rlimits", workers)
