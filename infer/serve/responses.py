"""Answers in OpenAI's form: a completion or a chat completion, whole or as server-sent events."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.engine import Alive, Job, Queued, Update
from laneformer.infer.serve.worker import Drafting, End, Named, Token
from laneformer.infer.serve.writing import Written, json_pieces
from laneformer.infer.text.channels import Part
from laneformer.infer.text.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"


class _Taken:
    """What has arrived of an answer without stream. The objects of each batch are released at once."""

    def __init__(self):
        self.text: list[str] = []
        self.thought: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, Written] = {}
        self.ids, self.timeline = Written(), Written()


class Answer:
    """The reply to one job."""

    def __init__(self, job: Job, model: str, fingerprint: str, index: int = 0, head: dict[str, Any] | None = None):
        """index: number of the choice. head: the fields that all choices share; None to make them."""
        self._job, self._call, self._index = job, job.call, index
        self._tokens, self._reasoning = 0, 0
        self._end: End | None = None
        self._offset = 0  # characters of text so far
        self._called = 0  # function calls so far
        self._taken = _Taken()
        kind = "chat.completion" if self._call.chat else "text_completion"
        if self._call.chat and self._call.stream:
            kind += ".chunk"
        self._head = head or {
            "id": ("chatcmpl-" if self._call.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._prefix = "data: " + json.dumps(self._head)[:-1] + f', "choices": [{{"index": {index}, '

    def opening(self) -> Iterator[bytes]:
        """Pieces of the event before the first token: the role in a chat, and the ids of the prompt if requested; none
        without either.
        """
        call = self._call
        if not call.chat and not call.return_token_ids:
            return
        prompt = {"prompt_token_ids": [*self._job.ids]} if call.return_token_ids else {}
        yield from self._event(self._choice("", {"role": "assistant", "content": ""}, logprobs=None), **prompt)

    def events(self, batch: Sequence[Update]) -> Iterator[bytes]:
        """Pieces of the events of a batch of updates: one for all its tokens, and those of calls and of the end."""
        yield from self._comments(batch)
        tokens = [update for update in batch if isinstance(update, Token)]
        if tokens:
            yield from self._tokens_event(tokens)
            yield from self._call_events([call for token in tokens for call in token.calls])
        if isinstance(batch[-1], ApiError):  # the status has been sent already; clients check each event for errors
            yield f"data: {json.dumps(batch[-1].body)}\n\n".encode()
        elif isinstance(batch[-1], End):
            yield from self._ending(batch[-1])

    def _comments(self, batch: Sequence[Update]) -> Iterator[bytes]:
        """Comments of the stream: the place in the queue, and keepalives."""
        for update in batch[-1:]:
            if isinstance(update, Queued):
                yield f": queued {update.position}\n\n".encode()
            elif isinstance(update, Alive):
                yield b": keepalive\n\n"

    def take(self, batch: Sequence[Update]) -> None:
        """Adds updates to an answer without stream."""
        taken, tokens = self._taken, [update for update in batch if isinstance(update, Token)]
        self._count(tokens)
        taken.text.append(_text(tokens))
        taken.thought.append(_text(tokens, Part.REASONING))
        for update in batch:
            if isinstance(update, Token | End):
                taken.calls += map(_call, update.calls)
        for name, items in (self._logprobs(tokens) or {}).items():
            taken.logprobs.setdefault(name, Written()).add(items)
        if self._call.return_token_ids:
            taken.ids.add([token.id for token in tokens])
        if self._call.return_timeline:
            taken.timeline.add(_timeline(tokens))
        if isinstance(batch[-1], End):
            self._end = batch[-1]
            taken.text.append(self._end.tail)

    @property
    def _ended(self) -> End:
        """The End of the answer, after it was taken."""
        if self._end is None:
            raise RuntimeError("the answer has not ended")
        return self._end

    def whole(self) -> dict[str, Any]:
        """The whole answer, after its End was taken. Its long lists are `Written`."""
        taken, end = self._taken, self._ended
        text, thought = "".join(taken.text), "".join(taken.thought)
        reasoning = {"reasoning_content": thought} if thought else {}
        message: dict[str, Any] = {"role": "assistant", **reasoning, "content": text or (None if taken.calls else "")}
        if taken.calls:
            message["tool_calls"] = taken.calls
        choice: dict[str, Any] = {
            "index": self._index,
            **({"message": message} if self._call.chat else {"text": text}),
            "logprobs": None if self._call.logprobs is None else taken.logprobs,
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,
        }
        prompt = {}
        if self._call.return_token_ids:
            choice["token_ids"], prompt = taken.ids, {"prompt_token_ids": [*self._job.ids]}
        if self._call.return_timeline:
            choice["timeline"] = taken.timeline
        return {**self._head, "choices": [choice], "usage": self._usage(), **prompt, **self._measured(end)}

    def _tokens_event(self, tokens: list[Token]) -> Iterator[bytes]:
        self._count(tokens)
        text, thought = _text(tokens), _text(tokens, Part.REASONING)
        call = self._call
        if call.logprobs is None and not call.return_token_ids and not call.return_timeline:
            if not text and not thought:
                return  # the text is held back: it is part of a character, or of a possible stop string
            body = f'"delta": {json.dumps(_delta(text, thought))}' if call.chat else f'"text": {json.dumps(text)}'
            rest = f'"logprobs": null, "finish_reason": null}}]{self._usage_field()}}}\n\n'
            yield f"{self._prefix}{body}, {rest}".encode()
            return
        choice = self._choice(text, _delta(text, thought), logprobs=self._logprobs(tokens))
        if call.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        if call.return_timeline:
            choice["timeline"] = _timeline(tokens)
        yield from self._event(choice)

    def _call_events(self, calls: Sequence[ToolCall]) -> Iterator[bytes]:
        """Two events for each call: one with its id and name, one with its arguments."""
        for call in calls:
            whole = _call(call)
            first = {"index": self._called, **whole, "function": {"name": call.name, "arguments": ""}}
            second = {"index": self._called, "function": {"arguments": call.arguments}}
            self._called += 1
            for delta in (first, second):
                yield from self._event(self._choice("", {"tool_calls": [delta]}, logprobs=None))

    def _ending(self, end: End) -> Iterator[bytes]:
        call, self._end = self._call, end
        if call.chat and end.tail:
            yield from self._event(self._choice(end.tail, _delta(end.tail), logprobs=None))
        yield from self._call_events(end.calls)
        yield from self._event(self._last(end), **({} if call.include_usage else self._measured(end)))
        yield from self._after(end)

    def _last(self, end: End) -> dict[str, Any]:
        """The content of the choice's final event."""
        return {
            "index": self._index,
            **({"delta": {}} if self._call.chat else {"text": end.tail}),
            "logprobs": None,
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,
        }

    def _after(self, end: End) -> Iterator[bytes]:
        """The events after the final event of the choice."""
        if self._call.include_usage:
            event = self._head | {"choices": [], "usage": self._usage()} | self._measured(end)
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield DONE

    def _choice(self, text: str, delta: dict[str, Any], logprobs: dict | None) -> dict[str, Any]:
        content = {"delta": delta} if self._call.chat else {"text": text}
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": None}

    def _event(self, choice: dict[str, Any], **more: Any) -> Iterator[bytes]:
        usage: dict[str, Any] = {"usage": None} if self._call.include_usage else {}
        if self._call.continuous_usage:
            usage = {"usage": self._usage()}
        yield b"data: "
        yield from json_pieces({**self._head, "choices": [choice], **more, **usage})
        yield b"\n\n"

    def _usage_field(self) -> str:
        if self._call.continuous_usage:
            return f', "usage": {json.dumps(self._usage())}'
        return ', "usage": null' if self._call.include_usage else ""

    def _usage(self) -> dict[str, Any]:
        prompt, tokens = len(self._job.ids), self._tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        details = {"reasoning_tokens": self._reasoning} if self._reasoning else {}
        if self._end is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._end.cached}
            details |= self._predicted(self._end)
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def _predicted(self, end: End) -> dict[str, int]:
        """Counts of the checked drafts from the request's `prediction`; {} without a prediction."""
        if not self._call.prediction:
            return {}
        drafted, right = (0, 0) if end.drafting is None else (end.drafting.predicted, end.drafting.predicted_accepted)
        return {"accepted_prediction_tokens": right, "rejected_prediction_tokens": drafted - right}

    def _count(self, tokens: Sequence[Token]) -> None:
        self._tokens += len(tokens)
        self._reasoning += sum(token.part in (Part.REASONING, Part.MARK) for token in tokens)

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        if self._call.chat:
            return {
                "content": [
                    {**_named(_name_of(token)), "top_logprobs": [_named(Named(*each)) for each in token.top]}
                    for token in tokens
                    if token.part is Part.CONTENT
                ]
            }
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        names = [_name_of(token) for token in tokens]
        return {
            "tokens": [_spelled(name.text) for name in names],
            "token_logprobs": [name.logprob for name in names],
            "top_logprobs": [{_spelled(text): logprob for text, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def _measured(self, end: End) -> dict[str, Any]:
        """Fields of the answer besides OpenAI's: warnings, if any; the seed, which reproduces the answer; llama.cpp's
        `timings` and vLLM's `metrics`, measured in the engine's process.
        """
        first, decoding = end.time_to_first_token, None
        if first is not None:
            decoding = end.total_time - first
        computed, rate = len(self._job.ids) - end.cached, 1 / end.time_per_token if end.time_per_token else None
        warnings = {"warnings": [*self._call.warnings]} if self._call.warnings else {}
        drafting = end.drafting
        return {
            **warnings,
            "seed": self._call.sampling["seed"],
            "timings": {
                "cache_n": end.cached,
                "prompt_n": computed,
                "prompt_ms": _ms(end.prefill_time),
                "prompt_per_second": computed / end.prefill_time if end.prefill_time else None,
                "predicted_n": end.tokens,
                "predicted_ms": _ms(decoding),
                "predicted_per_second": rate,
                "draft_n": 0 if drafting is None else drafting.drafted,
                "draft_n_accepted": 0 if drafting is None else sum(drafting.accepted),
            },
            "metrics": {
                "time_to_first_token_ms": _ms(first),
                "generation_time_ms": _ms(decoding),
                "queue_time_ms": _ms(self._job.waited),
                "mean_itl_ms": _ms(end.time_per_token),
                "tokens_per_second": rate,
                "shared_passes": end.shared_passes,
                "speculative_decoding": drafting and _speculative(drafting),
            },
        }


def _speculative(drafting: Drafting) -> dict[str, Any]:
    """The counts of passes and drafts of an answer."""
    return {
        "passes": drafting.passes,
        "tokens_per_pass": drafting.tokens_per_pass,
        "draft_tokens": drafting.drafted,
        "accepted_tokens": sum(drafting.accepted),
        "accepted_tokens_per_position": [*drafting.accepted],
    }


def _text(tokens: Sequence[Token], part: Part = Part.CONTENT) -> str:
    return "".join(token.text for token in tokens if token.part is part)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(text: str, thought: str = "") -> dict[str, str]:
    return {**({"reasoning_content": thought} if thought else {}), **({"content": text} if text or not thought else {})}


def _timeline(tokens: Sequence[Token]) -> list[list[str | float | int]]:
    """A row for each token: the text that became printable with it, its arrival in milliseconds since the engine
    started the request, 1 if it was a correct draft, and the number of other requests in its pass.
    """
    return [[token.text, round(1000 * token.time, 3), int(token.drafted), token.others] for token in tokens]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _name_of(token: Token) -> Named:
    """The token's name and log-probability, in an answer with log-probabilities."""
    if token.named is None:
        raise ValueError(f"token {token.id} has no log-probability")
    return token.named


def _named(named: Named) -> dict[str, Any]:
    return {"token": named.text.decode(errors="replace"), "logprob": named.logprob, "bytes": list(named.text)}


def _spelled(text: bytes) -> str:
    """The text of a token; in OpenAI's spelling if its bytes are only part of a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
