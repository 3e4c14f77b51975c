"""python -m infer serve from the client's side: OpenAI's APIs over a real connection, with one engine and one queue."""

import json
import socket
import time

import pytest

from laneformer import infer
from laneformer.infer.text.chat_template import ChatTemplate
from tests.support.checkpoints import CONTEXT
from tests.support.serve_cases import BACKEND, JSON

PROMPT = "def add(a, b):"
TALK = [{"role": "system", "content": "Be <|im_end|> brief."}, {"role": "user", "content": "hé"}]
DRAW = {"temperature": 1.0, "seed": 7}


@pytest.fixture
def checkpoint(small_checkpoint):
    return small_checkpoint


@pytest.fixture
def server(small_server):
    return small_server


@pytest.fixture
def engine(small_engine):
    return small_engine


def expected(engine, prompt=PROMPT, tokens=40, **more):
    return engine.generate(prompt, max_new_tokens=tokens, sampling=infer.Sampling(**DRAW), **more).result


def test_completion_matches_the_engine(server, engine):
    result = expected(engine)
    whole = server.complete(PROMPT, max_tokens=40, **DRAW)
    assert whole["object"] == "text_completion" and whole["model"] == "small" and whole["seed"] == 7
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (result.text, "length", None)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 40, "total_tokens": len(PROMPT) + 40}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}  # too short
    assert whole["usage"] == usage
    with server.stream(prompt=[PROMPT], max_tokens=40, stream_options={"include_usage": True}, **DRAW) as stream:
        *chunks, done = stream
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"] != whole["id"]
    *texts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == result.text and len(texts) > 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in texts) and last["choices"] == [] and last["usage"] == usage


def test_timings_are_consistent(server):
    began = time.perf_counter()
    answer = server.complete(PROMPT, max_tokens=50, ignore_eos=True)
    elapsed = 1000 * (time.perf_counter() - began)
    t, m = answer["timings"], answer["metrics"]
    assert (t["prompt_n"], t["predicted_n"]) == (len(PROMPT), 50)
    assert 0 < t["prompt_ms"] <= m["time_to_first_token_ms"]
    assert m["queue_time_ms"] + m["time_to_first_token_ms"] + m["generation_time_ms"] < elapsed
    assert t["predicted_per_second"] == pytest.approx(1000 / m["mean_itl_ms"]) == m["tokens_per_second"]
    assert t["predicted_per_second"] == pytest.approx(49 / (m["generation_time_ms"] / 1000))


def test_prefixes_are_reused_and_counted(server, engine):
    text = "Reuse " + "what was computed for the text before. " * 3
    fields = {"max_tokens": 20, "return_token_ids": True, **DRAW}

    def ask(prompt, **more):
        counters = [f"prefix_cache_{name}_total" for name in ("queries", "hits")]
        before = [server.metric(name) for name in counters]
        answer = server.complete(prompt, **fields, **more)
        cached, timings = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["timings"]
        assert timings["cache_n"] == cached and timings["prompt_n"] == answer["usage"]["prompt_tokens"] - cached
        counted = [server.metric(name) - old for name, old in zip(counters, before, strict=True)]
        looked_up = BACKEND == "cpu" and more.get("cache_prompt", True)
        assert counted == ([answer["usage"]["prompt_tokens"], cached] if looked_up else [0, 0])
        assert "warnings" not in answer and answer["choices"][0]["text"] == expected(engine, prompt, 20).text
        return answer, cached

    first, cached = ask(text)
    assert cached == 0
    longer = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], *range(97, 117)]
    kept = len(longer) - 21 if BACKEND == "cpu" else 0
    assert ask(longer, prompt_cache_key="talk")[1] == kept
    assert ask(longer, cache_salt="mine")[1] == 0 and ask(longer, cache_salt="yours")[1] == 0
    assert ask(longer, cache_prompt=False)[1] == 0 and ask(longer)[1] == 0
    with server.stream(prompt=longer, **fields, stream_options={"include_usage": True}) as stream:
        *_, usage, _ = stream
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(longer) - 1 if BACKEND == "cpu" else 0)


