"""The server's log, on standard error. A line that cannot be written, for example because the disk is full, is counted,
and the next one that can be written reports it. Nothing waits for a reader of the log that has stopped: `less`, a
terminal after Ctrl-S, a collector of logs that hangs.
"""

import logging
import os
import select
import stat
import sys
from contextlib import suppress

from laneformer.errors import printable

PATIENCE_MS = 50  # wait for a slow reader, before the first of several lines is given up


class Log(logging.Handler):
    """Writes lines without a buffer, in which lines that could not be written would wait and repeat."""

    def __init__(self):
        super().__init__()
        self.descriptor = 2
        """Of standard error; in the engine's process, whose own one is a file, of the server's."""
        self._opened = (-1, -1)  # descriptor, and one of the same file that does not block
        self.lost = 0
        """Number of lines that could not be written."""
        self._unreported, self._reason = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the message of a record."""
        self.write(self.format(record))

    def write(self, text: str) -> None:
        """Writes a text and a line end."""
        before = f"{self._unreported} lines of the log were lost: {self._reason}\n" if self._unreported else ""
        data = f"{before}{printable(text)}\n".encode(errors="backslashreplace")
        try:
            if self._opened[0] != self.descriptor:
                self._opened = self.descriptor, _not_blocking(self.descriptor)
            self._write(data)
        except OSError as error:
            self.lost += 1
            reason = "their reader has stopped" if isinstance(error, BlockingIOError) else error.strerror
            self._unreported, self._reason = self._unreported + 1, str(reason)
        else:
            self._unreported = 0

    def _write(self, data: bytes) -> None:
        descriptor = self._opened[1]
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                if self._unreported or not poll.poll(PATIENCE_MS):
                    raise


def _not_blocking(descriptor: int) -> int:
    """A descriptor of the same pipe or terminal whose writes do not block; a change of the given one would change that
    of the shell. The given one for files, and where the system forbids another.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


LOG = Log()


def show() -> None:
    """Sends the log of this process to standard error."""
    sys.stderr.flush()
    logging.basicConfig(handlers=[LOG], force=True)  # replaces a handler of an imported library
    logging.getLogger("laneformer").setLevel(logging.INFO)


def say(text: str) -> None:
    """Writes lines to the log."""
    LOG.write(text)
