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


class Source(NamedTuple):
    """A running call that has filled, or will fill, the first `count` positions of a prompt."""

    call: CallId
    count: int


@dataclass(eq=False)
class Lease:
    """Caches that a request uses while it runs."""

    request: Request
    count: int
    """Number of positions of the prompt that are filled at the start."""
    caches: Caches
    source: Source | None
    """The running call that more positions can be copied from."""
    call: CallId | None
    """The request's own call; None if others cannot copy from it."""
    drawn: list[int] = field(default_factory=list)
    """Tokens of the answer so far; the backend appends them."""

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
        """The running call with the longest common start, if there is any to copy from."""
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
        if count < len(source.tokens) / 2 and not next_to_go:  # another conversation, which may continue: keep it
            return count, copied(self._unused(capacity), source.caches, count)
        del self._kept[at]
        if source.caches.capacity >= capacity:
            return count, source.caches
        return count, copied(self._make(capacity), source.caches, count)

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
        with self._lock:
            self._leases.remove(lease)

    @property
    def _full(self) -> bool:
        return len(self._kept) + len(self._leases) >= self._most

    def _unused(self, capacity: int) -> Caches:
        """Caches with arbitrary content. Drops the least recently used sequence if all slots are in use or it is not
        shared, and reuses its caches if they have this capacity. Otherwise makes new ones.
        """
        if self._kept and (self._full or not len(self._kept[0].tokens)):
            caches = self._kept.pop(0).caches
            if caches.capacity == capacity:
                return caches
            del caches  # free their memory before new caches are made
        return self._make(capacity)


def copied(into: Caches, source: Caches, count: int) -> Caches:
    """`into` with at least the first `count` positions of `source`. The arrays of `into` are donated."""
    count = min(power_of_two(count), source.capacity, into.capacity)  # a power of two, to compile few programs
    return Caches(jax.tree.map(partial(_copy, count=count), into.layers, source.layers))


@partial(jax.jit, static_argnames="count", donate_argnums=0)
def _copy(into: jax.Array, source: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(into, source[:, :, :count], 0, axis=2)
