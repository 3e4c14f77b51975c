"""Single products of the GPU kernel on an emulated GPU: weights of 4 bits with tensor cores and with vector code,
against float64 within the bounds of docs/quantized.md.
"""

import ctypes
import dataclasses
import shutil

import numpy as np
import pytest

from laneformer.custom_calls.gpu.codes import format_of
from laneformer.custom_calls.gpu.compile import KERNEL, PERSISTENT, kernel_sources
from laneformer.custom_calls.gpu.layout import SLOT_LINES
from laneformer.custom_calls.gpu.tiling import tile
from tests.support import emulated, small
from tests.support.gpu_cases import packed, rounded

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated]

CTAS, SLOTS = 2, 8
CASES = [  # way, whether with tensor cores, rows, columns: units of 2 and 4 columns, partial tiles, several segments
    ("int4", True, 33, 300),
    ("int4 row", True, 8, 512),
    ("int4 group 128 float16", True, 20, 512),
    ("int4 group 16", True, 24, 250),
    ("int4 zeros", True, 17, 1000),
    ("int4 zeros group 16", True, 9, 130),
    ("mxfp4", True, 40, 384),
    ("mxfp4", True, 5, 1600),
    ("nvfp4", True, 31, 500),
    ("int4 zeros", False, 17, 1000),
    ("mxfp4", False, 5, 1600),
    ("nvfp4", False, 31, 500),
]


class Products:
    """A kernel that computes all cases, and their weights. Call it with the vectors."""

    def __init__(self, folder):
        self.records, tilings, vectors, sums = [], [], 0, 0
        lines, listed, coding, structs = [], [], np.zeros((len(CASES), 4), np.uint32), []
        for number, (way, by_tensor, rows, columns) in enumerate(CASES):
            weights = np.random.default_rng(number).standard_normal((rows, columns)).astype(np.float32)
            record = rounded(weights, way)
            if way == "mxfp4":  # rows with the largest sums, and with every code
                record.codes[0], record.codes[1] = 0x77, np.resize(np.arange(256), record.codes.shape[1])
            format = dataclasses.replace(format_of(["w"], {"w": record}), by_tensor=by_tensor)
            tiling = tile(rows, columns, CTAS, emulated.SMALL, format)
            own, _, _, factors = packed(record, tiling)
            lines.append(np.asarray(own).reshape(CTAS, tiling.warps, tiling.lines, 32, 4))
            if format.factors:
                coding[number, 2] = sum(words.shape[-1] for words in listed)
                listed.append(np.asarray(factors).reshape(CTAS, tiling.warps, -1).view(np.uint32))
            constants = tiling.fields | {"kProduct": number, "kVector": vectors, "kSums": sums}
            body = "".join(f"  static constexpr int {name} = {value};\n" for name, value in constants.items())
            structs.append(f"struct Shape{number} {{\n{body}  using Weights = {tiling.format.struct};\n}};")
            self.records.append(record)
            tilings.append(tiling)
            vectors, sums = vectors + columns + columns % 2, sums + CTAS * tiling.rows
        self.tilings, self.coding, self.sums = tilings, coding, np.zeros(sums, np.float32)
        stream = np.concatenate(lines, 2)
        padding = -stream.shape[2] % SLOT_LINES
        self.stream = np.ascontiguousarray(np.pad(stream, [(0, 0), (0, 0), (0, padding), (0, 0), (0, 0)]))
        self.listed = np.concatenate([*listed, np.zeros((CTAS, emulated.SMALL.warps, 64), np.uint32)], -1)
        floats = max(tiling.partial_floats() + 1 + tiling.brought_floats for tiling in tilings)
        numbers = {"Warps": emulated.SMALL.warps, "SlotLines": SLOT_LINES, "Slots": SLOTS} | emulated.NO_EDGES
        numbers |= {"PassRows": 1, "Requests": 1, "LaneWords": 0, "StagedFloats": 0}
        numbers |= {"LayerLines": self.stream.shape[2], "HeadLines": 0, "Padding": padding, "Floats": floats}
        shapes = ", ".join(f"Shape{number}" for number in range(len(CASES)))
        header = [
            '#pragma once\n#include "numbers.h"\nnamespace laneformer {\nnamespace gpu {',
            *(f"constexpr int k{name} = {value};" for name, value in numbers.items()),
            "constexpr bool kListed = false;",
            *structs,
            f"template <class... Shape>\nstruct Shapes;\nusing AllShapes = Shapes<{shapes}>;\n}}\n}}\n",
        ]
        for path in kernel_sources(PERSISTENT):
            if path.name != PERSISTENT:
                shutil.copy(path, folder)
        for source, name in (("products.cu", KERNEL), ("products.cc", "host.cc")):
            shutil.copy(emulated.EMULATOR / source, folder / name)
        (folder / "model.h").write_text("\n".join(header))
        image = folder.parent / "image"
        emulated.compile_with(emulated.SMALL)(folder, image, "sm_90a")
        self.run_kernel = ctypes.CDLL(image.read_bytes().rstrip(b"\0").decode()).laneformer_products

    def __call__(self, vectors: list[np.ndarray], seed: int = 1) -> list[np.ndarray]:
        """The sums of each case's rows. vectors: one for each case. seed: of the order of threads."""
        joined = np.concatenate([np.pad(x, (0, x.size % 2)) for x in vectors]).astype(np.float32)
        arrays = (np.zeros(4 + a.size, a.dtype) for a in (self.stream, joined, self.coding, self.listed))
        aligned = []
        for room, a in zip(arrays, (self.stream, joined, self.coding, self.listed), strict=True):
            first = -room.ctypes.data % 16 // a.itemsize
            aligned.append(room[first : first + a.size])
            aligned[-1][:] = a.reshape(-1)
        self.sums[:] = np.nan
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in aligned]
        sums = ctypes.c_void_p(self.sums.ctypes.data)
        words = ctypes.c_int(self.listed.shape[-1])
        assert self.run_kernel(*pointers, words, sums, CTAS, ctypes.c_uint64(seed)) == 0
        ends = np.cumsum([CTAS * tiling.rows for tiling in self.tilings])
        parts = np.split(self.sums.copy(), ends[:-1])
        return [part[: tiling.all_rows] for part, tiling in zip(parts, self.tilings, strict=True)]


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products") / "sources"
    folder.mkdir()
    return Products(folder)


