"""/v1/responses: items of input become a chat, and the answer becomes items of output, whole and as events."""

import contextlib
import json

import pytest

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.item_requests import read_items
from laneformer.infer.serve.protocol import read_call
from tests.support.serve_cases import JSON
from tests.support.serving.tool_model import ADD, ANSWER, QUESTION

PATH = "/v1/responses"
TOOL = {"type": "function", **ADD["function"], "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 2, "b": 3}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "5"}
ASKED = {"input": QUESTION["content"], "temperature": 0, "max_output_tokens": 200, "tools": [TOOL]}


@pytest.fixture
def server(tool_server):
    return tool_server


def ask(server, **fields):
    status, body = server.post(PATH, **fields)
    assert status == 200, body
    return body


def streamed(server, **fields):
    """The events of a stream. Checks that the names and numbers of the events agree with their data."""
    connection, response = server.connect("POST", PATH, json.dumps({**fields, "stream": True}), JSON)
    with contextlib.closing(connection), response:
        assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in response.read().decode().split("\n\n") if block and not block.startswith(":")]
    found = []
    for n, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == n
        found.append(event)
    return found


def plain(response):
    """A response without the fields that differ between equal requests."""
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in
              response["output"]]  # fmt: skip
    kept = (
        "object",
        "status",
        "model",
        "instructions",
        "tools",
        "max_output_tokens",
        "incomplete_details",
        "temperature",
    )
    usage = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    return {"output": output, "usage": usage, **{name: response[name] for name in kept}}


