"""Fixtures of the tests of training: a token store, an uninterrupted run of the tiny recipe, and its commands."""

import dataclasses
import shutil
import signal
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from laneformer.train.__main__ import main
from laneformer.train.metrics.records import MetricsLog
from laneformer.train.step import Trainer
from tests.support.tiny_recipe import RECIPE, finish, losses, records, start, weights_of, write_store
from tests.support.workers import made_once


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "store", write_store)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, store) -> Path:
    """Folder of an uninterrupted run of the tiny recipe in a separate process. To change it, use `finished_copy`."""

    def train(run: Path):
        shutil.rmtree(run, ignore_errors=True)  # a worker of pytest may have failed here
        status, out, err = finish(start(run, store))
        assert (status, err) == (0, ""), "no library may print a warning"
        assert all(line in out for line in ("new run in", "step 60/60", "60 steps done"))

    return made_once(tmp_path_factory, "finished", train)


@pytest.fixture
def finished_copy(tmp_path, finished) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="session")
def final_weights(finished):
    return weights_of(finished)


class OneTrainer(Trainer):
    """A trainer that compiles its step once."""

    @cached_property
    def _lowered(self):
        return super().lower_step()

    def lower_step(self):
        return self._lowered  # which keeps the compiled program


@pytest.fixture(scope="package")
def trainers():
    """A function that returns the same trainer for the same settings. A trainer has no state, only programs, which
    several commands in one process then trace and compile only once.
    """
    made = {}

    def trainer(config, phase, mesh, keys=("ids",)) -> Trainer:
        settings = (repr((dataclasses.replace(config, run=None), phase)), mesh, tuple(keys))
        if settings not in made:
            made[settings] = OneTrainer(config, phase, mesh, keys)
        return made[settings]

    return trainer


@pytest.fixture
def command(store, capsys, trainers):
    """Runs the command in this process: command(run, *options) -> (exit status, stdout, stderr)."""

    def run_command(run: Path, *options: str, path: Path = store, recipe: str = RECIPE):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("laneformer.train.loop.Trainer", trainers)
            status = main([recipe, "--run", str(run), "--data.path", str(path), *options])
        return status, *capsys.readouterr()

    return run_command


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(n) sends SIGTERM when step n is recorded: step n + 1, which is already running, is then the last."""
    write = MetricsLog.write

    def arm(step: int):
        def write_and_signal(log, number, **values):
            write(log, number, **values)
            if number == step and "loss" in values:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(MetricsLog, "write", write_and_signal)

    return arm


def check_same_end(run: Path, whole: Path, weights: dict[str, np.ndarray]) -> None:
    """Asserts that `run` has the records of `whole` and ended with exactly the given weights."""
    assert records(run) == records(whole)
    found = weights_of(run)
    assert found.keys() == weights.keys()
    for path, weight in found.items():
        np.testing.assert_array_equal(weight, weights[path], err_msg=path)


@pytest.fixture
def same_end(finished, final_weights):
    """same_end(run) asserts that the run has exactly the final weights and records of the uninterrupted run."""
    return lambda run: check_same_end(run, finished, final_weights)


@pytest.fixture
def resumed(tmp_path, command, stop_at, monkeypatch):
    """resumed(step, *options) stops a run after `step`, or in the next step if `step` is not saved, resumes it, and
    checks the end of the run.

    The end must be bitwise that of an uninterrupted run. Returns the folder of the resumed run and the standard output
    of the uninterrupted one. Keywords are those of `command`.
    """

    def check(step: int, *options: str, **named) -> tuple[Path, str]:
        whole, run = tmp_path / "whole", tmp_path / "run"
        status, out, err = command(whole, *options, **named)
        assert (status, err) == (0, "")
        stop_at(step)
        assert command(run, *options, **named)[0] == 143 and len(losses(run)) in (step, step + 1)
        monkeypatch.undo()
        assert command(run, *options, **named)[0] == 0
        check_same_end(run, whole, weights_of(whole))
        return run, out

    return check
