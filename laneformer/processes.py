"""The processes of a job: how they join, agree and fail together.

`join_job` connects the processes through `jax.distributed`. `all_agree` and `fail_together` involve all processes of
the job and use its devices. A `Group` involves the processes of a mesh and uses only the key-value store of the job, on
the host.
"""

import contextlib
import itertools
import json
import logging
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from jax._src.clusters import ClusterEnv  # JAX's list of launchers has no public name
from jax._src.distributed import global_state  # the key-value store of the job has no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from laneformer.errors import ConfigError, LaneformerError

JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JOIN_SECONDS = 300  # limit for all processes to join
QUIET_SECONDS = 5  # wait before a process reports that it waits to join
END_SECONDS = 10  # limit for the barrier at the end of a common task
POLL_SECONDS = 2  # limit of one call of the key-value store, during which Ctrl-C has no effect
log = logging.getLogger("laneformer")
_groups = itertools.count()


class GroupError(LaneformerError, RuntimeError):
    """The processes of a job failed in a common task. The message names the process or the reason."""


# ---- joining


def join_job() -> None:
    """Connects this process with the others of its job through `jax.distributed`, if it is not connected yet. Call it
    before the first JAX operation.

    JAX recognises SLURM, Open MPI and Kubernetes. Elsewhere, JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID describe the job. Raises ConfigError if the other processes cannot be found or
    do not join in time.
    """
    if jax.distributed.is_initialized():
        return
    named = [os.environ.get(name) for name in JOB]
    try:
        count, index = (int(number) if number else None for number in named[1:])
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            named[0], count, index, None, None, JOIN_SECONDS
        )
        _initialize(address, count, index)
    except (ValueError, RuntimeError, TimeoutError) as error:
        found = ", ".join(f"{name} ({value or 'missing'})" for name, value in zip(JOB, named, strict=True))
        raise ConfigError(
            f"cannot join the other processes ({' '.join(str(error).split())}): start them through SLURM, Open MPI or"
            f" Kubernetes, or set {found}"
        ) from None
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Only process 0 would find its programs in the cache, and gloo does not match a loaded program with a compiled
        # one: the job would abort.
        jax.config.update("jax_enable_compilation_cache", False)


def job_index() -> int:
    """The number that this process will have after `join_job`, or 0 if no job is found. Does not connect."""
    if named := os.environ.get(JOB[2]):
        return int(named) if named.isdecimal() else 0  # join_job raises an error for other values
    launcher = next(
        (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method and kind.is_env_present()), None
    )
    return launcher.get_process_id() if launcher else 0


def _initialize(address: str | None, count: int | None, index: int | None) -> None:
    """Calls `jax.distributed.initialize` and logs a line if that waits. Raises its errors, or TimeoutError after
    JOIN_SECONDS.

    The call runs in a thread, because it does not react to Ctrl-C, and because XLA ends the process when its own
    timeout expires.
    """
    ended: queue.Queue[Exception | None] = queue.Queue()

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                address, count, index, initialization_timeout=10 * JOIN_SECONDS, heartbeat_timeout_seconds=60
            )
            ended.put(None)
        except Exception as error:
            ended.put(error)

    threading.Thread(target=initialize, name="join_job", daemon=True).start()
    try:
        error = ended.get(timeout=QUIET_SECONDS)
    except queue.Empty:
        log.warning("process %s waits up to %g s for all %s processes at %s", index, JOIN_SECONDS, count, address)
        try:
            error = ended.get(timeout=JOIN_SECONDS - QUIET_SECONDS)
        except queue.Empty:
            missing = f"not all {count} processes joined at" if _answers(address) else "process 0 does not answer at"
            raise TimeoutError(f"{missing} {address} within {JOIN_SECONDS:g} s") from None
    if error is not None:
        raise error


def _answers(address: str | None) -> bool:
    """Whether a process listens at host:port."""
    place = urlsplit(f"//{address}")
    try:
        with socket.create_connection((place.hostname, place.port), 2):
            return True
    except (OSError, ValueError):
        return False


# ---- the whole job


