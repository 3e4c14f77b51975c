"""Prompts of chats with tools on an engine that supports no grammars."""

import pytest

from laneformer.errors import ConfigError, InputError
from laneformer.infer.serve.prompts import prompt_of
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.conversation import encode
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.tool_calls import ToolRequest
from tests.support.checkpoints import byte_tokenizer
from tests.support.serving.tool_templates import TEMPLATES, WEATHER

USER = [{"role": "user", "content": "Weather?"}]
WHY = "answers that follow a grammar need the llguidance library: pip install 'laneformer[grammar]'"
TOKENIZER = byte_tokenizer("<|im_start|>", "<|im_end|>")
CHAT = ChatTemplate(TEMPLATES["hermes"], TOKENIZER, {})


class WithoutGrammars:
    """An engine without llguidance."""

    def why_no_constraint(self, name):
        return ConfigError(WHY)

    def check_constraint(self, constraint):
        raise ConfigError(WHY)


def prompt(tools, form=None, chat=CHAT):
    return prompt_of(WithoutGrammars(), chat, lambda tools: encode(chat, USER, tools, {}), tools, form)


def test_required_call_begins_in_the_prompt_without_grammars():
    for name, opening in ((None, '<tool_call>\n{"name":'), ("get_weather", '{"name": "get_weather", "arguments":')):
        made = prompt(ToolRequest((WEATHER,), True, name))
        assert TOKENIZER.decode(made.ids).endswith(opening) and made.grammar is None and made.notes == ()
    made = prompt(ToolRequest((WEATHER,)))
    assert TOKENIZER.decode(made.ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("required", [True, False])
def test_strict_functions_are_refused_in_one_line_without_grammars(required):
    with pytest.raises(ConfigError) as caught:
        prompt(ToolRequest((WEATHER,), required, strict=frozenset(["get_weather"])))
    assert str(caught.value) == f"tools[0].function.strict = true: {WHY}"
    with pytest.raises(ConfigError, match="llguidance"):
        prompt(ToolRequest((WEATHER,)), Grammar.json_object("response_format"))
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", TOKENIZER, {})
    with pytest.raises(InputError, match=r"^tool_choice = \"required\": the chat template has no tool format"):
        prompt(ToolRequest((WEATHER,), True), chat=plain)
