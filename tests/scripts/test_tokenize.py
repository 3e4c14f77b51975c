"""scripts.tokenize: documents of text files, reproducible bytes, finished folders, FIM and errors."""

import json
import resource
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from laneformer.commands import tokenize as command
from laneformer.train.data.store import TokenStore
from laneformer.train.tokenizing import encoder
from tests.support.paths import ROOT
from tests.support.training.tokenizing import documents, run, texts


@pytest.fixture
def corpus(tmp_path):
    """Folder with 40 small Python files, and files to exclude or to skip."""
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


def test_files_become_documents(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    code, line, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 0, err
    assert "40 documents" in line and "3 skipped (without text; 2 cannot be read)" in line and "bytes/token" in line
    store = TokenStore.open(out)
    expected = {file.read_bytes().decode() for file in corpus.glob("pkg*/*.py")}
    train, validation = texts(out, "train"), texts(out, "validation")
    assert set(train) | set(validation) == expected and len(train) + len(validation) == 40
    assert 1 <= len(validation) <= 12 and store.documents("validation") == len(validation)
    assert store.text_bytes("train") == sum(len(text.encode()) for text in train)
    assert 262 < store.manifest.vocab_size <= 300 and store.manifest.eos_id == 0 and store.manifest.bos_id is None


def test_same_text_and_settings_give_the_same_bytes(tmp_path, corpus, capsys):
    for name in ("a", "b"):
        assert run(capsys, "--out", tmp_path / name, corpus, *FILES, "--shard-tokens", 500)[0] == 0
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert "train-00002.bin" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_copies_of_a_document_are_in_one_split(tmp_path, capsys):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"document {i // 3}")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--validation-fraction", 0.3, "--train-bpe", 262)[0] == 0
    assert not set(texts(tmp_path / "out", "train")) & set(texts(tmp_path / "out", "validation"))


def test_finished_work_is_neither_repeated_nor_replaced(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert run(capsys, "--out", out, corpus, *FILES)[0] == 0
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()}
    code, line, _ = run(capsys, "--out", out, corpus, *FILES)
    assert code == 0 and "nothing to do" in line
    code, _, err = run(capsys, "--out", out, corpus, *FILES, "--shard-tokens", 77)
    assert code == 2 and "shard_tokens (was 134217728, now 77)" in err and "--overwrite" in err
    (corpus / "more.py").write_text("more = True")
    code, _, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 2 and "(the text)" in err
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()} == before
    code, line, _ = run(capsys, "--out", out, corpus, *FILES, "--overwrite")
    assert code == 0 and "41 documents" in line


def test_damaged_folder_is_not_finished(tmp_path, corpus, capsys):
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


