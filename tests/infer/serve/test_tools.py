"""Tools in chats over a real connection: definitions reach the template, and calls are returned in OpenAI's form."""

import contextlib
import json

import pytest

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.protocol import read_call
from laneformer.infer.text.chat_template import ChatTemplate
from tests.support.paths import ROOT
from tests.support.serve_cases import BACKEND, JSON, Server
from tests.support.serving.tool_model import ADD, ANSWER, CALLS, QUESTION, tool_model
from tests.support.serving.tool_templates import TEMPLATES, WEATHER

PATH = "/v1/chat/completions"
ASKED = {"messages": [QUESTION], "temperature": 0, "max_tokens": 200, "tools": [ADD, WEATHER]}
MADE = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
SMALL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [3, 5]}},
    "required": ["a", "b"], "additionalProperties": False}}}  # fmt: skip
FORCED = {"type": "function", "function": {"name": "add"}}
# Requests of clients and agents in whole sessions (docs/serving.md), recorded by a proxy, with shortened texts.
SESSIONS = json.loads((ROOT / "tests/support/serving/client_sessions.json").read_text(encoding="utf-8"))
HARMLESS = ("messages[1].provider_specific_fields has no effect",)


@pytest.fixture
def server(tool_server):
    return tool_server


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same model with a template that does not read tools."""
    server = Server(tool_model(tmp_path_factory.mktemp("checkpoints") / "plain", template=None), "--backend", BACKEND)
    yield server.wait_until(200)
    server.kill()


def ask(server, **fields):
    status, body = server.post(PATH, **fields)
    assert status == 200, body
    return body


def streamed(server, **fields):
    """The message that the deltas of a stream add up to, and its finish reason."""
    with server.stream(PATH, **fields) as stream:
        *chunks, done = stream
    assert done == "[DONE]"
    content, calls, seen = "", [], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        seen += [choice["finish_reason"]] if choice["finish_reason"] else []
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["arguments"] == ""
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    [reason] = seen
    return content, [(call["name"], call["arguments"]) for call in calls], reason


def without_id(calls):
    assert all(call["id"].startswith("call_") for call in calls)
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_whole_tool_loop_works(server):
    [choice] = ask(server, **ASKED)["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["role"], message["content"]) == ("tool_calls", "assistant", "I add.")
    assert without_id(message["tool_calls"]) == [MADE]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    [choice] = ask(server, **{**ASKED, "messages": [QUESTION, message, result]})["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"] == {"role": "assistant", "content": ANSWER}


def test_calls_are_streamed(server):
    assert streamed(server, **ASKED) == ("I add.", [("add", '{"a": 2, "b": 3}')], "tool_calls")
    usage = {"stream_options": {"include_usage": True}}
    with server.stream(PATH, **ASKED, **usage) as stream:
        *_, last, _ = stream
    assert last["usage"]["completion_tokens"] == ask(server, **ASKED)["usage"]["completion_tokens"]


def test_definitions_and_calls_reach_the_template(server, tool_checkpoint):
    call = {"id": "call_1", **MADE}
    talk = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]}]  # fmt: skip
    template = ChatTemplate.load(tool_checkpoint)
    for tools, given in (([ADD], [ADD]), ([], None)):
        body = ask(server, messages=talk, tools=tools, max_tokens=1, return_token_ids=True)
        made = {**call, "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        same = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [made]}, {**talk[2], "content": "5"}]
        assert body["prompt_token_ids"] == template.encode(same, add_generation_prompt=True, tools=given)
    none = ask(server, **{**ASKED, "tool_choice": "none"}, return_token_ids=True)
    assert none["choices"][0]["finish_reason"] == "stop" and "<tool_call>" in none["choices"][0]["message"]["content"]
    assert none["prompt_token_ids"] == template.encode([QUESTION], add_generation_prompt=True)


def test_required_call_begins_in_the_prompt(server, tool_checkpoint):
    template = ChatTemplate.load(tool_checkpoint)
    plain = template.encode([QUESTION], add_generation_prompt=True, tools=[ADD, WEATHER])
    for choice, opening in (
        ("required", '<tool_call>\n{"name":'),
        (FORCED, '<tool_call>\n{"name": "add", "arguments":'),
    ):
        body = ask(server, **{**ASKED, "max_tokens": 2}, tool_choice=choice, return_token_ids=True)
        assert body["prompt_token_ids"][: len(plain)] == plain
        assert template._tokenizer.decode(body["prompt_token_ids"][len(plain) :]) == opening
        [made] = body["choices"]
        assert made["message"]["content"].startswith(opening), "an answer without a call must stay content"
        assert made["finish_reason"] == "length"


def test_answer_ends_after_one_call_without_parallel_calls(server):
    body = ask(server, **ASKED, parallel_tool_calls=False)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and without_id(choice["message"]["tool_calls"]) == [MADE]
    assert body["usage"]["completion_tokens"] < ask(server, **ASKED)["usage"]["completion_tokens"]
    assert streamed(server, **ASKED, parallel_tool_calls=False)[1:] == ([("add", '{"a": 2, "b": 3}')], "tool_calls")


def test_truncated_call_stays_content(server):
    [choice] = ask(server, **{**ASKED, "max_tokens": 12})["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('I add.\n<tool_call>\n{"name')
    assert streamed(server, **{**ASKED, "max_tokens": 12})[:2] == (choice["message"]["content"], [])
    [choice] = ask(server, **ASKED, stop="arguments")["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].endswith('"add", "')


def test_tools_are_described_in_words_without_a_format(plain):
    body = ask(plain, **ASKED)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and without_id(choice["message"]["tool_calls"]) == [MADE]
    assert body["warnings"] == ["tools are described in words, because the chat template has no known tool format"]
    result = {"role": "tool", "tool_call_id": "x", "content": "5"}
    [choice] = ask(plain, **{**ASKED, "messages": [QUESTION, choice["message"], result]})["choices"]
    assert choice["message"]["content"] == ANSWER
    for wanted in ("required", FORCED):
        [choice] = ask(plain, **{**ASKED, "tools": [SMALL]}, tool_choice=wanted)["choices"]
        assert fits(choice["message"]["tool_calls"]) and choice["finish_reason"] == "tool_calls"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A model that reasons before it answers, with a template that reads `enable_thinking`."""
    source = TEMPLATES["hermes"].replace(
        "{% if add_gen", "{% if enable_thinking is false %}</think>{% endif %}{% if add_gen"
    )
    folder = tmp_path_factory.mktemp("checkpoints") / "thinking"
    server = Server(tool_model(folder, f"<think>Two of them.</think>\n\n{CALLS}", source), "--backend", BACKEND)
    yield server.wait_until(200)
    server.kill()


