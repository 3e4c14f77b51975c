"""Prefixes shared by requests: the tokens of a sequence, and the caches with their keys and values.

A prompt that begins with the same tokens as a kept sequence reuses its keys and values, and only the rest is computed.
If the other request is still running, the backend copies its keys and values. Reuse is exact on backends where the
results of a position do not depend on the positions computed with it (docs/decode_kernel.md): the answer has the same
bits as if the prompt were computed from its first token. A recurrent state describes the whole sequence, so a model
with one reuses only whole sequences that have ended.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from laneformer.infer.engine.backend import Request, power_of_two
from laneformer.state import capacity_of

LEAST = 32  # tokens in the shortest prefix that is reused; shorter ones are equal by chance


@dataclass(frozen=True, eq=False)
class Caches:
    """The arrays that each layer keeps for one sequence, by name, as in laneformer/state.py."""

    layers: list[dict[str, jax.Array]]

    @property
    def capacity(self) -> int:
        """Number of positions that the caches have room for."""
        return capacity_of(self.layers)


class CallId(NamedTuple):
    """Identifies a call of a backend whose requests can copy from running ones."""

    slot: int
    number: int


@dataclass(frozen=True, eq=False)
class Kept:
    """A sequence whose request has ended."""

    tokens: np.ndarray
    """The tokens of the filled positions, int32 [n]; empty if they must not be shared."""
    salt: str
    key: str
    """See `Request.cache_key`."""
    caches: Caches


@dataclass(frozen=True)
class Source:
    """A running call that has filled, or will fill, the first `count` positions of a prompt."""

    call: CallId
    count: int


@dataclass(eq=False)
class Lease:
    """Caches that a request uses while it runs."""

    request: Request
    count: int
    """Number of positions of the prompt that are filled at the start."""
    source: Source | None
    """The running call that more positions can be copied from."""
    make: Callable[["Lease"], Caches]
    """Makes the caches, or copies them from `other`."""
    free: Caches | None
    """Caches of a sequence that has ended, with arbitrary content or with the filled positions; None to make them."""
    other: Kept | None
    """The sequence to copy the filled positions from."""
    place: int | None
    """Place at which `other` is kept again once it is copied; None to drop it."""
    call: CallId | None
    """The request's own call; None if others cannot copy from it."""
    drawn: list[int] = field(default_factory=list)
    """Tokens of the answer so far; the backend appends them."""
    made: Caches | None = None
    """The caches after the first read of `caches`."""

    @property
    def caches(self) -> Caches:
        """The caches. The first read may take long: large arrays are made, copied and compiled for."""
        if self.made is None:  # not functools.cached_property: in Python 3.11 others wait while it computes
            self.made = self.make(self)
        return self.made

    @property
    def tokens(self) -> np.ndarray:
        """The tokens whose keys and values the call computes before it draws its next token, int32 [n]."""
        return np.concatenate([self.request.prompt, np.array(self.drawn, np.int32)])[:-1]


def _common(request: Request, tokens: np.ndarray, salt: str, whole: bool = False) -> int:
    """Number of tokens at the start of the prompt that can be reused from a sequence.

    tokens, salt: of the sequence. The prompt's last token does not count: it must be computed, because its logits are
    needed. 0 if the common tokens are fewer than LEAST or must not be shared, and with `whole` if they are not the
    whole sequence.
    """
    if not request.cache_prompt or request.cache_salt != salt:
        return 0
    most = min(len(tokens), len(request.prompt) - 1)
    different = np.flatnonzero(tokens[:most] != request.prompt[:most])
    count = int(different[0]) if len(different) else most
    return count if count >= LEAST and not (whole and count < len(tokens)) else 0