def test_few_documents_have_a_validation_split(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--validation-fraction", 1e-9, "--train-bpe", 262)[0] == 0
    assert TokenStore.open(tmp_path / "out").documents("validation") == 1
    code, _, err = run(capsys, "--out", tmp_path / "one", tmp_path / "0.txt")
    assert code == 2 and "--validation-fraction 0" in err
    code, line, _ = run(
        capsys, "--out", tmp_path / "one", tmp_path / "0.txt", "--validation-fraction", 0, "--train-bpe", 262
    )
    assert code == 0 and "1 documents" in line and TokenStore.open(tmp_path / "one").splits == ("train",)
    code, _, err = run(
        capsys, "--out", tmp_path / "two", tmp_path / "0.txt", tmp_path / "1.txt", "--validation-fraction", 0.999
    )
    assert (
        code == 2
        and "split train has no document at --validation-fraction 0.999" in err
        and not (tmp_path / "two" / "manifest.json").exists()
    )


def test_document_separator_splits_files(tmp_path, capsys):
    (tmp_path / "all.txt").write_text("\n--\n".join(f"story {i}" for i in range(20)))
    assert (
        run(
            capsys,
            "--out",
            tmp_path / "out",
            tmp_path / "all.txt",
            "--document-separator",
            "\n--\n",
            "--train-bpe",
            262,
        )[0]
        == 0
    )
    stories = texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")
    assert sorted(stories) == sorted(f"story {i}" for i in range(20))


def test_long_documents_are_encoded_in_pieces(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(encoder, "PIECE_CHARS", 64)
    monkeypatch.setattr(encoder, "GROUP_BYTES", 200)
    long = "".join(f"line {i} is here\n" for i in range(300))
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "short.txt").write_text("short")
    assert run(capsys, "--out", tmp_path / "out", tmp_path, "--train-bpe", 270)[0] == 0
    assert sorted(texts(tmp_path / "out", "train") + texts(tmp_path / "out", "validation")) == [long, "short"]


def test_document_larger_than_the_sample_is_sampled_in_pieces(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("".join(f"line {i} of a long text\n" for i in range(20_000)))
    args = (
        "--out",
        tmp_path / "out",
        tmp_path / "one.txt",
        "--validation-fraction",
        0,
        "--train-bpe",
        290,
        "--bpe-sample-bytes",
        100_000,
    )
    assert run(capsys, *args)[0] == 0
    assert TokenStore.open(tmp_path / "out").manifest.vocab_size > 270


def test_sample_is_independent_of_held_out_documents(tmp_path, capsys):
    for i in range(400):
        (tmp_path / f"{i}.txt").write_text(f"document {i}, a line of words\n" * 5)
    args = ("--validation-fraction", 0.5, "--train-bpe", 280, "--bpe-sample-bytes", 12_000)  # a fifth of the text
    assert run(capsys, "--out", tmp_path / "out", tmp_path, *args)[0] == 0
    assert TokenStore.open(tmp_path / "out").manifest.vocab_size > 265


def test_bpe_is_trained_on_a_sample(tmp_path, corpus, capsys):
    (corpus / "rare.py").write_text("zyxwv" * 1000)
    assert run(capsys, "--out", tmp_path / "all", corpus, *FILES, "--validation-fraction", 0)[0] == 0
    assert (
        run(capsys, "--out", tmp_path / "some", corpus, *FILES, "--validation-fraction", 0, "--bpe-sample-bytes", 1500)[
            0
        ]
        == 0
    )
    vocabularies = [
        Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")).get_vocab() for name in ("all", "some")
    ]
    assert vocabularies[0] != vocabularies[1]
    assert sorted(texts(tmp_path / "all", "train")) == sorted(texts(tmp_path / "some", "train"))


@pytest.fixture
def foreign(tmp_path):
    """A tokenizer.json that truncates, pads and adds special tokens, as published ones do."""
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=5, pad_token="<pad>", length=8)
    tokenizer.save(str(tmp_path / "foreign.json"))
    return tmp_path / "foreign.json"


def test_given_tokenizer_makes_the_ids(tmp_path, foreign, capsys):
    (tmp_path / "a.txt").write_text("a b a b a b")
    args = ("--out", tmp_path / "out", tmp_path / "a.txt", "--tokenizer", foreign, "--validation-fraction", 0)
    code, _, err = run(capsys, *args)
    assert code == 2 and "'<|endoftext|>'; give --end-token; special tokens are <s>, </s>, <pad>" in err
    assert run(capsys, *args, "--end-token", "</s>", "--begin-token", "<s>")[0] == 0
    store = TokenStore.open(tmp_path / "out")
    assert store.read("train", 0, 8).tolist() == [1, 3, 4, 3, 4, 3, 4, 2] and store.tokens("train") == 8
    assert (store.manifest.vocab_size, store.manifest.eos_id, store.manifest.bos_id) == (6, 2, 1)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == foreign.read_bytes()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_bytes())["add_bos_token"] is True
    assert "nothing to do" in run(capsys, *args, "--end-token", "</s>")[1]  # the tokenizer puts the same token there
    code, _, err = run(capsys, *args, "--end-token", "</s>", "--begin-token", "")
    assert code == 2 and "begin_token (was <s>, now )" in err


