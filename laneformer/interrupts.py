"""Ctrl-C while a program starts. Imports little itself, as it is not in force before it is imported.

Libraries that a KeyboardInterrupt reaches while they are imported raise other errors, print fifty lines, or go on: the
handler here ends the process instead.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

LINE = "error: interrupted"


def end_at_interrupt() -> None:
    """Lets Ctrl-C end the process with a line and status 130, until `raise_at_interrupt`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, as usual."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def importing(line: str = LINE) -> Iterator[None]:
    """A block of imports, in which Ctrl-C ends the process with that line and status 130."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, _end) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, partial(_end, line=line))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_again() -> None:
    """Sends this process a Ctrl-C once more, a moment later."""
    again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _end(_number: int, _frame: FrameType | None, line: str = LINE) -> None:
    os.write(2, f"{line}\n".encode())
    os._exit(130)
