"""Ctrl-C while a program starts, and while it works in steps. Imports little itself, as it is not in force before it is
imported.

Libraries that a KeyboardInterrupt reaches while they are imported raise other errors, print fifty lines, or go on: the
handler here ends the process instead.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit status
LINE = "error: interrupted"
STOPPING = "stopping after this step; press Ctrl-C again to stop without saving"
STOPPED = "stopped without saving; run the same command again to resume"
PATIENCE = 2.0  # seconds that Python's own handler has after a second Ctrl-C


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


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yields the list of received SIGINT and SIGTERM; a second SIGINT raises KeyboardInterrupt, or ends the process
    where a library keeps Python from it, as XLA does while it compiles.
    """
    received: list[int] = []

    def ask(number, _frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _answer_to_ctrl_c():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _answer_to_ctrl_c() -> Iterator[None]:
    """Prints a line at the first Ctrl-C, from a thread: Python's own handlers wait until a library returns."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()

    def answer():
        first = os.read(reader, 1)
        if first == bytes([signal.SIGINT]):
            print(STOPPING, file=sys.stderr, flush=True)
        while first and (number := os.read(reader, 1)):
            if number == bytes([signal.SIGINT]) and not left.wait(PATIENCE):
                _end(signal.SIGINT, None, STOPPED)

    thread = threading.Thread(target=answer, name="answer_to_ctrl_c", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        left.set()
        os.close(writer)  # ends the thread if it is still reading
        thread.join()
        os.close(reader)


def end(status: int) -> NoReturn:
    """Ends a program. After Ctrl-C without Python's teardown, in which XLA crashes if it still computes."""
    if status != INTERRUPTED:
        sys.exit(status)
    if processes := sys.modules.get("multiprocessing.util"):
        processes._exit_function()  # ends them and removes their semaphores
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def interrupt_again() -> None:
    """Sends this process a Ctrl-C once more, a moment later."""
    again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _end(_number: int, _frame: FrameType | None, line: str = LINE) -> None:
    os.write(2, f"{line}\n".encode())
    os._exit(INTERRUPTED)
