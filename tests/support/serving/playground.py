"""Actions of a user on the playground's page, values read from the page, and the fields of its records."""

import json
import re

from laneformer.infer.bench import schema
from tests.support.serving.browser import expect

CODE = 'def add(a, b):\n    """Sum of é and 😀."""\n    return a + b  # 12\n\n\n'
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script> &amp; "
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NUMBER = (int, float)
NULL = schema.Null
# Fields of a downloaded record, in the form of schema.FIELDS.
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
    "tokens": {"point": str, **dict.fromkeys(("time_ms", "end", "drafted", "others"), list)},
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


def ask(page, prompt, tokens, **fields):
    """Fills in the form and submits it."""
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": tokens, **fields}.items():
        page.fill(f"[name={name}]", str(value))
    page.click("#run")


def complete(page, prompt, tokens, **fields):
    """Fills in the form, submits it and waits for the complete answer."""
    ask(page, prompt, tokens, **fields)
    expect(page.locator("#state")).to_have_text("complete")


def answers(page):
    """Texts of a conversation's answers."""
    return page.locator("#log .text").all_text_contents()


def press(page, name, number):
    """Presses a button of the turn with this number. name: the button's name, such as "Retry answer"."""
    page.get_by_role("button", name=f"{name} {number}", exact=True).click()


def facts(page, turn):
    """Figures of a turn by name; turns count from 1."""
    summary = page.locator(".turn").nth(turn - 1).locator(".summary div")
    return dict(summary.evaluate_all("all => all.map((pair) => [...pair.children].map((each) => each.textContent))"))


def shown(page, pane="answer"):
    """Text of a pane, without the prompt."""
    return page.locator(f"#{pane} .text").text_content()


def record_of(page):
    """Downloads the record and returns its content."""
    with page.expect_download() as waiting:
        page.click("#download")
    assert re.fullmatch(r"laneformer-\d{4}-\d\d-\d\dT\d{6}\.json", waiting.value.suggested_filename)
    return json.loads(waiting.value.path().read_bytes())


def number(page, selector):
    return float(re.match(r"[\d,.]+", page.locator(selector).text_content())[0].replace(",", ""))


def seconds_busy(session):
    """CPU time of the page's main thread, which other processes do not change, and the current time, in seconds."""
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return metrics["ThreadTime"], metrics["Timestamp"]