def rebuilt(events):
    """The output that events describe: items from their deltas. Checks that the final events of each item agree with
    them.
    """
    output = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]
        if kind == "content_part.added":
            output[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            output[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            output[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert output[-1]["content"][0]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert output[-1]["arguments"] == event["arguments"] and output[-1]["name"] == event["name"]
        elif kind == "output_item.done":
            assert {**output[-1], "status": event["item"]["status"]} == event["item"]
            output[-1] = event["item"]
    return output


def test_whole_tool_loop_works(server):
    body = ask(server, **ASKED)
    message, call = body["output"]
    assert (body["object"], body["status"], body["error"], body["store"]) == ("response", "completed", None, False)
    assert message["type"] == "message" and message["content"][0]["text"] == "I add."
    assert {name: call[name] for name in ("type", "name", "arguments")} == {
        name: CALL[name] for name in ("type", "name", "arguments")
    }
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] > 9
    result = {**RESULT, "call_id": call["call_id"]}
    body = ask(server, **{**ASKED, "input": [QUESTION, message, call, result]})
    [message] = body["output"]
    assert message["content"][0]["text"] == ANSWER and "warnings" not in body, "strict must be enforced"


@pytest.mark.parametrize("fields", [
    ASKED, {**ASKED, "max_output_tokens": 12}, {**ASKED, "tools": []},
    {**ASKED, "input": [QUESTION, CALL, RESULT], "instructions": "Be brief."},
])  # fmt: skip
def test_events_make_the_whole_answer(server, fields):
    whole = ask(server, **fields)
    events = streamed(server, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}" and plain(last["response"]) == plain(whole)
    assert rebuilt(events) == last["response"]["output"]
    *before, final = (item["status"] for item in last["response"]["output"])
    assert final == whole["status"] and set(before) <= {"completed"}
    kinds = [event["type"] for event in events]
    for kind in ("output_item", "content_part"):
        assert kinds.count(f"response.{kind}.added") == kinds.count(f"response.{kind}.done") > 0
    assert whole["status"] == ("incomplete" if fields["max_output_tokens"] == 12 else "completed")
    assert whole["incomplete_details"] == (
        {"reason": "max_output_tokens"} if fields["max_output_tokens"] == 12 else None
    )
    assert events[0]["response"]["id"] == last["response"]["id"] and events[0]["response"]["output"] == []


def test_log_probabilities_are_included(server):
    fields = {**ASKED, "tools": [], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(server, **fields)["output"][0]["content"][0]
    assert "".join(each["token"] for each in whole["logprobs"]) == whole["text"]
    assert all(len(each["top_logprobs"]) == 2 for each in whole["logprobs"])
    events = streamed(server, **fields)
    deltas = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert deltas == whole["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]


def test_reasoning_is_an_item(thinking_server):
    fields = {"input": "Is it?", "max_output_tokens": 14, "temperature": 0}
    whole, events = ask(thinking_server, **fields), streamed(thinking_server, **fields)
    assert plain(events[-1]["response"]) == plain(whole) and rebuilt(events) == events[-1]["response"]["output"]
    thought, said = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Why"}])
    assert said["content"][0]["text"] == "Why"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 11}
    again = ask(thinking_server, **{**fields, "input": [QUESTION, thought, said, QUESTION]})
    assert again["output"][1]["content"][0]["text"] == "Why"


def test_errors_name_the_parameter(server, small_server):
    for fields, param in (
        ({"input": "a" * 30000}, "input"),
        ({"input": "a", "top_p": 2}, "top_p"),
        ({"input": "a", "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        status, body = server.post(PATH, **fields)
        assert status in (400, 404) and body["error"]["param"] == param, body
    status, body = small_server.post(PATH, input="a", model="gpt")  # the other server answers to any name
    assert status == 404 and body["error"]["param"] == "model", body
    status, body = server.post("/v1/embeddings", input="a", model="tools")
    assert status == 400 and body["error"]["message"].startswith("/v1/embeddings is not supported")
    deep = '{"input": [{"role": "user", "content": ' + "[" * 990 + "]" * 990 + "}]}"
    assert server.send("POST", PATH, deep, JSON)[0] == 400


def test_openai_client_gets_responses(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tools", "temperature": 0, "max_output_tokens": 200, "tools": [TOOL]}
        whole = client.responses.create(input=[QUESTION], instructions="Be brief.", **asked)
        assert whole.output_text == "I add." and whole.output[1].arguments == CALL["arguments"]
        talk = [QUESTION, *whole.output, {**RESULT, "call_id": whole.output[1].call_id}]
        assert client.responses.create(input=talk, **asked).output_text == ANSWER
        with client.responses.stream(input=[QUESTION], **asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert final.output_text == "I add." and final.usage.total_tokens > 0
        assert "response.function_call_arguments.done" in {event.type for event in events}
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(input="a", model="tools", previous_response_id=whole.id)
        with pytest.raises(openai.BadRequestError, match="not supported: this server generates text"):
            client.embeddings.create(input="a", model="tools")


def call(**fields):
    return read_call(read_items({"input": "hi", **fields}).chat, chat=True)


def test_items_become_messages():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
    made = call(
        instructions="Be brief.",
        input=[{"role": "developer", "content": parts}, QUESTION, thought, said, CALL, {**CALL, "call_id": "call_2"},
               RESULT, {**RESULT, "call_id": "call_2", "output": parts}, CALL],
    )  # fmt: skip
    one, two = ({"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
                for n in (1, 2))  # fmt: skip
    assert made.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "a\nb"},
        QUESTION,
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [one, two]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "tool", "tool_call_id": "call_2", "content": "a\nb"},
        {"role": "assistant", "tool_calls": [one]},
    ]
    assert made.chat and made.max_tokens is None and made.tools is None


def test_parameters_are_read():
    made = call(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=5,
        top_p=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        top_k=3,
        stream=True,
        parallel_tool_calls=False,
    )
    assert made.tools.tools == (ADD,) and made.tools.name == "add" and made.max_tokens == 5 and made.stream
    assert made.sampling["top_p"] == 0.5 and made.sampling["top_k"] == 3 and made.logprobs is None
    assert made.template_values == {"reasoning_effort": "low"} and made.warnings == ("reasoning.summary has no effect",)
    assert call(top_logprobs=3).logprobs == 3 and call(include=["message.output_text.logprobs"]).logprobs == 0
    ignored = {"store": True, "truncation": "auto", "text": {"verbosity": "low", "format": {"type": "text"}},
               "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}  # fmt: skip
    asked = read_items({"input": "hi", **ignored})
    named = [*asked.ignored, *(line.split(" ")[0] for line in read_call(asked.chat, chat=True).warnings)]
    assert sorted(named) == [
        "include: reasoning.encrypted_content",
        "metadata",
        "store",
        "text.verbosity",
        "truncation",
    ]
    neutral = {"background": False, "store": None, "truncation": "disabled", "include": [], "text": {}, "tools": []}
    asked = read_items({"input": "hi", **neutral})
    assert asked.ignored == [] and read_call(asked.chat, chat=True).warnings == ()


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"input": []}, "input", "a list of at least one item"),
    ({"input": None}, "input", "a list of at least one item"),
    ({"input": [5]}, "input[0]", "give an item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "not supported"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "user, assistant"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "parts of type"),
    ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments", "a JSON object"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "a string"),
    ({"input": [{**RESULT, "output": 5}]}, "input[0].output", "a string"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input", "at least one message"),
    ({"instructions": 5}, "instructions", "a string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_tokens": 5}, "max_tokens", "unknown parameter"),
    ({"messages": []}, "messages", "unknown parameter"),
    ({"background": True}, "background", "not supported"),
    ({"conversation": "x"}, "conversation", "keeps no conversations"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.json_schema.schema", "a JSON schema"),
    ({"text": "x"}, "text", "give an object"),
    ({"include": ["web_search_call.action.sources"]}, "include", "not supported"),
    ({"include": "x"}, "include", "give a list"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "the only tools are functions"),
    ({"tools": "x"}, "tools", "a list of tools"),
    ({"tools": [5]}, "tools[0]", "give an object"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "give"),
    ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
    ({"temprature": 1}, "temprature", "unknown parameter"),
])  # fmt: skip
def test_bad_requests_name_the_parameter(fields, param, message):
    with pytest.raises(ApiError) as caught:
        call(**fields)
    error = caught.value.body["error"]
    assert caught.value.status == 400 and error["param"] == param and message in error["message"]


def test_no_field_value_causes_a_server_error():
    odd = ("", "x", 0, -1, 1, 0.5, True, False, [], {}, [[]], [{}], {"a": {}}, [{"type": "function"}], [5])
    names = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs",
             "reasoning", "truncation", "store", "metadata", "parallel_tool_calls", "stream", "unknown")  # fmt: skip
    for name in names:
        for value in odd:
            with contextlib.suppress(ApiError):
                call(**{name: value})
    for kind in ("message", "function_call", "function_call_output", "reasoning"):
        for name in ("role", "content", "output", "arguments", "name", "call_id", "summary"):
            for value in odd:
                with contextlib.suppress(ApiError):
                    call(input=[{"role": "user", "content": "x", **CALL, "type": kind, name: value}])
