"""Parallelism layouts as data: when a module's output is added to its lane, and when the other lanes' parts land.

Time is counted in modules: the attention of layer 0 is module 0, its MLP module 1, and so on up to 2N - 1. An event at
time t happens after module t has computed and before module t + 1 reads the stream. Time 2N is just before the final
norm.

A layout is a function in this file that returns a `Schedule`. The model, the decode kernels, the roofline and the
diagrams read the schedule.
"""

import ast
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

from laneformer.errors import ConfigError


class Own(NamedTuple):
    """When a lane adds its own output of a module to its stream: at time `at`, times `scale`."""

    at: int
    scale: float = 1.0


class Payload(NamedTuple):
    """What one reduction sums over the lanes: the sum over `parts` (module, weight) of weight * output of the module.

    `channels` is the share of the hidden size that is sent, starting at channel 0. With `stream_mean_at` = t, the sum
    includes each lane's stream before the additions of time t, divided by the number of lanes. The result is then the
    new stream of all lanes.
    """

    parts: tuple[tuple[int, float], ...]
    channels: float = 1.0
    stream_mean_at: int | None = None

    @property
    def complete_at(self) -> int:
        """Time at which the last part exists and the reduction can be issued."""
        return max(m for m, _ in self.parts)


class Landing(NamedTuple):
    """When the other lanes' parts of `payload` are added to every stream: at time `at`."""

    at: int
    payload: Payload


@dataclass(frozen=True)
class Schedule:
    """A layout for a given depth and number of lanes: `own[m]` for each module m, and the landings in order of time."""

    name: str
    own: tuple[Own, ...]
    landings: tuple[Landing, ...]
    mixes: bool = False
    """Whether each landing is a module's whole sum that joins several residual streams through the module's mixture,
    instead of being added; see laneformer/blocks/streams.py.
    """

    @property
    def num_modules(self) -> int:
        return len(self.own)

    @cached_property
    def payloads(self) -> tuple[Payload, ...]:
        """The reductions of one forward pass in the order of issue. One that lands several times is listed once."""
        return tuple(sorted({landing.payload for landing in self.landings}, key=lambda p: (p.complete_at, p)))

    @property
    def num_reductions(self) -> int:
        """All-reduces per forward pass, not counting the one of a replicate or lane head."""
        return len(self.payloads)

    @property
    def in_flight(self) -> int:
        """Largest number of reductions in flight at one time: issued, and not landed at an earlier time."""
        first: dict[Payload, int] = {}
        for landing in self.landings:
            first.setdefault(landing.payload, landing.at)
        times = range(self.num_modules + 1)
        return max(sum(p.complete_at <= t <= at for p, at in first.items()) for t in times)

    @property
    def unsent(self) -> tuple[int, ...]:
        """Modules whose output no other lane uses."""
        sent = {m for payload in self.payloads for m, _ in payload.parts}
        return tuple(m for m in range(self.num_modules) if m not in sent)

    def own_lands_with(self, m: int, landing: Landing) -> bool:
        """Whether the landing also adds the lane's own part of module m: same time, same weight, all channels."""
        return (
            landing.payload.channels == 1.0
            and self.own[m].at == landing.at
            and (m, self.own[m].scale) in landing.payload.parts
        )

    @property
    def adds_whole_sums(self) -> bool:
        """Whether every module's output reaches the streams once, as its sum over all lanes."""
        alone = [Landing(own.at, Payload(((m, own.scale),))) for m, own in enumerate(self.own)]
        return sorted(alone) == list(self.landings) and all(own.scale == 1.0 for own in self.own)

    @property
    def exposed(self) -> tuple[Landing, ...]:
        """Landings with no module between issue and use, for which every lane waits."""
        last = self.num_modules - 1
        return tuple(landing for landing in self.landings if min(landing.at, last) == landing.payload.complete_at)


def _schedule(name: str, own: Iterable[Own], landings: Iterable[Landing]) -> Schedule:
    return Schedule(name, tuple(own), tuple(sorted(landings)))


def _single(m: int, at: int, channels: float = 1.0, stream_mean_at: int | None = None) -> Landing:
    return Landing(at, Payload(((m, 1.0),), channels, stream_mean_at))


def _together(modules: Iterable[int], at: int) -> Landing:
    return Landing(at, Payload(tuple((m, 1.0) for m in modules)))


# One function per layout. Arguments: n layers, number of lanes, then the layout's own arguments.


def tp(n: int, lanes: int) -> Schedule:
    """Megatron tensor parallelism (arXiv 1909.08053): every output is summed over the lanes at once; lanes stay
    equal.
    """
    return _schedule("tp", map(Own, range(2 * n)), (_single(m, m) for m in range(2 * n)))


