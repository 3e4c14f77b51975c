"""Divergence is detected as by brute force over all records, at the same step however often the run resumes."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneformer.errors import LaneformerError
from laneformer.train.metrics.divergence import DivergedError, Divergence
from laneformer.train.metrics.records import MetricsLog, read_lines

MAX_SKIPPED, MAX_RISE = 3, 2.0


def records(losses, phases=("one",)):
    """One record per loss, where None is a skipped step. All phases have equally many steps."""
    return [
        {
            "step": n,
            "phase": phases[(n - 1) * len(phases) // len(losses)],
            "loss": loss,
            "grad_norm": None if loss is None else n / 8,
            "learning_rate": 1e-3,
            "tokens": 8 * n,
            **({"skipped": True} if loss is None else {}),
        }
        for n, loss in enumerate(losses, 1)
    ]


def verdict(lines, watch):
    """Step and message of the DivergedError that the records raise; None if they raise none."""
    for line in lines:
        try:
            watch.update(line)
        except DivergedError as error:
            return line["step"], str(error)
    return None


def by_definition(lines):
    """The step at which the run diverges, computed from all records; None if it does not."""
    for n in range(1, len(lines) + 1):
        seen = lines[:n]
        if n >= MAX_SKIPPED and all(line["loss"] is None for line in seen[-MAX_SKIPPED:]):
            return n
        if seen[-1]["loss"] is None:
            continue
        losses = [line["loss"] for line in seen if line["phase"] == seen[-1]["phase"] and line["loss"] is not None]
        medians = [np.median(losses[i : i + 20]) for i in range(len(losses) - 19)]
        if medians and medians[-1] - min(medians) > MAX_RISE:
            return n
    return None


def new(folder):
    return Divergence(folder, max_skipped=MAX_SKIPPED, max_rise=MAX_RISE)


RUNS = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 4.5, 8.0, None]), st.integers(1, 15)), min_size=1, max_size=12
).map(
    lambda stretches: [value if value is None else value + 0.01 * i for value, count in stretches for i in range(count)]
)
STOPS = st.lists(st.integers(1, 180), max_size=3)


@given(losses=RUNS, phases=st.sampled_from([("one",), ("one", "two"), ("one", "two", "three")]), stops=STOPS)
@example(losses=[1.0] * 20 + [9.0] * 11, phases=("one",), stops=[25])
@example(losses=[None] * 3, phases=("one",), stops=[2])
def test_divergence_is_detected_alike_across_resumes(tmp_path_factory, losses, phases, stops):
    folder = tmp_path_factory.mktemp("run")
    lines = records(losses, phases)
    at_once = verdict(lines, new(folder))
    assert (at_once and at_once[0]) == by_definition(lines)
    path, found = folder / "metrics.jsonl", None
    for stop in [*sorted(stops), len(lines)]:  # each process starts with the file's records and continues
        with MetricsLog(path, stop) as log:
            kept = read_lines(path)
            watch = new(folder)
            found = verdict(kept, watch)
            assert found is None or found == at_once
            for line in lines[len(kept) : stop]:
                log.write(**line)
                found = found or verdict([json.loads(json.dumps(line))], watch)
                if found:
                    break
    assert found == at_once


def test_median_may_rise_up_to_max_rise(tmp_path):
    assert verdict(records([1.0] * 20 + [1.0 + MAX_RISE] * 100), new(tmp_path)) is None
    higher = math.nextafter(1.0 + MAX_RISE, 10)
    assert verdict(records([1.0] * 20 + [higher] * 100), new(tmp_path))[0] == 31  # 11 of the last 20 losses are higher


def test_later_phase_starts_with_a_new_minimum(tmp_path):
    lines = records([1.0] * 40 + [9.0] * 40, ("one", "two"))
    assert verdict(lines, new(tmp_path)) is None
    assert verdict([line | {"phase": "one"} for line in lines], new(tmp_path)) is not None


def test_isolated_skipped_steps_are_counted_but_do_not_stop(tmp_path):
    watch = new(tmp_path)
    assert verdict(records([1.0, None, None, 1.0, None, None, 1.0] * 5), watch) is None
    assert watch.skipped == 20
    assert verdict([{"step": 40, "validation": {"code": {"loss": None}}}] * 9, watch) is None, "not a training step"


def save(run, *steps):
    for step in steps:
        (run / "checkpoints" / str(step) / "meta").mkdir(parents=True)


def test_message_names_steps_checkpoint_and_options(tmp_path):
    save(tmp_path, 10, 30, 50)
    losses = [5.0 - n / 10 for n in range(40)] + [9.0] * 20
    step, text = verdict(records(losses), new(tmp_path))
    assert step == 50
    median = np.median(losses[30:50])
    assert (
        f"diverged at step 50: the median loss of 20 steps is {median:.3f}, {median - np.median(losses[20:40]):.3f}"
        " nats above" in text
    )
    assert f"({np.median(losses[20:40]):.3f} at step 40)" in text
    assert "Steps 46 to 50: loss 9, 9, 9, 9, 9; gradient norm 5.75, 5.875, 6, 6.125, 6.25; learning rate 0.001." in text
    assert f"All was well until step 40; the last good checkpoint is {tmp_path / 'checkpoints' / '30'}." in text
    assert "Try a lower optimizer.learning_rate" in text and "steps 41 to 50" in text and "raise watch.max_rise" in text


def test_message_after_skipped_steps(tmp_path):
    step, text = verdict(records([2.0] * 6 + [None] * 3), new(tmp_path))
    assert step == 9
    assert text.startswith("diverged at step 9: the loss or its gradient was not finite in 3 steps in a row.\n")
    assert "Steps 5 to 9: loss 2, 2, not finite, not finite, not finite; gradient norm 0.625, 0.75, not finite" in text
    assert "until step 6; no earlier checkpoint" in text and "raise watch.max_skipped" in text
    assert issubclass(DivergedError, LaneformerError)


@pytest.mark.parametrize(
    "loss, says_so", [(None, False), (math.nan, False), (math.inf, False), (3.0, True), (math.nan, True)]
)
def test_step_marked_skipped_or_without_finite_loss_is_skipped(tmp_path, loss, says_so):
    record = {"phase": "one", "loss": loss, "grad_norm": math.inf, "learning_rate": 1e-3} | (
        {"skipped": True} if says_so else {}
    )
    step, text = verdict([{"step": n, **record} for n in range(1, 9)], new(tmp_path))
    assert step == 3 and "gradient norm not finite, not finite, not finite" in text
