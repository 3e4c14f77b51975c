"""The playground's conversation in a real browser: turns, edits, other answers, and the state after a stop, an error
and a reload.
"""

import json
import re

import numpy as np
import pytest

from tests.support.serving.browser import browser, chromium, expect, open_page, server  # noqa: F401
from tests.support.serving.playground import CODE, answers, ask, complete, facts, press, record_of
from tests.support.serving.playground_engine import answer


@pytest.fixture
def chat(server, open_page):
    """A page with an empty conversation, and a list that records the messages of its requests."""
    page, sent = open_page(server, mode="chat"), []

    def note(request):
        if request.url.endswith("v1/chat/completions"):
            sent.append([(each["role"], each["content"]) for each in request.post_data_json["messages"]])

    page.on("request", note)
    return page, sent


def say(page, message, tokens=30):
    """Sends a message and waits for its answer."""
    complete(page, message, tokens)
    expect(page.locator("#prompt")).to_have_value("")


def turns(*messages, tokens=30):
    """The messages of a request after earlier turns."""
    *before, last = messages
    return [each for said in before for each in (("user", said), ("assistant", answer(said, tokens)))] + [
        ("user", last)
    ]


def test_turns_send_the_conversation(chat):
    page, sent = chat
    assert page.locator(".turn").count() == 0
    for message in ("One two. ", "Three four. ", "again five. "):
        say(page, message)
    assert sent == [
        turns("One two. "),
        turns("One two. ", "Three four. "),
        turns("One two. ", "Three four. ", "again five. "),
    ]
    assert answers(page) == [answer(message, 30) for message in ("One two. ", "Three four. ", "again five. ")]
    assert page.locator(".message").all_text_contents() == ["One two. ", "Three four. ", "again five. "]
    assert facts(page, 2)["prompt"] == "12 tokens, 0 cached" and facts(page, 3)["prompt"] == "12 tokens, 7 cached"
    for turn in (1, 2, 3):
        assert re.fullmatch(r"[\d.,]+ m?s", facts(page, turn)["first token"])
        assert facts(page, turn)["answer"].startswith("30 tokens, ")
    record = record_of(page)
    assert record["text"] == answer("again five. ", 30) and len(record["request"]["body"]["messages"]) == 5
    press(page, "Show the figures of answer", 1)
    assert record_of(page)["text"] == answer("One two. ", 30)
    expect(page.get_by_role("button", name="Show the figures of answer 1")).to_have_attribute("aria-pressed", "true")


@pytest.mark.slow
def test_edit_continues_from_there_and_keeps_the_earlier_turns(chat):
    page, sent = chat
    for message in ("One. ", "Two. ", "Three. "):
        say(page, message)
    press(page, "Edit message", 2)
    editor = page.get_by_role("textbox", name="Edit message 2")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("Two. ")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit message 2")).to_be_focused()
    assert len(answers(page)) == 3, "a cancelled edit must change nothing"
    press(page, "Edit message", 2)
    editor.fill("Other. ")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#state")).to_have_text("complete")
    assert answers(page) == [answer("One. ", 30), answer("Other. ", 30)] and sent[-1] == turns("One. ", "Other. ")
    say(page, "Then. ")
    assert sent[-1] == turns("One. ", "Other. ", "Then. ")
    expect(page.locator(".turn").nth(1).locator(".versions")).to_contain_text("2 of 2")
    press(page, "Earlier version of turn", 2)
    assert answers(page) == [answer(each, 30) for each in ("One. ", "Two. ", "Three. ")]
    expect(page.get_by_role("button", name="Earlier version of turn 2")).to_be_focused()
    press(page, "Later version of turn", 2)
    assert answers(page) == [answer(each, 30) for each in ("One. ", "Other. ", "Then. ")]


@pytest.mark.slow
def test_retry_gives_another_version_of_an_answer(chat):
    page, sent = chat
    say(page, "One. ")
    say(page, "Two. ")
    seed = record_of(page)["seed"]
    page.fill("[name=max_tokens]", "9")
    press(page, "Retry answer", 2)
    expect(page.locator(".turn").nth(1).locator(".versions")).to_contain_text("2 of 2")
    expect(page.locator("#state")).to_have_text("complete")
    assert answers(page) == [answer("One. ", 30), answer("Two. ", 9)] and sent[-1] == sent[-2] == turns(
        "One. ", "Two. "
    )
    assert record_of(page)["seed"] != seed
    press(page, "Earlier version of turn", 2)
    assert answers(page)[1] == answer("Two. ", 30)
    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    say(page, "New. ")
    assert sent[-1] == turns("New. ")


