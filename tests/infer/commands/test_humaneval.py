"""python -m infer humaneval, as a user runs it: on a small saved checkpoint, killed and started again."""

import contextlib
import json
import re
import signal
import subprocess
import sys

import pytest

import laneformer.infer.commands.humaneval
from laneformer.infer.__main__ import main
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.sandbox import levels
from tests.support.checkpoints import CHATML, save_checkpoint
from tests.support.evaluation_cases import ADD, LEAST, TWICE, write_jsonl
from tests.support.paths import ROOT
from tests.support.sandboxes import usual_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with problems and a checkpoint: random weights, and a tokenizer of single bytes with ChatML's tokens."""
    folder = tmp_path_factory.mktemp("humaneval")
    save_checkpoint(folder / "model", *CHATML, layers=1, lanes=1, max_position_embeddings=1024)
    rows = [{**(ADD if n % 2 else TWICE), "task_id": f"HumanEval/{n}"} for n in range(6)]
    write_jsonl(folder / "he.jsonl", rows)
    write_jsonl(folder / "mbpp.jsonl", [LEAST])
    return folder


@pytest.fixture(scope="module")
def judge():
    with Judge(usual_level()) as judge:
        yield judge


@pytest.fixture
def known_judge(judge, monkeypatch):
    """Lets the command use an existing judge, which saves the self-test of a sandbox."""
    monkeypatch.setattr(laneformer.infer.commands.humaneval, "Judge", lambda *_: contextlib.nullcontext(judge))


def humaneval(*args):
    return ["humaneval", "--sandbox", usual_level(), *map(str, args)]


# Runs a command that kills itself, without cleaning up, when its file of the given class has the given number of
# entries.
KILLED = """
import os, signal, sys
from laneformer.infer.__main__ import main
from laneformer.infer.evaluate import sample_files

record, entries = getattr(sample_files, sys.argv[1]), int(sys.argv[2])
add = record.add

def add_and_die(self, *args):
    global entries
    add(self, *args)
    entries -= 1
    if not entries:
        os.kill(os.getpid(), signal.SIGKILL)

record.add = add_and_die
main(sys.argv[3:])
"""


def kill_after(record, entries, *args):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, record, str(entries), *humaneval(*args)],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout.decode()


def generation(folder, name):
    return (
        "--checkpoint",
        folder / "model",
        "--data",
        folder / "he.jsonl",
        "--samples",
        folder / f"{name}.jsonl",
        "--max-new-tokens",
        40,
        "--temperature",
        1,
        "--seed",
        3,
        "--samples-per-problem",
        2,
    )


@pytest.mark.slow
def test_killed_generation_is_resumed(folder, capsys):
    killed = folder / "killed.jsonl"
    kill_after("SampleFile", 3, *generation(folder, "killed"))
    before = killed.read_bytes()
    assert before.count(b"\n") == 3
    killed.write_bytes(before + b'{"task_id": "HumanEv')  # the state after a kill while writing
    assert main(humaneval(*generation(folder, "killed"))) == 0
    assert killed.read_bytes().startswith(before)
    assert main([*humaneval(*generation(folder, "straight")), "--generate-only"]) == 0
    ours, whole = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("killed.jsonl", "straight.jsonl")
    )
    assert len(ours) == 12
    for a, b in zip(ours, whole, strict=True):
        assert {k: v for k, v in a.items() if "seconds" not in k} == {k: v for k, v in b.items() if "seconds" not in k}
    assert len({row["raw"] for row in whole}) == 12
    report = json.loads((folder / "killed.report.json").read_text())
    assert (report["passed"], report["total"], report["problems"], report["pass@1"]) == (0, 12, 6, 0.0)
    assert report["generation"]["checkpoint"].endswith("model") and report["generation"]["tokens"] == 12 * 40
    shown = capsys.readouterr()
    assert "HumanEval: 0/12 passed, pass@1 0.0 %" in shown.out and "generating" in shown.err and "samples" in shown.err
    assert main([*humaneval(*generation(folder, "killed")), "--min-p", "0.5"]) == 2
    assert "other settings (sampling)" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_scoring_is_resumed(folder, capsys):
    programs = [f"{ADD['prompt']}    return a + b + {n % 2}  # {n}" for n in range(20)]
    write_jsonl(folder / "some.jsonl", [{"task_id": "HumanEval/1", "solution": program} for program in programs])
    args = ("--data", folder / "he.jsonl", "--samples", folder / "some.jsonl", "--json", folder / "some.json")
    journal = folder / "some.json.verdicts.jsonl"
    kill_after("VerdictFile", 3, *args)
    done = len(journal.read_text().splitlines()) - 1
    assert main(humaneval(*args)) == 0
    shown = capsys.readouterr()
    known = int(re.search(r"resuming with (\d+) verdicts", shown.err)[1])
    assert done == known == 3
    report = json.loads((folder / "some.json").read_text())
    assert [each["passed"] for each in report["verdicts"]] == [True, False] * 10 and not journal.exists()
    assert report["generation"] is None and report["problems_without_samples"] == 5 and "5 of 6 problems" in shown.out


