"""python -m infer agent: the example task with scripted answers and with our server, and bad options and tasks."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import laneformer.infer.commands.agent
from laneformer.infer.__main__ import main
from laneformer.infer.agent.answers import read_edits
from laneformer.infer.agent.task import Task, load_task
from laneformer.infer.agent.tools import execute
from laneformer.infer.agent.turns import Workspace
from laneformer.infer.evaluate.scoring import Judge
from tests.support.checkpoints import CHATML, save_checkpoint
from tests.support.sandboxes import usual_level
from tests.support.serve_cases import BACKEND, ROOT
from tests.support.serving.agent_cases import Scripted

EXAMPLE = ROOT / "docs/examples/agent/intervals"
WRONG = "I sort them first.\n\n```python intervals.py\ndef merge(intervals):\n    return sorted(intervals)\n```\n"
RIGHT = """intervals.py
```python
def merge(intervals):
    found = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError(f"({start}, {end}) ends before it starts")
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
```
"""
ONE = ("--base-url", "URL")
PROGRAM = RIGHT.split("```")[1].removeprefix("python\n")


@pytest.fixture(scope="module")
def judge():
    with Judge(usual_level(), 1) as judge:
        yield judge


@pytest.fixture
def known_judge(judge, monkeypatch):
    """Lets the command use an existing judge, which saves its self-test."""
    monkeypatch.setattr(laneformer.infer.commands.agent, "Judge", lambda *_, **__: contextlib.nullcontext(judge))


def agent(*args):
    return ["agent", "--sandbox", usual_level(), *map(str, args)]


@contextlib.contextmanager
def started(*args):
    """Runs the command in a process, which is killed at the end, also if the test fails."""
    with subprocess.Popen(
        [sys.executable, "-m", "infer", *agent(*args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture
def task(tmp_path):
    return Path(shutil.copytree(EXAMPLE, tmp_path / "task"))


def test_second_turn_passes(task, tmp_path, capsys):
    before, work = files_of(task), tmp_path / "work"
    drafting = {"passes": 8, "tokens_per_pass": 1.5, "accepted_tokens": 4}
    with Scripted(WRONG, RIGHT, pause=0.02, metrics={"queue_time_ms": 5.0, "speculative_decoding": drafting}) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", work, "--seed", 3)) == 0
    first, second = server.requests
    assert (first["model"], first["stream"], first["seed"], first["temperature"]) == ("scripted", True, 3, 0)
    [asked] = first["messages"]
    assert all(
        part in asked["content"] for part in ("# Merge intervals", "class MergeTest", "raise NotImplementedError")
    )
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == asked and second["messages"][1]["content"] == WRONG
    messages = second["messages"][2]["content"]
    assert (
        "FAIL: test_touching_ones_are_joined" in messages
        and "ValueError not raised" in messages
        and "FAILED (failures=4)" in messages
    )
    assert files_of(task) == before, "the task's folder must not change"
    assert (work / "files/intervals.py").read_text() == PROGRAM
    out, err = capsys.readouterr()
    assert "turn 1/6: failed (FAILED (failures=4)); " in err and "turn 2/6: passed; 100 tokens, " in err
    assert (
        err.count(" tok/s at 1.50 tokens per pass, ") == 2 and "at 1.50 tokens per pass (speculative decoding)" in out
    )
    record = json.loads((work / "record.json").read_text())
    assert record["verdict"] == "passed" and record["conditions"]["sandbox"]["self_test"] == "passed"
    split, wall = record["split"], record["wall"]
    assert sum(split.values()) == pytest.approx(wall) and all(seconds > 0 for seconds in split.values())
    chunks = [turn["reply"]["tokens"] // 10 for turn in record["turns"]]
    until_first, queue = split["prompt, up to the first token"], 2 * 0.005
    assert until_first >= 2 * 0.02 - queue and until_first + queue + split["decode"] >= sum(
        0.02 + 0.01 * (n - 1) for n in chunks
    )
    assert split["waiting"] >= queue, "as the server reported"
    assert record["tokens"] == 10 * sum(chunks) and record["tokens_per_pass"] == 1.5
    assert record["tokens_per_second"] == pytest.approx(sum(10 * n - 1 for n in chunks) / split["decode"])
    lines = [json.loads(line) for line in (work / "transcript.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == [WRONG, RIGHT] and lines[0]["prompt"] == first["messages"]
    rows = {row["speed"]: row for row in record["projected"]["rows"]}
    assert rows["this run"]["origin"] == "measured" and set(record["projected"]["status"].values()) == {"projected"}
    fast = rows["3,000 tok/s"]
    assert fast["generating s"] == pytest.approx(record["tokens"] / 3000)
    assert fast["total s"] - fast["generating s"] == pytest.approx(wall - split["decode"], abs=1e-3)
    assert (
        "intervals: passed after 2 turns" in out.replace("task:", "intervals:")
        and "(projected)" in out
        and "(measured)" in out
    )


def write(text, path="intervals.py"):
    return ("write_file", json.dumps({"path": path, "content": text}))


@pytest.mark.usefixtures("known_judge")
def test_tools_read_write_and_run_the_tests(task, tmp_path, capsys):
    work, html = tmp_path / "work", tmp_path / "out/page.html"
    looked = [("read_file", '{"path": "intervals.py"}'), ("read_file", '{"path": "none.py"}')]
    odd = [("fly", "{}"), ("run_tests", "{"), write("x", "test_intervals.py"), write("x", "../x")]
    answers = (looked, odd, [write("def merge(intervals): return 1 < 2\n"), ("run_tests", "{}")], "It should work.",
               [write(PROGRAM), ("run_tests", "{}"), ("read_file", '{"path": "intervals.py"}')])  # fmt: skip
    with Scripted(*answers, tools="hermes") as server:
        code = main(agent(task, "--base-url", server.url, "--workspace", work, "--html", html))
    assert code == 0 and (work / "files/intervals.py").read_text() == PROGRAM
    first, second, *_, last = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["read_file", "write_file", "run_tests"]
    assert "intervals.py, test_intervals.py" in first["messages"][0]["content"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert "raise NotImplementedError" in second["messages"][2]["content"]
    assert second["messages"][3]["content"].startswith("error: no file none.py")
    results = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert results[2].startswith("error: unknown tool fly") and results[3].startswith("error: the arguments must be {}")
    assert "one of the tests" in results[4] and "inside the task's folder" in results[5]
    assert results[6] == "wrote intervals.py, 1 lines" and "FAILED" in results[7]
    assert last["messages"][-1]["role"] == "user" and "The tests fail" in last["messages"][-1]["content"]
    lines = [json.loads(line) for line in (work / "transcript.jsonl").read_text().splitlines()]
    assert [len(line["calls"]) for line in lines] == [2, 4, 2, 0, 2], "calls after passing tests are not executed"
    assert [line["verdict"] for line in lines] == [None, None, "failed", "failed", "passed"]
    record, shown = json.loads((work / "record.json").read_text()), html.read_text()
    assert record["conditions"]["tools"] is True and record["turns"][2]["calls"][0]["name"] == "write_file"
    assert sum(record["split"].values()) == pytest.approx(record["wall"])
    assert "read_file, read_file: no tests" in capsys.readouterr().err
    assert (
        shown.count("<details") == 7
        and "Result of run_tests" in shown
        and "return 1 &lt; 2" in shown
        and "FAILED" in shown
    )
    assert not re.search(r"<script|src=|href=|url\(", shown), "the page must load nothing from another host"


@pytest.mark.usefixtures("known_judge")
@pytest.mark.parametrize(("cached", "history", "whole"), [(5, (), True), (None, (), False), (5, ("last",), False)])
def test_whole_history_is_sent_to_a_server_that_keeps_prompts(task, tmp_path, capsys, cached, history, whole):
    words = ("--history", *history) if history else ()
    with Scripted("No idea.", WRONG, RIGHT, cached=cached) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", tmp_path / "work", *words)) == 0
    first, second, third = (request["messages"] for request in server.requests)
    assert second[:1] == first and len(second) == 3 and second[1]["content"] == "No idea."
    assert third[-2]["content"] == WRONG and third[:-2] == (second if whole else first)
    record, (out, err) = json.loads((tmp_path / "work/record.json").read_text()), capsys.readouterr()
    assert record["prompt_tokens"] == 21 and record["cached_tokens"] == (cached and 15)
    assert [turn["reply"]["cached"] for turn in record["turns"]] == [cached] * 3
    assert record["conditions"]["history"] == (history[0] if history else "auto")
    assert ("(5 of 7 tokens cached)" in err) == bool(cached) and ("15 of them from" in out) == bool(cached)


@pytest.mark.usefixtures("known_judge")
def test_protected_files_stay_and_turns_run_out(task, tmp_path, capsys):
    cheats = (
        "```python test_intervals.py\nimport unittest\n```",
        "```python ../outside.py\nx = 1\n```",
        "```python intervals.py\nimport os; os._exit(0)\n```",
        "```python unittest.py\nimport os; os._exit(0)\n```",
        "No idea.",
    )
    with Scripted(*cheats) as server:
        args = (
            "--base-url",
            server.url,
            "--workspace",
            tmp_path / "work",
            "--max-turns",
            5,
            "--json",
            tmp_path / "out/r.json",
        )
        assert main(agent(task, *args)) == 1
    messages = [request["messages"][-1]["content"] for request in server.requests[1:]]
    assert "test_intervals.py stays as it is" in messages[0] and "../outside.py was not written" in messages[1]
    assert "the program ended with status 0 before" in messages[2]
    assert "the program ended with status 0" in messages[3], "also with the file of the previous turn"
    assert not (tmp_path / "outside.py").exists() and not (tmp_path / "work/outside.py").exists()
    record = json.loads((tmp_path / "out/r.json").read_text())
    assert record["verdict"] == "failed" and [turn["outcome"]["verdict"] for turn in record["turns"]] == ["failed"] * 5
    assert "turn 5/5: failed" in capsys.readouterr().err


@pytest.mark.usefixtures("known_judge")
def test_completion_mode_writes_one_file(task, tmp_path, capsys):
    with Scripted("def merge(intervals):\n    return []\n\nunfinished(", PROGRAM, chat=False) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", tmp_path / "work")) == 0
    first, second = (request["prompt"] for request in server.requests)
    assert first.startswith('"""\n# Merge intervals') and first.endswith("# intervals.py, complete:\n")
    assert (
        "# intervals.py, which fails these tests:\ndef merge(intervals):\n    return []\n" in second
        and "# FAILED (failures=" in second
    )
    assert len(server.requests[0]["stop"]) <= 4
    (task / "more.py").write_text("")
    with Scripted(chat=False) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", tmp_path / "two")) == 2
    assert "writes one file, but the task has intervals.py, more.py" in capsys.readouterr().err


