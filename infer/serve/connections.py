"""Limits on connections: their number, and the time until the header of a request has arrived.

To make room for a new connection, the longest idle connection that is not being answered is closed. Connections that
never completed a request are closed before others. So half-open connections cannot keep other clients out.
"""

import asyncio
import http
import json
import resource
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.guard import error_response

ARRIVAL_SECONDS = 30.0  # time limit for the header of a request to arrive, and again for its body
MOST_CONNECTIONS = 2048  # connections of all addresses together
PIECE = 1 << 11  # bytes read from a connection in a turn of the event loop: in chunks of one byte they take 5 ms
BACKLOG = 1024  # connections that the system may hand over at once
OTHER_FILES = 64  # other open files of the process: pipes, sockets, libraries

Peer = tuple[str, int]


def most_connections() -> int:
    """Number of connections that the limit on open files allows, at most MOST_CONNECTIONS. Raises that limit as far as
    needed and allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MOST_CONNECTIONS + BACKLOG + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY or soft >= needed else max(1, soft // 2)


class _Connection:
    """A connection and its state."""

    def __init__(self, peer: Peer, transport: asyncio.Transport):
        self.peer, self.transport = peer, transport
        self.since = 0.0
        """Time at which it began to wait for a request, in seconds of the event loop."""
        self.answering = False
        """Whether a complete request is being answered."""
        self.used = False
        """Whether a request was answered before."""
        self.heard = False
        """Whether bytes of the next request have arrived."""
        self.excess = False
        """Whether it was opened when the number of connections had reached a limit and all were being answered."""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, timer: asyncio.TimerHandle | None) -> None:
        """Replaces the timer for the next request; None while there is nothing to wait for."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def close(self, error: ApiError) -> None:
        """Closes the connection. Sends the error, unless the connection is idle after a complete request."""
        self.wait(None)
        if self.transport.is_closing():
            return
        if self.heard or not self.used:
            self.transport.write(_written(error))
        self.transport.close()


class Limits(NamedTuple):
    """Limits on connections."""

    per_address: int
    """Maximum number of connections from one address."""
    total: int
    """Maximum number of connections from all addresses."""
    seconds: float = ARRIVAL_SECONDS
    """Maximum seconds for the header of a request to arrive."""


class Connections:
    """The open connections of a server. Both `protocol` and `app` must be in use for the limits to hold."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._open: dict[Peer, _Connection] = {}
        self._addresses: dict[str, dict[Peer, _Connection]] = {}

    def protocol(self, base: Any) -> type[asyncio.Protocol]:
        """A subclass of a uvicorn class that reads requests, which keeps to the limits."""
        connections = self

        class Limited(base):
            def connection_made(self, transport: Any) -> None:
                with suppress(AttributeError):  # uvloop has no such limit; the server runs on asyncio's loop
                    transport.max_size = PIECE
                super().connection_made(transport)
                self._peer = connections._opened(transport)

            def data_received(self, data: bytes) -> None:
                if self._peer is not None and (connection := connections._open.get(self._peer)):
                    connection.heard = True
                super().data_received(data)

            def connection_lost(self, exc: Exception | None) -> None:
                connections._closed(self._peer)
                super().connection_lost(exc)

        return Limited

    def app(self, inner: ASGIApp) -> ASGIApp:
        """The application, wrapped to record when requests have arrived and when they are answered."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self._open.get(tuple(scope.get("client") or ()))
            if scope["type"] != "http" or connection is None:
                await inner(scope, receive, send)
                return

            async def watched() -> Message:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
                    connection.answering = True
                return message

            connection.wait(None)
            try:
                if connection.excess and (crowd := self._crowds(connection.peer[0], 1)):
                    await error_response(crowd[0][1])(scope, watched, send)
                else:
                    await inner(scope, watched, send)
            finally:
                connection.used, connection.heard, connection.excess = True, False, False
                self._wait(connection)

        return run

    def _opened(self, transport: asyncio.Transport) -> Peer | None:
        """Counts a new connection. If a limit is reached, closes a connection that waits for a request. If all others
        are being answered, the first request of the new connection is refused.
        """
        peer = transport.get_extra_info("peername")
        if peer is None:  # the connection is closed already
            transport.close()
            return None
        peer = (peer[0], peer[1])
        connection = _Connection(peer, transport)
        for others, error in self._crowds(peer[0]):
            idle = [each for each in others.values() if not each.answering]
            if idle:
                oldest = min(idle, key=lambda each: (each.used, each.since))
                self._closed(oldest.peer)
                oldest.close(error)
            connection.excess |= not idle
        self._open[peer] = self._addresses.setdefault(peer[0], {})[peer] = connection
        self._wait(connection)
        return peer

    def _crowds(self, host: str, more: int = 0) -> list[tuple[dict[Peer, _Connection], ApiError]]:
        """Groups of connections that have reached their limit (or exceed it by `more`), each with the error to send."""
        groups = (
            (self._addresses.get(host, {}), self.limits.per_address, "from this address"),
            (self._open, self.limits.total, "to this server"),
        )
        return [
            (
                group,
                ApiError(
                    429,
                    f"{most} connections {whose} are open, which is the limit: close some",
                    headers={"Connection": "close"},
                ),
            )
            for group, most, whose in groups
            if len(group) >= most + more
        ]

    def _closed(self, peer: Peer | None) -> None:
        if peer is not None and (connection := self._open.pop(peer, None)):
            connection.wait(None)
            address = self._addresses[peer[0]]
            del address[peer]
            if not address:
                del self._addresses[peer[0]]

    def _wait(self, connection: _Connection) -> None:
        """Starts the timer for the next request."""
        if connection.peer not in self._open:
            return
        loop = asyncio.get_running_loop()
        connection.answering, connection.since = False, loop.time()
        error = ApiError(
            408, f"the header of the request did not arrive within {self.limits.seconds:g} s: send it faster"
        )
        connection.wait(loop.call_later(self.limits.seconds, connection.close, error))


def _written(error: ApiError) -> bytes:
    """An error as a complete HTTP response."""
    body = json.dumps(error.body)
    return (
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
