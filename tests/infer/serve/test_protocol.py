"""Requests to the server: accepted parameters, and errors that name the parameter."""

import contextlib
import subprocess
import sys

import pytest

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.grammars import FIELDS
from laneformer.infer.serve.guard import host_name
from laneformer.infer.serve.protocol import (
    ABSENT,
    LABELS,
    LIMITS,
    MESSAGE_LABELS,
    REASONING,
    REASONING_LABELS,
    SAMPLING,
    VARIABLES,
    WITHOUT_EFFECT,
    Call,
    read_call,
)
from laneformer.infer.serve.tools import CALL_LABELS, TOOL_LABELS
from tests.support.paths import ROOT

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def refused(fields, chat=False):
    with pytest.raises(ApiError) as caught:
        read_call(fields, chat)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    return error


def test_defaults_match_openai():
    call = read_call(dict(TEXT), chat=False)
    assert (call.max_tokens, call.sampling["temperature"], call.stop, call.logprobs, call.stream) == (
        16,
        1.0,
        (),
        None,
        False,
    )
    assert read_call(dict(CHAT), chat=True).max_tokens is None
    assert (call.cache_prompt, call.cache_salt, call.prediction, call.draft_max) == (True, "", "", None)
    assert read_call(dict(TEXT), chat=False).sampling["seed"] != call.sampling["seed"]


def test_every_parameter_is_read():
    call = read_call(
        {
            **TEXT,
            "model": "m",
            "max_tokens": 3,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 5,
            "repetition_penalty": 1.5,
            "stop": ["a", "b"],
            "stop_token_ids": [1],
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "stream": True,
            "user": "u",
            "cache_prompt": False,
            "cache_salt": "s",
            "prediction": {"type": "content", "content": "what may be repeated"},
            "speculative.n_max": 3,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        chat=False,
    )
    assert call.sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 5,
        "repetition_penalty": 1.5,
    }
    assert (call.model, call.max_tokens, call.stop, call.stop_token_ids, call.ignore_eos) == (
        "m",
        3,
        ("a", "b"),
        (1,),
        True,
    )
    assert (call.logprobs, call.return_token_ids, call.stream, call.include_usage, call.continuous_usage) == (
        2,
        True,
        True,
        True,
        True,
    )
    assert (call.cache_prompt, call.cache_salt, call.warnings) == (False, "s", ())
    assert (call.prediction, call.draft_max) == ("what may be repeated", 3)
    chat = read_call({**CHAT, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 9, "stop": "x"}, chat=True)
    assert (chat.logprobs, chat.max_tokens, chat.stop) == (3, 9, ("x",))
    assert read_call({**CHAT, "logprobs": True}, chat=True).logprobs == 0
    assert read_call({**TEXT, "logprobs": 0}, chat=False).logprobs == 0