def parallel(n: int, lanes: int) -> Schedule:
    """PaLM and GPT-J (arXiv 2204.02311): attention and MLP of a layer read the same stream and share one sum."""
    ends = [m | 1 for m in range(2 * n)]
    return _schedule("parallel", map(Own, ends), (_together((m - 1, m), m) for m in range(1, 2 * n, 2)))


def ladder(n: int, lanes: int) -> Schedule:
    """Ladder-Residual (arXiv 2501.06589): the sum of a module, including the lane's own part, lands one module late."""
    return _schedule("ladder", (Own(m + 1) for m in range(2 * n)), (_single(m, m + 1) for m in range(2 * n)))


def desync(n: int, lanes: int, every: int) -> Schedule:
    """Desync-Residual (arXiv 2501.06589): every `every`-th module is summed, and the same reduction averages the
    streams.
    """
    _check_argument("desync", "every", every, at_least=1)
    synced = range(every - 1, 2 * n, every)
    return _schedule(
        "desync", map(Own, range(2 * n)), (_single(m, m, stream_mean_at=m if every > 1 else None) for m in synced)
    )


def spd(n: int, lanes: int, *drop: int) -> Schedule:
    """Sync-Point Drop (arXiv 2502.20727): in the layers `drop`, attention is exchanged together with the MLP."""
    for layer in drop:
        _check_argument("spd", "drop", layer, at_least=0, below=n)
    kept = [_single(2 * i, 2 * i) for i in range(n) if i not in drop]
    mlps = [_together((2 * i, 2 * i + 1) if i in drop else (2 * i + 1,), 2 * i + 1) for i in range(n)]
    return _schedule("spd", map(Own, range(2 * n)), kept + mlps)


def caat(n: int, lanes: int, share: float) -> Schedule:
    """CAAT-Net (arXiv 2506.19645): only the first `share` of the channels is exchanged."""
    _check_argument("caat", "share", share, above=0, at_most=1)
    return _schedule("caat", map(Own, range(2 * n)), (_single(m, m, channels=float(share)) for m in range(2 * n)))


def kraken(n: int, lanes: int) -> Schedule:
    """Kraken (arXiv 2408.07802): a layer's two outputs, in one reduction, land after the next layer's attention."""
    return _schedule("kraken", map(Own, range(2 * n)), (_together((2 * i, 2 * i + 1), 2 * i + 2) for i in range(n)))


def track(n: int, lanes: int, block: int) -> Schedule:
    """Parallel Track (arXiv 2602.07306): lanes run independently for `block` layers, then all outputs are summed."""
    _check_argument("track", "block", block, at_least=1)
    ends = [min(first + block, n) for first in range(0, n, block)]
    blocks = [range(2 * first, 2 * end) for first, end in zip(range(0, n, block), ends, strict=True)]
    return _schedule("track", map(Own, range(2 * n)), (_together(modules, modules[-1]) for modules in blocks))


def dtp(n: int, lanes: int, delta: float) -> Schedule:
    """Delayed tensor parallelism (Kog, "Laneformer 2B"): the other lanes' parts land `delta` modules late.

    The lane's own part is scaled by sqrt(L) for modules m < delta, when no other part has landed yet. With a fractional
    delta = k + a, parts land with weight 1 - a after k modules and with weight a after k + 1 modules (to anneal a dense
    model). Parts that would land after the last module are not sent.
    """
    _check_argument("dtp", "delta", delta, at_least=0)
    whole, a = math.floor(delta), delta - math.floor(delta)
    arrivals = {
        t: tuple((m, w) for m, w in ((t - whole - 1, a), (t - whole, 1.0 - a)) if m >= 0 and w > 0.0)
        for t in range(2 * n)
    }

    def scale(m: int) -> float:
        alone = (1.0 - a) * (m < whole) + a * (m < whole + 1)
        return 1.0 + (math.sqrt(lanes) - 1.0) * alone

    landings = (Landing(t, Payload(parts)) for t, parts in arrivals.items() if parts)
    return _schedule("dtp", (Own(m, scale(m)) for m in range(2 * n)), landings)


