"""One process per GPU, on emulated GPUs: the bits of one process with both GPUs, cancellations and failures that reach
all processes, and processes that cannot decode together.
"""

import json
import re
import signal
import time

import jax
import numpy as np
import pytest

import laneformer
from laneformer import infer
from laneformer.custom_calls import ENDS, NativeError
from laneformer.hf.folder import save_hf
from laneformer.infer.engine.backend import ModelSource
from laneformer.infer.engine.gpu import CudaBackend
from laneformer.processes import Group
from tests.support import decode_process, emulated, several, small
from tests.support.several import ROOT

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated]


@pytest.fixture(scope="module")
def expected():
    """The answers of one process with both devices, by launch. All kernels are compiled after this."""
    config, weights = decode_process.tiny()
    mesh, answers = laneformer.make_mesh(4, lane=decode_process.PROCESSES), {}
    for launch in decode_process.LAUNCHES:
        session = emulated.make_session(config, weights, mesh=mesh, machine=decode_process.MACHINE, launch=launch)
        answers[launch] = decode_process.answers(session, config, mesh)
    return answers


@pytest.fixture(scope="module")
def job(tmp_path_factory, expected):
    """The folder with the files of decode_process.py's processes, the results of the first process, and the seconds
    until it ended after the other process was killed.
    """
    folder = tmp_path_factory.mktemp("job")
    save_hf(decode_process.with_lanes_own(), folder / "model")
    paths = str(ROOT)
    started = [
        several.start(environment | {"PYTHONPATH": paths}, decode_process.__file__, index, folder)
        for index, environment in enumerate(several.environments(decode_process.PROCESSES))
    ]
    try:
        outputs = [started[1].communicate(timeout=300)[0]]
        killed = time.monotonic()
        outputs.append(started[0].communicate(timeout=60)[0])
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, -signal.SIGKILL], outputs
    return folder, json.loads((folder / "results0.json").read_text()), time.monotonic() - killed


@pytest.mark.slow
@pytest.mark.parametrize("launch", decode_process.LAUNCHES)
def test_three_calls_give_the_bits_of_one_process(launch, job, expected):
    wanted = expected[launch]
    count = len(wanted) // 3
    assert [x.tolist() for x in wanted[5::count]] == [[6, ENDS.index("length"), 11]] * 3
    assert wanted[0].tolist() != wanted[count].tolist() == wanted[2 * count].tolist()
    for index in range(decode_process.PROCESSES):
        saved = np.load(job[0] / f"{launch}{index}.npz")
        assert len(saved.files) == len(wanted)
        for i, name in enumerate(saved.files):
            rows = slice(None) if i % count == 5 else slice(6)  # later rows are undefined
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
    assert tokens == [
        list(xla.generate(prompt, max_new_tokens=6)) for prompt in (small.prompt_of(xla.config, 100), [1])
    ]
    assert reason == "cancelled", "the other process cancels it"


@pytest.mark.slow
def test_following_process_answers_the_leading_requests(job):
    xla = infer.Engine(decode_process.with_lanes_own(), "xla")
    expected = [list(xla.generate(prompt, max_new_tokens=6)) for prompt in ([1], small.prompt_of(xla.config, 100))]
    assert job[1]["led"] == [expected[0], "cancelled", expected[1]]


@pytest.mark.slow
def test_commands_join_the_job_and_the_first_process_prints(job):
    folder = job[0]
    (generate, bench), others = (
        json.loads((folder / f"commands{i}.json").read_text()) for i in range(decode_process.PROCESSES)
    )
    tokens = infer.Engine(decode_process.with_lanes_own(), "xla").generate([3, 1, 4], max_new_tokens=6, stop_tokens=())
    assert generate[:2] == [0, ",".join(map(str, tokens)) + "\n"] and "backend cuda, 2 x" in generate[2]
    assert bench[0] == 0 and "model, cuda" in bench[1] and "run 1 of 1" in bench[2]
    assert others == [[0, "", ""]] * 2
    assert sorted(path.name for path in folder.glob("record*") if path.suffix == ".json") == ["record0.json"]
    spans = json.loads((folder / "trace0.json").read_text())["traceEvents"]
    assert {span["tid"] for span in spans if span["ph"] == "X"} == set(range(decode_process.MACHINE.ctas)), (
        "a process writes only the CTAs of its device"
    )
    assert not (folder / "trace1.json").exists()


@pytest.mark.slow
def test_closing_together_frees_the_memory(job):
    assert job[1]["freed"] == 8  # boards, shared memory, the other device's shared memory, five arrays of the host


@pytest.mark.slow
def test_killed_process_is_an_error_in_the_others(job):
    _, results, seconds = job
    (drawn, end, _), failure = results["left alone"]
    assert end == len(ENDS) and 3 <= drawn < 500 and seconds < 30
    landing = decode_process.TIMEOUT_MS  # the other waits are an eighth longer, so that landings report first
    assert re.fullmatch(
        rf"lane [01], layer \d: timed out waiting for .* of lane [23] after ({landing}|{landing // 8 * 9}) ms"
        r" \((CTAs? [\d-]+ of lane [01], layer \d, \w+: .* of lane [23], waits for tag \d+, has \d+, .* later.*)+\)",
        failure,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"machine": "another"}, "processes 0 and 1 are on different machines"),
        ({"model": "another"}, "different models"),
    ],
)
def test_unequal_processes_are_refused(changed, message, monkeypatch):
    """The second process passes the same values as the first, except in one field."""
    monkeypatch.setattr(Group, "several", True)
    monkeypatch.setattr(Group, "_publish", lambda self, what: None)
    monkeypatch.setattr(Group, "barrier", lambda self: True)
    monkeypatch.setattr(Group, "share", lambda self, own: {0: own, 1: own | changed})
    config, weights = decode_process.tiny()
    before = emulated.allocations()
    with pytest.raises(NativeError, match=message):
        emulated.make_session(config, weights, machine=decode_process.MACHINE, mesh=laneformer.make_mesh(4, lane=2))
    assert emulated.allocations() == before


def test_job_without_a_mesh_is_refused(monkeypatch):
    source = ModelSource(decode_process.with_lanes_own())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(CudaBackend, "platform", None)  # any platform
    assert "the job has several processes" in CudaBackend.unavailable(source)
