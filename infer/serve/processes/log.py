"""The server's log, on standard error. A line that cannot be written, for example because the disk is full, is counted,
and the next one that can be written reports it.
"""

import logging
import os
import sys

from laneformer.errors import printable


class Log(logging.Handler):
    """Writes lines without a buffer, in which lines that could not be written would wait and repeat."""

    def __init__(self):
        super().__init__()
        self.descriptor = 2
        """Of standard error; in the engine's process, whose own one is a file, of the server's."""
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
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            self.lost += 1
            self._unreported, self._reason = self._unreported + 1, error.strerror
        else:
            self._unreported = 0


LOG = Log()


def show() -> None:
    """Sends the log of this process to standard error."""
    sys.stderr.flush()
    logging.basicConfig(handlers=[LOG], force=True)  # replaces a handler of an imported library
    logging.getLogger("laneformer").setLevel(logging.INFO)


def say(text: str) -> None:
    """Writes lines to the log."""
    LOG.write(text)
