"""The data order: a pure function of the step, independent of the hosts that read it, with exact shares of sources."""

import itertools
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.errors import ConfigError, InputError
from laneformer.train.config import DataConfig
from laneformer.train.data.batches import Batches, Prefetch, tagged, validation_sets
from laneformer.train.data.mixture import BLOCK
from laneformer.train.data.permutation import permute
from laneformer.train.data.store import StoreWriter, TokenStore

EOS = 1999
PACKINGS = st.tuples(st.sampled_from(["concat", "best_fit"]), st.booleans())


def write(path, lengths, *, first=0, validation=(), masked=False, tokenizer=b"t"):
    """A store whose tokens count up from `first`. With a mask, every third token is excluded from the loss."""
    with StoreWriter(path, tokenizer=tokenizer, vocab_size=2000, eos_id=EOS, shard_tokens=150) as writer:
        for split, documents in (("train", lengths), ("validation", validation)):
            at = first
            for length in documents:
                ids = np.arange(at, at + length) % EOS
                writer.add(split, ids, 2 * length, loss=ids % 3 > 0 if masked else None)
                at += length + 1
        writer.finish({})
    return TokenStore.open(path)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """1001 tokens in several shards. Every token equals its position, but every 77th ends a document."""
    return write(tmp_path_factory.mktemp("stores") / "counting", [76] * 13, validation=[9] * 10)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, counting):
    """Three stores of different sizes, the second with a loss mask."""
    folder, random = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    return [
        counting,
        write(folder / "masked", random.integers(1, 40, 30), first=500, masked=True, validation=[20] * 20),
        write(folder / "small", random.integers(0, 30, 12), first=1000),
    ]


def config(stores, **changes):
    return DataConfig(
        **{"path": tuple(store.path for store in stores), "sequence_length": 10, "batch_size": 8, **changes}
    )


def batches(*stores, seed=3, **changes):
    return Batches(config(stores, **changes), list(stores), seed)


def same(a, b):
    return a.keys() == b.keys() and all((a[key] == b[key]).all() and a[key].dtype == b[key].dtype for key in a)


def joined(parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def test_order_of_one_source_has_known_values(counting):
    """If these values change, resumed runs read other rows."""
    data = batches(counting)
    orders = [[row for _, row in data.rows_at(step)] for step in (0, 12, 10**6)]
    assert orders == [
        [61, 55, 77, 36, 40, 16, 83, 84],
        [23, 18, 25, 71, 20, 4, 72, 70],
        [48, 52, 40, 83, 15, 69, 28, 23],
    ]
    stream = np.where(np.arange(1001) % 77 == 76, EOS, np.arange(1001))
    batch = data.batch_at(0)
    assert data.keys == ("ids",) == tuple(batch)
    assert (batch["ids"] == stream[10 * np.array(orders[0])[:, None] + np.arange(11)]).all() and batch[
        "ids"
    ].dtype == np.int32


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 250), st.integers(1, 120), st.integers(0, 2**32), PACKINGS)
def test_every_row_is_read_once_per_epoch_in_permuted_order(counting, batch_size, length, seed, packing):
    options = {"packing": packing[0], "attend_across_documents": packing[1]}
    data = batches(counting, batch_size=batch_size, sequence_length=length, seed=seed, **options)
    n = data.sources[0].rows
    rows = [row for step in range(-(-3 * n // batch_size)) for source, row in data.rows_at(step) if source == 0]
    for epoch in range(3):
        assert rows[epoch * n : (epoch + 1) * n] == permute(np.arange(n), n, seed, epoch).tolist()
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))
    for step in range(3 * n // batch_size):
        assert data.epochs_at(step) == {"counting": step * batch_size / n}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([1.0, 2.5, 0.3]), min_size=1, max_size=3),
    st.integers(1, 40),
    PACKINGS,
    st.lists(st.integers(0, 10**12), min_size=1, max_size=4),
    st.data(),
)
def test_batches_are_pure_and_split_over_hosts(stores, weights, batch_size, packing, steps, data):
    chosen = stores[: len(weights)]
    options = {
        "weights": tuple(weights),
        "batch_size": batch_size,
        "packing": packing[0],
        "attend_across_documents": packing[1],
    }
    one, other = batches(*chosen, **options), batches(*chosen, **options)
    for step in reversed(steps):
        other.batch_at(step)
    cuts = sorted(data.draw(st.lists(st.integers(0, batch_size), max_size=4)))
    for step in steps:
        whole = one.batch_at(step)
        assert tuple(whole) == one.keys and whole["ids"].shape == (batch_size, 11)
        assert same(
            joined([other.batch_at(step, slice(*span)) for span in itertools.pairwise([0, *cuts, batch_size])]), whole
        )
        third = other.batch_at(step, slice(1, None, 3))
        assert same(third, {key: value[1::3] for key, value in whole.items()})


def test_host_reads_only_its_rows(counting, monkeypatch):
    data, reads, read = batches(counting), [], TokenStore.read
    monkeypatch.setattr(TokenStore, "read", lambda store, split, *span: reads.append(span) or read(store, split, *span))
    data.batch_at(0, slice(2, 4))
    assert reads == [(770, 11), (360, 11)]


