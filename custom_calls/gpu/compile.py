"""Compiles the GPU kernel for one model: with nvcc or otherwise NVRTC for NVIDIA, with clang for AMD. Images are cached
on disk.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from laneformer.custom_calls.build import HERE, BuildError, cache

SOURCES = HERE / "gpu" / "kernel"
SHARED = (HERE / "common" / "activation.h", HERE / "gpu" / "bench" / "read.h")
PERSISTENT, STEPS = "decode.cu", "steps.cu"
KERNEL = "kernel.cu"  # the name under which either of them is compiled
# Without fused multiply-adds except those that the source names (fma in kernel/port.h): otherwise a compiler chooses
# which to fuse by the code around them, and the bits of a result depend on that.
NVIDIA_FLAGS = ("-std=c++17", "--diag-suppress=186", "--fmad=false")
HIP_FLAGS = (
    "-x",
    "hip",
    "-nogpuinc",
    "-nogpulib",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-mllvm",
    "-disable-machine-licm",  # values moved out of the loop over passes do not fit in registers
    "-mllvm",
    # Without this, the launch's parameters are copied into each thread's local memory
    "-instcombine-max-copied-from-constant-users=100000",
)


def image(
    header: str,
    architecture: str,
    compile_with: Callable[[Path, Path, str], None] | None = None,
    kernel: str = PERSISTENT,
) -> bytes:
    """The compiled kernel for the model that `header` describes. Raises BuildError with the compiler's message.

    header: the text of custom_calls.gpu.header.model_header. architecture: "sm_90a", "gfx942", ... compile_with: a
    function of (folder of the sources, file to write, architecture), by default the installed compiler. kernel:
    PERSISTENT or STEPS.
    """
    compiled_by = () if compile_with else identity(architecture)
    digest = hashlib.sha256(repr((header, architecture, NVIDIA_FLAGS, HIP_FLAGS, compiled_by)).encode())
    for path in kernel_sources(kernel):
        digest.update(path.name.encode() + path.read_bytes())
    kept = cache() / "kernels" / f"{architecture}-{digest.hexdigest()[:16]}.bin"
    if compile_with is None and kept.is_file():
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for path in kernel_sources(kernel):
            shutil.copy(path, work / (KERNEL if path.name == kernel else path.name))
        (work / "model.h").write_text(header, encoding="utf-8")
        out = work / "image"
        (compile_with or compiler(architecture))(work, out, architecture)
        made = out.read_bytes()
    if compile_with is None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(made)
        unfinished.replace(kept)
    return made


def kernel_sources(kernel: str) -> list[Path]:
    """All files of a kernel except model.h. They are compiled in one folder."""
    return sorted((*SOURCES.rglob("*.h"), *SHARED, SOURCES / kernel))


def compiler(architecture: str) -> Callable[[Path, Path, str], None]:
    """A function that runs the installed compiler for an architecture. Raises BuildError if none is installed."""
    if architecture.startswith("gfx"):
        if (program := clang()) is None:
            raise BuildError(
                "clang for AMD GPUs is not installed: install clang-19 and lld-19, or set HIP_CLANG to its path"
            )
        return functools.partial(_clang, program)
    if (program := nvcc()) is not None:
        return functools.partial(_nvcc, program)
    if (library := nvrtc()) is not None:
        return functools.partial(_nvrtc, load_nvrtc(library))  # reports missing parts before anything is compiled
    raise BuildError("neither nvcc nor NVRTC is installed: pip install nvidia-cuda-nvrtc, or install the CUDA toolkit")


def identity(architecture: str) -> tuple:
    """Path, size and time of the installed compiler; () if none is installed. A change compiles the kernel again."""
    found = clang() if architecture.startswith("gfx") else nvcc() or nvrtc()
    if found is None:
        return ()
    file = Path(found).resolve()
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


def nvcc() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which("/usr/local/cuda/bin/nvcc")


def clang() -> str | None:
    named = os.environ.get("HIP_CLANG")
    return next(
        (
            found
            for name in ([named] if named else ["clang++-19", "/opt/rocm/llvm/bin/clang++"])
            if (found := shutil.which(name))
        ),
        None,
    )


def nvrtc() -> Path | None:
    """Path of NVRTC's library in the wheel that JAX installs, or in a CUDA toolkit: the newest that the driver can run
    code of. None if there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    folders.append(Path("/usr/local/cuda"))
    found = [path for folder in folders for path in folder.glob("**/libnvrtc.so.*")]
    newest = driver_version()
    usable = [path for path in found if newest is None or _major(path) <= newest]
    return max(usable, key=_major, default=None)


def _major(library: Path) -> int:
    """The CUDA version of libnvrtc.so.VERSION."""
    return int(library.name.removeprefix("libnvrtc.so.").split(".")[0])


def driver_version() -> int | None:
    """The newest major version of CUDA whose code the installed driver runs; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000 if status == 0 else None


@functools.cache
def load_nvrtc(library: Path) -> ctypes.CDLL:
    """Loads NVRTC and, before it looks for it, the library of its built-in functions. Wheels have both in a folder that
    the dynamic linker does not search. Raises BuildError if either cannot be loaded.
    """
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"NVRTC cannot be loaded: {error}") from None
    major, minor = ctypes.c_int(), ctypes.c_int()
    loaded.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    builtins = library.resolve().with_name(f"libnvrtc-builtins.so.{major.value}.{minor.value}")
    try:
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    except OSError as error:
        package = "nvidia-cuda-nvrtc" + ("-cu12" if major.value == 12 else "")
        raise BuildError(
            f"NVRTC {major.value}.{minor.value} cannot load its built-in functions: {error}; reinstall the CUDA"
            f" toolkit, or: pip install --force-reinstall --no-deps {package}"
        ) from None
    return loaded


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"compiling the kernel failed: {' '.join(command)}\n{done.stderr.strip()}")
    return done.stderr


def _nvcc(program: str, folder: Path, out: Path, architecture: str) -> None:
    number = architecture.removeprefix("sm_")
    _run(
        [
            program,
            "-cubin",
            "-O3",
            *NVIDIA_FLAGS,
            f"-gencode=arch=compute_{number},code=sm_{number}",
            str(folder / KERNEL),
            "-o",
            str(out),
        ]
    )


def _clang(program: str, folder: Path, out: Path, architecture: str) -> None:
    _run([program, *HIP_FLAGS, f"--offload-arch={architecture}", "-c", str(folder / KERNEL), "-o", str(out)])


def _nvrtc(lib: ctypes.CDLL, folder: Path, out: Path, architecture: str) -> None:
    program = ctypes.c_void_p()

    def check(status: int) -> None:
        if status == 0:
            return
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(1, size.value))
        lib.nvrtcGetProgramLog(program, text)
        raise BuildError(f"compiling the kernel failed ({status}):\n{text.value.decode(errors='replace')}")

    check(lib.nvrtcCreateProgram(ctypes.byref(program), (folder / KERNEL).read_bytes(), KERNEL.encode(), 0, None, None))
    options = [
        flag.encode()
        for flag in (*NVIDIA_FLAGS, "-default-device", f"--gpu-architecture={architecture}", f"-I{folder}")
    ]
    try:
        check(lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
        size = ctypes.c_size_t()
        check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        check(lib.nvrtcGetCUBIN(program, data))
        out.write_bytes(data.raw)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