@pytest.mark.usefixtures("known_judge")
def test_server_without_usage_is_reported_as_unknown(task, tmp_path, capsys):
    with Scripted(RIGHT, models=None, usage=False) as server:
        assert main(agent(task, "--base-url", server.url, "--model", "any", "--workspace", tmp_path / "work")) == 0
    out, err = capsys.readouterr()
    assert "tokens unknown" in err and "an unknown number of tokens" in out and "projected" not in out
    assert json.loads((tmp_path / "work/record.json").read_text())["projected"] is None


@pytest.mark.usefixtures("known_judge")
def test_test_command_of_the_task_is_run(task, tmp_path, capsys):
    (task / "test_intervals.py").unlink()
    (task / "check.py").write_text(
        "from intervals import merge\nassert merge([(1, 2), (2, 3)]) == [(1, 3)], 'not joined'\n"
    )
    (task / "task.md").write_text("Write merge.\n\nTest command: `python check.py`\n")
    with Scripted("```python check.py\npass\n```\n" + WRONG, RIGHT) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", tmp_path / "work")) == 0
    messages = server.requests[1]["messages"][-1]["content"]
    assert (
        "AssertionError: not joined" in messages
        and "exit status 1" in messages
        and "check.py stays as it is" in messages
    )


@pytest.mark.usefixtures("known_judge")
def test_server_error_keeps_the_record(task, tmp_path, capsys):
    with Scripted(WRONG, (400, {"message": "the prompt has 9000 tokens and the context 4096"})) as server:
        assert main(agent(task, "--base-url", server.url, "--workspace", tmp_path / "work")) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == f"error: {server.url}: the prompt has 9000 tokens and the context 4096"
    record = json.loads((tmp_path / "work/record.json").read_text())
    assert record["verdict"] == "error" and len(record["turns"]) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interruption_keeps_the_record(task, tmp_path, number):
    with (
        Scripted(WRONG, "slow " * 1000, pause=0.2) as server,
        started(task, "--base-url", server.url, "--workspace", tmp_path / "work") as running,
    ):
        while len(server.requests) < 2:
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        time.sleep(0.3)
        running.send_signal(number)
        out, err = running.communicate(timeout=20)
        assert running.returncode == 130 and "interrupted after 1 turns" in out and "Traceback" not in err
        assert "\nturn 1/6: failed" in err and "loading" not in err
        ends = time.monotonic() + 20
        while "gone" not in server.requests:
            assert time.monotonic() < ends, "the connection to the server is closed"
            time.sleep(0.05)
    record = json.loads((tmp_path / "work/record.json").read_text())
    assert record["verdict"] == "interrupted" and record["split"]["a turn that did not end"] > 0.2
    assert sum(record["split"].values()) == pytest.approx(record["wall"])


