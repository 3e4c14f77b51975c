"""A decode session on the CPU: weights packed for worker threads, and the calls that these run."""

import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from laneformer.custom_calls.cpu.tiles import MidTile, make_pieces, refusal
from laneformer.custom_calls.library import SPAN, TARGET, NativeError, call, default_threads, instruction_sets
from laneformer.custom_calls.measured import amx_gain, bf12_gain, pass_prices
from laneformer.custom_calls.plan import Dtype, Plan
from laneformer.custom_calls.request import Request
from laneformer.custom_calls.session import Bf12Weights, CallStream, DecodeSession, Drafting
from laneformer.custom_calls.words import request_words
from laneformer.errors import CheckpointError
from laneformer.formats import BF12_TABLE, Bf12Product
from laneformer.ops import TRACE_NAMES, HeadKind
from laneformer.quantized import Quantized

MOST_THREADS = 1024
EMBEDDING = -1  # number of the embedding table among the products
REMEDY = "use backend xla, or add --weights bfloat16 to round it to 16 bits"
LEAST_GAIN = 1.03  # measured speedup from which weights in 12 bits are used
LEAST_AMX_GAIN = 0.98  # measured speed of decoding from which AMX is used, because it makes prompts faster
MOST_ROWS = 16  # rows of a pass: the last token and its drafts; kMostRows of common/drafts.h
PASSES = 2  # measurements of each number of rows, alternating with the others
PRICED = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of rows for which a pass is measured


class Slot(CallStream):
    """A slot of a session. It runs one call at a time, beside the calls of the other slots, which do not change its
    results.
    """

    def __init__(self, session: "Session", number: int):
        self._session, self.number = weakref.proxy(session), number

    def _stream(self, name: str, *arguments: Any) -> Any:
        return self._session._function(name)(self._session.id, self.number, *arguments)

    def give_mask(self, number: int, words: np.ndarray) -> None:
        """Sets which tokens the answer's token `number` may be. words: a bit for each token of the vocabulary, lowest
        bit first, at least one set, uint32 [ceil(vocab / 32)]. Raises NativeError unless `number` is the next token and
        has no mask yet.
        """
        words = np.ascontiguousarray(words, np.uint32)
        call("give_mask", self._session.id, self.number, number, words.ctypes.data, len(words))

    @property
    def copied(self) -> int:
        return self._stream("copied")

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        drafted, others = np.empty(count, bool), np.empty(count, np.uint8)
        self._stream("origins", first, count, drafted.ctypes.data, others.ctypes.data)
        return drafted, others

    @property
    def drafting(self) -> Drafting:
        """Counts of the drafts of the last call, after it has ended."""
        counts = self._counts()
        rows, accepted, others = np.split(counts[:-1], [MOST_ROWS, 2 * MOST_ROWS - 1])
        return Drafting(tuple(rows.tolist()), tuple(accepted.tolist()), *others.tolist())

    @property
    def shared_passes(self) -> int:
        """Passes of the last call that also had rows of other calls, after it has ended."""
        return int(self._counts()[-1])

    def _counts(self) -> np.ndarray:
        counts = np.zeros(2 * MOST_ROWS + 2, np.int64)
        self._stream("drafting", counts.ctypes.data)
        return counts


