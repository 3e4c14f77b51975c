"""Reasoning between marks, token by token."""

import pytest

from laneformer.infer.text.channels import Part
from laneformer.infer.text.thinking import Thinking, ThinkMarks
from tests.support.checkpoints import byte_tokenizer

WORDS = ("<think>", "</think>", "\n\n")
TOKENIZER = byte_tokenizer("<|im_start|>", words=WORDS)
MARKS = ThinkMarks.find("{{ '</think>' }}", TOKENIZER)
PROMPT = "<|im_start|>user\n<think><|im_start|>assistant\n"


def ids(text):
    return TOKENIZER.encode(text).ids


def parts(answer, prompt=PROMPT):
    """The text of the reasoning and of the content of an answer."""
    place = Thinking(MARKS, TOKENIZER, ids(prompt))
    found = {part: [] for part in Part}
    for token in ids(answer):
        found[place.copy().add(token)].append(token)
        place.add(token)
    return tuple(TOKENIZER.decode(found[part]) for part in (Part.REASONING, Part.CONTENT))


@pytest.mark.parametrize(("answer", "expected"), [
    ("<think>\nhm\n</think>\n\n4", ("hm\n", "4")),
    ("<think>hm</think>4<think>5</think>", ("hm", "4<think>5</think>")),
    ("<think>a<think>b</think>c", ("a<think>b", "c")),
    ("<think>never ends", ("never ends", "")),
    ("4 </think>", ("", "4 </think>")),
    ("\n<think>", ("", "\n<think>")),
    ("<think></think>\n\n\n 4", ("", "4")),
    ("", ("", "")),
])  # fmt: skip
def test_parts_of_an_answer_are_found(answer, expected):
    assert parts(answer) == expected


@pytest.mark.parametrize(("prompt", "expected"), [
    (PROMPT + "<think>\n", ("a", "b")), (PROMPT + "<think>", ("a", "b")), ("", ("", "a</think>b")),
    (PROMPT + "<think>\n\n</think>\n\n", ("", "a</think>b")), ("<think> a message", ("", "a</think>b")),
])  # fmt: skip
def test_prompt_may_begin_the_answer(prompt, expected):
    assert parts("a</think>b", prompt) == expected


def test_openings_may_precede_the_content():
    def openings(text, prompt=PROMPT):
        place = Thinking(MARKS, TOKENIZER, ids(prompt))
        for token in ids(text):
            place.add(token)
        return [TOKENIZER.decode([token]) for token in place.openings], place.may_reason

    assert openings("") == (["<think>"], True) and openings("", PROMPT + "<think>")[1]
    assert openings("<think>a</think>") == (["\n\n", "\n"], False)
    assert openings("<think>a</think>\n\n\n") == ([], False), "only a few tokens of white space may follow"
    assert openings("a") == ([], False) and openings("", PROMPT + "<think></think>")[1] is False


def test_marks_must_be_tokens_in_the_template():
    assert (*map(TOKENIZER.token_to_id, WORDS[:2]), (TOKENIZER.token_to_id("\n\n"), ids("\n")[0])) == MARKS
    assert ThinkMarks.find("{{ messages }}", TOKENIZER) is None
    assert ThinkMarks.find("</think>", byte_tokenizer()) is None
    mistral = byte_tokenizer("[THINK]", "[/THINK]")
    assert ThinkMarks.find("[THINK]a[/THINK]", mistral)[:2] == tuple(map(mistral.token_to_id, ("[THINK]", "[/THINK]")))
