"""The playground in a real browser with the engine of backend cpu: it shows prefixes, drafts and shared passes as the
kernel reports them.
"""

import re
from itertools import pairwise

import pytest

from tests.support.checkpoints import CHATML, CONTEXT, follow, save_checkpoint
from tests.support.paths import ROOT
from tests.support.serve_cases import BACKEND, Server
from tests.support.serving.browser import browser, chromium, expect, open_page  # noqa: F401
from tests.support.serving.playground import answers, ask, complete, facts, record_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BACKEND != "cpu", reason="backend xla keeps no prefixes and makes no drafts"),
]
TEXT = "abcdefghijklmnopqrstuvwxyz\n"  # the answer repeats it endlessly, so drafts can copy it


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    """A server whose model repeats TEXT from its first letter on."""
    size = {"hidden_size": 256, "intermediate_size": 256, "layers": 4, "lanes": 1}
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "repeating", *CHATML, **size)
    spelled = dict(zip(TEXT, tokens_of(folder), strict=True))
    follow(folder, {spelled[a]: spelled[b] for a, b in [*pairwise(TEXT), (TEXT[-1], TEXT[0])]})
    program = (str(ROOT / "tests/support/serving/drafting_server.py"),)
    server = Server(folder, "--backend", "cpu", "--parallel", 2, "--most-slowdown", 100, program=program)
    yield server.wait_until(200)
    server.kill()


def tokens_of(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids


def text(tokens):
    return (TEXT * (tokens // len(TEXT) + 1))[:tokens]


def test_prefixes_and_drafts_match_the_kernel(repeating, open_page):
    page = open_page(repeating, mode="chat")
    page.fill("[name=temperature]", "0")
    complete(page, "Say it.", 200)
    assert answers(page) == [text(200)] and facts(page, 1)["prompt"].endswith(", 0 cached")
    first = record_of(page)
    drafted = first["tokens"]["drafted"]
    assert sum(drafted) == first["timings"]["draft_n_accepted"] > 100 and not any(drafted[: len(TEXT)])
    assert len("".join(page.locator("#log .draft").all_text_contents())) == sum(drafted)
    assert len(page.locator(".turn .draft").all_text_contents()) > 3, "runs, with the last token of each pass between"
    complete(page, "And again.", 100)
    second = record_of(page)
    assert answers(page) == [text(200), text(100)]
    before = first["timings"]["prompt_n"] + 200
    cached = second["timings"]["cache_n"]
    assert before - 2 <= cached <= before, "the first prompt and answer, except the last token"
    assert facts(page, 2)["prompt"] == f"{cached + second['timings']['prompt_n']} tokens, {cached} cached"
    assert second["tokens"]["drafted"][0] == 0 and sum(second["tokens"]["drafted"]) > 60


def test_two_tabs_share_passes_and_show_it(repeating, open_page):
    one, two = (open_page(repeating, mode="chat") for _ in range(2))
    for page in (one, two):
        page.fill("[name=temperature]", "0")
    ask(one, "First.", CONTEXT - 100)
    expect(one.locator("#others")).to_have_text("none")
    ask(two, "Second.", CONTEXT - 100)
    for page in (one, two):
        expect(page.locator("#others")).to_have_text("1")
    two.keyboard.press("Escape")
    expect(two.locator("#state")).to_contain_text("stopped after")
    expect(one.locator("#others")).to_have_text("none")
    one.keyboard.press("Escape")
    expect(one.locator("#state")).to_contain_text("stopped after")
    assert re.fullmatch("alone .* tok/s, with 1 .* tok/s", facts(one, 1)["other requests"])
    for page in (one, two):
        [shown] = answers(page)
        assert shown == text(len(shown))
    assert set(record_of(one)["tokens"]["others"]) == {0, 1}
    keys = [record_of(page)["request"]["body"]["prompt_cache_key"] for page in (one, two)]
    assert keys[0] != keys[1]
    repeating.wait_for_metric("num_requests_running", 0)
