"""One run of the engine process, from outside: its start, its pipe, what it printed, and its end."""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

from laneformer.infer.serve import worker
from laneformer.infer.serve.processes import log
from laneformer.infer.serve.processes.channel import Channel
from laneformer.infer.serve.worker import ServedModel

PATIENCE_SECONDS = 3.0  # time for the process to end before it is killed
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # they end the server, which then ends the engine
LAST_BYTES = 1 << 16  # bytes of its output that are shown at once
MOST_BYTES = 1 << 20  # bytes of its output that are kept


class EngineRun:
    """The engine process of one start. Its log goes to standard error at once. What libraries print goes to a file
    first, because of their many lines about too little memory the server shows one.
    """

    def __init__(self, model: ServedModel, receive: Callable[..., None], lost: Callable[[], None]):
        """receive, lost: see Channel. Requires a running event loop."""
        # Spawn, because a fork would copy locks of threads and handles of the devices' libraries.
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        self._printed = tempfile.TemporaryFile("a+b")  # noqa: SIM115  closed with this object
        self._shown = 0  # bytes of it that `printed` has returned
        with _stderr_in(self._printed.fileno()) as output, _ignored(), Connection(theirs.detach()) as end:
            self._process = context.Process(
                target=_run, args=(worker.main, end, model, output), name="laneformer-engine", daemon=True
            )
            self._process.start()
        self._channel = Channel(ours, receive, lost)
        self.send = self._channel.send

    @property
    def unsent(self) -> int:
        """Bytes that the process has not taken."""
        return self._channel.unsent

    def close(self) -> None:
        """Closes the pipe, which makes the process end."""
        self._channel.close()

    async def end(self, patience: float) -> tuple[str, str]:
        """Waits for the end of the process, and kills it after `patience` seconds, for example while it loads a model.
        Returns how it ended, and the last that it printed. Call it once.
        """
        self.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._process.join, patience)
        if self._process.is_alive():
            self._process.kill()
            await loop.run_in_executor(None, self._process.join)
        with self._printed:
            printed = self.printed()
        code = self._process.exitcode
        return f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}", printed

    def printed(self) -> str:
        """What the process and its libraries have printed besides the log since the last call, at most LAST_BYTES of
        its end.
        """
        file = self._printed.fileno()
        size = os.fstat(file).st_size
        text = os.pread(file, LAST_BYTES, max(self._shown, size - LAST_BYTES)).decode(errors="replace")
        self._shown = size
        if size > MOST_BYTES:
            os.ftruncate(file, 0)
            self._shown = 0
        return text


def _run(work: Callable[[Connection, ServedModel], None], end: Connection, model: ServedModel, output: Any) -> None:
    """The process's main function. work: infer.serve.worker.main. output: the result of DupFd."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    log.LOG.descriptor = output.detach()
    work(end, model)


@contextmanager
def _stderr_in(file: int) -> "Iterator[_Passed]":
    """A context in which a new process gets `file` as its standard error. Yields the server's, for the process."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file, 2)
    try:
        yield _Passed(kept)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class _Passed:
    """A file descriptor that a process which is being spawned gets."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def __reduce__(self):
        return _same, (DupFd(self._descriptor),)


def _same(value: Any) -> Any:
    return value


@contextmanager
def _ignored() -> Iterator[None]:
    """A context in which a new process inherits that IGNORED signals are ignored. This process handles them later,
    because blocked signals wait.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
