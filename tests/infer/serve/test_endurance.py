"""Eight clients send requests for a long time, and many disconnect. No slot is lost, and every answer equals the answer
to its request alone.
"""

import contextlib
import itertools
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from laneformer import infer
from tests.support.checkpoints import CHATML, CONTEXT, save_checkpoint
from tests.support.serve_cases import BACKEND, Server, all_together

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="backend xla runs one request at a time")
PARALLEL, CLIENTS, SEEDS = 4, 8, 3
COMMON = "def area(width, height):\n    return width * height\n" * 12
PROMPTS = [
    "x = ",
    "class Stack:",
    COMMON,
    f"{COMMON}print(area(2, 3))\n",
    f"{COMMON[:200]}import math\n",
    "import numpy as np\n" * 100,  # read in several passes
]
LEAVES = 0.4  # share of the requests whose client disconnects


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", *CHATML)


@pytest.fixture(scope="module")
def server(checkpoint):
    options = (
        "--backend",
        BACKEND,
        "--parallel",
        PARALLEL,
        "--most-slowdown",
        100,
        "--max-waiting",
        8 * CLIENTS,  # also counts clients that have disconnected, until the server notices
        "--timeout",
        600,
    )
    server = Server(checkpoint, *options)
    server.patience = 600  # a process that is stopped for a minute must not count as a lost slot
    reader = threading.Thread(target=show_log, args=(server.process,))
    reader.start()
    try:
        yield server.wait_until(200)
    finally:
        server.process.kill()
        reader.join()
        server.kill()


def show_log(process):
    """Prints the server's log, so that it is shown if a test fails. Without a reader, the server would block."""
    for line in process.stderr:
        sys.stderr.write(line)


def request(prompt, seed):
    tokens = 20 + 40 * seed
    draw = {"temperature": 1.0, "top_p": 0.9, "seed": seed}
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, **draw}


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The text and log-probabilities of each request alone, on an engine without drafts and kept prefixes."""
    engine = infer.Engine.load(checkpoint, BACKEND, prefix_cache=0, speculation=0)

    def answer(prompt, seed):
        ask = request(prompt, seed)
        sampling = infer.Sampling(**{name: ask[name] for name in ("temperature", "top_p", "seed")})
        return engine.generate(prompt, max_new_tokens=ask["max_tokens"], sampling=sampling, stop_tokens=()).result

    return {(prompt, seed): answer(prompt, seed) for prompt in PROMPTS for seed in range(SEEDS)}


def same(expected, text, logprobs):
    assert text == expected.text
    assert logprobs == list(expected.logprobs)  # every bit: JSON has the shortest decimals of a float64


def ask_whole(server, expected, ask):
    [choice] = server.complete(**ask)["choices"]
    same(expected, choice["text"], choice["logprobs"]["token_logprobs"])


def ask_streamed(server, expected, ask):
    with server.stream(**ask) as stream:
        choices = [event["choices"][0] for event in stream if isinstance(event, dict)]
    logprobs = [each["logprobs"]["token_logprobs"] for each in choices if each["logprobs"]]
    same(expected, "".join(each["text"] for each in choices), list(itertools.chain(*logprobs)))


def leave_stream(server, ask, events):
    with server.stream(**ask) as stream:
        for _ in itertools.islice(stream, events):
            pass


def leave_whole(server, ask, bytes_sent, seconds):
    """A client that disconnects while its request arrives, waits or runs."""
    body = json.dumps(ask).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    whole = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(whole[: round(bytes_sent * len(whole))])
        time.sleep(seconds)


def memory(process):
    """Resident memory of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize(
    "seconds", [pytest.param(12, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.exhaustive)]
)
def test_answers_stay_equal_while_clients_come_and_go(server, alone, seconds):
    [engine] = server.children()
    all_together(lambda number: ask_whole(server, alone[PROMPTS[number % 6], 1], request(PROMPTS[number % 6], 1)), 8)
    ends, half = time.monotonic() + seconds, []  # memory at half time, when programs of all sizes are compiled
    counts = [[0, 0] for _ in range(CLIENTS)]  # number of whole answers, and of clients that disconnected

    def client(number):
        choices = random.Random(number)
        while time.monotonic() < ends:
            prompt, seed = choices.choice(PROMPTS), choices.randrange(SEEDS)
            ask, expected = request(prompt, seed), alone[prompt, seed]
            if leaves := choices.random() < LEAVES:
                if choices.random() < 0.7:
                    leave_stream(server, ask, choices.randrange(20))
                else:
                    leave_whole(server, ask, choices.choice([0.3, 0.9, 1, 1]), choices.choice([0, 0.001, 0.02, 0.1]))
            else:
                choices.choice([ask_whole, ask_streamed])(server, expected, ask)
            counts[number][leaves] += 1
            if not half and time.monotonic() > ends - seconds / 2:
                half.append(memory(engine))

    all_together(client, CLIENTS)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for_metric(name, 0)
    assert server.children() == [engine] and server.metric("engine_restarts_total") == 0
    for reason in ("timeout", "queue_full", "error"):
        assert server.metric(f'request_failure_total{{reason="{reason}"}}') == 0
    whole, left = map(sum, zip(*counts, strict=True))
    grown = memory(engine) - half[0]
    print(f"\n{whole} whole answers, {left} clients that left, engine {half[0] >> 20} MiB, then {grown / 2**20:+.1f}")
    assert grown < 64 << 20, "requests leak memory"
    assert whole > seconds / 10 and left > seconds / 20 and server.metric("prefix_cache_hits_total") > 0
    with contextlib.ExitStack() as streams:  # every slot still works
        for _ in range(PARALLEL):
            stream = streams.enter_context(server.stream(prompt=PROMPTS[0], max_tokens=CONTEXT // 4, ignore_eos=True))
            assert isinstance(next(stream), dict)
        assert server.metric("num_requests_running") == PARALLEL
    server.wait_for_metric("num_requests_running", 0)
