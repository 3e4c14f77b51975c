"""Answers in the form of OpenAI's Responses API: items of output, whole or as numbered events. The last event contains
the whole answer.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.engine import Job, Update
from laneformer.infer.serve.item_requests import Asked
from laneformer.infer.serve.responses import Answer
from laneformer.infer.serve.worker import End, Token
from laneformer.infer.serve.writing import Written, json_pieces
from laneformer.infer.text.channels import Part
from laneformer.infer.text.tool_calls import ToolCall

KINDS = {Part.CONTENT: ("message", "output_text", "msg_"), Part.REASONING: ("reasoning", "reasoning_text", "rs_")}


class ItemAnswer(Answer):
    """The reply to one job, in the form of the Responses API."""

    def __init__(self, job: Job, model: str, fingerprint: str, asked: Asked):
        super().__init__(job, model, fingerprint)
        self._asked, self._sent = asked, 0
        self._output: list[dict[str, Any]] = []
        self._open: Part | None = None  # part of the last item while the item is growing
        self._id = f"resp_{secrets.token_hex(12)}"
        self._last_response: dict[str, Any] = {}

    def opening(self) -> Iterator[bytes]:
        for state in ("created", "in_progress"):
            yield from self._sse(f"response.{state}", response=self._response("in_progress"))

    def events(self, batch: Sequence[Update]) -> Iterator[bytes]:
        yield from self._comments(batch)
        tokens = [update for update in batch if isinstance(update, Token)]
        self._count(tokens)
        for (part, calls), group in groupby(tokens, lambda token: (token.part, token.calls)):
            yield from self._grow(part, list(group), calls)
        if isinstance(batch[-1], ApiError):
            error = batch[-1].body["error"]
            failure = {"code": error["code"] or error["type"], "message": error["message"]}
            yield from self._sse("response.failed", response=self._response("failed", error=failure))
        elif isinstance(batch[-1], End):
            yield from self._ending(batch[-1])

    def take(self, batch: Sequence[Update]) -> None:
        for _ in self.events(batch):  # which are not written without stream
            pass

    def whole(self) -> dict[str, Any]:
        return self._last_response

    def _grow(self, part: Part, tokens: list[Token], calls: tuple[ToolCall, ...]) -> Iterator[bytes]:
        """The events of consecutive tokens of one part. calls: the calls that the last of them completed."""
        text = "".join(token.text for token in tokens)
        shown = part is Part.CONTENT and self._call.logprobs is not None
        if part in KINDS and (text or (shown and self._open is part)):
            logprobs = self._logprobs(tokens) if shown else None
            yield from self._add_text(part, text, Written(logprobs["content"] if logprobs else []))
        for call in calls:
            yield from self._add_call(call)

    def _add_text(self, part: Part, text: str, logprobs: Written) -> Iterator[bytes]:
        """Appends text to the growing item, or to a new item if the part has changed; yields the events."""
        kind, piece, prefix = KINDS[part]
        if self._open is not part:
            yield from self._close()
            rest: dict[str, Any] = {"role": "assistant"} if part is Part.CONTENT else {"summary": []}
            number = prefix + secrets.token_hex(12)
            item = {"id": number, "type": kind, "status": "in_progress", "content": [], **rest}
            self._output.append(item)
            self._open = part
            yield from self._item_event("added")
            content: dict[str, Any] = {"type": piece, "text": ""}
            content |= {"annotations": [], "logprobs": Written()} if part is Part.CONTENT else {}
            yield from self._part_event("response.content_part.added", part=content)
            item["content"].append(content)
        [content] = self._output[-1]["content"]
        content["text"] += text
        more = {}
        if part is Part.CONTENT:
            content["logprobs"].add(logprobs)
            more = {"logprobs": logprobs}
        yield from self._part_event(f"response.{piece}.delta", delta=text, **more)

    def _add_call(self, call: ToolCall) -> Iterator[bytes]:
        """Appends an item for a call; yields its events."""
        yield from self._close()
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self._output.append(item)
        yield from self._item_event("added")
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        kind = "response.function_call_arguments"
        yield from self._sse(f"{kind}.delta", **place, delta=call.arguments)
        yield from self._sse(f"{kind}.done", **place, name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield from self._item_event("done")

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """Ends the growing item, if there is one; yields its events."""
        if self._open is None:
            return
        item, (_, piece, _) = self._output[-1], KINDS[self._open]
        [content] = item["content"]
        more = {"logprobs": content["logprobs"]} if self._open is Part.CONTENT else {}
        yield from self._part_event(f"response.{piece}.done", text=content["text"], **more)
        yield from self._part_event("response.content_part.done", part=content)
        item["status"], self._open = status, None
        yield from self._item_event("done")

    def _ending(self, end: End) -> Iterator[bytes]:
        self._end = end
        if end.tail or not (self._output or end.calls):
            yield from self._add_text(Part.CONTENT, end.tail, Written())
        for call in end.calls:
            yield from self._add_call(call)
        status = "incomplete" if end.reason == "length" else "completed"
        yield from self._close(status)
        why = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        usage = self._usage()
        more = {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": end.cached},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning},
                "total_tokens": usage["total_tokens"],
            }
        }
        self._last_response = self._response(status, **why, **more, **self._measured(end))
        yield from self._sse(f"response.{status}", response=self._last_response)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response object in its current state. more: fields to add or replace."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "output": self._output,
            **self._asked.repeated,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _item_event(self, what: str) -> Iterator[bytes]:
        place = {"output_index": len(self._output) - 1, "item": self._output[-1]}
        return self._sse(f"response.output_item.{what}", **place)

    def _part_event(self, kind: str, **more: Any) -> Iterator[bytes]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._sse(kind, **place, **more)

    def _sse(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Pieces of an event; none in an answer without stream."""
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        if self._call.stream:
            yield f"event: {kind}\ndata: ".encode()
            yield from json_pieces(event)
            yield b"\n\n"
