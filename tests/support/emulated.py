"""Sessions of small models on GPUs that this CPU emulates (emulator/), their kernel compiled for the host.

With LANEFORMER_TEST_GPU=cuda (or hip) in the environment they are on the machine's own GPU instead.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import threading
import types
from collections.abc import Iterable
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


FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra", f"-I{gpu_build.SOURCES}", f"-I{EMULATOR}")
# Compiling takes longer than most calls of a kernel.
KERNEL_FLAGS = (
    "-std=c++17",
    "-Og",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-unused-variable",
    f"-I{EMULATOR}",
    f'-DLF_EMULATED="{EMULATOR / "port_host.h"}"',
)


def _compiled(name: str, suffix: str, sources: Iterable[Path], *options: str, work: Path = EMULATOR) -> Path:
    """A file that the compiler makes in `work` with these options, once for every state of them and of the sources."""
    digest = hashlib.sha256(repr(options).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    folder = build.cache() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{digest.hexdigest()[:16]}{suffix}"
    if not target.exists():
        unfinished = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        command = [*build.compiler(), *options, "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
        assert done.returncode == 0, done.stderr
        unfinished.replace(target)
    return target


@cache
def driver() -> Path:
    """A driver of emulated devices, in place of libcuda.so.1."""
    source, params = EMULATOR / "driver.cc", gpu_build.SOURCES / "params.h"
    return _compiled("driver", ".so", (source, params), *FLAGS, "-O1", "-shared", str(source), "-ldl", "-pthread")


@cache
def emulator() -> Path:
    """An object file of what runs a kernel's threads."""
    sources = (EMULATOR / "emulator.cc", EMULATOR / "emulator.h", gpu_build.SOURCES / "params.h")
    return _compiled("emulator", ".o", sources, *FLAGS, "-O1", "-c", str(sources[0]))


def compile_with(machine: Machine):
    """For custom_calls.gpu.compile.image: the image is the path of a library."""

    def compile_kernel(folder: Path, out: Path, architecture: str) -> None:
        sources = (*sorted(folder.iterdir()), *(EMULATOR / name for name in ("kernel.cc", "emulator.h", "port_host.h")))
        options = [*KERNEL_FLAGS, f"-DLF_WARP_SIZE={machine.warp_size}", f"-DLF_BULK={int(machine.bulk_copies)}"]
        code = ["-I.", str(EMULATOR / "kernel.cc"), str(emulator())]
        library = _compiled("kernel", ".so", sources, *options, *code, work=folder)
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
