"""metrics.jsonl has whole lines, every step once, and all digits of floats."""

import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer.errors import InputError, LaneformerError
from laneformer.train.metrics.records import MetricsLog, last_step, read_lines, scalars


def write(path, steps, resumed_at=0):
    with MetricsLog(path, resumed_at) as log:
        for step in steps:
            log.write(step, loss=step / 3)


def test_resumed_file_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), resumed_at=4)
    assert [line["step"] for line in read_lines(path)] == list(range(1, 10))
    write(path, [], resumed_at=9)
    assert [line["step"] for line in read_lines(path)] == list(range(1, 10))
    write(path, [1], resumed_at=0)
    assert read_lines(path) == [{"step": 1, "loss": 1 / 3}]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_truncated_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    os.truncate(path, path.stat().st_size - cut)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4] if cut < 29 else [1, 2, 3]
    write(path, [4, 5], resumed_at=3)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]


def test_validation_of_the_saved_step_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        log.write(4, loss=1.0)
        log.write(4, validation_loss=2.0)
        log.write(5, loss=0.5)
    with MetricsLog(path, 4):
        pass
    assert read_lines(path) == [{"step": 4, "loss": 1.0}, {"step": 4, "validation_loss": 2.0}]


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_all_digits(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("digits") / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        log.write(1, loss=value)
    assert read_lines(path) == [{"step": 1, "loss": value}]


def test_each_line_is_flushed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as log:
        log.write(1, loss=1.0)
        assert read_lines(path) == [{"step": 1, "loss": 1.0}]
        log.sync()


@pytest.mark.parametrize(
    "damage", [b"\0\0\0", b'{"loss": 1}', b"[1]", b"17", b'{"step": null}', b'{"step": 2', b"\xff\xfe"]
)
def test_damaged_line_raises_and_leaves_the_file(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + damage + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(InputError, match="line 2, is damaged"):
        MetricsLog(path, 3)
    assert path.read_bytes() == content


def test_full_disk_error_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log._file.close()
    log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    raised = f"^cannot write {path}: No space left on device; make room"
    with pytest.raises(LaneformerError, match=raised):
        log.write(1, loss=1.0)
    with pytest.raises(LaneformerError, match=raised), log:
        pass  # closing tries to write the line again
    log._file = SimpleNamespace(fileno=lambda: 10**6)
    with pytest.raises(LaneformerError, match=f"^cannot write {path}: Bad file descriptor; "):
        log.sync()


def test_missing_file_has_no_lines(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []
    write(tmp_path / "metrics.jsonl", [1])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1 / 3}


def test_values_that_are_not_finite_become_null(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", 0) as log:
        log.write(
            1, loss=float("nan"), grad_norm=float("inf"), lanes={"similarity": [-float("inf"), 0.5, None]}, skipped=True
        )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lanes": {"similarity": [None, 0.5, None]},
        "skipped": True,
    }


@given(steps=st.integers(0, 30), saved=st.integers(0, 30), seed=st.integers(0, 9))
def test_kept_records_are_bitwise_equal(tmp_path_factory, steps, saved, seed):
    path = tmp_path_factory.mktemp("kept") / "metrics.jsonl"
    write(path, [(step + seed) * 0.1 for step in range(steps)])
    lines = path.read_bytes().splitlines(keepends=True)
    with MetricsLog(path, saved):
        pass
    assert path.read_bytes() == b"".join(line for line in lines if json.loads(line)["step"] <= saved)


def test_last_step_is_that_of_the_last_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    write(path, range(1, 8))
    assert last_step(path) == 7


def test_numbers_are_named_by_group():
    assert scalars(
        {
            "phase": "decay",
            "loss": 2.5,
            "grad_norm": None,
            "skipped": True,
            "tokens": 100,
            "step_seconds": 0.5,
            "tokens_per_second": 200,
            "mfu": 0.4,
            "epoch": {"code": 0.25},
            "validation": {"code": {"loss": 2.0, "bits_per_byte": 1.0}},
            "time": {"compile": 3.0},
            "lanes": {"similarity": [1.0] * 11, "landed_over_own": [None, 0.5]},
        }
    ) == {
        "train/loss": 2.5,
        "train/skipped": 1.0,
        "train/tokens": 100.0,
        "time/step_seconds": 0.5,
        "time/tokens_per_second": 200.0,
        "time/mfu": 0.4,
        "epoch/code": 0.25,
        "validation/code/loss": 2.0,
        "validation/code/bits_per_byte": 1.0,
        "time/compile": 3.0,
        **{f"lanes/similarity/{module:02}": 1.0 for module in range(11)},
        "lanes/landed_over_own/1": 0.5,
    }


def test_sinks_get_every_record(tmp_path):
    class Kept:
        def __init__(self):
            self.seen = []

        def write(self, step, values):
            self.seen.append((step, values))

    sinks = [Kept(), Kept()]
    with MetricsLog(tmp_path / "metrics.jsonl", 0, sinks) as log:
        log.write(3, loss=1.5)
        log.write(3, validation={"code": {"loss": 2.0}})
    assert sinks[0].seen == sinks[1].seen == [(3, {"train/loss": 1.5}), (3, {"validation/code/loss": 2.0})]
