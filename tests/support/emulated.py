"""Sessions of small models on GPUs that the CPU emulates (emulator/), with their kernels compiled for the host.

Environment variables:

EMULATOR_CODE: what the emulated devices run. "port", the default, is the kernel's source, with the part of port.h that
is special to CUDA replaced (port_host.h). "ptx" is the PTX that nvcc makes of it, translated to C++ (emulator/ptx).
LANEFORMER_TEST_GPU: "cuda" or "hip" runs the sessions on the machine's own GPU instead.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import threading
import types
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import pytest

from laneformer import ModelConfig, Precision
from laneformer.custom_calls import build
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.session import GpuSession
from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.custom_calls.plan import Plan
from laneformer.infer.engine.gpu import CudaBackend
from laneformer.infer.engine.native import plan_of
from laneformer.processes import Group
from tests.support.emulator import ptx

EMULATOR = Path(__file__).resolve().parent / "emulator"
SMALL = Machine(warp_size=32, ctas=8, warps=2, shared_bytes=232_448, bulk_copies=True)
NO_EDGES = {"Spares": 0, "LanesHere": 1, "Ctas": 1, "ClaimsAt": 0, "PassTags": 64}  # constants of edges.h
REAL = os.environ.get("LANEFORMER_TEST_GPU")
needs_gpu = pytest.mark.skipif(
    not REAL and (platform.machine() != "x86_64" or build.compiler() is None),
    reason="emulated GPUs need a C++ compiler on x86-64",
)
only_emulated = pytest.mark.skipif(REAL is not None, reason="needs emulated GPUs")
needs_nvcc = pytest.mark.skipif(gpu_build.nvcc() is None, reason="nvcc is not installed")

FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra", f"-I{gpu_build.SOURCES}", f"-I{EMULATOR}")
# -Og: compiling takes longer than most calls of a kernel.
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


PTX_FLAGS = (
    "-std=c++17",
    "-Og",
    "-fPIC",
    "-shared",
    "-mfma",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
    f"-I{EMULATOR}",
    f"-I{EMULATOR / 'ptx'}",
    f'-DLF_EMULATED="{EMULATOR / "port_host.h"}"',
)


def code() -> str:
    """What emulated devices run: "port" or "ptx"."""
    return os.environ.get("EMULATOR_CODE", "port")


def _kept(name: str, suffix: str, sources: Iterable[Path], options: tuple, make: Callable[[Path], None]) -> Path:
    """Path of the file that `make` writes. It is made again only if the sources or the options have changed."""
    digest = hashlib.sha256(repr(options).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    folder = build.cache() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{digest.hexdigest()[:16]}{suffix}"
    if not target.exists():
        unfinished = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        make(unfinished)
        unfinished.replace(target)
    return target


def _compiled(name: str, suffix: str, sources: Iterable[Path], *options: str, work: Path = EMULATOR) -> Path:
    """Path of the file that the compiler makes of the sources with these options. work: the folder in which it runs."""
    return _kept(name, suffix, sources, options, partial(compile_cc, *options, work=work))


def compile_cc(*arguments: str | Path, work: Path) -> None:
    """Runs the compiler in a folder. The last argument is the file to write."""
    *options, target = map(str, arguments)
    _run([*build.compiler(), *options, "-o", target], work)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr


@cache
def driver() -> Path:
    """Path of the library that drives emulated devices, in place of libcuda.so.1."""
    source, params = EMULATOR / "driver.cc", gpu_build.SOURCES / "params.h"
    return _compiled("driver", ".so", (source, params), *FLAGS, "-O1", "-shared", str(source), "-ldl", "-pthread")


@cache
def emulator() -> Path:
    """Path of the object file of emulator.cc, which runs a kernel's threads."""
    sources = (EMULATOR / "emulator.cc", EMULATOR / "emulator.h", gpu_build.SOURCES / "params.h")
    return _compiled("emulator", ".o", sources, *FLAGS, "-O2", "-c", str(sources[0]))


