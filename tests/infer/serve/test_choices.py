"""Several answers to one request: choice i is the answer to the same request with seed + i."""

import pytest

from tests.support.checkpoints import CONTEXT

PROMPT = "def add(a, b):"
TALK = [{"role": "user", "content": "hé"}]
COUNT = 3
ROUTES = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": TALK}}
DRAW = {"temperature": 1.0, "max_tokens": 20, "logprobs": None}


@pytest.fixture
def server(small_server):
    return small_server


def text(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("seed", [7, 2**64 - 2])
def test_choices_have_consecutive_seeds(server, path, seed):
    asked = {**ROUTES[path], **DRAW}
    status, body = server.post(path, **asked, n=COUNT, seed=seed, store=True)
    assert status == 200 and body["warnings"] == ["store has no effect"], body
    alone = [server.post(path, **asked, seed=(seed + i) % 2**64)[1] for i in range(COUNT)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [text(choice) for choice in body["choices"]] == [text(each["choices"][0]) for each in alone]
    assert len({text(choice) for choice in body["choices"]}) == COUNT
    assert [choice["seed"] for choice in body["choices"]] == [each["seed"] for each in alone]
    assert [choice["timings"]["predicted_n"] for choice in body["choices"]] == [
        each["usage"]["completion_tokens"] for each in alone
    ]
    usage = body["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "seed" not in body and "timings" not in body


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("usage", [False, True])
def test_streams_have_the_same_choices(server, path, usage):
    asked = {**ROUTES[path], **DRAW, "n": COUNT, "seed": 7}
    _, whole = server.post(path, **asked)
    with server.stream(path, **asked, **({"stream_options": {"include_usage": True}} if usage else {})) as stream:
        *chunks, done = (event for event in stream if not isinstance(event, str) or event == "[DONE]")
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        totals = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert last["choices"] == [] and all(last["usage"][name] == whole["usage"][name] for name in totals)
    made, ends = [""] * COUNT, {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        made[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"], choice["seed"]
    assert made == [text(choice) for choice in whole["choices"]]
    assert ends == {i: (choice["finish_reason"], choice["seed"]) for i, choice in enumerate(whole["choices"])}


def test_choices_wait_together(server):
    """Choices take one place in the queue, and leave it together."""
    long = {"max_tokens": CONTEXT, "ignore_eos": True}
    with server.stream(prompt=PROMPT, **long) as running:
        next(running)
        with server.stream(prompt=PROMPT, n=COUNT, **long) as waiting:
            assert next(waiting) == ": queued 1"
            assert server.metric("num_requests_waiting") == COUNT
            assert server.post("/v1/completions", prompt=PROMPT)[0] == 429
        server.wait_for_metric("num_requests_waiting", 0)
    server.wait_for_metric("num_requests_running", 0)
    with server.stream(prompt=PROMPT, n=COUNT, **long) as stream:
        assert isinstance(next(stream), str | dict)
    server.wait_for_metric("num_requests_running", 0)
    server.wait_for_metric("num_requests_waiting", 0)


@pytest.mark.parametrize("n", [0, 33, "2", True, 1.5])
def test_bad_numbers_are_refused(server, n):
    status, body = server.post("/v1/completions", prompt=PROMPT, n=n)
    assert status == 400 and body["error"]["param"] == "n" and "a whole number" in body["error"]["message"]
    status, body = server.post("/v1/responses", input=PROMPT, n=1)
    assert status == 400 and body["error"]["code"] == "unknown_parameter"


def test_error_of_a_choice_fails_the_request(server):
    status, body = server.post("/v1/completions", prompt="", n=2)
    assert status == 400 and body["error"]["param"] == "prompt"


def test_a_request_has_up_to_32_choices(server):
    """EvalPlus's client asks for 32 samples at a time."""
    asked = {"prompt": PROMPT, "max_tokens": 2, "temperature": 1.0, "seed": 3}
    status, body = server.post("/v1/completions", **asked, n=32)
    assert status == 200 and [choice["index"] for choice in body["choices"]] == list(range(32))
    assert body["usage"]["completion_tokens"] == sum(choice["timings"]["predicted_n"] for choice in body["choices"])
    alone = server.post("/v1/completions", **asked | {"seed": 34})[1]
    assert body["choices"][31]["text"] == alone["choices"][0]["text"]


def test_completions_heal_their_prompts_on_request(server):
    """The small server's vocabulary is single bytes, so the answer is the usual one."""
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    plain, healed = (server.post("/v1/completions", **asked, token_healing=healing)[1] for healing in (False, True))
    assert healed["choices"][0]["text"] == plain["choices"][0]["text"]
    form = {"response_format": {"type": "json_object"}}
    for wrong, message in (({"token_healing": 1}, "token_healing"), ({"token_healing": True, **form}, "together with")):
        status, body = server.post("/v1/completions", **asked, **wrong)
        assert status == 400 and message in body["error"]["message"] and body["error"]["param"] == "token_healing"
    status, body = server.post("/v1/chat/completions", messages=TALK, token_healing=True)
    assert status == 400 and body["error"]["param"] == "token_healing"
