"""Tool calls in answers: every format is read, and the result does not depend on how the answer is cut."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.infer.text.channels import Channels, Harmony, Part
from laneformer.infer.text.tool_calls import FORMATS, HARMONY, HarmonyReader, TextReader, ToolRequest, find_format
from laneformer.infer.text.values import json_text, read_object, typed
from tests.support import checkpoints
from tests.support.serving.tool_templates import TEMPLATES, WEATHER, calls_of, function, written

BY_NAME = {each.name: each for each in FORMATS}
TEXTS = [each for each in FORMATS if each is not HARMONY]
ADD = function("add", a={"type": "integer"}, b={"type": "integer"}, note={"type": "string"})
TOOLS = ToolRequest((WEATHER, ADD))
TOKENIZER = checkpoints.byte_tokenizer(*checkpoints.HARMONY)
HARMONY_PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


def read(name, *pieces, request=TOOLS):
    """The content of an answer, and (name, arguments) of its calls."""
    text, calls = calls_of(TextReader(BY_NAME[name], request), pieces)
    assert len({call.id for call in calls}) == len(calls)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def read_harmony(answer, prompt=HARMONY_PROMPT, request=TOOLS):
    """The reasoning, the content and the calls of an answer."""
    ids = TOKENIZER.encode(prompt).ids
    harmony = Harmony.find(TOKENIZER)
    channels, reader = (Channels(harmony, TOKENIZER, ids, calls=True) for _ in range(2))
    reader, found, calls = HarmonyReader(reader, request), {part: "" for part in Part}, []
    reads = []
    for token in TOKENIZER.encode(answer).ids:
        part = channels.add(token)
        reads.append(reader.add(token, "" if part is Part.MARK else TOKENIZER.decode([token]), part))
        if reader.finished:
            break
    for each in (*reads, reader.end("")):
        found[each.part] += each.text
        calls += each.calls
    return found[Part.REASONING], found[Part.CONTENT], [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "",
     [("add", {"a": 1, "b": 2})]),
    ("hermes", 'I look.\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>\n'
     '{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n', "I look.",
     [("add", {}), ("get_weather", {"city": "Köln"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"note": "a</tool_call> \\" }"}}</tool_call> done', "done",
     [("add", {"note": 'a</tool_call> " }'})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', '<tool_call>\n{"name": "add", "arguments": {"a": 1',
     []),
    ("hermes", "<tool_call>{add}</tool_call>", "<tool_call>{add}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}',
     '<tool_call>{"name": "add", "arguments": {"a": NaN}}', []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", '<tool_call><tool_call>{"name": "add"}</tool_call>', "<tool_call>", [("add", {})]),
    ("hermes", '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', []),
    ("hermes", "  a tool_call <tool  ", "  a tool_call <tool  ", []),
    ("qwen3-coder", "Let me.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n\n"
     "</parameter>\n</function>\n</tool_call>", "Let me.", [("add", {"a": 1, "note": "2\n"})]),
    ("qwen3-coder", "<function=add>\n<parameter=a>1</parameter></function>", "", [("add", {"a": 1})]),
    ("qwen3-coder", "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>\n"
     "<tool_call><function=other><parameter=x>5</parameter></function></tool_call>", "",
     [("get_weather", {}), ("other", {"x": "5"})]),
    ("qwen3-coder", "<function=add><parameter=note>a</parameter> b</parameter></function>", "",
     [("add", {"note": "a</parameter> b"})]),
    ("qwen3-coder", "<function=add>\nno parameter</function>", "<function=add>\nno parameter</function>", []),
    ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=a>\n1",
     "<tool_call>\n<function=add>\n<parameter=a>\n1", []),
    ("qwen3-coder", "if a <function=b\n", "if a <function=b\n", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]', "",
     [("add", {"a": 1}), ("get_weather", {})]),
    ("mistral", 'Yes.[TOOL_CALLS][{"name": "add", "arguments": {"note": "]"}}]', "Yes.", [("add", {"note": "]"})]),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add"}, 5]', '[TOOL_CALLS] [{"name": "add"}, 5]', []),
    ("mistral-args", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "x"}', "",
     [("add", {"a": 1}), ("get_weather", {"city": "x"})]),
    ("mistral-args", '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    ("mistral-args", "[TOOL_CALLS]add and more", "[TOOL_CALLS]add and more", []),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ("llama3", '\n\n<|python_tag|>{"name": "add", "parameters": {}}; '
     '{"name": "get_weather", "parameters": {"city": "x"}}', "", [("add", {}), ("get_weather", {"city": "x"})]),
    ("llama3", '{"name": "unknown", "parameters": {"a": 1}}', '{"name": "unknown", "parameters": {"a": 1}}', []),
    ("llama3", 'So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
    ("llama3", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("llama3", " {1: 2} ", " {1: 2} ", []),
])  # fmt: skip
def test_calls_of_an_answer_are_read(name, answer, text, calls):
    assert read(name, answer) == (text, calls)
    for at in range(len(answer) + 1):
        assert read(name, answer[:at], answer[at:]) == (text, calls), at
    assert read(name, *answer) == (text, calls)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_format_is_found_in_the_template(name):
    assert find_format(TEMPLATES[name], {"messages", "tools"}) is BY_NAME[name]
    assert find_format(TEMPLATES[name], {"messages"}) is None


def test_unknown_formats_are_not_recognised():
    glm = '{{ tools }}<tool_call>{name}\n<arg_key>{key}</arg_key><arg_value>"arguments"</arg_value></tool_call>'
    apriel = '{{ tools }} within <tool_call>: <tool_calls>[{"name": NAME, "arguments": ARGS}]</tool_calls>'
    minimax = '{{ tools }}<tool_call><invoke name="NAME">"arguments"</invoke></tool_call>'
    seed = "{{ tools }}<seed:tool_call><function=NAME><parameter=KEY>arguments</parameter></function></seed:tool_call>"
    for source in ("", checkpoints.HARMONY_TEMPLATE, glm, seed, apriel, minimax, "<｜tool▁calls▁begin｜>"):
        assert find_format(source, {"messages", "tools"}) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1), JSON_VALUES, max_size=3)


def cut(data, text):
    """A text, cut into random pieces."""
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@pytest.mark.parametrize("name", [each.name for each in TEXTS if each.name != "qwen3-coder"])
@settings(max_examples=30, deadline=None)
@given(st.data(), st.lists(st.tuples(st.sampled_from(["add", "get_weather"]), ARGUMENTS), min_size=1, max_size=3))
def test_written_calls_are_read_from_any_pieces(name, data, calls):
    before = "" if name == "llama3" else data.draw(st.sampled_from(["", "Yes. ", "a < b [TOOL\n"]))
    answer = before + written(name, calls)
    assert read(name, *cut(data, answer)) == (before.rstrip(), calls)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), JSON_VALUES, max_size=3))
def test_values_of_tags_are_read_by_their_schema(data, values):
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    schemas = {key: {"type": kinds.get(type(value), "null")} for key, value in values.items()}
    values = {key: value for key, value in values.items() if not (isinstance(value, str) and "</parameter>" in value)}
    request = ToolRequest((function("f", **schemas),))
    answer = written("qwen3-coder", [("f", values)])
    assert read("qwen3-coder", *cut(data, answer), request=request) == ("", [("f", values)])


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=", "add", ">", "\n", "<parameter=", "</parameter>", "</function>",
    "{", "}", '"', '"name"', ":", '"add"', ",", "[", "]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "\\", "<", "a",
    " ", '{"name": "add", "arguments": {}}', '{"name": "add", "parameters": {"a": [1]}}', ";", "<tool", "_call>",
])  # fmt: skip


@pytest.mark.parametrize("name", [each.name for each in TEXTS])
@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(PIECES, max_size=14))
def test_result_does_not_depend_on_pieces(name, data, pieces):
    answer = "".join(pieces)
    whole = read(name, answer)
    assert read(name, *cut(data, answer)) == whole and read(name, *answer) == whole
    if not whole[1]:
        assert whole[0] == answer, "text without calls must not change"
    one = read(name, *cut(data, answer), request=ToolRequest(TOOLS.tools, parallel=False))
    assert one[1] == whole[1][:1]


@pytest.mark.parametrize("name", [each.name for each in TEXTS])
def test_required_call_begins_in_the_prompt(name):
    tool_format = BY_NAME[name]
    for request in (ToolRequest(TOOLS.tools, required=True), ToolRequest(TOOLS.tools, True, "add", parallel=False)):
        opening = tool_format.opening(request)
        whole = written(name, [("add", {"a": 1})])
        squeezed, start = ("".join(text.split()) for text in (whole, opening))
        assert squeezed.startswith(start), "a written call must begin like the prompt's"
        at = next(n for n in range(len(whole) + 1) if "".join(whole[:n].split()) == start)
        assert read(name, whole[at:], request=request) == ("", [("add", {"a": 1})])
        assert read(name, "oops", request=request) == (opening + "oops", [])


def test_first_call_ends_the_answer_without_parallel_calls():
    reader = TextReader(BY_NAME["hermes"], ToolRequest(TOOLS.tools, parallel=False))
    answer = written("hermes", [("add", {}), ("add", {})])
    reads = [reader.add(0, piece, Part.CONTENT) for piece in answer]
    done = next(n for n, each in enumerate(reads) if each.calls)
    assert reader.finished and not any(each.text or each.calls for each in (*reads[done + 1 :], reader.end("tail")))
    assert answer[: done + 1].endswith("}}")


def test_many_failed_openings_take_little_time():
    for answer in (
        "<tool_call>{" * 3000,
        "<function=" * 5000,
        '{"' * 9000,
        "[TOOL_CALLS]" * 5000,
        "<tool_call>" * 9000,
    ):
        for each in TEXTS:
            assert read(each.name, answer) == (answer, [])


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deeply_nested_arguments_stay_text(depth):
    answer = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    text, calls = read("hermes", answer)
    assert (text == answer and not calls) or (depth == 500 and len(calls) == 1)


@pytest.mark.parametrize(("answer", "expected"), [
    ('<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json'
     '<|message|>{"a": 1}<|call|>', ("hm", "", [("add", {"a": 1})])),
    ('<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"a": 1}', ("", "", [("add", {"a": 1})])),
    ('<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>'
     '{}<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather<|message|><|end|>',
     ("", "I look.", [("add", {}), ("get_weather", {})])),
    ("<|channel|>commentary to=functions.add<|message|>{a}<|end|><|start|>assistant<|channel|>final<|message|>b",
     ("", "{a}b", [])),
    ("<|channel|>commentary to=functions.add<|message|>{", ("", "{", [])),
    ("<|channel|>analysis to=browser.search<|message|>{}", ("{}", "", [])),
    ("plain", ("", "plain", [])),
])  # fmt: skip
def test_calls_in_harmony_are_read(answer, expected):
    assert read_harmony(answer) == expected


def test_required_call_in_harmony_begins_in_the_prompt():
    named = ToolRequest(TOOLS.tools, True, "add", parallel=False)
    for request, rest in ((ToolRequest(TOOLS.tools, True), "add<|message|>"), (named, "")):
        prompt = HARMONY_PROMPT + HARMONY.opening(request)
        answer = rest + '{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>more'
        found = read_harmony(answer, prompt, request)
        assert found == ("", "" if request.name else "more", [("add", {"a": 1})])


@pytest.mark.parametrize(("text", "schema", "value"), [
    ("5", {"type": "integer"}, 5), ("5", {"type": "string"}, "5"), ("5", None, "5"), ("5", {}, "5"),
    ("x", {"type": "integer"}, "x"), ("5.5", {"type": "integer"}, "5.5"), ("5", {"type": "number"}, 5),
    ("true", {"type": "integer"}, "true"), ("True", {"type": "boolean"}, True), ("1", {"type": "boolean"}, "1"),
    ("None", {"type": ["string", "null"]}, None), ("a", {"type": ["string", "null"]}, "a"),
    ("[1]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, [1]), ("{", {"type": "object"}, "{"),
    ("1, 2", {"type": "integer"}, "1, 2"), ("5", {"type": "what"}, "5"), ("5", {"type": 5, "oneOf": 5}, "5"),
    ("[" * 100_000, {"type": "array"}, "[" * 100_000), ("1" * 5000, {"type": "integer"}, int(sys.float_info.max)),
])  # fmt: skip
def test_values_are_typed_by_their_schema(text, schema, value):
    assert typed(text, schema) == value and type(typed(text, schema)) is type(value)


def test_json_text_does_not_escape_characters():
    assert json_text({"é": "ü"}) == '{"é": "ü"}' and read_object(json_text({"a": "\ud800"})) == {"a": "\ud800"}
    assert read_object("[1]") is None and read_object("{") is None and read_object('{"a": Infinity}') is None