SPECULATION = ("drafts", "draft_tokens", "accepted_tokens")


def counted(server):
    """Counts over all answers so far: passes with drafts, drafts, correct drafts, correct first drafts, passes, rows of
    passes.
    """
    names = [f"spec_decode_num_{name}_total" for name in SPECULATION]
    names += ['spec_decode_num_accepted_tokens_per_pos_total{position="0"}', "pass_rows_count", "pass_rows_sum"]
    return [server.metric(name) for name in names]


@pytest.mark.skipif(BACKEND != "cpu", reason="other backends make no drafts")
def test_drafts_change_no_answer_and_are_counted(server, engine):
    """Without noise, random weights repeat themselves. The number of drafts depends on the times of passes meanwhile,
    but the engine tries some at least every few hundred passes.
    """
    fields = {"max_tokens": 200, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    prediction = {"type": "content", "content": [{"type": "text", "text": PROMPT + " return a + b"}]}
    tokens = list(engine.generate(PROMPT, max_new_tokens=200).result.tokens)
    before, sums = counted(server), [0] * 6
    for number in range(20):
        more = [{}, {"prediction": prediction}, {"speculative.n_max": 2}, {"speculative.n_max": 0}][number % 4]
        answer = server.complete(PROMPT, **fields, **more)
        assert answer["choices"][0]["token_ids"] == tokens and "warnings" not in answer
        found, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
        drafted, right = timings["draft_n"], timings["draft_n_accepted"]
        assert (drafted, right) == (found["draft_tokens"], found["accepted_tokens"]) and 0 <= right <= drafted
        places = found["accepted_tokens_per_position"]
        assert sum(places) == right and places == sorted(places, reverse=True) and len(places) == 15
        assert found["passes"] + right == 199 == pytest.approx(found["passes"] * found["tokens_per_pass"])
        assert drafted <= more.get("speculative.n_max", 15) * found["passes"]
        details = answer["usage"].get("completion_tokens_details")
        assert (details is not None) == ("prediction" in more)
        if details:
            assert 0 <= details["accepted_prediction_tokens"] <= right
            assert 0 <= details["rejected_prediction_tokens"] <= drafted - right
        sums = [a + b for a, b in zip(sums, (0, drafted, right, places[0], found["passes"], drafted), strict=True)]
        if number > 3 and sums[1] > 0:
            break
    drafts, *rest = [new - old for new, old in zip(counted(server), before, strict=True)]
    sums[5] += sums[4]  # one row of each pass is not a draft
    assert rest == sums[1:] and 0 < drafts <= sums[1]


def test_prediction_of_half_a_megabyte_is_read(server):
    content = "def add(a, b):\n    return a + b\n" * (1 << 14)
    answer = server.complete(PROMPT, max_tokens=5, prediction={"type": "content", "content": content}, **DRAW)
    assert answer["choices"] == server.complete(PROMPT, max_tokens=5, **DRAW)["choices"]
    assert answer.get("warnings") == (None if BACKEND == "cpu" else ["prediction has no effect"])
    status, body = server.post("/v1/completions", prompt=PROMPT, prediction={"type": "content", "content": 2 * content})
    assert status == 413 and "1048576" in body["error"]["message"]
    status, body = server.post("/v1/completions", prompt=PROMPT, prediction={"type": "content", "content": {}})
    assert (status, body["error"]["param"]) == (400, "prediction.content")


def test_chat_matches_the_engine(server, engine, checkpoint):
    ids = ChatTemplate.load(checkpoint).encode(TALK, add_generation_prompt=True)
    assert ids.count(257) == 2, "text of a message must not become a control token"
    result = expected(engine, ids)
    fields = {"messages": TALK, "max_completion_tokens": 40, "model": "small", **DRAW}
    status, whole = server.post("/v1/chat/completions", return_token_ids=True, **fields)
    assert status == 200 and whole["object"] == "chat.completion" and whole["prompt_token_ids"] == ids
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text} and choice["token_ids"] == list(
        result.tokens
    )
    with server.stream("/v1/chat/completions", **fields) as stream:
        first, *chunks, last, done = stream
    assert done == "[DONE]" and first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == result.text
    assert (
        last["choices"][0]["delta"] == {}
        and last["choices"][0]["finish_reason"] == "length"
        and last["timings"]["predicted_n"] == 40
    )
    assert first["object"] == "chat.completion.chunk" and "usage" not in first


