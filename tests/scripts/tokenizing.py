"""What the tests of tokenizing share: the command in this process, and what a token folder holds, as text."""

import numpy as np

from scripts import tokenize as command
from scripts.encoder import load_tokenizer
from train.shards import TokenStore


def run(capsys, *args):
    """(exit code, stdout, stderr) of the command."""
    code = command.main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def documents(path, split):
    """The ids of each document, with its marks."""
    store = TokenStore.open(path)
    ends = store.document_ends(split)
    return np.split(store.read(split, 0, store.tokens(split)), ends[:-1])


def texts(path, split):
    """The documents of a split without their end mark, decoded by the folder's own tokenizer."""
    store = TokenStore.open(path)
    tokenizer = load_tokenizer((path / "tokenizer.json").read_bytes(), "it")
    ids = documents(path, split)
    assert all(part[-1] == store.manifest.eos_id for part in ids)
    return [tokenizer.decode(part[:-1], skip_special_tokens=False) for part in ids]


def content(path):
    """name -> bytes of the files of a finished folder."""
    assert (path / "manifest.json").exists() and not (path / ".partial").exists()
    return {file.name: file.read_bytes() for file in path.iterdir()}
