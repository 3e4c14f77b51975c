"""Problems that the playground explains in a real browser: keys, refusals, crashes, a missing server."""

import json

import pytest

from tests.support.serving.browser import KEY, browser, chromium, expect, open_page, server, started, strict  # noqa: F401
from tests.support.serving.playground import CODE, ask, complete, record_of, shown
from tests.support.serving.playground_engine import answer


def test_key_is_kept_in_memory(strict, open_page):
    page = open_page(strict, ready=False, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#key")).to_be_focused()
    for key, words in (("wrong", "refused"), (KEY, None)):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        if words:
            expect(page.locator("#problem")).to_contain_text(words)
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("[name=mode][value=chat]")).to_be_disabled()
    expect(page.locator("#no-chat")).to_have_text("no chat template")
    complete(page, CODE, 30)
    assert shown(page) == answer(CODE, 30)
    page.click("#copy-curl")
    expect(page.locator("#copy-curl")).to_have_text("Copied")
    assert "Bearer $LANEFORMER_API_KEY" in page.evaluate("navigator.clipboard.readText()")
    kept = page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.outerHTML])"
    )
    assert KEY not in kept and KEY not in json.dumps(record_of(page)) and page.input_value("#key") == ""
    page.reload()
    expect(page.locator("#key-form")).to_be_visible()


@pytest.mark.slow
def test_timeout_and_crash_are_explained(strict, open_page):
    page = open_page(strict, ready=False)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    problem = page.locator("#problem")
    ask(page, CODE, 90_000)
    expect(problem).to_contain_text("The answer took too long.")
    expect(problem).to_contain_text("Ask for fewer tokens, or start the server with a larger --timeout.")
    expect(page.locator("#state")).to_contain_text("incomplete")
    assert answer(CODE, 90_000).startswith(shown(page))
    ask(page, "crash", 5)
    expect(problem).to_contain_text("The engine process ended unexpectedly (exit code 3). Try again")
    ask(page, CODE, 5)
    expect(problem).to_contain_text("The engine is restarting: try again soon.")
    strict.wait_until(200)
    complete(page, CODE, 5)
    expect(problem).to_be_hidden()


def test_refusals_are_explained(server, open_page):
    page = open_page(server)
    problem = page.locator("#problem")
    with server.stream(prompt="a", max_tokens=90_000) as one:
        next(one)
        ask(page, CODE, 5)
        expect(page.locator("#state")).to_have_text("1 request before this one")
        page.keyboard.press("Escape")
        expect(page.locator("#state")).to_have_text("stopped after 0 tokens")
        server.wait_for_metric("num_requests_waiting", 0)
        with server.stream(prompt="a", max_tokens=5) as two:
            assert next(two) == ": queued 1"
            ask(page, CODE, 5)
            expect(problem).to_contain_text(
                "The queue is full. The queue is full with 1 waiting requests: try again later."
            )
            expect(problem).to_contain_text("in 1 s or more")
    server.wait_for_metric("num_requests_running", 0)
    ask(page, "a" * 100_000, 5)
    expect(problem).to_contain_text(
        "The prompt does not fit. The prompt has 100000 tokens and the context 100000: shorten the prompt"
    )
    ask(page, CODE, 5, temperature=1e-7)
    assert page.evaluate("document.activeElement.name") == "temperature", "the browser must refuse the form"
    page.evaluate("document.querySelector('[name=temperature]').step = 'any'")
    ask(page, CODE, 5)
    expect(problem).to_contain_text("The server refused the request. Temperature = 1e-07: give 0")
    expect(page.locator("#announcement")).to_be_empty()
    expect(problem).to_have_attribute("role", "alert")
    page.route(
        "**/v1/completions", lambda route: route.continue_(post_data={**route.request.post_data_json, "model": "older"})
    )
    ask(page, CODE, 5, temperature=0)
    expect(problem).to_have_text("The server has a different model now. Reload this page.")
    page.unroute("**/v1/completions")
    complete(page, CODE, 5)
    expect(page.locator("#conditions")).to_contain_text("greedy")


@pytest.mark.slow
def test_loading_and_stopped_servers_are_explained(open_page, tmp_path):
    with started(tmp_path / "loaded") as server:
        page = open_page(server, ready=False)
        expect(page.locator("#problem")).to_contain_text("The model is loading.")
        (tmp_path / "loaded").touch()
        expect(page.locator("#conditions")).to_contain_text("batch 1")
        expect(page.locator("#problem")).to_be_hidden()
        ask(page, CODE, 90_000)
        expect(page.locator("#state")).to_have_text("running")
        server.end(15)
        expect(page.locator("#problem")).to_contain_text("The server was stopped. Start it again")
        ask(page, CODE, 5)
        expect(page.locator("#problem")).to_contain_text("The server cannot be reached. Check in its terminal")
