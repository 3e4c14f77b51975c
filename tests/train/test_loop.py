"""The training loop: interrupted runs end bitwise equal, errors lose no steps, and at most two steps are in flight."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from laneformer.errors import CheckpointError, ConfigError, InputError
from laneformer.interrupts import StopSignals
from laneformer.train.data.store import TokenStore
from laneformer.train.loop import _greeting, _Loop, _mesh
from laneformer.train.metrics.records import MetricsLog, read_lines
from laneformer.train.run_folder import only_one, open_stores, record_run
from tests.support.tiny_recipe import (
    changed,
    finish,
    kill_when,
    lines,
    losses,
    records,
    saving,
    start,
    tiny,
    wait_until,
    write_store,
)


@pytest.mark.slow
def test_run_killed_and_stopped_by_signals_ends_bitwise_the_same(tmp_path, store, command, finished, same_end):
    """The first process is killed while it saves; SIGTERM and SIGINT stop the next two after their step."""
    for attempt in range(3):  # on a busy machine the kill may come too late
        run = tmp_path / f"run{attempt}"
        status, _, err = kill_when(start(run, store), lambda run=run: lines(run) >= 20 and saving(run))
        if status == -signal.SIGKILL:
            break
        assert (status, err) == (0, "")
    assert status == -signal.SIGKILL
    before = losses(run)
    assert 17 <= len(before) < 60, "20 lines include a line of times per ten steps"
    assert before == losses(finished)[: len(before)], "separate processes and compilations give the same losses"
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        stopped_at = len(losses(run))
        got, _, err = kill_when(start(run, store), lambda before=stopped_at: lines(run, '"grad_norm"') > before, number)
        assert got == status and len(losses(run)) > stopped_at
        stopped_at = len(losses(run))
        answer = (
            "stopping after this step; press Ctrl-C again to stop without saving\n" if number == signal.SIGINT else ""
        )
        assert err.startswith(
            f"{answer}stopped by {number.name} after step {stopped_at}, which is saved; resume with: python -m train "
        )
        assert str(run) in err and "Traceback" not in err
        assert (run / "checkpoints" / str(stopped_at) / "meta").is_dir()
    status, out, err = command(run)
    assert (status, err) == (0, "")
    assert f"resuming {run} after step {stopped_at}" in out
    same_end(run)
    assert not saving(run), "half-written checkpoints are removed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
def test_run_killed_at_random_ends_bitwise_the_same(tmp_path, store, same_end, seed):
    """Kills also occur while a process starts, compiles or restores."""
    run, random = tmp_path / "run", np.random.default_rng(seed)
    for _ in range(6):
        process, more = start(run, store), lines(run) + random.integers(1, 9)
        wait_until(process, (lambda: saving(run)) if random.random() < 0.4 else (lambda more=more: lines(run) >= more))
        time.sleep(random.exponential(0.02))
        if random.random() < 0.2:
            time.sleep(0.5)
        process.kill()
        process.communicate()
    for _ in range(2):
        process = start(run, store)
        time.sleep(random.uniform(0.5, 5))
        process.kill()
        process.communicate()
    status, _, err = finish(start(run, store))
    assert (status, err) == (0, "")
    same_end(run)


@pytest.mark.slow
def test_run_resumed_on_other_devices_agrees_to_rounding(finished_copy, command, finished):
    for step in (50, 60):
        shutil.rmtree(finished_copy / "checkpoints" / str(step))
    status, out, _ = command(finished_copy, "--mesh.data", "2", "--mesh.lane", "4")
    assert status == 0
    assert " after step 40\n" in out and "data 2 x lane 4" in out
    assert losses(finished_copy)[:40] == losses(finished)[:40] and losses(finished_copy) != losses(finished)
    np.testing.assert_allclose(losses(finished_copy), losses(finished), rtol=1e-5)


def test_finished_run_does_nothing(finished_copy, command):
    before = {
        file: (file.stat().st_mtime_ns, file.stat().st_size)
        for file in finished_copy.rglob("*")
        if file.name != ".lock"
    }
    status, out, err = command(finished_copy)
    assert (status, out, err) == (0, f"{finished_copy}: all 60 steps are done, nothing to do\n", "")
    assert before == {
        file: (file.stat().st_mtime_ns, file.stat().st_size)
        for file in finished_copy.rglob("*")
        if file.name != ".lock"
    }


def test_loss_falls_and_metrics_are_complete(finished):
    loss = losses(finished)
    assert len(loss) == 60
    assert np.mean(loss[25:30]) < loss[0] - 1
    assert np.mean(loss[-5:]) < np.mean(loss[25:30])
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            assert set(record) == {
                "step",
                "phase",
                "loss",
                "grad_norm",
                "learning_rate",
                "tokens",
                "epoch",
                "tokens_per_second",
                "step_seconds",
                "data_wait_seconds",
            }
            assert (
                record["tokens"] == 128 * record["step"]
                and record["step_seconds"] > 0
                and record["phase"] == "pretrain"
            )
            assert record["tokens_per_second"] == pytest.approx(128 / record["step_seconds"])
            assert record["epoch"] == {"store": pytest.approx(8 * record["step"] / 228)}, (
                "3660 tokens are 228 rows of 16"
            )
    validations = {line["step"]: line["validation"]["store"] for line in records(finished) if "validation" in line}
    assert list(validations) == [20, 40, 60]
    assert validations[60]["loss"] < validations[20]["loss"] < loss[0]
    assert validations[60]["bits_per_byte"] == pytest.approx(validations[60]["loss"] / np.log(2) * 8 * 61 / (8 * 120))


def test_lane_statistics_are_recorded_with_each_validation(finished):
    lanes = {line["step"]: line["lanes"] for line in records(finished) if "lanes" in line}
    assert list(lanes) == [20, 40, 60]
    assert all(len(values) == 5 for values in lanes[60].values())
    assert lanes[60]["similarity"][0] == pytest.approx(1) and 0.5 < lanes[60]["similarity"][4] < 0.999
    assert lanes[60]["landed_over_own"][-1] is None, "nothing is added before the final norm"


def test_program_of_every_phase_is_kept(finished):
    summary = json.loads((finished / "program" / "pretrain.json").read_text())
    assert summary["mesh"] == {"data": 1, "lane": 8}
    assert {exchange["axis"] for exchange in summary["collectives"]} == {"lane"}
    assert "| all-reduce | lane | 8 |" in (finished / "program" / "pretrain.md").read_text()
    assert gzip.decompress((finished / "program" / "pretrain.hlo.txt.gz").read_bytes()).startswith(b"HloModule")


def test_first_losses_match_recorded_ones(finished):
    """If these values change, runs from before the change resume with other results."""
    written = [4.15691614151001, 4.11168098449707, 4.092592239379883, 3.9618263244628906, 3.841066598892212]
    assert losses(finished)[:5] == pytest.approx(written, abs=2e-5)


# One layer on one device: its step compiles faster.
SMALL = ("--model.num-hidden-layers", "1", "--mesh.lane", "1")


def one_line_error(result, *parts):
    assert result[2].count("\n") == 1, result[2]
    one_error(result, *parts)


def one_error(result, *parts):
    status, _, err = result
    assert status == 2, err
    assert err.startswith("error: ") and err.endswith("\n") and "Traceback" not in err, err
    for part in parts:
        assert part in err, err
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.slow
def test_run_resumes_after_a_damaged_shard_is_repaired(tmp_path, store, command, same_end):
    damaged, run = shutil.copytree(store, tmp_path / "store"), tmp_path / "run"
    shard = damaged / "train-00004.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:100] + b"\xff" + data[101:])
    one_line_error(command(run, path=damaged), "train-00004.bin is corrupted near byte 0", "--overwrite")
    done = len(losses(run))
    assert os.listdir(run / "checkpoints") == [str(done)] and done > 0
    shard.write_bytes(data)
    status, out, err = command(run, path=damaged)
    assert (status, err) == (0, "")
    assert f" after step {done}\n" in out
    same_end(run)


@pytest.mark.slow
def test_interrupted_step_loses_nothing(tmp_path, command, monkeypatch, same_end):
    """Two Ctrl-C in one step end a run without saving; later the disk is full when metrics are written."""
    run, write = tmp_path / "run", MetricsLog.write

    def impatient(log, step, **values):
        write(log, step, **values)
        if step == 12:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def full(log, step, **values):
        if step == 23:
            file = log._file
            log._file = SimpleNamespace(write=lambda _: no_room(file), close=file.close)
        write(log, step, **values)

    def no_room(file):
        file.write('{"step": 2')  # the part of the line that still fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "write", impatient)
    status, _, err = command(run)
    assert (
        status == 130 and "\nstopped without saving; resume from the last checkpoint with: python -m train " in err
    ), err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(MetricsLog, "write", full)
    one_line_error(command(run), f"cannot write {run / 'metrics.jsonl'}: No space left on device; make room")
    assert [line["step"] for line in read_lines(run / "metrics.jsonl") if "loss" in line] == list(range(1, 23))
    monkeypatch.undo()
    status, out, err = command(run)
    assert (status, err) == (0, "") and " after step 20\n" in out
    same_end(run)


def test_damaged_first_shard_is_one_line(tmp_path, store, command):
    damaged, run = shutil.copytree(store, tmp_path / "store"), tmp_path / "run"
    for shard in damaged.glob("train*.bin"):
        shard.write_bytes(bytes(shard.stat().st_size))
    one_line_error(command(run, *SMALL, path=damaged), "is corrupted near byte 0")
    assert losses(run) == [] and os.listdir(run / "checkpoints") == []


def test_bad_stores_are_one_line(tmp_path, store, command):
    run = tmp_path / "run"
    one_line_error(command(run, path=tmp_path / "none"), "has no manifest.json", "python -m scripts.tokenize")
    missing = shutil.copytree(store, tmp_path / "missing")
    (missing / "train-00002.bin").unlink()
    one_line_error(command(run, path=missing), "train-00002.bin is missing")
    cut = shutil.copytree(store, tmp_path / "cut")
    os.truncate(cut / "train-00002.bin", 10)
    one_line_error(command(run, path=cut), "train-00002.bin is truncated")
    larger = write_store(tmp_path / "larger", vocab_size=70)
    one_line_error(command(run, path=larger), "model.vocab_size = 64", "--model.vocab-size 70")
    assert not run.exists(), "a failed command leaves no folder"


def test_run_keeps_its_tokenizer_tokens_and_settings(tmp_path, finished_copy, command, finished):
    other = write_store(tmp_path / "tokenizer", tokenizer=b"other")
    one_line_error(command(finished_copy, path=other), "another tokenizer")
    more = write_store(tmp_path / "tokens", seed=1)
    one_line_error(command(finished_copy, path=more), str(more), "--run")
    one_line_error(
        command(finished_copy, "--optimizer.learning-rate", "0.02", "--data.seed", "3"),
        "data.seed (was 0, now 3), optimizer.learning_rate (was 0.01, now 0.02)",
        "--run",
    )
    for content in ("{", "[]", "{}", '{"config": []}'):
        (finished_copy / "run.json").write_text(content)
        one_line_error(command(finished_copy), "run.json is damaged or missing")
    (finished_copy / "run.json").unlink()
    one_line_error(command(finished_copy), "run.json is damaged or missing")
    assert records(finished_copy) == records(finished)


def test_run_without_its_checkpoints_keeps_its_metrics(finished_copy, command, finished, tmp_path):
    saved, reported = finished_copy / "checkpoints", ("metrics.jsonl", "step", "60", "--run")
    kept = shutil.move(saved, tmp_path / "kept")
    one_line_error(command(finished_copy), *reported)
    saved.mkdir()
    one_line_error(command(finished_copy), *reported)
    saved.rmdir()
    saved.symlink_to(tmp_path / "nowhere")
    one_line_error(command(finished_copy), f"{saved} links to {tmp_path / 'nowhere'}")
    assert records(finished_copy) == records(finished)
    saved.unlink()
    saved.symlink_to(kept)
    assert command(finished_copy)[0] == 0


@pytest.mark.parametrize(("last", "restarts"), [(7, True), (20, True), (21, False)])
def test_run_restarts_if_its_first_save_was_incomplete(finished_copy, store, last, restarts):
    """The second save, of step 20, waits for the first: from step 21 on, a run must have a complete checkpoint."""
    config = changed(tiny(), run=finished_copy, data__path=(store,), save_every=50)  # now; the run started with 10
    for step in (finished_copy / "checkpoints").iterdir():
        shutil.rmtree(step)
    with MetricsLog(finished_copy / "metrics.jsonl", last):
        pass
    with contextlib.nullcontext() if restarts else pytest.raises(CheckpointError, match="up to 21"):
        record_run(config, open_stores(config))
    recorded = json.loads((finished_copy / "run.json").read_text())["config"]["save_every"]
    assert recorded == (50 if restarts else 10)


def test_bad_folders_are_one_line(tmp_path, store, command, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    one_line_error(command(file), f"{file} (it is a file)", "--run")
    one_line_error(command(file / "run"), f"{file}/run (Not a directory)")
    one_line_error(command(tmp_path / "run", path=file), f"{file} has no manifest.json", "python -m scripts.tokenize")
    monkeypatch.setattr("laneformer.train.run_folder.fcntl.flock", lambda *_: pytest.fail("locked"))
    (tmp_path / "run" / ".lock").mkdir(parents=True)  # not even root can open a folder as a file
    one_line_error(command(tmp_path / "run"), "/.lock: Is a directory", "--run")


def test_different_tokenizers_are_named_with_both_folders(tmp_path, finished_copy, store, command):
    other = write_store(tmp_path / "other", tokenizer=b"other")
    for run, whose in ((tmp_path / "new", str(other)), (finished_copy, f"the run in {finished_copy}")):
        wrong = store if run != finished_copy else other
        one_line_error(
            command(run, "--data.validation-path", str(store), path=other), f"{wrong} was tokenized", f"than {whose} ("
        )


def test_unused_devices_are_reported(store, monkeypatch):
    """In a job of several processes, unused devices are an error: a process might have no device of the mesh."""
    config = changed(tiny(), mesh__lane=2)
    lines = _greeting(config, {Path("no/store"): TokenStore.open(store)}, _mesh(config), 0).split("\n")
    assert lines[2].startswith("6 of 8 devices ") and "--mesh.data" in lines[2]
    monkeypatch.setattr("laneformer.train.loop.jax.process_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"^mesh 1 x 2 uses 2 of the job's 8 devices; set --mesh\.data 4, or start fewer processes$"
    ):
        _mesh(config)
    assert _mesh(tiny()).size == 8
    six = jax.devices()[:6]
    monkeypatch.setattr("laneformer.train.loop.jax.device_count", lambda: 6)
    monkeypatch.setattr("laneformer.mesh.jax.devices", lambda: six)
    with pytest.raises(
        ConfigError, match=r"mesh 1 x 4 uses 4 of the job's 6 devices; set --mesh\.data 3 --mesh\.lane 2"
    ):
        _mesh(changed(tiny(), mesh__lane=4))
    assert _mesh(changed(tiny(), data__batch_size=12, mesh__data=3)).shape == {"data": 3, "lane": 2}


def test_problems_without_a_tokenizer_are_one_line(tmp_path, command):
    run, file = tmp_path / "run", tmp_path / "problems.jsonl"
    options = ["--watch.humaneval-every", "10", "--watch.humaneval", str(file)]
    one_line_error(command(run, *options), "watch.humaneval_every", "tokenizer.json")
    assert losses(run) == []


def test_settings_may_change_until_the_first_step(tmp_path, store, command, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr("laneformer.train.loop.Evaluation", lambda *_: (_ for _ in ()).throw(InputError("no memory")))
    one_line_error(command(run, "--data.batch-size", "16"), "no memory")
    one_line_error(command(run), "no memory")
    assert json.loads((run / "run.json").read_text())["config"]["data.batch_size"] == 8


def test_second_process_in_a_folder_is_one_line(finished_copy, command):
    with only_one(finished_copy):
        one_line_error(command(finished_copy), str(finished_copy), "--run")
    assert command(finished_copy)[0] == 0


def test_run_without_validation_text_finishes(finished_copy, command, finished):
    """Without validation, the loop only saves checkpoints after its steps."""
    shutil.rmtree(finished_copy / "checkpoints" / "60")
    assert command(finished_copy, "--data.validation-batches", "0")[0] == 0
    now, before = (
        [line for line in records(run) if line["step"] > 50 and len(line) > 1] for run in (finished_copy, finished)
    )
    assert now == [line for line in before if "loss" in line]


@pytest.mark.slow
def test_closed_output_saves_the_step(tmp_path, store):
    """As after `| head -4`."""
    process = start(tmp_path / "run", store, "--log-every", "1")
    for _ in range(8):
        process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        err, status = process.stderr.read(), process.wait(timeout=300)
    found = re.fullmatch(r"stopped by SIGPIPE after step (\d+), which is saved; resume with: python -m train .*\n", err)
    assert status == 141 and found, err
    assert (tmp_path / "run" / "checkpoints" / found[1] / "meta").is_dir()
    assert len(losses(tmp_path / "run")) == int(found[1]) < 60


@pytest.mark.slow
def test_finished_run_goes_on_with_more_steps(tmp_path, command):
    """And with skipped steps and a decay, all of which change no step that is done."""
    options = ("--optimizer.schedule", "constant", "--validate-every", "10", "--save-every", "5")
    fall = ("--steps", "24", "--optimizer.schedule", "wsd", "--skip-steps", "15:17", "--validate-every", "10")
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert command(run, *options, "--steps", "10")[0] == 0
    status, out, err = command(run, *fall)
    assert (status, err) == (0, "") and "after step 10 with other settings: " in out
    assert "skip_steps (was None, now ['15:17']), steps (was 10, now 24)" in out
    assert command(whole, *fall)[0] == 0
    assert records(run) == records(whole)
    plain = tmp_path / "plain"
    assert command(plain, *fall[:4], *fall[6:])[0] == 0
    assert losses(plain)[:14] == losses(run)[:14] and losses(plain)[14] != losses(run)[14]
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["steps"] == 24 and record["config"]["skip_steps"] == ["15:17"]
    assert [(change["after_step"], change["settings"]["steps"]) for change in record["changes"]] == [(10, [10, 24])]
    assert command(run, *fall)[1].endswith("nothing to do\n")
    one_line_error(command(run, *fall, "--steps", "30"), "steps (was 24, now 30)", "add a phase")


class World:
    """Substitutes for the modules around the loop, which record steps in flight, fetched, measured and saved."""

    def __init__(self, monkeypatch, **changes):
        self.running, self.most, self.fetched, self.measured, self.saved = 0, 0, [], [], []
        self.config = changed(tiny(), **changes)
        self.phase = self.config.phases[0]
        monkeypatch.setattr(
            "laneformer.train.loop.jax", SimpleNamespace(device_get=self.fetch, process_count=lambda: 1, tree=jax.tree)
        )
        self.log = SimpleNamespace(clock=lambda bucket: contextlib.nullcontext(), step=self.record, sync=lambda: None)

    def step(self, state, batch, asked):
        self.running += 1
        self.most = max(self.most, self.running)
        return state, {"loss": np.float32(1), "asked": np.int32(0)}

    def fetch(self, values):
        self.running -= 1
        return values

    def record(self, phase, step, values, epochs, wait):
        self.fetched.append(step)

    def measure(self, params, step, log, stop):
        assert self.running == 0
        assert step % self.config.save_every or self.saved[-1] == step, "saved first"
        self.measured.append(step)
        return False

    def save(self, state, step):
        assert self.running == 0
        self.saved.append(step)

    def run(self, first=0):
        checkpoints = SimpleNamespace(save=self.save, check=lambda: None, wait=lambda: None)
        teacher = SimpleNamespace(teach=lambda batch: batch)
        loop = _Loop(self.config, None, {}, teacher, checkpoints, self.log, StopSignals(), None)
        loop.phase = loop.compiled = self.phase
        loop.step, loop.asked = self.step, {False: None, True: None}
        loop.batches = SimpleNamespace(epochs_at=lambda step: {})
        every = self.config.validate_every
        loop.evaluation = SimpleNamespace(
            due=lambda step: step % every == 0 or step == self.phase.last_step, measure=self.measure
        )
        loop._steps(
            SimpleNamespace(params=None), iter([(step, None) for step in range(first, self.phase.last_step)]), None
        )


def test_at_most_two_steps_are_in_flight(monkeypatch):
    world = World(monkeypatch, steps=12, save_every=5, validate_every=4)
    world.run()
    assert world.most == 2 and world.running == 0
    assert world.fetched == list(range(1, 13))
    assert world.saved == [5, 10, 12] and world.measured == [4, 5, 8, 10, 12]


def test_diverged_run_stops_before_saving(tmp_path, command):
    """With this learning rate, weights overflow."""
    one_error(
        command(tmp_path / "run", *SMALL, "--optimizer.learning-rate", "1e30", "--watch.max-skipped", "3"),
        "diverged at step",
        "not finite in 3 steps in a row",
        "optimizer.learning_rate",
    )
    steps = [line for line in records(tmp_path / "run") if "loss" in line]
    assert [line.get("skipped", False) for line in steps[-3:]] == [True] * 3 and steps[-1]["step"] < 10
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_terminal_shows_a_progress_bar(finished_copy, command, monkeypatch, same_end):
    """Without a terminal the loop prints lines: see the fixture `finished`."""
    shutil.rmtree(finished_copy / "checkpoints" / "60")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    status, out, _ = command(finished_copy)
    assert status == 0 and "step 60/60" not in out and "step 60: validation loss" in out
    last = terminal.getvalue().rstrip().split("\r")[-1]
    assert re.search(r"100%.* 60/60 .*<.*step.*, loss \d\.\d{3}, [\d,]+ tok/s\]$", last), last
    assert " 50/60 " in terminal.getvalue(), "the bar starts at the resumed step"
    same_end(finished_copy)
