"""Jobs of several processes, for tests: real processes, and processes simulated in this one."""

import os
import socket
import subprocess
import sys
import threading
import types

import jax
import numpy as np

from laneformer import processes
from tests.support.paths import ROOT


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def environments(count: int) -> list[dict[str, str]]:
    """Environments of the processes of a new job on CPUs. Each process has one device unless it requests more."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    everyone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    everyone |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    return [everyone | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def start(environment: dict[str, str], *command) -> subprocess.Popen:
    """Starts a Python process. Its stdout also receives what it writes to stderr."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


class Store:
    """The key-value store of a job, in place of JAX's client, for processes simulated in this one."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        with self.changed:
            del self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


MESH = types.SimpleNamespace(
    devices=np.array([[types.SimpleNamespace(process_index=index) for index in range(2)]])
)  # one device of each of two processes


def in_each(monkeypatch, make) -> list:
    """Calls make() as each of two processes of a job, at the same point of their programs. Returns both results."""
    if not isinstance(processes.global_state.client, Store):
        monkeypatch.setattr(processes.global_state, "client", Store())
    made = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(processes, "_groups", iter([0]))
        made.append(make())
    return made
