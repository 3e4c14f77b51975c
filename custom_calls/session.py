"""What decode sessions on every platform share: a model in the native library, and its running call."""

import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from custom_calls.library import NativeError, call, library
from custom_calls.plan import Plan
from laneformer.errors import CheckpointError


class EmittedTokens(NamedTuple):
    """Consecutive tokens of a call."""

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
    drafted: np.ndarray
    """Whether each was drafted before the model drew it, bool [n]; none where a session makes no drafts."""
    others: np.ndarray
    """Other calls with rows in the pass that drew it, uint8 [n]; 0 where a session runs one call at a time."""


class Bf12Weights(NamedTuple):
    """What is packed in 12 bits per weight (laneformer/formats.py)."""

    weights: int
    exceptions: int
    """Weights among them that a list of 32 bits each has as well."""
    matrices: int
    left: int
    """Matrices that stay in 16 bits, because more of their weights are exceptions than BF12_MOST_EXCEPTIONS."""


class Drafting(NamedTuple):
    """What drafts were worth in a call."""

    rows: tuple[int, ...]
    """Passes after the prompt's by their rows: of one, of two, ..."""
    accepted: tuple[int, ...]
    """Drafts that were right, by their place in a pass: first ones, second ones, ..."""
    predicted: int = 0
    """Drafts from a text beside the prompt."""
    predicted_accepted: int = 0
    """Of these, the right ones."""

    @property
    def passes(self) -> int:
        """Passes after the prompt's."""
        return sum(self.rows)

    @property
    def drafted(self) -> int:
        """Tokens that were drafted and checked."""
        return sum(place * count for place, count in enumerate(self.rows))

    @property
    def drafts(self) -> int:
        """Passes that checked any."""
        return sum(self.rows[1:])

    @property
    def tokens_per_pass(self) -> float:
        """Tokens after the first one that a pass gave."""
        return 1 + sum(self.accepted) / self.passes if self.passes else 1.0


class CallStream(ABC):
    """The tokens of a call while it runs, or of the last one."""

    @abstractmethod
    def _stream(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the library."""

    copied: int = 0
    """Positions that the running or last call has copied from another one; once it has drawn a token."""

    def begin(self) -> int:
        """Forgets the last call's tokens and a cancellation. Needed before a call whose tokens `wait` reports. The
        number of the call, above 0 where others can copy from it.
        """
        return self._stream("begin")

    def wait(self, have: int, timeout_ms: int = 50) -> int:
        """Tokens drawn by the running call, once there are more than `have`, it has ended, or after the timeout. The
        GIL is free.
        """
        return self._stream("wait", have, timeout_ms)

    @property
    def finished(self) -> bool:
        """Whether the call has ended."""
        return bool(self._stream("finished"))

    def cancel(self) -> None:
        """Ends the running call, or the one that `begin` has announced, before its next token."""
        self._stream("cancel")

    def drawn(self, first: int, count: int, top: int = 0) -> EmittedTokens:
        """Tokens first .. first + count - 1 of the call, once `wait` has reported them; top: as in the call."""
        arrays = (np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.int64))
        ranked = (np.empty((count, top), np.int32), np.empty((count, top), np.float32))
        self._stream("drawn", first, count, top, *(array.ctypes.data for array in (*arrays, *ranked)))
        return EmittedTokens(arrays[0], arrays[1], arrays[2] * 1e-9, *ranked, *self._origins(first, count))

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`drafted` and `others` of these tokens."""
        return np.zeros(count, bool), np.zeros(count, np.uint8)


class DecodeSession(CallStream):
    """One model in the library, by its plan. Subclasses open it, pack weights and name the ops of a trace."""

    plan: Plan
    target: str
    """Name of the custom call."""
    ops: tuple[str, ...]
    """Names of the ops in a trace, by their number in a span."""
    worker: str
    """What computes ops: a worker thread, a CTA."""
    of_lanes: tuple[bool, ...] = ()
    """For each operand whether its first axis is that of the lanes."""
    failure: str | None = None
    """What went wrong in the last call beyond what XLA could report; None if nothing did."""
    together: int = 1
    """Slots that one call has: from 2 on, a leading axis of inputs, outputs and `seen`, and the caches' second one."""
    _prefix: str

    def _open(self, plan: Plan, timeout_ms: int, *arguments) -> None:
        """arguments: of the library's function, after the plan's words and numbers. Raises NativeError."""
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
        """The session's number in the library. Raises NativeError once it was closed."""
        if not self.close.alive:
            raise NativeError("this decode session was closed: open another one")
        return self._id

    @property
    def operands(self) -> tuple:
        """Arrays that the custom call reads beside those of the call. Raises NativeError while weights are missing."""
        self._require_weights()
        return ()

    def _check_weight(self, path: str, shape: tuple[int, ...]) -> None:
        """Raises NativeError unless the model has a weight of this path and shape."""
        if path not in self.plan.weights:
            raise NativeError(f"the model has no weight called {path}")
        if shape != (wanted := self.plan.shape_of(path)):
            raise NativeError(f"weight {path} has the shape {shape}, the model's has {wanted}")

    def _checked_table(self, path: str, weight: np.ndarray) -> np.ndarray:
        """A table of experts as kernels have it, float32; any other weight as it is. Raises CheckpointError for experts
        that there are not.
        """
        if path not in self.plan.tables:
            return weight
        experts = self.plan.tables[path]
        wrong = np.argwhere((weight < 0) | (weight >= experts))
        if len(wrong):
            place = tuple(wrong[0])
            raise CheckpointError(
                f"weight {path} has expert {int(weight[place])} at [{', '.join(map(str, place))}], the model has 0 to"
                f" {experts - 1}: copy the checkpoint again, or use an earlier one"
            )
        return weight.astype(np.float32)

    def _require_weights(self) -> None:
        if self._missing:
            raise NativeError(
                f"{len(self._missing)} weights have not been packed, among them {next(iter(self._missing))}"
            )

    @property
    def slots(self) -> tuple[CallStream, ...]:
        """What can run a call while others run, by the number that a call gives: one stream of tokens each."""
        return (self,)

    def _stream(self, name: str, *arguments: Any) -> Any:
        return self._function(name)(self.id, *arguments)
