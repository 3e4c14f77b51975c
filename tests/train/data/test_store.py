"""Token stores: reads across shards return the written tokens, errors name every kind of damage, and an interrupted
writer resumes.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.errors import ConfigError, InputError
from laneformer.train.data.store import BLOCK_BYTES, Manifest, StoreWriter, TokenStore
from tests.support.paths import ROOT
from tests.support.training.stores import TOKENIZER, content, take


@pytest.fixture(scope="module", autouse=True)
def fast_disk():
    """Skips fsync, which is slow on a busy disk: written data also survives the end of a process without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def write(path, documents, *, vocab_size=100, shard_tokens=1 << 27, split="train", **marks):
    with StoreWriter(
        path, tokenizer=TOKENIZER, vocab_size=vocab_size, eos_id=0, shard_tokens=shard_tokens, **marks
    ) as writer:
        for ids in documents:
            writer.add(split, ids, 3 * len(ids))
        writer.finish({"text": "test"})
    return TokenStore.open(path)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(1, 99), max_size=12), min_size=1, max_size=20), st.integers(1, 30), st.data())
def test_reads_across_shards_equal_the_documents_end_to_end(tmp_path_factory, documents, shard_tokens, data):
    store = write(tmp_path_factory.mktemp("store"), documents, shard_tokens=shard_tokens)
    stream = [token for ids in documents for token in [*ids, 0]]
    assert store.tokens("train") == len(stream)
    assert store.documents("train") == len(documents)
    assert store.text_bytes("train") == 3 * sum(map(len, documents))
    start = data.draw(st.integers(0, len(stream)))
    length = data.draw(st.integers(0, len(stream) - start))
    read = store.read("train", start, length)
    assert read.dtype == np.int32
    assert read.tolist() == stream[start : start + length]
    for first, last in zip(store.manifest.splits["train"], store.manifest.splits["train"][1:], strict=False):
        assert first.tokens >= shard_tokens and last.documents > 0
    ends = np.cumsum([len(ids) + 1 for ids in documents])
    assert store.document_ends("train").dtype == np.int64 and (store.document_ends("train") == ends).all()
    inside = store.document_ends("train", start, start + length)
    assert inside.tolist() == [end for end in ends if start < end <= start + length]
    assert not store.has_loss_mask("train")
    store.verify()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=9), min_size=1, max_size=20),
    st.integers(1, 30),
    st.sampled_from([None, 5]),
    st.data(),
)
def test_loss_masks_are_read_back(tmp_path_factory, documents, shard_tokens, bos_id, data):
    path = tmp_path_factory.mktemp("store")
    with StoreWriter(
        path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0, bos_id=bos_id, shard_tokens=shard_tokens
    ) as writer:
        for document in documents:
            writer.add("train", [token for token, _ in document], 1, loss=[counts for _, counts in document])
        writer.add("validation", [1], 1)
        writer.finish({})
    store = TokenStore.open(path)
    stream = []
    for document in documents:
        stream += (
            [False] * (bos_id is not None) + [counts for _, counts in document] + [bool(document) and document[-1][1]]
        )
    assert store.has_loss_mask("train") and not store.has_loss_mask("validation")
    start = data.draw(st.integers(0, len(stream)))
    length = data.draw(st.integers(0, len(stream) - start))
    read = store.read_loss("train", start, length)
    assert read.dtype == bool and read.tolist() == stream[start : start + length]
    store.verify()


def test_mixed_loss_masks_in_a_split_raise(tmp_path):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0, shard_tokens=1) as writer:
        writer.add("train", [1, 2], 1, loss=[True, False])
        with pytest.raises(InputError, match=r"'train' .*loss mask"):
            writer.add("train", [1, 2], 1)
        writer.add("validation", [1, 2], 1)
        with pytest.raises(InputError, match=r"'validation' .*loss mask"):
            writer.add("validation", [1, 2], 1, loss=[True, True])
        with pytest.raises(InputError, match="1 values for a document of 2 tokens"):
            writer.add("train", [1, 2], 1, loss=[True])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_dtype_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    store = write(tmp_path, [[vocab_size - 1, 1]], vocab_size=vocab_size)
    assert store.read("train", 0, 3).tolist() == [vocab_size - 1, 1, 0]
    assert np.fromfile(tmp_path / "train-00000.bin", dtype).tolist() == [vocab_size - 1, 1, 0]


