"""A model's plan: its ops (laneformer/ops.py) and its schedule, as data for Python and as words for C++.

A plan is all that kernels know about a model. custom_calls/words.py defines how a plan becomes words, which
custom_calls/common/plan.cc decodes.

Vectors (norm gains, biases) are stored in one float32 array, the small weights. Lane l's share of a weight starts at
offset + l * stride and contains its experts one after the other. The biases of a product follow each other, so the
biases of all its rows are one vector per lane.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from laneformer.custom_calls.words import Reader, Writer
from laneformer.errors import CheckpointError, ConfigError
from laneformer.formats import FORMATS
from laneformer.ops import Attend, DecoderOps, Kept, KeptDtype, Product, RootRoute, Weight, kept_by, without_kernel
from laneformer.quantized import Quantized

ALIGNED = 16  # floats, 64 bytes: alignment of a small weight, and of the biases of a product

Part = tuple[int, float]  # a module's number, and the weight of its output
W = TypeVar("W")


@dataclass(frozen=True)
class Event:
    """A change of a lane's stream: the lane's own output of a module is added, or a sum over the lanes lands."""

    payload: int
    """Number of the sum that lands; -1 if an own output is added."""
    module: int = 0
    """Module whose own output is added."""
    weight: float = 1.0
    """Factor on that output."""
    apart: tuple[Part, ...] = ()
    """The lane's own parts of the sum that it adds at another time: they are subtracted from the sum."""


@dataclass(frozen=True)
class Sum:
    """A sum over all lanes of weighted module outputs."""

    width: int
    """Number of channels that are summed, from channel 0."""
    complete_at: int
    """Time at which its last part exists."""
    stream_mean: bool
    """Whether the sum includes the mean of the lanes' streams."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Table:
    """A laneformer.layout.Schedule for streams of a given width. Events at one time are in the order of
    laneformer/executor.py: own outputs are added first, then sums land. An own output that lands with a sum at the same
    time has no event: the sum contains it.
    """

    events: tuple[tuple[Event, ...], ...]
    """The events at each time, from 0 to the number of modules."""
    sums: tuple[Sum, ...]
    """All sums, in the order in which they are issued."""

    @classmethod
    def of(cls, schedule, hidden: int) -> "Table":
        payloads = schedule.payloads
        events = []
        for time in range(schedule.num_modules + 1):
            landings = [landing for landing in schedule.landings if landing.at == time]
            now = [
                Event(-1, m, own.scale)
                for m, own in enumerate(schedule.own)
                if own.at == time and not any(schedule.own_lands_with(m, landing) for landing in landings)
            ]
            for landing in landings:
                apart = tuple(part for part in landing.payload.parts if not schedule.own_lands_with(part[0], landing))
                now.append(Event(payloads.index(landing.payload), apart=apart))
            events.append(tuple(now))
        sums = tuple(
            Sum(
                round(payload.channels * hidden),
                payload.complete_at,
                payload.stream_mean_at is not None,
                tuple(payload.parts),
            )
            for payload in payloads
        )
        return cls(tuple(events), sums)

    @cached_property
    def exchanges(self) -> list[tuple[int, int]]:
        """Times at which each sum is issued and last read. The last entry is the exchange of the head."""
        reads = {event.payload: time for time, now in enumerate(self.events) for event in now if event.payload >= 0}
        end = len(self.events) - 1
        return [(total.complete_at, reads.get(i, total.complete_at)) for i, total in enumerate(self.sums)] + [
            (end, end)
        ]

    @cached_property
    def history(self) -> int:
        """Number of its latest modules' outputs that a lane must keep, because they are still to be added, sent, or
        subtracted from a sum.
        """
        ages = [1]
        for time, now in enumerate(self.events):
            for event in now:
                modules = (
                    [event.module]
                    if event.payload < 0
                    else [m for m, _ in (*event.apart, *self.sums[event.payload].parts)]
                )
                ages += [time - m + 1 for m in modules]
        return max(ages)


class Dtype(IntEnum):
    """Number formats of packed weights and caches (KERNEL_FORMATS), with their numbers in the kernels."""

    float32 = FORMATS["float32"].id
    bfloat16 = FORMATS["bfloat16"].id
    float16 = FORMATS["float16"].id


class Place(NamedTuple):
    """Location of a vector in the array of small weights: lane l's part, with all its experts, starts at
    offset + l * stride.
    """

    offset: int
    """Index of lane 0's first float."""
    stride: int
    """Floats from one lane's part to the next; 0 if all lanes read the same."""


