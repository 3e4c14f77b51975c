"""A model on the CPU: its weights packed for the worker threads, and the call that is running."""

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np

from custom_calls.library import TARGET, Model, NativeError, Options, Span, call, default_threads
from custom_calls.plan import encode_schedule
from custom_calls.session import DTYPES, HEADS, Running, Shapes


class Session(Running):
    """One model in the library, on the CPU. Pack every weight, then use it in `custom_calls.decode`; one call at a
    time.
    """

    _prefix, target = "", TARGET
    ops, worker = (
        ("qkv", "out", "gate_up", "down", "head", "embed", "attend", "exchange", "sample"),
        "worker",
    )  # cpu/decoder.h, worker.h

    def __init__(
        self,
        shapes: Shapes,
        schedule,
        *,
        rope_frequencies: np.ndarray,
        windows: tuple[int | None, ...],
        threads: int | None = None,
        one_thread_per_lane: bool = False,
        chaos_us: int = 0,
        timeout_ms: int = 60_000,
        instructions: str | None = None,
    ):
        """schedule: a laneformer.layout.Schedule. rope_frequencies: radians per position, float32 [head_dim / 2].
        windows: keys that each layer sees, None for all. threads: by default one per core that may be used.

        one_thread_per_lane: the lanes exchange messages as GPUs would, instead of sharing memory; the same results bit
        for bit. chaos_us: random delays of up to so many microseconds around every exchange. Both are for tests.
        timeout_ms: for a worker or a device that does not come. instructions: one of `instruction_sets()`, by default
        the best. Raises NativeError.
        """
        words, weights = encode_schedule(schedule, shapes.hidden)
        arrays = {
            "rope_frequencies": np.ascontiguousarray(rope_frequencies, np.float32),
            "windows": np.array([window or 0 for window in windows], np.int32),
            "events": words,
            "event_weights": weights,
        }
        fields = dataclasses.asdict(shapes)
        fields |= {name: DTYPES[fields[name]] for name in ("weight_dtype", "cache_dtype")}
        fields["head_type"] = HEADS[shapes.head_type]
        model = Model(**fields, **{name: array.ctypes.data for name, array in arrays.items()}, num_events=len(words))
        if threads is not None and threads < 1:
            raise NativeError(f"threads = {threads}: give at least 1")
        options = Options(
            threads or default_threads(),
            one_thread_per_lane,
            chaos_us,
            timeout_ms,
            instructions.encode() if instructions else None,
        )
        self._open(shapes, timeout_ms, ctypes.byref(model), ctypes.byref(options))

    def pack(self, path: str, weight: np.ndarray) -> None:
        """Copies a weight into its place; path and shape as in laneformer's parameter table. Raises NativeError if it
        does not fit.
        """
        layer, name = self._place_of(path)
        weight = np.ascontiguousarray(weight)
        if weight.dtype.name not in DTYPES:
            raise NativeError(f"weight {path} is {weight.dtype}: the kernel packs {', '.join(DTYPES)}")
        call("pack", self.id, name.encode(), layer, weight.ctypes.data, weight.size, DTYPES[weight.dtype.name])
        self._left.discard((layer, name))

    @property
    def threads(self) -> int:
        """Worker threads."""
        return self._lib.laneformer_threads(self.id)

    @property
    def instructions(self) -> str:
        """The instruction set in use."""
        return self._lib.laneformer_instructions(self.id).decode()

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights and of the embedding table."""
        return self._lib.laneformer_packed_bytes(self.id)

    def read_pass(self) -> float:
        """Seconds in which the workers read all that they stream for one token, without computing anything: the bound
        of decoding.
        """
        return self._lib.laneformer_read_pass(self.id)

    def trace(self, spans_per_worker: int) -> None:
        """Writes down when each worker did what, from now on; 0 ends it."""
        self._lib.laneformer_trace(self.id, spans_per_worker)

    def spans(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each worker's number and spans, a structured array (op, layer, begin_ns, end_ns)."""
        for worker in range(self.threads):
            count = self._lib.laneformer_spans(self.id, worker, None, 0)
            spans = (Span * count)()
            self._lib.laneformer_spans(self.id, worker, spans, count)
            yield worker, np.ctypeslib.as_array(spans) if count else np.zeros(0, np.dtype(Span))
