"""Tokenizing: text round-trips, the same input gives the same bytes, finished work is not repeated, mistakes are named."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scripts import tokenize as command
from train.shards import TokenStore

ROOT = Path(command.__file__).parents[1]


def run(capsys, *args):
    """(exit code, stdout, stderr) of the command."""
    code = command.main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def texts(path, split):
    """The documents of a split, decoded by the folder's own tokenizer."""
    store = TokenStore.open(path)
    tokenizer = command.load_tokenizer((path / "tokenizer.json").read_bytes(), "it")
    ids = store.read(split, 0, store.tokens(split))
    ends = np.flatnonzero(ids == store.manifest.eos_id)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[:-1], skip_special_tokens=False) for part in np.split(ids, ends + 1)[:-1]]


@pytest.fixture
def corpus(tmp_path):
    """Forty small Python files, and what should be left out or skipped."""
    root = tmp_path / "corpus"
    for i in range(40):
        file = root / f"pkg{i % 4}" / f"m{i:02d}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def f{i}(x):\r\n\treturn x ** {i * 1001}  # été <|endoftext|> 🐍\n" * (1 + i % 3), newline="")
    (root / "empty.py").write_text("")
    (root / "latin.py").write_bytes("# été\n".encode("latin-1"))
    (root / "zeros.py").write_bytes(b"\0\0")
    (root / "notes.txt").write_text("notes")
    (root / "test").mkdir()
    (root / "test" / "test_it.py").write_text("never")
    (root / ".git").mkdir()
    (root / ".git" / "hook.py").write_text("never")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "old.py").write_text("never")
    (root / "broken.py").symlink_to("nowhere.py")
    return root


FILES = ("--glob", "*.py", "--exclude", "test", "--train-bpe", 300, "--validation-fraction", 0.1)


@pytest.fixture(scope="module")
def trained():
    bpe = command.train_bpe([Path(command.__file__).read_text(encoding="utf-8")], 600)
    return command.load_tokenizer(bpe.to_str().encode(), "trained")


@settings(deadline=None, max_examples=300)
@given(st.text() | st.text(alphabet=" \t\r\n\u00a0\u2028ab1'<|>endoftext"))
def test_any_text_round_trips(trained, text):
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=True) == text
    assert 0 not in ids


def test_the_end_of_text_is_token_0_and_digits_stand_alone(trained):
    assert trained.token_to_id("<|endoftext|>") == 0
    assert trained.get_vocab_size() == 600
    assert trained.encode("12345").tokens == list("12345")


@given(st.text(alphabet="ab\n", max_size=200))
def test_pieces_make_up_the_text(text):
    parts = list(command.pieces(text, 16))
    assert "".join(parts) == text
    assert all(0 < len(part) <= 16 for part in parts)
    assert all(part.endswith("\n") or len(part) == 16 for part in parts[:-1])


def test_files_become_documents(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    code, line, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 0, err
    assert "40 documents" in line and "2 skipped (not UTF-8 text, or empty)" in line and "bytes/token" in line
    store = TokenStore.open(out)
    expected = {file.read_bytes().decode() for file in corpus.glob("pkg*/*.py")}
    train, validation = texts(out, "train"), texts(out, "validation")
    assert set(train) | set(validation) == expected and len(train) + len(validation) == 40
    assert 1 <= len(validation) <= 12 and store.documents("validation") == len(validation)
    assert store.text_bytes("train") == sum(len(text.encode()) for text in train)
    assert 257 < store.manifest.vocab_size <= 300 and store.manifest.eos_id == 0 and store.manifest.bos_id is None


def test_the_same_text_and_settings_give_the_same_bytes(tmp_path, corpus, capsys):
    for name in ("a", "b"):
        assert run(capsys, "--out", tmp_path / name, corpus, *FILES, "--shard-tokens", 500)[0] == 0
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert "train-00002.bin" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_copies_of_a_document_stay_on_one_side(tmp_path, capsys):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"document {i // 3}")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--validation-fraction", 0.3, "--train-bpe", 260)[0] == 0
    assert not set(texts(tmp_path / "out", "train")) & set(texts(tmp_path / "out", "validation"))


def test_finished_work_is_not_repeated_and_not_replaced_unasked(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert run(capsys, "--out", out, corpus, *FILES)[0] == 0
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()}
    code, line, _ = run(capsys, "--out", out, corpus, *FILES)
    assert code == 0 and "nothing to do" in line
    code, _, err = run(capsys, "--out", out, corpus, *FILES, "--shard-tokens", 77)
    assert code == 2 and "shard_tokens (was 134217728, now 77)" in err and "--overwrite" in err
    (corpus / "more.py").write_text("more = True")
    code, _, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 2 and "the text differ" in err
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()} == before
    code, line, _ = run(capsys, "--out", out, corpus, *FILES, "--overwrite")
    assert code == 0 and "41 documents" in line