class Session(DecodeSession):
    """A model in the library, on the CPU. Pack every weight, then pass the session to `custom_calls.decode`, with one
    call at a time in each slot.
    """

    _prefix, target = "", TARGET
    ops = ("embed", "exchange", "sample", "head", *TRACE_NAMES)
    worker = "worker"

    def __init__(
        self,
        plan: Plan,
        *,
        threads: int | None = None,
        one_thread_per_lane: bool = False,
        chaos_us: int = 0,
        timeout_ms: int = 60_000,
        instructions: str | None = None,
        bf12: bool = False,
        slots: int = 1,
        most_slowdown: float = 1.5,
    ):
        """Opens a session. Raises NativeError if an option is invalid.

        threads: worker threads, by default one for each core that may be used. one_thread_per_lane: for tests; lanes
        exchange messages as GPUs would, instead of sharing memory, with the same bits of every result. chaos_us: for
        tests; longest random delay around every exchange, in microseconds. timeout_ms: time that a call waits for a
        worker or a device before it fails. instructions: one of `instruction_sets()`, by default the first. bf12: pack
        each bfloat16 matrix that has few exceptions in 12 bits; results have the same bits, but a weight can be packed
        only once. slots: most calls that may run together, at most MOST_ROWS. most_slowdown: rows of other calls join a
        pass only while its price is at most this multiple of a pass of one row; needs prices (`speculate`).
        """
        if threads is not None and threads < 1:
            raise NativeError(f"threads must be at least 1, got {threads}")
        if threads is not None and threads > MOST_THREADS:
            raise NativeError(f"threads must be at most {MOST_THREADS}, got {threads}")
        self._num_slots = slots
        self._mapped: list[np.ndarray] = []  # arrays of `map`, kept because the library reads them
        # Tiles of quantized products, kept because the library reads them, and the share of each that a token reads.
        self._tiles: list[tuple[np.ndarray, float]] = []
        self._formats: dict[str, str] = {}  # formats of quantized matrices, by path
        # Packed matrices by path: None, or a quantized one that waits for the other matrices of its product.
        self._held: dict[str, Quantized | None] = {}
        self._open(
            plan,
            timeout_ms,
            threads or default_threads(),
            one_thread_per_lane,
            chaos_us,
            timeout_ms,
            bf12,
            slots,
            most_slowdown,
            (instructions or "").encode(),
        )

    def pack(self, path: str, weight: np.ndarray | Quantized) -> None:
        """Packs a weight whose path and shape are those of the table in laneformer/weights.py. Matrices of products may
        be quantized. Raises NativeError if the weight does not fit the model, CheckpointError if a value is not finite
        in the dtype of the packed weights.
        """
        self._check_weight(path, weight.shape)
        if isinstance(weight, Quantized):
            if path not in self.plan.matrices:
                raise NativeError(f"weight {path} is {weight.name}, but not a matrix of a product: dequantize it")
            if why := refusal(weight):
                raise NativeError(f"weight {path} ({weight.name}) {why}: {REMEDY}")
        else:
            self._pack_plain(path, weight)
        if path in self._product_of:
            self._held[path] = weight if isinstance(weight, Quantized) else None
            self._map_quantized(*self._product_of[path])

    def _pack_plain(self, path: str, weight: np.ndarray) -> None:
        weight = self.plan.checked_table(path, weight)
        weight = np.ascontiguousarray(self.plan.with_plus(path, weight))
        name = weight.dtype.name
        if name not in Dtype.__members__:
            raise NativeError(f"weight {path} is {name}: the kernel packs {', '.join(Dtype.__members__)}; convert it")
        number = call("pack", self.id, self.plan.index_of[path], weight.ctypes.data, weight.size, Dtype[name])
        if number > 0:  # number of the first value that is not finite, counted from 1
            place = np.unravel_index(number - 1, weight.shape)
            raise CheckpointError(
                f"weight {path} has {weight[place]} at [{', '.join(map(str, place))}], which is not finite as packed:"
                " copy the checkpoint again, or use an earlier one"
            )
        self._missing.pop(path, None)

    def _map_quantized(self, paths: tuple[str, ...], gated: bool) -> None:
        """Passes the tiles of a product to the library, if any of its matrices is quantized and all of them are packed.
        paths, gated: the product's key in `_products`.
        """
        parts = [self._held[path] for path in paths if path in self._held]
        if len(parts) < len(paths) or all(part is None for part in parts):
            return
        head = self.plan.ops.head
        kind = head.kind if head.weight.path in paths else HeadKind.VOCAB_PARALLEL
        lanes = self.plan.ops.lanes if kind == HeadKind.VOCAB_PARALLEL else 1
        experts = self.plan.weights[paths[0]].experts or 1
        rows = [self.plan.shape_of(path)[-2] for path in paths]
        try:
            pieces = make_pieces(parts, rows, lanes * experts, gated, kind == HeadKind.LANE)
        except MidTile as error:
            number = error.args[0]
            raise NativeError(
                f"weight {paths[number]} differs from {paths[number - 1]} in format or order of columns, but the number"
                f" of rows before it ({sum(rows[:number])}) is not a multiple of 16: {REMEDY}"
            ) from None
        words = np.array([piece.words for piece in pieces], np.int64)
        call("map_quantized", self.id, self._products[paths, gated], words.ctypes.data, len(words))
        self._tiles += [(piece.tiles.data, self._share(paths[0])) for piece in pieces if piece.tiles is not None]
        for path, part in zip(paths, parts, strict=True):
            if part is not None:
                self._formats[path] = part.name
                self._missing.pop(path, None)
                del self._held[path]

    def map(self, product: Bf12Product) -> bool:
        """Uses the matrices of a product, or the embedding table, without copying them. Only the exceptions are copied,
        so `product` must not change. Needs the option bf12. The units must have finite values, and should begin at a
        multiple of 64 bytes to be read fast.

        Returns whether the model has this product; if not, pack its weights instead. Raises NativeError for sizes or
        exceptions that do not fit the model.
        """
        number = self._products.get((product.paths, product.interleaved))
        if number is None:
            return False
        tiles = product.tiles
        units = np.ascontiguousarray(tiles.units, np.uint8)
        table, exceptions = np.ascontiguousarray(tiles.table, np.uint8), np.ascontiguousarray(tiles.exceptions)
        if len(table) != BF12_TABLE or exceptions.dtype != np.uint32:
            raise NativeError(
                f"{product.paths[0]}: the table must have {BF12_TABLE} values, and exceptions must be uint32"
            )
        arrays = (units.ctypes.data, units.nbytes, table.ctypes.data, exceptions.ctypes.data, len(exceptions))
        call("map", self.id, number, *arrays)
        self._mapped.append(units)
        for path in product.paths:
            self._missing.pop(path, None)
        return True

    @cached_property
    def _products(self) -> dict[tuple[tuple[str, ...], bool], int]:
        """The number of each product in C++, by the paths of its matrices and whether their tiles alternate."""
        ops, products = self.plan.ops, self.plan.products
        numbers = {
            (tuple(matrix.weight.path for matrix in op.matrices), op.gated): number
            for number, op in enumerate(products)
        }
        return {((ops.embedding.path,), False): EMBEDDING, **numbers, ((ops.head.weight.path,), False): len(products)}

    @cached_property
    def _product_of(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """The key in `_products` of each matrix's product, by path."""
        return {path: key for key, number in self._products.items() if number != EMBEDDING for path in key[0]}

    @property
    def quantized_weights(self) -> dict[str, Any]:
        """The formats of the quantized matrices, and the number of their weights and the bytes of their tiles that one
        token reads; {} if nothing is quantized.
        """
        if not self._formats:
            return {}
        weights = sum(math.prod(self.plan.shape_of(path)) * self._share(path) for path in self._formats)
        return {
            "quantized_formats": sorted(set(self._formats.values())),
            "quantized_weights": round(weights),
            "quantized_bytes": round(sum(tiles.nbytes * share for tiles, share in self._tiles)),
        }

    def _share(self, path: str) -> float:
        """Share of the matrix `path` that one token multiplies: experts used / experts, or 1."""
        number = self._products[self._product_of[path]]
        return self.plan.products[number].share if number < len(self.plan.products) else 1.0

    @property
    def threads(self) -> int:
        """Number of worker threads."""
        return self._lib.laneformer_threads(self.id)

    @property
    def instructions(self) -> str:
        """Name of the instruction set in use."""
        return self._lib.laneformer_instructions(self.id).decode()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights and of the embedding table."""
        return self._lib.laneformer_packed_bytes(self.id)

    @property
    def bf12_weights(self) -> Bf12Weights:
        """Counts of the weights that are packed in 12 bits; zeros without the option bf12."""
        counts = np.zeros(4, np.int64)
        self._lib.laneformer_bf12_weights(self.id, counts.ctypes.data)
        return Bf12Weights(*counts.tolist())

    def speculate(self, most: int, prices: Sequence[float] | None = None) -> None:
        """Lets the next calls check up to `most` drafts in a pass; 0 for none. Drafts are copied from the text so far.
        They change only the speed, no bit of a result.

        prices: times of passes of 1, 2, ... MOST_ROWS rows in units of a pass of one row, which then stay fixed. By
        default they are measured (see `prices`), and the times of later passes correct them. Raises NativeError for
        another number of prices.
        """
        corrected = prices is None
        if corrected:
            prices = self.prices if most or self._num_slots > 1 else [1.0] * MOST_ROWS
        given = np.asarray(prices, np.float32)
        if given.shape != (MOST_ROWS,):
            raise NativeError(f"prices must have {MOST_ROWS} values, got {given.size}")
        call("speculate", self.id, most, given.ctypes.data, corrected)

    @cached_property
    def prices(self) -> list[float]:
        """Times of passes of 1, 2, ... MOST_ROWS rows in units of a pass of one row, measured once on each machine. All
        weights must be packed.
        """
        self._require_weights()
        most = min(MOST_ROWS, (self.plan.ops.context - 1) // PASSES)
        rows = [count for count in PRICED if count <= most]
        plan = hashlib.sha256(self.plan.words.tobytes() + self.plan.floats.tobytes()).hexdigest()[:16]
        held = f"{self.bf12_weights.weights} {self.quantized_weights}"
        found = pass_prices(f"{plan} {held} {self.instructions} {self.threads}", partial(self._time_passes, rows))
        return np.interp(np.arange(1, MOST_ROWS + 1), rows, found).tolist()

    def _time_passes(self, rows: Sequence[int]) -> list[float]:
        """Seconds of a pass with each of these numbers of rows."""
        counts, seconds = np.asarray(rows, np.int32), np.empty(len(rows))
        call("time_passes", self.id, counts.ctypes.data, len(counts), PASSES, seconds.ctypes.data)
        return seconds.tolist()

    @cached_property
    def slots(self) -> tuple["Slot", ...]:
        """The session's slots by number. Each runs one call at a time, beside the others. The session itself is the
        stream of tokens of slot 0.
        """
        return tuple(Slot(self, number) for number in range(self._num_slots))

    def inputs(self, request: Request, /, *, most_tokens: int = 0, most_stops: int = 0) -> np.ndarray:
        return request_words(request, most_tokens + most_stops)

    def _stream(self, name: str, *arguments: Any) -> Any:
        return self._function(name)(self.id, 0, *arguments)

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.slots[0]._origins(first, count)

    @property
    def drafting(self) -> Drafting:
        """Counts of the drafts of the last call of slot 0, after it has ended."""
        return self.slots[0].drafting

    @property
    def running_prices(self) -> list[float]:
        """Prices of passes, as corrected by all calls so far, by their number of rows: float [MOST_ROWS]."""
        prices = np.zeros(MOST_ROWS, np.float32)
        self._lib.laneformer_prices(self.id, prices.ctypes.data)
        return prices.tolist()

    def read_pass(self) -> float:
        """Seconds in which the workers read all weights of one token without computing: the lower bound of decoding."""
        return self._lib.laneformer_read_pass(self.id)

    def trace(self, spans_per_worker: int) -> None:
        """Starts recording the spans of each worker, at most `spans_per_worker`; 0 stops recording."""
        self._lib.laneformer_trace(self.id, spans_per_worker)

    def spans(self) -> Iterator[tuple[int, np.ndarray]]:
        for worker in range(self.threads):
            spans = np.zeros(self._lib.laneformer_spans(self.id, worker, None, 0), SPAN)
            self._lib.laneformer_spans(self.id, worker, spans.ctypes.data, len(spans))
            yield worker, spans


def fastest_way(
    threads: int | None = None, instructions: str | None = None, bf12: bool | None = None
) -> tuple[str, bool]:
    """The instruction set, and whether to hold bfloat16 weights in 12 bits: the measured fastest combination on this
    machine. AMX is chosen even if decoding is slightly slower with it, because it makes prompts faster.

    threads: as in Session. instructions, bf12: choices that are fixed already; None to measure.
    """
    sets, count = instruction_sets(), _measured_with(threads)

    def with_set(name: str) -> tuple[bool, float]:
        gain = 1.0 if bf12 is False else bf12_gain(name, count)
        narrow = gain >= LEAST_GAIN if bf12 is None else bf12
        return narrow, gain if narrow else 1.0

    name = instructions or sets[0]
    narrow, speed = with_set(name)
    if instructions is None and "amx" in sets:
        narrow_amx, gain = with_set("amx")
        if amx_gain(name, count) * gain >= LEAST_AMX_GAIN * speed:
            return "amx", narrow_amx
    return name, narrow


def _measured_with(threads: int | None) -> int:
    cores = default_threads()
    return cores if threads is None else max(1, min(threads, cores))
