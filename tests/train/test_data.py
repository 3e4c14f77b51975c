"""The data order: a bijection per epoch, a pure function of the step, the same whatever reads it."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.errors import ConfigError, InputError
from train.data import Batches, Prefetch, mix, permute, validation_batches
from train.shards import StoreWriter, TokenStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """1001 tokens over several shards: each its own position, but every 77th the end of a document, 1999."""
    path = tmp_path_factory.mktemp("store")
    with StoreWriter(path, tokenizer=b"t", vocab_size=2000, eos_id=1999, shard_tokens=150) as writer:
        for start in range(0, 1001, 77):
            writer.add("train", np.arange(start, start + 76), 1)
        writer.add("validation", np.arange(99), 1)
        writer.finish({})
    return TokenStore.open(path)


def batches(store, **changes):
    return Batches(store, "train", **{"seq_len": 10, "batch_size": 8, "seed": 3, **changes})


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 10**6))
def test_permute_is_a_bijection(size, seed, epoch):
    assert np.sort(permute(np.arange(size), size, seed, epoch)).tolist() == list(range(size))


@given(st.integers(2, 2**61), st.integers(0, 2**32), st.data())
def test_permute_of_large_ranges_keeps_range_shape_and_distinctness(size, seed, data):
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=4, max_size=4, unique=True)) if size > 4 else [0, 1])
    image = permute(index, size, seed, 0)
    assert image.dtype == np.int64 and image.min() >= 0 and image.max() < size
    assert len(set(image.tolist())) == len(index)
    assert (permute(index[:, None], size, seed, 0)[:, 0] == image).all()
    assert permute(index[:1], size, seed, 0)[0] == image[0]


def test_permute_refuses_what_is_outside():
    with pytest.raises(IndexError):
        permute(np.array([10]), 10, 0, 0)
    assert permute(np.array([], np.int64), 10, 0, 0).tolist() == []


def test_the_order_is_fixed_for_ever():
    """Written down: a change here changes every run that is resumed."""
    assert [hex(mix(x)) for x in (1, 2**63)] == ["0x5692161d100b05e5", "0x25c26ea579cea98a"]
    assert permute(np.arange(12), 12, 0, 0).tolist() == [3, 1, 11, 0, 5, 7, 4, 6, 9, 8, 10, 2]
    assert permute(np.arange(3), 10**12, 42, 7).tolist() == [257529644458, 604013950505, 133498005024]


def test_permutations_look_random():
    """Over many keys each index goes everywhere about equally often, and neighbours do not stay neighbours."""
    size, keys = 13, 4000
    images = np.stack([permute(np.arange(size), size, seed, seed % 3) for seed in range(keys)])
    counts = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    chi2 = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert chi2 < 230  # 144 degrees of freedom: mean 144, deviation 17
    steps = np.diff(permute(np.arange(10**5), 10**5, 0, 0))
    assert (np.abs(steps) == 1).sum() < 20
    assert abs(np.corrcoef(np.arange(10**5), permute(np.arange(10**5), 10**5, 1, 0))[0, 1]) < 0.02


def test_windows_tile_the_split(store):
    data = batches(store)
    assert data.windows_per_epoch == 100
    batch = data.batch_at(0)
    assert batch.shape == (8, 11) and batch.dtype == np.int32
    stream = np.where(np.arange(1001) % 77 == 76, 1999, np.arange(1001))
    assert (batch == stream[10 * data.windows_at(0)[:, None] + np.arange(11)]).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 250), st.integers(1, 120), st.integers(0, 2**32))
def test_every_window_once_per_epoch_though_batches_straddle(store, batch_size, seq_len, seed):
    data = batches(store, batch_size=batch_size, seq_len=seq_len, seed=seed)
    n = data.windows_per_epoch
    row = np.concatenate([data.windows_at(step) for step in range(-(-3 * n // batch_size))])
    for epoch in range(3):
        assert np.sort(row[epoch * n : (epoch + 1) * n]).tolist() == list(range(n))
    for step in range(0, 3 * n // batch_size):
        assert data.epoch_of(step) == step * batch_size // n


def test_epochs_and_seeds_differ(store):
    orders = [batches(store, batch_size=100, seed=seed).windows_at(step).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len(set(map(tuple, orders))) == 4


def test_batch_at_is_pure_and_rows_are_its_rows(store):
    data, again = batches(store), batches(store)
    for step in (40, 3, 10**9, 40):
        whole = data.batch_at(step)
        assert (whole == again.batch_at(step)).all()
        parts = [data.batch_at(step, slice(start, start + 2)) for start in range(0, 8, 2)]
        assert (np.concatenate(parts) == whole).all()
        assert (data.batch_at(step, slice(1, None, 3)) == whole[1::3]).all()
    assert data.batch_at(0, slice(8, 9)).shape == (0, 11)
    with pytest.raises(IndexError, match="negative"):
        data.batch_at(-1)


def test_no_overflow_at_any_step(store):
    assert batches(store).epoch_of(10**30) == 8 * 10**30 // 100
    assert batches(store).batch_at(10**30).shape == (8, 11)


def test_settings_that_cannot_work(store):
    with pytest.raises(InputError, match=r"has 1001 tokens, a window of seq_len 1001 needs 1002"):
        batches(store, seq_len=1001)
    assert batches(store, seq_len=1000).windows_per_epoch == 1
    for name in ("seq_len", "batch_size"):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            batches(store, **{name: 0})


def test_validation_batches_are_fixed_distinct_and_spread(store):
    chosen = validation_batches(store, "train", seq_len=10, batch_size=4, max_batches=5)
    assert len(chosen) == 5 and all(batch.shape == (4, 11) and batch.dtype == np.int32 for batch in chosen)
    assert np.concatenate(chosen)[:, 0].tolist() == list(range(0, 1000, 50))
    rows = validation_batches(store, "train", seq_len=10, batch_size=4, max_batches=5, rows=slice(2, 4))
    assert all((part == whole[2:4]).all() for part, whole in zip(rows, chosen, strict=True))
    every = validation_batches(store, "validation", seq_len=10, batch_size=4, max_batches=100)
    assert len(every) == 2 and len(np.unique(np.concatenate(every)[:, 0])) == 8  # 9 windows: two full batches
    with pytest.raises(InputError, match=r"has 9 windows .* takes 10: lower .* at most 9"):
        validation_batches(store, "validation", seq_len=10, batch_size=10, max_batches=1)
    with pytest.raises(ConfigError, match="max_batches is 0"):
        validation_batches(store, "validation", seq_len=10, batch_size=1, max_batches=0)


def test_prefetch_starts_anywhere_and_ends_with_its_steps(store):
    data = batches(store)
    with Prefetch(data.batch_at, range(30, 35)) as stream:
        got = list(stream)
    assert [step for step, _ in got] == list(range(30, 35))
    assert all((batch == data.batch_at(step)).all() for step, batch in got)


def test_prefetch_is_bounded_ahead_and_in_one_other_thread():
    made, threads, gate = [], set(), threading.Semaphore(0)

    def make(step):
        made.append(step)
        threads.add(threading.current_thread())
        gate.release()
        return step

    with Prefetch(make, itertools.count(7), depth=3) as stream:
        for _ in range(3):
            assert gate.acquire(timeout=10)
        assert made == [7, 8, 9]  # nothing more before the first is taken
        assert next(stream) == (7, 7)
        assert gate.acquire(timeout=10)
        assert made == [7, 8, 9, 10]
    (thread,) = threads
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_prefetch_passes_errors_on_at_their_step():
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


def test_prefetch_close_twice_and_bad_depth():
    stream = Prefetch(lambda step: step, itertools.count())
    stream.close()
    stream.close()
    assert list(stream) == []
    with pytest.raises(ConfigError, match="depth is 0"):
        Prefetch(lambda step: step, itertools.count(), depth=0)
