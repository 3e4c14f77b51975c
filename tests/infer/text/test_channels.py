"""Answers in harmony, token by token."""

import pytest

from laneformer.infer.text.channels import Channels, Harmony, Part
from tests.support.checkpoints import CHATML, HARMONY, byte_tokenizer

TOKENIZER = byte_tokenizer(*HARMONY)
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


def ids(text):
    return TOKENIZER.encode(text).ids


def parts(answer, prompt=PROMPT):
    """The text of the reasoning and of the content of an answer."""
    channels = Channels(Harmony.find(TOKENIZER), TOKENIZER, ids(prompt))
    found = {part: [] for part in Part}
    for token in ids(answer):
        found[channels.add(token)].append(token)
    return tuple(TOKENIZER.decode(found[part]) for part in (Part.REASONING, Part.CONTENT))


@pytest.mark.parametrize(("answer", "expected"), [
    ("<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>say", ("think", "say")),
    ("<|channel|>final<|message|>say", ("", "say")),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>say",
     ("", "I look.say")),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", ("{}", "")),
    ("<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}", ("{}", "")),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", ("ab", "")),
    ("<|channel|>analysis<|message|>", ("", "")),
    ("<|channel|>analysis", ("", "")),
    ("<|message|>say", ("", "say")),
    ("no marks at all", ("", "no marks at all")),
    ("", ("", "")),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b")),
    ("<|channel|>unknown<|message|>a<|end|>lost<|start|>assistant<|message|>b", ("a", "b")),
    ("<|channel|><|message|>a", ("a", "")),
])  # fmt: skip
def test_parts_of_an_answer_are_found(answer, expected):
    assert parts(answer) == expected


@pytest.mark.parametrize(("prompt", "expected"), [
    (PROMPT + "<|channel|>analysis<|message|>", ("ab", "")), (PROMPT + "<|channel|>final<|message|>", ("", "ab")),
    ("no marks", ("", "ab")), ("", ("", "ab")), (PROMPT, ("", "ab")),
])  # fmt: skip
def test_prompt_may_begin_the_answer(prompt, expected):
    assert parts("ab", prompt) == expected


def test_answer_may_continue_a_header_of_the_prompt():
    assert parts("sis<|message|>a", PROMPT + "<|channel|>analy") == ("a", "")


def test_marks_are_found_and_turn_ends_stop_answers():
    harmony = Harmony.find(TOKENIZER)
    assert [TOKENIZER.id_to_token(token) for token in harmony[:4]] == list(HARMONY[:4])
    returned, called = (TOKENIZER.token_to_id(name) for name in HARMONY[4:])
    assert harmony.turn_stops((5, harmony.end, returned)) == (5, returned, called)
    assert Harmony.find(byte_tokenizer(*HARMONY[:4])).turn_ends == ()
    assert Harmony.find(byte_tokenizer(*CHATML)) is None and Harmony.find(byte_tokenizer(*HARMONY[:3])) is None