@pytest.mark.slow
@pytest.mark.usefixtures("known_judge")
def test_checkpoint_starts_a_server(task, tmp_path, capfd):
    checkpoint = save_checkpoint(tmp_path / "small", *CHATML)
    args = ("--backend", BACKEND, "--max-turns", 2, "--max-new-tokens", 30, "--workspace", tmp_path / "work")
    assert main(agent(task, "--checkpoint", checkpoint, *args, "--no-speculation")) == 1
    record = json.loads((tmp_path / "work/record.json").read_text())
    assert [turn["reply"]["tokens"] for turn in record["turns"]] == [30, 30] and record["turns"][0]["reply"][
        "finish_reason"
    ] == "length"
    served = record["conditions"]["server"]
    assert not served.get("speculation")
    assert (
        served["backend"] == BACKEND
        and served["model"] == "small"
        and record["turns"][0]["reply"]["server"]["tokens_per_second"] > 0
    )
    out, err = capfd.readouterr()
    assert f"small, backend {BACKEND}" in out and "cut off at --max-new-tokens" in err
    assert "stopped" in (tmp_path / "work/server.log").read_text()
    port = int(record["conditions"]["base_url"].split(":")[2].split("/")[0])
    assert main(agent(task, "--base-url", f"http://127.0.0.1:{port}/v1", "--workspace", tmp_path / "two")) == 2, (
        "the server has ended"
    )
    assert "cannot connect to --base-url" in capfd.readouterr().err
    assert main(agent(task, "--checkpoint", tmp_path / "no", "--workspace", tmp_path / "three")) == 2
    assert re.fullmatch(r"error: \S+/no is not a folder.*", capfd.readouterr().err.strip().splitlines()[-1])


