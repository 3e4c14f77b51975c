"""Long answers are written in pieces, between which the event loop serves other clients."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from laneformer.infer.serve.engine import Job
from laneformer.infer.serve.item_answers import ItemAnswer
from laneformer.infer.serve.item_requests import read_items
from laneformer.infer.serve.protocol import read_call
from laneformer.infer.serve.responses import Answer
from laneformer.infer.serve.worker import End, Named, Token
from laneformer.infer.serve.writing import PART_BYTES, Written, json_pieces, parts_of
from laneformer.infer.text.channels import Part

LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=25)
@given(st.recursive(LEAVES,
                    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_pieces_are_the_usual_json(value):
    assert b"".join(json_pieces(value, ascii_only=False)) == JSONResponse(value).body
    assert b"".join(json_pieces(value)) == json.dumps(value).encode()


def test_long_and_deep_values_are_written():
    deep = []
    for _ in range(900):
        deep = [deep]
    value = {"ids": [*range(1000)], "mixed": [1, {"a": []}, *[[n] for n in range(600)]], "deep": deep}
    assert json.loads(b"".join(json_pieces(value))) == value


def test_written_lists_are_equal_to_the_lists():
    items = [{"a": ["é", None]}, 1.5, [], "x"] * 3
    written = Written(items[:5])
    written.add([])
    written.add(Written(items[5:]))
    assert json.loads(b"".join(json_pieces({"x": Written(), "y": written}))) == {"x": [], "y": items}


TOKENS, TOP = 1_500, 20
FORMS = {
    "completion": ({"prompt": "a", "logprobs": TOP}, False),
    "chat": ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": TOP}, True),
    "response": ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": TOP}, True),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_other_tasks_run_while_a_long_answer_is_written(form, stream):
    """30,000 log-probabilities. Without turns, the final events of a response took 0.1 s and the answer 0.3 s."""
    fields, chat = FORMS[form]
    asked = read_items({**fields, "stream": stream}) if form == "response" else None
    call = read_call({**fields, "stream": stream} if asked is None else asked.chat, chat=chat)
    job = Job(1, call, SimpleNamespace(ids=[1]), "", 0.0, None)
    job.started = 0.0
    top = tuple((b"word%d" % n, -1.5 - n) for n in range(TOP))
    for n in range(TOKENS):
        job.put(Token(n, "é\n", 0.1 * n, Named("é\n".encode(), -0.5), top, Part.CONTENT))
    job.put(End("length", None, "", (), TOKENS, 0, 0, 0.1, 0.1, 0.1, 1.0, None))
    answer = Answer(job, "m", "f") if asked is None else ItemAnswer(job, "m", "f", asked)
    longest, done = 0.0, False

    async def others():
        """Measures the processor time of the longest turn of the event loop."""
        nonlocal longest
        while not done:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async def write():
        nonlocal done
        parts = []
        async for batch in job.updates():
            if stream:
                parts += [part async for part in parts_of(answer.events(batch))]
            else:
                answer.take(batch)
            await asyncio.sleep(0)
        if not stream:
            parts = [part async for part in parts_of(json_pieces(answer.whole()))]
        done = True
        return parts

    async def both():
        return (await asyncio.gather(others(), write()))[1]

    parts = asyncio.run(both())
    whole = b"".join(parts)
    assert longest < 0.05, longest
    assert max(map(len, parts)) < 2 * PART_BYTES and len(whole) > TOKENS * TOP * 10
    if not stream:
        made = json.loads(whole)
        found = {
            "completion": lambda: made["choices"][0]["logprobs"]["top_logprobs"],
            "chat": lambda: made["choices"][0]["logprobs"]["content"],
            "response": lambda: made["output"][0]["content"][0]["logprobs"],
        }[form]()
        assert len(found) == TOKENS
