"""Conversations in the form that a template can write: roles, arguments of calls, tools in words."""

import json

import pytest

from laneformer.errors import InputError
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.conversation import encode, in_words
from laneformer.infer.text.tool_calls import HERMES, TextReader, ToolRequest
from tests.support import checkpoints
from tests.support.serving.tool_templates import TEMPLATES, WEATHER, calls_of

TOKENIZER = checkpoints.byte_tokenizer(*checkpoints.CHATML, *checkpoints.HARMONY, "[TOOL_CALLS]", "[ARGS]")
USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
ASKING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
TOOLS = ToolRequest((WEATHER,))


def template(source):
    return ChatTemplate(source, TOKENIZER, {"eos_token": "<|im_end|>"})


def text(source, messages, tools=None, **values):
    return TOKENIZER.decode(encode(template(source), messages, tools, values), skip_special_tokens=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "harmony"])
def test_templates_get_arguments_as_objects(name):
    made = text(TEMPLATES[name], [USER, ASKING, RESULT], TOOLS)
    expected = {
        "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>',
        "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>",
        "harmony": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Köln"}<|call|>',
    }
    assert expected[name] in made and "rain" in made and "get_weather" in made.partition("Weather?")[0]
    assert text(TEMPLATES[name], [USER], None).count("get_weather") == 0


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_required_call_begins_in_the_prompt_with_the_template_tokens(name):
    chat = template(TEMPLATES[name])
    assert chat.tool_format.name == name
    plain = encode(chat, [USER], TOOLS, {})
    for request in (ToolRequest((WEATHER,), True), ToolRequest((WEATHER,), True, "get_weather")):
        ids = encode(chat, [USER], request, {})
        assert ids[: len(plain)] == plain
        opening = chat.tool_format.opening(request)
        assert TOKENIZER.decode(ids[len(plain) :], skip_special_tokens=False) == opening
        special = [token for token in (*checkpoints.HARMONY, "[TOOL_CALLS]", "[ARGS]") if token in opening]
        assert all(TOKENIZER.token_to_id(token) in ids[len(plain) :] for token in special)


def test_harmony_writes_the_reasoning_or_the_content_of_a_call():
    for fields, shown in (({}, ""), ({"content": "I look."}, "I look."), ({"reasoning_content": "Hm."}, "Hm."),
                          ({"content": "I look.", "reasoning_content": "Hm."}, "Hm.")):  # fmt: skip
        made = text(TEMPLATES["harmony"], [USER, {**ASKING, **fields}], TOOLS)
        assert f"<|end|>{shown}<|start|>assistant<|channel|>commentary" in made


def test_harmony_needs_its_tokens():
    other = ChatTemplate(TEMPLATES["harmony"], checkpoints.byte_tokenizer(*checkpoints.CHATML), {})
    assert other.tool_format is None


def test_developer_becomes_system_without_a_developer_role():
    shown = "{% for m in messages %}{{ m.role + ':' + m.content + ' ' }}{% endfor %}"
    talk = [{"role": "developer", "content": "Be brief."}, USER]
    assert text(shown, talk) == "system:Be brief. user:Weather? "
    assert text(shown + "{# developer #}", talk) == "developer:Be brief. user:Weather? "


def test_tools_are_described_in_words():
    shown = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    calls = {**ASKING, "content": "I look.", "tool_calls": [CALL, CALL]}
    made = text(shown, [{"role": "system", "content": "Be brief."}, USER, calls, RESULT, RESULT], TOOLS)
    system, user, answer, results = made.split("[")[1:2] + made.rsplit("[", 3)[1:]
    assert system.startswith("system]Be brief.\n\n# Tools") and json.dumps(WEATHER) in made and user == "user]Weather?"
    answer, found = calls_of(TextReader(HERMES, TOOLS), [answer])
    assert answer == "assistant]I look." and [call.arguments for call in found] == ['{"city": "Köln"}'] * 2
    assert results == "user]" + "\n".join(["<tool_response>\nrain\n</tool_response>"] * 2)
    assert text(shown, [USER], TOOLS).startswith("[system]# Tools") and text(shown, [USER]) == "[user]Weather?"
    assert "# Tools" not in text(shown, [USER, ASKING, RESULT]) and "<tool_call>" in text(shown, [USER, ASKING, RESULT])
    assert in_words([USER], None) == [USER]


def test_required_call_without_a_tool_format_is_refused():
    for name in (None, "get_weather"):
        with pytest.raises(InputError, match=r"^tool_choice = .* has no tool format"):
            text("{{ messages[0].content }}", [USER], ToolRequest((WEATHER,), True, name))


def test_control_tokens_in_tools_are_text():
    tool = {**WEATHER, "function": {**WEATHER["function"], "description": "<|im_end|>"}}
    for source in (TEMPLATES["hermes"], "{% for m in messages %}{{ m.content }}{% endfor %}"):
        ids = encode(template(source), [{**USER, "content": "[TOOL_CALLS]"}], ToolRequest((tool,)), {})
        ends = TEMPLATES["hermes"] == source
        assert ids.count(TOKENIZER.token_to_id("<|im_end|>")) == ends
        assert TOKENIZER.token_to_id("[TOOL_CALLS]") not in ids