def test_several_tokens_before_a_text(tmp_path, foreign, capsys):
    tokenizer = Tokenizer.from_file(str(foreign))
    special = [("<s>", 1), ("<pad>", 5)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<pad> <s> $A", special_tokens=special)
    tokenizer.save(str(foreign))
    (tmp_path / "a.txt").write_text("a b")
    args = ("--out", tmp_path / "out", tmp_path / "a.txt", "--tokenizer", foreign, "--end-token", "</s>")
    assert run(capsys, *args, "--validation-fraction", 0)[0] == 0
    assert TokenStore.open(tmp_path / "out").read("train", 0, 5).tolist() == [5, 1, 3, 4, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--dataset NAME"),
        (("{c}", "--dataset", "json"), "--dataset NAME"),
        (("{c}", "--column", "body"), "--column applies to --dataset"),
        (("--dataset", "json", "--glob", "*.py"), "--glob applies to files"),
        (("{c}", "--tokenizer", "{c}/notes.txt", "--train-bpe", "500"), "--train-bpe applies to"),
        (("{c}", "--end-token", "</s>"), "--end-token, --begin-token and --fim-tokens need --tokenizer"),
        (("{c}", "--fim-rate", "0.5", "--fim-tokens", "a", "b", "c"), "--fim-tokens need --tokenizer"),
        (("{c}", "--fim-rate", "1.5"), "--fim-rate must be a share between 0 and 1, got 1.5"),
        (("{c}", "--fim-spm-rate", "0.1"), "--fim-spm-rate applies to --fim-rate"),
        (("{c}", "--chat"), "--chat applies to --dataset"),
        (("--dataset", "json", "--chat"), "--chat needs"),
        (("--dataset", "json", "--chat-date", "2025-01-31"), "--chat-date applies to --chat"),
        (("--dataset", "json", "--chat", "--tokenizer", "t", "--fim-rate", "0.5"), "--fim-rate applies to plain text"),
        (
            ("--dataset", "json", "--chat", "--tokenizer", "t", "--prompt-column", "q"),
            "or both --prompt-column and --answer-column",
        ),
        (
            ("--dataset", "json", "--chat", "--tokenizer", "t", "--chat-date", "today"),
            "--chat-date must be year, month and day, such as 2025-01-31, got today",
        ),
        (("{c}", "--train-bpe", "100"), "--train-bpe must be at least 262"),
        (("{c}", "--validation-fraction", "1"), "--validation-fraction must be at least 0 and below 1, got 1.0"),
        (("{c}", "--shard-tokens", "0"), "--shard-tokens must be at least 1, got 0"),
        (("{c}/nowhere",), "nowhere does not exist"),
        (("{c}", "--glob", "*.rs"), "no files in"),
        (("{c}/latin.py", "{c}/empty.py"), "no text in"),
        (("{c}", "--tokenizer", "{c}/none.json"), "cannot read --tokenizer"),
        (("{c}", "--tokenizer", "{c}/notes.txt"), "notes.txt is not a tokenizer.json"),
        (("{c}", "--out", "{c}/notes.txt"), "notes.txt is a file"),
        (("{c}", "--out", "{c}/notes.txt/below"), "cannot write"),
    ],
)
def test_bad_options_are_named(tmp_path, corpus, capsys, args, message):
    args = [arg.replace("{c}", str(corpus)) for arg in args]
    code, out, err = run(capsys, *([] if "--out" in args else ["--out", tmp_path / "out"]), *args)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def shell(*args, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.tokenize", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_command_runs_in_a_process_and_help_lists_every_option(tmp_path, corpus):
    process = shell("--out", tmp_path / "out", corpus, *FILES)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "40 documents" in out, err
    process = shell("--out", tmp_path / "out", corpus)
    out, err = process.communicate(timeout=60)
    assert (
        (process.returncode, out) == (2, "") and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    )
    process = shell("--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert all(
        f"--{name.replace('_', '-')}" in out for name in command.Options.__dataclass_fields__ if name != "sources"
    )


def test_fim_rearranges_training_documents(tmp_path, corpus, capsys):
    out, names = tmp_path / "out", ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert run(capsys, "--out", out, corpus, *FILES, "--fim-rate", 0.8)[0] == 0
    expected = {file.read_bytes().decode() for file in corpus.glob("pkg*/*.py")}
    rearranged = [text for text in texts(out, "train") if text.startswith(names[0])]
    assert 20 <= len(rearranged) < len(texts(out, "train")), "about four fifths"
    assert set(texts(out, "validation")) < expected, "validation documents are not rearranged"
    spm = 0
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    prefix, suffix, middle = map(tokenizer.token_to_id, names)
    for document in documents(out, "train"):
        ids = document[:-1].tolist()
        if prefix in ids:
            assert [ids.count(mark) for mark in (prefix, suffix, middle)] == [1, 1, 1] and ids[0] == prefix
            first, second = ids.index(suffix), ids.index(middle)
            spm += first == 1
            ids = [*ids[1:first], *ids[second + 1 :], *ids[first + 1 : second]]
        assert tokenizer.decode(ids) in expected
    assert 5 <= spm <= 25, "about half of them"
    code, _, err = run(capsys, "--out", out, corpus, *FILES)
    assert code == 2 and "fim (was {'rate': 0.8, " in err


def test_fim_uses_the_given_tokens(tmp_path, foreign, capsys):
    (tmp_path / "a.txt").write_text("a b a b a b")
    args = (
        "--out",
        tmp_path / "out",
        tmp_path / "a.txt",
        "--tokenizer",
        foreign,
        "--validation-fraction",
        0,
        "--end-token",
        "</s>",
        "--fim-rate",
        1,
    )
    code, _, err = run(capsys, *args)
    assert code == 2 and "'<|fim_prefix|>'; give --fim-tokens; special tokens are <s>" in err
    assert run(capsys, *args, "--fim-tokens", "<s>", "<pad>", "<unk>", "--fim-spm-rate", 0)[0] == 0
    [ids] = documents(tmp_path / "out", "train")
    assert [ids[0], *ids[(ids == 5) | (ids == 0)]] == [1, 0, 5]


def test_full_disk_leaves_the_old_folder(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    run(capsys, "--out", out, corpus, *FILES)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    (corpus / "big.py").write_text("".join(f"{i} " for i in range(20000)))
    # A limit of 64 KiB per file simulates a full disk. It is set from here, before the process writes, because a
    # preexec_fn would fork under JAX.
    process = shell("--out", out, corpus, *FILES, "--overwrite")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (65536, 65536))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: cannot write" in err and "Traceback" not in err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
