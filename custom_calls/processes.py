"""What the processes of a job tell each other on the host, through the key-value store of `jax.distributed`."""

import contextlib
import itertools
import json
import platform
import time
from pathlib import Path

import jax
from jax._src.distributed import global_state  # the key-value store of the job has no public name
from jax.sharding import Mesh

from custom_calls.library import NativeError

PATIENCE = 10.0  # seconds for processes that end something together
ATTENTION = 2.0  # seconds in the store at a time: it does not hear of Ctrl-C
_groups = itertools.count()


class GroupError(NativeError):
    """The processes of a job cannot do together what they should; the message says which one is missing, or why."""


class Group:
    """The processes of a mesh, which do something together: all make the group at the same point of their program.
    Alone, a process has nobody to ask.

    As a context: an exception within it is told to the others, so that they end with it instead of waiting.
    """

    def __init__(self, mesh: Mesh | None, seconds: float, task: str):
        """seconds: how long to wait for the others. task: what they do, for messages. Raises NativeError if this
        process has no device of the mesh.
        """
        self.index, self.seconds, self._task = jax.process_index(), seconds, task
        self.processes = (
            [self.index] if mesh is None else sorted({device.process_index for device in mesh.devices.flat})
        )
        if self.index not in self.processes:
            raise NativeError(
                f"process {self.index} has no device of the mesh: make it of devices of all processes that decode"
            )
        self._name = f"laneformer/{next(_groups)}" if self.several else None
        self._round, self._failed = 0, False

    @property
    def machine(self) -> str:
        """The same in all processes of a machine that has not been started again."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        except OSError:
            return platform.node()

    @property
    def several(self) -> bool:
        return len(self.processes) > 1

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None and self.several:
            self._failed = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job has ended
                self._tell({"error": str(error)})

    def _key(self, number: int, process: int) -> str:
        return f"{self._name}/{number}/{process}"

    def _tell(self, what: dict) -> None:
        global_state.client.key_value_set(self._key(self._round, self.index), json.dumps(what))

    def share(self, own: dict, seconds: float | None = None) -> dict[int, dict]:
        """What each process has to say at this point, by its number. seconds: other than the group's.

        Raises GroupError if one does not come or has failed, and for ever after.
        """
        if not self.several:
            return {self.index: own}
        if self._failed:
            raise GroupError(
                f"the processes of this job have lost each other: they could not {self._task} together; start them"
                " again"
            )
        try:
            self._tell(own)
            until = time.monotonic() + (self.seconds if seconds is None else seconds)
            said = {process: self._said(process, until) for process in self.processes}
        except BaseException:
            self._failed = True
            raise
        finally:
            self._round += 1
        if self._round > 1:  # whoever has come here has read what was said before
            global_state.client.key_value_delete(self._key(self._round - 2, self.index))
        return said

    def _said(self, process: int, until: float) -> dict:
        while True:
            left = min(ATTENTION, until - time.monotonic())
            try:
                said = global_state.client.blocking_key_value_get(
                    self._key(self._round, process), max(1, round(1000 * left))
                )
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise GroupError(f"process {process} cannot be asked: {error}") from None
            if time.monotonic() > until:
                raise GroupError(
                    f"process {process} did not {self._task} within {self.seconds:g} s: "
                    "every process of the mesh must do so, at the same point of its program"
                )
        if "error" in (said := json.loads(said)):
            raise GroupError(f"process {process} could not {self._task}: {said['error']}")
        return said

    def meet(self) -> bool:
        """Waits a moment for all processes to come here; whether they did."""
        if not self.several:
            return True
        if self._failed:
            return False
        try:
            global_state.client.wait_at_barrier(
                f"{self._name}/end", round(1000 * min(self.seconds, PATIENCE)), self.processes
            )
        except jax.errors.JaxRuntimeError:
            return False
        return True
