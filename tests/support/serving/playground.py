"""The playground in a real browser (LANEFORMER_CHROMIUM may name it), with an engine that repeats its prompt at 3,000
tokens/s: fixtures of its tests, and what a user does on the page.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager

import pytest

from infer.bench import schema
from tests.support.serve_cases import ROOT, Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
expect = sync_api.expect
expect.set_options(timeout=20_000)  # long enough for a busy machine
CHROMIUM = os.environ.get("LANEFORMER_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)

KEY = "sk-test-1234"
CODE = 'def add(a, b):\n    """Sum of é and 😀."""\n    return a + b  # 12\n\n\n'
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script> &amp; "
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NUMBER = (int, float)
NULL = schema.Null
# Of a downloaded record, as schema.FIELDS of one of `infer bench`.
FIELDS = {
    "schema": str,
    "status": str,
    "date_utc": str,
    "model": str,
    "conditions": dict,
    "request": {"path": str, "body": dict},
    "seed": NULL(int),
    "finish_reason": NULL(str),
    "complete": bool,
    "text": str,
    "timings": NULL(
        {
            **dict.fromkeys(("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"), int),
            "prompt_ms": NUMBER,
            "prompt_per_second": NUMBER,
            "predicted_ms": NUMBER,
            "predicted_per_second": NULL(NUMBER),
        }
    ),
    "metrics": NULL(
        dict.fromkeys(
            ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
            NULL(NUMBER),
        )
        | {"speculative_decoding": NULL(dict), "shared_passes": int}
    ),
    "tokens": {"point": str, "time_ms": list, "end": list},
    "between_arrivals_ms": NULL({"point": str, "n": int, **dict.fromkeys(("p50", "p95", "p99", "max"), NUMBER)}),
    "client": {
        "point": str,
        "user_agent": str,
        "arrival_ms": list,
        "tokens": list,
        "tokens_per_second": NULL(NUMBER),
        "elapsed_ms": NUMBER,
    },
    "notes": list,
}


@contextmanager
def started(checkpoint, *args, key=None):
    server = Server(checkpoint, *args, key=key, program=(str(ROOT / "tests/support/serving/playground_engine.py"),))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server():
    with started("echo", "--max-waiting", 1) as server:
        yield server.wait_until(200)


@pytest.fixture(scope="module")
def strict():
    """With a key, no chat template, and little patience."""
    with started("no-chat", "--timeout", 0.5, key=KEY) as server:
        yield server.wait_until(200)


@pytest.fixture(scope="session")
def chromium() -> str:
    """For the session, so that a test skips before a module's server starts."""
    return CHROMIUM or pytest.skip("no Chromium found: install one, or name its file in LANEFORMER_CHROMIUM")


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; the browser's complaints fail the test, except about error answers."""
    contexts, complaints = [], []

    def open_(server, path="/", ready=True, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.goto(f"http://127.0.0.1:{server.port}{path}")
        if ready:
            expect(page.locator("#conditions")).to_contain_text("batch 1")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


def ask(page, prompt, tokens, **fields):
    """Fills the form and runs it."""
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": tokens, **fields}.items():
        page.fill(f"[name={name}]", str(value))
    page.click("#run")


def complete(page, prompt, tokens, **fields):
    ask(page, prompt, tokens, **fields)
    expect(page.locator("#state")).to_have_text("complete")


def shown(page, pane="answer"):
    """The text of a pane, without the prompt that it continues."""
    return page.locator(f"#{pane} .text").text_content()


def record_of(page):
    with page.expect_download() as waiting:
        page.click("#download")
    assert re.fullmatch(r"laneformer-\d{4}-\d\d-\d\dT\d{6}\.json", waiting.value.suggested_filename)
    return json.loads(waiting.value.path().read_bytes())


def number(page, selector):
    return float(re.match(r"[\d,.]+", page.locator(selector).text_content())[0].replace(",", ""))


def seconds_busy(session):
    """CPU time of the main thread, which does not depend on other processes, and the time."""
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return metrics["ThreadTime"], metrics["Timestamp"]
