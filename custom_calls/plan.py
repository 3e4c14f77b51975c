"""A model's plan: its ops (laneformer/ops.py) and its schedule, as data for Python and as words for C++.

Kernels know a model by its plan alone. custom_calls/words.py says how a plan becomes words, which
custom_calls/common/plan.cc decodes.

Vectors (norm gains, biases) lie in one float32 array, the small weights: lane l's share of a weight is at
offset + l * stride, experts' one after the other. The biases of a product are neighbours, so that biases of all rows
are one vector per lane.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from custom_calls.words import Reader, Writer
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS, KERNEL_FORMATS
from laneformer.ops import (
    ENTRIES,
    Attend,
    CompressedKeep,
    DecoderOps,
    DeltaNet,
    LatentKeep,
    Op,
    Product,
    RootRoute,
    Weight,
    without_kernel,
)
from laneformer.quantized import Quantized

ALIGNED = 16  # floats: a small weight, or a product's biases, begins at a multiple of 64 bytes

Part = tuple[int, float]  # a module, and the weight of its output


@dataclass(frozen=True)
class Event:
    """What happens to a lane's stream: its own output of a module is added, or a sum over the lanes lands."""

    payload: int
    """Which sum lands; -1 for an own output."""
    module: int = 0
    weight: float = 1.0
    apart: tuple[Part, ...] = ()
    """Own parts of the sum that the lane adds by itself: they are taken out again."""


