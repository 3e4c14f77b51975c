"""The HTTP application: OpenAI-compatible answers by one engine. Read the files in this order: body, protocol, tools
and item_requests (requests), engine (the queue and the engine process), worker (inside that process), encoders
(prompts), responses, choices, item_answers and writing (answers), guard and connections (access).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from laneformer.infer.serve.body import NESTED, ApiError, printable, read_json
from laneformer.infer.serve.choices import Choices, Single, calls_of, updates_of
from laneformer.infer.serve.connections import ARRIVAL_SECONDS
from laneformer.infer.serve.engine import EngineProcess, Job
from laneformer.infer.serve.guard import KEY, Guard, error_response
from laneformer.infer.serve.item_answers import ItemAnswer
from laneformer.infer.serve.item_requests import read_items
from laneformer.infer.serve.metrics import Metrics
from laneformer.infer.serve.pages import FOLDER, INDEX, Pages, is_page
from laneformer.infer.serve.protocol import Call, read_call
from laneformer.infer.serve.responses import Answer
from laneformer.infer.serve.writing import json_pieces, parts_of

log = logging.getLogger("laneformer")

T = TypeVar("T")

MOST_BYTES = 1 << 20  # bytes of a request
SMALL_BYTES = 1 << 14  # a larger request is read on a thread, beside which the event loop continues
READING = ThreadPoolExecutor(1, "laneformer-requests")
# Time for which the rest of a refused body is read, because most clients send the whole body before they read an
# answer.
DISCARD_SECONDS = 2.0


class Api:
    """The routes of the server."""

    def __init__(
        self,
        engine: EngineProcess,
        metrics: Metrics,
        model: str,
        stream_interval: float = 0.0,
        any_model_name: bool = False,
    ):
        """model: name of the model. stream_interval: minimum seconds between two events of a stream. any_model_name:
        whether requests may name any model.
        """
        self._engine, self._metrics, self._model, self._interval = engine, metrics, model, stream_interval
        self._any_model_name = any_model_name
        self._pages = Pages()
        self._apart = False  # whether prefixes are shared only among requests with one key

    def app(self, keys: Collection[str], hosts: Collection[str]) -> Starlette:
        """The application with all routes. keys, hosts: see Guard. With several keys, prefixes are shared only among
        requests with the same one.
        """
        self._apart = len(keys) > 1
        return Starlette(
            routes=[
                Route("/", self.index),
                Route(FOLDER + "{name}", self.page),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.one_model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            ],
            middleware=[Middleware(Guard, keys=keys, hosts=hosts)],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await self._engine.close()

    async def index(self, request: Request) -> Response:
        """The playground for a browser; a list of the routes for other clients."""
        if is_page("/", request.headers):
            return self._pages.response(INDEX, request.headers)
        return JSONResponse(
            {
                "server": "laneformer",
                "model": self._model,
                "models": "/v1/models",
                "health": "/health",
                "metrics": "/metrics",
                "completions": "/v1/completions",
                "chat": "/v1/chat/completions",
                "responses": "/v1/responses",
                "documentation": "docs/serving.md",
            },
            headers={"Vary": "Accept"},
        )

    async def page(self, request: Request) -> Response:
        """A file of the playground."""
        return self._pages.response(request.path_params["name"], request.headers)

    async def health(self, request: Request) -> Response:
        """200 if a request would be accepted, else 503. It needs no key, so it reports only the state."""
        state = self._engine.state
        return JSONResponse({"status": "ok" if state == "ready" else state}, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        self._require(request.path_params["model"])
        return JSONResponse(self._described())

    def _described(self) -> dict:
        """The model in OpenAI's form, with the conditions of a measured speed after the engine has reported them."""
        facts = self._engine.facts
        known = (
            {"conditions": facts["conditions"], "chat": facts["chat"], "tools": facts["tool_format"]} if facts else {}
        )
        known |= {"recommended_sampling": self._recommended} if self._recommended else {}
        context = {"max_model_len": facts["conditions"]["context"]} if facts else {}
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "laneformer", **context, **known}

    @property
    def _recommended(self) -> dict[str, Any]:
        """The model's own sampling settings, after the engine has reported them."""
        return self._engine.facts.get("recommended_sampling", {})

    def _require(self, model: str | None) -> None:
        if model not in (None, self._model) and not self._any_model_name:
            raise ApiError(
                404,
                f"unknown model {printable(model)!r}: this server has {self._model!r}; with --any-model-name it accepts"
                " every name",
                param="model",
                code="model_not_found",
            )

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def responses(self, request: Request) -> Response:
        asked = await _read(request, read_items)
        call = _parsed(lambda: read_call(asked.chat, chat=True, recommended=self._recommended))
        try:
            return await self._answer(request, call.warned(*asked.ignored), partial(ItemAnswer, asked=asked))
        except ApiError as error:
            if error.body["error"]["param"] == call.prompt_param:
                error.body["error"]["param"] = "input"
            raise

    async def embeddings(self, request: Request) -> Response:
        raise ApiError(400, "/v1/embeddings is not supported: this server generates text", code="unsupported_route")

    async def _generate(self, request: Request, chat: bool) -> Response:
        return await self._answer(
            request, await _read(request, partial(read_call, chat=chat, recommended=self._recommended)), Answer
        )

    async def _answer(self, request: Request, call: Call, form: Callable[..., Answer]) -> Response:
        """Generates the answer to a call. form: class of the answer."""
        self._require(call.model)
        facts = self._engine.facts
        drafts = bool(facts and facts["conditions"].get("speculation"))
        call = call.warned(*call.without_effect(facts.get("template_variables", ()), drafts))
        if call.tools is not None and facts.get("chat") and facts["tool_format"] is None:
            call = call.noted("tools are described in words, because the chat template has no known tool format")
        key, client = request.scope.get(KEY, ""), request.client
        if self._apart:
            call = replace(call, cache_salt=f"{key}:{call.cache_salt}")
        sender = f"{key}@{'' if client is None else client.host}"
        jobs = await _unless_left(self._engine.submit(calls_of(call), sender), request.receive)
        several = Choices(jobs, self._model, facts["fingerprint"]) if call.n > 1 else None
        answer = several or Single(form(jobs[0], self._model, facts["fingerprint"]))
        if call.stream:
            return _Stream(self._engine, jobs, answer, self._interval)
        async with _watched(self._engine, jobs, request.receive):
            async for i, batch in updates_of(jobs):
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                answer.take(i, batch)
        return _Whole([part async for part in parts_of(json_pieces(answer.whole(), ascii_only=False))])


