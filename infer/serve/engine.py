"""The web process's side of the engine process: starts it, queues requests, distributes the results, and restarts it
after a crash.
"""

import asyncio
import logging
import multiprocessing
import re
import select
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from infer.serve import worker
from infer.serve.body import NESTED, ApiError
from infer.serve.grammars import FIELDS
from infer.serve.metrics import Metrics, TokenTimes
from infer.serve.protocol import Call
from infer.serve.worker import Encoded, End, Order, Question, ServedModel, Token

log = logging.getLogger("infer")

KEEPALIVE_SECONDS = 15.0  # proxies close a connection that is silent for longer
MOST_AT_ONCE = 256  # messages from the engine per turn of the event loop
PATIENCE_SECONDS = 3.0  # time for the process to end before it is killed


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

    def __init__(self, number: int, call: Call, ids: list[int], order: Order, arrived: float, times: TokenTimes):
        self.number, self.call, self.ids, self.order, self.arrived = number, call, ids, order, arrived
        self.times = times
        self.started: float | None = None
        self.tokens = 0  # number of tokens drawn so far
        self.ended = asyncio.Event()
        self.timers: list[asyncio.TimerHandle] = []
        self._inbox: list[Update] = []
        self._news = asyncio.Event()

    def put(self, update: Update) -> None:
        """Adds an update. An End or ApiError ends the job; later updates are dropped."""
        if self.ended.is_set():
            return
        self._inbox.append(update)
        self._news.set()
        if isinstance(update, End | ApiError):
            self.ended.set()
            for timer in self.timers:
                timer.cancel()

    async def updates(self, interval: float = 0.0) -> AsyncIterator[list[Update]]:
        """Yields batches of updates as they arrive. The last update is an End or an ApiError.

        interval: minimum seconds between two batches. The first and the last batch are not delayed.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._inbox = self._inbox, []
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
        self.state: Literal["loading", "ready", "restarting", "stopped"] = "loading"
        self.facts: dict[str, Any] = {}
        """Facts that the engine has reported: name, conditions, parallel, chat, tool_format, template_variables,
        fingerprint, seconds; empty before.
        """
        self.failure: str | None = None
        self._numbers = 0
        self._checks: dict[int, asyncio.Future[Encoded]] = {}
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        metrics.cache_usage.set_function(self._cache_usage)

    def start(self) -> None:
        """Starts the process. Requires a running event loop."""
        # Spawn, because a fork would copy locks of threads and handles of the devices' libraries.
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=worker.main, args=(child, self._model), name="laneformer-engine", daemon=True
        )
        # The process inherits this handler: Ctrl-C ends the server, which then ends the engine.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        child.close()
        self._readable = select.poll()  # ten times faster than the connection's own poll()
        self._readable.register(self._connection, select.POLLIN)
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)

    def close(self, reason: str = "the server is shutting down") -> None:
        """Ends all requests and the process."""
        if self.state == "stopped":
            return
        listens, self.state = self.state == "ready", "stopped"
        self._fail_checks(reason)
        for job in (*self._waiting, *self._running.values()):
            self._fail(job, ApiError(503, reason), "error")
        self._waiting.clear()
        self._disconnect(PATIENCE_SECONDS if listens else 0)

    def _disconnect(self, patience: float) -> None:
        """Closes the pipe, which makes the process end. Kills it if it does not end within `patience` seconds, for
        example while it loads a model.
        """
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    async def submit(self, call: Call, admitted: bool = False) -> Job:
        """Queues a request. Raises ApiError if it is invalid or the queue is full. admitted: whether to ignore a full
        queue, for further choices of a request whose first choice is queued.
        """
        arrived = time.perf_counter()
        if self.state != "ready":
            raise ApiError(
                503,
                f"the engine is {self.state}: try again soon",
                code=f"engine_{self.state}",
                headers={"Retry-After": "5"},
            )
        ahead = len(self._checks) + len(self._waiting) + len(self._running)
        if not admitted and ahead - self.facts["parallel"] >= self.limits.waiting:
            self._metrics.failure.labels("queue_full").inc()
            raise ApiError(
                429,
                f"the queue is full with {self.limits.waiting} waiting requests: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
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
        )
        self._checks[number] = asyncio.get_running_loop().create_future()
        try:
            self._send_message("check", number, question)
            encoded = await asyncio.wait_for(self._checks[number], self.limits.seconds)
        except RecursionError:
            raise ApiError(400, NESTED, param=call.prompt_param) from None
        except TimeoutError:
            self._metrics.failure.labels("timeout").inc()
            raise ApiError(504, "reading the prompt took too long", code="timeout") from None
        except ApiError as error:
            self._metrics.failure.labels("refused").inc()
            if error.body["error"]["param"] is None:  # the message of a check begins with the parameter's name
                name = re.split(r" = | has | cannot |\[", str(error))[0]
                known = (*call.sampling, "stop", "stop_token_ids", "token_healing", "tools", "tool_choice", *FIELDS)
                error.body["error"]["param"] = name if name in known else call.prompt_param
            raise
        finally:
            del self._checks[number]
        call, ids = call.noted(*encoded.notes), encoded.prompt
        order = Order(
            ids,
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
        job = Job(number, call, ids, order, arrived, TokenTimes(self._metrics))
        loop = asyncio.get_running_loop()
        job.timers = [
            loop.call_later(self.limits.seconds, self._expire, job),
            loop.call_later(KEEPALIVE_SECONDS, self._keep_alive, job),
        ]
        self._waiting.append(job)
        self._next()
        return job

    def cancel(self, job: Job) -> None:
        """Drops a job that no client waits for. The engine ends it after its next token, or after its dispatch."""
        self._fail(job, ApiError(499, "cancelled"), "cancelled")

    def _next(self) -> None:
        """Sends the engine its next jobs if it can run more, and updates the places of waiting jobs in the queue."""
        while self._waiting and self.state == "ready" and len(self._running) < self.facts["parallel"]:
            job = self._waiting.popleft()
            self._running[job.number] = job
            job.started = time.perf_counter()
            self._metrics.queue_time.observe(job.started - job.arrived)
            self._send_message("generate", job.number, job.order)
        self._metrics.running.set(len(self._running))
        self._metrics.waiting.set(len(self._waiting))
        for position, job in enumerate(self._waiting, start=len(self._running)):
            job.put(Queued(position))

    def _fail(self, job: Job, error: ApiError, reason: str) -> None:
        """Ends a job for its client. The engine may run it for a moment longer."""
        if job.ended.is_set():
            return
        job.put(error)
        self._metrics.failure.labels(reason).inc()
        if job.number in self._running:
            self._send_message("cancel", job.number)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._next()

    def _send_message(self, *message: Any) -> None:
        with suppress(OSError):  # the process has died; _read will notice the end of its pipe
            self._connection.send(message)

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

    def _read(self) -> None:
        """Reads available messages. The event loop calls this again while more are available."""
        try:
            for _ in range(MOST_AT_ONCE):
                self._take(*self._connection.recv())
                if self.state == "stopped" or not self._readable.poll(0):
                    break
        except (EOFError, OSError):
            self._died()

    def _take(self, kind: str, *rest: Any) -> None:
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
            self.state = "ready"
            log.info(
                "ready after %.1f s: %s",
                self.facts["seconds"],
                ", ".join(f"{k} {v}" for k, v in self.facts["conditions"].items()),
            )
            self._next()
        else:
            self._give_up(rest[0])

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
        if drafting is not None:
            self._metrics.passes(drafting)
        if job is not None and not job.ended.is_set():
            if isinstance(end, End):
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
                    *(len(job.ids), cached, end.tokens, end.reason, rate, shared, job.started - job.arrived),
                )
            else:
                self._fail(job, ApiError(500, end, code="engine_error"), "error")
        self._next()

    def _died(self) -> None:
        """Handles the unexpected end of the process. While the model loads, it gives up, because a restart would fail
        the same way. Later it restarts the process, and only the running requests are lost.
        """
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        message = f"the engine process ended unexpectedly ({how})"
        if self.state != "ready":
            self._give_up(f"{message} while it loaded the model: read its output above")
            return
        if self._model.engine.distributed:
            self._give_up(f"{message}, but the other processes of the job need it: start all of them again")
            return
        log.error("%s: restarting it", message)
        self._disconnect(0)
        self.state = "restarting"
        self._metrics.restarts.inc()
        self._fail_checks(message)
        running, self._running = self._running, {}
        for job in running.values():
            job.times.end()
            self._fail(job, ApiError(500, message, code="engine_error"), "error")
        self.start()
        self._next()

    def _fail_checks(self, reason: str) -> None:
        for check in self._checks.values():
            if not check.done():
                check.set_exception(ApiError(503, reason, code="engine_error"))

    def _give_up(self, message: str) -> None:
        """Ends the server because the engine cannot be restarted."""
        self.failure = message
        self.close(message)
        self._end()