def test_end_of_turn_ends_the_answer(server, engine, checkpoint):
    template = ChatTemplate.load(checkpoint)
    ids, [end] = template.encode(TALK, add_generation_prompt=True), template.ends(())
    for seed in range(100):
        tokens = list(engine.generate(ids, max_new_tokens=60, sampling=infer.Sampling(1.0, seed=seed)))
        if end in tokens[1:]:
            break
    before = tokens[: tokens.index(end)]
    asked = {"messages": TALK, "max_tokens": 60, "temperature": 1.0, "seed": seed, "return_token_ids": True}
    [choice] = server.post("/v1/chat/completions", **asked)[1]["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == before
    [choice] = server.post("/v1/chat/completions", **asked, ignore_eos=True)[1]["choices"]
    assert choice["finish_reason"] == "length" and choice["token_ids"] == tokens


def test_stop_strings_end_the_text(server, engine):
    text = expected(engine).text
    start = next(n for n in range(5, 30) if text[n : n + 2].isprintable() and text.find(text[n : n + 2]) == n)
    stop = text[start : start + 2]
    [choice] = server.complete(PROMPT, max_tokens=40, stop=["never", stop], **DRAW)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:start], "stop", stop)
    with server.stream(prompt=PROMPT, max_tokens=40, stop=stop, **DRAW) as stream:
        *chunks, _ = stream
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:start]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    token = expected(engine).tokens[3]
    [choice] = server.complete(PROMPT, max_tokens=40, stop_token_ids=[token], return_token_ids=True, **DRAW)["choices"]
    assert choice["token_ids"] == list(expected(engine, stop_tokens=token).tokens) and choice["stop_reason"] == token


def test_logprobs_of_completions_match_the_engine(server, engine):
    result = expected(engine, top_logprobs=2)
    answer = server.complete(PROMPT, max_tokens=40, logprobs=2, **DRAW)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(result.logprobs)
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [
        pytest.approx([p for _, p in top]) for top in result.top_logprobs
    ]
    raw = [engine.tokenizer.token_bytes(token) for token in result.tokens]
    spelled = [b.decode() if b.isascii() else f"bytes:\\x{b[0]:02x}" for b in raw]
    assert logprobs["tokens"] == [
        text or {256: "<|im_start|>", 257: "<|im_end|>"}[t] for t, text in zip(result.tokens, spelled, strict=True)
    ]
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and all(offsets[n] <= n for n in range(40))
    with server.stream(prompt=PROMPT, max_tokens=40, logprobs=2, **DRAW) as stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in stream if chunk != "[DONE]"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts if part for value in part[name]] == logprobs[name]


def test_logprobs_of_chats_match_the_engine(server, engine, checkpoint):
    ids = ChatTemplate.load(checkpoint).encode(TALK, add_generation_prompt=True)
    result = expected(engine, ids, 5, top_logprobs=3)
    _, answer = server.post("/v1/chat/completions", messages=TALK, max_tokens=5, logprobs=True, top_logprobs=3, **DRAW)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(result.logprobs)
    assert [bytes(each["bytes"]) for each in content] == [
        engine.tokenizer.token_bytes(token) for token in result.tokens
    ]
    assert [[top["logprob"] for top in each["top_logprobs"]] for each in content] == [
        pytest.approx([p for _, p in top]) for top in result.top_logprobs
    ]