@pytest.mark.slow
def test_stop_keeps_the_received_text(server, chat):
    page, sent = chat
    ask(page, CODE, 90_000)
    expect(page.locator("#state")).to_have_text("running")
    page.wait_for_function("document.querySelector('#log .text')?.textContent")
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_contain_text("stopped after")
    server.wait_for_metric("num_requests_running", 0)
    [text] = answers(page)
    assert text and answer(CODE, 90_000).startswith(text)
    expect(page.locator(".turn .note")).to_have_text("Stopped before its end.")
    say(page, "Go on. ")
    assert sent[-1] == [("user", CODE), ("assistant", text), ("user", "Go on. ")]
    ask(page, "silent. ", 5)
    expect(page.locator(".turn")).to_have_count(3)
    page.fill("#prompt", "Typed meanwhile.")
    page.click("#stop")
    expect(page.locator("#prompt")).to_have_value("silent. \n\nTyped meanwhile.")
    expect(page.locator(".turn")).to_have_count(2)


@pytest.mark.slow
def test_errors_lose_no_message(chat):
    page, sent = chat
    problem = page.locator("#problem")
    say(page, "One. ")
    failed = {"status": 500, "json": {"error": {"message": "it failed"}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**failed))
    ask(page, "Two. ", 30)
    expect(problem).to_contain_text("The engine failed. It failed.")
    expect(page.locator("#prompt")).to_have_value("Two. ")
    assert answers(page) == [answer("One. ", 30)]
    page.unroute("**/v1/chat/completions")
    press(page, "Edit message", 1)
    page.get_by_role("textbox", name="Edit message 1").fill("a" * 100_000)
    page.keyboard.press("Control+Enter")
    expect(problem).to_contain_text("The prompt does not fit.")
    expect(page.get_by_role("textbox", name="Edit message 1")).to_have_value("a" * 100_000)
    assert answers(page) == [answer("One. ", 30)], "the earlier version must be shown again"
    page.keyboard.press("Escape")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    press(page, "Retry answer", 1)
    expect(problem).to_contain_text("The server cannot be reached.")
    assert answers(page) == [answer("One. ", 30)]
    page.unroute("**/v1/chat/completions")
    say(page, "Two. ")
    expect(problem).to_be_hidden()
    assert sent[-1] == turns("One. ", "Two. ")


@pytest.mark.slow
def test_reload_keeps_the_conversation_and_other_tabs_do_not_have_it(server, open_page, chat):
    page, sent = chat
    say(page, "again one. ", 200)
    say(page, "Two. ", 200)
    press(page, "Retry answer", 2)
    expect(page.locator("#state")).to_have_text("complete")
    press(page, "Show the figures of answer", 1)
    before, figures, tinted = (
        record_of(page),
        [facts(page, 1), facts(page, 2)],
        page.locator(".draft").all_text_contents(),
    )
    page.fill("#prompt", "half a message")
    page.fill("[name=seed]", "17")
    page.reload()
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    assert answers(page) == [answer("again one. ", 200), answer("Two. ", 200)]
    assert [facts(page, 1), facts(page, 2)] == figures and page.locator(".draft").all_text_contents() == tinted
    assert page.input_value("#prompt") == "half a message" and page.input_value("[name=seed]") == "17"
    expect(page.locator(".turn").nth(1).locator(".versions")).to_contain_text("2 of 2")
    press(page, "Show the figures of answer", 1)
    after = record_of(page)
    for record in (before, after):  # times are kept in microseconds
        tokens, client = record["tokens"], record["client"]
        for values in (tokens, client):
            values.update(
                {name: [round(v, 2) for v in each] for name, each in values.items() if isinstance(each, list)}
            )
        client["tokens_per_second"] = record["between_arrivals_ms"] = None
    assert after == before
    page.fill("[name=seed]", "")
    page.fill("#prompt", "")
    say(page, "Three. ")
    assert sent[-1] == turns("again one. ", "Two. ", "Three. ", tokens=200)
    other = page.context.new_page()  # a tab with the same cookies and local storage
    other.goto(page.url)
    expect(other.locator("#conditions")).to_contain_text("batch 1")
    assert other.locator(".turn").count() == 0
    other.close()


@pytest.mark.slow
def test_reload_during_an_answer_keeps_the_received_text(server, chat):
    page, _ = chat
    ask(page, CODE, 90_000)
    expect(page.locator("#count")).not_to_have_text("–")
    expect(page.locator("#log .text")).not_to_be_empty()
    page.reload()
    server.wait_for_metric("num_requests_running", 0)
    [text] = answers(page)
    assert text and answer(CODE, 90_000).startswith(text)
    expect(page.locator(".turn .note")).to_have_text("Incomplete.")
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    ask(page, "silent", 5)
    expect(page.locator(".turn")).to_have_count(2)
    page.reload()
    expect(page.locator("#prompt")).to_have_value("silent")
    expect(page.locator(".turn")).to_have_count(1)


