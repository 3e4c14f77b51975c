"""Rows of sequence_length targets from a split of documents: end to end, or whole documents fitted together.

A row has s + 1 tokens, s = sequence_length, because the targets are the inputs shifted by one. A packing has `rows` of
them per epoch; `row(index)` reads one, and `row_keys` lists its arrays:

    "ids"       int32 [s + 1]
    "weights"   float32 [s]       1 where the target ids[1:] counts, else 0
    "segments"  int32 [s + 1]     number of the document within the row; attention must not cross it

The first token of a document counts as a target only if documents are packed end to end and attend to each other: it is
then predicted from the end mark of the previous document.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from laneformer.errors import InputError
from laneformer.train.config import DataConfig
from laneformer.train.data.store import TokenStore

Rows = dict[str, np.ndarray]
BLOCK_DOCUMENTS = 1 << 18  # documents packed at a time, which bounds the memory of packing


def row_keys(data: DataConfig, stores: Sequence[TokenStore], split: str) -> tuple[str, ...]:
    """Names of the arrays in a row of these stores: "weights" only if some targets do not count, "segments" only if
    attention must not cross documents.
    """
    weights = (
        data.packing == "best_fit"
        or not data.attend_across_documents
        or any(store.has_loss_mask(split) for store in stores)
    )
    return ("ids", *(("weights",) if weights else ()), *(() if data.attend_across_documents else ("segments",)))


class Concat:
    """Documents end to end, cut into rows: row i is tokens [i s, (i + 1) s] of the split.

    Each token is a target once per epoch, except the first one and a tail shorter than a row. Raises InputError for a
    split without a single row.
    """

    def __init__(self, store: TokenStore, split: str, data: DataConfig, keys: tuple[str, ...]):
        self.store, self.split, self.length, self.keys = store, split, data.sequence_length, keys
        self.rows = (store.tokens(split) - 1) // self.length
        if self.rows < 1:
            raise InputError(
                f"split {split!r} of {store.path} has {store.tokens(split)} tokens, fewer than a row of sequence_length"
                f" {self.length}; tokenize more text, or lower data.sequence_length"
            )

    def row(self, index: int) -> Rows:
        start = index * self.length
        row = {"ids": self.store.read(self.split, start, self.length + 1)}
        counts = np.ones(self.length, bool)
        if self.store.has_loss_mask(self.split):
            counts = self.store.read_loss(self.split, start + 1, self.length)
        if "segments" in self.keys:
            # Where each document begins, except the first of the row.
            begins = self.store.document_ends(self.split, start, start + self.length) - start
            counts[begins - 1] = False
            border = np.zeros(self.length + 1, np.int32)
            border[begins] = 1
            row["segments"] = np.cumsum(border, dtype=np.int32)
        if "weights" in self.keys:
            row["weights"] = counts.astype(np.float32)
        return row


class BestFit:
    """Rows of whole documents, fitted together and padded with the end mark (Ding et al., Fewer Truncations, arXiv
    2404.10830).

    A document longer than a row is cut into pieces of its tokens [i s, (i + 1) s], which overlap by one token; all but
    the last fill a row. So every token of a document except its first is a target exactly once per epoch.
    Best-fit-decreasing runs at construction, over the pieces of BLOCK_DOCUMENTS consecutive documents at a time, and
    keeps 12 bytes per piece and 8 per row. Raises InputError for a split with nothing to predict.
    """

    def __init__(self, store: TokenStore, split: str, data: DataConfig, keys: tuple[str, ...]):
        self.store, self.split, self.length, self.keys = store, split, data.sequence_length, keys
        ends = store.document_ends(split)
        blocks = [self._pack(ends, first) for first in range(0, len(ends), BLOCK_DOCUMENTS)]
        self.starts, self.lengths, pieces = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        self.first = np.concatenate([[0], np.cumsum(pieces)])  # piece that begins each row
        self.rows = len(pieces)
        if self.rows < 1:
            raise InputError(
                f"split {split!r} of {store.path} has no document of two tokens or more; tokenize more text"
            )

    def row(self, index: int) -> Rows:
        row = {
            "ids": np.full(self.length + 1, self.store.manifest.eos_id, np.int32),
            "weights": np.zeros(self.length, np.float32),
        }
        segments = np.empty(self.length + 1, np.int32)
        masked, at = self.store.has_loss_mask(self.split), 0
        pieces = slice(self.first[index], self.first[index + 1])
        for number, (start, length) in enumerate(
            zip(self.starts[pieces].tolist(), self.lengths[pieces].tolist(), strict=True)
        ):
            row["ids"][at : at + length] = self.store.read(self.split, start, length)
            row["weights"][at : at + length - 1] = (
                self.store.read_loss(self.split, start + 1, length - 1) if masked else 1
            )
            segments[at : at + length] = number
            at += length
        segments[at:] = number + 1  # padding
        return row | {"segments": segments} if "segments" in self.keys else row

    def _pack(self, ends: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start and length of the pieces of one block, row by row, and the number of pieces in each row."""
        ends = ends[max(first - 1, 0) : first + BLOCK_DOCUMENTS]
        begins, ends = (ends[:-1], ends[1:]) if first else (np.concatenate([[0], ends[:-1]]), ends)
        pieces = -(-(ends - begins - 1) // self.length)  # per document; 0 for a document of one token
        skipped = np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(begins, pieces) + (np.arange(pieces.sum()) - skipped) * self.length
        lengths = np.minimum(np.repeat(ends, pieces) - starts, self.length + 1).astype(np.int32)
        rows = best_fit_decreasing(lengths, self.length + 1)
        order = np.argsort(rows, kind="stable")
        return starts[order], lengths[order], np.bincount(rows)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Packs pieces of `lengths[n]`, each in 1..capacity, into rows of `capacity` -> int64[n], the row of each piece.

    From the longest to the shortest, each piece goes to the row with the least room that still fits it, or to a new
    row. Pieces of one length are placed together, and rows with the same history are kept as a run, so that the work
    grows with the number of different lengths and runs, not with the number of pieces.
    """
    sizes, counts = np.unique(-lengths, return_counts=True)
    rows, runs = 0, []  # (first row, rows, pieces in each), in the order of the pieces
    # (room, first row, rows) of rows with room for this length, the least room last.
    open_runs: list[tuple[int, int, int]] = []
    narrow: list[tuple[int, int, int]] = []  # the others: a heap of (-room, first row, rows)
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        while narrow and -narrow[0][0] >= size:
            room, first, number = heapq.heappop(narrow)
            open_runs.append((-room, first, number))
        left = count
        while left:
            if open_runs:
                room, first, number = open_runs.pop()
            else:
                room, first, number = capacity, rows, -(-left // (capacity // size))
                rows += number
            each = room // size  # pieces per row: the row stays the one with the least room until it is full
            full = min(number, left // each)
            last = left - full * each if full < number else 0  # fewer than `each`, for one more row
            left -= full * each + last
            if full:
                runs.append((first, full, each))
                heapq.heappush(narrow, (each * size - room, first, full))
            untouched = number - full - (last > 0)
            if untouched:
                open_runs.append((room, first + number - untouched, untouched))
            if last:
                runs.append((first + full, 1, last))
                open_runs.append((room - last * size, first + full, 1))
    firsts, numbers, fills = np.array(runs, np.int64).reshape(-1, 3).T
    pieces = numbers * fills
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    out = np.empty(len(lengths), np.int64)
    out[np.argsort(-lengths, kind="stable")] = np.repeat(firsts, pieces) + within // np.repeat(fills, pieces)
    return out
