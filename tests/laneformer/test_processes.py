"""The processes of a job: how they join, agree, fail together and share values."""

import os
import re
import socket
import threading
import types

import jax
import numpy as np
import pytest

from laneformer import processes
from laneformer.errors import ConfigError, LaneformerError
from laneformer.processes import JOB, Group, GroupError, all_agree, fail_together, job_index, join_job
from tests.support import several

# ---- joining


@pytest.fixture
def joining(monkeypatch):
    """Makes this process the second of a job of two. joining(initialize) replaces jax.distributed.initialize."""
    for name, value in zip(JOB, (f"localhost:{several.free_port()}", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(processes, "QUIET_SECONDS", 0.1)
    return lambda initialize: monkeypatch.setattr(jax.distributed, "initialize", initialize)


def test_waiting_for_a_job_is_reported_and_times_out(joining, caplog):
    """XLA would report nothing for five minutes, and then end the process."""
    joined = threading.Event()
    joining(lambda *_, **__: joined.wait(60))
    address = os.environ[JOB[0]]
    with pytest.raises(ConfigError, match=rf"\(process 0 does not answer at {address} within 0\.3 s\)"):
        join_job()
    assert [record.getMessage() for record in caplog.records] == [
        f"process 1 waits up to 0.3 s for all 2 processes at {address}"
    ]
    with (
        socket.create_server(("localhost", int(address.rpartition(":")[2]))),
        pytest.raises(ConfigError, match=rf"\(not all 2 processes joined at {address} within 0\.3 s\)"),
    ):
        join_job()
    joined.set()


def test_complete_job_is_joined_quietly(joining, caplog):
    asked = []
    joining(lambda *args, **_: asked.append(args))
    join_job()
    assert asked == [(os.environ[JOB[0]], 2, 1)] and not caplog.records


def test_job_on_cpus_compiles_without_a_cache(tmp_path):
    """Only process 0 would find its programs in the cache, and loaded programs exchange in another order than compiled
    ones.
    """
    code = (
        "import jax; from laneformer.processes import join_job; join_job();"
        " print('cached', jax.config.jax_enable_compilation_cache)"
    )
    job = [several.start(environment, "-c", code) for environment in several.environments(2)]
    assert all("cached False\n" in process.communicate(timeout=60)[0] for process in job)


def test_failed_join_names_the_variables_of_the_job(joining, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("already\nrunning")

    joining(refuse)
    with pytest.raises(ConfigError, match=r"\(already running\): .* JAX_NUM_PROCESSES \(2\)"):
        join_job()
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(ConfigError, match=r"JAX_PROCESS_ID \(first\)"):
        join_job()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_real_process_without_its_job_reports_one_line(index):
    code = (
        "import laneformer.processes as p, sys; p.JOIN_SECONDS, p.QUIET_SECONDS = 2, 1\n"
        "try: p.join_job()\nexcept p.ConfigError as e: sys.exit(str(e))"
    )
    process = several.start(several.environments(2)[index], "-c", code)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and re.search(rf"process {index} waits .* 2 processes at localhost:", output), output
    assert "cannot join the other processes (" in output and "within 2 s" in output, output
    assert "Check failure" not in output, output


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}


@pytest.mark.parametrize(
    ("environment", "index"),
    [
        ({}, 0),
        ({"JAX_PROCESS_ID": "3"}, 3),
        ({"JAX_PROCESS_ID": "x"}, 0),
        (SLURM | {"SLURM_LOCALID": "1"}, 5),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2),
    ],
)
def test_index_is_known_before_joining(environment, index, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_PROCESS", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_index() == index


# ---- the whole job


@pytest.fixture
def of_three(monkeypatch):
    """of_three(*claims) simulates a job whose other two processes make these claims. It returns the list of claims that
    this process makes.
    """

    def arm(*claims: bool) -> list[bool]:
        own_claims = []

        def gather(own):
            own_claims.append(bool(own))
            return np.array([own, *claims])

        monkeypatch.setattr(processes, "jax", types.SimpleNamespace(process_count=lambda: 3))
        monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
        return own_claims

    return arm


def test_error_of_a_single_process_is_raised_unchanged():
    with pytest.raises(ConfigError, match=r"^mine$"), fail_together():
        raise ConfigError("mine")
    with fail_together():
        pass
    assert all_agree(True) and not all_agree(False)


def test_failing_process_raises_its_error_and_informs_the_others(of_three):
    claims = of_three(False, False)
    with pytest.raises(OSError, match="mine"), fail_together():
        raise OSError("mine")
    assert claims == [True]


def test_process_fails_if_another_one_does(of_three):
    claims = of_three(False, True)
    expected = r"^process 2 of the job failed: its output gives the reason$"
    with pytest.raises(GroupError, match=expected), fail_together():
        pass
    assert claims == [False]


def test_processes_without_errors_continue(of_three):
    of_three(False, False)
    with fail_together():
        pass
    of_three(True, False)
    assert not all_agree(True)
    of_three(True, True)
    assert all_agree(True)


# ---- the processes of a mesh


@pytest.fixture
def groups(monkeypatch):
    """groups(seconds) returns two groups, as two processes make them for a mesh with one device of each."""
    return lambda seconds: several.in_each(monkeypatch, lambda: Group(several.MESH, seconds, "count to three"))


def test_shared_values_reach_every_process(groups):
    first, second = groups(5)
    shared = []
    thread = threading.Thread(target=lambda: shared.extend(first.share({"round": i}) for i in range(3)))
    thread.start()
    others = [second.share({"round": 10 + i}) for i in range(3)]
    thread.join()
    assert shared == others == [{0: {"round": i}, 1: {"round": 10 + i}} for i in range(3)]


def test_shared_values_are_deleted_once_read(groups):
    first, second = groups(5)
    store = processes.global_state.client
    for _ in range(20):
        thread = threading.Thread(target=first.share, args=({},))
        thread.start()
        second.share({})
        thread.join()
        assert len(store.values) <= 2


@pytest.mark.parametrize("seconds", [None, 0.02])
def test_missing_process_is_an_error_after_the_time_limit(groups, seconds):
    first, _ = groups(0.05)
    with pytest.raises(GroupError, match=rf"process 1 did not count to three within {seconds or 0.05} s: every pro"):
        first.share({}, seconds)
    assert not first.barrier()
    with pytest.raises(GroupError, match="failed to count to three together before: restart the job"):
        first.share({})


def test_failure_is_reported_to_the_other_processes(groups):
    first, second = groups(5)
    with pytest.raises(OSError), second:
        raise OSError("no driver")
    with pytest.raises(GroupError, match="process 1 could not count to three: no driver"), first:
        first.share({})


def test_ended_job_is_an_error(groups, monkeypatch):
    first, _ = groups(5)

    def gone(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no coordinator")

    monkeypatch.setattr(processes.global_state.client, "blocking_key_value_get", gone, raising=False)
    with pytest.raises(GroupError, match=r"lost contact with process 0 \(UNAVAILABLE: no coordinator\): restart"):
        first.share({})


def test_group_error_is_a_laneformer_error():
    assert issubclass(GroupError, LaneformerError)


def test_process_without_a_device_of_the_mesh_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with pytest.raises(GroupError, match="process 2 has no device of the mesh: give the mesh devices of every process"):
        Group(several.MESH, 5, "count to three")


def test_group_of_one_process_never_waits():
    group = Group(None, 0, "count to three")
    with group:
        assert group.share({"round": 1}) == {0: {"round": 1}} and group.barrier() and not group.several