def drawn(columns: int) -> np.ndarray:
    return np.random.default_rng(columns).standard_normal(columns).astype(np.float32)


def with_outliers(columns: int) -> np.ndarray:
    return drawn(columns) * np.where(np.arange(columns) % 61 == 7, 1000, 1).astype(np.float32)


def of_many_sizes(columns: int) -> np.ndarray:
    return drawn(columns) * np.exp2(np.random.default_rng(9).integers(-60, 60, columns)).astype(np.float32)


def of_one_column(columns: int) -> np.ndarray:
    return np.where(np.arange(columns) == columns - 1, np.float32(-0.7), np.float32(0))


VECTORS = {
    "normal": drawn,
    "outliers": with_outliers,
    "many sizes": of_many_sizes,
    "tiny": lambda columns: np.float32(1e-30) * drawn(columns),
    "huge": lambda columns: np.float32(1e30) * drawn(columns),
    "zeros": lambda columns: np.zeros(columns, np.float32),
    "one column": of_one_column,
    "the largest below a power of two": lambda columns: np.full(columns, np.nextafter(np.float32(2), np.float32(0))),
    "the largest number of three bytes": lambda columns: np.full(columns, np.float32(-0x7F7F7F)),
    "subnormal": lambda columns: np.float32(1e-40) * drawn(columns),
}


@pytest.mark.parametrize("name", VECTORS)
def test_sums_are_within_the_bounds(name, products):
    vectors = [VECTORS[name](columns) for *_, columns in CASES]
    for case, record, x, found in zip(CASES, products.records, vectors, products(vectors), strict=True):
        weights, exact = record.dequantize(), x.astype(np.float64)
        size = np.abs(weights)
        bound = 2.0**-21 * size @ np.abs(exact) + 2.0**-122 * size.sum(-1)
        if case[1]:  # tensor cores round in blocks of 32 columns
            largest = np.maximum.reduceat(np.abs(exact), np.arange(0, x.size, 32))
            bound += 2.0**-22 * size @ largest[np.arange(x.size) // 32]
        assert (np.abs(found - weights @ exact) <= bound).all(), case


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**127], ids=str)
def test_blocks_that_are_not_finite_give_nan(value, products):
    vectors = [drawn(columns) for *_, columns in CASES]
    for x in vectors:
        x[x.size // 2] = value
    for case, found in zip(CASES, products(vectors), strict=True):
        if case[1]:
            assert np.isnan(found).all(), case


def test_order_of_threads_changes_no_bit(products):
    vectors = [with_outliers(columns) for *_, columns in CASES]
    first, second = products(vectors, 1), products(vectors, 2)
    assert all(small.same(a, b) for a, b in zip(first, second, strict=True))
