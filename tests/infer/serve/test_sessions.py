"""What clients and agents sent in a whole session, as recorded by a proxy, with its texts cut short: every request is
answered, as it was. The sessions are those of docs/serving.md: a question, calls of tools, their results.
"""

import json

import pytest

from tests.support.paths import ROOT
from tests.support.serve_cases import BACKEND, JSON, Server
from tests.support.serving.tool_model import ANSWER, tool_model

SESSIONS = json.loads((ROOT / "tests/support/serving/client_sessions.json").read_text(encoding="utf-8"))
HARMLESS = ("messages[1].provider_specific_fields has no effect", "tools[0].function.strict has no effect")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = tool_model(tmp_path_factory.mktemp("checkpoints") / "tools")
    server = Server(checkpoint, "--backend", BACKEND, "--any-model-name")
    yield server.wait_until(200)
    server.kill()


def last_chunk(text):
    """The JSON of the last event that has an answer, of a chat or a response."""
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
