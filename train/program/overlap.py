"""How long kernels wait for exchanges in a compiled program, from the order of its instructions.

XLA:GPU starts an exchange and waits for it in two instructions; kernels between them run beside it. Two clocks follow
the order: kernels run one after another, and so do exchanges on the same link. `Overlap` reports for each purpose how
much of the time on links the kernels hide.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from laneformer.train.planning.cluster import Speeds
from laneformer.train.program.hlo import Done, Exchange, Kernel, Loop, Start, Step

FORWARD, BACKWARD, HEAD = "lanes, forward", "lanes, backward", "head and loss"
WEIGHTS, GRADIENTS, MERGED, OTHER = "weights", "gradients", "merged", "other"
PURPOSES = {
    FORWARD: "sums over lanes in the forward pass",
    BACKWARD: "sums over lanes in the backward pass",
    HEAD: "exchanges of the head and the loss, both ways",
    WEIGHTS: "weights that the data axis shares",
    GRADIENTS: "sums of gradients along the data axis",
    MERGED: "exchanges that the compiler merged, which have no name",
    OTHER: "all else, such as norms of gradients",
}
NEGLIGIBLE = 0.05
"""Share of an exchange's time. An exchange is hidden if kernels wait less than this, and not if they hide less."""


@dataclass(frozen=True)
class Overlap:
    """All exchanges with one purpose, by one device in one call of the program."""

    purpose: str
    count: int = 0
    hidden: int = 0
    """Exchanges that kernels hide completely."""
    partly: int = 0
    """Exchanges that kernels hide in part."""
    seconds: float = 0.0
    """Seconds on links."""
    exposed: float = 0.0
    """Part of `seconds` in which kernels wait."""

    @property
    def alone(self) -> int:
        """Exchanges that kernels do not hide."""
        return self.count - self.hidden - self.partly


@dataclass
class _Transfer:
    exchange: Exchange
    link: str
    begin: float
    end: float
    exposed: float = 0.0


def is_scheduled(steps: Iterable[Step]) -> bool:
    """Whether the program has an exchange that may run beside kernels, or none at all."""
    starts = [step for step in _flat(steps) if isinstance(step, Start)]
    return not starts or any(start.apart for start in starts)


def overlaps(steps: Iterable[Step], speeds: Speeds) -> tuple[Overlap, ...] | None:
    """One Overlap for each purpose with exchanges in the program, in the order of PURPOSES. None if no exchange can run
    beside kernels, as with XLA:CPU, where an exchange is one instruction.

    Exchanges on one link run one after another, in the order of their starts. If the end of an exchange is not in the
    computation of its start, it is assumed where that computation ends.
    """
    steps = tuple(steps)
    if not is_scheduled(steps):
        return None
    clock = _Clock(speeds)
    clock.run(steps)
    return tuple(clock.found[purpose] for purpose in PURPOSES if purpose in clock.found)


class _Clock:
    """Time of the kernels, and the transfers that they have not waited for yet."""

    def __init__(self, speeds: Speeds):
        self.speeds = speeds
        self.now = 0.0
        self.free: dict[str, float] = defaultdict(float)  # when each link is free again
        self.pending: dict[str, _Transfer] = {}
        self.found: dict[str, Overlap] = {}

    def run(self, steps: tuple[Step, ...]) -> None:
        started = []
        for step in steps:
            match step:
                case Start(name, exchange, _):
                    self._start(name, exchange)
                    started.append(name)
                case Done(name):
                    self._wait(name)
                case Loop(times, inner):
                    self._loop(times, inner)
                case _:
                    self.now += self._seconds(step)
        for name in started:
            self._wait(name)

    def _loop(self, times: int, inner: tuple[Step, ...]) -> None:
        if any(isinstance(step, Start) for step in _flat(inner)):
            for _ in range(times):
                self.run(inner)
        else:
            self.now += times * self._alone(inner)

    def _alone(self, steps: tuple[Step, ...]) -> float:
        return sum(
            step.times * self._alone(step.steps) if isinstance(step, Loop) else self._seconds(step)
            for step in steps
            if isinstance(step, Loop | Kernel)
        )

    def _seconds(self, kernel: Kernel) -> float:
        return self.speeds.kernel_seconds(kernel.flops, kernel.bytes)

    def _start(self, name: str, exchange: Exchange) -> None:
        link, seconds = self.speeds.exchange_seconds(exchange.kind, exchange.axis, exchange.sent)
        begin = max(self.now, self.free[link])
        self.free[link] = begin + seconds
        self.pending[name] = _Transfer(exchange, link, begin, begin + seconds)

    def _wait(self, name: str) -> None:
        if name not in self.pending:
            return
        awaited = self.pending[name]
        if awaited.end > self.now:
            for other in self.pending.values():
                if other.link == awaited.link:  # exchanges ahead in the queue are awaited too
                    other.exposed += max(0.0, min(other.end, awaited.end) - max(other.begin, self.now))
            self.now = awaited.end
        self._record(self.pending.pop(name))

    def _record(self, transfer: _Transfer) -> None:
        purpose, seconds = purpose_of(transfer.exchange), transfer.end - transfer.begin
        before = self.found.get(purpose, Overlap(purpose))
        hidden = transfer.exposed <= NEGLIGIBLE * seconds
        self.found[purpose] = replace(
            before,
            count=before.count + 1,
            hidden=before.hidden + hidden,
            partly=before.partly + (not hidden and transfer.exposed < (1 - NEGLIGIBLE) * seconds),
            seconds=before.seconds + seconds,
            exposed=before.exposed + transfer.exposed,
        )


def _flat(steps: Iterable[Step]) -> Iterable[Step]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _flat(step.steps)
        else:
            yield step


def purpose_of(exchange: Exchange) -> str:
    """The purpose of an exchange, from its axis and the model's named scopes."""
    scope = exchange.scope
    if not scope:
        return MERGED
    if exchange.axis == "lane":
        if "/head/" in scope or "/loss/" in scope:
            return HEAD
        if "transpose(" in scope:
            return BACKWARD
        return FORWARD if re.search(r"/reduce_\d+/", scope) else OTHER
    if exchange.kind == "all-gather":
        return WEIGHTS
    return GRADIENTS if "transpose(" in scope else OTHER
