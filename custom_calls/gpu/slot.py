"""The slots of a GPU session's calls: what a request has drawn, what it drafts from, and what drafts were worth."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from custom_calls.gpu.layout import MOST_ROWS
from custom_calls.library import call, library
from custom_calls.session import CallStream, DecodeSession, Drafting

COUNTS = 2 * MOST_ROWS + 1  # of DraftCounts in gpu/kernel/params.h


class SlotStream(CallStream):
    """A slot of a session's calls, perhaps the only one."""

    @property
    @abstractmethod
    def _address(self) -> tuple[int, int]:
        """The session's number in the library, and the slot's in the session."""

    @property
    @abstractmethod
    def drafting(self) -> Drafting | None:
        """What drafts were worth, once a call has ended; None where the kernel makes none."""

    def _stream(self, name: str, *arguments: Any) -> Any:
        return getattr(library(), f"laneformer_gpu_{name}")(*self._address, *arguments)

    def begin(self) -> int:
        call("gpu_begin", *self._address)
        return 0

    def give_texts(
        self,
        *,
        before: Sequence[int] | np.ndarray = (),
        forced: Sequence[int] = (),
        given: Sequence[int] = (),
        most: int | None = None,
    ) -> None:
        """Texts of the slot's next call, as those of a CPU session's (cpu/session.py). Needs a kernel with drafts.
        Raises NativeError for tokens outside the vocabulary.
        """
        texts = [np.ascontiguousarray(text, np.int32) for text in (before, forced, given)]
        arrays = (word for text in texts for word in (text.ctypes.data, text.size))
        call("gpu_give_texts", *self._address, *arrays, MOST_ROWS if most is None else min(most, MOST_ROWS))

    def _draft_counts(self) -> np.ndarray:
        """Of the last call, int64 [COUNTS]."""
        counts = np.zeros(COUNTS, np.int64)
        self._stream("drafting", counts.ctypes.data)
        return counts


def drafting_of(counts: np.ndarray, most: int) -> Drafting:
    """counts: of `SlotStream`; most: rows of a pass."""
    rows, accepted, others = np.split(counts, [MOST_ROWS, 2 * MOST_ROWS - 1])
    return Drafting(tuple(rows[:most].tolist()), tuple(accepted[: most - 1].tolist()), *others.tolist())


class GpuSlot(SlotStream):
    """A slot of a session whose calls have several: what its request has drawn since `begin`, in all the calls that
    have it. Before each of these `join`, after it `leave`.
    """

    def __init__(self, session: DecodeSession, number: int, drafting_rows: int):
        """drafting_rows: rows of a pass where passes may have drafts, or 0."""
        self._session, self.number, self._drafting_rows = weakref.proxy(session), number, drafting_rows
        self._forget()

    def _forget(self) -> None:
        self._others: list[tuple[int, int]] = []
        self._counts = np.zeros(COUNTS, np.int64)
        self.cancelled = False
        self.shared_passes = 0
        """Passes since `begin` that had rows of other slots."""

    @property
    def _address(self) -> tuple[int, int]:
        return self._session.id, self.number

    def begin(self) -> int:
        self._forget()
        return super().begin()

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
        self._counts += self._draft_counts()

    @property
    def drafting(self) -> Drafting | None:
        return drafting_of(self._counts, self._drafting_rows) if self._drafting_rows else None

    def _origins(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        others = np.zeros(count, np.uint8)
        for begin, beside in self._others:
            others[max(0, begin - first) :] = beside
        return np.zeros(count, bool), others