@dataclass(frozen=True)
class Plan:
    """Everything that a decode kernel must know about a model."""

    ops: DecoderOps
    schedule: Table
    weight_dtype: Dtype
    """Dtype in which matrices are packed."""
    cache_dtype: Dtype
    """Dtype of keys, values and the other cached vectors."""
    rounded_activations: bool
    """Whether vectors are rounded to the weights' dtype before a product reads them; otherwise they are float32."""

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """All weights by path, in the order of the words."""
        return {weight.path: weight for weight in self._writer.weights}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The number of each weight in C++, by path."""
        return {path: index for index, path in enumerate(self.weights)}

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Shape of the whole array of a weight, as in the table of laneformer/weights.py."""
        weight = self.weights[path]
        lanes = (self.ops.lanes,) if weight.lane_sharded else ()
        return (*lanes, *((weight.experts,) if weight.experts else ()), *weight.shape)

    @cached_property
    def _cuts(self) -> dict[str, list[Weight]]:
        """The weights that are cut from a matrix of the table in laneformer/weights.py, by that matrix's path."""
        found: dict[str, list[Weight]] = {}
        for weight in self.weights.values():
            if weight.cut_from:
                found.setdefault(weight.cut_from, []).append(weight)
        return found

    def parts(self, path: str, weight: W) -> dict[str, W]:
        """The plan's weights that a weight of the table in laneformer/weights.py supplies, by their paths in the plan:
        the weight itself, or the parts that are cut from it.
        """
        cuts = self._cuts.get(path)
        return {cut.path: _cut(cut, weight) for cut in cuts} if cuts else {path: weight}

    @cached_property
    def places(self) -> dict[str, Place]:
        """Location of every small weight, by path."""
        return dict(_places(self.ops))

    @cached_property
    def small_size(self) -> int:
        """Size of the array of small weights, in floats."""
        ends = (
            place.offset + place.stride * (self.ops.lanes - 1) + _size(self.weights[path])
            for path, place in self.places.items()
        )
        return max(ends, default=0)

    def place(self, small: np.ndarray, path: str, weight: np.ndarray) -> None:
        """Copies a small weight of the shape `shape_of(path)` into `small`, float32 [small_size]."""
        rows = np.asarray(self.with_plus(path, weight), np.float32).reshape(-1, _size(self.weights[path]))
        offset, stride = self.places[path]
        for lane, row in enumerate(rows):
            small[offset + lane * stride : offset + lane * stride + len(row)] = row

    def with_plus(self, path: str, weight: np.ndarray) -> np.ndarray:
        """A weight with `Weight.plus` added, in float32; the weight unchanged if that is 0."""
        plus = self.weights[path].plus
        return np.asarray(weight, np.float32) + np.float32(plus) if plus else weight

    def checked_table(self, path: str, weight: np.ndarray) -> np.ndarray:
        """A table of experts as the float32 array that kernels read; any other weight unchanged. Raises CheckpointError
        if the table contains an expert that the model does not have.
        """
        if path not in self.tables:
            return weight
        experts = self.tables[path]
        wrong = np.argwhere((weight < 0) | (weight >= experts))
        if len(wrong):
            place = tuple(wrong[0])
            raise CheckpointError(
                f"weight {path} has expert {int(weight[place])} at [{', '.join(map(str, place))}], but the model has"
                f" experts 0 to {experts - 1}: copy the checkpoint again, or use an earlier one"
            )
        return weight.astype(np.float32)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products of all layers, in order."""
        return tuple(product for layer in self.ops.layers for product in layer.products)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Paths of the weights that may be quantized: the matrices of products and of the head, except a head that is
        the embedding table.
        """
        paths = {matrix.weight.path for op in self.products for matrix in op.matrices}
        return frozenset(paths | {self.ops.head.weight.path}) - {self.ops.embedding.path}

    @cached_property
    def tables(self) -> dict[str, int]:
        """The number of experts by the path of each weight that is a table of experts."""
        routes = (op for layer in self.ops.layers for op in layer.ops if isinstance(op, RootRoute))
        return {op.by_token.path: op.matrix.rows for op in routes if op.by_token}

    @cached_property
    def attends(self) -> tuple[Attend, ...]:
        """The Attend ops of all layers, in order. A layer has at most one, and its cache contains that op's keys and
        values.
        """
        return tuple(op for layer in self.ops.layers for op in layer.ops if isinstance(op, Attend))

    @cached_property
    def kept(self) -> tuple[dict[str, Kept], ...]:
        """The arrays that each layer keeps between tokens, by name, in the order of the ops: that of a call's operands.
        With s slots and t entries, an array is [lanes, s, t, *shape].
        """
        return tuple(
            {name: kept for op in layer.ops for name, kept in kept_by(op).items()} for layer in self.ops.layers
        )

    def kept_dtype(self, kept: Kept) -> str:
        """The name of a kept array's dtype."""
        return self.cache_dtype.name if kept.dtype is KeptDtype.CACHE else kept.dtype.name.lower()

    def kept_bytes(self, positions: int) -> int:
        """Bytes of all arrays that the layers keep, with room for `positions` positions."""
        width = FORMATS[self.cache_dtype.name].bits // 8
        return self.ops.lanes * sum(
            math.prod(kept.shape) * (width if kept.dtype is KeptDtype.CACHE else 4) * kept.entries(positions)
            for layer in self.kept
            for kept in layer.values()
        )

    @cached_property
    def words(self) -> np.ndarray:
        """The plan as words (custom_calls/words.py), int32 [n]. Raises ValueError for a size that does not fit."""
        places = [self.places.get(path, (-1, 0)) for path in self.weights]
        return self._writer.finish(places, self.small_size)

    @cached_property
    def floats(self) -> np.ndarray:
        """The constants to which the words refer, float32 [m]."""
        return np.array(self._writer.floats, np.float32)

    @cached_property
    def _writer(self) -> Writer:
        writer = Writer()
        writer.put(self, Plan)
        return writer


