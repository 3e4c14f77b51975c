"""What a user does on the playground's page and reads there, and the fields of its records."""

import json
import re

from infer.bench import schema
from tests.support.serving.browser import expect

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
    """Fills the form and runs it."""
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": tokens, **fields}.items():
        page.fill(f"[name={name}]", str(value))
    page.click("#run")


def complete(page, prompt, tokens, **fields):
    ask(page, prompt, tokens, **fields)
    expect(page.locator("#state")).to_have_text("complete")


def answers(page):
    """The texts of a conversation's answers."""
    return page.locator("#log .text").all_text_contents()


def press(page, name, number):
    """Presses the button of a turn that has this name, such as "Retry answer"."""
    page.get_by_role("button", name=f"{name} {number}", exact=True).click()


def facts(page, turn):
    """The figures of a turn, from 1 on."""
    summary = page.locator(".turn").nth(turn - 1).locator(".summary div")
    return dict(summary.evaluate_all("all => all.map((pair) => [...pair.children].map((each) => each.textContent))"))


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
