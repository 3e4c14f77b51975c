"""The playground: its files and the times of tokens, and runs, chats, stops and copies in a real browser."""

import json
import re
import shlex

import pytest

from laneformer.infer.bench import schema
from tests.support.serving.browser import browser, chromium, expect, open_page, server, strict  # noqa: F401
from tests.support.serving.playground import CODE, FIELDS, HTML, answers, ask, complete, record_of, shown
from tests.support.serving.playground_engine import answer


def test_files_are_served(server, strict):
    for path, kind in (
        ("/", "text/html"),
        ("/playground/app.js", "text/javascript"),
        ("/playground/style.css", "text/css"),
        ("/playground/icon.svg", "image/svg+xml"),
    ):
        for each in (server, strict):  # also if the server has a key, because the page must ask for it
            status, body, headers = each.get(path, HTML)
            assert status == 200 and body and headers["content-type"].startswith(kind), path
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
            assert (
                headers["x-content-type-options"] == "nosniff"
                and headers["cache-control"] == "no-cache"
                and headers["vary"] == "Accept"
            )
            status, body, again = each.get(path, {**HTML, "If-None-Match": headers["etag"]})
            assert (status, body, again["etag"]) == (304, "", headers["etag"])
    assert (
        server.get("/")[1]["models"] == "/v1/models" and server.get("/", {"Accept": "*/*"})[1]["server"] == "laneformer"
    )
    assert strict.get("/")[0] == strict.get("/v1/models", HTML)[0] == 401
    assert server.get("/playground/nothing.js")[0] == server.get("/playground/..%2fserve.py")[0] == 404
    assert re.findall(r"(?:src|href)=\"(?!playground/)", server.get("/", HTML)[1]) == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timeline_has_every_token(server, path):
    prompt = {"messages": [{"role": "user", "content": CODE}]} if "chat" in path else {"prompt": CODE}
    status, whole = server.post(path, max_tokens=40, return_timeline=True, **prompt)
    assert status == 200, whole
    [choice] = whole["choices"]
    timeline = choice["timeline"]
    with server.stream(path, max_tokens=40, return_timeline=True, **prompt) as stream:
        streamed = [each for chunk in stream if chunk != "[DONE]" for each in chunk["choices"][0].get("timeline", [])]
    times = [ms for _, ms, _, _ in timeline]
    for each in (timeline, streamed):
        assert "".join(text for text, *_ in each) == answer(CODE, 40) and len(each) == 40
        assert {tuple(origin) for _, _, *origin in each} == {(0, 0)}
    assert (
        status == 200
        and times == sorted(times)
        and times[0] == pytest.approx(whole["metrics"]["time_to_first_token_ms"], abs=1e-3)
    )
    assert times[-1] - times[0] == pytest.approx(whole["timings"]["predicted_ms"], abs=2e-3)
    status, refused = server.post(path, return_timeline=1, **prompt)
    assert status == 400 and refused["error"]["param"] == "return_timeline"


def test_stop_frees_the_engine(server, open_page):
    page = open_page(server)
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        ask(page, CODE, 90_000)
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#rate")).not_to_have_text("–")
        stop()
        expect(page.locator("#state")).to_contain_text("stopped after")
        server.wait_for_metric("num_requests_running", 0)
        assert server.complete("a", max_tokens=1)["metrics"]["queue_time_ms"] < 5000
        text = shown(page)
        assert 0 < len(text) < 200_000 and answer(CODE, 90_000).startswith(text)
        record = record_of(page)
        schema._check(record, FIELDS, "record", "")
        assert record["text"] == text and record["timings"] is None and not record["complete"]
        expect(page.locator("#rate-note")).to_contain_text("early end")
        expect(page.locator("#announcement")).to_contain_text("Stopped after")


def test_chat_sends_messages(server, open_page):
    page = open_page(server)
    page.click("text='LRU cache'")
    completion = page.input_value("#prompt")
    page.check("[name=mode][value=chat]", force=True)
    expect(page.locator("#prompt-label")).to_have_text("Message")
    assert page.input_value("#prompt").startswith("Write a Python class") and completion.startswith("from collections")
    complete(page, "Hello you. ", 40)
    record = record_of(page)
    assert record["request"]["path"] == "v1/chat/completions"
    assert record["request"]["body"]["messages"] == [{"role": "user", "content": "Hello you. "}]
    assert answers(page) == [record["text"]] == [answer("Hello you. ", 40)]


@pytest.mark.slow
def test_text_and_command_are_copied(server, open_page):
    page = open_page(server, permissions=["clipboard-read", "clipboard-write"])
    prompt = """it's "$HOME" \\ `é`\n"""
    complete(page, prompt, 33)
    page.click("#copy-text")
    expect(page.locator("#copy-text")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == answer(prompt, 33)
    page.click("#copy-curl")
    expect(page.locator("#copy-curl")).to_have_text("Copied")
    curl, option, url, _, header, data, body = shlex.split(
        page.evaluate("navigator.clipboard.readText()").replace("\\\n", "")
    )
    assert (curl, option, url, data) == ("curl", "-N", f"http://127.0.0.1:{server.port}/v1/completions", "-d")
    body = json.loads(body)
    assert header == "Content-Type: application/json" and body["seed"] == record_of(page)["seed"]
    with server.stream(**body) as stream:
        *chunks, _ = stream
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer(prompt, 33)


@pytest.mark.slow
def test_page_works_behind_a_path(server, open_page, browser):
    page = browser.new_context().new_page()
    asked = []

    def proxy(route):
        asked.append(route.request.url)
        route.continue_(url=route.request.url.replace("/models/lane/", "/"))

    page.route("**/models/lane/**", proxy)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{server.port}/models/lane/")
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    page.check("[name=mode][value=completion]", force=True)
    complete(page, CODE, 40)
    assert shown(page) == answer(CODE, 40) and all("/models/lane/" in url for url in asked if url.startswith("http"))
    page.context.close()
