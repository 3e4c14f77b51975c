"""The web process's end of a pipe: messages of every size pass, and nothing blocks."""

import asyncio
import os
import socket
import threading
from multiprocessing.connection import Connection

import pytest

from laneformer.infer.serve.processes.channel import MOST_AT_ONCE, Channel


async def opened():
    """A channel, its messages, the loss of the other end, and the other end."""
    ours, theirs = socket.socketpair()
    got, lost = [], asyncio.Event()
    return Channel(ours, lambda *message: got.append(message), lost.set), got, lost, Connection(theirs.detach())


def test_messages_arrive_in_order_and_before_the_end():
    async def run():
        channel, got, lost, other = await opened()
        sent = [("a", n, "x" * size) for n, size in enumerate([0, 10, 3_000_000, *[5] * (3 * MOST_AT_ONCE), 100_000])]

        def send():
            for message in sent:
                other.send(message)
            other.close()

        thread = threading.Thread(target=send)
        thread.start()
        await asyncio.wait_for(lost.wait(), 30)
        thread.join()
        assert got == sent
        channel.close()

    asyncio.run(run())


def test_end_inside_a_message_is_a_loss():
    async def run():
        channel, got, lost, other = await opened()
        os.write(other.fileno(), b"\x00\x00\x10\x00half")
        other.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert got == []
        channel.send("dropped", b"x" * 1_000_000)
        assert channel.unsent == 0
        channel.close()
        channel.send("dropped")

    asyncio.run(run())


def test_reader_that_waits_blocks_no_sender():
    async def run():
        channel, _, _, other = await opened()
        sent = [("a", n, "x" * 1_000_000) for n in range(5)]
        for message in sent:
            channel.send(*message)
        assert channel.unsent > 4_000_000
        received = await asyncio.to_thread(lambda: [other.recv() for _ in sent])
        assert received == sent and channel.unsent == 0
        deep = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(RecursionError):
            channel.send(deep)
        channel.close()
        other.close()

    asyncio.run(run())