def test_large_steps_do_not_overflow(stores):
    assert batches(stores[0]).epochs_at(10**30) == {"counting": 8 * 10**30 / 100}
    assert batches(*stores).batch_at(10**30)["ids"].shape == (8, 11)
    with pytest.raises(IndexError, match="negative"):
        batches(*stores).batch_at(-1)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_mixture_has_exact_shares_and_exact_epochs(stores, packing):
    data = batches(*stores, weights=(0.5, 0.3, 0.2), batch_size=BLOCK // 8, packing=packing)
    counts = [8192, 4915, 3277]
    sizes = [source.rows for source in data.sources]
    seen: list[list[int]] = [[], [], []]
    for step in range(17):
        passes = [len(rows) / n for rows, n in zip(seen, sizes, strict=True)]
        assert data.epochs_at(step) == dict(zip(("counting", "masked", "small"), passes, strict=True))
        for source, row in data.rows_at(step):
            seen[source].append(row)
        if step % 8 == 7:
            assert [len(rows) for rows in seen] == [(step + 1) // 8 * count for count in counts]
    for rows, n in zip(seen, sizes, strict=True):
        for epoch in range(len(rows) // n):
            assert rows[epoch * n : (epoch + 1) * n] == permute(np.arange(n), n, 3, epoch).tolist()
    near = Counter(source for source, _ in data.rows_at(2))
    assert all(abs(near[i] - counts[i] / 8) < 120 for i in range(3)), "sources are mixed within a block"


def test_shares_default_to_the_number_of_tokens(stores):
    tokens = [store.tokens("train") for store in stores]
    counts = batches(*stores).mixture.counts
    assert np.abs(counts - BLOCK * np.array(tokens) / sum(tokens)).max() < 1 and counts.sum() == BLOCK


def test_seed_changes_the_order_of_rows_and_sources(stores):
    orders = [batches(*stores, seed=seed).rows_at(step) for seed in (0, 1) for step in (0, 1)]
    assert len(set(map(tuple, orders))) == 4
    assert len({tuple(source for source, _ in order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("packing", "across", "masked", "keys"),
    [
        ("concat", True, False, ("ids",)),
        ("concat", True, True, ("ids", "weights")),
        ("concat", False, False, ("ids", "weights", "segments")),
        ("best_fit", True, False, ("ids", "weights")),
        ("best_fit", False, True, ("ids", "weights", "segments")),
    ],
)
def test_keys_are_equal_for_every_source(stores, packing, across, masked, keys):
    chosen = stores if masked else stores[::2]
    data = batches(*chosen, packing=packing, attend_across_documents=across)
    assert data.keys == keys
    for batch in (data.batch_at(0), data.batch_at(5, slice(3, 3))):
        assert tuple(batch) == keys
        rows = len(batch["ids"])
        shapes = {
            "ids": ((rows, 11), np.int32),
            "weights": ((rows, 10), np.float32),
            "segments": ((rows, 11), np.int32),
        }
        assert all((batch[key].shape, batch[key].dtype) == shapes[key] for key in keys)
    if keys == ("ids", "weights"):
        for (source, _), weights in zip(data.rows_at(0), data.batch_at(0)["weights"], strict=True):
            assert weights.all() == (source != 1) or packing == "best_fit"


def test_incompatible_stores_raise(tmp_path, stores):
    with pytest.raises(ConfigError, match=r"counting and .*other/counting .*'counting'"):
        tagged([stores[0], write(tmp_path / "other" / "counting", [50])])
    with pytest.raises(InputError, match=r"counting and .*strange .*--tokenizer"):
        batches(stores[0], write(tmp_path / "strange", [50], tokenizer=b"u"))
    with pytest.raises(ConfigError, match=r"small supplies .*16384.*data\.weights"):
        batches(*stores, weights=(1.0, 1.0, 1e-5))
    with pytest.raises(InputError, match=r"tiny has 3 tokens, .*data\.sequence_length"):
        batches(stores[0], write(tmp_path / "tiny", [2]))


def test_tag_is_the_last_name_of_the_folder(tmp_path, monkeypatch):
    write(tmp_path / "code", [50])
    monkeypatch.chdir(tmp_path / "code")
    assert [*tagged([TokenStore.open(".")])] == [*tagged([TokenStore.open("../code/")])] == ["code"]


def test_skipped_batches_are_those_of_other_steps(counting):
    plain, skipping = batches(counting), Batches(config([counting]), [counting], 3, lambda step: step + 2 * (step > 4))
    for step, read in ((4, 4), (5, 7), (40, 42)):
        assert same(skipping.batch_at(step), plain.batch_at(read))
        assert skipping.epochs_at(step) == plain.epochs_at(read)


def test_validation_sets_are_fixed_distinct_and_spread(stores):
    data = config(stores[::2], sequence_length=10, batch_size=2, validation_batches=3)
    (held_out,) = validation_sets(data, stores[::2], []).values()  # `small` has no such split
    assert [tuple(batch) for batch in held_out.batches] == [("ids",)] * 3
    ids = np.concatenate([batch["ids"] for batch in held_out.batches])
    stream = stores[0].read("validation", 0, 100)
    assert (ids == stream[np.array([0, 1, 3, 4, 6, 7])[:, None] * 10 + np.arange(11)]).all()
    assert held_out.tokens_per_byte == 100 / (2 * 90)
    every = validation_sets(config(stores, batch_size=4, validation_batches=100), stores[:1], [])["counting"]
    padded = joined(every.batches)
    assert padded["weights"].shape == (12, 10) and padded["weights"].sum(1).tolist() == [10] * 9 + [0] * 3, "9 rows"
    assert (padded["ids"][:9, 0] == stream[np.arange(9) * 10]).all()
    assert {row.tobytes() for row in padded["ids"][9:]} <= {row.tobytes() for row in padded["ids"][:9]}
    assert validation_sets(config(stores, validation_batches=0), stores[:1], stores[2:]) == {}


def test_validation_sets_follow_their_stores(stores):
    data = config(stores[:1], batch_size=4, packing="best_fit", attend_across_documents=False)
    sets = validation_sets(data, stores[:1], stores[1:2])
    assert [*sets] == ["counting", "masked"]
    assert all(
        tuple(batch) == ("ids", "weights", "segments") for held_out in sets.values() for batch in held_out.batches
    )
    assert sets["masked"].tokens_per_byte is None and sets["counting"].tokens_per_byte is not None
    with pytest.raises(InputError, match=r"small has no split 'validation'.*--validation-fraction"):
        validation_sets(data, stores[:1], stores[2:])
    with pytest.raises(ConfigError, match=r"'counting'.*data\.path"):
        validation_sets(data, stores[:1], stores[:1])


@pytest.mark.parametrize(("packing", "attend"), [("concat", True), ("concat", False), ("best_fit", False)])
@pytest.mark.parametrize("masked", [False, True])
def test_validation_of_less_than_a_row_counts_each_target_once(tmp_path, packing, attend, masked):
    store = write(tmp_path / "few", [40], validation=[4, 3], masked=masked)
    data = config([store], batch_size=4, sequence_length=20, packing=packing, attend_across_documents=attend)
    (held_out,) = validation_sets(data, [store], []).values()
    [batch] = held_out.batches
    counted = batch["ids"][:, 1:][batch["weights"] > 0]
    # All tokens but the first of each document; an end mark counts if the token before it does.
    assert sorted(counted.tolist()) == ([1, 2, 7, EOS] if masked else [1, 2, 3, 6, 7, EOS, EOS])
    assert batch["weights"].shape == (4, 20) and ("segments" in batch) == (not attend)


def test_fully_masked_validation_split_raises(tmp_path):
    with StoreWriter(tmp_path, tokenizer=b"t", vocab_size=9, eos_id=0) as writer:
        writer.add("validation", [1] * 50, 50, loss=[False] * 50)
        writer.finish({})
    store = TokenStore.open(tmp_path)
    with pytest.raises(InputError, match=r"every token .*--data\.validation-batches 0"):
        validation_sets(DataConfig(path=(Path("x"),), sequence_length=10, batch_size=2), [store], [])


def test_prefetch_starts_anywhere_and_ends_with_its_steps(counting):
    data = batches(counting)
    with Prefetch(data.batch_at, range(30, 35)) as stream:
        got = list(stream)
    assert [step for step, _ in got] == list(range(30, 35))
    assert all((batch["ids"] == data.batch_at(step)["ids"]).all() for step, batch in got)


def test_prefetch_runs_at_most_depth_ahead_in_one_thread():
    made, threads, gate = [], set(), threading.Semaphore(0)

    def make(step):
        made.append(step)
        threads.add(threading.current_thread())
        gate.release()
        return step

    with Prefetch(make, itertools.count(7), depth=3) as stream:
        for _ in range(3):
            assert gate.acquire(timeout=10)
        assert made == [7, 8, 9]  # the thread waits until the first is taken
        assert next(stream) == (7, 7)
        assert gate.acquire(timeout=10)
        assert made == [7, 8, 9, 10]
    (thread,) = threads
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_prefetch_raises_errors_at_their_step():
    def make(step):
        if step == 2:
            raise InputError("shard 2 is corrupted")
        return step

    before = threading.active_count()
    stream = Prefetch(make, itertools.count())
    assert [next(stream), next(stream)] == [(0, 0), (1, 1)]
    with pytest.raises(InputError, match="shard 2 is corrupted"):
        next(stream)
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(stream)


def test_prefetch_closes_twice_and_rejects_bad_depth():
    stream = Prefetch(lambda step: step, itertools.count())
    stream.close()
    stream.close()
    assert list(stream) == []
    with pytest.raises(ConfigError, match=r"depth .* 0"):
        Prefetch(lambda step: step, itertools.count(), depth=0)
