"""Resuming scripts.tokenize: after a kill, Ctrl-C or a full disk, the same command writes the bytes of an uninterrupted
one.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from laneformer.train.tokenizing import encoder, writer
from tests.support.paths import ROOT
from tests.support.training.tokenizing import cache, content, jsonl, parquet, run  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
GROUP, CHECKPOINT = 1500, 400
# The command, which sends a signal to itself when it writes the n-th document.
STOPPED = f"""
import os, sys, time
from laneformer.commands import tokenize as command
from laneformer.train.tokenizing import encoder, writer
encoder.GROUP_BYTES, writer.CHECKPOINT_TOKENS = {GROUP}, {CHECKPOINT}
left, number, add = int(sys.argv[1]), int(sys.argv[2]), writer.StoreWriter.add
def stop(self, *args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
    add(self, *args)
writer.StoreWriter.add = stop
sys.exit(command.main(sys.argv[3:]))
"""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(encoder, "GROUP_BYTES", GROUP)
    monkeypatch.setattr(writer, "CHECKPOINT_TOKENS", CHECKPOINT)


def stopped(after, number, *args):
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(after), str(int(number)), *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def lines(n):
    return [f"{i * 7919} words and {i}" * (1 + i % 3) for i in range(n)]


def chats(n):
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[:9]}]}
        if i % 7
        else {"messages": None}
        for i, text in enumerate(lines(n))
    ]


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "t").mkdir()
    encoder.train_bpe(lines(100), 320).save(str(tmp_path / "t" / "tokenizer.json"))
    return tmp_path / "t" / "tokenizer.json"


def sources(tmp_path, tokenizer):
    folder = tmp_path / "files"
    folder.mkdir()
    for i, text in enumerate(lines(300)):
        (folder / f"{i:03d}").write_bytes(b"\xff" if i % 11 == 5 else text.encode())
    (tmp_path / "one").write_text("\n".join(lines(300)))
    parquet(tmp_path / "rows.parquet", [{"id": i, "text": text or None} for i, text in enumerate(lines(300))], group=50)
    jsonl(tmp_path / "chats.jsonl", chats(300))
    given = ("--tokenizer", tokenizer)
    return {
        "files": (folder, "--train-bpe", 320, "--fim-rate", 0.5),
        "parts of a file": (tmp_path / "one", "--document-separator", "\n", *given),
        "rows": ("--dataset", "parquet", "--data-files", tmp_path / "rows.parquet", "--streaming", *given),
        "chats": ("--dataset", "json", "--data-files", tmp_path / "chats.jsonl", "--streaming", "--chat", *given),
    }


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        ("files", [signal.SIGKILL, signal.SIGINT]),
        ("parts of a file", [signal.SIGKILL]),
        pytest.param("rows", [signal.SIGKILL], marks=pytest.mark.exhaustive),
        ("chats", [signal.SIGKILL]),
    ],
)
def test_interrupted_command_resumes_to_the_same_bytes(tmp_path, tokenizer, capsys, source, stops):
    args = (*sources(tmp_path, tokenizer)[source], "--validation-fraction", 0.1, "--shard-tokens", 1000)
    assert run(capsys, "--out", tmp_path / "whole", *args)[0] == 0
    out, done = tmp_path / "out", 0
    for number in stops:
        code, err = stopped(100, number, "--out", out, *args)
        assert code == (-number if number == signal.SIGKILL else 130) and not (out / "manifest.json").exists()
        assert number == signal.SIGKILL or ("run the same command again to resume" in err and "Traceback" not in err)
    code, _, err = run(capsys, "--out", out, *args)
    done = int(err.split("resuming after ")[1].split()[0])
    assert code == 0 and 70 * len(stops) < done < 130 * len(stops), "few documents are processed twice"
    assert content(out) == content(tmp_path / "whole")


def test_full_disk_resumes_to_the_same_bytes(tmp_path, tokenizer, capsys):
    """A limit of 32 KiB per file simulates a full disk."""
    (tmp_path / "many").write_text("\n".join(lines(2000)))
    args = (tmp_path / "many", "--document-separator", "\n", "--tokenizer", tokenizer, "--validation-fraction", 0)
    assert run(capsys, "--out", tmp_path / "whole", *args)[0] == 0
    assert max(map(len, content(tmp_path / "whole").values())) > 32768
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))"
    process = subprocess.run(
        [sys.executable, "-c", f"{limit}\n{STOPPED}", "0", "0", "--out", *map(str, (tmp_path / "out", *args))],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 2 and "error: cannot write" in process.stderr and "Traceback" not in process.stderr
    assert "File too large; choose another --out" in process.stderr, "the error does not suggest to free space"
    code, _, err = run(capsys, "--out", tmp_path / "out", *args)
    assert code == 0 and "resuming after" in err
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_bad_row_and_other_settings_lose_nothing(tmp_path, tokenizer, capsys):
    args = ("--out", tmp_path / "out", *sources(tmp_path, tokenizer)["chats"], "--max-bad-rows", 0)
    rows, file = chats(300), tmp_path / "chats.jsonl"
    changed = file.stat().st_mtime_ns
    same_size = {"messages": "x" * (len(json.dumps(rows[250]["messages"])) - 2)}  # the file looks unchanged
    broken = [*rows[:250], same_size, *rows[251:]]
    jsonl(file, broken)
    os.utime(file, ns=(changed, changed))
    code, _, err = run(capsys, *args)
    assert code == 2 and "line 251: messages must be a list, not str" in err and "Traceback" not in err
    code, _, err = run(capsys, *args, "--shard-tokens", 1000)
    assert code == 2 and "shard_tokens (was 134217728, now 1000)" in err
    jsonl(file, rows)
    os.utime(file, ns=(changed, changed))
    code, _, err = run(capsys, *args)
    assert code == 0 and "resuming after 2" in err
    jsonl(file, broken)
    assert run(capsys, *args, "--overwrite")[0] == 2
    jsonl(file, rows)
    code, _, err = run(capsys, *args, "--shard-tokens", 1000, "--overwrite")
    assert code == 0 and "resuming after" not in err