@pytest.mark.slow
def test_reload_keeps_unsent_edits(chat):
    page, sent = chat
    for message in ("One. ", "Two. "):
        say(page, message)
    press(page, "Edit message", 2)
    page.get_by_role("textbox", name="Edit message 2").fill("Second, half\nwritten. ")
    press(page, "Retry answer", 2)  # another version of the turn, which is not being edited
    expect(page.locator("#state")).to_have_text("complete")
    press(page, "Edit message", 1)
    page.get_by_role("textbox", name="Edit message 1").fill("dropped")
    page.keyboard.press("Escape")
    press(page, "Edit message", 1)
    page.get_by_role("textbox", name="Edit message 1").fill("First. ")
    page.reload()
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    assert page.locator(".editor textarea").evaluate_all("all => all.map((area) => area.value)") == ["First. "]
    press(page, "Earlier version of turn", 2)
    expect(page.get_by_role("textbox", name="Edit message 2")).to_have_value("Second, half\nwritten. ")
    page.get_by_role("textbox", name="Edit message 1").press("Escape")
    expect(page.locator(".message").nth(0)).to_be_visible()
    page.get_by_role("textbox", name="Edit message 2").press("Control+Enter")
    expect(page.locator("#state")).to_have_text("complete")
    assert sent[-1] == turns("One. ", "Second, half\nwritten. ")
    page.reload()
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    assert page.locator(".editor").count() == 0, "a cancelled or sent edit must not reappear"


@pytest.mark.slow
def test_accepted_drafts_are_tinted(chat):
    page, _ = chat
    say(page, "again é and 😀 ```python\nreturn 1\n``` ", 211)
    record = record_of(page)
    ends, drafted = record["tokens"]["end"], record["tokens"]["drafted"]
    assert drafted == [int(n % 20 >= 10) for n in range(211)]
    units = record["text"].encode("utf-16-le")
    runs = [
        units[2 * ends[start - 1] : 2 * ends[min(start + 9, 210)]].decode("utf-16-le") for start in range(10, 211, 20)
    ]
    assert page.locator("#log .draft").all_text_contents() == runs
    assert answers(page) == [record["text"]] and "return" in page.locator("#log .keyword").all_text_contents()
    colour = "element => getComputedStyle(element).backgroundColor"
    first = page.locator("#log .draft").first
    tinted = first.evaluate(colour)
    page.uncheck("#tint")
    assert first.evaluate(colour) == "rgba(0, 0, 0, 0)" != tinted
    assert facts(page, 1)["drafted"] == "48 %" and page.locator("#drafted").text_content() == "48 %"
    press(page, "Replay answer", 1)
    expect(page.locator("#announcement")).to_have_text("Replay finished.")
    assert page.locator("#replay .draft").all_text_contents() == runs == page.locator("#log .draft").all_text_contents()


STRETCHES = """async (cases) => {
    const { Recording } = await import("./playground/recording.js");
    return cases.map(({ pieces, drafted, parts, from, to }) => {
        const made = new Recording({}, { body: {} });
        pieces.forEach((piece, i) => {
            const delta = parts[i] ? { reasoning_content: piece } : { content: piece };
            made.add([{ choices: [{ delta, timeline: [[piece, i, drafted[i], 0]] }] }], i);
        });
        made.add([{ choices: [{ delta: { content: "tail" } }] }], pieces.length);
        const again = Recording.restored(JSON.parse(JSON.stringify({ ...made.saved(false), model: {}, request: { body: {} } })));
        const found = (one) => [one.text, one.content, one.reasoning, [...one.stretches(from, Math.min(to, one.text.length))]];
        return [found(made), found(again)];
    });
}"""


@pytest.mark.slow
def test_stretches_have_the_names_of_each_character(server, open_page):
    """Compares the stretches to a list with a name for each character."""
    random, cases, expected = np.random.default_rng(1), [], []
    for _ in range(300):
        n = int(random.integers(0, 12))
        pieces = ["".join(random.choice(list("ab \n"), random.integers(0, 4))) for _ in range(n)]
        drafted, parts = random.integers(0, 2, n).tolist(), sorted(random.integers(0, 2, n).tolist(), reverse=True)
        if random.random() < 0.5:
            parts = random.permutation(parts).tolist()
        text = "".join(pieces) + "tail"
        start, end = sorted(random.integers(0, len(text) + 1, 2).tolist())
        names = [
            " ".join(["draft"] * d + ["thought"] * p) for s, d, p in zip(pieces, drafted, parts, strict=True) for _ in s
        ]
        names += [""] * len("tail")
        content = "".join(s for s, p in zip(pieces, parts, strict=True) if not p) + "tail"
        reasoning = "".join(s for s, p in zip(pieces, parts, strict=True) if p)
        cases.append({"pieces": pieces, "drafted": drafted, "parts": parts, "from": start, "to": end})
        expected.append((text, content, reasoning, names[start:end], start, end))
    page = open_page(server)
    for results, (*texts, names, start, end) in zip(page.evaluate(STRETCHES, cases), expected, strict=True):
        for *found, stretches in results:
            assert found == texts
            assert [name for a, b, name in stretches for _ in range(a, b)] == names
            bounds = [bound for a, b, _ in stretches for bound in (a, b)]
            assert bounds == sorted(bounds) and (not stretches or (bounds[0], bounds[-1]) == (start, end))


