"""Packing: every token is a target once, documents are separate, and best fit places pieces as a brute force does."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laneformer.train.data.packing
from laneformer.errors import InputError
from laneformer.train.config import DataConfig
from laneformer.train.data.packing import BestFit, Concat, best_fit_decreasing, row_keys
from laneformer.train.data.store import StoreWriter, TokenStore

EOS = 60000
DOCUMENTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def write(path, lengths, masks=None):
    """A store of documents. The id of every token is its position, except for end marks."""
    with StoreWriter(path, tokenizer=b"t", vocab_size=EOS + 1, eos_id=EOS, shard_tokens=37) as writer:
        at = 0
        for i, length in enumerate(lengths):
            writer.add("train", np.arange(at, at + length), length, loss=None if masks is None else masks[i])
            at += length + 1
        writer.finish({})
    return TokenStore.open(path)


def packed(kind, store, length, across=True):
    data = DataConfig(
        path=(Path("x"),),
        sequence_length=length,
        batch_size=1,
        attend_across_documents=across,
        packing="concat" if kind is Concat else "best_fit",
    )
    source = kind(store, "train", data, row_keys(data, [store], "train"))
    return source, [source.row(index) for index in range(source.rows)]


def naive_best_fit(lengths, capacity):
    """Sorted room left in the rows after placing one piece at a time."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in room if left >= length]
        if fitting:
            room.remove(min(fitting))
        room.append((min(fitting) if fitting else capacity) - length)
    return sorted(room)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 30).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))
    )
)
def test_best_fit_decreasing_matches_brute_force(case):
    capacity, lengths = case
    rows = best_fit_decreasing(np.array(lengths, np.int32), capacity)
    filled = np.bincount(rows, weights=lengths) if lengths else np.array([])
    assert rows.dtype == np.int64 and len(rows) == len(lengths)
    assert sorted(capacity - filled) == naive_best_fit(lengths, capacity)


def test_best_fit_decreasing_gives_known_rows():
    """If these values change, resumed runs read other rows."""
    assert best_fit_decreasing(np.array([3, 7, 2, 2, 5, 10, 1, 4, 4, 3]), 10).tolist() == [1, 1, 3, 4, 2, 0, 3, 2, 3, 3]


@settings(deadline=None, max_examples=40)
@given(DOCUMENTS, st.integers(1, 25), st.booleans(), st.data())
def test_concat_counts_every_token_once(tmp_path_factory, lengths, length, masked, data):
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths] if masked else None
    store = write(tmp_path_factory.mktemp("store"), lengths, masks)
    total = store.tokens("train")
    if total <= length:
        with pytest.raises(InputError, match=rf"has {total} tokens, .*sequence_length {length};"):
            packed(Concat, store, length)
        return
    first = np.cumsum([0, *(n + 1 for n in lengths)])  # first token of each document, and the end
    document_of = np.searchsorted(first, np.arange(total), side="right")
    counts = (
        np.concatenate([[*mask, mask[-1] if mask else False] for mask in masks]) if masked else np.ones(total, bool)
    )
    for across in (True, False):
        source, rows = packed(Concat, store, length, across)
        assert source.rows == (total - 1) // length
        for index, row in enumerate(rows):
            span = np.arange(index * length, (index + 1) * length + 1)
            assert (row["ids"] == store.read("train", span[0], length + 1)).all()
            expected = counts[span[1:]] & (across | (document_of[span[1:]] == document_of[span[:-1]]))
            if across and not masked:
                assert [*row] == ["ids"]
            else:
                assert row["weights"].dtype == np.float32 and (row["weights"] == expected).all()
            if not across:
                assert row["segments"].dtype == np.int32
                assert (row["segments"] == document_of[span] - document_of[span[0]]).all()


@settings(deadline=None, max_examples=50)
@given(DOCUMENTS, st.integers(1, 25), st.booleans(), st.sampled_from([3, 1 << 18]), st.data())
def test_best_fit_counts_every_token_but_the_first_of_a_document_once(
    tmp_path_factory, lengths, length, masked, block, data
):
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths] if masked else None
    store = write(tmp_path_factory.mktemp("store"), lengths, masks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laneformer.train.data.packing, "BLOCK_DOCUMENTS", block)
        if not any(lengths):
            with pytest.raises(InputError, match=r"'train' of .*two tokens"):
                packed(BestFit, store, length)
            return
        source, rows = packed(BestFit, store, length, across=False)
        _, seen_across = packed(BestFit, store, length, across=True)
    begins = np.cumsum([0, *(n + 1 for n in lengths)])[:-1]
    ends = {int(begin) + n - 1: n for begin, n in zip(begins, lengths, strict=True) if n}  # last id before an end mark
    if masked:
        counting = {
            int(begin) + i: counts for begin, mask in zip(begins, masks, strict=True) for i, counts in enumerate(mask)
        }
    targets, padding = Counter(), 0
    for row, other in zip(rows, seen_across, strict=True):
        assert (
            (row["ids"] == other["ids"]).all()
            and (row["weights"] == other["weights"]).all()
            and "segments" not in other
        )
        ids, weights, segments = row["ids"], row["weights"], row["segments"]
        assert (ids.dtype, weights.dtype, segments.dtype) == (np.int32, np.float32, np.int32) and segments[0] == 0
        assert set(np.diff(segments).tolist()) <= {0, 1} and not weights[np.diff(segments) > 0].any()
        for segment in range(segments[-1] + 1):
            (at,) = np.nonzero(segments == segment)
            if (ids[at] == EOS).all():  # padding, always last: documents with one token are not packed
                assert segment == segments[-1] and not weights[at[1:] - 1].any()
                padding += len(at)
                continue
            piece, begin = ids[at], int(ids[at[0]])
            text = piece[:-1] if piece[-1] == EOS else piece
            assert (text == np.arange(begin, begin + len(text))).all() and len(piece) > 1, (
                "a piece has consecutive tokens of one document"
            )
            for position, target in zip(at[1:], piece[1:].tolist(), strict=True):
                source_id = int(ids[position - 1])
                key = ("end", source_id) if target == EOS else target
                targets[key] += 1
                last = source_id if target == EOS else target
                assert weights[position - 1] == (counting[last] if masked else 1)
    expected = Counter({int(begin) + i: 1 for begin, n in zip(begins, lengths, strict=True) for i in range(1, n)})
    expected.update({("end", last): 1 for last in ends})
    assert targets == expected
    pieces = [min(length, n - i) + 1 for n in lengths for i in range(0, n, length)]
    assert padding == source.rows * (length + 1) - sum(pieces)
    if block >= len(lengths):
        assert source.rows == len(naive_best_fit(pieces, length + 1))
    for n in (n for n in lengths if 0 < n <= length):
        begin = int(begins[lengths.index(n)])
        (row,) = [row for row in rows if begin in row["ids"][:-1]]
        at = int(np.flatnonzero(row["ids"] == begin)[0])
        assert row["ids"][at : at + n + 1].tolist() == [*range(begin, begin + n), EOS], "fitting documents are not cut"


def test_real_lengths_fill_their_rows():
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5, 1, 20000).astype(np.int64), 2, 1025)
    filled = np.bincount(best_fit_decreasing(lengths, 1025), weights=lengths)
    assert filled.max() <= 1025 and filled.mean() > 0.999 * 1025
