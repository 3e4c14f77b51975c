"""The data order: which tokens make up the batch of a step, as a pure function of seed and step.

A split of T tokens has n = (T - 1) // seq_len windows; window i is tokens [i * seq_len, (i + 1) * seq_len], one more than seq_len because
the targets are the inputs shifted by one, so each token is a target once (but the first, and a tail shorter than a window). The
windows of epoch e come in the order permute(0..n-1, seed, e), the epochs follow each other without a gap, and step s takes positions
[s * batch, (s + 1) * batch) of that endless row: a batch may straddle two epochs. There is no state to save: resuming, another number
of hosts, or looking at what step 123456 saw are all `batch_at(step)`.
"""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

import numpy as np

from laneformer.errors import ConfigError, InputError
from train.shards import TokenStore

ROUNDS = 8
MASK = (1 << 64) - 1
T = TypeVar("T")


def mix(x):
    """The splitmix64 finalizer (Steele, Lea & Flood 2014): a bijection of 64-bit words in which each input bit moves half the output bits.

    `x` is a uint64 array (multiplication wraps) or a Python int below 2^64.
    """
    wrap = (lambda y: y) if isinstance(x, np.ndarray) else (lambda y: y & MASK)
    x = wrap((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
    x = wrap((x ^ (x >> 27)) * 0x94D049BB133111EB)
    return x ^ (x >> 31)


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a keyed pseudo-random permutation of range(size) sends each `index[...]` -> int64[...].

    A Feistel network over a grid (Black & Rogaway, Ciphers with Arbitrary Finite Domains, 2002): with a = ceil(sqrt(size)) and
    b = ceil(size / a), an index is x = l * b + r, and each round adds to one half a hash of the other,

        even rounds: l = (l + F(r)) mod a        odd rounds: r = (r + F(l)) mod b        F(y) = mix(y ^ key[round])

    which can be undone, hence a bijection of range(a * b). Results in [size, a * b), fewer than a of them, go through again until they land
    inside ("cycle walking"), which keeps it a bijection of range(size). The keys are key[i] = mix(mix(mix(seed) ^ epoch) + i + 1).
    Written out here, on 64-bit integers alone, so that no library's version can change the order of a run.
    """
    a = math.isqrt(size - 1) + 1 if size > 1 else 1
    b = -(-size // a)
    base = mix(mix(seed & MASK) ^ (epoch & MASK))
    keys = np.array([mix((base + i + 1) & MASK) for i in range(ROUNDS)], np.uint64)
    out = np.array(index, np.uint64)
    if out.size and not out.max() < size:
        raise IndexError(f"index {out.max()} into a permutation of {size}")
    flat = out.reshape(-1)
    todo = np.arange(flat.size)
    while todo.size:
        l, r = np.divmod(flat[todo], np.uint64(b))
        for i in range(ROUNDS):
            if i % 2 == 0:
                l = (l + mix(r ^ keys[i]) % np.uint64(a)) % np.uint64(a)
            else:
                r = (r + mix(l ^ keys[i]) % np.uint64(b)) % np.uint64(b)
        flat[todo] = l * np.uint64(b) + r
        todo = todo[flat[todo] >= size]
    return out.astype(np.int64)


class Batches:
    """The batches of one split in an endless, reshuffled row of epochs; every window exactly once per epoch.

    `seq_len` is the model's input length, `batch_size` the global one, over all hosts and gradient accumulation.
    """

    def __init__(self, store: TokenStore, split: str, *, seq_len: int, batch_size: int, seed: int):
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}: give at least 1")
        self.store, self.split, self.seq_len, self.batch_size, self.seed = store, split, seq_len, batch_size, seed
        self.windows_per_epoch = (store.tokens(split) - 1) // seq_len
        if self.windows_per_epoch < 1:
            raise InputError(f"split {split!r} of {store.path} has {store.tokens(split)} tokens, a window of seq_len {seq_len} needs "
                             f"{seq_len + 1}: give more text or a shorter seq_len")

    def window(self, index: int) -> np.ndarray:
        """Window `index` in file order -> int32[seq_len + 1]."""
        return self.store.read(self.split, int(index) * self.seq_len, self.seq_len + 1)

    def windows_at(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """Which windows make up the batch of `step` -> int64[rows]."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        first = step * self.batch_size  # a Python int: no overflow however long the run
        epochs, offsets = [], []
        for row in range(self.batch_size)[rows]:
            epoch, offset = divmod(first + row, self.windows_per_epoch)
            epochs.append(epoch)
            offsets.append(offset)
        out = np.empty(len(offsets), np.int64)
        done = 0
        for epoch, same in itertools.groupby(epochs):
            count = len(list(same))
            out[done : done + count] = permute(np.array(offsets[done : done + count]), self.windows_per_epoch, self.seed, epoch)
            done += count
        return out

    def batch_at(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """The batch of `step`, or those `rows` of it that a host feeds -> int32[rows, seq_len + 1]. Reads nothing but these rows."""
        windows = self.windows_at(step, rows)
        return np.stack([self.window(index) for index in windows]) if len(windows) else np.empty((0, self.seq_len + 1), np.int32)

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) that the first row of `step` belongs to."""
        return step * self.batch_size // self.windows_per_epoch


def validation_batches(store: TokenStore, split: str, *, seq_len: int, batch_size: int, max_batches: int,
                       rows: slice = slice(None)) -> list[np.ndarray]:
    """A fixed list of at most `max_batches` full batches of int32[rows, seq_len + 1], no window twice.

    The windows are spread evenly over the split in file order, whatever the seed: validation losses compare between runs.
    """
    if max_batches < 1:
        raise ConfigError(f"max_batches is {max_batches}: give at least 1")
    source = Batches(store, split, seq_len=seq_len, batch_size=batch_size, seed=0)
    windows = source.windows_per_epoch
    count = min(max_batches, windows // batch_size)
    if count < 1:
        raise InputError(f"split {split!r} of {store.path} has {windows} windows of seq_len {seq_len}, a validation batch takes "
                         f"{batch_size}: lower the batch size to at most {windows}, tokenize with a larger --validation-fraction, "
                         "or go without (--data.validation-batches 0)")
    chosen = np.arange(count * batch_size) * windows // (count * batch_size)
    return [np.stack([source.window(index) for index in batch[rows]]) for batch in chosen.reshape(count, batch_size)]


class Prefetch(Generic[T]):
    """Iterates over (step, make(step)) for `steps`, made ahead in one background thread, at most `depth` at a time.

        with Prefetch(batches.batch_at, itertools.count(first_step)) as stream:
            for step, batch in stream: ...

    What `make` raises comes out of `next` at its step, and ends the iteration. `close` (or leaving the `with`) drops what is
    queued, waits for the batch being made, and ends the thread; a forgotten one does not keep the program from exiting.
    """

    def __init__(self, make: Callable[[int], T], steps: Iterable[int], depth: int = 2):
        if depth < 1:
            raise ConfigError(f"depth is {depth}: give at least 1")
        self._make, self._steps = make, iter(steps)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._queue: collections.deque[tuple[int, Future[T]]] = collections.deque()
        for _ in range(depth):
            self._submit()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        if not self._queue:
            self.close()
            raise StopIteration
        step, future = self._queue.popleft()
        self._submit()
        try:
            return step, future.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; more calls do nothing."""
        self._queue.clear()
        self._steps = iter(())
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        for step in itertools.islice(self._steps, 1):
            self._queue.append((step, self._executor.submit(self._make, step)))
