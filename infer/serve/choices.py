"""Several answers to one request (`n`): choice i is the answer to the same request with seed + i."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.engine import Job, Update
from laneformer.infer.serve.protocol import Call
from laneformer.infer.serve.responses import DONE, Answer
from laneformer.infer.serve.worker import End

SEEDS = 1 << 64


def calls_of(call: Call) -> list[Call]:
    """The requests for the choices of a request, one each."""
    seed = call.sampling["seed"]
    seeds = [seed, *((seed + i) % SEEDS for i in range(1, call.n))]  # the first is not reduced: the engine checks it
    return [replace(call, n=1, sampling={**call.sampling, "seed": each}) for each in seeds]


async def updates_of(jobs: Sequence[Job], interval: float = 0.0) -> AsyncIterator[tuple[int, list[Update]]]:
    """Yields (number of the job, batch of its updates) as batches arrive; other tasks run after each. interval: see
    `Job.updates`.
    """
    if len(jobs) == 1:
        async for batch in jobs[0].updates(interval):
            yield 0, batch
            await asyncio.sleep(0)
        return
    ready: asyncio.Queue[tuple[int, list[Update]]] = asyncio.Queue()

    async def forward(i: int, job: Job) -> None:
        async for batch in job.updates(interval):
            ready.put_nowait((i, batch))

    tasks = [asyncio.create_task(forward(i, job)) for i, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            i, batch = await ready.get()
            yield i, batch
            await asyncio.sleep(0)
            left -= isinstance(batch[-1], End | ApiError)
    finally:
        for task in tasks:
            task.cancel()


class Single(NamedTuple):
    """The reply to the one job of a request."""

    answer: Answer

    def opening(self) -> Iterator[bytes]:
        return self.answer.opening()

    def events(self, i: int, batch: Sequence[Update]) -> Iterator[bytes]:
        return self.answer.events(batch)

    def take(self, i: int, batch: Sequence[Update]) -> None:
        self.answer.take(batch)

    def whole(self) -> dict[str, Any]:
        return self.answer.whole()


class Choice(Answer):
    """One of several answers. It reports the usage of all choices together, and its own measurements in the choice."""

    def __init__(self, job: Job, model: str, fingerprint: str, index: int, others: "list[Choice]"):
        """others: the choices of the request made so far; this one is appended."""
        super().__init__(job, model, fingerprint, index, others[0]._head if others else None)
        self._others = others
        others.append(self)

    def _usage(self) -> dict[str, Any]:
        own = [Answer._usage(other) for other in self._others]
        prompt, tokens = own[0]["prompt_tokens"], sum(each["completion_tokens"] for each in own)
        usage = own[0] | {"completion_tokens": tokens, "total_tokens": prompt + tokens}
        details: Counter[str] = Counter()
        for each in own:
            details.update(each.get("completion_tokens_details", {}))
        return usage | ({"completion_tokens_details": dict(details)} if details else {})

    def _measured(self, end: End) -> dict[str, Any]:
        return {}

    def measured(self) -> dict[str, Any]:
        """The seed and the measurements of this choice, which has ended."""
        measured = Answer._measured(self, self._ended)
        measured.pop("warnings", None)
        return measured

    def _last(self, end: End) -> dict[str, Any]:
        return super()._last(end) | self.measured()

    def _after(self, end: End) -> Iterator[bytes]:
        return iter(())


class Choices:
    """The reply to the jobs of one request."""

    def __init__(self, jobs: Sequence[Job], model: str, fingerprint: str):
        self._choices: list[Choice] = []
        for i, job in enumerate(jobs):
            Choice(job, model, fingerprint, i, self._choices)
        self._call, self._left = jobs[0].call, len(jobs)

    def opening(self) -> Iterator[bytes]:
        for choice in self._choices:
            yield from choice.opening()

    def events(self, i: int, batch: Sequence[Update]) -> Iterator[bytes]:
        """Pieces of the events of a batch of updates of choice i. After the end of the last choice, also of the final
        events of the whole answer.
        """
        yield from self._choices[i].events(batch)
        if not isinstance(batch[-1], End):
            return
        self._left -= 1
        if self._left:
            return
        warnings = {"warnings": [*self._call.warnings]} if self._call.warnings else {}
        if self._call.include_usage or warnings:
            usage = {"usage": self._choices[0]._usage()} if self._call.include_usage else {}
            yield f"data: {json.dumps({**self._choices[0]._head, 'choices': [], **usage, **warnings})}\n\n".encode()
        yield DONE

    def take(self, i: int, batch: Sequence[Update]) -> None:
        """Adds updates of choice i to an answer without stream."""
        self._choices[i].take(batch)

    def whole(self) -> dict[str, Any]:
        """The whole answer; see `Answer.whole`."""
        wholes = [choice.whole() for choice in self._choices]
        choices = [
            {**whole["choices"][0], **choice.measured()} for whole, choice in zip(wholes, self._choices, strict=True)
        ]
        warnings = {"warnings": [*self._call.warnings]} if self._call.warnings else {}
        return {**wholes[0], "choices": choices, "usage": self._choices[0]._usage(), **warnings}
