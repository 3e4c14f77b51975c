"""scripts/gpu_check.sh --rehearse: the commands of the GPU check on a CPU, with tiny models."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from laneformer.commands.lab.gpu_check.__main__ import UNFINISHED
from tests.support.evaluation_cases import ADD, TWICE, write_jsonl
from tests.support.paths import ROOT
from tests.support.sandboxes import usual_level

pytestmark = pytest.mark.slow


def start(out, *options):
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(out), "--rehearse", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHON": sys.executable}, **pipes)


def finish(process, status):
    text, _ = process.communicate(timeout=3000)
    assert process.returncode == status, text
    return text


def test_stages_measure_and_report(tmp_path):
    text = finish(start(tmp_path, "--seconds", "2500", "--pack", tmp_path / "results.tgz"), 0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {stage["stage"]: stage["status"] for stage in report["stages"]} == dict.fromkeys(
        ("decode", "trace", "experts", "rows", "train", "hybrids"), "passed"
    )
    hybrids = {"decode-delta_tiny", "decode-latent_tiny", "decode-v4_tiny"}
    assert {*report["records"]} == {"decode-float16", "decode-experts", *hybrids, "rows-drafts", "rows-one"}
    page = (tmp_path / "report.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| laneformer | 2 x 64 |"))
    assert row.endswith(" GB |"), "the row of the measured step contains the memory of the dry run"
    assert "| decode-float16: stdlib, cpu | 65 |" in text and "No floors: no copy was measured" in text
    assert "## Where the time of a token goes" in text and (tmp_path / "results.tgz").stat().st_size > 1000


def test_model_is_trained_scored_and_measured_over_three_commands(tmp_path):
    problems, out = tmp_path / "he.jsonl", tmp_path / "results"
    write_jsonl(problems, [ADD, TWICE])
    options = ("--budget", 3600, "--humaneval", problems, "--sandbox", usual_level(), "--corpus", ROOT / "configs")
    # The first command has too little time to measure steps: that stage cannot be interrupted.
    text = finish(start(out, *options, "--seconds", 500), UNFINISHED)
    assert "corpus: passed" in text and "pace" not in text
    plan = json.loads((out / "plan.json").read_text())
    plan["words"] = {"steps": 40, "warmup": 4, "every": 10}  # independent of the speed of this machine
    (out / "plan.json").write_text(json.dumps(plan))
    # The second command is stopped while it trains.
    process, metrics = start(out, *options, "--seconds", 5000), out / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    finish(process, 128 + signal.SIGTERM)
    assert json.loads((out / "plan.json").read_text())["outcomes"]["pretrain"]["status"] == "unfinished"
    finish(start(out, *options, "--seconds", 5000), 0)
    outcomes = json.loads((out / "plan.json").read_text())["outcomes"]
    assert [*outcomes] == ["corpus", "pace", "pretrain", "humaneval", "speed", "sample"]
    assert {outcome["status"] for outcome in outcomes.values()} == {"passed"}
    steps = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert steps == list(range(1, 41)), "the third command resumed the run"
    assert "resuming" in (out / "pretrain.log").read_text()
    page = (out / "report.md").read_text()
    for expected in ("40 of 40 steps", "of 2 samples pass", "def fibonacci(n):", "## Decoding", "vocabulary 512"):
        assert expected in page
