"""Loads the native library and registers its handlers with XLA."""

import ctypes
import logging
import re
import time
from functools import cache

import jax
import numpy as np

from laneformer.custom_calls import build

log = logging.getLogger("laneformer")

TARGET = "laneformer_decode"  # the same name on every platform, so that one traced program lowers to each
EMULATED = "laneformer_decode_emulated"  # GPUs emulated on the CPU, for tests
HANDLERS = (
    (TARGET, "cpu", "laneformer_decode_cpu"),
    (TARGET, "CUDA", "laneformer_decode_gpu"),
    (TARGET, "ROCM", "laneformer_decode_gpu"),
    (EMULATED, "cpu", "laneformer_decode_emulated"),
)


class NativeError(RuntimeError):
    """The native library cannot be used, or it rejected a call. The message gives the reason."""


# One op of a worker or a CTA in a trace: `Span` of cpu/state.h and of gpu/kernel/params.h.
SPAN = np.dtype([("op", np.int32), ("layer", np.int32), ("begin_ns", np.int64), ("end_ns", np.int64)])

_ID, _INT, _LONG, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_ERROR = (ctypes.c_char_p, ctypes.c_int64)
_FUNCTIONS = {
    "ffi_version": (_INT,),
    "open": (_ID, _POINTER, _LONG, _POINTER, _LONG, *[_INT] * 6, ctypes.c_double, ctypes.c_char_p, *_ERROR),
    "close": (None, _ID),
    "pack": (_ID, _ID, _INT, _POINTER, _LONG, _INT, *_ERROR),
    "map": (_ID, _ID, _INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, *_ERROR),
    "map_quantized": (_ID, _ID, _INT, _POINTER, _LONG, *_ERROR),
    "begin": (_LONG, _ID, _INT),
    "wait": (_INT, _ID, _INT, _INT, _INT),
    "finished": (_INT, _ID, _INT),
    "cancel": (None, _ID, _INT),
    "drawn": (None, _ID, _INT, _INT, _INT, _INT, *[_POINTER] * 5),
    "origins": (None, _ID, _INT, _INT, _INT, _POINTER, _POINTER),
    "speculate": (_ID, _ID, _INT, _POINTER, _INT, *_ERROR),
    "prices": (None, _ID, _POINTER),
    "give_mask": (_ID, _ID, _INT, _INT, _POINTER, _LONG, *_ERROR),
    "copied": (_LONG, _ID, _INT),
    "drafting": (None, _ID, _INT, _POINTER),
    "time_passes": (_ID, _ID, _POINTER, _LONG, _INT, _POINTER, *_ERROR),
    "packed_bytes": (_LONG, _ID),
    "bf12_weights": (None, _ID, _POINTER),
    "threads": (_INT, _ID),
    "instructions": (ctypes.c_char_p, _ID),
    "read_pass": (ctypes.c_double, _ID),
    "trace": (None, _ID, _LONG),
    "spans": (_LONG, _ID, _INT, _POINTER, _LONG),
    "gpu_open": (_ID, _POINTER, _LONG, _POINTER, _LONG, *[ctypes.c_char_p] * 4, *_ERROR),
    "gpu_close": (None, _ID),
    "gpu_export": (_ID, _ID, _POINTER, *_ERROR),
    "gpu_connect": (_ID, _ID, _POINTER, *_ERROR),
    "gpu_leave": (_ID, _ID, *_ERROR),
    "gpu_begin": (_ID, _ID, _INT, *_ERROR),
    "gpu_begin_call": (_ID, _ID, *_ERROR),
    "gpu_yield": (None, _ID),
    "gpu_yield_after": (None, _ID, _INT),
    "gpu_passes": (_INT, _ID),
    "gpu_wait": (_INT, _ID, _INT, _INT, _INT),
    "gpu_finished": (_INT, _ID, _INT),
    "gpu_cancel": (None, _ID, _INT),
    "gpu_drawn": (None, _ID, _INT, _INT, _INT, _INT, *[_POINTER] * 5),
    "gpu_failure": (_INT, _ID, *_ERROR),
    "gpu_stuck": (_LONG, _ID, _POINTER, _LONG),
    "gpu_speculate": (_ID, _ID, _INT, _POINTER, _LONG, *_ERROR),
    "gpu_give_texts": (_ID, _ID, _INT, *[_POINTER, _LONG] * 3, _INT, *_ERROR),
    "gpu_drafting": (None, _ID, _INT, _POINTER),
    "gpu_read_pass": (_ID, _ID, _POINTER, *_ERROR),
    "gpu_trace": (_ID, _ID, _LONG, *_ERROR),
    "gpu_spans": (_ID, _ID, _INT, _POINTER, _LONG, *_ERROR),
    "ring_slots": (_INT, _POINTER, _INT),
    "default_threads": (_INT,),
    "read_bandwidth": (ctypes.c_double, _LONG, _INT),
    "arithmetic_peak": (ctypes.c_double, _LONG, _INT),
    "speedup": (ctypes.c_double, ctypes.c_char_p, _INT, ctypes.c_char_p, _INT, _INT),
    "can_run": (ctypes.c_char_p, ctypes.c_char_p),
}