@pytest.mark.slow
def test_reasoning_is_dimmed_and_sent_back(chat):
    page, _ = chat
    sent = []

    def reply(route):
        sent.append(route.request.post_data_json["messages"])
        deltas = [({"reasoning_content": "I think. "}, 2), ({"content": "It is 5."}, 3)]
        events = [
            {"choices": [{"delta": delta, "timeline": [[text, at, 0, 0] for text in delta.values()]}]}
            for delta, at in deltas
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", reply)
    say(page, "How much?")
    say(page, "Sure?")
    assert answers(page) == ["I think. It is 5."] * 2
    assert page.locator("#log .thought").all_text_contents() == ["I think. "] * 2
    given = {"role": "assistant", "content": "It is 5.", "reasoning_content": "I think. "}
    assert sent[1] == [{"role": "user", "content": "How much?"}, given, {"role": "user", "content": "Sure?"}]


@pytest.mark.slow
def test_full_storage_keeps_the_texts(chat):
    page, _ = chat
    page.evaluate("""() => {
        let room = 1 << 23; // characters
        for (let junk = ""; room >= 1024; room /= 2)
            try { sessionStorage.setItem("junk", junk + "x".repeat(room)); junk += "x".repeat(room); } catch {}
        sessionStorage.setItem("junk", sessionStorage.getItem("junk").slice(30_000));
    }""")
    say(page, "One two. ", 4000)  # 10 KB of text, and 40 KB of numbers
    expect(page.locator("#problem")).to_be_hidden()
    page.reload()
    expect(page.locator("#conditions")).to_contain_text("batch 1")
    assert answers(page) == [answer("One two. ", 4000)]
    expect(page.get_by_role("button", name="Replay answer 1")).to_have_attribute("aria-disabled", "true")
    page.evaluate("sessionStorage.setItem('junk', sessionStorage.getItem('junk') + 'x'.repeat(20_000))")
    page.evaluate(
        "for (const name of Object.keys(sessionStorage)) if (name !== 'junk') sessionStorage.removeItem(name)"
    )
    say(page, "Three. ", 9000)
    expect(page.locator("#problem")).to_contain_text("A reload would lose this conversation.")


@pytest.mark.slow
def test_other_requests_and_their_cost_are_shown(chat):
    page, _ = chat
    say(page, "alone ", 300)
    assert page.locator("#others").text_content() == "none" and "other requests" not in facts(page, 1)
    say(page, "again ", 300)
    expect(page.locator("#others")).to_have_text("for 33 % of tokens")
    found = re.fullmatch(r"alone ([\d,.]+) tok/s, with 1 ([\d,.]+) tok/s", facts(page, 2)["other requests"])
    tokens = record_of(page)["tokens"]
    times, others = tokens["time_ms"], tokens["others"]
    for count, rate in enumerate(found.groups()):
        gaps = [times[n] - times[n - 1] for n in range(1, 300) if others[n] == count]
        assert float(rate.replace(",", "")) == pytest.approx(1000 * len(gaps) / sum(gaps), rel=0.006)


@pytest.mark.slow
def test_keys_send_and_break_lines(chat):
    page, sent = chat
    page.fill("[name=max_tokens]", "5")
    page.focus("#prompt")
    page.fill("#prompt", "")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("complete")
    assert sent == [[("user", "One\ntwo")]]
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Enter")  # there is nothing to send
    assert len(sent) == 1 and page.locator(".turn").count() == 1
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""() => {
            const e = document.activeElement;
            return [e.ariaLabel || e.id || e.name, getComputedStyle(e.name === 'mode' ? e.nextElementSibling : e).outlineStyle];
        }""")
        if page.evaluate("document.activeElement !== document.body"):
            assert outline == "solid", f"{name}: its focus is not visible"
            reached.add(name)
    assert {
        "Edit message 1",
        "Retry answer 1",
        "Replay answer 1",
        "prompt",
        "run",
        "stop",
        "new",
        "tint",
        "log",
    } <= reached
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, pre, article')].filter((e) => e.checkVisibility())
        .filter((e) => !(e.textContent || e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby'))).map((e) => e.outerHTML)"""
    )
    assert unnamed == []
