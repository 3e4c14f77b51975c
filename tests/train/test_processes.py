"""A job of two processes has the losses of one process, stops and fails together, and resumes in one process."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.several import free_port
from tests.support.tiny_recipe import RECIPE, environment, lines, losses, records


class Job:
    """The tiny recipe in two processes of four devices each."""

    def __init__(self, run, store, *options: str):
        job = environment() | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        command = [
            sys.executable,
            "-m",
            "train",
            RECIPE,
            "--run",
            str(run),
            "--data.path",
            str(store),
            "--mesh.distributed",
            "True",
            "--mesh.host-devices",
            "4",
            *options,
        ]
        self.processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=job | {"JAX_PROCESS_ID": str(i)},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for i in range(2)
        ]

    def wait_for(self, condition, seconds=200) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.processes), self.end()
            time.sleep(0.01)

    def end(self, seconds=200) -> list[tuple[int, str, str]]:
        """Exit status, standard output and standard error of both processes.

        Threads of the transport also write to standard output.
        """
        reported = [process.communicate(timeout=seconds) for process in self.processes]
        return [(process.returncode, *text) for process, text in zip(self.processes, reported, strict=True)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


# One layer: processes of a job on CPUs compile without a cache.
SMALL = ("--model.num-hidden-layers", "1", "--steps", "30", "--validate-every", "10")


@pytest.mark.slow
def test_runs_continue_in_one_process_and_in_two(tmp_path, store, command, stop_at, monkeypatch):
    """Two processes begin a run. Only one gets SIGTERM, but both save and stop. One process with 8 devices continues,
    and two finish on a mesh of 2 x 4, where each reads half of every batch. The losses are those of an uninterrupted
    run in one process.
    """
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert command(whole, *SMALL)[0] == 0
    with Job(run, store, *SMALL) as job:
        job.wait_for(lambda: lines(run) >= 7)
        job.processes[1].send_signal(signal.SIGTERM)
        first, second = job.end()
    assert first[0] == second[0] == 143, (first, second)
    stopped = len(losses(run))
    assert (
        f"stopped by SIGTERM after step {stopped}, which is saved" in first[2]
        and "Traceback" not in first[2] + second[2]
    )
    assert "new run in" in first[1] and "new run in" not in second[1], "only process 0 prints"
    assert (run / "checkpoints" / str(stopped) / "meta").is_dir() and 7 <= stopped < 30
    stop_at(stopped + 1)
    status, out, _ = command(run, *SMALL)
    assert status == 143 and f" after step {stopped}" in out
    monkeypatch.undo()
    with Job(run, store, *SMALL, "--mesh.data", "2", "--mesh.lane", "4") as job:
        first, second = job.end()
    assert first[0] == second[0] == 0, (first, second)
    assert f" after step {stopped + 2}" in first[1] and "30 steps done" in first[1]
    assert not any(reported in second[1] for reported in ("resuming", "step ", "steps done")), "only process 0 prints"
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)
    ours, theirs = (
        [line["validation"]["store"]["loss"] for line in records(r) if "validation" in line] for r in (run, whole)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert len(ours) == 3


@pytest.mark.slow
def test_error_of_one_process_ends_both_with_one_line_each(tmp_path, store, finished_copy):
    with Job(finished_copy, store, "--optimizer.learning-rate", "1") as job:
        first, second = job.end()
    for (status, _, err), reported in (
        (first, "holds a run with other settings"),
        (second, "process 0 of the job failed"),
    ):
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert status == 2 and len(errors) == 1 and reported in errors[0] and "Traceback" not in err, err


@pytest.mark.exhaustive
def test_mesh_without_devices_of_one_process_ends_both(tmp_path, store):
    with Job(tmp_path / "run", store, "--mesh.lane", "2") as job:
        for status, _, err in job.end():
            assert status == 2 and "Traceback" not in err, err
            assert "error: mesh 1 x 2 uses 2 of the job's 8 devices; set --mesh.data 4" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_death_of_one_process_ends_the_others(tmp_path, store):
    """The coordination service detects the death within its heartbeat timeout of a minute, so no process hangs."""
    run = tmp_path / "run"
    with Job(run, store, "--steps", "100000") as job:
        job.wait_for(lambda: lines(run) >= 12)
        job.processes[1].kill()
        began = time.monotonic()
        first, second = job.end()
    assert second[0] == -signal.SIGKILL and first[0] not in (0, None)
    assert time.monotonic() - began < 150
