"""Bodies of requests: unambiguous JSON is read, and errors name the place."""

import json
import time

import pytest

from laneformer.infer.serve.body import LARGE, MOST_DIGITS, MOST_PARTS, ApiError, read_json
from laneformer.infer.serve.item_requests import read_items
from laneformer.infer.serve.protocol import read_call
from tests.support.hostile.mutations import mutants, slowest

LONG = "9" * (MOST_DIGITS + 1)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a{1,3}$"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "aa"}'}}


def refused(body):
    with pytest.raises(ApiError) as caught:
        read_json(body if isinstance(body, bytes) else body.encode())
    assert caught.value.status == 400
    return caught.value.body["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "é😀\x00", "max_tokens": 5, "temperature": 0.5},
        {"prompt": [0, 1, 10**MOST_DIGITS - 1], "note": "NaN Infinity 1e999 " + LONG, "x": [{"y": None}, True]},
        {"temperature": 1e308, "min_p": 1e-320},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_is_read(fields, ascii_only):
    assert read_json(json.dumps(fields, ensure_ascii=ascii_only).encode()) == fields


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"\\udfff"', "is not valid Unicode"),
        (b'{"prompt": "\xff"}', "is not UTF-8 at byte 12"),
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8 at byte 12"),
        ('{"prompt": "x"}'.encode("utf-16"), "is not UTF-8 at byte 0"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a": ' * 10_000 + b"NaN" + b"}" * 10_000, "nested too deeply"),
    ],
)
def test_bodies_without_an_object_are_refused(body, message):
    error = refused(body)
    assert message in error["message"] and error["param"] is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('{"prompt": "x", "\\udfff": 1}', "\\udfff", "valid Unicode"),
        ('{"prompt": "x", "\\ud83d\\n": 1}', "\\ud83d\\n", "valid Unicode"),
        ('{"prompt": "\\ud83d"}', "prompt", "valid Unicode"),
        ('{"stop": ["a", "\\uDE00"]}', "stop[1]", "valid Unicode"),
        (
            '{"messages": [{"role": "user", "content": [{"text": "\\ude00\\ud83d"}]}]}',
            "messages[0].content[0].text",
            "valid",
        ),
        ('{"tools": [{"function": {"\\udfff": 1}}]}', "tools[0].function.\\udfff", "valid Unicode"),
        ('{"temperature": NaN}', "temperature", "temperature = NaN: give a finite number"),
        ('{"prompt": [1, -Infinity]}', "prompt[1]", "prompt[1] = -Infinity: give"),
        ('{"temperature": 1e400}', "temperature", "temperature = 1e400: give"),
        ('{"metadata": {"a": [-1E+400]}}', "metadata.a[0]", "= -1E+400"),
        (f'{{"max_tokens": {LONG}}}', "max_tokens", f"({len(LONG)} characters): give"),
        (f'{{"seed": {LONG * 40}}}', "seed", "(4040 characters): give"),
        (f'{{"top_p": {LONG * 50}}}', "top_p", "(5050 characters): give"),
        (f'{{"unknown": {LONG * 4}.5}}', "unknown", "(406 characters): give"),
        (f'{{"min_p": 0.{"1" * 400}}}', "min_p", "(402 characters): give"),
        ('{"seed": 1, "prompt": "x", "seed": 2}', "seed", "seed appears twice"),
        ('{"metadata": {"a": 1, "a": 1}}', "a", "a appears twice"),
    ],
)
def test_unusable_parts_are_named(body, param, message):
    error = refused(body)
    assert error["param"] == param and message in error["message"] and len(error["message"]) < 200


MOST = 1 << 20  # bytes of a request


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{" + "".join(f'"{i}":0,' for i in range(49_000)) + '"48999":1}', "48999 appears twice"),
        ("".join(f'{{"{"k" * 80}":' for _ in range(400)) + "[" + "0," * 400_000 + "1e999" + "]" + "}" * 400, "kkk"),
        ('{"a":["' + "x".join(["1" * MOST_DIGITS] * 10_000) + '"],"b":NaN}', "b = NaN"),
        ('{"a":' + "[" * 500 + "[]," * 300_000, "objects, lists and names"),
        ("{" + "".join(f'"{i}":0,' for i in range(85_000)) + '"84999":1}', "objects, lists and names"),
        ('{"a":[' + "{}," * 300_000 + '{"', "objects, lists and names"),
        ('{"a":"' + '\\"{' * 300_000, "is not JSON"),
        ('{"a":"' + "\\\\" * 200_000 + '[{"]}', "is not JSON"),
    ],
)
def test_costly_bodies_are_refused_in_time(body, message):
    """Each costs a few bytes and less than 1 s of processor time; with the square of its size it would take minutes."""
    assert len(body) <= MOST + 200_000
    began = time.process_time()
    assert message in refused(body)["message"] and time.process_time() - began < 1


def test_braces_in_strings_are_no_objects():
    text = '{":\\' * MOST_PARTS
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    parts = [[]] * (MOST_PARTS - 3)
    assert read_json(json.dumps({"a": parts}).encode()) == {"a": parts}
    assert f"{MOST_PARTS + 1:,} objects, lists" in refused(json.dumps({"a": [*parts, []]}))["message"]


@pytest.mark.parametrize("bad", [b"1e999", b"1e+999", b"1" * 101, b"NaN", b"-Infinity", rb'"\ud800"'], ids=repr)
def test_bad_values_are_found_between_the_pieces_of_a_large_body(bad):
    for before in range(LARGE - len(bad) - 8, LARGE + 2):
        with pytest.raises(ApiError):
            read_json(b'{"a":' + b" " * before + bad + b" " * LARGE + b"}")


def test_numbers_of_a_large_body_are_read_exactly():
    values = [0, -1, 10**99, 1.5, -0.0, 1e-320, 0.1, 123456789012345678] * 2000
    assert repr(read_json(json.dumps({"a": values}).encode())["a"]) == repr(values)


BODIES = {
    "completion": {"prompt": [1, 2], "max_tokens": 5, "temperature": 0.5, "stop": ["a", "é"], "logit_bias": {"3": -1.5},
                   "stream": True, "stream_options": {"include_usage": True}, "speculative.n_max": 2, "seed": 7},
    "chat": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hé"}]},
                          {"role": "assistant", "content": None, "tool_calls": [CALL]},
                          {"role": "tool", "tool_call_id": "c", "content": "5"}], "tools": [TOOL], "n": 2,
             "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
             "logprobs": True, "top_logprobs": 3, "prediction": {"type": "content", "content": "a"}},
    "response": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                           {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "c", "output": "5"}],
                 "tools": [{"type": "function", **TOOL["function"]}], "reasoning": {"effort": "low"},
                 "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "metadata": {"a": "b"}},
}  # fmt: skip


@pytest.mark.parametrize("count", [300, pytest.param(30_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", BODIES)
def test_changed_requests_are_read_or_refused_quickly(kind, count):
    def read(body):
        fields = read_json(body)
        read_call(read_items(fields).chat if kind == "response" else fields, chat=kind != "completion")

    whole = json.dumps(BODIES[kind], ensure_ascii=False).encode()
    read(whole)
    assert slowest(read, mutants(whole, count), ApiError) < 1
