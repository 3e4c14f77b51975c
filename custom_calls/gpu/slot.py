"""A slot of a GPU session whose calls have several: the tokens of its request, from all the calls that have it."""

import weakref
from typing import Any

import numpy as np

from custom_calls.library import call
from custom_calls.session import CallStream, DecodeSession


class GpuSlot(CallStream):
    """What a request has drawn since `begin`. Before each call that it takes part in `join`, after it `leave`."""

    def __init__(self, session: DecodeSession, number: int):
        self._session, self.number = weakref.proxy(session), number
        self._others: list[tuple[int, int]] = []
        self.cancelled = False
        self.shared_passes = 0
        """Passes since `begin` that had rows of other slots."""

    def _stream(self, name: str, *arguments: Any) -> Any:
        return self._session._function(name)(self._session.id, self.number, *arguments)

    def begin(self) -> int:
        call("gpu_begin", self._session.id, self.number)
        self._others, self.cancelled, self.shared_passes = [], False, 0
        return 0

    def cancel(self) -> None:
        self.cancelled = True
        super().cancel()

    def join(self, drawn: int, others: int) -> None:
        """Before a call in which the request draws its tokens from number `drawn` on, beside `others` more."""
        self._others.append((drawn, others))

    def leave(self, passes: int) -> None:
        """After that call. passes: of the call."""
        if self._others[-1][1]:
            self.shared_passes += passes

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        others = np.zeros(count, np.uint8)
        for begin, beside in self._others:
            others[max(0, begin - first) :] = beside
        return np.zeros(count, bool), others
