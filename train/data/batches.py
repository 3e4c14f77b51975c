"""The data order: which rows make up the batch of a step, as a pure function of seed and step.

The sources take turns in exact shares (train/data/mixture.py). Each has n rows (train/data/packing.py), which come in
the order permute(0..n-1, seed, e) in epoch e, and the epochs follow each other without a gap; step s takes rows [s *
batch, (s + 1) * batch) of the whole, so that a batch may straddle epochs. There is no state to save: resuming, another
number of hosts, or looking at what step 123456 saw are all `batch_at(step)`.
"""

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np

from laneformer.errors import ConfigError, InputError
from train.config import DataConfig
from train.data.mixture import BLOCK, Mixture
from train.data.packing import BestFit, Concat, Rows, row_keys
from train.data.permutation import permute
from train.data.store import TokenStore

PACKINGS = {"concat": Concat, "best_fit": BestFit}
T = TypeVar("T")


def tagged(stores: Sequence[TokenStore]) -> dict[str, TokenStore]:
    """The stores by the last name of their folder. ConfigError for equal names, InputError for stores of different
    tokenizers.
    """
    found: dict[str, TokenStore] = {}
    for store in stores:
        tag = Path(os.path.abspath(store.path)).name
        if tag in found:
            raise ConfigError(
                f"{found[tag].path} and {store.path} would both be called {tag!r}: name a folder once (those of"
                " data.path are validated anyway), or rename one"
            )
        found[tag] = store
        if store.manifest.tokenizer_sha256 != stores[0].manifest.tokenizer_sha256:
            raise InputError(
                f"{stores[0].path} and {store.path} were tokenized with different tokenizers: tokenize one of them"
                " again with --tokenizer and the tokenizer.json of the other"
            )
    return found


class Batches:
    """The training batches of one phase, from the split `train` of one or several stores, each in an endless,
    reshuffled row of epochs.

    stores: those of data.path, in its order. seed: decides the order. keys: what a batch holds, the same for all steps.
    Raises InputError for a store without a single row, ConfigError for a share of less than one row in a block of the
    mixture.
    """

    def __init__(self, data: DataConfig, stores: Sequence[TokenStore], seed: int):
        self.tags, self.batch_size, self.length, self.seed = (
            tuple(tagged(stores)),
            data.batch_size,
            data.sequence_length,
            seed,
        )
        self.keys = row_keys(data, stores, "train")
        self.sources = [PACKINGS[data.packing](store, "train", data, self.keys) for store in stores]
        self.mixture = Mixture(data.weights or [store.tokens("train") for store in stores], seed)
        for store, count in zip(stores, self.mixture.counts, strict=True):
            if count < 1:
                raise ConfigError(
                    f"{store.path} would have less than 1 row in {BLOCK}: leave it out, or give it more with"
                    " data.weights"
                )

    def rows_at(self, step: int, rows: slice = slice(None)) -> list[tuple[int, int]]:
        """Source and row of it, for each of the `rows` of the batch of `step`."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        wanted = collections.defaultdict(list)  # (source, epoch) -> [(place in the batch, row before shuffling)]
        chosen = range(self.batch_size)[rows]
        for place, row in enumerate(chosen):
            source, position = self.mixture.place(
                step * self.batch_size + row
            )  # Python ints: no overflow however long the run
            epoch, offset = divmod(position, self.sources[source].rows)
            wanted[source, epoch].append((place, offset))
        out: list[tuple[int, int]] = [(0, 0)] * len(chosen)
        for (source, epoch), found in wanted.items():
            places, offsets = zip(*found, strict=True)
            for place, row in zip(
                places, permute(np.array(offsets), self.sources[source].rows, self.seed, epoch).tolist(), strict=True
            ):
                out[place] = source, row
        return out

    def batch_at(self, step: int, rows: slice = slice(None)) -> Rows:
        """The batch of `step`, or those `rows` of it that a host feeds; reads nothing but these rows.

        "ids" int32 [rows, s + 1], "weights" float32 [rows, s] of the targets, "segments" int32 [rows, s + 1]: see
        train/data/packing.py.
        """
        chosen = self.rows_at(step, rows)
        return stacked([self.sources[source].row(row) for source, row in chosen], self.keys, self.length)

    def epochs_at(self, step: int) -> dict[str, float]:
        """Passes over each source in the steps before `step`, by tag."""
        taken = self.mixture.rows_before(step * self.batch_size)
        return {tag: rows / source.rows for tag, rows, source in zip(self.tags, taken, self.sources, strict=True)}


def stacked(rows: Sequence[Rows], keys: Sequence[str], length: int) -> Rows:
    """Single rows as one batch; also none of them."""
    shapes = {
        "ids": ((0, length + 1), np.int32),
        "weights": ((0, length), np.float32),
        "segments": ((0, length + 1), np.int32),
    }
    return {key: np.stack([row[key] for row in rows]) if rows else np.empty(*shapes[key]) for key in keys}


@dataclass(frozen=True)
class HeldOut:
    """Held-out batches of one store.

    bits per byte = loss in nats per token / ln 2 * tokens_per_byte; None where a loss mask decides what counts, which
    is then not the text.
    """

    batches: list[Rows]
    tokens_per_byte: float | None


def validation_sets(data: DataConfig, stores: Sequence[TokenStore], extra: Sequence[TokenStore]) -> dict[str, HeldOut]:
    """At most data.validation_batches full batches of the split `validation` of each store, by tag; no row twice.

    stores: those of data.path, left out where they have no such split; extra: those of data.validation_path, where that
    is an InputError. The rows are spread evenly over the split in file order, whatever the seed: validation losses
    compare between runs. InputError for a split smaller than a batch, or with a loss mask of which nothing is left.
    """
    if data.validation_batches == 0:
        return {}
    return {
        tag: _held_out(data, store)
        for tag, store in tagged([*stores, *extra]).items()
        if store in extra or "validation" in store.splits
    }


def _held_out(data: DataConfig, store: TokenStore) -> HeldOut:
    keys = row_keys(data, [store], "validation")
    source = PACKINGS[data.packing](store, "validation", data, keys)
    count = min(data.validation_batches, source.rows // data.batch_size)
    if count < 1:
        raise InputError(
            f"split 'validation' of {store.path} has {source.rows} rows of sequence_length {data.sequence_length}, a"
            f" validation batch takes {data.batch_size}: lower data.batch_size to at most {source.rows}, tokenize with"
            " a larger --validation-fraction, or go without (--data.validation-batches 0)"
        )
    chosen = (np.arange(count * data.batch_size) * source.rows // (count * data.batch_size)).reshape(count, -1)
    batches = [stacked([source.row(row) for row in batch.tolist()], keys, data.sequence_length) for batch in chosen]
    if "weights" in keys and not any(batch["weights"].any() for batch in batches):
        raise InputError(
            f"no token of the validation batches of {store.path} counts: its loss mask leaves nothing to measure; give "
            "another folder, or go without (--data.validation-batches 0)"
        )
    masked = store.has_loss_mask("validation")
    return HeldOut(batches, None if masked else store.tokens("validation") / store.text_bytes("validation"))


class Prefetch(Generic[T]):
    """Iterates over (step, make(step)) for `steps`, made ahead in one background thread, at most `depth` at a time.

        with Prefetch(batches.batch_at, itertools.count(first_step)) as stream:
            for step, batch in stream: ...

    What `make` raises comes out of `next` at its step, and ends the iteration. `close` (or leaving the `with`) drops
    what is queued, waits for the batch being made, and ends the thread; a forgotten one does not keep the program from
    exiting.
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