def test_begin_token_and_splits_are_written(tmp_path):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=9, eos_id=0, bos_id=1) as writer:
        writer.add("validation", [5], 1)
        writer.add("train", [6], 1)
        writer.add("train", [], 0)
        assert (writer.documents("train"), writer.documents("validation"), writer.documents("other")) == (2, 1, 0)
        writer.finish({})
    store = TokenStore.open(tmp_path)
    assert store.splits == ("train", "validation")
    assert store.read("train", 0, 5).tolist() == [1, 6, 0, 1, 0]
    assert store.read("validation", 0, 3).tolist() == [1, 5, 0]
    with pytest.raises(InputError, match=r"no split 'extra', only train, validation"):
        store.tokens("extra")
    with pytest.raises(IndexError):
        store.read("train", 3, 3)


def test_missing_validation_split_error_names_the_option(tmp_path):
    with pytest.raises(InputError, match="--validation-fraction"):
        write(tmp_path, [[1]]).tokens("validation")


def test_same_input_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, [[1, 2], [3]] * 50, shard_tokens=20)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert len(files) > 5
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_unfinished_write_leaves_the_old_store(tmp_path):
    store = write(tmp_path, [[1, 2, 3]])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with (
        pytest.raises(RuntimeError, match="died"),
        StoreWriter(tmp_path, tokenizer=b"other", vocab_size=9, eos_id=0) as writer,
    ):
        writer.add("train", [4], 1)
        raise RuntimeError("died")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert store.read("train", 0, 4).tolist() == [1, 2, 3, 0]


def test_overwriting_removes_old_shards_and_nothing_else(tmp_path):
    old = write(tmp_path, [[1]] * 10, shard_tokens=2)
    (tmp_path / "notes.bin").write_text("mine")
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "train-00007.bin").write_text("left by a killed writer")
    kept = old.read("train", 0, 20)  # the files stay mapped, so a run can continue to read the old store
    new = write(tmp_path, [[2]])
    names = ["manifest.json", "notes.bin", "tokenizer.json", "train-00000.bin", "train-00000.ends"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert new.read("train", 0, 2).tolist() == [2, 0]
    assert (old.read("train", 0, 20) == kept).all()


def test_bad_writes_raise(tmp_path):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=0) as writer:
        for ids in ([10], [-1]):
            with pytest.raises(InputError, match=f"token id {ids[0]} is outside the vocabulary of 10"):
                writer.add("train", ids, 1)
        with pytest.raises(ConfigError, match=r"split name .*lower-case"):
            writer.add("../up", [1], 1)
    with pytest.raises(ConfigError, match="token 10 is outside"):
        StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=10)
    with pytest.raises(ConfigError, match=r"shard_tokens .* 0"):
        StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=0, shard_tokens=0)


@pytest.mark.parametrize(
    ("kind", "cut", "sizes"),
    [("bin", 2, "14 bytes, expected 16"), ("ends", 8, "8 bytes, expected 16"), ("loss", 1, "7 bytes, expected 8")],
)
def test_missing_truncated_and_longer_files_raise(tmp_path, kind, cut, sizes):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0, shard_tokens=8) as writer:
        for _ in range(10):
            writer.add("train", [1, 2, 3], 1, loss=[True, False, True])
        writer.finish({})
    file = tmp_path / f"train-00001.{kind}"
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    with pytest.raises(InputError, match=rf"train-00001\.{kind} is truncated: {sizes}; .*--overwrite"):
        TokenStore.open(tmp_path)
    file.write_bytes(data + b"\0\0")
    with pytest.raises(InputError, match=rf"train-00001\.{kind} is too long"):
        TokenStore.open(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=rf"train-00001\.{kind} is missing"):
        TokenStore.open(tmp_path)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store = TokenStore.open(tmp_path)
    with pytest.raises(InputError, match=rf"train-00001\.{kind} is corrupted near byte 0; .*--overwrite"):
        store.verify()
    read = {
        "bin": lambda start: store.read("train", start, 8),
        "ends": lambda start: store.document_ends("train", start, start + 8),
        "loss": lambda start: store.read_loss("train", start, 8),
    }[kind]
    assert len(read(0)) and len(read(16))
    with pytest.raises(InputError, match=rf"train-00001\.{kind} is corrupted"):
        read(8)


def test_shard_that_shrinks_after_opening_raises(tmp_path):
    store = write(tmp_path, [[1, 2, 3]] * 10)
    os.truncate(tmp_path / "train-00000.bin", 10)
    with pytest.raises(InputError, match="truncated"):
        store.read("train", 0, 40)


