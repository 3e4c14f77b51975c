"""Prefixes kept from request to request: the tokens of a sequence and the caches that hold their keys and values.

A prompt that begins as a kept sequence does takes its keys and values and is computed from there. This is exact where
a position's results do not depend on what is computed with it (docs/decode_kernel.md): the answer has the bits of a
prompt that is computed from its first token.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True, eq=False)
class Kept:
    """A sequence whose request has ended."""

    tokens: np.ndarray
    """int32 [n]: the token at each position that is filled, from the first one on; empty if nothing is to be shared."""
    salt: str
    key: str
    """See `Request.cache_key`."""
    caches: Caches

    def common(self, request: Request) -> int:
        """Tokens that it has in common with the start of a prompt, whose last token must be computed: its logits are
        needed. 0 if they are too few or not to be shared.
        """
        if not request.cache_prompt or request.cache_salt != self.salt:
            return 0
        most = min(len(self.tokens), len(request.prompt) - 1)
        different = np.flatnonzero(self.tokens[:most] != request.prompt[:most])
        count = int(different[0]) if len(different) else most
        return count if count >= LEAST else 0


class PrefixCache:
    """The caches of the last requests: `take` them, and `keep` or `drop` them once the request has ended. From any
    thread.
    """

    def __init__(self, make: Callable[[int], Caches], slots: int, parallel: int = 1):
        """make: new caches for a number of positions. slots: how many sequences to keep; with 0, only the memory of one
        is kept. parallel: requests that may run together; while fewer do, their memory serves as slots.
        """
        self._make, self.slots = make, slots
        self._most = max(slots, parallel)  # caches at any time, where requests leave them
        self._kept: list[Kept] = []  # the least recently used first
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, request: Request, capacity: int) -> tuple[int, Caches]:
        """Positions of the prompt that are filled already, and caches for at least `capacity` positions with them."""
        with self._lock:
            found = self._take(request, capacity)
            self._taken += 1
        return found

    def _take(self, request: Request, capacity: int) -> tuple[int, Caches]:
        counts = [(kept.common(request), kept.key == request.cache_key, n) for n, kept in enumerate(self._kept)]
        count, _, at = max(counts, default=(0, False, 0))
        if not count:
            return 0, self._unused(capacity)
        source = self._kept[at]
        next_to_go = self._full and at == 0
        if count < len(source.tokens) / 2 and not next_to_go:  # another conversation, which may go on
            return count, _copied(self._unused(capacity), source.caches, count)
        del self._kept[at]
        if source.caches.capacity >= capacity:
            return count, source.caches
        return count, _copied(self._make(capacity), source.caches, count)

    def keep(self, request: Request, caches: Caches, tokens: np.ndarray) -> None:
        """Keeps caches after their request. tokens: int32 [n], of the positions that are filled."""
        with self._lock:
            self._taken -= 1
            if self.slots and request.cache_prompt:
                self._kept.append(Kept(tokens, request.cache_salt, request.cache_key, caches))
            else:  # its memory goes to the next request
                self._kept.insert(0, Kept(tokens[:0], "", "", caches))

    def drop(self) -> None:
        """After a request that failed, whose caches are lost."""
        with self._lock:
            self._taken -= 1

    @property
    def _full(self) -> bool:
        return len(self._kept) + self._taken >= self._most

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


def _copied(into: Caches, source: Caches, count: int) -> Caches:
    """`into`, which is used up, with at least the first `count` positions of `source`."""
    count = min(power_of_two(count), source.capacity, into.capacity)  # so that few programs are compiled
    return Caches(jax.tree.map(partial(_copy, count=count), into.layers, source.layers))


@partial(jax.jit, static_argnames="count", donate_argnums=0)
def _copy(into: jax.Array, source: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(into, source[:, :, :count], 0, axis=2)
