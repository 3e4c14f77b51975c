"""python -m infer serve as a process: its key, its time limit, a crash of the engine, its start and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infer.__main__ import main
from tests.support.checkpoints import CONTEXT
from tests.support.serve_cases import BACKEND, JSON, PYTHON, ROOT, Server

KEY = "sk-test-1234"
TIMEOUT = 0.7 if BACKEND == "cpu" else 8.0  # enough for backend xla to compile, too
LONG = "a prompt long enough to be kept for the next one"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The file that `server` writes."""
    return tmp_path_factory.mktemp("server") / "record"


@pytest.fixture(scope="module")
def server(small_checkpoint, record):
    options = ("--backend", BACKEND, "--timeout", TIMEOUT, "--stream-interval-ms", 100, "--tokens-per-dispatch", 8)
    program, environment = (
        ("-m", "tests.support.serving.recorded_server"),
        os.environ | {"LANEFORMER_TEST_RECORD": record},
    )
    server = Server(small_checkpoint, *options, key=KEY, program=program, environment=environment)
    yield server.wait_until(200)
    server.kill()


def test_loading_leaves_no_semaphore(server, record):
    """A named semaphore, as spawned processes make it, would leak and be reported after a kill."""
    assert {*record.read_text(encoding="utf-8").splitlines()} == {"__main__", "__mp_main__"}


def test_key_is_required_except_for_health(server):
    for path in ("/", "/metrics", "/v1/models", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer sk-other"}, {"Authorization": KEY}, {"Authorization": "Bearer "}):
            status, body, answered = server.get(path, headers)
            assert (
                status == 401
                and body["error"]["code"] == "invalid_api_key"
                and answered["www-authenticate"] == "Bearer"
            )
    assert server.post("/v1/completions", prompt="a")[0] == 401
    assert server.post("/v1/completions", AUTH, prompt="a")[0] == 200
    assert server.get("/v1/models", AUTH)[0] == 200 and server.get("/health")[0] == 200


def test_slow_answer_times_out(server):
    status, body = server.post("/v1/completions", AUTH, prompt="a", max_tokens=CONTEXT, ignore_eos=True)
    assert (status, body["error"]["type"], body["error"]["code"]) == (504, "timeout", "timeout")
    with server.stream(headers=AUTH, prompt="a", max_tokens=CONTEXT, ignore_eos=True) as stream:
        *chunks, error = stream
    assert f"{TIMEOUT:g} s" in error["error"]["message"]
    assert 2 <= len([chunk for chunk in chunks if isinstance(chunk, dict)]) <= 10 * TIMEOUT + 2, (
        "there must be at least 100 ms between two events"
    )
    status, body = server.post("/v1/completions", AUTH, prompt="a", max_tokens=2)
    assert status == 200 and body["metrics"]["queue_time_ms"] < 300


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine's process in /proc")
def test_crashed_engine_is_restarted(server):
    [engine] = server.children()
    for cached in (0, len(LONG) - 1 if BACKEND == "cpu" else 0):
        body = server.post("/v1/completions", AUTH, prompt=LONG, max_tokens=1)[1]
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    with server.stream(headers=AUTH, prompt=LONG, max_tokens=CONTEXT, ignore_eos=True) as stream:
        next(stream)
        os.kill(engine, signal.SIGKILL)
        *_, error = stream
    assert error["error"]["message"] == "the engine process ended unexpectedly (signal SIGKILL)"
    assert server.get("/health")[:2] == (503, {"status": "restarting"})
    status, body, headers = server.send("POST", "/v1/completions", json.dumps({"prompt": "a"}), {**JSON, **AUTH})
    assert status == 503 and body["error"]["code"] == "engine_restarting" and headers["retry-after"]
    server.wait_until(200)
    status, body = server.post("/v1/completions", AUTH, prompt=LONG)
    assert status == 200 and body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, (
        "kept prefixes are lost with the engine"
    )
    assert "laneformer_engine_restarts_total 1.0" in server.get("/metrics", AUTH)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine's process in /proc")
def test_signal_ends_both_processes_and_fails_requests(server):
    [engine] = server.children()
    with server.stream(headers=AUTH, prompt="a", max_tokens=CONTEXT, ignore_eos=True) as stream:
        next(stream)
        code, err, seconds = server.end(signal.SIGTERM)
        *_, error = stream
    assert code == 0 and err.splitlines()[-1] == "stopped" and "Traceback" not in err and seconds < 10
    assert error["error"]["message"] == "the server is shutting down"
    assert not Path(f"/proc/{engine}").exists()


def test_model_and_template_options_are_used(thinking_server):
    server = thinking_server
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_token_ids": True}
    variables = {"bare": True, "thinking": True, "other": 1}
    asked |= {"model": "gpt-4", "chat_template_kwargs": variables, "reasoning_effort": "l"}
    status, body = server.post("/v1/chat/completions", **asked)
    plain = server.post("/v1/completions", prompt="a!l", max_tokens=1, return_token_ids=True, model="")[1]
    assert status == 200 and body["prompt_token_ids"] == plain["prompt_token_ids"]
    assert body["model"] == "harmony" and body["warnings"] == ["chat_template_kwargs.other has no effect"]
    assert server.get("/v1/models/gpt-4")[1]["id"] == "harmony"
    assert server.get("/v1/models/gpt-4")[1]["conditions"]["prefix_cache"] == 0
    usage = [server.post("/v1/completions", prompt=LONG, max_tokens=1)[1]["usage"] for _ in range(2)]
    assert [each["prompt_tokens_details"]["cached_tokens"] for each in usage] == [0, 0]


def test_reasoning_is_separate_from_content(thinking_server):
    server = thinking_server
    asked = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 14, "temperature": 0}
    status, body = server.post("/v1/chat/completions", **asked, logprobs=True)
    [choice] = body["choices"]
    assert (status, choice["finish_reason"]) == (200, "length"), body
    assert choice["message"] == {"role": "assistant", "reasoning_content": "Why", "content": "Why"}
    assert [each["token"] for each in choice["logprobs"]["content"]] == list("Why")
    usage = {"completion_tokens": 14, "completion_tokens_details": {"reasoning_tokens": 11}}
    assert body["usage"].items() >= usage.items()
    with server.stream("/v1/chat/completions", **asked, stream_options={"include_usage": True}) as stream:
        *chunks, _ = stream
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Why"
    assert chunks[-1]["usage"] == body["usage"]
    talked = [*asked["messages"], choice["message"], {"role": "user", "content": "So?"}]
    plain = [*asked["messages"], {"role": "assistant", "content": "Why"}, {"role": "user", "content": "So?"}]
    prompts = [
        server.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)[1]
        for messages in (talked, plain)
    ]
    assert prompts[0]["prompt_token_ids"] == prompts[1]["prompt_token_ids"]
    completion = server.post("/v1/completions", prompt=[258], max_tokens=14, temperature=0)[1]
    assert completion["choices"][0]["text"] == "WhyfinalWhy", "a completion has no channels"


