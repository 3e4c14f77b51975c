"""The schedule table as the kernels read it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
    """A laneformer.layout.Schedule for streams of so many channels. What happens at a time happens in the order of
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


def encode_schedule(schedule, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Words int32 [n] and weights float32 [m] of a laneformer.layout.Schedule; hidden: channels of a stream.

    The format stands at `Decoder::read_events` (cpu/decoder.cc).
    """
    table = Table.of(schedule, hidden)
    weights: list[float] = []

    def weight(value: float) -> int:
        weights.append(value)
        return len(weights) - 1

    def parts(pairs) -> list[int]:
        return [len(pairs), *(word for m, w in pairs for word in (m, weight(w)))]

    words: list[int] = []
    for now in table.events:
        words.append(len(now))
        for event in now:
            own = event.payload < 0
            words += [0, event.module, weight(event.weight)] if own else [1, event.payload, *parts(event.apart)]
    words.append(len(table.sums))
    for total in table.sums:
        words += [total.width, total.complete_at, int(total.stream_mean), *parts(total.parts)]
    return np.array(words, np.int32), np.array(weights or [0.0], np.float32)