def make_plan(
    ops: DecoderOps, schedule, *, weight_dtype: str = "float32", cache_dtype: str = "float32", rounded_activations=False
) -> Plan:
    """The plan of a model. schedule: a laneformer.layout.Schedule with two modules for each layer of `ops`. The other
    arguments are as in Plan. Raises ConfigError for an op that no kernel computes.
    """
    if reason := without_kernel(ops):
        raise ConfigError(f"no decode kernel runs this model ({reason})")
    table = Table.of(schedule, ops.hidden_size)
    return Plan(ops, table, Dtype[weight_dtype], Dtype[cache_dtype], rounded_activations)


def _places(ops: DecoderOps) -> Iterator[tuple[str, Place]]:
    """Path and location of each small weight: first the biases, product by product, then the other small weights in the
    order of the ops.
    """
    end = 0

    def together(weights: list[Weight]) -> Iterator[tuple[str, Place]]:
        nonlocal end
        if len({weight.lane_sharded for weight in weights}) > 1:
            raise ValueError(f"only some biases of a product are lane_sharded: {[w.path for w in weights]}")
        at, width = end, sum(map(_size, weights))
        stride = width if weights[0].lane_sharded else 0
        end += -(-max(width, stride * ops.lanes) // ALIGNED) * ALIGNED
        for weight in weights:
            yield weight.path, Place(at, stride)
            at += _size(weight)

    biases = [
        [matrix.bias for matrix in product.matrices if matrix.bias is not None]
        for layer in ops.layers
        for product in layer.products
    ]
    placed = {weight.path for group in biases for weight in group}
    others = [[w] for w in dict.fromkeys(_weights(ops)) if not w.is_matrix and w.path not in placed]
    for group in (*(group for group in biases if group), *others):
        yield from together(group)


def _cut(weight: Weight, array: Any) -> Any:
    """Cuts `weight`, [lanes, heads, *weight.shape], from a matrix [lanes, heads * rows, columns]: a record, or an array
    of any library.
    """
    heads, first, count = weight.experts or 1, weight.first_row, weight.shape[weight.transposed]
    if isinstance(array, Quantized):
        return array.cut(heads, first, count, weight.transposed)
    rows = array.reshape(*array.shape[:-2], heads, -1, array.shape[-1])[..., first : first + count, :]
    return rows.swapaxes(-1, -2) if weight.transposed else rows


def _size(vector: Weight) -> int:
    """Number of values in one lane's share of a vector, for all experts."""
    return math.prod(vector.shape) * (vector.experts or 1)


def _weights(value) -> Iterator[Weight]:
    """All weights in a tree of dataclasses and tuples, in the order of the words."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _weights(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _weights(getattr(value, field.name))


class Decoded(NamedTuple):
    """A plan that was decoded from words."""

    plan: Plan
    """The plan; each weight's path is its number as text."""
    places: tuple[Place | None, ...]
    """Location of each weight by number; None for matrices."""
    small_size: int
    """Size of the array of small weights, in floats."""


def decode_plan(words: np.ndarray, floats: np.ndarray) -> Decoded:
    """The inverse of Plan.words and Plan.floats, except for the weights' paths. Raises ValueError for invalid words."""
    reader = Reader(words, floats)
    plan = reader.get(Plan)
    reader.finish()
    places = tuple(None if offset < 0 else Place(offset, stride) for offset, stride in reader.places)
    return Decoded(plan, places, reader.small_size)
