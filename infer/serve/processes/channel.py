"""The web process's end of the pipe to the engine process. Nothing here blocks, also if the other end neither reads nor
writes for a while, or in the middle of a message.

The other end is a `multiprocessing.connection.Connection`, whose form of messages this file writes: the number of bytes
as a big-endian int32, or -1 and a uint64, and then the pickled message.
"""

import asyncio
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SIZE, LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")
LONG = SIZE.pack(-1)
READ_BYTES = 1 << 18  # bytes read in a turn of the event loop
MOST_AT_ONCE = 64  # messages handled in a turn of the event loop: 2 ms with 20 log-probabilities each


class Channel:
    """Sends and receives messages on the event loop."""

    def __init__(self, end: socket.socket, receive: Callable[..., None], lost: Callable[[], None]):
        """end: one end of a socket pair. receive: called with the parts of each message, a tuple. lost: called once,
        when the other end is closed and all its messages were received. Neither is called after `close`.
        """
        end.setblocking(False)
        self._end, self._receive, self._lost = end, receive, lost
        self._loop = asyncio.get_running_loop()
        self._arrived, self._unsent = bytearray(), deque[memoryview]()
        self._later: asyncio.Handle | None = None
        self._ended = False
        self.unsent = 0
        """Bytes that the other end has not taken."""
        self._loop.add_reader(end, self._read)

    def send(self, *message: Any) -> None:
        """Sends a message, now or when the other end takes it. Raises RecursionError for a deeply nested message."""
        if self._end.fileno() < 0:
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        head = SIZE.pack(len(data)) if len(data) <= 0x7FFFFFFF else LONG + LONG_SIZE.pack(len(data))
        waiting = bool(self._unsent)
        for part in (head, data):
            self._unsent.append(memoryview(part))
            self.unsent += len(part)
        if not waiting:
            self._write()

    def close(self) -> None:
        """Closes this end, which ends the process at the other end. What is unsent is dropped."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        if self._later is not None:
            self._later.cancel()
        self._unsent.clear()
        self.unsent = 0

    def _write(self) -> None:
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self._end.send(part)
                self.unsent -= sent
                if sent < len(part):
                    self._unsent[0] = part[sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._end, self._write)
            return
        except OSError:  # the process has died, which `_read` reports after its last message
            self._unsent.clear()
            self.unsent = 0
        self._loop.remove_writer(self._end)

    def _read(self) -> None:
        if self._later is not None:
            return
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._end)
            self._ended = True
        self._arrived += data
        self._handle()

    def _handle(self) -> None:
        """Handles messages that have arrived; the rest of them in the next turn of the event loop."""
        self._later, at = None, 0
        for _ in range(MOST_AT_ONCE):
            begin, end = self._message(at)
            if end is None or self._end.fileno() < 0:
                break
            message, at = pickle.loads(bytes(self._arrived[begin:end])), end
            self._receive(*message)
        del self._arrived[:at]
        if self._end.fileno() < 0:
            return
        if self._message(0)[1] is not None:
            self._later = self._loop.call_soon(self._handle)
        elif self._ended:
            self._lost()

    def _message(self, at: int) -> tuple[int, int | None]:
        """The first and last position of the message at `at`; None for the last if it is not complete."""
        begin, size = at + SIZE.size, None
        with suppress(struct.error):
            [size] = SIZE.unpack_from(self._arrived, at)
            if size == -1:
                [size] = LONG_SIZE.unpack_from(self._arrived, begin)
                begin += LONG_SIZE.size
        return begin, None if size is None or size < 0 or begin + size > len(self._arrived) else begin + size
