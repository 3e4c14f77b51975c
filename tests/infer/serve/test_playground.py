"""The playground in a real browser (LANEFORMER_CHROMIUM may name it), with an engine that repeats its prompt at 3,000
tokens/s.
"""

import json
import os
import re
import shlex
import shutil
import time
from contextlib import contextmanager

import numpy as np
import pytest

from infer.bench import schema
from tests.support.serve_cases import ROOT, Server
from tests.support.serving.playground_engine import RATE, answer

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
            **dict.fromkeys(("prompt_n", "predicted_n"), int),
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


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("no Chromium found: install one, or name its file in LANEFORMER_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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


def test_files_are_served(server, strict):
    for path, kind in (
        ("/", "text/html"),
        ("/playground/app.js", "text/javascript"),
        ("/playground/style.css", "text/css"),
        ("/playground/icon.svg", "image/svg+xml"),
    ):
        for each in (server, strict):  # with a key too: the page has to ask for it
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
    [choice] = whole["choices"]
    timeline = choice["timeline"]
    with server.stream(path, max_tokens=40, return_timeline=True, **prompt) as stream:
        streamed = [each for chunk in stream if chunk != "[DONE]" for each in chunk["choices"][0].get("timeline", [])]
    times = [ms for _, ms in timeline]
    for each in (timeline, streamed):
        assert "".join(text for text, _ in each) == answer(CODE, 40) and len(each) == 40
    assert (
        status == 200
        and times == sorted(times)
        and times[0] == pytest.approx(whole["metrics"]["time_to_first_token_ms"], abs=1e-3)
    )
    assert times[-1] - times[0] == pytest.approx(whole["timings"]["predicted_ms"], abs=2e-3)
    status, refused = server.post(path, return_timeline=1, **prompt)
    assert status == 400 and refused["error"]["param"] == "return_timeline"


def test_fast_stream_shows_every_token(server, open_page):
    page = open_page(server)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    complete(page, CODE, 30)  # what is compiled at first
    before = seconds_busy(session)
    complete(page, CODE, 4500)
    busy, elapsed = np.subtract(seconds_busy(session), before)
    assert shown(page) == answer(CODE, 4500) and page.locator("#answer .prompt").text_content() == CODE
    assert page.locator("#count").text_content() == "4,500"
    record = record_of(page)
    assert record["timings"]["predicted_per_second"] > 0.8 * RATE, "the stream was too slow for this test"
    assert elapsed > 4500 / RATE and busy < 0.5 * elapsed, f"{busy:.2f} of {elapsed:.2f} s"


def test_figures_match_the_record(server, open_page):
    page = open_page(server)
    complete(page, CODE, 1200, seed=5, top_k=7, min_p="", temperature=0.8)
    record = record_of(page)
    schema._check(record, FIELDS, "record", "")
    assert (record["schema"], record["status"], record["complete"]) == ("laneformer.playground/1", "simulated", True)
    body = {
        "model": "echo",
        "prompt": CODE,
        "max_tokens": 1200,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 7,
        "seed": 5,
        "stream": True,
        "return_timeline": True,
    }
    assert record["request"] == {"path": "v1/completions", "body": body} and record["seed"] == 5
    assert record["conditions"] == server.get("/v1/models")[1]["data"][0]["conditions"]
    units = len(record["text"].encode("utf-16-le")) // 2
    times, ends = np.array(record["tokens"]["time_ms"]), record["tokens"]["end"]
    assert (
        record["text"] == answer(CODE, 1200)
        and len(times) == len(ends) == 1200
        and (ends[-1], ends) == (units, sorted(ends))
    )

    gaps = np.diff(times)
    found = record["between_arrivals_ms"]
    assert found["n"] == 1199 and found["max"] == pytest.approx(gaps.max())
    for percent in (50, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(gaps, percent))
        assert number(page, f"#p{percent}") == pytest.approx(found[f"p{percent}"], rel=0.006)
    bars = page.locator("#histogram rect").evaluate_all("bars => bars.map((bar) => Number(bar.dataset.count))")
    assert sum(bars) == 1199 and len(bars) > 3

    timings, metrics, client = record["timings"], record["metrics"], record["client"]
    assert number(page, "#rate") == pytest.approx(timings["predicted_per_second"], abs=0.5)
    assert timings["predicted_per_second"] == pytest.approx(1199e3 / (times[-1] - times[0]), rel=1e-3)
    for selector, value in (
        ("#first", metrics["time_to_first_token_ms"]),
        ("#prompt-ms", timings["prompt_ms"]),
        ("#decode-ms", timings["predicted_ms"]),
        ("#mean-ms", metrics["mean_itl_ms"]),
        ("#queue-ms", metrics["queue_time_ms"]),
    ):
        assert number(page, selector) == pytest.approx(value, rel=0.006), selector
    assert number(page, "#prompt-n") == timings["prompt_n"] == len(CODE.encode())
    arrivals, counts = client["arrival_ms"], client["tokens"]
    assert (
        len(arrivals) == len(counts)
        and counts[-1] == 1200
        and arrivals == sorted(arrivals)
        and arrivals[-1] <= client["elapsed_ms"]
    )
    assert client["tokens_per_second"] == pytest.approx(1e3 * (1200 - counts[0]) / (arrivals[-1] - arrivals[0]))
    assert number(page, "#client-rate") == pytest.approx(client["tokens_per_second"], abs=0.5)

    conditions = page.locator(".conditions")
    for words in (
        "simulated",
        "2B parameters",
        "weights bfloat16, compute bfloat16",
        "8 × no device",
        "backend none",
        "batch 1",
        f"prompt {len(CODE.encode())} tokens",
        "temperature 0.8, top_p 0.95, top_k 7, seed 5",
    ):
        expect(conditions).to_contain_text(words)
    expect(page.locator("mark")).to_have_text(["simulated"])


def test_stop_frees_the_engine(server, open_page):
    page = open_page(server)
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        ask(page, CODE, 90_000)
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#rate")).not_to_have_text("–")
        stop()
        expect(page.locator("#state")).to_contain_text("stopped after")
        server.wait_for_metric("num_requests_running", 0)
        assert server.complete("a", max_tokens=1)["metrics"]["queue_time_ms"] < 500
        text = shown(page)
        assert 0 < len(text) < 200_000 and answer(CODE, 90_000).startswith(text)
        record = record_of(page)
        schema._check(record, FIELDS, "record", "")
        assert record["text"] == text and record["timings"] is None and not record["complete"]
        expect(page.locator("#rate-note")).to_contain_text("until it ended early")
        expect(page.locator("#announcement")).to_contain_text("Stopped after")


def test_keys_focus_and_announcements(server, open_page):
    page = open_page(server)
    page.fill("[name=max_tokens]", "50")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#state")).to_have_text("complete")
    expect(page.locator("#announcement")).to_contain_text(
        re.compile(r"^Finished: 50 tokens at [\d,]+ tokens per second\.$")
    )
    for pane in ("#answer", "#replay"):
        expect(page.locator(pane)).to_have_attribute("aria-live", "off")
    page.keyboard.press("Meta+Enter")
    expect(page.locator("#state")).to_have_text("complete")
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""() => {
            const e = document.activeElement;
            return [e.id || e.name || e.textContent, getComputedStyle(e.name === 'mode' ? e.nextElementSibling : e).outlineStyle];
        }""")
        if page.evaluate("document.activeElement !== document.body"):
            assert outline == "solid", f"{name}: nothing shows that it has the focus"
            reached.append(name)
    for name in (
        "LRU cache",
        "mode",
        "temperature",
        "seed",
        "run",
        "stop",
        "answer",
        "copy-text",
        "download",
        "play",
        "speed",
        "3,000",
    ):
        assert name in reached
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, pre')]
        .filter((e) => !(e.textContent || e.labels?.length || e.getAttribute('aria-labelledby'))).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_replay_has_the_text_and_the_speed(server, open_page):
    page = open_page(server)
    complete(page, CODE, 301)
    expect(page.locator("#replay-title")).to_contain_text("of the same text, not another model")
    for rate, name in ((300, "300"), (1000, "1,000")):
        page.click(f"#presets >> text='{name}'")
        expect(page.locator("#speed-value")).to_have_text(f"{name} tok/s")
        began = time.monotonic()
        page.click("#play")
        expect(page.locator("#replay-state")).to_contain_text("took")
        elapsed = time.monotonic() - began
        found = re.fullmatch(rf"{name} tok/s took ([\d.]+) s", page.locator("#replay-state").text_content())
        assert 300 / rate - 0.01 <= float(found[1]) < 300 / rate + 0.25 and float(found[1]) <= elapsed + 0.01
        expect(page.locator("#announcement")).to_have_text("Replay finished.")
        assert shown(page) == shown(page, "replay") == answer(CODE, 301)
    page.click("#presets >> text='30'")
    page.click("#play")
    expect(page.locator("#replay-state")).to_contain_text("of 10.00 s")
    expect(page.locator("#replay .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#replay-state")).to_have_text("stopped")
    assert answer(CODE, 301).startswith(shown(page, "replay")) and len(shown(page, "replay")) < 200
    page.click("#play")
    expect(page.locator("#replay .text")).not_to_be_empty()
    complete(page, "another ", 20)
    page.wait_for_timeout(100)  # frames in which the replay that was given up could still write
    assert shown(page) == answer("another ", 20) and page.locator("#replay").text_content() == ""
    slider = page.locator("#speed")
    for key, value in (("Home", "30 tok/s"), ("End", "3,000 tok/s")):
        slider.press(key)
        expect(slider).to_have_attribute("aria-valuetext", value)


@pytest.mark.slow
def test_html_of_the_model_is_text(server, open_page):
    page = open_page(server)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    complete(page, EVIL, 60)
    page.click("#presets >> text='3,000'")
    page.click("#play")
    expect(page.locator("#announcement")).to_have_text("Replay finished.")
    assert shown(page) == shown(page, "replay") == answer(EVIL, 60) and "<script>" in shown(page)
    assert page.locator("pre :not(span)").count() == 0 and dialogs == []


def test_colours_do_not_change_the_text(server, open_page):
    page = open_page(server)
    long = CODE * 60  # several blocks
    complete(page, long, 1500)
    assert shown(page) == answer(long, 1500)
    assert set(page.locator("#answer .keyword").all_text_contents()) == {"def", "return"}
    assert set(page.locator("#answer .name").all_text_contents()) == {"add"}
    assert '"""Sum of é and 😀."""' in page.locator("#answer .string").all_text_contents()
    page.check("[name=mode][value=chat]", force=True)
    prose = "for if not ```python\nreturn 1\n``` or "
    complete(page, prose, 24)
    assert page.locator("#answer .keyword").all_text_contents() == ["return"] and shown(page) == answer(prose, 24)


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_windows_have_no_overflow(server, open_page, width):
    page = open_page(server, viewport={"width": width, "height": 700})
    widths = """[document.documentElement.scrollWidth,
                 ...[...document.querySelectorAll('body *')].map((e) => e.getBoundingClientRect().right)]"""
    assert max(page.evaluate(widths)) <= width + 0.5
    complete(page, "x" * 500, 300)
    page.click("#play")
    assert max(page.evaluate(widths)) <= width + 0.5


def test_themes_follow_system_and_button(server, open_page):
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light, dark = (open_page(server, color_scheme=scheme) for scheme in ("light", "dark"))
    colours = light.evaluate(ground), dark.evaluate(ground)
    assert colours == ("rgb(246, 247, 246)", "rgb(15, 18, 19)")
    for theme, colour in (("light", colours[0]), ("dark", colours[1]), ("auto", colours[1]), ("light", colours[0])):
        dark.click("#theme")
        expect(dark.locator("#theme")).to_have_text(f"Theme: {theme}")
        assert dark.evaluate(ground) == colour


@pytest.mark.slow
def test_reduced_motion_writes_rarely(server, open_page):
    writes = {}
    for motion in ("reduce", "no-preference"):
        page = open_page(server, reduced_motion=motion)
        page.evaluate("""() => {
            window.writes = 0;
            new MutationObserver(() => window.writes++).observe(document.getElementById('answer'), { childList: true, subtree: true });
        }""")
        complete(page, CODE, 1500)
        writes[motion] = page.evaluate("window.writes")
        assert shown(page) == answer(CODE, 1500)
    assert 1 <= writes["reduce"] <= 5 and writes["no-preference"] >= 10


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
    assert (
        shown(page) == record["text"] == answer("Hello you. ", 40)
        and page.locator("#answer .prompt").text_content() == ""
    )


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


def test_key_is_kept_in_memory(strict, open_page):
    page = open_page(strict, ready=False, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#key")).to_be_focused()
    for key, words in (("wrong", "did not take the key"), (KEY, None)):
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
    expect(page.locator("#state")).to_contain_text("not the whole answer")
    assert answer(CODE, 90_000).startswith(shown(page))
    ask(page, "crash", 5)
    expect(problem).to_contain_text("The engine process ended unexpectedly (exit code 3). Press Run to try again")
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
        expect(page.locator("#state")).to_have_text("one request is before this one")
        page.keyboard.press("Escape")
        expect(page.locator("#state")).to_have_text("stopped after 0 tokens")
        server.wait_for_metric("num_requests_waiting", 0)
        with server.stream(prompt="a", max_tokens=5) as two:
            assert next(two) == ": queued 1"
            ask(page, CODE, 5)
            expect(problem).to_contain_text(
                "The queue is full. The queue is full with 1 waiting requests: try again later."
            )
            expect(problem).to_contain_text("run again in 1 s or more")
    server.wait_for_metric("num_requests_running", 0)
    ask(page, "a" * 100_000, 5)
    expect(problem).to_contain_text(
        "The prompt does not fit. The prompt has 100000 tokens and the context 100000: shorten the prompt"
    )
    ask(page, CODE, 5, temperature=1e-7)
    assert page.evaluate("document.activeElement.name") == "temperature", "the browser refuses the form"
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
    complete(page, CODE, 40)
    assert shown(page) == answer(CODE, 40) and all("/models/lane/" in url for url in asked if url.startswith("http"))
    page.context.close()
