"""The web process's side of the engine process: starts it, queues requests, distributes the results, and restarts it
after a crash.
"""

import asyncio
import logging
import re
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from laneformer.infer.serve.body import NESTED, ApiError
from laneformer.infer.serve.grammars import FIELDS
from laneformer.infer.serve.metrics import Metrics, TokenTimes
from laneformer.infer.serve.processes.log import say
from laneformer.infer.serve.processes.run import PATIENCE_SECONDS, EngineRun
from laneformer.infer.serve.processes.scarcity import is_scarcity, scarce
from laneformer.infer.serve.protocol import Call
from laneformer.infer.serve.worker import Encoded, End, Order, Question, ServedModel, Token

log = logging.getLogger("laneformer")

KEEPALIVE_SECONDS = 15.0  # proxies close a connection that is silent for longer
PING_SECONDS = 1.0  # time between two questions to the engine process, which it answers at once
SILENT_SECONDS = 10.0  # time without an answer after which the server accepts no requests
STUCK_SECONDS = 60.0  # the same, for all running requests to end once they are cancelled
STEADY_SECONDS = 60.0  # a crash after this time, or after an answer, is not one of a row
MOST_CRASHES = 5  # in a row before the server ends
LONGEST_PAUSE = 30.0  # seconds before a restart
MOST_TOGETHER = 256  # tokens and log-probabilities of a job handled at once, when a client reads slowly: 2 ms
MOST_PASSES = 10_000  # of an answer, each of which takes 1 us to count; more are counted on a thread
LONG_PROMPT = 1 << 14  # tokens; of several requests that run together, one has a shorter prompt
MOST_UNSENT = 1 << 24  # bytes that the engine process has not taken, beyond which the server accepts no requests


class Limits(NamedTuple):
    """Limits of a server."""

    waiting: int
    """Maximum number of requests in the queue."""
    seconds: float
    """Maximum seconds for a request, including its time in the queue."""
    tokens_per_dispatch: int | None
    """Number of tokens after which a cancellation is noticed; None lets the backend choose."""


class Queued(NamedTuple):
    """A job's place in the queue."""

    position: int
    """Number of requests before this one, including running ones."""


class Alive(NamedTuple):
    """An update without news, which keeps the connection open."""


Update = Token | End | ApiError | Queued | Alive


class Job:
    """An accepted request and its updates."""

    def __init__(self, number: int, call: Call, order: Order, client: str, arrived: float, times: TokenTimes):
        """client: who sent the request. arrived: the time then."""
        self.number, self.call, self.ids, self.order = number, call, order.ids, order
        self.client, self.arrived, self.times = client, arrived, times
        self.round = 0
        """Place among the client's jobs: clients take turns in rounds."""
        self.started: float | None = None
        self.tokens = 0  # number of tokens drawn so far
        self.ended = asyncio.Event()
        self.left: float | None = None
        """Time at which the job ended for its client."""
        self.timers: list[asyncio.TimerHandle] = []
        self._most = max(1, MOST_TOGETHER // (1 + (call.logprobs or 0)))  # updates in a batch
        self._inbox: deque[Update] = deque()
        self._news = asyncio.Event()

    @property
    def waited(self) -> float:
        """Seconds in the queue; 0 before the job has started."""
        return 0.0 if self.started is None else self.started - self.arrived

    def put(self, update: Update) -> None:
        """Adds an update. An End or ApiError ends the job; later updates are dropped."""
        if self.ended.is_set():
            return
        self._inbox.append(update)
        self._news.set()
        if isinstance(update, End | ApiError):
            self.ended.set()
            self.left = time.perf_counter()
            for timer in self.timers:
                timer.cancel()

    async def updates(self, interval: float = 0.0) -> AsyncIterator[list[Update]]:
        """Yields batches of updates as they arrive. The last update is an End or an ApiError.

        interval: minimum seconds between two batches. The first and the last batch are not delayed.
        """
        while True:
            await self._news.wait()
            batch = [self._inbox.popleft() for _ in range(min(self._most, len(self._inbox)))]
            if not self._inbox:
                self._news.clear()
            yield batch
            if isinstance(batch[-1], End | ApiError):
                return
            if interval and any(isinstance(update, Token) for update in batch):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), interval)


