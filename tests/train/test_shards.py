"""Token shards: what is written is read back across shard borders, and every kind of damage is named."""

import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.errors import ConfigError, InputError
from train.shards import BLOCK_BYTES, Manifest, StoreWriter, TokenStore

TOKENIZER = b'{"any": "bytes"}'


def write(path, documents, *, vocab_size=100, shard_tokens=1 << 27, split="train", **marks):
    with StoreWriter(path, tokenizer=TOKENIZER, vocab_size=vocab_size, eos_id=0, shard_tokens=shard_tokens, **marks) as writer:
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


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_dtype_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    store = write(tmp_path, [[vocab_size - 1, 1]], vocab_size=vocab_size)
    assert store.read("train", 0, 3).tolist() == [vocab_size - 1, 1, 0]
    assert np.fromfile(tmp_path / "train-00000.bin", dtype).tolist() == [vocab_size - 1, 1, 0]


def test_begin_token_and_splits(tmp_path):
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


def test_without_a_validation_split_the_message_names_the_option(tmp_path):
    with pytest.raises(InputError, match="--validation-fraction"):
        write(tmp_path, [[1]]).tokens("validation")


def test_the_same_input_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, [[1, 2], [3]] * 50, shard_tokens=20)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert len(files) > 5
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_unfinished_write_leaves_the_old_store(tmp_path):
    store = write(tmp_path, [[1, 2, 3]])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="died"), StoreWriter(tmp_path, tokenizer=b"other", vocab_size=9, eos_id=0) as writer:
        writer.add("train", [4], 1)
        raise RuntimeError("died")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert store.read("train", 0, 4).tolist() == [1, 2, 3, 0]


def test_overwriting_removes_old_shards_and_nothing_else(tmp_path):
    old = write(tmp_path, [[1]] * 10, shard_tokens=2)
    (tmp_path / "notes.bin").write_text("mine")
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "train-00007.bin").write_text("of a killed run")
    kept = old.read("train", 0, 20)  # mapped: a run that reads the old store keeps it
    new = write(tmp_path, [[2]])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.json", "notes.bin", "tokenizer.json", "train-00000.bin"]
    assert new.read("train", 0, 2).tolist() == [2, 0]
    assert (old.read("train", 0, 20) == kept).all()


def test_bad_writes(tmp_path):
    with StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=0) as writer:
        for ids in ([10], [-1]):
            with pytest.raises(InputError, match=f"token id {ids[0]} is outside the vocabulary of 10"):
                writer.add("train", ids, 1)
        with pytest.raises(ConfigError, match="split name"):
            writer.add("../up", [1], 1)
    with pytest.raises(ConfigError, match="token 10 is outside"):
        StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=10)
    with pytest.raises(ConfigError, match="shard_tokens is 0"):
        StoreWriter(tmp_path, tokenizer=TOKENIZER, vocab_size=10, eos_id=0, shard_tokens=0)


def test_missing_truncated_and_longer_shards(tmp_path):
    write(tmp_path, [[1, 2, 3]] * 10, shard_tokens=8)
    shard = tmp_path / "train-00001.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(InputError, match=r"train-00001\.bin is truncated: 14 bytes, the manifest says 16; .*--overwrite"):
        TokenStore.open(tmp_path)
    shard.write_bytes(data + b"\0\0")
    with pytest.raises(InputError, match="too long"):
        TokenStore.open(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=r"train-00001\.bin is missing"):
        TokenStore.open(tmp_path)


def test_a_shard_that_shrinks_after_opening_is_an_error_not_a_crash(tmp_path):
    store = write(tmp_path, [[1, 2, 3]] * 10)
    os.truncate(tmp_path / "train-00000.bin", 10)
    with pytest.raises(InputError, match="truncated"):
        store.read("train", 0, 40)


def test_one_flipped_bit_is_found_in_its_block_and_only_there(tmp_path):
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
    for _ in range(2):  # and again: a damaged block never counts as checked
        with pytest.raises(InputError, match=rf"train-00000\.bin is corrupted near byte {BLOCK_BYTES}: .*--overwrite"):
            store.read("train", 2 * per_block - 1, 2)
    with pytest.raises(InputError, match="corrupted"):
        store.verify()


def test_tokenizer_must_be_the_one_of_the_tokens(tmp_path):
    store = write(tmp_path, [[1]])
    store.require_tokenizer(hashlib.sha256(TOKENIZER).hexdigest())
    with pytest.raises(InputError, match=r"another tokenizer .*--tokenizer"):
        store.require_tokenizer(hashlib.sha256(b"other").hexdigest())
    (tmp_path / "tokenizer.json").write_bytes(b"other")
    with pytest.raises(InputError, match="is not the tokenizer that made these tokens"):
        TokenStore.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 2}, "format version 2, this program reads 1"),
    ({"format": "other"}, "is not a laneformer-tokens manifest"),
    ({"dtype": "float32"}, "damaged .*float32"),
    ({"splits": {"train": [{"file": "train-00000.bin"}]}}, "damaged"),
    ({"splits": {"train": [{"file": "train-00000.bin", "tokens": 2, "bytes": 1, "documents": 1, "crc32": "00"}]}}, "not have 1 blocks"),
    ({"surprise": 1}, "damaged .*surprise"),
])
def test_manifests_that_cannot_be_read(tmp_path, change, message):
    write(tmp_path, [[1]])
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        TokenStore.open(tmp_path)


def test_no_manifest_and_half_a_manifest(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json.*scripts\.tokenize"):
        TokenStore.open(tmp_path / "nowhere")
    write(tmp_path, [[1]])
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(InputError, match="damaged"):
        TokenStore.open(tmp_path)


def test_manifest_round_trip(tmp_path):
    store = write(tmp_path, [[1, 2]])
    assert Manifest.read(tmp_path) == store.manifest
    assert store.manifest.to_json() == (tmp_path / "manifest.json").read_text()