def test_control_c_while_loading_ends_the_server(small_checkpoint):
    server = Server(small_checkpoint)
    server.wait_until(503)
    status, body = server.post("/v1/completions", prompt="a")
    assert status == 503 and body["error"]["code"] == "engine_loading"
    code, err, seconds = server.end(signal.SIGINT)
    assert code == 0 and err == "stopped\n" and seconds < 10


def test_missing_checkpoint_is_one_line(tmp_path):
    done = subprocess.run(
        [*PYTHON, "-m", "infer", "serve", "--checkpoint", tmp_path / "no", "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1].startswith("error: ")
        and "is not a folder" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--host", "0.0.0.0"), "LANEFORMER_API_KEY or --api-key-file"),
        (("--port", "70000"), "got 70000"),
        (("--max-waiting", "-1"), "--max-waiting must be at least 0, got -1"),
        (("--connections-per-address", "0"), "--connections-per-address must be at least 1, got 0"),
        (("--prefix-slots", "0"), "--prefix-slots must be at least 1, got 0"),
        (("--timeout", "0"), "--timeout must be above 0 seconds, got 0.0"),
        (("--stream-interval-ms", "nan"), "got nan"),
        (("--host", "192.0.2.1", "--insecure"), "--host 192.0.2.1 --port 8000"),
        (("--api-key-file", "/nonexistent"), "No such file"),
        (("--api-key-file", os.devnull), f"{os.devnull} has no valid key"),
    ],
)
def test_errors_are_one_line(capsys, args, message):
    assert main(["serve", "--checkpoint", "none", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_missing_libraries_are_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--checkpoint", "none"]) == 2
    assert "pip install 'laneformer[serve]'" in capsys.readouterr().err


def test_taken_port_and_two_keys_are_refused(capsys, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--checkpoint", "none", "--port", str(port)]) == 2
    assert f"--host 127.0.0.1 --port {port} (Address already in use" in capsys.readouterr().err
    monkeypatch.setenv("LANEFORMER_API_KEY", KEY)
    assert main(["serve", "--checkpoint", "none", "--api-key-file", str(tmp_path)]) == 2
    assert "not both" in capsys.readouterr().err
