"""Handles Ctrl-C while a program starts, and while it works in steps. This module imports little, because its handlers
are active only once it is imported.

A KeyboardInterrupt during the import of a library may raise another error, print fifty lines, or have no effect. The
handler in this file ends the process instead.
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
PATIENCE = 2.0  # seconds after a second Ctrl-C before the process ends without Python's handler


def end_at_interrupt() -> None:
    """Makes Ctrl-C end the process with a line and status 130, until `raise_at_interrupt` is called."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, as usual."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def importing(line: str = LINE) -> Iterator[None]:
    """A context for imports, in which Ctrl-C ends the process with the given line and status 130."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, _end) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, partial(_end, line=line))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Stopped(BaseException):
    """A signal ended the work inside `StopSignals.at_once`. No `except Exception` of a library catches it."""


class StopSignals(list[int]):
    """The signals received so far that ask a program to stop after its current step."""

    ends_work = False
    """Whether the next signal raises Stopped."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context for work that may be lost: the first signal, also an earlier one, ends it by raising Stopped."""
        if self:
            raise Stopped
        self.ends_work = True
        try:
            yield
        finally:
            self.ends_work = False


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Yields the SIGINT and SIGTERM signals received so far. A second SIGINT raises KeyboardInterrupt, or ends the
    process if a library keeps Python from running its handler, as XLA does while it compiles.
    """
    received = StopSignals()

    def ask(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        if received.ends_work:
            raise Stopped

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _answer_to_ctrl_c():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _answer_to_ctrl_c() -> Iterator[None]:
    """Prints a line at the first Ctrl-C. A thread does so, because Python's handlers run only after a library returns.

    After a second Ctrl-C it ends the process, unless the context is left within PATIENCE.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()

    def answer() -> None:
        first = os.read(reader, 1)
        if first == bytes([signal.SIGINT]):
            with suppress(BrokenPipeError):
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
    """Ends the program. After Ctrl-C it skips Python's teardown, in which XLA crashes if it is still computing."""
    if status != INTERRUPTED:
        sys.exit(status)
    if processes := sys.modules.get("multiprocessing.util"):
        processes._exit_function()  # ends child processes and removes their semaphores
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def interrupt_again() -> None:
    """Sends this process SIGINT again, 0.02 s later."""
    again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _end(_number: int, _frame: FrameType | None, line: str = LINE) -> None:
    os.write(2, f"{line}\n".encode())
    os._exit(INTERRUPTED)