@pytest.mark.parametrize(("prompt", "read"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_prompts_are_read(prompt, read):
    assert read_call({"prompt": prompt}, chat=False).prompt == read


def test_neutral_values_are_accepted():
    for name, values in ABSENT.items():
        for value in (None, *values):
            assert read_call({**TEXT, name: value}, chat=False).warnings == ()
        if WITHOUT_EFFECT.get(name, ()) is not None:
            error = refused({**TEXT, name: [{"something": "else"}]})
            assert error["param"] == name and error["code"] == "unsupported_parameter"
            assert f"leave {name} out" in error["message"]


def test_parameters_without_effect_are_named():
    for name, values in WITHOUT_EFFECT.items():
        for value in values or ("x", 3, True, ["y"]):
            for fields, chat in ((TEXT, False), (CHAT, True)):
                assert read_call({**fields, name: value}, chat).warnings == (f"{name} has no effect",)
    options = {"stream_options": {"include_usage": True}}
    call = read_call({**CHAT, **options, "store": True}, chat=True)
    assert call.warnings == ("stream_options has no effect", "store has no effect") and not call.include_usage
    assert read_call({**CHAT, **options, "stream": True}, chat=True).warnings == ()
    labelled = {**CHAT["messages"][0], "id": "5", "cache_control": {}}
    call = read_call({"messages": [labelled]}, chat=True)
    assert call.warnings == tuple(f"messages[0].{name} has no effect" for name in ("id", "cache_control"))
    assert call.prompt == CHAT["messages"]


def test_other_names_of_a_parameter_are_accepted():
    every = read_call({**TEXT, "top_k": -1, "top_n_sigma": -1}, chat=False).sampling
    assert every["top_k"] == every["top_n_sigma"] == 0
    assert read_call({**TEXT, "max_completion_tokens": 4}, chat=False).max_tokens == 4
    for fields, chat in ((TEXT, False), (CHAT, True)):
        assert read_call({**fields, "max_tokens": -1}, chat).max_tokens is None
    assert read_call({**TEXT, "logprobs": False, "top_logprobs": 0}, chat=False).logprobs is None


def test_template_variables_are_read():
    call = read_call({**CHAT, "chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"}, chat=True)
    assert call.template_values == {"reasoning_effort": "low", "thinking": False} and call.warnings == ()
    assert call.without_effect(["thinking", "messages"], False) == ["reasoning_effort"]
    assert call.without_effect([], True) == ["reasoning_effort", "chat_template_kwargs.thinking"]
    call = read_call({**TEXT, "chat_template_kwargs": {"thinking": False}}, chat=False)
    assert call.without_effect(["thinking"], True) == ["chat_template_kwargs.thinking"], "completions have no template"
    assert refused({**CHAT, "chat_template_kwargs": {"tools": []}}, chat=True)["param"] == "chat_template_kwargs.tools"


@pytest.mark.parametrize(("fields", "values", "ignored"), [
    ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}, ["reasoning.summary"]),
    ({"reasoning": {"effort": "high", "enabled": True}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}, []),
    ({"reasoning": {"enabled": False}}, {}, []), ({"reasoning": {}}, {}, []),
    ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}, []),
    ({"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True}, []),
    ({"enable_thinking": False, "reasoning_effort": "none"}, {"enable_thinking": False}, []),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, {}, ["stream_options.include_obfuscation"]),
])  # fmt: skip
def test_reasoning_is_a_variable_of_the_template(fields, values, ignored):
    call = read_call({**CHAT, **fields}, chat=True)
    assert call.template_values == values and call.warnings == tuple(f"{name} has no effect" for name in ignored)
    assert call.without_effect([], True) == [*values]


# Fields that clients send by default, besides tools (test_tools.py). All are accepted, and a warning names the fields
# without effect.
CLIENTS = {
    "openai": {"stream": True, "stream_options": {"include_usage": True}, "n": 1, "logprobs": False, "user": "me"},
    "litellm": {"temperature": 0.2, "max_completion_tokens": 9, "presence_penalty": 0.0, "frequency_penalty": 0.0,
                "logit_bias": {}, "response_format": {"type": "text"}, "service_tier": None, "top_logprobs": None},
    "langchain": {"stream": True, "stream_options": {"include_usage": True}, "n": None, "stop": None, "seed": None,
                  "parallel_tool_calls": True, "max_completion_tokens": None},
    "ai sdk": {"max_tokens": 32000, "top_p": 1, "stop": [], "reasoning_effort": "medium", "verbosity": "low",
               "response_format": None, "stream": True, "stream_options": {"include_usage": True}},
    "qwen": {"metadata": {"sessionId": "a"}, "vl_high_resolution_images": True, "enable_thinking": False},
    "openrouter": {"usage": {"include": True}, "transforms": [], "provider": {"sort": "price"}, "reasoning": {}},
}  # fmt: skip


@pytest.mark.parametrize("client", list(CLIENTS))
def test_fields_of_clients_are_accepted(client):
    content = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    answered = {"role": "assistant", "content": "a", "refusal": None, "function_call": None, "audio": None,
                "provider_specific_fields": {}, "reasoning": "hm", "reasoning_details": [{}]}  # fmt: skip
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": content}, answered]
    call = read_call({"messages": messages, "model": "m", **CLIENTS[client]}, chat=True)
    assert call.prompt[1]["content"] == "hi"
    assert call.prompt[2] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert {name.split(" ")[0] for name in call.warnings} >= {"messages[2].reasoning_details"}


