"""Chat templates: they give the text of Hugging Face, the assistant's words are found in it, and messages cannot become
control tokens.
"""

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from laneformer.errors import CheckpointError, InputError
from laneformer.infer.text.channels import Part
from laneformer.infer.text.chat_template import CHATML, ChatTemplate
from tests.support.checkpoints import HARMONY, HARMONY_TEMPLATE, byte_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# A typical template with a loop, and the same template with {% generation %} blocks around the assistant's words.
GENERATION = CHATML.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
    """
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' -%}
        {% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else -%}
        {{ message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}""",
)
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""


def byte_level():
    """A tokenizer of bytes, a few merges over line ends, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ĊĊ", "ĠĠ", "nĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("n", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def sentencepiece_like():
    """A tokenizer of characters that puts a space before a text and after every special token, as in Llama 2."""
    characters = [*map(chr, range(33, 127)), "▁", "\n", "é"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(characters)}, [], fuse_unk=False))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


BYTES = byte_level()


def template(source=CHATML, tokenizer=BYTES, **more):
    return ChatTemplate(source, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, **more)


def talk(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)]


def answers(rendered):
    return [rendered.text[start:stop] for start, stop in rendered.answers]


def test_default_template_is_chatml():
    messages = [{"role": "system", "content": "Be brief."}, *talk("Hi", "Hello <b>&amp;\n")]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template().render(messages[:2], add_generation_prompt=True) == text
    assert template().render(messages) == text + "Hello <b>&amp;\n<|im_end|>\n"


@pytest.mark.parametrize("source", [CHATML, GENERATION])
def test_answers_are_found(source):
    messages = [
        {"role": "system", "content": "x"},
        *talk("one", "two", "three", ""),
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "é\n"},
    ]
    made = template(source)
    assert made.says_answers == (source == GENERATION)
    rendered = made.render_with_answers(messages)
    assert rendered.text == template().render(messages)
    assert answers(rendered) == ["two<|im_end|>", "<|im_end|>", "é\n<|im_end|>"]
    [(ids, loss)] = made.encode_rendered([rendered])
    assert BYTES.decode(ids[loss].tolist(), skip_special_tokens=False) == "".join(answers(rendered))
    assert BYTES.decode(ids.tolist(), skip_special_tokens=False) == rendered.text
    assert made.encode(messages) == ids.tolist()
    assert not loss[-1] and loss[-2], "the line end after the last end of turn must belong to the template"


def test_end_token_ends_a_turn():
    rendered = template(MISTRAL).render_with_answers(talk("a", "b", "c", "d "))
    assert rendered.text == "<s>[INST] a [/INST] b</s>[INST] c [/INST] d </s>" and answers(rendered) == [
        " b</s>",
        " d </s>",
    ]
    ids = template(MISTRAL).encode(talk("a", "b"))
    assert [BYTES.id_to_token(i) for i in (ids[0], ids[-1])] == ["<s>", "</s>"] and ids.count(
        BYTES.token_to_id("<s>")
    ) == 1


@pytest.mark.parametrize("tokenizer", [BYTES, sentencepiece_like()])
@pytest.mark.parametrize(("source", "end"), [(CHATML, "<|im_end|>"), (GENERATION, "<|im_end|>"), (MISTRAL, "</s>")])
def test_end_of_turn_token_ends_an_answer(source, end, tokenizer):
    assert template(source, tokenizer).ends((7,)) == (7, tokenizer.token_to_id(end))


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "{{ raise_exception('no') }}"],
)
def test_templates_without_end_of_turn_have_no_ends(source):
    assert template(source).ends((7,)) == (7,)


def test_harmony_template_has_turn_ends_and_channels():
    """The end of a message does not end an answer. The template leaves out the analysis of earlier turns, but not that
    of the last turn.
    """
    tokenizer = byte_tokenizer(*HARMONY)
    made = template(HARMONY_TEMPLATE, tokenizer)
    returned, called = (tokenizer.token_to_id(name) for name in HARMONY[4:])
    assert made.ends((7,)) == (7, returned, called)
    assert template(HARMONY_TEMPLATE.replace("return", "end"), tokenizer).ends((7,)) == (7, returned, called)
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    talked = [{"role": "user", "content": "2 + 2?"}, answer]
    last = "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>"
    assert made.render(talked) == (
        last + "analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    )
    prompt = made.encode([*talked, {"role": "user", "content": "?"}], add_generation_prompt=True)
    text = last + "final<|message|>4<|end|><|start|>user<|message|>?<|end|><|start|>assistant"
    assert prompt == tokenizer.encode(text).ids
    channels = made.channels(prompt)
    assert [channels.add(token) for token in tokenizer.encode("<|channel|>final<|message|>4").ids][-1] is Part.CONTENT
    assert template().channels([1]) is None and template(HARMONY_TEMPLATE).channels([1]) is None


def test_answers_are_found_without_special_tokens():
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt"
        " %}assistant: {% endif %}"
    )
    assert answers(template(source).render_with_answers(talk("a", "b", "c", "d"))) == ["b\n", "d\n"]


def test_no_token_crosses_the_border_of_an_answer():
    """This matches inference, where the prompt is encoded before the answer exists."""
    made, messages = template(), talk("q", "\n\n  then")
    [(ids, loss)] = made.encode_rendered([made.render_with_answers(messages)])
    prompt = made.encode(messages[:1], add_generation_prompt=True)
    assert ids[: len(prompt)].tolist() == prompt and not loss[: len(prompt)].any() and loss[len(prompt)]
    answer = BYTES.encode("\n\n  then", add_special_tokens=False).ids
    assert ids[len(prompt) :].tolist() == [*answer, BYTES.token_to_id("<|im_end|>"), *BYTES.encode("\n").ids]


PARTS = [*SPECIAL, "<|im_", "end|>", "<", "<|", ">", "|>", "s>", "</", "start|>\n", "\n", " ", "a", "é", "\ufdd0"]
words = st.lists(st.sampled_from(PARTS)).map("".join)


@settings(deadline=None, max_examples=70)
@given(st.lists(words, min_size=2, max_size=6), st.sampled_from([CHATML, GENERATION]))
def test_messages_are_data(contents, source):
    """Whatever messages contain, the only control tokens are those of the template: one at each end of a message."""
    messages = talk(*contents)
    made = template(source)
    rendered = made.render_with_answers(messages)
    assert rendered.text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    [(ids, loss)] = made.encode_rendered([rendered])
    tokens = [BYTES.id_to_token(i) for i in ids]
    assert [token for token in tokens if token in SPECIAL] == ["<|im_start|>", "<|im_end|>"] * len(messages)
    assert BYTES.decode(ids.tolist(), skip_special_tokens=False) == rendered.text
    assert BYTES.decode(ids[loss].tolist(), skip_special_tokens=False) == "".join(
        content + "<|im_end|>" for content in contents[1::2]
    )


@settings(deadline=None, max_examples=50)
@given(words, words, words)
def test_parts_of_messages_do_not_form_control_tokens(name, argument, key):
    made = template(
        "{% for m in messages %}{{ m.name + m.argument }}{% for k in m.table %}{{ k + '|' }}{% endfor %}{% endfor %}"
    )
    message = {"role": "user", "name": name, "argument": argument, "table": {key: key}}
    ids = made.encode([message, message])
    assert BYTES.decode(ids, skip_special_tokens=False) == f"{name}{argument}{key}|" * 2
    assert not {BYTES.id_to_token(i) for i in ids} & set(SPECIAL)


def test_roles_and_tools_are_data():
    made = template("{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}")
    ids = made.encode([{"role": "x<|im_end|>"}], tools=[{"name": "</s>"}])
    assert [BYTES.id_to_token(i) for i in ids if BYTES.id_to_token(i) in SPECIAL] == ["<|im_start|>"]


def test_parts_of_a_text_get_no_spaces():
    tokenizer = sentencepiece_like()
    made, messages = template(tokenizer=tokenizer), talk("say <|im_end|>, <s>", " ok", "\n<s>\n", "b")
    ids = made.encode(messages)
    pieces = [tokenizer.id_to_token(i) for i in ids]
    assert (
        "".join(pieces).replace("▁", " ") == made.render(messages)
        and pieces.count("<|im_end|>") == 4
        and "<s>" not in pieces
    )


def test_templates_have_hugging_face_functions():
    source = """{%- set seen = namespace(n=0) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set seen.n = seen.n + 1 %}
    {{- seen.n }}{{ m | tojson }}{{ {'k': '<é>'} | tojson(indent=2) }}
    {%- if seen.n == 2 %}{% break %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ tools is none }}{{ unk_token is defined }}{{ strftime_now('%d %b %Y') }}"""
    made = template(source, now=lambda: datetime(2025, 1, 31))
    messages = [{"role": "system", "content": "no"}, *talk("<", "b", "never")]
    table = '{\n  "k": "<é>"\n}'
    assert (
        made.render(messages)
        == f'1{{"role": "user", "content": "<"}}{table}2{{"role": "assistant", "content": "b"}}{table}'
        "<s>TrueFalse31 Jan 2025"
    )
    assert made.says_date and not template().says_date
    assert (
        template("{% if true %}\n  {% if true %}\nx{% endif %}\n{% endif %}").render(talk("a")) == "x"
    )  # lines with only a block leave no text


def test_rewritten_answers_are_refused():
    dropping = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = template(dropping, name="dropping.jinja")
    assert answers(made.render_with_answers(talk("a", "<think>b</think>c"))) == ["<think>b</think>c<|im_end|>"]
    with pytest.raises(InputError, match=r"dropping\.jinja.* messages\[1\].*{% generation %}"):
        made.render_with_answers(talk("a", "<think>b</think>c", "d", "e"))
    with pytest.raises(InputError, match=r"{% generation %}"):  # a template without generation prompt
        other = template(
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
        )
        other.render_with_answers(talk("a", "b"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{% for m in messages %}\n{{ m.content", r"t.jinja, line 4 is not a chat template: unexpected end"),
        ("{% generation %}", "is not a chat template: Unexpected end"),
        ("\n{{ raise_exception('roles must alternate') }}", r"t.jinja, line 2: roles must alternate"),
        ("{{ messages[0].content + 1 }}", r"t.jinja, line 1: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", r"line 1: access to attribute '__class__' of 'str' object is unsafe"),
        ("\n\n{% set _ = messages.append(1) %}", r"line 3: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ nothing.at.all }}", r"line 1: 'nothing' is undefined"),
    ],
)
def test_errors_name_the_line(source, message):
    with pytest.raises(InputError, match=message):
        template(source, name="t.jinja").render(talk("a"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"at least one message, got \[\]"),
        ("hello", 'at least one message, got "hello"'),
        (["hello"], r'messages\[0\] must be an object with a role and content, got "hello"'),
        ([{"content": "a"}], r"messages\[0\] must be an object with a role"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": 3}],
            r"messages\[1\].content must be text, got 3",
        ),
        ([{"role": "user", "content": None}], "line 6: .*None"),
        ([{"role": "user", "content": "", "tool_calls": [1]}], "cannot write tool calls"),
    ],
)
def test_bad_messages_are_refused(messages, message):
    with pytest.raises(InputError, match=message):
        template().render(messages)


def test_lone_surrogates_are_refused():
    with pytest.raises(InputError, match="not valid Unicode"):
        template().encode(talk("\ud83d"))


def folder(path, config=None, file=None, tokenizer=BYTES):
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def test_template_is_found_in_order(tmp_path):
    own = {
        "chat_template": "config {{ eos_token }}",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
    }
    both = folder(tmp_path / "both", own, "file {{ eos_token }}")
    assert ChatTemplate.load(both).render(talk("a")) == "file </s>"
    (both / "chat_template.jinja").unlink()
    assert ChatTemplate.load(both).render(talk("a")) == "config </s>"
    (tmp_path / "other").write_text("given")
    assert ChatTemplate.load(both, tmp_path / "other").render(talk("a")) == "given"
    many = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate.load(folder(tmp_path / "many", {"chat_template": many})).render(talk("a")) == "yes"
    default = ChatTemplate.load(folder(tmp_path / "none"))
    assert default.source == CHATML and default.sha256 == template().sha256
    written = folder(tmp_path / "written")
    for name, data in ChatTemplate.load(both).files().items():
        (written / name).write_bytes(data)
    again = ChatTemplate.load(written)
    assert (
        again.render(talk("a")) == "config </s>" and json.loads((written / "tokenizer_config.json").read_text()) == own
    )
    for name, data in template("x{{ eos_token }}").files().items():
        (written / name).write_bytes(data)
    assert ChatTemplate.load(written).render(talk("a")) == "x</s>"


def test_bad_folders_are_refused(tmp_path):
    plain = Tokenizer(models.BPE({"a": 0}, []))
    for name, config, file, error, message in (
        ("no template", {}, None, CheckpointError, "has no chat template: put a chat_template.jinja there"),
        ("damaged", "{", None, CheckpointError, r"cannot read .*tokenizer_config\.json"),
        ("list", "[]", None, CheckpointError, r"cannot read .*tokenizer_config\.json"),
        (
            "no default",
            {"chat_template": [{"name": "a", "template": "b"}]},
            None,
            CheckpointError,
            "KeyError: 'default'",
        ),
        ("no eos", {}, "{{ eos_token }}", InputError, "eos_token.* tokenizer_config.json"),
    ):
        with pytest.raises(error, match=message):
            ChatTemplate.load(folder(tmp_path / name, config, file, plain))
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(InputError, match="cannot read the chat template"):
        ChatTemplate.load(tmp_path / "no eos", tmp_path / "nowhere")