def laneformer(n: int, lanes: int, delay: int, early: bool, early_twice: bool, attention: bool, mlp: bool) -> Schedule:
    """The published Laneformer: like dtp(2 * delay), with options for the first `delay` layers and the kinds of module.

    early: sum the outputs of the first `delay` layers at once; otherwise the lane's own part is scaled by sqrt(L).
    early_twice: with early, they land again `delay` layers later, as in the published code. attention, mlp: exchange
    this kind of module; otherwise its outputs are scaled by sqrt(L) wherever they are not summed early.
    """
    delta, own, landings = 2 * delay, [], []
    for m in range(2 * n):
        exchanged, first = (mlp if m % 2 else attention), m < delta
        if first and early:
            landings.append(_single(m, m))
        own.append(Own(m, 1.0 if (early if first else exchanged) else math.sqrt(lanes)))
        if exchanged and m + delta < 2 * n and delta > 0 and (early_twice or not (first and early)):
            landings.append(_single(m, m + delta))
        if exchanged and delta == 0:
            landings.append(_single(m, m))
    return _schedule("laneformer", own, landings)


def none(n: int, lanes: int) -> Schedule:
    """No exchange, the lower bound of communication: every lane adds sqrt(L) times its own output."""
    return _schedule("none", (Own(m, math.sqrt(lanes)) for m in range(2 * n)), ())


LAYOUTS: dict[str, Callable[..., Schedule]] = {
    f.__name__: f for f in (tp, parallel, ladder, desync, spd, caat, kraken, track, dtp, laneformer, none)
}


class Layered(Protocol):
    """What `make_schedule` reads of a ModelConfig, which has the documentation of these fields."""

    @property
    def layout(self) -> str: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_lanes(self) -> int: ...
    @property
    def broadcast_delay(self) -> int: ...
    @property
    def use_early_comm(self) -> bool: ...
    @property
    def early_lands_twice(self) -> bool: ...
    @property
    def use_attention_comm(self) -> bool: ...
    @property
    def use_mlp_comm(self) -> bool: ...
    @property
    def residual_streams(self) -> object | None: ...


def make_schedule(config: Layered) -> Schedule:
    """The schedule of a config's `layout`, such as "tp", "dtp(4)" or "spd(0, 2)". The arguments of "laneformer" are
    config fields.

    Raises ConfigError for an unknown name or wrong arguments.
    """
    if not isinstance(config.layout, str):
        raise ConfigError(f"layout = {config.layout!r} must be a string; choose {', '.join(LAYOUTS)}")
    fields = (
        config.broadcast_delay,
        config.use_early_comm,
        config.early_lands_twice,
        config.use_attention_comm,
        config.use_mlp_comm,
    )
    schedule = _make(config.layout, config.num_hidden_layers, config.num_lanes, fields)
    if config.residual_streams is None:
        return schedule
    if schedule.name != "tp":
        raise ConfigError(f"residual_streams requires layout 'tp', got {config.layout!r}: streams mix whole sums")
    return replace(schedule, mixes=True)


@lru_cache(maxsize=256)
def _make(layout: str, n: int, lanes: int, laneformer_args: tuple[Any, ...]) -> Schedule:
    name, args = parse_layout(layout)
    if name == "laneformer":
        if args:
            raise ConfigError(f"layout {layout!r} takes no arguments; set broadcast_delay, use_early_comm, ... instead")
        args = laneformer_args
    try:
        inspect.signature(LAYOUTS[name]).bind(n, lanes, *args)
    except TypeError:
        wanted = list(inspect.signature(LAYOUTS[name]).parameters)[2:]
        form = f"{name}({', '.join(wanted)})" if wanted else name
        raise ConfigError(f"layout {layout!r} has the wrong arguments; write {form}") from None
    return LAYOUTS[name](n, lanes, *args)


def parse_layout(layout: str) -> tuple[str, tuple[float, ...]]:
    """Splits "dtp(4)" into ("dtp", (4,)). Raises ConfigError for anything but a known name with literal numbers."""
    problem = (
        f"unknown layout {layout!r}; choose {', '.join(LAYOUTS)}, with arguments as in dtp(4), desync(2), spd(0, 2),"
        " caat(0.5)"
    )
    try:
        tree = ast.parse(layout, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        args = tuple(ast.literal_eval(arg) for arg in call.args)
    except (SyntaxError, ValueError, TypeError):
        raise ConfigError(problem) from None
    if not isinstance(call.func, ast.Name) or call.func.id not in LAYOUTS or call.keywords:
        raise ConfigError(problem)
    if not all(isinstance(arg, int | float) and not isinstance(arg, bool) for arg in args):
        raise ConfigError(problem)
    return call.func.id, args


def _check_argument(
    layout: str,
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    whole = layout not in ("caat", "dtp")
    bounds = [("at least", at_least), ("above", above), ("below", below), ("at most", at_most)]
    fits = (
        (isinstance(value, int) or (not whole and math.isfinite(value)))
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    if not fits:
        wanted = " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} = {value} of layout {layout} must be {kind} {wanted}")