def test_no_parameter_value_causes_a_server_error():
    """Tries every parameter with values of every type. Each is accepted, or refused with the parameter's name."""
    known = {name: None for name in (*ABSENT, *WITHOUT_EFFECT, *SAMPLING, *LIMITS, *LABELS, *FIELDS)}
    asked = {
        *Call.__dataclass_fields__,
        *VARIABLES,
        "stream_options",
        "chat_template_kwargs",
        "reasoning",
        "top_logprobs",
    }
    odd = ("", "x", 0, -1, 1, 10**99, 0.5, True, False, [], {}, [[]], [{}], {"a": {}}, {"include_usage": 3})
    for name in {*known, *asked, "prompt", "messages", "unknown"}:
        for value in odd:
            for fields, chat in ((TEXT, False), (CHAT, True), ({**CHAT, "stream": True}, True)):
                with contextlib.suppress(ApiError):
                    read_call({**fields, name: value}, chat)
    for field in ("role", "content", "tool_calls", "name", "other"):
        for value in odd:
            with contextlib.suppress(ApiError):
                read_call({"messages": [{**CHAT["messages"][0], field: value}]}, chat=True)


def test_documentation_names_every_parameter():
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    documented = (*ABSENT, *WITHOUT_EFFECT, *SAMPLING, *LIMITS, *LABELS, *VARIABLES, *MESSAGE_LABELS, *REASONING_LABELS)
    documented += (*TOOL_LABELS, *CALL_LABELS, REASONING, *FIELDS)
    assert [name for name in documented if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "give a string, or a list of token ids"),
        ({"prompt": ["a", "b"]}, "prompt", "several prompts"),
        ({"prompt": [1, True]}, "prompt", "give a string"),
        ({**TEXT, "chat_template_kwargs": [1]}, "chat_template_kwargs", "give an object"),
        ({**TEXT, "stream": True, "stream_options": "all"}, "stream_options", "give an object"),
        ({**TEXT, "temprature": 1}, "temprature", "unknown parameter temprature"),
        ({**TEXT, "n": 33}, "n", "a whole number from 1 to 32"),
        ({**TEXT, "best_of": 2}, "best_of", "best_of = 2 is not supported"),
        ({**TEXT, "echo": True}, "echo", "echo = true is not supported"),
        ({**TEXT, "logit_bias": {"5": "1"}}, "logit_bias", 'logit_bias[5] = "1": give a number'),
        ({**TEXT, "logit_bias": {"a": 1}}, "logit_bias", 'logit_bias = "a": give token ids'),
        ({**TEXT, "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "has 1025 entries"),
        ({**TEXT, "presence_penalty": "a"}, "presence_penalty", "give a number"),
        ({**TEXT, "max_tokens": 0}, "max_tokens", "give a whole number of at least 1"),
        ({**TEXT, "max_tokens": True}, "max_tokens", "give a whole number"),
        ({**TEXT, "max_tokens": -2}, "max_tokens", "give a whole number"),
        ({**TEXT, "web_search_options": {"search_context_size": "low"}}, "web_search_options", "not supported"),
        ({**TEXT, "skip_special_tokens": False}, "skip_special_tokens", "not supported"),
        ({**TEXT, "a\n\ud800": 1}, "a\\n\\ud800", "unknown parameter"),
        ({**TEXT, "temperature": "hot"}, "temperature", "give a number"),
        ({**TEXT, "seed": 1.5}, "seed", "give a whole number"),
        ({**TEXT, "stream": 1}, "stream", "give true or false"),
        ({**TEXT, "stop": ["a"] * 17}, "stop", "a list of up to 16"),
        ({**TEXT, "stop": ""}, "stop", "a string of 1 to 256 characters"),
        ({**TEXT, "stop_token_ids": ["a"]}, "stop_token_ids", "a list of up to 16 token ids"),
        ({**TEXT, "logprobs": 21}, "logprobs", "from 0 to 20"),
        ({**TEXT, "stream": True, "stream_options": {"more": 1}}, "stream_options.more", "unknown parameter"),
        ({**TEXT, "reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", "not supported"),
        ({**TEXT, "reasoning": {"enabled": True}}, "reasoning.enabled", "needs reasoning.effort"),
        ({**TEXT, "reasoning": {"effort": 5}}, "reasoning.effort", "give a string"),
        ({**TEXT, "reasoning": "high"}, "reasoning", "give an object"),
        ({**TEXT, "enable_thinking": "yes"}, "enable_thinking", "give true or false"),
        ({**TEXT, "model": 5}, "model", "give a string"),
    ],
)
def test_bad_completions_name_the_parameter(fields, param, message):
    error = refused(fields)
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "messages", "a list of at least one message"),
        ({"messages": []}, "messages", "a list of at least one message"),
        ({"messages": [{"content": "a"}]}, "messages[0]", "an object with a role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "give a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "other parts are not supported",
        ),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content", "other parts are not supported"),
        (
            {"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]},
            "messages[0].audio",
            "is not supported",
        ),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs", "logprobs = true"),
        ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "mean the same"),
    ],
)
def test_bad_chats_name_the_parameter(fields, param, message):
    error = refused(fields, chat=True)
    assert error["param"] == param and message in error["message"]