@pytest.mark.usefixtures("known_judge")
@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        (None, (), "--base-url of a server, or --checkpoint"),
        (None, (*ONE, "--checkpoint", "x"), "either --base-url"),
        (None, (*ONE, "--threads", 2), "--threads needs --checkpoint"),
        (None, ("--checkpoint", "x", "--model", "y"), "--model needs --base-url"),
        (None, (*ONE, "--max-turns", 0), "--max-turns must be at least 1, got 0"),
        (None, (*ONE, "--timeout", "nan"), "--timeout must be above 0 seconds, got nan"),
        (None, (*ONE, "--model", "other"), "--model other: URL has one, two"),
        (None, ONE, "URL has one, two: name one with --model"),
        (None, ("--base-url", "127.0.0.1:1/v1"), "--base-url 127.0.0.1:1/v1"),
        (None, (*ONE, "--workspace", "TASK/work"), "is in the task's folder"),
        (None, (*ONE, "--workspace", "TASK/../task"), "is in the task's folder"),
        (None, (*ONE, "--workspace", os.devnull), f"--workspace {os.devnull}"),
        (lambda task: (task / "task.md").unlink(), ONE, "add task.md"),
        (lambda task: (task / "test_intervals.py").unlink(), ONE, "has no tests"),
        (
            lambda task: (task / "test_intervals.py").write_text("x = 1\n"),
            (*ONE, "--model", "one"),
            "no test in test_intervals.py",
        ),
        (shutil.rmtree, ONE, "is not a folder"),
        (lambda task: (task / "link").symlink_to("/etc/passwd"), ONE, "link is not a regular file"),
        (lambda task: (task / "big.bin").write_bytes(bytes(5 << 20)), ONE, "4,194,304"),
        (lambda task: (task / "task.md").write_bytes(b"\xff"), ONE, "is not UTF-8"),
        (lambda task: (task / "intervals.py").write_text(PROGRAM), (*ONE, "--model", "one"), "already pass"),
    ],
)
def test_bad_options_are_one_line(task, tmp_path, monkeypatch, capsys, change, args, message):
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(task)
    with Scripted(models=("one", "two")) as server:
        words = (str(word).replace("URL", server.url).replace("TASK", str(task)) for word in args)
        assert main(agent(task, *words)) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("error: ")
        and err.count("\n") == 1
        and message.replace("URL", server.url) in err
        and server.requests == []
    )