def test_samples_without_checkpoint_are_scored(folder, capsys):
    right, fake = TWICE["canonical_solution"], "    import os; os._exit(0)"
    write_jsonl(
        folder / "alone.jsonl",
        [{"task_id": f"HumanEval/{n}", "completion": text} for n, text in enumerate((right, fake))],
    )
    assert (
        main(
            humaneval(
                "--data",
                folder / "he.jsonl",
                "--samples",
                folder / "alone.jsonl",
                "--json",
                folder / "out" / "alone.json",
            )
        )
        == 0
    )
    report = json.loads((folder / "out" / "alone.json").read_text())
    assert (report["passed"], report["total"], report["pass@1"]) == (1, 2, 0.5)
    assert [(each["task_id"], each["passed"]) for each in report["verdicts"]] == [
        ("HumanEval/0", True),
        ("HumanEval/1", False),
    ]
    assert report["sandbox"]["level"] in ("bwrap", "unshare", "rlimits") and report["sandbox"]["self_test"] == "passed"
    assert "1/2 passed" in capsys.readouterr().out
    assert main(humaneval("--data", folder / "he.jsonl", "--samples", folder / "alone.jsonl", "--limit", 1)) == 0
    assert json.loads((folder / "alone.report.json").read_text())["pass@1"] == 1


@pytest.mark.usefixtures("known_judge")
def test_generate_only_writes_samples(folder, capsys):
    args = ("--checkpoint", folder / "model", "--data", folder / "mbpp.jsonl", "--mode", "chat", "--max-new-tokens", 20)
    assert main(humaneval(*args, "--json", folder / "chat.json", "--generate-only")) == 0
    assert "chat.samples.jsonl: 1 samples" in capsys.readouterr().out and not (folder / "chat.json").exists()
    settings = json.loads((folder / "chat.samples.settings.json").read_text())
    assert settings["mode"] == "chat" and len(settings["template_sha256"]) == 64
    assert settings["conditions"]["compute_dtype"] == "float32"
    bfloat16 = (
        "--checkpoint",
        folder / "model",
        "--data",
        folder / "mbpp.jsonl",
        "--max-new-tokens",
        5,
        "--compute",
        "bfloat16",
    )
    assert main(humaneval(*bfloat16, "--samples", folder / "low.jsonl", "--generate-only")) == 0
    assert json.loads((folder / "low.settings.json").read_text())["conditions"]["compute_dtype"] == "bfloat16"
    capsys.readouterr()
    assert main(humaneval(*args[2:4], "--samples", folder / "chat.samples.jsonl", "--json", folder / "chat.json")) == 0
    assert json.loads((folder / "chat.json").read_text())["generation"]["mode"] == "chat"


@pytest.mark.usefixtures("known_judge")
def test_data_that_programs_can_read_is_refused(folder, capsys, monkeypatch):
    if usual_level() == "rlimits":
        pytest.skip("without isolation programs can read all files")
    (folder / "link.jsonl").symlink_to(folder / "he.jsonl")
    monkeypatch.setattr(levels, "needed", lambda: {"python": folder})
    assert main(humaneval("--data", folder / "link.jsonl", "--samples", folder / "none.jsonl")) == 2
    assert f"is in {folder}, which programs can read" in capsys.readouterr().err


@pytest.mark.usefixtures("known_judge")
@pytest.mark.parametrize(
    "args, message",
    [
        ((), "--checkpoint"),
        (("--samples", "x", "--generate-only"), "--generate-only needs --checkpoint"),
        (("--samples", "x", "--chat-template", "y"), "--chat-template needs --mode chat"),
        (("--samples", "x", "--limit", 0), "--limit must be at least 1, got 0"),
        (("--samples", "/nonexistent"), "No such file"),
        (("--checkpoint", "/nonexistent"), "is not a folder"),
        (("--checkpoint", "MODEL", "--json", "JSON", "--samples-per-problem", 2), "--temperature"),
    ],
)
def test_errors_are_one_line(folder, capsys, args, message):
    names = {"MODEL": folder / "model", "JSON": folder / "errors.json"}
    assert main(humaneval("--data", folder / "he.jsonl", *(names.get(arg, arg) for arg in args))) == 2
    err = capsys.readouterr().err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in err
