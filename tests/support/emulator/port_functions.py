"""The functions of custom_calls/gpu/kernel/port.h in a kernel of their own (emulator/functions.cu), and what they must
give, computed in NumPy from their definitions.
"""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from laneformer.custom_calls.gpu.compile import KERNEL, PERSISTENT, SOURCES, kernel_sources
from laneformer.custom_calls.gpu.layout import SLOT_LINES
from tests.support import emulated

THREADS, INPUTS, OUTPUTS, PASS_LINES, READ_LINES = 64, 16, 28, 24, 90
SIZES = {"Warps": 2, "SlotLines": SLOT_LINES, "Slots": 3, "LayerLines": 16, "HeadLines": PASS_LINES - 16}
SIZES |= {"Inputs": INPUTS, "Outputs": OUTPUTS, "ReadLines": READ_LINES} | emulated.NO_EDGES
# Runs a library in its own process, because the emulator ends a process that does wrong.
RUN = """
import ctypes, sys
import numpy as np
function = ctypes.CDLL(sys.argv[1]).laneformer_functions
arrays = [np.fromfile(f"{sys.argv[2]}/{name}", np.uint32) for name in ("in", "weights", "words", "out")]
pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
assert all(array.ctypes.data % 16 == 0 for array in arrays)
status = function(*pointers, ctypes.c_uint64(3))
arrays[-1].tofile(f"{sys.argv[2]}/out")
sys.exit(status)
"""


@dataclasses.dataclass
class Case:
    """Inputs of the kernel, and what it must write: uint32 [threads, inputs] and [threads, outputs]."""

    given: np.ndarray
    weights: np.ndarray
    expected: np.ndarray


def halves(words: np.ndarray) -> np.ndarray:
    """The two float16 of each word, as float64 [..., 2]."""
    return np.ascontiguousarray(words)[..., None].view(np.float16).astype(np.float64)