def compile_with(machine: Machine):
    """The compiler that custom_calls.gpu.compile.image calls for emulated devices. The image that it writes is the path
    of a library.
    """

    def compile_kernel(folder: Path, out: Path, architecture: str) -> None:
        library = {"port": _port_library, "ptx": _ptx_library}[code()](folder, machine)
        out.write_bytes(str(library).encode() + b"\0")

    return compile_kernel


def _port_library(folder: Path, machine: Machine) -> Path:
    sources = (*sorted(folder.iterdir()), *(EMULATOR / name for name in ("kernel.cc", "emulator.h", "port_host.h")))
    options = [*KERNEL_FLAGS, f"-DLF_WARP_SIZE={machine.warp_size}", f"-DLF_BULK={int(machine.bulk_copies)}"]
    code = ["-I.", str(EMULATOR / "kernel.cc"), str(emulator())]
    return _compiled("kernel", ".so", sources, *options, *code, work=folder)


def _ptx_library(folder: Path, machine: Machine) -> Path:
    if machine.warp_size != 32:
        pytest.skip("PTX has warps of 32 threads")
    if gpu_build.nvcc() is None:
        pytest.skip("nvcc is not installed")
    translator = sorted(path for path in (EMULATOR / "ptx").iterdir() if path.is_file())
    sources = (*sorted(folder.iterdir()), *translator, EMULATOR / "emulator.h", EMULATOR / "port_host.h")

    def make(target: Path) -> None:
        compile_translated(ptx_of(folder), folder, target)

    return _kept("ptx", ".so", sources, (PTX_FLAGS, gpu_build.NVIDIA_FLAGS, str(emulator())), make)


def ptx_of(folder: Path) -> str:
    """The PTX that nvcc makes of the kernel in a folder."""
    source, made = folder / gpu_build.KERNEL, folder / "kernel.ptx"
    target = "-gencode=arch=compute_90a,code=compute_90a"
    _run([gpu_build.nvcc(), "-ptx", "-O3", *gpu_build.NVIDIA_FLAGS, target, str(source), "-o", str(made)], folder)
    return made.read_text()


def compile_translated(text: str, folder: Path, target: Path) -> None:
    """Writes a library that runs PTX on the emulator. text: the PTX of the kernel in the folder."""
    kernel = "laneformer_step_" if ".entry laneformer_step(" in text else "laneformer_decode_"
    (folder / "translated.h").write_text(f"{ptx.translate(text)}\nconstexpr auto translated_kernel = {kernel};\n")
    compile_cc(*PTX_FLAGS, "-I.", EMULATOR / "ptx" / "kernel.cc", emulator(), target, work=folder)


def make_session(
    config: ModelConfig, weights, *, compute: str = "float32", machine: Machine = SMALL, mesh=None, **options
):
    """A session of `config` on emulated GPUs with all weights packed. options: those of GpuSession."""
    stored = weights["tok_embeddings"].dtype.name
    source = types.SimpleNamespace(
        config=config, precision=Precision(param=stored, compute=compute), stored_dtype=stored
    )
    return open_session(plan_of(source), weights, machine=machine, mesh=mesh, **options)


def open_session(plan: Plan, weights, *, machine: Machine = SMALL, mesh=None, **options) -> GpuSession:
    """A session of any plan on emulated GPUs with all weights packed. options: those of GpuSession."""
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
    """Makes backend cuda available to engines, although JAX does not know emulated devices."""
    if not REAL:
        patch.setattr(CudaBackend, "unavailable", classmethod(lambda cls, source: None))


def engine_options() -> dict:
    """Options of an engine with backend cuda, by which it runs on emulated devices unless the tests use a real GPU."""
    return {} if REAL else {"machine": SMALL, "compile_with": compile_with(SMALL), "driver": driver()}


def allocations() -> int:
    """Number of allocations of the emulated driver that have not been released."""
    return _count("emulated_allocations")


def launches() -> int:
    """Number of emulated kernels launched so far."""
    return _count("emulated_launches")


def delayed() -> int:
    """Number of calls so far for which a real driver may have waited for kernels that were running."""
    return _count("emulated_delayed")


def _count(name: str) -> int:
    function = getattr(ctypes.CDLL(str(driver())), name)
    function.restype = ctypes.c_int64
    return function()
