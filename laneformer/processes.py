"""The processes of a job: joining it, agreeing, failing together.

`join_job` connects them through `jax.distributed`. `all_agree` and `fail_together` are for the whole job and use its
devices; a `Group` is for the processes of a mesh and uses the key-value store of the job, on the host alone.
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
from urllib.parse import urlsplit

import jax
import numpy as np
from jax._src.clusters import ClusterEnv  # the launchers that JAX recognises have no public name
from jax._src.distributed import global_state  # neither has the key-value store of the job
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from laneformer.errors import ConfigError, LaneformerError

JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JOIN_SECONDS = 300  # for all processes to join
QUIET_SECONDS = 5  # before a process that waits to join reports it
END_SECONDS = 10  # for processes that end something together
POLL_SECONDS = 2  # in one call of the key-value store, which does not notice Ctrl-C
log = logging.getLogger("laneformer")
_groups = itertools.count()


class GroupError(LaneformerError, RuntimeError):
    """The processes of a job could not do something together; the message names the process, or the reason."""


# ---- joining


def join_job() -> None:
    """Connects this process with the others of its job through `jax.distributed`, unless it is connected. Call it
    before the first JAX operation.

    JAX recognises SLURM, Open MPI and Kubernetes; anywhere else JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID name the job. Raises ConfigError when the others cannot be found, or do not
    join in time.
    """
    if jax.distributed.is_initialized():
        return
    named = [os.environ.get(name) for name in JOB]
    try:
        count, index = (number and int(number) for number in named[1:])
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
        # Process 0 alone would find its programs in the cache, and gloo does not match a program that was loaded with
        # one that was compiled: the job aborts.
        jax.config.update("jax_enable_compilation_cache", False)


def job_index() -> int:
    """The number that `join_job` will give this process; 0 if nothing names a job. Starts nothing."""
    if named := os.environ.get(JOB[2]):
        return int(named) if named.isdecimal() else 0  # join_job refuses it
    launcher = next(
        (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method and kind.is_env_present()), None
    )
    return launcher.get_process_id() if launcher else 0


def _initialize(address: str | None, count: int | None, index: int | None) -> None:
    """`jax.distributed.initialize` with a line while it waits, and a TimeoutError; raises what it raises.

    A thread calls it: it does not notice Ctrl-C, and XLA ends the process when its own timeout expires.
    """
    ended: queue.Queue[Exception | None] = queue.Queue()

    def initialize():
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


def _answers(address: str) -> bool:
    """Whether a process listens at host:port."""
    place = urlsplit(f"//{address}")
    try:
        with socket.create_connection((place.hostname, place.port), 2):
            return True
    except (OSError, ValueError):
        return False


# ---- the whole job


def all_agree(claim: bool) -> bool:
    """Whether the claim holds on every process of the job; returns once all have called it."""
    return bool(_claims(claim).all())


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Waits at its end for every process of the job; if one of them failed with a user's error, all of them fail.

    That process raises its own error, the others a GroupError that names it.
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


class Group:
    """The processes that have devices of a mesh, for something that they do together. All of them make the group at the
    same point of their program. A group of one process waits for nothing.

    As a context it reports an exception within it to the other processes, so that they fail instead of waiting.
    """

    def __init__(self, mesh: Mesh | None, seconds: float, task: str):
        """mesh: None for this process alone. seconds: how long to wait for the others. task: what they do together, a
        verb phrase for messages. Raises GroupError if this process has no device of the mesh.
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
        """An identifier that is the same in all processes of a machine, until it restarts."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        except OSError:
            return platform.node()

    @property
    def several(self) -> bool:
        """Whether the group has other processes than this one."""
        return len(self.processes) > 1

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None and self.several:
            self._failed = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job has ended
                self._publish({"error": str(error)})

    def share(self, own: dict, seconds: float | None = None) -> dict[int, dict]:
        """Publishes `own` and returns what every process published at this point, by its number. seconds: instead of
        the group's.

        Raises GroupError if a process does not arrive, or has failed; from then on every call does.
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
        if self._round > 1:  # a process that has published in this round has read the one before
            global_state.client.key_value_delete(self._key(self._round - 2, self.index))
        return shared

    def barrier(self) -> bool:
        """Waits for all processes, up to END_SECONDS; whether all have arrived."""
        if not self.several:
            return True
        if self._failed:
            return False
        try:
            global_state.client.wait_at_barrier(
                f"{self._name}/end", round(1000 * min(self.seconds, END_SECONDS)), self.processes
            )
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def _key(self, number: int, process: int) -> str:
        return f"{self._name}/{number}/{process}"

    def _publish(self, value: dict) -> None:
        global_state.client.key_value_set(self._key(self._round, self.index), json.dumps(value))

    def _read(self, process: int, until: float, seconds: float) -> dict:
        while True:
            left = min(POLL_SECONDS, until - time.monotonic())
            try:
                text = global_state.client.blocking_key_value_get(
                    self._key(self._round, process), max(1, round(1000 * left))
                )
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise GroupError(f"lost contact with process {process} ({error}): restart the job") from None
            if time.monotonic() > until:
                raise GroupError(
                    f"process {process} did not {self._task} within {seconds:g} s: every process of the mesh must do so"
                    " at the same point of its program"
                )
        if "error" in (value := json.loads(text)):
            raise GroupError(f"process {process} could not {self._task}: {value['error']}")
        return value
