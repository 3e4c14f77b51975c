"""Trees of dataclasses as words: the encoding in which C++ gets a plan (custom_calls/common/plan.cc decodes it).

A tree is an array of words (int32) and an array of constants (float32). The words are:

    FORMAT, number of words, number of floats, size of the array of small weights
    number of weights, then for each: lane_sharded, experts or 0, offset, stride, number of dimensions, dimensions
    number of rotations, then for each: number of pairs, index of the first frequency, index of the factor
    the fields of the root

An integer, a bool or an enumeration is one word. A float is its index among the floats. A Weight or a Rotary is its
index in the tables above. A tuple of any length is its count, followed by its elements. An optional field is 0 if it is
None, otherwise 1 followed by the value. Any other dataclass is its fields in order. A field that may be one of several
dataclasses (an op) starts with the number of the dataclass, counted from 0, and the number of words that follow.
Strings are not encoded: a weight is identified by its number.

offset and stride locate a vector in the array of small weights. A matrix, which the kernel packs, has offset -1.

The words of a request (custom_calls/request.py; custom_calls/common/request.cc decodes them) are their number, then the
fields of the request in the same form, with two differences: an integer has two words, the low one first, except in a
list of integers, and a float is its bits.
"""

import typing
from collections.abc import Sequence

import numpy as np

from laneformer.custom_calls.ops_header import alternatives, fields
from laneformer.custom_calls.request import Request, Source
from laneformer.ops import Rotary, Weight

LEAST_ROOM = 64  # words of a request's lists for which there is always room
WITHOUT_LISTS = Request(prompt=(), limit=0, most_drafts=0, source=Source(0, 0, 0))
FORMAT = 6  # raise it when the encoding changes; the ops themselves are part of the library's key


