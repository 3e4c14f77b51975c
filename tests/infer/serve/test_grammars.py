"""Answers that follow a grammar, requested in the fields of OpenAI, vLLM, SGLang and llama.cpp."""

import json

import pytest

from laneformer import infer
from laneformer.infer import Grammar
from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.grammars import read_grammar
from laneformer.infer.serve.item_requests import read_items
from laneformer.infer.serve.protocol import read_call

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "made", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DRAW = {"temperature": 1.0, "seed": 7, "max_tokens": 100}


@pytest.mark.parametrize(("fields", "read"), [
    ({"response_format": {"type": "text"}}, None),
    ({"grammar": "", "guided_regex": ""}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object("response_format")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA, "response_format")),
    ({"response_format": OPENAI}, Grammar.json_schema(SCHEMA, "response_format")),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA, "guided_json")),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA, "json_schema")),
    ({"guided_regex": "a+"}, Grammar.regex("a+", "guided_regex")),
    ({"regex": "a+"}, Grammar.regex("a+", "regex")),
    ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"], "guided_choice")),
    ({"structured_outputs": {"choice": ["a"], "json": None}}, Grammar.choice(["a"], "structured_outputs")),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object("structured_outputs")),
    ({"grammar": 'root ::= "a"'}, Grammar.of_rules('root ::= "a"', "grammar")),
    ({"ebnf": 'root ::= "a"'}, Grammar.of_rules('root ::= "a"', "ebnf")),
])  # fmt: skip
def test_each_field_is_read(fields, read):
    assert read_grammar(left := {**fields, "other": 1}) == read and left == {"other": 1}
    assert read_call({**CHAT, **fields}, chat=True).grammar == read


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"response_format": "json"}, "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "give an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema", "a JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
     "response_format.json_schema.strict", "true or false"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more", "not supported"),
    ({"guided_json": "{"}, "guided_json", "a JSON schema"),
    ({"guided_choice": []}, "guided_choice", "a list of 1 to 1024 strings"),
    ({"guided_choice": [""]}, "guided_choice", "a list of 1 to 1024 strings"),
    ({"grammar": 5}, "grammar", "a string"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"guided_regex": "a", "grammar": "b"}, "grammar", "guided_regex and grammar describe the answer's form"),
])  # fmt: skip
def test_wrong_fields_are_named(fields, param, message):
    with pytest.raises(ApiError) as caught:
        read_call({**CHAT, **fields}, chat=True)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["param"] == param and message in error["message"]


def test_response_has_the_requested_form():
    form = {"type": "json_schema", "name": "made", "schema": SCHEMA, "strict": True}
    asked = read_items({"input": "hi", "text": {"format": form}})
    assert asked.repeated["text"] == {"format": form}
    assert read_call(asked.chat, chat=True).grammar == Grammar.json_schema(SCHEMA, "text.format")


@pytest.fixture
def server(small_server):
    pytest.importorskip("llguidance")
    return small_server


def test_answers_match_the_engine(server, small_engine):
    engine, fields = small_engine, {"prompt": "a = ", "response_format": OPENAI, **DRAW}
    whole = server.post("/v1/completions", n=2, **fields)[1]
    for i, choice in enumerate(whole["choices"]):
        sampling = infer.Sampling(1.0, seed=7 + i)
        result = engine.generate(
            "a = ", max_new_tokens=100, sampling=sampling, constraint=Grammar.json_schema(SCHEMA)
        ).result
        assert (choice["text"], choice["finish_reason"]) == (result.text, "stop")
        assert {*json.loads(result.text)} == {"a", "n"}
    with server.stream(**fields) as stream:
        *chunks, done = stream
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"] and done == "[DONE]"
    cut = server.post("/v1/completions", **{**fields, "stop": '"n"'})[1]["choices"][0]
    assert cut["text"] == whole["choices"][0]["text"].split('"n"')[0] and cut["stop_reason"] == '"n"'
    assert server.post("/v1/completions", **{**fields, "max_tokens": 3})[1]["choices"][0]["finish_reason"] == "length"


def test_every_route_has_grammars(server):
    chat = server.post("/v1/chat/completions", **CHAT, response_format={"type": "json_object"}, temperature=0,
                       logit_bias={"92": 100}, max_tokens=20)[1]["choices"][0]  # fmt: skip
    assert (chat["message"]["content"], chat["finish_reason"]) == ("{}", "stop")
    form = {"type": "json_schema", "name": "made", "schema": SCHEMA}
    made = server.post("/v1/responses", input="hi", text={"format": form})[1]
    assert {*json.loads(made["output"][0]["content"][0]["text"])} == {"a", "n"} and made["text"]["format"] == form
    for fields in ({"guided_choice": ["yes", "no"]}, {"grammar": 'root ::= "yes" | "no"'}, {"regex": "yes|no"}):
        assert server.complete("a", **fields)["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("completions", {"prompt": "a", "response_format": {"type": "json_object", "schema": {"not": {}}}},
     "response_format"),
    ("chat/completions", {**CHAT, "guided_regex": "(a"}, "guided_regex"),
    ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "text.format"),
])  # fmt: skip
def test_unusable_grammars_are_refused(server, path, fields, param):
    status, body = server.post(f"/v1/{path}", **fields)
    assert (status, body["error"]["param"]) == (400, param) and body["error"]["message"].startswith(
        f"{param} cannot be"
    )