def test_flipped_bit_is_found_in_its_block_only(tmp_path):
    per_block = BLOCK_BYTES // 2
    ids = np.random.default_rng(0).integers(1, 100, 3 * per_block)
    write(tmp_path, [ids])
    with open(tmp_path / "train-00000.bin", "r+b") as file:
        file.seek(BLOCK_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES + 77)
        file.write(bytes([byte ^ 4]))
    store = TokenStore.open(tmp_path)
    assert (store.read("train", 0, per_block) == ids[:per_block]).all()
    assert (store.read("train", 2 * per_block, 9) == ids[2 * per_block : 2 * per_block + 9]).all()
    for _ in range(2):  # a damaged block is checked at every read
        with pytest.raises(InputError, match=rf"train-00000\.bin is corrupted near byte {BLOCK_BYTES}; .*--overwrite"):
            store.read("train", 2 * per_block - 1, 2)
    with pytest.raises(InputError, match="corrupted"):
        store.verify()


def test_another_tokenizer_raises(tmp_path):
    store = write(tmp_path, [[1]])
    store.require_tokenizer(hashlib.sha256(TOKENIZER).hexdigest(), "the run")
    with pytest.raises(
        InputError, match=rf"{tmp_path} was tokenized with another tokenizer .*than the run \(.*--tokenizer"
    ):
        store.require_tokenizer(hashlib.sha256(b"other").hexdigest(), "the run")
    (tmp_path / "tokenizer.json").write_bytes(b"other")
    with pytest.raises(InputError, match="is not the tokenizer that made these tokens"):
        TokenStore.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        TokenStore.open(tmp_path)


SHARD = {
    "name": "train-00000",
    "tokens": 2,
    "bytes": 1,
    "documents": 1,
    "tokens_crc32": "0" * 8,
    "ends_crc32": "0" * 8,
    "loss_crc32": None,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "format version 1, but this program reads 2; .*--overwrite"),
        ({"format": "other"}, "is not a laneformer-tokens manifest"),
        ({"dtype": "float32"}, "damaged .*float32"),
        ({"splits": {"train": [{"file": "train-00000.bin"}]}}, "damaged"),
        ({"splits": {"train": [{**SHARD, "tokens_crc32": "00"}]}}, r"\.bin does not have 1 blocks"),
        ({"splits": {"train": [{**SHARD, "ends_crc32": ""}]}}, r"\.ends does not have 1 blocks"),
        ({"splits": {"train": [SHARD, {**SHARD, "loss_crc32": "00000000"}]}}, "loss mask for only some"),
        ({"splits": {"train": [{**SHARD, "name": "../train-00000"}]}}, "damaged"),
        ({"surprise": 1}, "damaged .*surprise"),
    ],
)
def test_bad_manifests_raise(tmp_path, change, message):
    write(tmp_path, [[1]])
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        TokenStore.open(tmp_path)


def test_missing_and_truncated_manifests_raise(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json.*scripts\.tokenize"):
        TokenStore.open(tmp_path / "nowhere")
    write(tmp_path, [[1]])
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(InputError, match="damaged"):
        TokenStore.open(tmp_path)


def test_manifest_round_trips(tmp_path):
    store = write(tmp_path, [[1, 2]])
    assert Manifest.read(tmp_path) == store.manifest
    assert store.manifest.to_json() == (tmp_path / "manifest.json").read_text()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4), st.integers(1, 60))
