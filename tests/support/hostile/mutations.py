"""Damaged copies of a message or a file for its parser, from a seed."""

import random
import time
from collections.abc import Callable, Iterator, Sequence

NUMBERS = (b"-1", b"0", b"9" * 30, b"1e308", b"1e999", b"NaN", b"null", b"true", b'"5"', b"[]", b"{}")
BYTES = (b"", b"\x00", b"\xff" * 8, b"\\u0000", b"\\ud800", b"[" * 200, b'{"a":' * 50, b"]}", b",", b":", b'"')


def mutants(whole: bytes, count: int, pieces: Sequence[bytes] = (*NUMBERS, *BYTES)) -> Iterator[bytes]:
    """Yields `count` copies, each with one to four places replaced by a piece, by noise or by bytes from before."""
    source = random.Random(count)
    for _ in range(count):
        changed = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            at, size = source.randrange(len(changed)), source.choice((0, 1, 1, 2, 8))
            piece = source.choice((source.choice(pieces), source.randbytes(1), bytes(changed[max(0, at - 20) : at])))
            changed[at : at + size] = piece
        yield bytes(changed)


def slowest(read: Callable[[bytes], object], inputs: Iterator[bytes], allowed: type | tuple[type, ...]) -> float:
    """Most processor seconds that `read` takes for an input. It must return or raise an allowed exception."""
    most = 0.0
    for each in inputs:
        began = time.process_time()
        try:
            read(each)
        except allowed as error:
            assert not isinstance(error, MemoryError), each
        most = max(most, time.process_time() - began)
    return most
