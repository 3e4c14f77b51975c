"""The slots of a GPU session's calls: the tokens of a request, the texts of its drafts, and counts of the drafts."""

import weakref
from abc import abstractmethod
from typing import Any

import numpy as np

from laneformer.custom_calls.gpu.layout import MOST_ROWS
from laneformer.custom_calls.library import call, library
from laneformer.custom_calls.request import Request
from laneformer.custom_calls.session import CallStream, DecodeSession, Drafting

COUNTS = 2 * MOST_ROWS + 1  # numbers in DraftCounts of gpu/kernel/params.h


class SlotStream(CallStream):
    """One of the slots, or the only slot, of a session's calls."""

    @property
    @abstractmethod
    def _address(self) -> tuple[int, int]:
        """The session's number in the library, and the slot's number in the session."""

    @property
    @abstractmethod
    def drafting(self) -> Drafting | None:
        """Counts of the drafts, after a call has ended; None if the kernel makes no drafts."""

    def _stream(self, name: str, *arguments: Any) -> Any:
        return getattr(library(), f"laneformer_gpu_{name}")(*self._address, *arguments)

    def begin(self) -> int:
        call("gpu_begin", *self._address)
        return 0

    def set_texts(self, request: Request) -> None:
        """Sets the texts of the slot's next call: `before`, `forced`, `given` and `most_drafts` of its request. Needs a
        kernel with drafts. Raises NativeError for tokens outside the vocabulary.
        """
        texts = [np.ascontiguousarray(text, np.int32) for text in (request.before, request.forced, request.given)]
        arrays = (word for text in texts for word in (text.ctypes.data, text.size))
        most = MOST_ROWS if request.most_drafts is None else min(request.most_drafts, MOST_ROWS)
        call("gpu_give_texts", *self._address, *arrays, most)

    def _draft_counts(self) -> np.ndarray:
        """The draft counts of the last call, int64 [COUNTS]."""
        counts = np.zeros(COUNTS, np.int64)
        self._stream("drafting", counts.ctypes.data)
        return counts


def drafting_of(counts: np.ndarray, most: int) -> Drafting:
    """Draft counts as a Drafting. counts: int64 [COUNTS], as from `SlotStream._draft_counts`. most: rows of a pass."""
    rows, accepted, others = np.split(counts, [MOST_ROWS, 2 * MOST_ROWS - 1])
    return Drafting(tuple(rows[:most].tolist()), tuple(accepted[: most - 1].tolist()), *others.tolist())


class GpuSlot(SlotStream):
    """A slot of a session whose calls have several slots. It streams the tokens of its request since `begin`, over all
    the calls that run the request. Call `join` before each of these calls, and `leave` after it.
    """

    def __init__(self, session: DecodeSession, number: int, drafting_rows: int):
        """drafting_rows: rows of a pass if passes may have drafts, otherwise 0."""
        self._session, self.number, self._drafting_rows = weakref.proxy(session), number, drafting_rows
        self._forget()

    def _forget(self) -> None:
        self._others: list[tuple[int, int]] = []
        self._counts = np.zeros(COUNTS, np.int64)
        self.cancelled = False
        self.shared_passes = 0
        """Number of passes since `begin` that had rows of other slots."""

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
        """Announces a call with this request and `others` more. The request has drawn `drawn` tokens before."""
        self._others.append((drawn, others))

    def leave(self, passes: int) -> None:
        """Records that the announced call has ended after `passes` passes."""
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
