"""Generations whose first tokens spell the end of the prompt (infer/text/healing.py): two requests to a backend.

The draws of the first request have masks, and it ends when the text is spelled. The second has none, so it makes drafts
and dispatches as any other. It reuses the keys and values of the first on backends that keep them.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from laneformer.custom_calls import Drafting
from laneformer.infer.engine.backend import Chunk, Chunks, Request, Starter
from laneformer.infer.engine.constraint import bits_of
from laneformer.infer.text.healing import Spelling


class Spelled:
    """The constraint of an answer that begins with a given text. It is complete when the text is spelled."""

    def __init__(self, spelling: Spelling, text: bytes, vocab_size: int):
        self._spelling, self._rest, self._vocab = spelling, text, vocab_size
        self.characters = len(text.decode())
        """Number of characters of the text."""
        self._known: dict[bytes, bool] = {}
        self.complete = False

    def mask(self) -> np.ndarray | None:
        """As `Constraint.mask`."""
        if not self._rest:
            self.complete = True
            return None
        return bits_of(self._spelling.allowed(self._rest, self._known), self._vocab)

    def __len__(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._vocab

    def accept(self, token: int) -> None:
        """Advances by a drawn token, which the last mask must have allowed."""
        self._rest = self._rest[len(self._spelling.text(token)) :]


class HealedBackend:
    """A backend for one request whose answer must begin with a text."""

    def __init__(self, backend: Starter, spelled: Spelled, announce: Callable[[Request], None]):
        """announce: called with each request before it starts."""
        self._backend, self._spelled, self._announce = backend, spelled, announce

    def start(self, request: Request) -> Chunks:
        """As `Backend.start`."""
        first = dataclasses.replace(request, constraint=self._spelled, draft_max=0)
        self._announce(first)
        return _Chunks(self._backend, self._spelled, self._announce, request, self._backend.start(first))


class _Chunks(Iterator[Chunk]):
    """The chunks of both requests."""

    def __init__(
        self, backend: Starter, spelled: Spelled, announce: Callable[[Request], None], request: Request, chunks: Chunks
    ):
        self._backend, self._spelled, self._announce, self._request = backend, spelled, announce, request
        self._chunks, self._cached = chunks, 0
        self._drawn: list[int] = []
        self._first: Chunks | None = chunks

    def __next__(self) -> Chunk:
        chunk = next(self._chunks, None)
        if chunk is None and self._first is not None and self._goes_on():
            self._first = None
            prompt = np.concatenate([self._request.prompt, np.asarray(self._drawn, np.int32)])
            left = self._request.limit - len(self._drawn)
            request = dataclasses.replace(self._request, prompt=prompt, limit=left)
            self._announce(request)
            self._chunks = self._backend.start(request)
            chunk = next(self._chunks, None)
        if chunk is None:
            raise StopIteration
        if self._first is not None:
            self._drawn += chunk.tokens
            self._cached = chunk.cached
        return chunk._replace(cached=self._cached)

    def _goes_on(self) -> bool:
        return (
            self._spelled.complete and len(self._drawn) < self._request.limit and not self._request.cancelled.is_set()
        )

    def close(self) -> None:
        """Ends the request that is running."""
        self._chunks.close()

    @property
    def drafting(self) -> Drafting | None:
        return getattr(self._chunks, "drafting", None)

    @property
    def shared_passes(self) -> int:
        return getattr(self._chunks, "shared_passes", 0)
