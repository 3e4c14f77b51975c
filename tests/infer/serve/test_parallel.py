"""Several concurrent requests, on a CPU and on emulated GPUs: every client gets the answer that it would get alone,
whatever the others do.
"""

import contextlib
import json
import random

import pytest

from laneformer import infer
from tests.support import emulated
from tests.support.checkpoints import CHATML, CONTEXT, save_checkpoint
from tests.support.serve_cases import BACKEND, JSON, Server, all_together

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="backend xla runs one request at a time")
PARALLEL, CLIENTS = 3, 8
PROMPTS = ["def add(a, b):", "x = ", "class Stack:\n    " * 20, "import numpy as np\n" * 8]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.slow, emulated.needs_gpu])])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def load(backend):
    """Numbers of clients, of requests per client, and of tokens per answer; small if devices are emulated."""
    return (CLIENTS, 6, 60) if backend == "cpu" else (PARALLEL + 1, 3, 12)


@pytest.fixture(scope="module")
def checkpoint(backend, tmp_path_factory):
    sizes = {} if backend == "cpu" else {"layers": 1, "lanes": 2}
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", *CHATML, **sizes)


@pytest.fixture(scope="module")
def server(checkpoint, backend):
    options = ("--backend", backend, "--parallel", PARALLEL, "--max-waiting", CLIENTS)
    if backend == "cpu":
        server = Server(checkpoint, *options, "--most-slowdown", 100)
    else:
        server = Server(checkpoint, *options, program=("-m", "tests.support.serving.gpu_server"))
    yield server.wait_until(200)
    server.kill()


def draw(seed):
    return {"temperature": 1.0, "top_p": 0.9, "seed": seed}


@pytest.fixture(scope="module")
def alone(checkpoint, backend, load):
    """A function that returns the text of a request alone, by prompt and seed."""
    with pytest.MonkeyPatch.context() as patch:
        emulated.make_available(patch)
        engine = infer.Engine.load(checkpoint, backend, **(emulated.engine_options() if backend == "cuda" else {}))

    def text(prompt, seed):
        sampling = infer.Sampling(**draw(seed))
        return engine.generate(prompt, max_new_tokens=load[-1], sampling=sampling, stop_tokens=()).result.text

    return {(prompt, seed): text(prompt, seed) for prompt in PROMPTS for seed in range(3)}


def test_clients_get_the_answers_of_requests_alone(server, alone, load):
    """Some clients disconnect during an answer. No slot is lost."""
    clients, requests, tokens = load

    def client(number):
        choices = random.Random(number)
        for _ in range(requests):
            prompt, seed = choices.choice(PROMPTS), choices.randrange(3)
            ask = {"max_tokens": tokens, "ignore_eos": True, **draw(seed)}
            if choices.random() < 0.3:
                with server.stream(prompt=prompt, **ask) as stream:
                    for _ in zip(range(choices.randrange(8)), stream, strict=False):
                        pass
            elif choices.random() < 0.5:
                with server.stream(prompt=prompt, **ask) as stream:
                    texts = [event["choices"][0]["text"] for event in stream if isinstance(event, dict)]
                assert "".join(texts) == alone[prompt, seed]
            else:
                assert server.complete(prompt, **ask)["choices"][0]["text"] == alone[prompt, seed]

    all_together(client, clients)
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("num_requests_waiting") == 0


def test_requests_run_together_and_others_wait(server):
    long = {"prompt": PROMPTS[0], "max_tokens": CONTEXT, "ignore_eos": True}
    with contextlib.ExitStack() as others:
        first = contextlib.ExitStack()
        for stack in (first, *[others] * (PARALLEL - 1)):
            assert isinstance(next(stack.enter_context(server.stream(**long))), dict)
        with server.stream(prompt=PROMPTS[1], max_tokens=3, ignore_eos=True) as waiting:
            assert next(event for event in waiting if event != ": keepalive") == f": queued {PARALLEL}"
            assert server.metric("num_requests_running") == PARALLEL and server.metric("num_requests_waiting") == 1
            whole = (PARALLEL * len(PROMPTS[0]) + PARALLEL) / (PARALLEL * CONTEXT)  # after at least one token of each
            assert whole <= server.metric("kv_cache_usage_perc") <= 1
            first.close()  # the waiting request gets its slot, and the others continue
            *_, last, done = waiting
        assert done == "[DONE]" and last["metrics"]["shared_passes"] > 0
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.complete(PROMPTS[0], max_tokens=5)["metrics"]["shared_passes"] == 0


def test_full_queue_counts_waiting_requests(server):
    with contextlib.ExitStack() as streams:
        for _ in range(PARALLEL + CLIENTS):
            streams.enter_context(server.stream(prompt=PROMPTS[0], max_tokens=CONTEXT, ignore_eos=True))
        server.wait_for_metric("num_requests_waiting", CLIENTS)
        refused, body, _ = server.send("POST", "/v1/completions", json.dumps({"prompt": PROMPTS[0]}), JSON)
        assert refused == 429 and body["error"]["code"] == "queue_full"
    server.wait_for_metric("num_requests_running", 0)