class PrefixCache:
    """The caches of requests: `take` them, and `keep` or `drop` them when the request has ended. Any thread may call
    it.
    """

    def __init__(self, make: Callable[[int], Caches], slots: int, parallel: int = 1, whole: bool = False):
        """make: makes caches for a number of positions. slots: number of sequences to keep; with 0, only the memory of
        one is kept. parallel: number of requests that may run together; while fewer run, the memory of the others
        serves as slots. whole: caches describe whole sequences, so that they cannot be cut, nor copied while their
        request runs.
        """
        self._make, self.slots, self._whole = make, slots, whole
        self._most = max(slots, parallel)  # limit on the number of caches, kept and in use
        self._kept: list[Kept] = []  # the least recently used first
        self._leases: list[Lease] = []
        self._lock = threading.Lock()

    def take(self, request: Request, capacity: int, call: CallId | None = None) -> Lease:
        """Caches for at least `capacity` positions, with the start of the prompt filled as far as it can be reused.
        call: the request's call, if requests can copy from running ones.
        """
        with self._lock:
            count, at, source = self._longest(request, call is not None)
            other: Kept | None = None
            place: int | None = None
            if source is not None or not count:
                count, free = 0, self._unused(capacity)
            elif count < len(self._kept[at].tokens) / 2 and not (self._full and at == 0):
                # Another conversation, which may continue: keep it.
                other, free = self._kept[at], self._unused(capacity)
                place = self._kept.index(other)
                del self._kept[place]
            else:
                other, free = self._kept.pop(at), None
                if other.caches.capacity >= capacity:
                    free = other.caches
                    other = None
            make = partial(self._make_for, capacity=capacity)
            lease = Lease(request, count, source, make, free, other, place, call)
            self._leases.append(lease)
        return lease

    def _longest(self, request: Request, copies: bool) -> tuple[int, int, Source | None]:
        """The longest common start with a kept sequence, that sequence's place, and a running call with a longer one.
        copies: whether the request can copy from running calls.
        """
        counts = [
            (_common(request, kept.tokens, kept.salt, self._whole), kept.key == request.cache_key, n)
            for n, kept in enumerate(self._kept)
        ]
        count, _, at = max(counts, default=(0, False, 0))
        source = self._running(request) if copies and not self._whole else None
        return count, at, source if source is not None and source.count > count else None

    def _make_for(self, lease: Lease, capacity: int) -> Caches:
        """The caches of a lease, made without the lock: other requests do not wait for large arrays."""
        free, lease.free = lease.free, None
        caches = free or self._make(capacity)
        if lease.other is not None:
            caches = copied(caches, lease.other.caches, lease.count)
            self._give_back(lease)
        return caches

    def _give_back(self, lease: Lease) -> None:
        """Ends the copying of a lease from a sequence, which is kept again."""
        with self._lock:
            if lease.other is not None and lease.place is not None:
                self._kept.insert(min(lease.place, len(self._kept)), lease.other)
            lease.other = lease.place = None

    def _running(self, request: Request) -> Source | None:
        """The running call with the longest common start, if there is any to copy from."""
        found = [
            Source(lease.call, _common(request, lease.tokens, lease.request.cache_salt))
            for lease in self._leases
            if self.slots and lease.call is not None and lease.request.cache_prompt
        ]
        best = max(found, key=lambda source: source.count, default=None)
        return best if best is not None and best.count else None

    def keep(self, lease: Lease, caches: Caches, tokens: np.ndarray) -> None:
        """Keeps the caches of a request that has ended. tokens: tokens of the filled positions, int32 [n]."""
        request = lease.request
        with self._lock:
            self._leases.remove(lease)
            if self.slots and request.cache_prompt:
                self._kept.append(Kept(tokens, request.cache_salt, request.cache_key, caches))
            else:  # the next request reuses its memory only
                self._kept.insert(0, Kept(tokens[:0], "", "", caches))

    def drop(self, lease: Lease) -> None:
        """Ends the lease of a request that failed. Its caches are lost."""
        self._give_back(lease)
        with self._lock:
            self._leases.remove(lease)

    @property
    def _full(self) -> bool:
        lent = sum(lease.place is not None for lease in self._leases)
        return len(self._kept) + lent + len(self._leases) >= self._most

    def _unused(self, capacity: int) -> Caches | None:
        """Caches with arbitrary content. Drops the least recently used sequence if all slots are in use or it is not
        shared, and returns its caches if they have this capacity; otherwise None, to make new ones.
        """
        if self._kept and (self._full or not len(self._kept[0].tokens)):
            caches = self._kept.pop(0).caches
            if caches.capacity == capacity:
                return caches
        return None


def copied(into: Caches, source: Caches, count: int) -> Caches:
    """`into` with at least the first `count` positions of `source`. The arrays of `into` are donated."""
    count = min(power_of_two(count), source.capacity, into.capacity)  # a power of two, to compile few programs
    return Caches(jax.tree.map(partial(_copy, count=count), into.layers, source.layers))


@partial(jax.jit, static_argnames="count", donate_argnums=0)
def _copy(into: jax.Array, source: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(into, source[:, :, :count], 0, axis=2)
