"""The look of the playground in a real browser: keys, colours, widths, motion, and text that must not become HTML."""

import re

import numpy as np
import pytest

from tests.support.serving.browser import browser, chromium, expect, open_page, server  # noqa: F401
from tests.support.serving.playground import CODE, EVIL, answers, complete, shown
from tests.support.serving.playground_engine import answer


def test_keys_move_the_focus_and_ends_are_announced(server, open_page):
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
            assert outline == "solid", f"{name}: its focus is not visible"
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
    assert page.locator("#log .keyword").all_text_contents() == ["return"] and answers(page) == [answer(prose, 24)]


@pytest.mark.parametrize(("width", "mode"), [(360, "completion"), (360, "chat"), (768, "chat")])
def test_narrow_windows_have_no_overflow(server, open_page, width, mode):
    page = open_page(server, mode=mode, viewport={"width": width, "height": 700})
    widths = """[document.documentElement.scrollWidth,
                 ...[...document.querySelectorAll('body *')].map((e) => e.getBoundingClientRect().right)]"""
    assert max(page.evaluate(widths)) <= width + 0.5
    complete(page, "x" * 500, 300)
    page.click("#play" if mode == "completion" else "text='Replay'")
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
    gaps = {}  # milliseconds between writes while the answer grows
    for motion in ("reduce", "no-preference"):
        page = open_page(server, reduced_motion=motion)
        page.evaluate("""() => {
            window.writes = [];
            new MutationObserver(() => window.writes.push(performance.now()))
                .observe(document.getElementById('answer'), { childList: true, subtree: true });
        }""")
        complete(page, CODE, 6000)
        gaps[motion] = np.diff(
            page.evaluate("window.writes.slice(0, -1)")
        )  # the last write is at the end of the answer
        assert shown(page) == answer(CODE, 6000)
    assert min(gaps["reduce"]) > 300 and min(gaps["no-preference"]) < 300, gaps
