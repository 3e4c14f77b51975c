"""Limits on connections, tested with a small application behind uvicorn in this process."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from laneformer.infer.serve import connections
from laneformer.infer.serve.connections import Connections, Limits

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
LONG_POST = POST.replace(b"Length: 2", b"Length: 4") + b"2000"


async def answer(scope, receive, send):
    """An application that waits for the number of milliseconds in the body."""
    if scope["type"] != "http":
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await asyncio.sleep(int(body or b"0") / 1000)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def served(limits):
    """Runs a server with these limits; yields its port."""
    clients = Connections(limits)
    config = uvicorn.Config(
        clients.app(answer),
        port=0,
        http=clients.protocol(AutoHTTPProtocol),
        log_config=None,
        lifespan="off",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
    assert not clients._open and not clients._addresses


def refusal(client, seconds=5.0):
    """The status and error message that a client receives before its connection is closed; None if it is closed without
    an answer.
    """
    client.settimeout(seconds)
    data = b""
    while piece := client.recv(4096):
        data += piece
    if not data:
        return None
    head, body = data.split(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def served_on(client):
    client.settimeout(5)
    reply = b""
    while not reply.endswith(b"ok") and (piece := client.recv(4096)):  # head and body may arrive separately
        reply += piece
    return reply.startswith(b"HTTP/1.1 200 ") and reply.endswith(b"ok")


def opened(port, *data, source="127.0.0.1"):
    client = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
    for piece in data:
        client.sendall(piece)
    return client


def test_slow_headers_are_refused():
    with served(Limits(9, 9, 0.2)) as port:
        began = time.monotonic()
        for data in (b"", b"GET / HT", GET[:-2]):
            with opened(port, data) as client:
                status, message = refusal(client)
                assert status == 408 and "0.2 s" in message
        with opened(port, GET) as client:
            assert served_on(client)
            client.sendall(b"G")
            assert refusal(client)[0] == 408, "the limit applies to a second request, too"
        assert 0.8 <= time.monotonic() - began < 10
        with opened(port, GET) as client:
            assert served_on(client) and refusal(client) is None, "an idle connection is closed without an answer"
        with opened(port, POST + b"4") as client:
            time.sleep(0.4)
            client.sendall(b"0")
            assert served_on(client), "the limit applies only to the header"
        with opened(port, POST + b"99") as client:
            assert served_on(client)


@pytest.mark.parametrize("limits", [Limits(3, 99, 30), Limits(99, 3, 30)])
def test_half_open_connections_make_room(limits):
    with served(limits) as port, contextlib.ExitStack() as stack:
        kept = stack.enter_context(opened(port, GET))
        assert served_on(kept)
        half = []
        for data in (b"", b"GET", POST + b"1", b"GET /", b""):
            half.append(stack.enter_context(opened(port, data)))
            time.sleep(0.02)  # so that the server sees them in this order
        for client in half[:3]:
            status, message = refusal(client)
            assert status == 429 and message.startswith("3 connections ")
        with opened(port, GET) as client:
            assert served_on(client)
        kept.sendall(GET)
        assert served_on(kept), "a connection that was answered before is closed, too"


def test_busy_connections_are_not_closed():
    with served(Limits(2, 99, 30)) as port, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(opened(port, LONG_POST)) for _ in range(2)]
        time.sleep(0.3)
        with opened(port, GET) as more:
            assert refusal(more)[0] == 429
            for client in busy:
                client.sendall(GET)
        with opened(port, GET, source="127.0.0.2") as other:
            assert served_on(other), "the limit is per address"
        for client in busy:
            replies = b""  # the answer to a request that it sent meanwhile
            while (done := replies.count(b"\r\n\r\nok")) < 2:
                replies += client.recv(4096) or b"closed"
                assert not replies.endswith(b"closed")
            assert replies.count(b"HTTP/1.1 200 ") == done


def test_open_files_bound_the_connections(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    needed = connections.MOST_CONNECTIONS + connections.BACKLOG + connections.OTHER_FILES
    for limits, most, raised in (
        ((1024, 10**6), connections.MOST_CONNECTIONS, [(needed, 10**6)]),
        ((10**6, 10**6), connections.MOST_CONNECTIONS, []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), connections.MOST_CONNECTIONS, []),
        ((256, 1000), 500, [(1000, 1000)]),
    ):
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert (connections.most_connections(), asked) == (most, raised)