def test_missing_library_sandbox_and_key_are_named(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Scripted(RIGHT, key="right") as server:
        assert main(agent(task, "--base-url", server.url, "--api-key", "wrong")) == 2
        assert "(no such key): set OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert main(agent(task, "--base-url", server.url)) == 0
        assert "right" not in (tmp_path / "runs/agent/task-1/record.json").read_text()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main(agent(task, "--base-url", "http://127.0.0.1:1")) == 2
    assert "pip install 'laneformer[agent]'" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["agent", str(task), "--checkpoint", "none"]) == 2
    assert "is not installed: install bubblewrap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "files"),
    [
        ("```python\na = 1\n```", {"a.py": "a = 1\n"}),
        ("```python\nlonger = 'program'\n```\nUse it:\n```\nx\n```", {"a.py": "longer = 'program'\n"}),
        ("```python a.py\na = 1", {"a.py": "a = 1"}),
        ("```a.py\n1\n```\n~~~python:b/c.py\n2\n~~~", {"a.py": "1\n", "b/c.py": "2\n"}),
        ("**new.py**\n\n```python\n1\n```\nas in\n```\nnothing\n```", {"new.py": "1\n"}),
        ("Here is `a.py`, corrected:\n```py\n1\n```", {"a.py": "1\n"}),
        ("```python\n# ./a.py\nx = 1\n```", {"a.py": "# ./a.py\nx = 1\n"}),
        ("```python a.py\n1\n```\n```python a.py\n2\n```", {"a.py": "2\n"}),
        ("````md a.py\n```\ninside\n```\n````", {"a.py": "```\ninside\n```\n"}),
        ("a = 1\n", {"a.py": "a = 1\n"}),
        ("I think of 3.14 and e.g. this.", {}),
        ("```python .git/hooks\n1\n```\n```python /etc/x.py\n1\n```", {}),
    ],
)
def test_code_blocks_become_files(answer, files):
    edits = read_edits(answer, ["a.py"], ["test_a.py"])
    assert edits.files == files and bool(edits.notes) == (not files)


@pytest.mark.parametrize(
    "path",
    ["././test_a.py", "sub//test_b.py", "sub/./test_b.py", "sub", "a.py/b.py", "x\0.py", "\ud800.py", "", ".", "/",
     "\U0001f600" * 60 + ".py"],
)  # fmt: skip
def test_tool_refuses_tests_and_impossible_names(tmp_path, path):
    files = {"a.py": b"", "test_a.py": b"test", "sub/test_b.py": b"test"}
    workspace = Workspace(Task("task", "text", files, ("test_a.py", "sub/test_b.py"), None), tmp_path)
    work = execute([("", *write("pass", path))], workspace, lambda: None)
    assert work.calls[0].result.startswith("error: ") and not work.written
    assert workspace.files == files
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


def test_answer_must_not_write_tests_or_folders():
    answer = "```python ././test_a.py\npass\n```\n```python a.py/b.py\npass\n```\n```python c.py/d.py\npass\n```"
    edits = read_edits(answer, ["a.py"], ["test_a.py"], ["c.py"])
    assert not edits.files and len(edits.notes) == 3


def test_unnamed_block_for_two_files_is_refused():
    edits = read_edits("```python\n1\n```", ["a.py", "b.py"], [])
    assert edits.files == {} and edits.notes == ("No code block had a file's name after its opening fence.",)


def test_example_runs_without_jax():
    assert load_task(EXAMPLE).editable == ("intervals.py",)
    code = "import sys, laneformer.infer.commands.agent, openai\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
