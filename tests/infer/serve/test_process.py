"""python -m infer serve as a process: its key, its time limit, a crash of the engine, its start and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.infer.__main__ import main
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
def test_engine_does_not_get_the_key(server):
    [engine] = server.children()
    names = [line.partition(b"=")[0] for line in Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")]
    assert b"PATH" in names and b"LANEFORMER_API_KEY" not in names


def test_ambiguous_length_is_refused_and_ends_the_connection(server):
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", "Content-Length: 3"]
    head = "\r\n".join([*lines, "Content-Type: application/json", "Transfer-Encoding: chunked", "", ""])
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(head.encode() + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while piece := client.recv(4096):  # until the connection ends
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and b"only one of them" in answer


def test_endless_header_ends_the_connection(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for number in range(20_000):  # 20 MB
                client.sendall(b"X-%d: %s\r\n" % (number, b"a" * 1000))


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine's process in /proc")
def test_stopped_engine_and_hangup_leave_no_client_waiting(small_checkpoint, tmp_path):
    """The engine is stopped (SIGSTOP): the web process answers, reports it and ends at a hang-up of the terminal."""
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    server = Server(small_checkpoint, "--backend", BACKEND, "--api-key-file", keys).wait_until(200)
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    cached = []
    for headers in (one, one, two, two):
        body = server.post("/v1/completions", headers, prompt=LONG, max_tokens=1)[1]
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == ([False, True, False, True] if BACKEND == "cpu" else [False] * 4), "keys share no prefixes"
    with server.stream(headers=one, prompt="a", max_tokens=CONTEXT, ignore_eos=True) as stream:
        next(stream)
        [engine] = server.children()
        os.kill(engine, signal.SIGSTOP)
        body, clients = json.dumps({"prompt": "a" * 1_000_000}).encode(), []
        for _ in range(5):
            clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer second\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            clients[-1].sendall(head.encode() + body)
        server.wait_until(503)
        assert server.get("/health")[1] == {"status": "silent"}
        code, err, seconds = server.end(signal.SIGHUP)
        *_, error = stream
    for client in clients:
        client.close()
    assert code == 0 and err.splitlines()[-1] == "stopped" and "Traceback" not in err and seconds < 15
    assert "the engine process has not answered for 10 s" in err
    assert error["error"]["message"] == "the server is shutting down"


@pytest.mark.slow
def test_termination_while_loading_is_no_error(small_checkpoint):
    server = Server(small_checkpoint)
    code, err, _ = server.end(signal.SIGTERM)
    assert code == 0 and err == "stopped\n"


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [300_000, 700_000, 1_500_000])
def test_too_little_memory_is_one_line(small_checkpoint, kilobytes):
    command = [*PYTHON, "-m", "infer", "serve", "--checkpoint", small_checkpoint, "--port", "0"]
    limited = ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", *map(str, command)]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    first, *between, last = done.stderr.splitlines()
    # The limit may be met before or after the backend is chosen; the C library may miss memory to end a thread.
    allowed = {"backend cpu (auto)", "libgcc_s.so.1 must be installed for unwinding to work"}
    assert done.returncode == 2 and "loading" in first and allowed.issuperset(between)
    assert last.startswith("error: ") and "ran out of memory or threads" in last and f"{kilobytes:,} KiB" in last


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
    assert f"--host 127.0.0.1 --port {port} (Address already in use): choose" in capsys.readouterr().err
    monkeypatch.setenv("LANEFORMER_API_KEY", KEY)
    assert main(["serve", "--checkpoint", "none", "--api-key-file", str(tmp_path)]) == 2
    assert "not both" in capsys.readouterr().err
