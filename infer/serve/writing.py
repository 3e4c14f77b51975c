"""Answers as JSON, in pieces. An answer may have tens of megabytes; other clients are served while it is written, sent
and freed.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

PIECE = 256  # items of a list, without lists and objects in them, that are written at once
DEEP = 16  # levels of a value below which it is written at once: generators may not be nested without end
PART_BYTES = 1 << 16  # bytes that are sent at once
TURN_SECONDS = 0.002  # time after which other tasks run


class Written:
    """A list of which only the JSON is kept: one piece of bytes instead of thousands of objects, whose release and
    collection would keep the interpreter lock.
    """

    def __init__(self, items: list[Any] | None = None):
        self.pieces: list[bytes] = []
        """JSON of some items each, without the brackets."""
        self.add(items or [])

    def add(self, items: "list[Any] | Written") -> None:
        """Appends items, at most a few hundred values at once."""
        if isinstance(items, Written):
            self.pieces += items.pieces
        elif items:
            self.pieces.append(_dumped(items, ascii_only=True)[1:-1])


def json_pieces(value: Any, ascii_only: bool = True, depth: int = 0) -> Iterator[bytes]:
    """The JSON of a value, which may contain `Written`. ascii_only: whether other characters are escaped, as events
    need it, because clients also end lines at some of these. depth: levels above the value.
    """
    comma, colon = (b", ", b": ") if ascii_only else (b",", b":")
    if isinstance(value, Written):
        yield b"["
        for i, piece in enumerate(value.pieces):
            if i:
                yield comma
            yield piece
        yield b"]"
    elif isinstance(value, dict) and value and depth < DEEP:
        for i, (name, each) in enumerate(value.items()):
            yield (comma if i else b"{") + _dumped(name, ascii_only) + colon
            yield from json_pieces(each, ascii_only, depth + 1)
        yield b"}"
    elif isinstance(value, list) and value and depth < DEEP:
        yield b"["
        for i in range(0, len(value), PIECE):
            part = value[i : i + PIECE]
            if any(isinstance(each, dict | list | Written) for each in part):
                for j, each in enumerate(part):
                    if i or j:
                        yield comma
                    yield from json_pieces(each, ascii_only, depth + 1)
            else:
                yield (comma if i else b"") + _dumped(part, ascii_only)[1:-1]
        yield b"]"
    else:
        yield _dumped(value, ascii_only)


def _dumped(value: Any, ascii_only: bool) -> bytes:
    separators = None if ascii_only else (",", ":")  # as Starlette writes it
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=separators).encode()


async def parts_of(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Joins pieces to parts of about PART_BYTES, or of what took TURN_SECONDS. Other tasks run after each part."""
    part: list[bytes] = []
    size, until = 0, time.perf_counter() + TURN_SECONDS
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= PART_BYTES or time.perf_counter() > until:
            yield b"".join(part)
            part.clear()
            await asyncio.sleep(0)
            size, until = 0, time.perf_counter() + TURN_SECONDS
    if part:
        yield b"".join(part)