def product(a, b, before) -> np.ndarray:
    """before + a b of each warp in the registers of its threads, by the fragments of the PTX ISA: uint32 [threads, 4].

    a: [threads, registers]. b: [threads, registers]. before: [threads, 4].
    """
    found, (t, g) = np.empty((THREADS, 4), np.uint32), (np.arange(32) % 4, np.arange(32) // 4)
    for warp in (slice(0, 32), slice(32, 64)):
        rows, columns = np.zeros((16, 8 * a.shape[1]), np.int64), np.zeros((8 * a.shape[1], 8), np.int64)
        for byte in range(4):
            for r in range(a.shape[1]):
                rows[g + 8 * (r % 2), 4 * t + byte + 16 * (r // 2)] = (a[warp, r] >> 8 * byte).astype(np.int8)
            for r in range(b.shape[1]):
                columns[4 * t + byte + 16 * r, g] = (b[warp, r] >> 8 * byte).astype(np.int8)
        whole = rows @ columns
        for r in range(4):
            found[warp, r] = before[warp, r] + whole[g + 8 * (r // 2), 2 * t + r % 2].astype(np.uint32)
    return found


def permuted(a: int, b: int, selector: int, signs: bool) -> int:
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        found |= (255 * (byte >> 7) if nibble & 8 and signs else byte) << 8 * i
    return found


def make_case() -> Case:
    rng = np.random.default_rng(5)
    given = rng.integers(0, 2**32, (THREADS, INPUTS), np.uint32)
    given[:, 10:13] = rng.standard_normal((THREADS, 6)).astype(np.float16).view(np.uint32)
    sizes = np.resize([1, 0.5, 3e4, 1e-6], THREADS)
    given[:, 13] = (rng.standard_normal(THREADS) * sizes).astype(np.float32).view(np.uint32)
    weights = rng.integers(0, 2**32, (2, PASS_LINES, 32, 4), np.uint32)
    for byte in range(4):  # no NaN of E4M3, whose bits are not defined
        given[given[:, 0] >> 8 * byte & 0x7F == 0x7F, 0] ^= 1 << 8 * byte
    warps, threads, real = given.reshape(2, 32, INPUTS), np.arange(32), given[:, 13].view(np.float32)
    x, y, z = (halves(given[:, i]) for i in (10, 11, 12))

    def words(pairs) -> np.ndarray:
        return pairs.astype(np.float16).view(np.uint32)[:, 0]

    def in_warps(index) -> np.ndarray:
        return np.stack([warp[index(warp), 0] for warp in warps]).reshape(-1)

    columns = [
        *product(given[:, :4], given[:, 4:6], given[:, 6:10]).T,
        *product(given[:, :2], given[:, 4:5], given[:, 6:10]).T,
        [permuted(*map(int, (row[0], row[1], row[2] & 0x7777)), signs=False) for row in given],
        [permuted(*map(int, row[:3]), signs=True) for row in given],
        in_warps(lambda warp: threads ^ 5),
        in_warps(lambda warp: warp[:, 1] & 31),
        in_warps(lambda warp: 0 * threads + 7),
        in_warps(lambda warp: 0 * threads + np.argmax(warp[:, 0])),
        words(x - y),
        words(x * y + z),
        real.astype(np.float16).view(np.uint16),
        np.rint(real).astype(np.int32).view(np.uint32),
        *given[:, :1].view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32).T,
        given[:, 0] ^ given[:, 3],
        given[:, 3],
        given[:, 7] ^ given[:, 6],
        given[:, 14] ^ 3 * given[:, 15],
        np.full(THREADS, given[:, 0].sum(dtype=np.uint32)),
    ]
    mixed = np.zeros((2, 32), np.uint32)
    for line in range(READ_LINES):
        for word in range(4):
            mixed = 31 * mixed + weights[:, line % PASS_LINES, :, word]
    return Case(given, weights, np.stack([*map(np.asarray, columns), mixed.reshape(-1)], 1).astype(np.uint32))


CASE = make_case()


def changed(text: str, changes) -> str:
    """The text of port.h with some changes of its CUDA part: pairs of texts, old and new."""
    start, end = text.index("#else  // CUDA"), text.rindex("#endif\n\nnamespace")
    part = text[start:end]
    for old, new in changes:
        assert part.count(old) == 1, old
        part = part.replace(old, new)
    return text[:start] + part + text[end:]


def compiled(folder: Path, changes: Iterable[tuple[str, str]] = ()) -> str:
    """Path of the kernel's library. changes: those of `changed`."""
    (sources := folder / "sources").mkdir()
    for path in kernel_sources(PERSISTENT):
        if path.name in ("edges.h", "stream.h", "numbers.h", "port.h", "params.h"):
            shutil.copy(path, sources)
    (sources / "port.h").write_text(changed((SOURCES / "port.h").read_text(), changes))
    constants = "".join(f"constexpr int k{name} = {value};\n" for name, value in SIZES.items())
    (sources / "model.h").write_text(f"#pragma once\nnamespace laneformer {{\nnamespace gpu {{\n{constants}}}\n}}\n")
    for source, name in (("functions.cu", KERNEL), ("functions.cc", "host.cc")):
        shutil.copy(emulated.EMULATOR / source, sources / name)
    emulated.compile_with(emulated.SMALL)(sources, folder / "image", "sm_90a")
    return (folder / "image").read_bytes().rstrip(b"\0").decode()


def run(library: str, folder: Path) -> tuple[str, np.ndarray]:
    """What the process wrote on standard error, or "status N" if it failed without a word; and its results."""
    arrays = {"in": CASE.given, "weights": CASE.weights, "words": np.zeros(4 * THREADS, np.uint32)}
    for name, array in (arrays | {"out": np.zeros(THREADS * OUTPUTS, np.uint32)}).items():
        array.tofile(folder / name)
    command = [sys.executable, "-c", RUN, library, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    failure = done.stderr or (f"status {done.returncode}" if done.returncode else "")
    return failure, np.fromfile(folder / "out", np.uint32).reshape(THREADS, OUTPUTS)
