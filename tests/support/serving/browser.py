"""Fixtures of the playground's tests: a real browser (its file can be named in LANEFORMER_CHROMIUM), and servers with
an engine that repeats its prompt at 3,000 tokens/s.
"""

import os
import shutil
from contextlib import contextmanager

import pytest

from tests.support.serve_cases import ROOT, Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
expect = sync_api.expect
expect.set_options(timeout=20_000)  # long enough for a busy machine
CHROMIUM = os.environ.get("LANEFORMER_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
KEY = "sk-test-1234"


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
    """A server with an API key, no chat template, and a timeout of 0.5 s."""
    with started("no-chat", "--timeout", 0.5, key=KEY) as server:
        yield server.wait_until(200)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Chromium. Skips the tests without it; its session scope makes them skip before a module's server
    starts.
    """
    return CHROMIUM or pytest.skip("no Chromium found: install one, or name its file in LANEFORMER_CHROMIUM")


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A function that opens the page of a server. Errors and warnings in the browser's console fail the test, except
    those about responses with an error status.
    """
    contexts, complaints = [], []

    def open_(server, path="/", ready=True, mode="completion", **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.goto(f"http://127.0.0.1:{server.port}{path}")
        if ready:
            expect(page.locator("#conditions")).to_contain_text("batch 1")
            page.check(f"[name=mode][value={mode}]", force=True)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