@dataclass(frozen=True)
class Sum:
    """Over all lanes, of weighted module outputs, perhaps with the mean of the streams."""

    width: int
    """Channels, from the first."""
    complete_at: int
    stream_mean: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Table:
    """A laneformer.layout.Schedule for streams of a given width. Events of one time are in the order of
    laneformer/executor.py: own outputs are added, then sums land; a sum that has the lane's own part adds it as part of
    the whole.
    """

    events: tuple[tuple[Event, ...], ...]
    """By time, modules + 1."""
    sums: tuple[Sum, ...]
    """In the order in which they are issued."""

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
        """Of each sum, and last of the head, the times at which it is issued and last read."""
        reads = {event.payload: time for time, now in enumerate(self.events) for event in now if event.payload >= 0}
        end = len(self.events) - 1
        return [(total.complete_at, reads.get(i, total.complete_at)) for i, total in enumerate(self.sums)] + [
            (end, end)
        ]

    @cached_property
    def history(self) -> int:
        """How many of the last modules' outputs a lane must keep: those that are still to be added, sent, or taken out
        of a sum.
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


Dtype = IntEnum("Dtype", {name: FORMATS[name].id for name in KERNEL_FORMATS})
"""Number formats of packed weights and caches, by the numbers that kernels know them by."""


class Kept(NamedTuple):
    """An array that a layer keeps between tokens: [lanes, 1, t, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fixed: bool = False
    """t = 1; otherwise it is the positions that fit, or the entries of these."""
    every: int = 1
    """Positions of an entry."""

    def entries(self, positions: int) -> int:
        """t, where that many positions fit."""
        return 1 if self.fixed else -(-positions // self.every)


class Place(NamedTuple):
    """Where a vector lies in the array of small weights: that of lane l, of all experts, at offset + l * stride."""

    offset: int
    stride: int
    """0 where all lanes read the same."""


@dataclass(frozen=True)
class Plan:
    """All that a decode kernel must know of a model."""

    ops: DecoderOps
    schedule: Table
    weight_dtype: Dtype
    """In which matrices are packed."""
    cache_dtype: Dtype
    rounded_activations: bool
    """Whether products read their vectors rounded to the weights' dtype; otherwise in float32."""

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """By path, in the order of the words."""
        return {weight.path: weight for weight in self._writer.weights}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The number by which C++ knows a weight, by path."""
        return {path: index for index, path in enumerate(self.weights)}

    def shape_of(self, path: str) -> tuple[int, ...]:
        """The whole array's, as in the table of laneformer/weights.py."""
        weight = self.weights[path]
        lanes = (self.ops.lanes,) if weight.lane_sharded else ()
        return (*lanes, *((weight.experts,) if weight.experts else ()), *weight.shape)

    @cached_property
    def _cuts(self) -> dict[str, list[Weight]]:
        """What is cut from a matrix of the table, by the path of that."""
        found: dict[str, list[Weight]] = {}
        for weight in self.weights.values():
            if weight.cut_from:
                found.setdefault(weight.cut_from, []).append(weight)
        return found

    def parts(self, path: str, weight: np.ndarray | Quantized) -> dict[str, np.ndarray | Quantized]:
        """What a plan has of a weight of the table, by its own paths: the weight itself, or what is cut from it."""
        cuts = self._cuts.get(path)
        return {cut.path: _cut(cut, weight) for cut in cuts} if cuts else {path: weight}

    @cached_property
    def places(self) -> dict[str, Place]:
        """Of every small weight, by path."""
        return dict(_places(self.ops))

    @cached_property
    def small_size(self) -> int:
        """Floats in the array of small weights."""
        ends = (
            place.offset + place.stride * (self.ops.lanes - 1) + _size(self.weights[path])
            for path, place in self.places.items()
        )
        return max(ends, default=0)

    def place(self, small: np.ndarray, path: str, weight: np.ndarray) -> None:
        """Copies a small weight, of the shape `shape_of`, into the array of all of them: float32 [small_size]."""
        rows = np.asarray(self.with_plus(path, weight), np.float32).reshape(-1, _size(self.weights[path]))
        offset, stride = self.places[path]
        for lane, row in enumerate(rows):
            small[offset + lane * stride : offset + lane * stride + len(row)] = row

    def with_plus(self, path: str, weight: np.ndarray) -> np.ndarray:
        """A weight as kernels have it: float32 with `Weight.plus` added, where that is not 0."""
        plus = self.weights[path].plus
        return np.asarray(weight, np.float32) + np.float32(plus) if plus else weight

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Of all layers, in order."""
        return tuple(product for layer in self.ops.layers for product in layer.products)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Paths of the weights that may be quantized: those of products, but not the embedding's table as the head."""
        paths = {matrix.weight.path for op in self.products for matrix in op.matrices}
        return frozenset(paths | {self.ops.head.weight.path}) - {self.ops.embedding.path}

    @cached_property
    def tables(self) -> dict[str, int]:
        """Paths of the weights that are tables of experts, and how many experts there are."""
        routes = [op for layer in self.ops.layers for op in layer.ops if isinstance(op, RootRoute) and op.by_token]
        return {op.by_token.path: op.matrix.rows for op in routes}

    @cached_property
    def attends(self) -> tuple[Attend, ...]:
        """Of all layers that attend, in order: one in each, whose keys and values are that layer's cache."""
        return tuple(op for layer in self.ops.layers for op in layer.ops if isinstance(op, Attend))

    @cached_property
    def kept(self) -> tuple[tuple[Kept, ...], ...]:
        """What each layer keeps between tokens."""
        return tuple(
            tuple(kept for op in layer.ops for kept in kept_of(op, self.cache_dtype.name)) for layer in self.ops.layers
        )

    def kept_bytes(self, positions: int) -> int:
        """Of all that layers keep of that many positions."""
        return self.ops.lanes * sum(
            math.prod(kept.shape) * (2 if kept.dtype in ("bfloat16", "float16") else 4) * kept.entries(positions)
            for layer in self.kept
            for kept in layer
        )

    @cached_property
    def words(self) -> np.ndarray:
        """int32 [n]. Raises ValueError for a size that fits no word."""
        places = [self.places.get(path, (-1, 0)) for path in self.weights]
        return self._writer.finish(places, self.small_size)

    @cached_property
    def floats(self) -> np.ndarray:
        """float32 [m]: the constants to which words refer."""
        return np.array(self._writer.floats, np.float32)

    @cached_property
    def _writer(self) -> Writer:
        writer = Writer()
        writer.put(self, Plan)
        return writer


def make_plan(
    ops: DecoderOps, schedule, *, weight_dtype: str = "float32", cache_dtype: str = "float32", rounded_activations=False
) -> Plan:
    """schedule: a laneformer.layout.Schedule of two modules for each layer of `ops`. The others are as in Plan. Raises
    ConfigError for an op that no kernel computes.
    """
    if reason := without_kernel(ops):
        raise ConfigError(f"no decode kernel runs this model ({reason})")
    table = Table.of(schedule, ops.hidden_size)
    return Plan(ops, table, Dtype[weight_dtype], Dtype[cache_dtype], rounded_activations)


def kept_of(op: Op, cache_dtype: str) -> tuple[Kept, ...]:
    """What an op keeps between tokens: `plan::kept_arrays` of custom_calls/common/plan.cc, by name.

    DeltaNet keeps for each key head: `base`, the position before which `state` has everything, a multiple of ENTRIES;
    `state`, the transposed matrices of its value heads in tiles of 16 rows; `entries`, for twice ENTRIES positions from
    there on keys, deltas and decays (custom_calls/cpu/ops/delta_net.cc); `inputs`, at position % their number, what the
    convolution reads.

    Compressed attention keeps the vector of every position, entries and, at position % their number, the newest
    positions' vectors and gates, which wait for the rest of their entries; `base` is the first position after those
    that are certain.
    """
    if isinstance(op, Attend):
        return tuple(Kept(name, (op.kv_heads, op.head_dim), cache_dtype) for name in ("keys", "values"))
    if isinstance(op, LatentKeep):
        return (Kept("latents", (op.rank + 2 * len(op.rotary.frequencies),), cache_dtype),)
    if isinstance(op, CompressedKeep):
        found = [Kept("base", (1,), "int32", True)] if op.entries else []
        found.append(Kept("positions", (op.channels,), cache_dtype))
        for name, own in (("compressed", op.entries), ("index_keys", op.index_keys)):
            if own:
                found.append(Kept(name, (own.channels,), cache_dtype, every=own.ratio))
                found.append(Kept(f"{name}_tail", (own.tail, 2 * own.width), "float32", True))
        return tuple(found)
    if not isinstance(op, DeltaNet):
        return ()
    inputs = op.convolution.shape[1] - 1 + ENTRIES, op.head_channels
    return (
        Kept("base", (op.key_heads,), "int32", True),
        Kept("entries", (op.key_heads, 2 * op.stretch_floats), "float32", True),
        Kept("inputs", (op.key_heads, *inputs), cache_dtype, True),
        Kept("state", (op.key_heads, op.delta_width // 16, op.key_dim, 16), "float32", True),
    )


def _places(ops: DecoderOps) -> Iterator[tuple[str, Place]]:
    """The layout of the small weights: biases product by product, then every other one, in the order of the ops."""
    end = 0

    def together(weights: list[Weight]) -> Iterator[tuple[str, Place]]:
        nonlocal end
        if len({weight.lane_sharded for weight in weights}) > 1:
            raise ValueError(f"biases of one product, but not all are lane_sharded: {[w.path for w in weights]}")
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


def _cut(weight: Weight, array: np.ndarray | Quantized) -> np.ndarray | Quantized:
    """[lanes, heads, *shape] of the heads' rows [lanes, heads * rows, columns]."""
    heads, first, count = weight.experts, weight.first_row, weight.shape[weight.transposed]
    if isinstance(array, Quantized):
        return array.cut(heads, first, count, weight.transposed)
    rows = array.reshape(*array.shape[:-2], heads, -1, array.shape[-1])[..., first : first + count, :]
    return rows.swapaxes(-1, -2) if weight.transposed else rows


def _size(vector: Weight) -> int:
    """Values of one lane, of all experts."""
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
    """What the words of a plan say."""

    plan: Plan
    """The weights' paths are their numbers, as text."""
    places: tuple[Place | None, ...]
    """Of each weight; None for matrices."""
    small_size: int


def decode_plan(words: np.ndarray, floats: np.ndarray) -> Decoded:
    """The inverse of Plan.words and Plan.floats, but for the weights' paths. Raises ValueError for other words."""
    reader = Reader(words, floats)
    plan = reader.get(Plan)
    reader.finish()
    places = tuple(None if offset < 0 else Place(offset, stride) for offset, stride in reader.places)
    return Decoded(plan, places, reader.small_size)