class Writer:
    """Collects the words of a tree, and the tables to which the words refer."""

    def __init__(self):
        self.words: list[int] = []
        self.floats: list[float] = []
        self.weights: list[Weight] = []
        self.rotaries: list[int] = []
        """The words of all rotations, three for each."""
        self._seen: dict = {}

    def put(self, value, kind) -> None:
        """Appends the words of `value`, whose declared type is `kind`."""
        if kind is float:
            self.words.append(self._constant(value))
        elif kind is Weight:
            self.words.append(self._index(value, self.weights))
        elif kind is Rotary:
            self.words.append(self._rotary(value))
        elif isinstance(kind, type) and issubclass(kind, int):  # also bool and enumerations
            self.words.append(int(value))
        elif typing.get_origin(kind) is tuple:
            self._put_tuple(value, typing.get_args(kind))
        elif found := alternatives(kind):
            self._put_alternative(value, *found)
        else:
            for name, field_kind in fields(kind):
                self.put(getattr(value, name), field_kind)

    def _put_tuple(self, value: tuple, kinds: tuple) -> None:
        if kinds[-1] is Ellipsis:
            self.words.append(len(value))
            kinds = kinds[:1] * len(value)
        for item, kind in zip(value, kinds, strict=True):
            self.put(item, kind)

    def _put_alternative(self, value, kinds: list, optional: bool) -> None:
        if optional:
            self.words.append(int(value is not None))
        if len(kinds) == 1:
            if value is not None:
                self.put(value, kinds[0])
            return
        self.words += [kinds.index(type(value)), 0]
        begin = len(self.words)
        self.put(value, type(value))
        self.words[begin - 1] = len(self.words) - begin

    def _constant(self, value: float) -> int:
        return self._index(float(np.float32(value)), self.floats)

    def _rotary(self, rotary: Rotary) -> int:
        if rotary not in self._seen:
            self._seen[rotary] = len(self.rotaries) // 3
            factor = self._constant(rotary.factor)
            self.rotaries += [len(rotary.frequencies), len(self.floats), factor]
            self.floats += [float(np.float32(frequency)) for frequency in rotary.frequencies]
        return self._seen[rotary]

    def _index(self, value, table: list) -> int:
        key = (type(value), value)
        if key not in self._seen:
            self._seen[key] = len(table)
            table.append(value)
        return self._seen[key]

    def finish(self, places: Sequence[tuple[int, int]], small_size: int) -> np.ndarray:
        """All words with the tables, int32 [n]. places: offset and stride of each weight. Raises ValueError for a
        number that does not fit in 32 bits.
        """
        weights = [
            word
            for weight, place in zip(self.weights, places, strict=True)
            for word in (int(weight.lane_sharded), weight.experts or 0, *place, len(weight.shape), *weight.shape)
        ]
        tables = [len(self.weights), *weights, len(self.rotaries) // 3, *self.rotaries]
        words = [FORMAT, 4 + len(tables) + len(self.words), len(self.floats), small_size, *tables, *self.words]
        for word in words:
            if not -(2**31) <= word < 2**31:
                raise ValueError(
                    f"the model's plan contains {word}, which does not fit in 32 bits: make the model smaller"
                )
        return np.array(words, np.int32)


class RequestWriter(Writer):
    """Collects the words of a request. Long lists of tokens are copied as arrays."""

    def __init__(self):
        super().__init__()
        self._parts: list[np.ndarray] = []

    def put(self, value, kind) -> None:
        if kind is int:
            value = min(int(value), 2**64 - 1)
            self.words += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
        elif kind == tuple[int, ...]:
            self.words.append(len(value))
            self._parts += [self._so_far(), np.asarray(value, np.int32)]
        else:
            super().put(value, kind)

    def all(self) -> np.ndarray:
        """All words, int32 [n]."""
        return np.concatenate([*self._parts, self._so_far()])

    def _so_far(self) -> np.ndarray:
        words, self.words = np.array(self.words, np.int64).astype(np.int32), []
        return words

    def _constant(self, value: float) -> int:
        return int(np.float32(value).view(np.int32))


def request_words(request: Request, room: int = 0) -> np.ndarray:
    """The words of a request, int32 [n]. n is rounded up, so requests of many sizes have the same n.

    room: number of words of lists for which there is room at least.
    """
    found, fields = _words_of(request), len(_words_of(WITHOUT_LISTS))
    most = max(LEAST_ROOM, room, 1 + len(found) - fields)
    words = np.zeros(1 + fields + (1 << (most - 1).bit_length()), np.int32)
    words[0] = 1 + len(found)
    words[1 : words[0]] = found
    return words


def _words_of(request: Request) -> np.ndarray:
    writer = RequestWriter()
    writer.put(request, Request)
    return writer.all()


class Reader:
    """Decodes the words of a Writer. Raises ValueError if they are inconsistent."""

    def __init__(self, words: np.ndarray, floats: np.ndarray):
        self._words, self._floats, self._at = words.tolist(), floats.tolist(), 0
        head = [self._next() for _ in range(4)]
        if head[:3] != [FORMAT, len(self._words), len(self._floats)]:
            wanted = [FORMAT, len(self._words), len(self._floats)]
            raise ValueError(f"a plan must begin with format, words and floats = {wanted}, got {head[:3]}")
        self.small_size = head[3]
        self.weights: list[Weight] = []
        """All weights by number; each path is the weight's number as text."""
        self.places: list[tuple[int, int]] = []
        for index in range(self._next()):
            lane_sharded, experts, offset, stride, dimensions = (self._next() for _ in range(5))
            shape = tuple(self._next() for _ in range(dimensions))
            self.weights.append(Weight(str(index), shape, bool(lane_sharded), experts or None, small=offset >= 0))
            self.places.append((offset, stride))
        self._rotaries = []
        for _ in range(self._next()):
            pairs, first, factor = (self._next() for _ in range(3))
            self._rotaries.append(Rotary(tuple(self._floats[first : first + pairs]), self._floats[factor]))

    def finish(self) -> None:
        """Raises ValueError if unread words remain."""
        if self._at != len(self._words):
            raise ValueError(f"{len(self._words) - self._at} words follow the end of the plan")

    def _next(self) -> int:
        if self._at == len(self._words):
            raise ValueError("the plan is truncated")
        self._at += 1
        return self._words[self._at - 1]

    def get(self, kind):
        """Reads the next value, whose declared type is `kind`."""
        if kind is float:
            return self._floats[self._next()]
        if kind in (Weight, Rotary):
            return (self.weights if kind is Weight else self._rotaries)[self._next()]
        if isinstance(kind, type) and issubclass(kind, int):
            return kind(self._next())
        if typing.get_origin(kind) is tuple:
            kinds = typing.get_args(kind)
            if kinds[-1] is Ellipsis:
                kinds = kinds[:1] * self._next()
            return tuple(self.get(item) for item in kinds)
        if found := alternatives(kind):
            members, optional = found
            if optional and not self._next():
                return None
            return self.get(members[0]) if len(members) == 1 else self._one_of(members)
        return kind(**{name: self.get(field_kind) for name, field_kind in fields(kind)})

    def _one_of(self, kinds: list):
        kind, length, begin = kinds[self._next()], self._next(), self._at
        value = self.get(kind)
        if self._at != begin + length:
            raise ValueError(f"{kind.__name__} has {length} words, but its fields take {self._at - begin}")
        return value
