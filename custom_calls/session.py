"""The base classes of decode sessions on all platforms: a model in the native library, and its running call."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from laneformer.custom_calls.library import NativeError, call, library
from laneformer.custom_calls.plan import Plan
from laneformer.custom_calls.request import Request


class EmittedTokens(NamedTuple):
    """n consecutive tokens of a call."""

    tokens: np.ndarray
    """Token ids, int32 [n]."""
    logprobs: np.ndarray
    """Log-probabilities of the tokens, float32 [n]."""
    times: np.ndarray
    """Seconds on the clock of time.perf_counter (Linux: CLOCK_MONOTONIC) at which each token was drawn, float64 [n]."""
    top_tokens: np.ndarray
    """The most likely tokens at each place, most likely first, int32 [n, top]."""
    top_logprobs: np.ndarray
    """Log-probabilities of `top_tokens`, float32 [n, top]."""
    drafted: np.ndarray
    """Whether the token was drafted before the model drew it, bool [n]; all False in a session without drafts."""
    others: np.ndarray
    """Number of other calls with rows in the pass that drew the token, uint8 [n]; 0 if calls run one at a time."""


class Bf12Weights(NamedTuple):
    """Counts of the weights that are packed in 12 bits (laneformer/formats.py)."""

    weights: int
    """Weights in 12 bits."""
    exceptions: int
    """Weights among them that also have an entry of 32 bits in the list of exceptions."""
    matrices: int
    """Matrices in 12 bits."""
    left: int
    """Matrices kept in 16 bits, because their share of exceptions is larger than BF12_MOST_EXCEPTIONS."""


class Drafting(NamedTuple):
    """Counts of the drafts of a call."""

    rows: tuple[int, ...]
    """Passes after the prompt, by their number of rows: with one row, with two, ..."""
    accepted: tuple[int, ...]
    """Accepted drafts, by their place in a pass: first drafts, second drafts, ..."""
    predicted: int = 0
    """Drafts that were copied from a text beside the prompt."""
    predicted_accepted: int = 0
    """Accepted drafts among `predicted`."""

    @property
    def passes(self) -> int:
        """Passes after the prompt."""
        return sum(self.rows)

    @property
    def drafted(self) -> int:
        """Drafts that were checked."""
        return sum(place * count for place, count in enumerate(self.rows))

    @property
    def drafts(self) -> int:
        """Passes that checked at least one draft."""
        return sum(self.rows[1:])

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a pass after the prompt produced; 1 without such passes."""
        return 1 + sum(self.accepted) / self.passes if self.passes else 1.0