def unavailable() -> str | None:
    """Why the native library is not available, and the remedy. None if it is, or if it could be compiled now."""
    try:
        if build.find() is None and build.compiler() is None:
            return "its library was not compiled, and no C++ compiler was found: install g++ (Debian: apt install g++)"
        if build.find() is None and (problem := _compile()):
            return f"its library cannot be compiled ({problem}): repair the C++ compiler, or name another in CXX"
    except build.BuildError as error:
        return str(error)
    return None


@cache
def _compile() -> str | None:
    """Compiles the library. Returns the reason if that fails, and remembers it: another attempt would take long."""
    log.info("compiling the native library once: about 20 seconds")
    return build.try_build(build.cache())


@cache
def library() -> ctypes.CDLL:
    """The loaded library, which is compiled first if necessary. Raises NativeError if that fails."""
    try:
        path = build.find()
        if path is None:
            log.info("compiling the native library once for this version of its sources")
            began = time.perf_counter()
            path = build.build()
            log.info("compiled %s in %.0f s", path, time.perf_counter() - began)
        lib = ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as error:
        raise NativeError(f"the native library cannot be used: {error}") from None
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(lib, f"laneformer_{name}")
        function.restype, function.argtypes = result, arguments
    _check_version(lib.laneformer_ffi_version(), path)
    for target, platform, handler in HANDLERS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(lib, handler)), platform=platform)
    return lib


def _check_version(compiled: int, path) -> None:
    """Raises NativeError if the library was compiled for another FFI version than jaxlib's. Registering its handlers
    would make every JAX program of this process fail.
    """
    header = (build.headers() / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    major, minor = int(numbers["MAJOR"]), int(numbers["MINOR"])
    if compiled != 1000 * major + minor:
        raise NativeError(
            f"{path} was compiled for version {compiled // 1000}.{compiled % 1000} of XLA's FFI, but jaxlib has"
            f" {major}.{minor}: remove the file"
        )


def call(name: str, *arguments) -> int:
    """Calls laneformer_`name` of the library, which reports errors as text. Raises NativeError with that text."""
    text = ctypes.create_string_buffer(1000)
    result = getattr(library(), f"laneformer_{name}")(*arguments, text, len(text))
    if result < 0:
        raise NativeError(text.value.decode())
    return result


def ring_slots(exchanges: list[tuple[int, int]]) -> int:
    """Slots in the smallest ring that suffices for these exchanges. exchanges: (time of issue, time of the last read)
    of each, in the order of issue.
    """
    times = (ctypes.c_int32 * (2 * len(exchanges)))(*(time for pair in exchanges for time in pair))
    return library().laneformer_ring_slots(times, len(exchanges))


def default_threads() -> int:
    """Number of cores that this process may use by its affinity and its control group's quota."""
    return library().laneformer_default_threads()


def instruction_sets() -> list[str]:
    """Instruction sets that the library contains and this machine supports: the best for decoding first, AMX last."""
    names = list(build.instruction_sets())[::-1]
    return [name for name in names if library().laneformer_can_run(name.encode())]


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """Bytes per second at which `threads` threads read a buffer of `num_bytes` bytes once. The buffer stays allocated
    between calls.
    """
    return library().laneformer_read_bandwidth(num_bytes, threads)


def arithmetic_peak(count: int, threads: int) -> float:
    """Multiply-adds of float32 in registers per second, summed over `threads` threads. Each computes `count` of them
    with the best instruction set of this machine.
    """
    return library().laneformer_arithmetic_peak(count, threads)


def speedup(way: tuple[str, bool], over: tuple[str, bool], threads: int) -> tuple[float, bool]:
    """Speed of the way `way` to multiply bfloat16 weights in memory by one position, as a multiple of the speed of the
    way `over`, with `threads` threads. Also whether the shortest times of each agree; they do not if other processes
    disturbed the measurement. The speed is 0 if an instruction set is unknown.

    A way is an instruction set, and whether the weights are in 12 bits. Takes tenths of a second and 256 MB.
    """
    found = library().laneformer_speedup(way[0].encode(), way[1], over[0].encode(), over[1], threads)
    return abs(found), found > 0
