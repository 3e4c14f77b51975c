"""A decode session whose devices belong to several processes: what these tell each other when it is opened and closed."""

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

PATIENCE = 10.0  # seconds for processes that end a session together
_sessions = itertools.count()


class Group:
    """The processes of a mesh, each of which opens its part of a session at the same point of its program; alone, it has nobody to ask.

    As a context: an exception within it is told to the others, so that they end with it instead of waiting.
    """

    def __init__(self, mesh: Mesh | None, seconds: float):
        """seconds: how long to wait for the others. Raises NativeError if this process has no device of the mesh."""
        self.index, self.seconds = jax.process_index(), seconds
        self.processes = [self.index] if mesh is None else sorted({device.process_index for device in mesh.devices.flat})
        if self.index not in self.processes:
            raise NativeError(f"process {self.index} has no device of the mesh: make it of devices of all processes that decode")
        self._name = f"laneformer/decode/{next(_sessions)}" if self.several else None
        self._round, self._failed = 0, False

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

    def _tell(self, what: dict) -> None:
        global_state.client.key_value_set(f"{self._name}/{self._round}/{self.index}", json.dumps(what))

    def share(self, own: dict) -> dict[int, dict]:
        """What each process has to say at this point, by its number. Raises NativeError if one does not come, or has failed."""
        if not self.several:
            return {self.index: own}
        self._tell(own)
        until = time.monotonic() + self.seconds
        try:
            said = {process: self._said(process, until) for process in self.processes}
        except NativeError:
            self._failed = True
            raise
        finally:
            self._round += 1
        return said

    def _said(self, process: int, until: float) -> dict:
        left = max(1, round(1000 * (until - time.monotonic())))
        try:
            said = json.loads(global_state.client.blocking_key_value_get(f"{self._name}/{self._round}/{process}", left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise NativeError(f"process {process} cannot be asked: {error}") from None
            raise NativeError(
                f"process {process} did not open its part of the decode session within {self.seconds:g} s: "
                "every process of the mesh must make the engine, at the same point of its program"
            ) from None
        if "error" in said:
            raise NativeError(f"process {process} could not open its part of the decode session: {said['error']}")
        return said

    def meet(self) -> bool:
        """Waits a moment for all processes to come here; whether they did."""
        if not self.several:
            return True
        if self._failed:
            return False
        try:
            global_state.client.wait_at_barrier(f"{self._name}/end", round(1000 * min(self.seconds, PATIENCE)), self.processes)
        except jax.errors.JaxRuntimeError:
            return False
        return True


def machine_name() -> str:
    """The same in all processes of a machine that has not been started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()
