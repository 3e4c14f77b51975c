"""Trees of dataclasses as words: the format in which a plan travels to C++ (custom_calls/common/plan.cc decodes it).

A tree is an array of words (int32) and one of constants (float32):

    FORMAT, number of words, number of floats, size of the array of small weights
    number of weights, then of each: lane_sharded, experts or 0, offset, stride, number of dimensions, dimensions
    number of rotations, then of each: number of pairs, index of the first frequency, index of the factor
    the fields of the root

A field that is a number, a truth value or an enumeration is one word; a float is its index among the floats; a Weight
or a Rotary is its index in the tables above. A tuple of any length is its count, then its elements. An optional field
is 0, or 1 and the field. Any other dataclass is its fields in their order. Where a field may be one of several
dataclasses (an op), first come its number among them, from 0, and the number of its words. Texts do not travel: a
weight is known by its number.

offset and stride say where a vector lies among the small weights; a matrix, which the kernel packs, has offset -1.
"""

import typing
from collections.abc import Sequence

import numpy as np

from custom_calls.ops_header import alternatives, fields
from laneformer.ops import Rotary, Weight

FORMAT = 6  # raise it whenever older words could be misread


class Writer:
    """Collects the words of a tree and the tables that they refer to."""

    def __init__(self):
        self.words: list[int] = []
        self.floats: list[float] = []
        self.weights: list[Weight] = []
        self.rotaries: list[int] = []
        """Their words, three of each."""
        self._seen: dict = {}

    def put(self, value, kind) -> None:
        """Appends the words of a value of this type."""
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
        """All words, the tables included; places: offset and stride of each weight."""
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
                    f"the model's plan contains {word}, which does not fit 32 bits: make the model smaller"
                )
        return np.array(words, np.int32)


class Reader:
    """Reads what a Writer wrote. Raises ValueError where the words do not fit together."""

    def __init__(self, words: np.ndarray, floats: np.ndarray):
        self._words, self._floats, self._at = words.tolist(), floats.tolist(), 0
        head = [self._next() for _ in range(4)]
        if head[:3] != [FORMAT, len(self._words), len(self._floats)]:
            wanted = [FORMAT, len(self._words), len(self._floats)]
            raise ValueError(f"a plan must begin with format, words and floats = {wanted}, this one with {head[:3]}")
        self.small_size = head[3]
        self.weights: list[Weight] = []
        """Their paths are their numbers."""
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
        """Raises ValueError if words are left."""
        if self._at != len(self._words):
            raise ValueError(f"{len(self._words) - self._at} words follow the end of the plan")

    def _next(self) -> int:
        if self._at == len(self._words):
            raise ValueError("the plan is truncated")
        self._at += 1
        return self._words[self._at - 1]

    def get(self, kind):
        """The next value of this type."""
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
            kinds, optional = found
            if optional and not self._next():
                return None
            return self.get(kinds[0]) if len(kinds) == 1 else self._one_of(kinds)
        return kind(**{name: self.get(field_kind) for name, field_kind in fields(kind)})

    def _one_of(self, kinds: list):
        kind, length, begin = kinds[self._next()], self._next(), self._at
        value = self.get(kind)
        if self._at != begin + length:
            raise ValueError(f"{kind.__name__} has {length} words, of which {self._at - begin} were read")
        return value
