"""Conversations from rows: the column schemas of published instruction sets, and rows without a conversation."""

import pytest

from laneformer.errors import InputError
from laneformer.train.tokenizing.conversations import Conversation, Shape

CALL = {"id": "1", "type": "function", "function": {"name": "vin", "arguments": '{"n": 1}'}}


def read(row, chosen=()):
    return Shape.find(list(row), chosen).read(row)


def talk(*contents, system=None):
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def test_messages_of_nemotron_post_training_are_read():
    """The row is of nvidia/Nemotron-Post-Training-Dataset-v1, where missing fields of structs are null or empty."""
    row = {
        "uuid": "1b07",
        "license": "CC BY 4.0",
        "generator": "Qwen3-235B-A22B",
        "version": "v1",
        "category": "chat",
        "reasoning": "off",
        "messages": [
            {"role": "user", "content": "", "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_calls": None},
            {"role": "assistant", "content": "Five.", "tool_calls": []},
        ],
        "metadata": '{"source": "lmsys"}',
    }
    assert read(row) == Conversation(
        [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "Five."},
        ]
    )


def test_input_and_output_of_llama_nemotron_are_read():
    """The row is of nvidia/Llama-Nemotron-Post-Training-Dataset. In its first version, the input is text."""
    row = {
        "input": talk("Why?"),
        "output": "<think>so</think>Because.",
        "reasoning": "on",
        "system_prompt": "detailed thinking on",
        "category": "math",
        "license": "x",
        "generator": "y",
        "used_in_training": ["Ultra"],
        "version": "v1",
    }
    expected = Conversation(talk("Why?", "<think>so</think>Because.", system="detailed thinking on"))
    assert read(row) == read({**row, "input": "Why?"}) == expected


def test_other_shapes_are_read():
    reported = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert read({"id": 1, "conversations": reported}) == Conversation(talk("a", "b", system="s"))
    assert read({"conversation": talk("a", "b"), "language": "en"}) == Conversation(talk("a", "b"))
    assert read({"conversations": reported[1:], "system": "top"}) == Conversation(talk("a", "b", system="top"))
    assert read({"conversations": reported, "system": "top"}) == Conversation(talk("a", "b", system="s"))
    assert read({"prompt": "a", "response": "b"}) == Conversation(talk("a", "b"))
    assert read({"prompt": "a", "messages": talk("a", "b", "c", "d"), "response": "x"}) == Conversation(
        talk("a", "b", "c", "d")
    )
    assert read({"instruction": "Add.", "input": "1 2", "output": "3"}) == Conversation(talk("Add.\n\n1 2", "3"))
    assert read({"instruction": "Sing.", "input": "", "output": "la"}) == Conversation(talk("Sing.", "la"))
    assert read({"question": "a", "answer": ""}) == Conversation(talk("a", "")), "an empty answer is an answer"
    assert read({"q": "a", "a": "b", "messages": []}, ["q", "a"]) == Conversation(talk("a", "b"))
    assert read({"chat": talk("a", "b")}, ["chat"]) == Conversation(talk("a", "b"))
    columns = {"role": ["user", "assistant"], "content": ["a", "b"]}  # a Sequence of structs in the library datasets
    assert read({"messages": columns}) == Conversation(talk("a", "b"))
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert read({"messages": parts}) == Conversation(talk("ab"))


def test_tools_are_read():
    tool = {"type": "function", "function": {"name": "vin", "parameters": {"n": {"default": None, "type": "int"}}}}
    pruned = [{"type": "function", "function": {"name": "vin", "parameters": {"n": {"type": "int"}}}}]
    assert read({"messages": talk("a", "b"), "tools": [tool]}).tools == pruned
    assert read({"messages": talk("a", "b"), "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]
    assert [read({"messages": talk("a", "b"), "tools": none}).tools for none in (None, [], "", "[]")] == [None] * 4


@pytest.mark.parametrize(
    "row",
    [
        {"messages": None},
        {"messages": []},
        {"prompt": None, "response": "b"},
        {"prompt": "a", "response": None},
        # the data set withholds the text
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "system", "content": None}]},
    ],
)
def test_rows_without_text_are_none(row):
    assert read(row) is None


def test_system_prompt_without_text_is_left_out():
    assert read({"messages": [{"role": "system", "content": None}, *talk("a", "b")]}) == Conversation(talk("a", "b"))
    assert read({"messages": talk("a", "b"), "system_prompt": None}) == Conversation(talk("a", "b"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "messages must be a list, not str"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object with a role and content, not str"),
        ({"messages": [{"text": "hello"}]}, r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content must be text, got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            r"messages\[0\].content has a part that is not text",
        ),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, r"messages\[0\] is from 'narrator'.*human, user"),
        ({"prompt": "a", "response": 7}, r"messages\[1\].content must be text, got 7"),
        ({"messages": talk("a", "b"), "tools": "{"}, "tools must be a list of tool definitions"),
        ({"text": "a", "id": 1}, "--column.*--prompt-column.*text, id"),
    ],
)
def test_bad_rows_raise(row, message):
    with pytest.raises(InputError, match=message):
        read(row)


def test_missing_columns_raise():
    with pytest.raises(InputError, match=r"no column 'q' and 'a'; .*messages"):
        read({"messages": []}, ["q", "a"])
