"""A model in the native library: its weights packed for the worker threads, and the call that is running."""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from custom_calls.library import NativeError, call, library

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
