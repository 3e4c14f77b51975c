"""The prompts that wait to be read. Clients take turns, short prompts do not wait for long ones, and the work on a
prompt whose client has left ends at once.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

SHORT = 1 << 14  # characters or items of a prompt
MOST_CLIENTS = 4096  # whose last turn is known


def size_of(value: Any) -> int:
    """Characters and items in a value of JSON, which bound the time for reading it."""
    size, left = 0, [value]
    while left:
        each = left.pop()
        size += len(each) if isinstance(each, str | dict | list | tuple) else 1
        if isinstance(each, dict):
            size += sum(map(len, each))
            left += each.values()
        elif isinstance(each, list | tuple) and not (each and isinstance(each[0], int)):
            left += each
    return size


class Asked(NamedTuple):
    """A question and what decides its turn."""

    client: str
    size: int
    question: Any


class Questions(Generic[T]):
    """A queue of questions for several threads."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: dict[int, Asked] = {}
        self._served: dict[str, int] = {}  # client -> time of its last turn
        self._turns = 0
        self._read: dict[int, Callable[[], None] | None] = {}  # number -> ends the work on it
        self._dropped: set[int] = set()

    def put(self, number: int, client: str, size: int, question: T) -> None:
        """Adds a question. client: who asks. size: see `size_of`."""
        with self._changed:
            self._waiting[number] = Asked(client, size, question)
            self._changed.notify_all()

    def take(self, short: bool, stop: Callable[[], None] | None = None) -> tuple[int, T]:
        """Waits for a question, and takes that of the client whose last turn is longest ago; among its questions the
        shortest. short: whether to take short ones only. stop: ends the work of the calling thread.
        """
        with self._changed:
            while True:
                found = [
                    (self._served.get(asked.client, 0), asked.size, number)
                    for number, asked in self._waiting.items()
                    if asked.size <= SHORT or not short
                ]
                if found:
                    break
                self._changed.wait()
            *_, number = min(found)
            asked = self._waiting.pop(number)
            self._turns += 1
            self._served[asked.client] = self._turns
            if len(self._served) > len(self._waiting) + MOST_CLIENTS:
                del self._served[min(self._served, key=self._served.__getitem__)]
            self._read[number] = stop
            return number, asked.question

    def done(self, number: int) -> bool:
        """Ends the work on a question. Returns whether its client still waits."""
        with self._changed:
            del self._read[number]
            dropped = number in self._dropped
            self._dropped.discard(number)
            return not dropped

    def drop(self, number: int) -> None:
        """Removes a question that no client waits for, or ends the work on it."""
        with self._changed:
            if self._waiting.pop(number, None) is None and number in self._read:
                self._dropped.add(number)
                if (stop := self._read[number]) is not None:
                    stop()
