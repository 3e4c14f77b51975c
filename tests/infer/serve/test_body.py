"""Bodies of requests: unambiguous JSON is read, and errors name the place."""

import json

import pytest

from infer.serve.body import MOST_DIGITS, ApiError, read_json

LONG = "9" * (MOST_DIGITS + 1)


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
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000 + b"NaN" + b"}" * 100_000, "nested too deeply"),
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
