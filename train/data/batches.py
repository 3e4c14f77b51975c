"""The data order: which rows make up the batch of a step, as a pure function of seed and step.

The sources alternate in exact shares (train/data/mixture.py). A source has n rows (train/data/packing.py), in the order
permute(0..n-1, seed, e) in epoch e, and epochs follow each other without a gap. Step s takes rows
[s * batch, (s + 1) * batch) of the whole sequence, so a batch may span two epochs. There is no state to save: a resumed
run, a run on another number of hosts, and an inspection of step 123456 all call `batch_at(step)`.
"""

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np

from laneformer.errors import ConfigError, InputError
from laneformer.train.config import DataConfig
from laneformer.train.data.mixture import BLOCK, Mixture
from laneformer.train.data.packing import BestFit, Concat, Rows, row_keys
from laneformer.train.data.permutation import permute
from laneformer.train.data.store import TokenStore

PACKINGS: dict[str, type[Concat] | type[BestFit]] = {"concat": Concat, "best_fit": BestFit}
T = TypeVar("T")


def tagged(stores: Sequence[TokenStore]) -> dict[str, TokenStore]:
    """Stores by the name of their folder. Raises ConfigError for equal names, InputError for different tokenizers."""
    found: dict[str, TokenStore] = {}
    for store in stores:
        tag = Path(os.path.abspath(store.path)).name
        if tag in found:
            raise ConfigError(
                f"{found[tag].path} and {store.path} have the same name {tag!r}; give each folder once (data.path is"
                " validated anyway), or rename one"
            )
        found[tag] = store
        if store.manifest.tokenizer_sha256 != stores[0].manifest.tokenizer_sha256:
            raise InputError(
                f"{stores[0].path} and {store.path} were tokenized with different tokenizers; tokenize one of them"
                " again with --tokenizer and the tokenizer.json of the other"
            )
    return found