def test_interrupted_writer_resumes_to_the_same_bytes(tmp_path_factory, total, deaths, shard_tokens):
    broken, whole = tmp_path_factory.mktemp("broken"), tmp_path_factory.mktemp("whole")
    options = {"settings": {"text": "x"}, "shard_tokens": shard_tokens}
    done = 0  # documents in the last checkpoint
    for stop, every in deaths:
        if done <= stop < total:
            with pytest.raises(RuntimeError, match="died"):
                take(broken, total, stop=stop, every=every, **options)
            done = max(done, stop // every * every)
    assert take(broken, total, **options) == done
    take(whole, total, every=total + 1, **options)
    assert content(broken) == content(whole) and not (broken / ".partial").exists()


def test_checkpoint_is_durable_before_it_is_recorded(tmp_path, monkeypatch):
    synced, replaced, replace = set(), [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(
        os, "replace", lambda old, new: replaced.append((Path(new).name, set(synced))) or replace(old, new)
    )
    with pytest.raises(RuntimeError, match="died"):
        take(tmp_path, 20, every=9, stop=9, settings={"text": "x"})
    name, before = replaced[-1]
    files = {file.name for file in (tmp_path / ".partial").iterdir()} - {"progress.json", "tokenizer.json"}
    assert name == "progress.json" and len(files) > 6
    assert {f"{file}.new" if file.endswith(".json") else file for file in files} | {
        "progress.json.new",
        ".partial",
    } <= before


def test_work_with_other_settings_is_discarded(tmp_path):
    for name, change in [
        ("settings", {"settings": {"text": "y"}}),
        ("none", {"settings": None}),
        ("shard", {"shard_tokens": 21}),
        ("bos", {"bos_id": 7}),
    ]:
        same = {"settings": {"text": "x"}}
        with pytest.raises(RuntimeError, match="died"):
            take(tmp_path / name, 20, stop=10, **same)
        assert take(tmp_path / name, 20, **{**same, **change}) == 0
        take(tmp_path / f"{name}_whole", 20, **{**same, **change})
        assert content(tmp_path / name) == content(tmp_path / f"{name}_whole")


def test_mixed_loss_masks_raise_also_after_resuming(tmp_path):
    options = {"tokenizer": TOKENIZER, "vocab_size": 100, "eos_id": 0, "settings": {}}
    for split, shard_tokens in (("open", 100), ("closed", 1)):
        with StoreWriter(tmp_path / split, shard_tokens=shard_tokens, **options) as writer:
            writer.add("train", [1], 1, loss=[True])
            writer.checkpoint(1)
        with StoreWriter(tmp_path / split, shard_tokens=shard_tokens, **options) as writer:
            assert (writer.done, writer.documents("train"), writer.documents("validation")) == (1, 1, 0)
            with pytest.raises(InputError, match="loss mask"):
                writer.add("train", [1], 1)


@pytest.mark.parametrize("damage", ["progress.json", "train-00000.bin", "train-00000.ends", "train-00000.json"])
def test_incomplete_partial_work_is_discarded(tmp_path, damage):
    with pytest.raises(RuntimeError, match="died"):
        take(tmp_path, 20, stop=12, settings={"text": "x"})
    file = tmp_path / ".partial" / damage
    file.write_bytes(file.read_bytes()[:3])
    assert take(tmp_path, 20, settings={"text": "x"}) == 0
    TokenStore.open(tmp_path).verify()


def test_nothing_is_kept_without_a_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="died"):
        take(tmp_path, 20, stop=2, settings={"text": "x"})
    assert content(tmp_path) == {}


def test_second_writer_of_a_folder_raises(tmp_path):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0) as writer:
        writer.add("train", [1], 1)
        with pytest.raises(ConfigError, match="another process is writing to"):
            StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=100, eos_id=0)
        writer.finish({})
    assert TokenStore.open(tmp_path).read("train", 0, 2).tolist() == [1, 0]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from tests.support.training.stores import content, take
from laneformer.train.data.store import StoreWriter

def in_child(work):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    work()
    os._exit(0)

def killed(path, point):
    # Kills the process before the point-th call of these functions, whose order makes the store safe.
    left = point
    def counted(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for owner, name in (os, "fsync"), (os, "replace"), (Path, "unlink"), (shutil, "rmtree"), (StoreWriter, "add"):
        setattr(owner, name, counted(getattr(owner, name)))
    take(path, 14, settings={{"text": "x"}}, every=4)

root = Path({root!r})
os.fsync = lambda _: None  # slow on a busy disk; only a loss of power needs it
take(root / "whole", 14, settings={{"text": "x"}})
take(root / "old", 20, settings=None, shard_tokens=40)
old, whole, began = content(root / "old"), content(root / "whole"), []
for point in range(1, 1000):
    path = root / "killed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(root / "old", path)
    status = in_child(lambda: killed(path, point))
    if os.WIFEXITED(status):
        break
    visible = {{name: data for name, data in content(path).items() if not name.startswith(".partial")}}
    assert visible == old or visible == whole or "manifest.json" not in visible, point
    began.append(take(path, 14, settings={{"text": "x"}}))
    assert content(path) == whole, point
print(*began)
"""


@pytest.mark.slow
def test_killed_writer_keeps_the_old_store_or_resumes(tmp_path):
    """The writer is killed before each call that determines the order of data on disk.

    The test runs in a separate process because it forks, which is unsafe in a process with JAX.
    """
    script = KILLED.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    began = [int(number) for number in done.stdout.split()]
    before, after = began[:-3], began[-3:]  # killed before and after the new store was complete
    assert len(before) > 60 and set(before) == {0, 4, 8, 12} and before == sorted(before), (
        "only work since the last checkpoint is lost"
    )
    assert after == [0, 0, 0], "a complete store is written again"