def test_reasoning_is_separate_from_content(thinking):
    body = ask(thinking, **ASKED)
    [choice] = body["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Two of them." and message["content"] == "I add."
    assert without_id(message["tool_calls"]) == [MADE] and choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2
    with thinking.stream(PATH, **ASKED) as stream:
        *chunks, _ = stream
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two of them."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    [choice] = ask(thinking, **{**ASKED, "messages": [QUESTION, message, result]})["choices"]
    assert choice["message"]["content"] == ANSWER and "reasoning_content" not in choice["message"]
    items = thinking.post("/v1/responses", input="What are 2 and 3?", temperature=0, max_output_tokens=200)[1]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]


def test_grammar_begins_after_the_reasoning(thinking):
    [choice] = ask(thinking, **{**ASKED, "tools": [SMALL]}, tool_choice="required")["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Two of them." and fits(message["tool_calls"])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL["function"]["parameters"]}}
    [choice] = ask(thinking, **{**ASKED, "tools": []}, response_format=form)["choices"]
    assert choice["message"]["reasoning_content"] == "Two of them." and json.loads(choice["message"]["content"])
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        body = ask(thinking, **{**ASKED, "tools": [SMALL]}, tool_choice="required", **off)
        assert fits(body["choices"][0]["message"]["tool_calls"]) and "warnings" not in body