class Batches:
    """The training batches of one phase, from the split `train` of one or several stores, reshuffled in every epoch.

    stores: the folders of data.path, in the same order. seed: seed of the order of rows. batch_of: the batch that a
    step reads, numbered in this order (default: its own). The attribute `keys` names the arrays of every batch. Raises
    InputError for a store without a single row, ConfigError for a share of less than one row in a block of the mixture.
    """

    def __init__(
        self,
        data: DataConfig,
        stores: Sequence[TokenStore],
        seed: int,
        batch_of: Callable[[int], int] = lambda step: step,
    ):
        self.batch_of = batch_of
        self.tags, self.seed = tuple(tagged(stores)), seed
        self.batch_size, self.length = data.batch_size, data.sequence_length
        self.keys = row_keys(data, stores, "train")
        self.sources = [PACKINGS[data.packing](store, "train", data, self.keys) for store in stores]
        self.mixture = Mixture(data.weights or [store.tokens("train") for store in stores], seed)
        for store, count in zip(stores, self.mixture.counts, strict=True):
            if count < 1:
                raise ConfigError(
                    f"{store.path} supplies less than 1 row in {BLOCK}; leave it out, or raise its share with"
                    " data.weights"
                )

    def rows_at(self, step: int, rows: slice = slice(None)) -> list[tuple[int, int]]:
        """(source, row in that source) for each of the chosen `rows` of the batch of `step`."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        step = self.batch_of(step)
        wanted = collections.defaultdict(list)  # (source, epoch) -> [(place in the batch, row before shuffling)]
        chosen = range(self.batch_size)[rows]
        for place, row in enumerate(chosen):
            source, position = self.mixture.place(step * self.batch_size + row)  # Python ints, which never overflow
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
        """The batch of `step`, or only the `rows` that a host needs; reads no others.

        "ids" int32 [rows, s + 1], "weights" float32 [rows, s] of the targets, "segments" int32 [rows, s + 1]: see
        train/data/packing.py.
        """
        chosen = self.rows_at(step, rows)
        return stacked([self.sources[source].row(row) for source, row in chosen], self.keys, self.length)

    def epochs_at(self, step: int) -> dict[str, float]:
        """Passes over each source before the batch of `step`, by tag."""
        taken = self.mixture.rows_before(self.batch_of(step) * self.batch_size)
        return {tag: rows / source.rows for tag, rows, source in zip(self.tags, taken, self.sources, strict=True)}


def stacked(rows: Sequence[Rows], keys: Sequence[str], length: int) -> Rows:
    """Stacks single rows, or none, into one batch."""
    shapes = {
        "ids": ((0, length + 1), np.int32),
        "weights": ((0, length), np.float32),
        "segments": ((0, length + 1), np.int32),
    }
    return {key: np.stack([row[key] for row in rows]) if rows else np.empty(*shapes[key]) for key in keys}


@dataclass(frozen=True)
class HeldOut:
    """Held-out batches of one store.

    bits per byte = loss in nats per token / ln 2 * tokens_per_byte. tokens_per_byte is None with a loss mask, because
    the loss then does not cover the whole text.
    """

    batches: list[Rows]
    tokens_per_byte: float | None


def validation_sets(data: DataConfig, stores: Sequence[TokenStore], extra: Sequence[TokenStore]) -> dict[str, HeldOut]:
    """At most data.validation_batches batches of the split `validation` of each store, by tag; no row counts twice.

    stores: the folders of data.path; those without this split are skipped. extra: the folders of data.validation_path,
    which must have the split. The rows are spread evenly over the split in file order and do not depend on the seed, so
    that validation losses of different runs are comparable. A split too small for its last batch fills it with rows of
    weight 0. Raises InputError if there is nothing to measure.
    """
    if data.validation_batches == 0:
        return {}
    return {
        tag: _held_out(data, store)
        for tag, store in tagged([*stores, *extra]).items()
        if store in extra or "validation" in store.splits
    }


def _held_out(data: DataConfig, store: TokenStore) -> HeldOut:
    if store.tokens("validation") <= data.sequence_length:  # less than a row: best_fit pads it
        data = replace(data, packing="best_fit")
    keys = row_keys(data, [store], "validation")
    source = PACKINGS[data.packing](store, "validation", data, keys)
    count = min(data.validation_batches, -(-source.rows // data.batch_size))
    wanted = count * data.batch_size
    used = min(wanted, source.rows)
    rows = [source.row(row) for row in (np.arange(used) * source.rows // used).tolist()]
    if used < wanted:
        ones = np.ones(data.sequence_length, np.float32)
        rows = [row | {"weights": row.get("weights", ones)} for row in rows]
        # Copies of rows, so that the statistics of the lanes, which have no weights, are those of the text.
        rows += [row | {"weights": 0 * ones} for row in itertools.islice(itertools.cycle(rows), wanted - used)]
        keys = tuple(dict.fromkeys((*keys, "weights")))
    batches = [
        stacked(rows[first : first + data.batch_size], keys, data.sequence_length)
        for first in range(0, wanted, data.batch_size)
    ]
    if "weights" in keys and not any(batch["weights"].any() for batch in batches):
        raise InputError(
            f"the loss mask of {store.path} excludes every token of the validation batches; choose another folder, or"
            " skip validation with --data.validation-batches 0"
        )
    masked = store.has_loss_mask("validation")
    return HeldOut(batches, None if masked else store.tokens("validation") / store.text_bytes("validation"))


class Prefetch(Generic[T]):
    """Iterates over (step, make(step)) for `steps`, computed ahead in one background thread, at most `depth` at a time.

        with Prefetch(batches.batch_at, itertools.count(first_step)) as stream:
            for step, batch in stream: ...

    An exception of `make` is raised by `next` at its step, and ends the iteration. `close` (or leaving the `with`)
    drops the queue, waits for the batch being made, and ends the thread. The program can exit without it.
    """

    def __init__(self, make: Callable[[int], T], steps: Iterable[int], depth: int = 2):
        if depth < 1:
            raise ConfigError(f"depth must be at least 1, got {depth}")
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
        """Ends the thread; further calls do nothing."""
        self._queue.clear()
        self._steps = iter(())
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        for step in itertools.islice(self._steps, 1):
            self._queue.append((step, self._executor.submit(self._make, step)))
