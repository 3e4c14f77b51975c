"""Sessions of small models on GPUs that this CPU emulates (emulator/), their kernel compiled for the host.

With LANEFORMER_TEST_GPU=cuda (or hip) in the environment they are on the machine's own GPU instead.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import types
from functools import cache
from pathlib import Path

import pytest

from custom_calls import build
from custom_calls.gpu import compile as gpu_build
from custom_calls.gpu.session import GpuSession
from custom_calls.gpu.tiling import Machine
from custom_calls.plan import Plan
from infer.engine.gpu import CudaBackend
from infer.engine.native import plan_of
from laneformer import ModelConfig, Precision
from laneformer.processes import Group

EMULATOR = Path(__file__).resolve().parent / "emulator"
SMALL = Machine(warp_size=32, ctas=8, warps=2, shared_bytes=232_448, bulk_copies=True)
REAL = os.environ.get("LANEFORMER_TEST_GPU")
needs_gpu = pytest.mark.skipif(
    not REAL and (platform.machine() != "x86_64" or build.compiler() is None),
    reason="emulated GPUs need a C++ compiler on x86-64",
)
only_emulated = pytest.mark.skipif(REAL is not None, reason="of the emulated GPUs")


def _compiled(target: Path, command: list[str]) -> Path:
    if not target.exists():
        unfinished = target.with_suffix(f".{id(command)}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        unfinished.replace(target)
    return target


def _folder() -> Path:
    folder = build.cache() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def driver() -> Path:
    """A driver of emulated devices, in place of libcuda.so.1."""
    source = EMULATOR / "driver.cc"
    params = gpu_build.SOURCES / "params.h"
    name = hashlib.sha256(source.read_bytes() + params.read_bytes()).hexdigest()[:16]
    command = [
        *build.compiler(),
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        f"-I{params.parent}",
        str(source),
        "-ldl",
        "-pthread",
    ]
    return _compiled(_folder() / f"driver-{name}.so", command)


def compile_with(machine: Machine):
    """For custom_calls.gpu.compile.image: the image is the path of a library."""

    def compile_kernel(folder: Path, out: Path, architecture: str) -> None:
        digest = hashlib.sha256(repr(machine).encode())
        for path in (*sorted(folder.iterdir()), *sorted(EMULATOR.iterdir())):
            digest.update(path.name.encode() + path.read_bytes())
        command = [
            *build.compiler(),
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            "-Wno-unused-function",
            "-Wno-maybe-uninitialized",
            "-Wno-uninitialized",
            "-Wno-unused-variable",
            f'-DLF_EMULATED="{EMULATOR / "port_host.h"}"',
            f"-DLF_WARP_SIZE={machine.warp_size}",
            f"-DLF_BULK={int(machine.bulk_copies)}",
            f"-I{folder}",
            "-x",
            "c++",
            str(EMULATOR / "emulator.cc"),
        ]
        library = _compiled(_folder() / f"kernel-{digest.hexdigest()[:16]}.so", command)
        out.write_bytes(str(library).encode() + b"\0")

    return compile_kernel


def make_session(
    config: ModelConfig, weights, *, compute: str = "float32", machine: Machine = SMALL, mesh=None, **options
):
    """As small.make_session, on emulated GPUs."""
    stored = weights["tok_embeddings"].dtype.name
    source = types.SimpleNamespace(
        config=config, precision=Precision(param=stored, compute=compute), stored_dtype=stored
    )
    return open_session(plan_of(source), weights, machine=machine, mesh=mesh, **options)


def open_session(plan: Plan, weights, *, machine: Machine = SMALL, mesh=None, **options) -> GpuSession:
    """Of any plan, with all weights packed."""
    if REAL:
        options["platform"] = REAL
    else:
        options |= {"machine": machine, "compile_with": compile_with(machine), "driver": driver()}
    session = GpuSession(plan, group=Group(mesh, 300, "open its part of the decode session"), mesh=mesh, **options)
    for path, weight in weights.items():
        for part, own in plan.parts(path, weight).items():
            session.pack(part, own)
    return session


def make_available(patch: pytest.MonkeyPatch) -> None:
    """Lets engines use backend cuda: emulated devices are unknown to JAX."""
    if not REAL:
        patch.setattr(CudaBackend, "unavailable", classmethod(lambda cls, source: None))


def engine_options() -> dict:
    """Of an engine on backend cuda."""
    return {} if REAL else {"machine": SMALL, "compile_with": compile_with(SMALL), "driver": driver()}


def allocations() -> int:
    """Of emulated memory, that have not been released."""
    return _count("emulated_allocations")


def launches() -> int:
    """Of emulated kernels, so far."""
    return _count("emulated_launches")


def _count(name: str) -> int:
    function = getattr(ctypes.CDLL(str(driver())), name)
    function.restype = ctypes.c_int64
    return function()
