"""Helpers for the tests of tokenizing: the command in this process, input files, and the texts of token folders."""

import json

import numpy as np
import pytest

from laneformer.commands import tokenize as command
from laneformer.train.data.store import TokenStore
from laneformer.train.tokenizing.encoder import load_tokenizer


def run(capsys, *args):
    """Runs the command. Returns its exit code, stdout and stderr."""
    code = command.main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Puts the cache of the datasets library into the test's folder, for processes that the test starts too."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def parquet(path, rows, group=3, schema=None):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
    return path


def jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def documents(path, split):
    """Token ids of each document of a split, with the special tokens."""
    store = TokenStore.open(path)
    ends = store.document_ends(split)
    return np.split(store.read(split, 0, store.tokens(split)), ends[:-1])


def texts(path, split):
    """Documents of a split without their end tokens, decoded with the folder's tokenizer."""
    store = TokenStore.open(path)
    tokenizer = load_tokenizer((path / "tokenizer.json").read_bytes(), "it")
    ids = documents(path, split)
    assert all(part[-1] == store.manifest.eos_id for part in ids)
    return [tokenizer.decode(part[:-1], skip_special_tokens=False) for part in ids]


def content(path):
    """Contents of the files of a finished folder, by name."""
    assert (path / "manifest.json").exists() and not (path / ".partial").exists()
    return {file.name: file.read_bytes() for file in path.iterdir()}