def fits(calls):
    """Whether all calls are calls of SMALL with arguments that fit its schema."""
    jsonschema = pytest.importorskip("jsonschema")
    for call in calls:
        assert call["function"]["name"] == "add"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SMALL["function"]["parameters"])
    return bool(calls)


@pytest.mark.parametrize("choice", ["required", FORCED, "auto"])
def test_calls_fit_their_schema_streamed_or_not(server, choice):
    strict = {"type": "function", "function": {**SMALL["function"], "strict": True}}
    asked = {**ASKED, "tools": [strict], "tool_choice": choice, "temperature": 1.5, "top_p": 0.9, "presence_penalty": 1}
    for seed in range(3):
        [made] = ask(server, **asked, seed=seed)["choices"]
        message, called = made["message"], made["message"].get("tool_calls", [])
        assert fits(called) or choice == "auto" or made["finish_reason"] == "length"
        text, calls, reason = streamed(server, **asked, seed=seed)
        assert (text, reason) == (message["content"] or "", made["finish_reason"])
        assert calls == [(call["function"]["name"], call["function"]["arguments"]) for call in called]
        [cut] = ask(server, **asked, seed=seed, stop="a")["choices"]
        assert fits(cut["message"].get("tool_calls", [])) or cut["finish_reason"] in ("stop", "length")


def test_answer_is_a_call_or_follows_the_form(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL["function"]["parameters"]}}
    for fields in ({}, {"tool_choice": "required"}):
        [choice] = ask(server, **{**ASKED, "tools": [SMALL]}, **fields, response_format=form)["choices"]
        called = choice["message"].get("tool_calls")
        assert fits(called) if called else not fields and json.loads(choice["message"]["content"])


def test_unenforceable_schemas_are_refused_or_named(server):
    odd = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "not": {}}, "strict": True}}
    status, body = server.post(PATH, **{**ASKED, "tools": [odd]})
    assert status == 400 and body["error"]["param"] == "tools"
    assert body["error"]["message"].startswith(
        "tools[0].function.parameters cannot be enforced, which strict = true requires"
    )
    del odd["function"]["strict"]
    body = ask(server, **{**ASKED, "tools": [odd], "max_tokens": 60}, tool_choice="required")
    assert body["warnings"][0].startswith("tools[0].function.parameters is not enforced: ")