class CallStream(ABC):
    """The tokens of the running call, or of the last call if none runs."""

    @abstractmethod
    def _stream(self, name: str, *arguments: Any) -> Any:
        """Calls the library's function `name` for this stream."""

    @property
    def copied(self) -> int:
        """Positions that the running or last call copied from another call. Valid once the call has drawn a token."""
        return 0

    def begin(self) -> int:
        """Discards the last call's tokens and a pending cancellation. Required before a call whose tokens `wait` is to
        report. Returns the number of the call, which is above 0 if other calls can copy from it.
        """
        return self._stream("begin")

    def wait(self, have: int, timeout_ms: int = 50) -> int:
        """Waits until the running call has drawn more than `have` tokens, has ended, or the timeout has passed. Returns
        the number of tokens drawn. Releases the GIL.
        """
        return self._stream("wait", have, timeout_ms)

    @property
    def finished(self) -> bool:
        """Whether the call has ended."""
        return bool(self._stream("finished"))

    def cancel(self) -> None:
        """Ends the running call, or the call that `begin` has announced, before its next token."""
        self._stream("cancel")

    def drawn(self, first: int, count: int, top: int = 0) -> EmittedTokens:
        """Tokens first .. first + count - 1 of the call, after `wait` has reported them. top: as in the call."""
        arrays = (np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.int64))
        ranked = (np.empty((count, top), np.int32), np.empty((count, top), np.float32))
        self._stream("drawn", first, count, top, *(array.ctypes.data for array in (*arrays, *ranked)))
        return EmittedTokens(arrays[0], arrays[1], arrays[2] * 1e-9, *ranked, *self._origins(first, count))

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`drafted` and `others` of these tokens."""
        return np.zeros(count, bool), np.zeros(count, np.uint8)


class DecodeSession(CallStream):
    """A model in the library, opened with its plan. Subclasses open it, pack weights and name the ops of a trace."""

    plan: Plan
    target: str
    """Name of the custom call."""
    ops: tuple[str, ...]
    """Names of the ops in a trace, by their number in a span."""
    worker: str
    """Name in a trace for a unit that computes ops, such as a worker thread or a CTA."""
    together: int = 1
    """Slots of one call. If there are several, they are the leading axis of inputs, outputs and `seen`, and the second
    axis of the caches.
    """
    close: "weakref.finalize[..., Any]"
    """Frees the session's memory; also when the session is deleted."""
    _prefix: str
    """Prefix of the library's functions for this platform, after `laneformer_`."""

    def _open(self, plan: Plan, timeout_ms: int, *arguments) -> None:
        """Opens the model in the library. arguments: those of the library's function after the plan's words and floats.
        Raises NativeError.
        """
        self.plan, self.timeout_ms, self._lib = plan, timeout_ms, library()
        self._missing = dict.fromkeys(plan.weights)  # paths, in order
        try:
            words, floats = plan.words, plan.floats
        except ValueError as error:
            raise NativeError(str(error)) from None
        encoded = words.ctypes.data, len(words), floats.ctypes.data, len(floats)
        self._id = call(f"{self._prefix}open", *encoded, *arguments)
        self.close = weakref.finalize(self, self._function("close"), self._id)

    def _function(self, name: str):
        return getattr(self._lib, f"laneformer_{self._prefix}{name}")

    @property
    def id(self) -> int:
        """The session's number in the library. Raises NativeError if the session was closed."""
        if not self.close.alive:
            raise NativeError("this decode session was closed: open another one")
        return self._id

    @property
    def operands(self) -> tuple:
        """Arrays that the custom call reads besides its inputs and state. Raises NativeError while weights are
        missing.
        """
        self._require_weights()
        return ()

    @property
    def of_lanes(self) -> tuple[bool, ...]:
        """For each operand, whether its first axis is the lanes."""
        return ()

    @property
    def failure(self) -> str | None:
        """Why the last call failed, if XLA could not report it; None if it did not fail."""
        return None

    def _check_weight(self, path: str, shape: tuple[int, ...]) -> None:
        """Raises NativeError unless the model has a weight of this path and shape."""
        if path not in self.plan.weights:
            raise NativeError(f"the model has no weight called {path}")
        if shape != (wanted := self.plan.shape_of(path)):
            raise NativeError(f"weight {path} has the shape {shape}, the model needs {wanted}")

    def _require_weights(self) -> None:
        if self._missing:
            raise NativeError(
                f"{len(self._missing)} weights have not been packed, among them {next(iter(self._missing))}: call"
                " session.pack for each"
            )

    @abstractmethod
    def inputs(self, request: Request, /, *, most_tokens: int = 0, most_stops: int = 0) -> Any:
        """The arrays in which a call with one slot gets its request. Calls with arrays of the same shapes share one
        program; most_tokens, most_stops: numbers of prompt and stop tokens for which they have room at least.
        """

    @abstractmethod
    def pack(self, path: str, weight: Any) -> None:
        """Packs a weight whose path and shape are those of the table in laneformer/weights.py."""

    @property
    @abstractmethod
    def bf12_weights(self) -> Bf12Weights:
        """Counts of the weights that are packed in 12 bits."""

    @property
    @abstractmethod
    def quantized_weights(self) -> dict[str, Any]:
        """The formats of the quantized matrices, and the number of their weights and their bytes that one token reads;
        {} if nothing is quantized.
        """

    @abstractmethod
    def read_pass(self) -> float:
        """Seconds in which the workers read all weights of one token without computing: the lower bound of decoding."""

    @abstractmethod
    def trace(self, most: int, /) -> None:
        """Records the spans of each worker from now on, at most `most`; 0 stops recording."""

    @abstractmethod
    def spans(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number and the recorded spans of each worker; the spans are an array of SPAN."""

    @property
    def slots(self) -> tuple[CallStream, ...]:
        """The session's slots by number. Each runs one call at a time, while other slots run theirs."""
        return (self,)

    def _stream(self, name: str, *arguments: Any) -> Any:
        return self._function(name)(self.id, *arguments)
