"""One process per GPU, on emulated ones: the bits of one process with both, cancellations and failures that reach everyone, and what keeps
processes from coming together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import decode_process
import emulated
import jax
import numpy as np
import pytest
import small

import infer
import laneformer
from custom_calls import ENDS, NativeError, gpu_processes
from custom_calls.gpu_processes import Group
from infer.backend import ModelSource
from infer.gpu_engine import CudaBackend
from laneformer.hf import save_hf

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated]

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def expected():
    """The answers of one process with both devices, by launch; all is compiled after that."""
    config, weights = decode_process.tiny()
    mesh, answers = laneformer.make_mesh(4, lane=decode_process.PROCESSES), {}
    for launch in decode_process.LAUNCHES:
        session = emulated.make_session(config, weights, mesh=mesh, machine=decode_process.MACHINE, launch=launch)
        answers[launch] = decode_process.answers(session, config, mesh)
    return answers


@pytest.fixture(scope="module")
def job(tmp_path_factory, expected):
    """What the processes of decode_process.py have written, and how long the one that was left alone took to end."""
    folder = tmp_path_factory.mktemp("job")
    paths = os.pathsep.join(map(str, (ROOT / "tests/custom_calls", ROOT / "tests", ROOT)))
    save_hf(decode_process.with_lanes_own(), folder / "model")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(decode_process.PROCESSES)}
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [
        subprocess.Popen([sys.executable, decode_process.__file__, i, str(folder)], env=environment | {"JAX_PROCESS_ID": i}, **piped)
        for i in map(str, range(decode_process.PROCESSES))
    ]
    try:
        said = [processes[1].communicate(timeout=300)[0]]
        killed = time.monotonic()
        said.append(processes[0].communicate(timeout=60)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL], said
    return folder, json.loads((folder / "told0.json").read_text()), time.monotonic() - killed


@pytest.mark.slow
@pytest.mark.parametrize("launch", decode_process.LAUNCHES)
def test_three_calls_in_a_row_have_the_bits_of_one_process(launch, job, expected):
    wanted = expected[launch]
    count = len(wanted) // 3
    assert [x.tolist() for x in wanted[5::count]] == [[6, ENDS.index("length"), 11]] * 3
    assert wanted[0].tolist() != wanted[count].tolist() == wanted[2 * count].tolist()
    for index in range(decode_process.PROCESSES):
        saved = np.load(job[0] / f"{launch}{index}.npz")
        assert len(saved.files) == len(wanted)
        for i, name in enumerate(saved.files):
            rows = slice(None) if i % count == 5 else slice(6)  # the others are not defined
            assert saved[name][rows].tobytes() == wanted[i][rows].tobytes(), (index, i)


@pytest.mark.slow
@pytest.mark.parametrize("by", range(decode_process.PROCESSES))
def test_either_process_can_cancel(by, job):
    (drawn, end, position), finished, tokens = job[1][f"cancelled by {by}"]
    assert finished and ENDS[end] == "cancelled" and 3 <= drawn < 500 and position == 1 + drawn and len(tokens) == drawn


@pytest.mark.slow
def test_engines_generate_together(job):
    tokens, reason = job[1]["engine"]
    xla = infer.Engine(decode_process.with_lanes_own(), "xla")
    assert tokens == [list(xla.generate(prompt, max_new_tokens=6)) for prompt in (small.prompt_of(xla.config, 100), [1])]
    assert reason == "cancelled", "by the other process"


@pytest.mark.slow
def test_commands_join_the_job_and_the_first_process_speaks(job):
    folder = job[0]
    (generate, bench), others = (json.loads((folder / f"commands{i}.json").read_text()) for i in range(decode_process.PROCESSES))
    tokens = infer.Engine(decode_process.with_lanes_own(), "xla").generate([3, 1, 4], max_new_tokens=6, stop_tokens=())
    assert generate[:2] == [0, ",".join(map(str, tokens)) + "\n"] and "backend cuda, 2 x" in generate[2]
    assert bench[0] == 0 and "model, cuda" in bench[1] and "run 1 of 1" in bench[2]
    assert others == [[0, "", ""]] * 2
    assert sorted(path.name for path in folder.glob("record*") if path.suffix == ".json") == ["record0.json"]
    spans = json.loads((folder / "trace0.json").read_text())["traceEvents"]
    assert {span["tid"] for span in spans if span["ph"] == "X"} == set(range(decode_process.MACHINE.ctas)), "those of its own device"
    assert not (folder / "trace1.json").exists()


@pytest.mark.slow
def test_closing_together_gives_the_memory_back(job):
    assert job[1]["given back"] == 7  # boards, shared memory, that of the other device, and four of the host


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_in_the_others(job):
    _, told, seconds = job
    (drawn, end, _), failure = told["left alone"]
    assert end == len(ENDS) and 3 <= drawn < 500 and seconds < 30
    assert re.fullmatch(rf"lane [01], layer \d: .* of lane [23] did not come within {decode_process.TIMEOUT_MS} ms", failure)


class Store:
    """The key-value store of a job, whose processes are threads here."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


@pytest.fixture
def groups(monkeypatch):
    """Of two processes of a job, whose mesh has a device of each."""
    monkeypatch.setattr(gpu_processes.global_state, "client", Store())
    mesh = types.SimpleNamespace(devices=np.array([[types.SimpleNamespace(process_index=index) for index in range(2)]]))

    def make(seconds):
        made = []
        for index in range(2):
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            monkeypatch.setattr(gpu_processes, "_sessions", iter([0]))
            made.append(Group(mesh, seconds))
        return made

    return make


def test_what_processes_tell_each_other(groups):
    first, second = groups(5)
    said = []
    thread = threading.Thread(target=lambda: said.extend(first.share({"round": i}) for i in range(2)))
    thread.start()
    others = [second.share({"round": 10 + i}) for i in range(2)]
    thread.join()
    assert said == others == [{0: {"round": i}, 1: {"round": 10 + i}} for i in range(2)]


def test_a_process_that_does_not_come(groups):
    first, _ = groups(0.05)
    with pytest.raises(NativeError, match=r"process 1 did not open its part of the decode session within 0\.05 s"):
        first.share({})
    assert not first.meet()


def test_a_process_that_fails_tells_the_others(groups):
    first, second = groups(5)
    with pytest.raises(OSError), second:
        raise OSError("no driver")
    with pytest.raises(NativeError, match="process 1 could not open its part of the decode session: no driver"), first:
        first.share({})


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"machine": "another"}, "processes 0 and 1 are on different machines"), ({"model": "another"}, "have opened different models")],
)
def test_processes_that_cannot_decode_together(changed, message, monkeypatch):
    """The second one of the job answers what the first has said, but for one thing."""
    monkeypatch.setattr(Group, "several", True)
    monkeypatch.setattr(Group, "_tell", lambda self, what: None)
    monkeypatch.setattr(Group, "meet", lambda self: True)
    monkeypatch.setattr(Group, "share", lambda self, own: {0: own, 1: own | changed})
    config, weights = decode_process.tiny()
    before = emulated.allocations()
    with pytest.raises(NativeError, match=message):
        emulated.make_session(config, weights, machine=decode_process.MACHINE, mesh=laneformer.make_mesh(4, lane=2))
    assert emulated.allocations() == before


def test_a_job_needs_a_mesh_over_its_processes(monkeypatch):
    source = ModelSource(decode_process.with_lanes_own())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(CudaBackend, "platform", None)  # whichever is here
    assert "the job has several processes" in CudaBackend.unavailable(source)