def all_agree(claim: bool) -> bool:
    """Whether the claim is true on every process of the job. Returns once all processes have called it."""
    return bool(_claims(claim).all())


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """A context that waits at its end for every process of the job. If one failed with a user's error, all fail: that
    process raises its own error, the others raise a GroupError that names it.
    """
    failure = None
    try:
        yield
    except (LaneformerError, OSError) as error:
        failure = error
    failed = np.flatnonzero(_claims(failure is not None))
    if failure is not None:
        raise failure
    if failed.size:
        raise GroupError(f"process {', '.join(map(str, failed))} of the job failed: its output gives the reason")


def _claims(claim: bool) -> np.ndarray:
    """The claim of each process, bool [processes]."""
    if jax.process_count() == 1:
        return np.array([claim])
    return np.asarray(multihost_utils.process_allgather(np.bool_(claim)))


# ---- the processes of a mesh


def _store() -> Any:
    """The key-value store of the job. A process has joined the job before it makes a group of several."""
    return global_state.client


class Group:
    """The processes that have devices of a mesh, for a common task. All of them must make the group at the same point
    of their program. A group of one process never waits.

    As a context, the group reports an exception in it to the other processes, so that they fail instead of waiting.
    """

    def __init__(self, mesh: Mesh | None, seconds: float, task: str):
        """mesh: None for this process alone. seconds: time limit for the other processes. task: verb phrase for
        messages, the common task. Raises GroupError if this process has no device of the mesh.
        """
        self.index, self.seconds, self._task = jax.process_index(), seconds, task
        self.processes = (
            [self.index] if mesh is None else sorted({device.process_index for device in mesh.devices.flat})
        )
        if self.index not in self.processes:
            raise GroupError(
                f"process {self.index} has no device of the mesh: give the mesh devices of every process that uses it"
            )
        self._name = f"laneformer/{next(_groups)}" if self.several else None
        self._round, self._failed = 0, False

    @property
    def machine(self) -> str:
        """An identifier that all processes of a machine share, until the machine restarts."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        except OSError:
            return platform.node()

    @property
    def several(self) -> bool:
        """Whether the group has more than one process."""
        return len(self.processes) > 1

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.several:
            self._failed = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job has ended
                self._publish({"error": str(error)})

    def share(self, own: dict[str, Any], seconds: float | None = None) -> dict[int, dict[str, Any]]:
        """Publishes `own` and returns what every process published at this point: process number -> values. seconds:
        time limit, by default the group's.

        Raises GroupError if a process does not publish in time or has failed. All later calls then raise it too.
        """
        if not self.several:
            return {self.index: own}
        if self._failed:
            raise GroupError(f"the processes of this job failed to {self._task} together before: restart the job")
        seconds = self.seconds if seconds is None else seconds
        try:
            self._publish(own)
            until = time.monotonic() + seconds
            shared = {process: self._read(process, until, seconds) for process in self.processes}
        except BaseException:
            self._failed = True
            raise
        finally:
            self._round += 1
        if self._round > 1:  # a process that has published in this round has read the previous one
            _store().key_value_delete(self._key(self._round - 2, self.index))
        return shared

    def barrier(self) -> bool:
        """Waits for all processes, up to END_SECONDS. Returns whether all have arrived."""
        if not self.several:
            return True
        if self._failed:
            return False
        try:
            _store().wait_at_barrier(f"{self._name}/end", round(1000 * min(self.seconds, END_SECONDS)), self.processes)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def _key(self, number: int, process: int) -> str:
        return f"{self._name}/{number}/{process}"

    def _publish(self, value: dict[str, Any]) -> None:
        _store().key_value_set(self._key(self._round, self.index), json.dumps(value))

    def _read(self, process: int, until: float, seconds: float) -> dict[str, Any]:
        while True:
            left = min(POLL_SECONDS, until - time.monotonic())
            try:
                text = _store().blocking_key_value_get(self._key(self._round, process), max(1, round(1000 * left)))
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise GroupError(f"lost contact with process {process} ({error}): restart the job") from None
            if time.monotonic() > until:
                raise GroupError(
                    f"process {process} did not {self._task} within {seconds:g} s: every process of the mesh must do so"
                    " at the same point of its program"
                )
        value: dict[str, Any] = json.loads(text)
        if "error" in value:
            raise GroupError(f"process {process} could not {self._task}: {value['error']}")
        return value