class EngineProcess:
    """The engine process and its queue. Requests run as many at a time as the engine allows. Runs on the event loop."""

    def __init__(self, model: ServedModel, limits: Limits, metrics: Metrics, end: Callable[[], None]):
        """end: called when the engine cannot be restarted; `failure` then contains the reason."""
        self.limits, self._model, self._metrics, self._end = limits, model, metrics, end
        self.state: Literal["loading", "ready", "silent", "restarting", "stopped"] = "loading"
        """"silent" if the process does not answer, or all that it runs is cancelled and does not end."""
        self.facts: dict[str, Any] = {}
        """Facts that the engine has reported: name, conditions, parallel, chat, tool_format, template_variables,
        fingerprint, seconds; empty before.
        """
        self.failure: str | None = None
        self._numbers = 0
        self._checks: dict[int, asyncio.Future[Encoded]] = {}
        self._asking: dict[int, str] = {}  # the clients of the checks
        self._waiting: list[Job] = []  # in the order in which they will run
        self._running: dict[int, Job] = {}
        self._round = 0  # of the job that started last
        self._run: EngineRun | None = None
        self._tasks: set[asyncio.Task] = set()
        self._crashes = 0  # in a row
        self._reason: str | None = None  # the process's own, for which it ends
        self._crash: str | None = None  # the same, if it is a bug or a lack of memory
        self._ready = self._heard = 0.0  # times: start of the engine's work, its last message
        metrics.cache_usage.set_function(self._cache_usage)

    def start(self) -> None:
        """Starts the process. Requires a running event loop."""
        self._do(self._watch())
        self._start()

    def _start(self) -> None:
        try:
            self._run = EngineRun(self._model, self._take, lambda: self._do(self._died()))
        except OSError as error:
            self._give_up(f"cannot start the engine process ({error.strerror}): raise the limit on processes or files")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, reason: str = "the server is shutting down") -> None:
        """Ends all requests and closes the pipe, which ends the process."""
        if self.state == "stopped":
            return
        self._patience = 0.0 if self.state in ("loading", "silent") else PATIENCE_SECONDS
        self.state = "stopped"
        self._fail_all(ApiError(503, reason), reason)
        if self._run is not None:
            self._run.close()

    async def close(self) -> None:
        """Ends all requests and waits for the end of the process."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        if self._run is not None:
            await self._run.end(self._patience)

    async def submit(self, calls: Sequence[Call], client: str) -> list[Job]:
        """Queues the calls of a request, which differ in their seeds only. Raises ApiError if they are invalid or the
        queue is full; a client without waiting requests always has a place in it. client: who sent the request.
        """
        arrived = time.perf_counter()
        self._require_place(client)
        encoded = await self._check(calls[0], client)
        self._require_ready()
        jobs = [self._job(call.noted(*encoded.notes), encoded, client, arrived) for call in calls]
        self._next()
        return jobs

    def _require_ready(self) -> None:
        if self.state != "ready" or self._run is None or self._run.unsent > MOST_UNSENT:
            state = self.state if self.state != "ready" else "silent"
            message = f"the engine is {state}: try again soon"
            raise ApiError(503, message, code=f"engine_{state}", headers={"Retry-After": "5"})

    def _require_place(self, client: str) -> None:
        self._require_ready()
        ahead = len(self._checks) + len(self._waiting) + len(self._running)
        own = client in self._asking.values() or any(job.client == client for job in self._waiting)
        if (own or not self.limits.waiting) and ahead - self.facts["parallel"] >= self.limits.waiting:
            self._metrics.failure.labels("queue_full").inc()
            raise ApiError(
                429,
                f"the queue is full with {self.limits.waiting} waiting requests: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    async def _check(self, call: Call, client: str) -> Encoded:
        self._numbers += 1
        number = self._numbers
        question = Question(
            call.prompt,
            call.chat,
            call.tools,
            call.sampling,
            call.stop_token_ids,
            bool(call.stop),
            call.template_values,
            call.prediction,
            call.grammar,
            call.token_healing,
            client,
        )
        self._checks[number], self._asking[number] = asyncio.get_running_loop().create_future(), client
        try:
            self._send("check", number, question)
            return await asyncio.wait_for(self._checks[number], self.limits.seconds)
        except RecursionError:
            raise ApiError(400, NESTED, param=call.prompt_param) from None
        except TimeoutError:
            self._metrics.failure.labels("timeout").inc()
            self._send("drop", number)
            raise ApiError(504, "reading the prompt took too long", code="timeout") from None
        except asyncio.CancelledError:  # the client has left
            self._metrics.failure.labels("cancelled").inc()
            self._send("drop", number)
            raise
        except ApiError as error:
            self._metrics.failure.labels("refused").inc()
            if error.body["error"]["param"] is None:  # the message of a check begins with the parameter's name
                name = re.split(r" = | has | cannot |\[", str(error))[0]
                known = (*call.sampling, "stop", "stop_token_ids", "token_healing", "tools", "tool_choice", *FIELDS)
                error.body["error"]["param"] = name if name in known else call.prompt_param
            raise
        finally:
            del self._checks[number], self._asking[number]

    def _job(self, call: Call, encoded: Encoded, client: str, arrived: float) -> Job:
        """Makes a job and puts it into the queue, in which clients take turns."""
        order = Order(
            encoded.prompt,
            call.max_tokens,
            call.sampling,
            call.stop_token_ids,
            call.ignore_eos,
            call.stop,
            call.logprobs,
            self.limits.tokens_per_dispatch,
            call.chat,
            encoded.tools,
            call.cache_prompt,
            call.cache_salt,
            call.cache_key,
            encoded.prediction,
            call.draft_max,
            encoded.grammar,
            call.token_healing,
        )
        self._numbers += 1
        job = Job(self._numbers, call, order, client, arrived, TokenTimes(self._metrics))
        loop = asyncio.get_running_loop()
        job.timers = [
            loop.call_later(self.limits.seconds, self._expire, job),
            loop.call_later(KEEPALIVE_SECONDS, self._keep_alive, job),
        ]
        last = max((other.round for other in self._waiting if other.client == client), default=-1)
        job.round = max(self._round, last + 1)
        insort(self._waiting, job, key=lambda each: (each.round, each.number))
        return job

    def cancel(self, job: Job) -> None:
        """Drops a job that no client waits for. The engine ends it after its next token, or after its dispatch."""
        self._fail(job, ApiError(499, "cancelled"), "cancelled")

    def _next(self) -> None:
        """Sends the engine its next jobs if it can run more, and updates the places of waiting jobs in the queue."""
        while self.state == "ready" and (job := self._first()) is not None:
            self._waiting.remove(job)
            self._running[job.number], self._round = job, job.round
            job.started = time.perf_counter()
            self._metrics.queue_time.observe(job.waited)
            self._send("generate", job.number, job.order)
        self._metrics.running.set(len(self._running))
        self._metrics.waiting.set(len(self._waiting))
        for position, job in enumerate(self._waiting, start=len(self._running)):
            job.put(Queued(position))

    def _first(self) -> Job | None:
        """The job to run next; None if the engine cannot run more. One place is only for short prompts, because several
        long ones, which take seconds each, would make all others wait.
        """
        most = self.facts["parallel"]
        if len(self._running) >= most:
            return None
        room = sum(len(job.ids) >= LONG_PROMPT for job in self._running.values()) < max(1, most - 1)
        return next((job for job in self._waiting if room or len(job.ids) < LONG_PROMPT), None)

    def _fail(self, job: Job, error: ApiError, reason: str) -> None:
        """Ends a job for its client. The engine may run it for a moment longer."""
        if job.ended.is_set():
            return
        job.put(error)
        self._metrics.failure.labels(reason).inc()
        if job.number in self._running:
            self._send("cancel", job.number)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._next()

    def _send(self, *message: Any) -> None:
        if self._run is not None:  # otherwise the process has ended, and what it was asked ends with it
            self._run.send(*message)

    def _expire(self, job: Job) -> None:
        error = ApiError(
            504,
            f"the answer was not complete within {self.limits.seconds:g} s, the time limit of this server",
            code="timeout",
        )
        self._fail(job, error, "timeout")

    def _keep_alive(self, job: Job) -> None:
        job.put(Alive())
        job.timers[1] = asyncio.get_running_loop().call_later(KEEPALIVE_SECONDS, self._keep_alive, job)

    def _take(self, kind: str, *rest: Any) -> None:
        self._heard = time.perf_counter()
        if kind == "token":
            self._take_token(*rest)
        elif kind in ("end", "error"):
            self._take_end(*rest)
        elif kind in ("checked", "refused"):
            number, *answer = rest
            check = self._checks.get(number)
            if check is None or check.done():
                return
            if kind == "checked":
                check.set_result(*answer)
            else:
                message, code = answer
                check.set_exception(ApiError(500 if code == "engine_error" else 400, message, code=code))
        elif kind == "ready":
            [self.facts] = rest
            self.state, self._ready = "ready", self._heard
            log.info(
                "ready after %.1f s: %s",
                self.facts["seconds"],
                ", ".join(f"{k} {v}" for k, v in self.facts["conditions"].items()),
            )
            self._next()
        elif kind == "failed":
            [self._reason] = rest
        elif kind == "crashed":
            [self._crash] = rest

    def _take_token(self, number: int, token: Token) -> None:
        job = self._running.get(number)
        if job is None or job.ended.is_set():
            return
        job.tokens += 1
        job.times.add(token.time)
        job.put(token)

    def _cache_usage(self) -> float:
        """Positions of running requests (prompt and answer so far) as a share of those of `parallel` full contexts."""
        held = sum(len(job.ids) + job.tokens for job in self._running.values())
        return held / (self.facts["parallel"] * self.facts["conditions"]["context"]) if self.facts else 0.0

    def _take_end(self, number: int, end: End | str) -> None:
        """Handles the end of a running job, whose client may already be gone."""
        job = self._running.pop(number, None)
        if job is not None:
            job.times.end()
        drafting = end.drafting if isinstance(end, End) else None
        if drafting is not None and drafting.passes > MOST_PASSES:
            asyncio.get_running_loop().run_in_executor(None, self._metrics.passes, drafting)
        elif drafting is not None:
            self._metrics.passes(drafting)
        if job is not None and not job.ended.is_set():
            if isinstance(end, End):
                self._crashes = 0
                self._metrics.success.labels(end.reason).inc()
                self._metrics.prompt_tokens.inc(len(job.ids))
                if job.call.cache_prompt and self.facts["conditions"]["prefix_cache"]:
                    self._metrics.prefix_queries.inc(len(job.ids))
                    self._metrics.prefix_hits.inc(end.cached)
                self._metrics.whole.observe(time.perf_counter() - job.arrived)
                job.put(end)
                rate = f", {1 / end.time_per_token:,.1f} tokens/s" if end.time_per_token else ""
                if rate and drafting is not None:
                    rate += f" at {drafting.tokens_per_pass:.2f} tokens per pass"
                cached = f" ({end.cached} cached)" if end.cached else ""
                shared = ", shared passes" if end.shared_passes else ""
                log.info(
                    "%d%s + %d tokens (%s)%s%s, waited %.3f s",
                    *(len(job.ids), cached, end.tokens, end.reason, rate, shared, job.waited),
                )
            else:
                self._fail(job, ApiError(500, end, code="engine_error"), "error")
        self._next()

    async def _watch(self) -> None:
        """Watches the process: it must answer, and end what was cancelled."""
        asked, printed = 0.0, ""  # time of the last question, if it is unanswered; what libraries printed
        while True:
            await asyncio.sleep(PING_SECONDS)
            now = time.perf_counter()
            if self._run is None or self.state not in ("ready", "silent"):
                continue
            if printed:
                say(printed.rstrip())
            printed = self._run.printed()  # shown a second later, unless the process has ended for lack of memory
            if self._heard >= asked:
                asked = now
                self._send("ping", 0)
            left = [job.left for job in self._running.values() if job.left is not None]
            stuck = len(left) >= self.facts["parallel"] and now - max(left) > STUCK_SECONDS
            silent = now - asked > SILENT_SECONDS
            if (silent or stuck) != (self.state == "silent"):
                self.state = "silent" if silent or stuck else "ready"
                what = f"has not answered for {SILENT_SECONDS:g} s" if silent else "does not end cancelled requests"
                log.error("the engine process %s", what if self.state == "silent" else "answers again")
                self._next()

    async def _died(self) -> None:
        """Handles the unexpected end of the process. While the model loads for the first time, it gives up, because a
        restart would fail the same way. Later it restarts the process, and only the running requests are lost.
        """
        if (run := self._run) is None or self.state == "stopped":
            return
        first, ran = self.state == "loading", time.perf_counter() - self._ready
        self.state = "restarting"
        for job in self._running.values():
            for timer in job.timers:
                timer.cancel()  # the reason is known soon
        self._run = None
        how, printed = await run.end(PATIENCE_SECONDS)
        message = f"the engine process ended unexpectedly ({how})"
        reason, crash = self._reason, self._crash
        self._reason = self._crash = None
        if reason is None and is_scarcity(printed):
            reason = scarce(how)
        elif reason is None:
            reason = crash
            if printed:
                say(printed.rstrip())
        if self.state == "stopped":  # meanwhile
            return
        if first:
            self._give_up(reason or f"{message} while it loaded the model: read its output above")
            return
        if self._model.engine.distributed:
            self._give_up(f"{message}, but the other processes of the job need it: start all of them again")
            return
        self._crashes = self._crashes + 1 if self._ready == 0.0 or ran < STEADY_SECONDS else 1
        self._ready = 0.0
        self._fail_all(ApiError(500, message, code="engine_error"), message, waiting=False)
        if self._crashes >= MOST_CRASHES:
            self._give_up(f"{reason or message}; it ended {self._crashes} times in a row")
            return
        pause = 0.0 if self._crashes == 1 else min(2.0 ** (self._crashes - 2), LONGEST_PAUSE)
        log.error("%s: restarting it%s", reason or message, f" after {pause:g} s" if pause else "")
        self._metrics.restarts.inc()
        await asyncio.sleep(pause)
        if self.state == "restarting":
            self._start()

    def _fail_all(self, error: ApiError, reason: str, waiting: bool = True) -> None:
        """Ends the checks, the running requests and, if `waiting`, the waiting ones."""
        for check in self._checks.values():
            if not check.done():
                check.set_exception(ApiError(503, reason, code="engine_error"))
        running, self._running = self._running, {}
        for job in running.values():
            job.times.end()
            self._fail(job, error, "error")
        for job in [*self._waiting] if waiting else []:
            self._fail(job, error, "error")
        self._next()

    def _give_up(self, message: str) -> None:
        """Ends the server because the engine cannot be restarted."""
        if self.state == "stopped":
            return
        self.failure = message
        self.stop(message)
        self._end()
