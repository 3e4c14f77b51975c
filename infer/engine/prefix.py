"""Prefixes shared by requests: the tokens of a sequence and the caches that hold their keys and values.

A prompt that begins as a kept sequence does takes its keys and values and is computed from there; of a request that
still runs it has the backend copy them. This is exact where a position's results do not depend on what is computed with
it (docs/decode_kernel.md): the answer has the bits of a prompt that is computed from its first token. A recurrent state
is that after the whole sequence, so a model with one takes nothing but whole sequences that have ended.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from infer.engine.backend import Request, power_of_two
from laneformer.state import capacity_of

LEAST = 32  # tokens of a prefix that is worth taking; below, texts agree by chance


@dataclass(frozen=True, eq=False)
class Caches:
    """Of each layer what it keeps, as in laneformer/state.py, for one sequence."""

    layers: list[dict[str, jax.Array]]

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return capacity_of(self.layers)


class CallId(NamedTuple):
    """A call of the backend, where requests copy from others that run."""

    slot: int
    number: int


@dataclass(frozen=True, eq=False)
class Kept:
    """A sequence whose request has ended."""

    tokens: np.ndarray
    """int32 [n]: the token at each position that is filled, from the first one on; empty if nothing is to be shared."""
    salt: str
    key: str
    """See `Request.cache_key`."""
    caches: Caches


class Source(NamedTuple):
    """A call that still runs, and fills or has filled the first `count` positions of a prompt."""

    call: CallId
    count: int


@dataclass(eq=False)
class Lease:
    """Caches while a request uses them."""

    request: Request
    count: int
    """Positions of the prompt that are filled."""
    caches: Caches
    source: Source | None
    """Where more of them can be copied from."""
    call: CallId | None
    drawn: list[int] = field(default_factory=list)
    """Tokens of the answer so far; the backend adds them."""

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]: the tokens whose keys and values the call has computed, or will have before it draws the next."""
        return np.concatenate([self.request.prompt, np.array(self.drawn, np.int32)])[:-1]


def _common(request: Request, tokens: np.ndarray, salt: str, whole: bool = False) -> int:
    """Tokens that a sequence has in common with the start of a prompt, whose last token must be computed: its logits
    are needed. 0 if they are too few or not to be shared, and with `whole` if they are not all of the sequence.
    """
    if not request.cache_prompt or request.cache_salt != salt:
        return 0
    most = min(len(tokens), len(request.prompt) - 1)
    different = np.flatnonzero(tokens[:most] != request.prompt[:most])
    count = int(different[0]) if len(different) else most
    return count if count >= LEAST and not (whole and count < len(tokens)) else 0


class PrefixCache:
    """The caches of requests: `take` them, and `keep` or `drop` them once the request has ended. From any thread."""

    def __init__(self, make: Callable[[int], Caches], slots: int, parallel: int = 1, whole: bool = False):
        """make: new caches for a number of positions. slots: how many sequences to keep; with 0, only the memory of one
        is kept. parallel: requests that may run together; while fewer do, their memory serves as slots. whole: caches
        are those of whole sequences: they cannot be cut, nor copied while their request runs.
        """
        self._make, self.slots, self._whole = make, slots, whole
        self._most = max(slots, parallel)  # caches at any time, where requests leave them
        self._kept: list[Kept] = []  # the least recently used first
        self._leases: list[Lease] = []
        self._lock = threading.Lock()

    def take(self, request: Request, capacity: int, call: CallId | None = None) -> Lease:
        """Caches for at least `capacity` positions, with what is known of the prompt. call: the request's, if it can
        copy from others and they from it.
        """
        with self._lock:
            lease = Lease(request, *self._take(request, capacity, call is not None), call)
            self._leases.append(lease)
        return lease

    def _take(self, request: Request, capacity: int, copies: bool) -> tuple[int, Caches, Source | None]:
        counts = [
            (_common(request, kept.tokens, kept.salt, self._whole), kept.key == request.cache_key, n)
            for n, kept in enumerate(self._kept)
        ]
        count, _, at = max(counts, default=(0, False, 0))
        source = self._running(request) if copies and not self._whole else None
        if source is not None and source.count > count:
            return 0, self._unused(capacity), source
        return *(self._kept_prefix(at, count, capacity) if count else (0, self._unused(capacity))), None

    def _running(self, request: Request) -> Source | None:
        """The running call that has most in common with a prompt."""
        found = [
            Source(lease.call, _common(request, lease.tokens, lease.request.cache_salt))
            for lease in self._leases
            if self.slots and lease.call is not None and lease.request.cache_prompt
        ]
        best = max(found, key=lambda source: source.count, default=None)
        return best if best is not None and best.count else None

    def _kept_prefix(self, at: int, count: int, capacity: int) -> tuple[int, Caches]:
        source = self._kept[at]
        next_to_go = self._full and at == 0
        if count < len(source.tokens) / 2 and not next_to_go:  # another conversation, which may go on
            return count, copied(self._unused(capacity), source.caches, count)
        del self._kept[at]
        if source.caches.capacity >= capacity:
            return count, source.caches
        return count, copied(self._make(capacity), source.caches, count)

    def keep(self, lease: Lease, caches: Caches, tokens: np.ndarray) -> None:
        """Keeps caches after their request. tokens: int32 [n], of the positions that are filled."""
        request = lease.request
        with self._lock:
            self._leases.remove(lease)
            if self.slots and request.cache_prompt:
                self._kept.append(Kept(tokens, request.cache_salt, request.cache_key, caches))
            else:  # its memory goes to the next request
                self._kept.insert(0, Kept(tokens[:0], "", "", caches))

    def drop(self, lease: Lease) -> None:
        """After a request that failed, whose caches are lost."""
        with self._lock:
            self._leases.remove(lease)

    @property
    def _full(self) -> bool:
        return len(self._kept) + len(self._leases) >= self._most

    def _unused(self, capacity: int) -> Caches:
        """Caches with any content: those of the least recently used sequence if all slots are taken and they have this
        size, otherwise new ones.
        """
        if self._kept and (self._full or not len(self._kept[0].tokens)):
            caches = self._kept.pop(0).caches
            if caches.capacity == capacity:
                return caches
            del caches  # frees their memory first
        return self._make(capacity)


def copied(into: Caches, source: Caches, count: int) -> Caches:
    """`into`, which is used up, with at least the first `count` positions of `source`."""
    count = min(power_of_two(count), source.capacity, into.capacity)  # so that few programs are compiled
    return Caches(jax.tree.map(partial(_copy, count=count), into.layers, source.layers))


@partial(jax.jit, static_argnames="count", donate_argnums=0)
def _copy(into: jax.Array, source: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(into, source[:, :, :count], 0, axis=2)
