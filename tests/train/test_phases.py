"""A run with three phases: each phase follows its config, and a run killed in any phase ends bitwise the same."""

import json
import shutil
import signal

import numpy as np
import pytest

import laneformer
from tests.support.tiny_recipe import (
    RECIPE,
    finish,
    kill_when,
    lines,
    losses,
    phased,
    records,
    saving,
    start,
    weights_of,
    write_store,
)

PHASED = RECIPE.replace(":tiny", ":phased")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phased")
    write_store(folder / "plain")
    write_store(folder / "masked", seed=1, masked=True)
    return folder


@pytest.fixture(scope="module")
def options(place):
    plain, masked = str(place / "plain"), str(place / "masked")
    return ("--then.long.data.path", plain, "--then.instruct.data.path", plain, masked)


@pytest.fixture(scope="module")
def begin(place, options):
    """begin(run) starts the recipe in a separate process."""
    return lambda run, **named: start(run, place / "plain", *options, recipe=PHASED, **named)


@pytest.fixture
def phases(place, options, command):
    """phases(run) runs the recipe in this process, as `command` does."""
    return lambda run, *more: command(run, *options, *more, path=place / "plain", recipe=PHASED)


@pytest.fixture(scope="module")
def whole(begin, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    status, out, err = finish(begin(run))
    assert (status, err) == (0, "")
    assert "phase long: 1,920 tokens" in out and "50 steps done" in out
    return run


@pytest.mark.slow
def test_every_phase_follows_its_config(whole):
    steps = [line for line in records(whole) if "loss" in line]
    assert [line["phase"] for line in steps] == ["pretrain"] * 20 + ["long"] * 15 + ["instruct"] * 15
    assert [line["tokens"] for line in steps[18:22]] == [19 * 128, 20 * 128, 21 * 128, 22 * 128]
    assert set(steps[0]["epoch"]) == set(steps[20]["epoch"]) == {"plain"} and set(steps[-1]["epoch"]) == {
        "plain",
        "masked",
    }
    assert steps[-1]["epoch"]["masked"] == pytest.approx(3 * steps[-1]["epoch"]["plain"], rel=0.3)
    rates = [line["learning_rate"] for line in steps]
    assert rates[20] == pytest.approx(3e-3 / 2) and rates[34] < 1e-4 and rates[35] == pytest.approx(1e-3 / 2)
    validated = {line["step"]: line["validation"] for line in records(whole) if "validation" in line}
    assert list(validated) == [15, 20, 30, 35, 45, 50], "the end of each phase is validated too"
    assert "bits_per_byte" in validated[50]["plain"] and "bits_per_byte" not in validated[50]["masked"], (
        "bytes of masked text are not counted"
    )
    assert losses(whole)[-1] < losses(whole)[0] - 1


@pytest.mark.slow
def test_every_phase_keeps_its_last_checkpoint_with_its_model(whole):
    kept = {
        int(step.name): json.loads((step / "meta" / "metadata").read_text())
        for step in (whole / "checkpoints").iterdir()
    }
    assert {20: "pretrain", 35: "long", 50: "instruct"}.items() <= {
        step: meta["phase"] for step, meta in kept.items()
    }.items()
    for step, phase in zip((20, 35, 50), phased().phases, strict=True):
        assert laneformer.load(whole / "checkpoints" / str(step)).config == phase.model
    assert sorted(file.name for file in (whole / "program").glob("*.json")) == [
        "instruct.json",
        "long.json",
        "pretrain.json",
    ]


def same(run, whole):
    assert records(run) == records(whole)
    before = weights_of(whole)
    for path, weight in weights_of(run).items():
        np.testing.assert_array_equal(weight, before[path], err_msg=path)


@pytest.mark.slow
def test_run_killed_in_later_phases_ends_bitwise_the_same(tmp_path, begin, phases, whole):
    """test_loop.py kills a run in its first phase."""
    run = tmp_path / "run"
    for moment in (27, 46):  # lines of metrics in the second phase, while it saves, and in the third phase
        status, _, err = kill_when(
            begin(run), lambda moment=moment: lines(run) >= moment and (moment != 27 or saving(run))
        )
        assert status in (-signal.SIGKILL, 0), err
    status, _, err = phases(run)
    assert (status, err) == (0, "")
    same(run, whole)


@pytest.mark.parametrize(
    "last", [pytest.param(20, marks=pytest.mark.exhaustive), pytest.param(35, marks=pytest.mark.slow)]
)
def test_run_stopped_at_a_phase_border_ends_bitwise_the_same(tmp_path, phases, whole, last):
    """The run was killed between the last save of a phase and the first save of the next phase."""
    run = shutil.copytree(whole, tmp_path / "run")
    for step in (run / "checkpoints").iterdir():
        if int(step.name) > last:
            shutil.rmtree(step)
    status, out, err = phases(run)
    assert (status, err) == (0, "") and f" after step {last}" in out
    same(run, whole)


@pytest.mark.slow
def test_phases_added_to_a_finished_run_end_bitwise_the_same(tmp_path, place, command, phases, whole):
    run = tmp_path / "run"
    first = ("--steps", "20", "--validate-every", "15", "--save-every", "5")
    assert command(run, *first, path=place / "plain")[0] == 0
    status, out, err = phases(run)
    assert (status, err) == (0, "") and "then.instruct.accumulate (was None, now 2)" in out
    same(run, whole)


@pytest.mark.slow
def test_settings_of_every_phase_belong_to_the_run(phases, whole, tmp_path):
    status, _, err = phases(whole, "--then.instruct.optimizer.learning-rate", "0.5")
    assert status == 2 and "then.instruct.optimizer.learning_rate (was 0.001, now 0.5)" in err
    status, _, err = phases(tmp_path / "other", "--then.instruct.data.sequence-length", "4000")
    assert status == 2 and "a row of sequence_length 4000" in err and not (tmp_path / "other").exists()