def test_default_seed_is_random_and_reported(server):
    one, two = (server.complete(PROMPT, max_tokens=30) for _ in range(2))
    assert one["choices"][0]["text"] != two["choices"][0]["text"] and one["seed"] != two["seed"]
    assert server.complete(PROMPT, max_tokens=30, seed=one["seed"])["choices"] == one["choices"]
    greedy = [server.complete(PROMPT, max_tokens=30, temperature=0)["choices"] for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert server.complete(PROMPT, max_tokens=30, top_k=1)["choices"] == greedy[0]
    assert server.complete(PROMPT, max_tokens=30, min_p=1)["choices"] == greedy[0]


def test_requests_are_answered_in_order(server):
    one = server.stream(prompt=PROMPT, max_tokens=2000 if BACKEND == "cpu" else 400, ignore_eos=True)
    two, three = (
        server.stream("/v1/chat/completions", messages=TALK, max_tokens=300, ignore_eos=True) for _ in range(2)
    )
    with one as a, two as b, three as c:
        assert isinstance(next(a), dict)
        assert [next(b)["choices"][0]["delta"]["role"], next(b)] == ["assistant", ": queued 1"]
        assert [next(c)["choices"][0]["delta"]["role"], next(c)] == ["assistant", ": queued 2"]
        assert (server.metric("num_requests_running"), server.metric("num_requests_waiting")) == (1, 2)
        refused, body, headers = server.send("POST", "/v1/completions", json.dumps({"prompt": PROMPT}), JSON)
        assert refused == 429 and headers["retry-after"] == "1" and body["error"]["code"] == "queue_full"
        *_, done_a = a
        *_, end_b, done_b = b
        moved, *_, end_c, done_c = (event for event in c if event != ": keepalive")
        assert moved == ": queued 1" and done_a == done_b == done_c == "[DONE]"
    assert end_b["metrics"]["queue_time_ms"] < end_c["metrics"]["queue_time_ms"]
    assert (
        end_c["metrics"]["queue_time_ms"]
        > end_b["metrics"]["queue_time_ms"] + end_b["metrics"]["generation_time_ms"] - 1000
    )


@pytest.mark.parametrize("streamed", [True, False])
def test_disconnected_client_frees_the_engine(server, streamed):
    cancelled = 'request_failure_total{reason="cancelled"}'
    before = server.metric(cancelled)
    if streamed:
        for _ in range(2):  # twice, because at first the engine may be compiling, which cannot be cancelled
            with server.stream(prompt=PROMPT, max_tokens=CONTEXT, ignore_eos=True) as stream:
                assert any(isinstance(event, dict) for event in stream)
        before += 1
    else:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = json.dumps({"prompt": PROMPT, "max_tokens": CONTEXT, "ignore_eos": True}).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            server.wait_for_metric("num_requests_running", 1)
    assert server.complete(PROMPT, max_tokens=2)["metrics"]["queue_time_ms"] < 500, (
        "the whole answer would take many seconds"
    )
    assert server.metric(cancelled) == before + 1


def test_disconnected_client_leaves_the_queue(server):
    with server.stream(prompt=PROMPT, max_tokens=CONTEXT, ignore_eos=True) as running:
        next(running)
        with server.stream(prompt=PROMPT, max_tokens=5) as waiting:
            assert next(waiting) == ": queued 1"
        server.wait_for_metric("num_requests_waiting", 0)
        assert server.metric("num_requests_running") == 1
    server.wait_for_metric("num_requests_running", 0)


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        (
            {"prompt": "a" * CONTEXT},
            "prompt",
            "context_length_exceeded",
            f"the prompt has {CONTEXT} tokens and the context {CONTEXT}",
        ),
        ({"prompt": ""}, "prompt", None, "the prompt is empty"),
        ({"prompt": [5, 258]}, "prompt", None, "token ids must be from 0 to 257"),
        ({"prompt": [10**40]}, "prompt", None, "token ids must be from 0 to 257"),
        ({"prompt": "\ud83d"}, "prompt", None, "not valid Unicode"),
        ({"prompt": "a", "\udfff": 1}, "\\udfff", None, "not a name in valid Unicode"),
        ({"prompt": "a", "temperature": 10**399}, "temperature", None, "give a finite number"),
        ({"prompt": "a", "top_p": 2}, "top_p", None, "top_p = 2.0"),
        ({"prompt": "a", "seed": -1}, "seed", None, "seed = -1"),
        ({"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids", None, "give ids from 0 to 257"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter", "best_of = 2 is not supported"),
    ],
)
def test_bad_requests_name_the_parameter(server, fields, param, code, message):
    status, body = server.post("/v1/completions", **fields)
    error = body["error"]
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert message in error["message"]


def test_refusing_template_and_long_chat_are_errors(server):
    status, body = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a" * CONTEXT}])
    assert status == 400 and (body["error"]["param"], body["error"]["code"]) == ("messages", "context_length_exceeded")
    thought = [{"role": "assistant", "content": "", "reasoning_content": "x"}]
    status, body = server.post("/v1/chat/completions", messages=thought)
    assert status == 400 and "cannot write tool calls" in body["error"]["message"]


def test_deeply_nested_requests_are_refused(server):
    for depth in (300, 600, 900, 960, 980, 1500):  # too deep for the template, for the pipe, and for the body
        nested = "[" * depth + "]" * depth
        call = '{"type": "function", "function": {"name": "f", "arguments": {"a": ' + nested + "}}}"
        body = '{"max_tokens": 1, "messages": [{"role": "assistant", "tool_calls": [' + call + "]}]}"
        status, answer, _ = server.send("POST", "/v1/chat/completions", body, JSON)
        assert depth == 300 or (status == 400 and "nested too deeply" in answer["error"]["message"]), (depth, answer)
    assert server.complete(PROMPT, max_tokens=1)


def test_invalid_bodies_and_paths_are_errors(server):
    long = json.dumps({"prompt": "a" * (1 << 20)})
    for status, method, path, body, headers in (
        (400, "POST", "/v1/completions", "{", JSON),
        (400, "POST", "/v1/completions", "[]", {"Content-Type": "application/json; charset=utf-8"}),
        (413, "POST", "/v1/completions", long, JSON),
        (413, "POST", "/v1/completions", iter([long.encode()]), JSON),  # in chunks, of unknown length
        (413, "POST", "/v1/completions", 20 * long, JSON),
        (400, "POST", "/v1/completions", '{"prompt": "a", "best_of": ' + "[" * 960 + "]" * 960 + "}", JSON),
        (415, "POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "text/plain"}),
        (404, "POST", "/v1/completions", '{"prompt": "a", "model": "gpt"}', JSON),
        (404, "GET", "/v1/models/gpt", None, {}),
        (404, "GET", "/docs", None, {}),
        (405, "GET", "/v1/completions", None, {}),
        (403, "GET", "/v1/models", None, {"Host": "evil.example"}),
        (403, "GET", "/health", None, {"Host": "127.0.0.1.evil.example:80"}),
    ):
        answer, error, _ = server.send(method, path, body, headers)
        assert answer == status and set(error["error"]) == {"message", "type", "param", "code"}, (
            path,
            body and body[:20],
            error,
        )
    assert server.get("/v1/models", {"Host": "My.Example:80"})[0] == 200
    assert server.get("/v1/models")[2].get("access-control-allow-origin") is None


def test_declared_length_is_refused_at_once(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        began = time.monotonic()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1048577\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ") and time.monotonic() - began < 5


def test_parameters_without_effect_are_named_in_the_answer(server):
    asked = {"store": True, "max_tokens": 3, "chat_template_kwargs": {"thinking": True, "bos_token": "x"}}
    warnings = [
        f"{name} has no effect" for name in ("store", *(f"chat_template_kwargs.{x}" for x in ("thinking", "bos_token")))
    ]
    assert server.complete(PROMPT, **asked)["warnings"] == warnings
    assert "warnings" not in server.complete(PROMPT, max_tokens=3, top_k=-1, user="me")
    status, whole = server.post("/v1/chat/completions", messages=TALK, **asked)
    assert status == 200 and whole["warnings"] == warnings
    for usage in (False, True):
        with server.stream(
            "/v1/chat/completions", messages=TALK, stream_options={"include_usage": usage}, **asked
        ) as stream:
            *chunks, last, _ = stream
        assert last["warnings"] == warnings and not any("warnings" in chunk for chunk in chunks)


def test_routes_answer(server):
    assert server.get("/health")[:2] == (200, {"status": "ok"})
    [model] = server.get("/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == ("small", CONTEXT, True)
    conditions = model["conditions"]
    assert (conditions["backend"], conditions["random_weights"], conditions["on_cpu"]) == (BACKEND, False, True)
    assert server.get("/v1/models/small")[1] == model
    assert server.get("/")[1]["models"] == "/v1/models"


def test_metrics_have_the_names_that_dashboards_read(server):
    server.complete(PROMPT, max_tokens=10, ignore_eos=True)
    text = server.get("/metrics")[1]
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
        *("spec_decode_num_accepted_tokens_total", 'pass_rows_bucket{le="32.0"}'),
    ):
        assert f"\nlaneformer_{name} " in text, name
    if BACKEND == "cpu":
        assert '\nlaneformer_spec_decode_num_accepted_tokens_per_pos_total{position="0"} ' in text


def test_metrics_count_requests_and_tokens(server):
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        'request_success_total{finished_reason="length"}',
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        'inter_token_latency_seconds_bucket{le="+Inf"}',
    )
    before = [server.metric(name) for name in names]
    server.complete(PROMPT, max_tokens=10, ignore_eos=True)
    assert [server.metric(name) - b for name, b in zip(names, before, strict=True)] == [
        len(PROMPT),
        10,
        1,
        1,
        9,
        1,
        1,
        9,
    ]
    assert server.metric('inter_token_latency_seconds_bucket{le="5e-05"}') <= server.metric(
        "inter_token_latency_seconds_count"
    )


def test_openai_client_works(server, engine):
    openai = pytest.importorskip("openai")
    result = expected(engine)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["small"]
        done = client.completions.create(model="small", prompt=PROMPT, max_tokens=40, logprobs=1, **DRAW)
        assert done.choices[0].text == result.text and done.usage.completion_tokens == 40
        asked = {"model": "small", "messages": TALK, "max_tokens": 20, "logprobs": True}
        asked["extra_body"] = {"top_k": 1, "cache_prompt": False}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
        assert len(whole.choices[0].logprobs.content) == 20
        with pytest.raises(openai.NotFoundError, match="unknown model 'gpt'"):
            client.completions.create(model="gpt", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="small", prompt=PROMPT, best_of=2)
        assert caught.value.param == "best_of" and caught.value.code == "unsupported_parameter"


def test_penalties_and_biases_reach_the_engine(server, engine):
    fields = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"70": 3, "71": -100}}
    answer = server.complete(PROMPT, max_tokens=30, n=2, logprobs=2, **fields, **DRAW)
    for i, choice in enumerate(answer["choices"]):
        biases = {int(token): bias for token, bias in fields["logit_bias"].items()}
        sampling = infer.Sampling(**DRAW | fields | {"seed": DRAW["seed"] + i, "logit_bias": biases})
        result = engine.generate(PROMPT, max_new_tokens=30, sampling=sampling, top_logprobs=2).result
        assert choice["text"] == result.text
        assert choice["logprobs"]["token_logprobs"] == list(result.logprobs)
    for name, value in (("presence_penalty", 3), ("logit_bias", {"258": 1}), ("logit_bias", {"1": 101})):
        status, body = server.post("/v1/completions", prompt=PROMPT, **{name: value})
        assert (status, body["error"]["param"]) == (400, name)
