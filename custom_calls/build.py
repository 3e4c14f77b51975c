"""Compiles the native library once for each version of its sources: python -m custom_calls.

`pip install` compiles it if there is a compiler. Otherwise, and after each change of the sources or of JAX's FFI
headers, the first use compiles it. The library's name contains a hash of everything that it is built from, so a stale
library is never loaded.

Nothing here imports JAX, because an installation runs this file alone.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).absolute().parent  # laneformer/custom_calls, of which a clone has a link
CPU = tuple(HERE / "cpu" / part for part in (".", "kernels", "kernels/attention", "ops", "packing"))
SOURCES = (HERE / "common", *CPU, HERE / "gpu" / "host")
SHARED = HERE / "gpu" / "kernel" / "params.h"  # also included by the GPU kernel, which gpu/compile.py compiles
GENERATED = "plan_ops.h"  # made from laneformer/ops.py; key() contains its text
INSTALLED = HERE / "lib"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fPIC",
    "-fno-plt",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-implicit-fallthrough",
    "-Wno-ignored-attributes",
)
# Instruction sets of the arithmetic, each compiled separately. The library uses the last one that the machine supports,
# and AMX only if it is named.
INSTRUCTIONS = {
    "x86_64": {
        "amx": ("-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"),
        "portable": (),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
        "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    }
}
# Sources that are compiled once per instruction set: their extra flags, and the sets. Other sets use these functions.
PER_SET = {
    "kernels.cc": ((), ("portable", "avx2", "avx512", "avx512_bf16")),
    "quantized.cc": (("-ffp-contract=off",), ("portable", "avx2", "avx512", "avx512_vnni")),  # all sets give equal bits
    "amx.cc": ((), ("amx",)),
}
SANITIZERS = ("address", "thread", "undefined")


class BuildError(Exception):
    """The library cannot be compiled. The message gives the reason and the remedy."""


def compiler() -> list[str] | None:
    """The C++ compiler as the first words of a command: $CXX if set, else g++ or clang++. None if it is not found."""
    named = shlex.split(os.environ.get("CXX", ""))
    return next(
        (command for command in ([named] if named else [["g++"], ["clang++"]]) if shutil.which(command[0])), None
    )


def headers() -> Path:
    """The folder of JAX's FFI headers. Raises BuildError without jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("the native library needs the headers of jaxlib, which is not installed: install jax")
    return Path(spec.submodule_search_locations[0]) / "include"


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """The compiler flags of each instruction set of this processor architecture, by name."""
    return INSTRUCTIONS.get(platform.machine(), {"portable": ()})


def key() -> str:
    """Hash of the sources, the flags and the FFI version of the installed jaxlib: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (*sorted(path for folder in SOURCES for path in folder.glob("*.[ch]*")), SHARED):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(ops_header().encode())
    version = (headers() / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    lines = [
        line
        for line in version.splitlines()
        if line.startswith(("#define XLA_FFI_API_MAJOR", "#define XLA_FFI_API_MINOR"))
    ]
    digest.update(repr((FLAGS, instruction_sets(), PER_SET, lines, sys.platform)).encode())
    return digest.hexdigest()[:16]


@functools.cache
def ops_header() -> str:
    """The text of GENERATED: the C++ structs of the ops (custom_calls/ops_header.py)."""
    spec = importlib.util.spec_from_file_location("ops_header", HERE / "ops_header.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ops_header()


def cache() -> Path:
    """Folder of the libraries that are compiled on first use."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"


def find() -> Path | None:
    """Path of the library for the current sources; None if it was not built."""
    name = f"cpu-{key()}.so"
    return next((folder / name for folder in (INSTALLED, cache()) if (folder / name).is_file()), None)


def build(folder: Path | None = None, sanitizer: str | None = None) -> Path:
    """Compiles the library into `folder` (by default the cache) and returns its path. If several processes build the
    same library, the first compiles it and the others wait. Raises BuildError with the compiler's output.
    """
    cxx = compiler()
    if cxx is None:
        wanted = os.environ.get("CXX") or "g++ or clang++"
        raise BuildError(
            f"no C++ compiler was found ({wanted}): install g++ (Debian: apt install g++), or set CXX to a compiler"
        )
    folder = Path(folder or cache())
    out = folder / f"cpu-{key()}{f'-{sanitizer}' if sanitizer else ''}.so"
    known = out.exists()
    with _alone(out), tempfile.TemporaryDirectory() as work:
        if out.exists() and not known:
            return out
        objects = compile_objects(cxx, Path(work), sanitizer)
        made = Path(work) / out.name
        _run([*cxx, "-shared", *_sanitizer_flags(sanitizer), "-o", str(made), *objects, "-pthread", "-ldl"])
        _put(made, folder)
    return out


def _put(library: Path, folder: Path) -> None:
    """Copies a library into `folder` atomically, because other processes may be loading it."""
    unfinished = folder / f"{library.name}.{os.getpid()}"
    shutil.copy(library, unfinished)
    unfinished.replace(folder / library.name)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Holds the lock of the file `out`, after other processes that build the same file have finished."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f"{out.name}.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # the folder is not empty
                out.parent.rmdir()


def try_build(folder: Path) -> str | None:
    """Puts the library into `folder` during an installation, which continues without it on failure. Returns the reason
    of a failure (a missing or broken compiler) in one line, otherwise None.

    A library that was built from these sources before is reused, unless CXX is set. Libraries of other sources are
    removed.
    """
    try:
        made = None if os.environ.get("CXX") else find()
        for older in folder.glob("cpu-*.so"):
            if older != made:
                older.unlink()
        if made is None:
            build(folder)
        elif made.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            _put(made, folder)
    except (BuildError, OSError) as error:
        return " ".join(str(error).split())[-500:]
    return None


def compile_objects(
    cxx: list[str],
    work: Path,
    sanitizer: str | None = None,
    api: bool = True,
    sets: dict[str, tuple[str, ...]] | None = None,
) -> list[str]:
    """Writes GENERATED into `work`, compiles all sources there, and returns the paths of the object files. api: also
    compile the interface to XLA, which needs XLA's headers. sets: instruction sets to use instead of this machine's.
    """
    (work / GENERATED).write_text(ops_header(), encoding="utf-8")
    jobs = []
    include = ["-isystem", str(headers())] if api else []
    for path in sorted(path for folder in SOURCES for path in folder.glob("*.cc")):
        if path.name in PER_SET:
            extra, only = PER_SET[path.name]
            named = [(name, flags) for name, flags in (sets or instruction_sets()).items() if name in only]
            jobs += [(path, f"{path.stem}_{name}.o", [*flags, *extra, f"-DLF_ISA={name}"]) for name, flags in named]
        elif api or path.name != "api.cc":
            jobs.append((path, f"{path.parent.name}_{path.stem}.o", include))

    def compile_one(job):
        path, name, extra = job
        target = str(work / name)
        _run([*cxx, *FLAGS, f"-I{work}", *_sanitizer_flags(sanitizer), *extra, "-c", str(path), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, jobs))


def _sanitizer_flags(sanitizer: str | None) -> list[str]:
    return [f"-fsanitize={sanitizer}", "-g1", "-O1", "-fno-omit-frame-pointer"] if sanitizer else []


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"compiling failed: {' '.join(command)}\n{done.stderr.strip()}")