class _Whole(Response):
    """JSON in parts, which are sent one at a time."""

    media_type = "application/json"

    def __init__(self, parts: list[bytes]):
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Stream(Response):
    """An answer as server-sent events, sent as updates arrive."""

    media_type = "text/event-stream"

    def __init__(self, engine: EngineProcess, jobs: list[Job], answer: Choices | Single, interval: float):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._engine, self._jobs, self._answer, self._interval = engine, jobs, answer, interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(self._engine, self._jobs, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # the header, at once
            await self._write(self._answer.opening(), send)
            async for i, batch in updates_of(self._jobs, self._interval):
                await self._write(self._answer.events(i, batch), send)
                if isinstance(batch[-1], ApiError):
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, pieces: Iterator[bytes], send: Send) -> None:
        async for part in parts_of(pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})


async def _unless_left(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which ends when the client disconnects; ApiError is then raised."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client disconnected")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def _left(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _watched(engine: EngineProcess, jobs: list[Job], receive: Receive) -> AsyncIterator[None]:
    """Context that cancels the jobs when their client disconnects, and when the block ends."""

    def cancel() -> None:
        for job in jobs:
            engine.cancel(job)

    async def watch() -> None:
        await _left(receive)
        cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        cancel()


class _Refusal(Response):
    """The answer to a body that is too long. It is sent at once. The connection is closed when the rest of the body has
    arrived, or after DISCARD_SECONDS.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(request: Request, read: Callable[[dict], T]) -> T:
    """Applies `read` to the fields of a request and returns its result. Raises ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Browsers let any web page send other types without a CORS preflight.
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    body = await _body(request)
    if len(body) <= SMALL_BYTES:
        return _parsed(lambda: read(read_json(body)))
    return await asyncio.get_running_loop().run_in_executor(READING, _parsed, lambda: read(read_json(body)))


def _parsed(read: Callable[[], T]) -> T:
    """The result of `read`. Raises ApiError for fields that are nested too deeply."""
    try:
        return read()
    except RecursionError:
        raise ApiError(400, NESTED) from None


async def _body(request: Request) -> bytes:
    """The body of the request. Raises ApiError as soon as it is known to be too long, or if it arrives too slowly."""
    body = bytearray()
    too_long = ApiError(
        413, f"the request has more than {MOST_BYTES} bytes: shorten it", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "0")
    if len(declared) > len(str(MOST_BYTES)) or int(declared) > MOST_BYTES:
        raise too_long
    try:
        async with asyncio.timeout(ARRIVAL_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    raise too_long
    except TimeoutError:
        raise ApiError(
            408,
            f"the request did not arrive within {ARRIVAL_SECONDS:g} s: send it faster",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected") from None
    return bytes(body)


async def _api_error(request: Request, error: Any) -> Response:
    return error_response(error, _Refusal if error.status == 413 else Response)


async def _http_error(request: Request, error: Any) -> Response:
    """Starlette's errors for unknown paths and methods, in OpenAI's form."""
    what = {404: f"unknown path {request.url.path}", 405: f"{request.url.path} does not accept {request.method}"}
    return error_response(ApiError(error.status_code, what.get(error.status_code, error.detail), headers=error.headers))


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server failed: read its log"))