def test_openai_client_calls_a_tool(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tools", "temperature": 0, "max_tokens": 200, "tools": [ADD, WEATHER]}
        whole = client.chat.completions.create(messages=[QUESTION], **asked).choices[0].message
        [call] = whole.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        final_answer = client.chat.completions.create(messages=[QUESTION, whole, result], **asked).choices[0].message
        assert final_answer.content == ANSWER and final_answer.tool_calls is None
        with client.chat.completions.stream(messages=[QUESTION], **asked) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in events and final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.arguments == call.function.arguments


def last_chunk(text):
    """The JSON of the last event that contains an answer, of a chat or a response."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return json.loads(data[-1]), text.count('"tool_calls": [') + text.count('"type": "function_call"')


@pytest.mark.parametrize("client", list(SESSIONS))
def test_recorded_sessions_are_answered(server, client):
    for request in SESSIONS[client]:
        body = request["body"]
        status, answer, _ = server.send("POST", request["path"], json.dumps(body), JSON)
        assert status == 200, answer
        if isinstance(answer, str):
            answer, called = last_chunk(answer)
            text = ""
        else:
            text = json.dumps(answer)
            called = text.count('"type": "function"') if "choices" in answer else text.count('"type": "function_call"')
        assert set(answer.get("warnings", ())) <= {*HARMLESS}, answer["warnings"]
        history = body.get("messages") or body["input"]
        last = history[-1] if isinstance(history, list) else {}
        is_result = last.get("role") == "tool" or last.get("type") == "function_call_output"
        cut_off = body.get("max_completion_tokens", 99) < 20
        assert bool(called) == ("tools" in body and not is_result and not cut_off), (client, request, answer)
        assert not (is_result and text) or ANSWER in text


def test_sessions_name_the_versions_of_the_documentation():
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    assert [client for client in SESSIONS if f"| {client} |" not in page] == []


CHAT = {"messages": [QUESTION]}
MESSAGE = {"role": "assistant", "tool_calls": [{"id": "a", **MADE}]}


def test_tools_are_read():
    bare = {"type": "function", "function": {"name": "f", "strict": True, "description": None}}
    call = read_call({**CHAT, "tools": [bare, {**ADD, "cache_control": {}}], "parallel_tool_calls": False}, chat=True)
    assert call.tools.tools[0]["function"] == {
        "name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    assert call.tools.tools[1] == ADD
    assert (call.tools.required, call.tools.name, call.tools.parallel) == (False, None, False)
    assert call.tools.strict == {"f"} and call.tools.strict_path == "tools[0].function.strict"
    assert call.warnings == ("tools[1].cache_control has no effect",)
    for choice, read in (
        ("auto", (False, None, True)),
        ("required", (True, None, True)),
        (FORCED, (True, "add", False)),
    ):
        tools = read_call({**CHAT, "tools": [ADD], "tool_choice": choice}, chat=True).tools
        assert (tools.required, tools.name, tools.parallel) == read
    for fields in ({"tools": []}, {"tools": None}, {"tools": [ADD], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert read_call({**CHAT, **fields}, chat=True).tools is None
    assert read_call({"prompt": "a", "tools": [], "tool_choice": "none"}, chat=False).tools is None


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"tools": "f"}, "tools", "a list of up to 512 tools"),
    ({"tools": [5]}, "tools[0]", "give an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "the only tools are functions"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "give an object"),
    ({"tools": [{**ADD, "more": 1}]}, "tools[0].more", "is not supported"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 64 letters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters",
     "a JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools[0].function.description",
     "a string"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict",
     "true or false"),
    ({"tools": [ADD, ADD]}, "tools", "function add twice"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", '"none", "auto", "required"'),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "function f"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "give"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [ADD], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"messages": [{**MESSAGE, "tool_calls": "x"}]}, "messages[0].tool_calls", "a list of calls"),
    ({"messages": [{**MESSAGE, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]", "give a call"),
    ({"messages": [{**MESSAGE, "tool_calls": [{**MADE, "id": 5}]}]}, "messages[0].tool_calls[0].id", "give a string"),
    ({"messages": [{**MESSAGE, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "a JSON object"),
])  # fmt: skip
def test_bad_tools_name_the_parameter(fields, param, message):
    with pytest.raises(ApiError) as caught:
        read_call({**CHAT, **fields}, chat=True)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["param"] == param and message in error["message"]


def test_no_field_value_causes_a_server_error():
    odd = ("", "x", 0, -1, 0.5, True, [], {}, [[]], [{}], {"a": {}}, {"name": "f"}, {"type": "function"})
    for name in ("type", "function", "other", "strict"):
        for value in odd:
            with contextlib.suppress(ApiError):
                read_call({**CHAT, "tools": [{**ADD, name: value}], "tool_choice": value}, chat=True)
    for name in ("name", "description", "parameters", "strict", "other"):
        for value in odd:
            with contextlib.suppress(ApiError):
                tool = {"type": "function", "function": {**ADD["function"], name: value}}
                read_call({**CHAT, "tools": [tool], "parallel_tool_calls": value}, chat=True)
    for name in ("id", "type", "function", "index", "other"):
        for value in odd:
            with contextlib.suppress(ApiError):
                read_call({"messages": [{**MESSAGE, "tool_calls": [{**MADE, name: value}]}]}, chat=True)
            with contextlib.suppress(ApiError):
                made = {**MADE, "function": {**MADE["function"], name: value, "arguments": value}}
                read_call({"messages": [{**MESSAGE, "tool_calls": [made]}]}, chat=True)


def test_calls_in_messages_are_read():
    call = read_call(
        {"messages": [QUESTION, {**MESSAGE, "content": None}, {"role": "tool", "content": "5"}]}, chat=True
    )
    made = call.prompt[1]["tool_calls"]
    assert made == [{"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]
    empty = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}, "index": 0}]}
    call = read_call({"messages": [empty]}, chat=True)
    assert call.prompt[0]["tool_calls"][0]["function"]["arguments"] == {}
