"""Prompts of an agent's turns: the earlier turns that `--history` selects, and the limit of the context."""

import types

import pytest

from laneformer.infer.agent.client import Reply
from laneformer.infer.agent.conversation import Conversation
from laneformer.infer.agent.task import load_task
from laneformer.infer.agent.turns import Turn, Workspace
from laneformer.infer.sandbox.sandbox import Outcome
from tests.support.paths import ROOT

TASK = load_task(ROOT / "docs/examples/agent/intervals")


def conversation(tmp_path, history, mode="chat", context=None, conditions=None, room=100):
    model = types.SimpleNamespace(mode=mode, context=context, conditions=conditions)
    return Conversation(Workspace(TASK, tmp_path / "files"), model, history, room)


def turn(number, text="answer", cached=0, prompt_tokens=1000, tokens=50):
    reply = Reply(f"{text} {number}", "stop", prompt_tokens, cached, tokens, 0.1, 0.1, 0.0, None)
    return Turn(number, reply, (), (), Outcome("failed", "", None), f"output {number}", 0.1, 0.2)


def answers(prompt):
    return [message["content"] for message in prompt if message["role"] == "assistant"]


@pytest.mark.parametrize(("history", "cached", "conditions", "whole"), [
    ("whole", None, None, True),
    ("last", 500, None, False),
    ("auto", 0, None, True),
    ("auto", None, None, False),
    ("auto", 0, {"prefix_cache": 1}, True),
    ("auto", 0, {"prefix_cache": 0}, False),  # our server reports cached tokens even without a prefix cache
])  # fmt: skip
def test_history_has_all_turns_or_the_last(tmp_path, history, cached, conditions, whole):
    asked = conversation(tmp_path, history, conditions=conditions)
    prompts = [asked.prompt]
    for number in (1, 2, 3):
        asked.add(turn(number, cached=cached))
        prompts.append(asked.prompt)
    assert (
        answers(prompts[1]) == ["answer 1"] and prompts[1][:1] == prompts[0] and "output 1" in prompts[1][2]["content"]
    )
    assert answers(prompts[3]) == (["answer 1", "answer 2", "answer 3"] if whole else ["answer 3"])
    assert (prompts[3][: len(prompts[2])] == prompts[2]) == whole
    assert [message["role"] for message in prompts[3][-3:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("context", "kept"), [(None, [1, 2, 3]), (4096, [1, 2, 3]), (1150, [3]), (1300, [1, 2, 3])])
def test_history_that_does_not_fit_starts_again_with_the_last_turn(tmp_path, context, kept):
    asked = conversation(tmp_path, "whole", context=context)
    for number in (1, 2, 3):
        asked.add(turn(number))
    assert answers(asked.prompt) == [f"answer {number}" for number in kept]
    asked.add(turn(4, prompt_tokens=100))
    assert answers(asked.prompt) == [f"answer {number}" for number in (*kept, 4)], "later turns are added to that"


def test_continued_text_begins_with_the_one_before(tmp_path):
    whole, last = (conversation(tmp_path / name, name, mode="completion") for name in ("whole", "last"))
    first = whole.prompt
    assert first == last.prompt and first.endswith("# intervals.py, complete:\n")
    for number in (1, 2):
        for asked in (whole, last):
            asked.add(turn(number, "def merge"))
    assert whole.prompt.startswith(
        f"{first}def merge 1\n\n# These tests fail:\n# output 1\n\n# intervals.py, corrected:\n"
    )
    assert whole.prompt.endswith(
        "corrected:\ndef merge 2\n\n# These tests fail:\n# output 2\n\n# intervals.py, corrected:\n"
    )
    assert "# intervals.py, which fails these tests:" in last.prompt and "output 1" not in last.prompt
