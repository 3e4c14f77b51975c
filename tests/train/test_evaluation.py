"""Measurements between steps: a failure is a warning, a signal ends them at once, and problems are checked first."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from laneformer.infer.evaluate import humaneval
from laneformer.train.evaluation import Evaluation
from tests.support.checkpoints import byte_tokenizer
from tests.support.evaluation_cases import ADD, TWICE, write_jsonl
from tests.support.tiny_recipe import losses, records, write_store

# One layer on one device: its step compiles faster.
SMALL = ("--model.num-hidden-layers", "1", "--mesh.lane", "1")


def test_failed_measurement_is_a_warning(tmp_path, command, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(Evaluation, "_lanes", lambda *_: (_ for _ in ()).throw(RuntimeError("no\nroom")))
    short = ("--steps", "4", "--optimizer.warmup-steps", "1", "--validate-every", "2")
    status, out, err = command(run, *SMALL, *short)
    assert (status, "4 steps done" in out) == (0, True)
    line = "warning: step {}: measurement lanes failed: RuntimeError: no room\n"
    assert err == line.format(2) + line.format(4)
    assert [list(record) for record in records(run) if "loss" not in record] == [
        ["step", "validation"],
        ["step", "bf12"],
    ] * 2
    monkeypatch.undo()
    status, out, err = command(run, *SMALL, *short)
    assert (status, err) == (0, "") and [*records(run)[-1]] == ["step", "lanes"], (
        "it is made when the run resumes there"
    )
    assert command(run, *SMALL, *short)[1].endswith("nothing to do\n")


@pytest.mark.slow
def test_signal_ends_a_measurement_which_is_made_when_the_run_resumes(tmp_path, command, monkeypatch, same_end):
    """At step 20, which only the signal saves, and at the last step."""
    run, measure = tmp_path / "run", Evaluation._validation
    for step in (20, 60):

        def interrupted(evaluation, params, now, step=step):
            if now == step:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(100)
            return measure(evaluation, params, now)

        monkeypatch.setattr(Evaluation, "_validation", interrupted)
        began = time.monotonic()
        status, _, err = command(run, "--save-every", "50")
        assert status == 143 and err.startswith(f"stopped by SIGTERM after step {step}, which is saved"), err
        assert time.monotonic() - began < 60 and len(losses(run)) == step
        monkeypatch.undo()
    status, _, err = command(run, "--save-every", "50")
    assert (status, err) == (0, "")
    same_end(run)
    assert command(run)[1].endswith("nothing to do\n")


@pytest.fixture
def solving(tmp_path, command):
    """solving(*problems) trains with an evaluation on these problems after steps 2 and 4."""
    store = write_store(tmp_path / "bytes", tokenizer=byte_tokenizer().to_str().encode())
    options = ("--model.vocab-size", "256", "--model.max-position-embeddings", "256", "--steps", "4")
    options += ("--optimizer.warmup-steps", "1", "--save-every", "3")
    every = ("--watch.humaneval-every", "2", "--watch.humaneval-tokens", "4", "--data.validation-batches", "0")

    def train(*problems):
        file = write_jsonl(tmp_path / "problems.jsonl", problems)
        return command(tmp_path / "run", *SMALL, *options, *every, "--watch.humaneval", str(file), path=store)

    return train


@pytest.mark.slow
def test_problems_are_checked_before_the_first_step(tmp_path, solving):
    """SIGTERM ends the check while a reference solution sleeps."""
    wrong = ADD | {"canonical_solution": "    return a - b\n"}
    status, _, err = solving(TWICE, wrong)
    assert status == 2 and err.startswith("error: 1 of 2 reference solutions fail") and "HumanEval/0 (failed" in err
    assert err.count("\n") == 1 and losses(tmp_path / "run") == []
    asleep = ADD | {"canonical_solution": "    import time\n    time.sleep(50)\n    return a + b\n"}
    timer = threading.Timer(15, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    status, _, err = solving(asleep)
    assert (status, err.split(";")[0]) == (143, "stopped by SIGTERM before the first step"), err
    assert time.monotonic() - began < 40 and losses(tmp_path / "run") == []


@pytest.mark.slow
def test_signal_ends_the_sandbox_of_an_evaluation(tmp_path, solving, monkeypatch):
    """The solution of the model sleeps. The step is saved, though the run saves every third step."""
    answer = SimpleNamespace(solution="def twice(text):\n    import time\n    time.sleep(50)\n", completion="")
    monkeypatch.setattr("laneformer.infer.evaluate.humaneval.from_completion", lambda *_: answer)
    score = humaneval.score

    def interrupted(*args, **named):
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return score(*args, **named)

    monkeypatch.setattr(humaneval, "score", interrupted)
    began = time.monotonic()
    status, _, err = solving(TWICE)
    assert (status, err.split(";")[0]) == (143, "stopped by SIGTERM after step 2, which is saved"), err
    assert time.monotonic() - began < 45
    monkeypatch.undo()
    status, _, err = solving(TWICE)
    assert (status, err) == (0, "")
    assert [record["step"] for record in records(tmp_path / "run") if "humaneval" in record] == [2, 4]
