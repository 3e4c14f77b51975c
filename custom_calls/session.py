"""A model in the native library: its weights packed for the worker threads, and the call that is running."""

import ctypes
import dataclasses
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from custom_calls.library import TARGET, Model, NativeError, Options, Span, call, default_threads, library
from custom_calls.schedule import encode_schedule

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
HEADS = {"replicate": 0, "lane": 1, "vocab_parallel": 2}
BIASES = ("attention.wq_bias", "attention.wk_bias", "attention.wv_bias")
OF_LAYERS = (
    "attention_norm",
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "ffn_norm",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the kernel must know of a model. Heads, key/value heads and feed-forward columns are those of one lane."""

    layers: int
    lanes: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    context: int
    head_type: str
    """One of HEADS."""
    norm_of_sum: bool
    """Head replicate: one norm over the sum of the lanes, instead of the mean of their norms."""
    tied_head: bool
    lane_norms: bool
    """Each lane has its own norm scales in the layers."""
    lane_final_norm: bool
    qkv_bias: bool
    qk_norm: bool
    weight_dtype: str
    """One of DTYPES, in which the weights are packed."""
    cache_dtype: str
    rounded_activations: bool
    """Whether products read their vectors rounded to the weights' dtype; otherwise in float32."""
    norm_eps: float
    rope_factor: float

    @property
    def weights(self) -> set[tuple[int, str]]:
        """Layer and name of every weight, 0 for those of no layer; names as in laneformer's parameter table."""
        names = [
            *OF_LAYERS,
            *(BIASES if self.qkv_bias else ()),
            *(("attention.q_norm", "attention.k_norm") if self.qk_norm else ()),
        ]
        ends = ("tok_embeddings", "norm") if self.tied_head else ("tok_embeddings", "norm", "lm_head")
        return {(layer, name) for layer in range(self.layers) for name in names} | {(0, name) for name in ends}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a weight, as in laneformer's parameter table; name: one of `weights`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_layers = (self.lanes, self.hidden) if self.lane_norms else (self.hidden,)
        heads = {
            "replicate": (self.vocab, self.hidden),
            "lane": (self.lanes, self.vocab, self.hidden),
            "vocab_parallel": (self.lanes, self.vocab // self.lanes, self.hidden),
        }
        ends = {
            "tok_embeddings": (self.vocab, self.hidden),
            "norm": (self.lanes, self.hidden) if self.lane_final_norm else (self.hidden,),
            "attention_norm": of_layers,
            "ffn_norm": of_layers,
            "attention.q_norm": (self.head_dim,),
            "attention.k_norm": (self.head_dim,),
            "lm_head": heads[self.head_type],
        }
        rows = {
            "wq": (queries, self.hidden),
            "wk": (keys, self.hidden),
            "wv": (keys, self.hidden),
            "wo": (self.hidden, queries),
            "w1": (self.ff, self.hidden),
            "w3": (self.ff, self.hidden),
            "w2": (self.hidden, self.ff),
        }
        matrix, _, bias = name.partition(".")[2].partition("_")
        return ends[name] if name in ends else (self.lanes, *rows[matrix][: 1 if bias else 2])


class Drawn(NamedTuple):
    """Tokens of a call, in their order."""

    tokens: np.ndarray
    """int32 [n]."""
    logprobs: np.ndarray
    """float32 [n]."""
    times: np.ndarray
    """Seconds on the clock of time.perf_counter (Linux: CLOCK_MONOTONIC) at which each was drawn, float64 [n]."""
    top_tokens: np.ndarray
    """int32 [n, top]."""
    top_logprobs: np.ndarray
    """float32 [n, top]."""


class Running:
    """What sessions on every platform have: the call that runs, seen from outside."""

    _prefix: str
    target: str
    """Of the custom call."""

    def _open(self, shapes: Shapes, timeout_ms: int, *arguments) -> None:
        """Raises NativeError."""
        self.shapes, self.timeout_ms, self._lib = shapes, timeout_ms, library()
        self._left = shapes.weights
        self._id = call(f"{self._prefix}open", *arguments)
        self.close = weakref.finalize(self, self._function("close"), self._id)

    def _function(self, name: str):
        return getattr(self._lib, f"laneformer_{self._prefix}{name}")

    @property
    def id(self) -> int:
        """Of the session in the library. Raises NativeError once it was closed."""
        if not self.close.alive:
            raise NativeError("this decode session was closed: make another one")
        return self._id

    ops: tuple[str, ...]
    """Names of the ops in a trace, by their number in a span."""
    worker: str
    """What does them."""

    @property
    def operands(self) -> tuple:
        """Arrays that the custom call reads beside those of the call. Raises NativeError while weights are missing."""
        self._require_weights()
        return ()

    of_lanes: tuple[bool, ...] = ()
    """For each operand whether its first axis is that of the lanes."""

    def _place_of(self, path: str) -> tuple[int, str]:
        """Layer and name of a weight by its path in laneformer's parameter table. Raises NativeError if the model has
        none of it.
        """
        layer, name = 0, path
        if path.startswith("layers."):
            _, number, name = path.split(".", 2)
            layer = int(number)
        if (layer, name) not in self.shapes.weights:
            raise NativeError(f"the model has no weight called {path}")
        return layer, name

    def _require_weights(self) -> None:
        if self._left:
            layer, name = min(self._left)
            raise NativeError(f"{len(self._left)} weights have not been packed, among them {name} of layer {layer}")

    failure: str | None = None
    """What went wrong in the last call beyond what XLA could report; None if nothing did."""

    def begin(self) -> None:
        """Forgets the last call's tokens and a cancellation: before a call that `wait` is to follow."""
        self._function("begin")(self.id)

    def wait(self, have: int, timeout_ms: int = 50) -> int:
        """Tokens drawn by the running call, once there are more than `have`, it has ended, or after the timeout. The
        GIL is free.
        """
        return self._function("wait")(self.id, have, timeout_ms)

    @property
    def finished(self) -> bool:
        """Whether the call has ended."""
        return bool(self._function("finished")(self.id))

    def cancel(self) -> None:
        """Ends the running call, or the one that `begin` has announced, before its next token."""
        self._function("cancel")(self.id)

    def drawn(self, first: int, count: int, top: int = 0) -> Drawn:
        """Tokens first .. first + count - 1 of the call, which `wait` has reported; top: as in the call."""
        arrays = (np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.int64))
        ranked = (np.empty((count, top), np.int32), np.empty((count, top), np.float32))
        self._function("drawn")(self.id, first, count, top, *(array.ctypes.data for array in (*arrays, *ranked)))
        return Drawn(arrays[0], arrays[1], arrays[2] * 1e-9, *ranked)


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