def test_a_damaged_folder_is_not_called_finished(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    run(capsys, "--out", out, corpus, *FILES)
    shard = out / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    code, _, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 2 and "corrupted" in err and "--overwrite" in err
    assert run(capsys, "--out", out, corpus, *FILES, "--overwrite")[0] == 0
    TokenStore.open(out).verify()


def test_few_documents_still_give_a_validation_split(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--validation-fraction", 1e-9, "--train-bpe", 260)[0] == 0
    assert TokenStore.open(tmp_path / "out").documents("validation") == 1
    code, _, err = run(capsys, "--out", tmp_path / "one", tmp_path / "0.txt")
    assert code == 2 and "1 document cannot be divided: give --validation-fraction 0" in err
    code, line, _ = run(capsys, "--out", tmp_path / "one", tmp_path / "0.txt", "--validation-fraction", 0, "--train-bpe", 260)
    assert code == 0 and "1 documents" in line and TokenStore.open(tmp_path / "one").splits == ("train",)
    code, _, err = run(capsys, "--out", tmp_path / "two", tmp_path / "0.txt", tmp_path / "1.txt", "--validation-fraction", 0.999)
    assert code == 2 and "no document fell to split train" in err and not list((tmp_path / "two").iterdir())


def test_a_file_of_many_documents(tmp_path, capsys):
    (tmp_path / "all.txt").write_text("\n--\n".join(f"story {i}" for i in range(20)))
    assert run(capsys, "--out", tmp_path / "out", tmp_path / "all.txt", "--document-separator", "\n--\n", "--train-bpe", 257)[0] == 0
    stories = texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")
    assert sorted(stories) == sorted(f"story {i}" for i in range(20))


def test_long_documents_are_encoded_in_pieces(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "PIECE_CHARS", 64)
    monkeypatch.setattr(command, "BATCH_CHARS", 200)
    long = "".join(f"line {i} is here\n" for i in range(300))
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "short.txt").write_text("short")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--train-bpe", 270)[0] == 0
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")) == [long, "short"]


def test_one_document_larger_than_the_sample_is_sampled_from_within(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("".join(f"line {i} of a long text\n" for i in range(20_000)))
    args = ("--out", tmp_path / "out", tmp_path / "one.txt", "--validation-fraction", 0, "--train-bpe", 290, "--bpe-sample-bytes", 100_000)
    assert run(capsys, *args)[0] == 0
    assert TokenStore.open(tmp_path / "out").manifest.vocab_size > 270


def test_the_sample_is_independent_of_what_is_held_out(tmp_path, capsys):
    for i in range(400):
        (tmp_path / f"{i}.txt").write_text(f"document {i}, a line of words\n" * 5)
    args = ("--validation-fraction", 0.5, "--train-bpe", 280, "--bpe-sample-bytes", 12_000)  # a fifth
    assert run(capsys, "--out", tmp_path / "out", tmp_path, *args)[0] == 0
    assert TokenStore.open(tmp_path / "out").manifest.vocab_size > 265


def test_the_bpe_is_trained_on_a_sample(tmp_path, corpus, capsys):
    (corpus / "rare.py").write_text("zyxwv" * 1000)
    assert run(capsys, "--out", tmp_path / "all", corpus, *FILES, "--validation-fraction", 0)[0] == 0
    assert run(capsys, "--out", tmp_path / "some", corpus, *FILES, "--validation-fraction", 0, "--bpe-sample-bytes", 1500)[0] == 0
    vocabularies = [Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")).get_vocab() for name in ("all", "some")]
    assert vocabularies[0] != vocabularies[1]
    assert sorted(texts(tmp_path / "all", "train")) == sorted(texts(tmp_path / "some", "train"))


@pytest.fixture
def foreign(tmp_path):
    """A tokenizer.json that cuts, pads and adds marks, as published ones do."""
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=5, pad_token="<pad>", length=8)
    tokenizer.save(str(tmp_path / "foreign.json"))
    return tmp_path / "foreign.json"


def test_a_given_tokenizer(tmp_path, foreign, capsys):
    (tmp_path / "a.txt").write_text("a b a b a b")
    args = ("--out", tmp_path / "out", tmp_path / "a.txt", "--tokenizer", foreign, "--validation-fraction", 0)
    code, _, err = run(capsys, *args)
    assert code == 2 and "has no token '<|endoftext|>': give --end-token, perhaps one of <s>, </s>, <pad>" in err
    assert run(capsys, *args, "--end-token", "</s>", "--begin-token", "<s>")[0] == 0
    store = TokenStore.open(tmp_path / "out")
    assert store.read("train", 0, 8).tolist() == [1, 3, 4, 3, 4, 3, 4, 2] and store.tokens("train") == 8
    assert (store.manifest.vocab_size, store.manifest.eos_id, store.manifest.bos_id) == (6, 2, 1)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == foreign.read_bytes()
    code, _, err = run(capsys, *args, "--end-token", "</s>")
    assert code == 2 and "begin_token (was <s>, now )" in err


@pytest.mark.parametrize(("args", "message"), [
    ((), "give either files and folders to tokenize, or --dataset NAME"),
    (("{c}", "--dataset", "json"), "give either files and folders"),
    (("{c}", "--column", "body"), "--column goes with --dataset: leave it out"),
    (("--dataset", "json", "--glob", "*.py"), "--glob goes with files and folders: leave it out"),
    (("{c}", "--tokenizer", "{c}/notes.txt", "--train-bpe", "500"), "--train-bpe goes with a BPE trained here"),
    (("{c}", "--end-token", "</s>"), "--end-token and --begin-token belong to --tokenizer"),
    (("{c}", "--train-bpe", "100"), "--train-bpe 100: a byte-level vocabulary has at least 257"),
    (("{c}", "--validation-fraction", "1"), "at least 0 and below 1"),
    (("{c}", "--shard-tokens", "0"), "give at least 1"),
    (("{c}/nowhere",), "nowhere does not exist"),
    (("{c}", "--glob", "*.rs"), "no files in"),
    (("{c}/latin.py", "{c}/empty.py"), "no text in"),
    (("{c}", "--tokenizer", "{c}/none.json"), "cannot read --tokenizer"),
    (("{c}", "--tokenizer", "{c}/notes.txt"), "notes.txt is not a tokenizer.json"),
    (("{c}", "--out", "{c}/notes.txt"), "is a file: give a folder"),
    (("{c}", "--out", "{c}/notes.txt/below"), "cannot write"),
])
def test_mistakes_are_named(tmp_path, corpus, capsys, args, message):
    args = [arg.replace("{c}", str(corpus)) for arg in args]
    code, out, err = run(capsys, *([] if "--out" in args else ["--out", tmp_path / "out"]), *args)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def shell(*args, **more):
    return subprocess.Popen([sys.executable, "-m", "scripts.tokenize", *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **more)


def test_as_a_command(tmp_path, corpus):
    """In its own process; and --help shows every option."""
    process = shell("--out", tmp_path / "out", corpus, *FILES)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "40 documents" in out, err
    process = shell("--out", tmp_path / "out", corpus)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and err.startswith("error: ") and "Traceback" not in err
    process = shell("--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert all(f"--{name.replace('_', '-')}" in out for name in command.Options.__dataclass_fields__ if name != "sources")


def test_a_full_disk_is_an_error_that_leaves_the_old_folder(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    run(capsys, "--out", out, corpus, *FILES)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    (corpus / "big.py").write_text("".join(f"{i} " for i in range(20000)))
    # No file may grow over 64 KiB: what a full disk looks like to the program.
    process = shell("--out", out, corpus, *FILES, "--overwrite")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (65536, 65536))  # long before it writes; a preexec_fn would fork under JAX
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: cannot write" in err and "Traceback" not in err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_killed_and_started_again(tmp_path):
    source, out = tmp_path / "big.txt", tmp_path / "out"
    source.write_text("\n".join(f"{i * 7919} words and {i}" for i in range(60_000)))
    args = ("--out", out, source, "--document-separator", "\n", "--train-bpe", 300)
    process = shell(*args)
    while not (out / ".partial").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (out / "manifest.json").exists()
    process = shell(*args)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert TokenStore.open(out).documents("train") > 58_000 and not (out / ".partial").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_of_local_files(tmp_path, streaming):
    pytest.importorskip("datasets")
    rows = [f"row {i}\nof text" for i in range(300)] + ["", None]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(rows)))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    args = ["--out", tmp_path / "out", "--dataset", "json", "--data-files", tmp_path / "*.jsonl", "--train-bpe", "260",
            "--validation-fraction", "0.1", *(["--streaming"] if streaming else [])]
    outcomes = []
    for column in ("text", "id", "body", "body"):
        process = shell(*args, "--column", column, env=environment)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err
        outcomes.append((process.returncode, out + err))
    assert outcomes[0][0] == 2 and "no column 'text': give --column, one of id, body" in outcomes[0][1]
    assert outcomes[1][0] == 2 and "holds int, not text: give another --column" in outcomes[1][1]
    assert outcomes[2][0] == 0 and "300 documents" in outcomes[2][1] and "2 skipped" in outcomes[2][1], outcomes[2][1]
    assert outcomes[3][0] == 0 and "nothing to do" in outcomes[3][1]
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")) == sorted(rows[:300])


def test_a_dataset_that_is_not_there(tmp_path):
    pytest.importorskip("datasets")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    process = shell("--out", tmp_path / "out", "--dataset", "json", "--data-files", tmp_path / "none.jsonl", env=environment)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "error: cannot read dataset json (split train): Unable to find" in err and "Traceback" not in err