def test_messages_keep_history_fields():
    answered = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}
    call = read_call({"messages": [*CHAT["messages"], answered, parts]}, chat=True)
    assert call.prompt == [
        *CHAT["messages"],
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]


@pytest.mark.parametrize(("fields", "chat"), [(TEXT, False), (CHAT, True)])
def test_predictions_are_read(fields, chat):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in (("x = 1", "x = 1"), ("", ""), (parts, "a\nb"), ("é" * (1 << 19), "é" * (1 << 19))):
        call = read_call({**fields, "prediction": {"type": "content", "content": content, "unknown": None}}, chat)
        assert (call.prediction, call.warnings) == (text, ())
    call = read_call({**fields, "prediction": {"type": "content", "content": "a"}, "speculative.n_max": 2}, chat)
    assert call.without_effect([], False) == ["prediction", "speculative.n_max"] and call.without_effect([], True) == []
    assert read_call({**fields, "speculative.n_max": 0}, chat).without_effect([], False) == [], "0 asks for no drafts"


@pytest.mark.parametrize(
    ("prediction", "name"),
    [
        *((value, "prediction") for value in ("text", ["a"], 3, True)),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        *(({"type": "content", "content": value}, "prediction.content") for value in (3, None, {"text": "a"}, [3])),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "a", "weight": 2}, "prediction.weight"),
    ],
)
def test_wrong_predictions_are_refused(prediction, name):
    for fields, chat in ((TEXT, False), (CHAT, True)):
        assert refused({**fields, "prediction": prediction}, chat)["param"] == name


@pytest.mark.parametrize("count", [-1, 1.5, "3", True])
def test_wrong_numbers_of_drafts_are_refused(count):
    assert refused({**TEXT, "speculative.n_max": count})["param"] == "speculative.n_max"


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:80", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("evil.example:1", "evil.example"),
        ("", ""),
    ],
)
def test_host_names_are_read(header, name):
    assert host_name(header) == name


def test_web_process_does_not_import_jax():
    """Imports everything that `python -m infer serve` imports when it starts and runs."""
    code = (
        "import sys, uvicorn\n"
        "import laneformer.infer.__main__, laneformer.infer.commands.serve\n"
        "from laneformer.infer.serve import application, engine, guard, metrics\n"
        "assert 'laneformer.infer.serve.worker' in sys.modules and not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_sampling_of_the_model_is_the_default():
    usual = {"temperature": 0.6, "top_p": 0.9}
    for fields, expected in (
        ({}, usual),
        ({"temperature": 0}, {"temperature": 0, "top_p": 0.9}),
        ({"top_p": None}, usual),
    ):
        found = read_call({**TEXT, **fields}, chat=False, recommended=usual).sampling
        assert {name: found[name] for name in usual} == expected
