"""Assigns heads and neurons of a dense model to lanes so that lanes read little of each other late.

A unit cannot be cut: it is a key/value head with its query heads, or a feed-forward neuron. Under a delayed layout a
unit j of module n in lane l reads late what the other lanes wrote in an earlier module m. The part read late, as a
share of everything read, is (the question of Affinity-Aware Sharding, arXiv 2609.13846, with our own measure):

    sum over late pairs (m, n), units j of n and projections p of j of  late(m, n) * u_j / P * E |p D (o_m - o_m[l])|^2
    / E |p h|^2

h: input of module n, the stream after its norm; o_m: output of m, o_m[l]: lane l's part of it; D: the norm's scale over
the stream's root mean square; u_j: share of unit j in the mean square output of its module's units; P: number of
projections of j (q, k, v or gate, up); late: share of m's output that has not landed when n reads.
"""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.blocks import BLOCKS
from laneformer.blocks.attention import Attention
from laneformer.blocks.layer import BEFORE
from laneformer.blocks.mlp import Mlp
from laneformer.blocks.norm import RMSNorm
from laneformer.blocks.rotary import rotations
from laneformer.config import AttentionOptions, MlpOptions
from laneformer.layout import Schedule
from laneformer.model import Laneformer
from laneformer.quantized import Quantized

RESTARTS = 2  # random initial assignments; the best result is used
LEAST = 0.01  # relative improvement below which a sweep over all modules is the last
Lanes = list[np.ndarray]  # per module the lane of each unit
Late = dict[tuple[int, int], float]  # (module m, later module n) -> the share of m that n reads late


class Units(NamedTuple):
    """The units of one module on all tokens t; norms, energies and u of the formula are folded into `reads`."""

    reads: np.ndarray
    """Rows of the scaled projections: [units, rows, d]."""
    activations: np.ndarray
    """Activations of each channel: [t, units, channels]."""
    writes: np.ndarray
    """Contribution of each channel to the stream: [units, channels, d]."""


class _Observed(NamedTuple):
    """Statistics of one module: `activations` [t, units, channels], mean squares of each unit's projections [units],
    and `scale`, the mean of 1 / mean square of the stream.
    """

    activations: jax.Array
    energies: tuple[jax.Array, ...]
    scale: jax.Array


def _silent(_: str) -> None:
    """Drops a line about the progress."""


def measure(model: Laneformer, ids_bs: np.ndarray, progress: Callable[[str], None] = _silent) -> list[Units]:
    """The units of every module of a dense model (one lane), observed on these tokens. progress: receives lines."""
    config = model.config
    weights = {path: weight for path, weight in model.weights().items() if not isinstance(weight, Quantized)}
    rotary = rotations(config, jnp.arange(ids_bs.shape[1]))
    x, modules = model.tok_embeddings[...][ids_bs].astype(jnp.float32)[None], []
    for n in range(config.num_hidden_layers):
        progress(f"measuring layer {n + 1} of {config.num_hidden_layers}")
        own = {path.split(".")[-1]: w for path, w in weights.items() if path.startswith(f"layers.{n}.attention.")}
        layer = model.layers[n]
        attention, mlp = layer.attention, layer.feed_forward
        if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
            raise TypeError(f"layer {n} does not have plain attention and an MLP; check the model with lane_config")
        # Attention without wo: returns the activations that wo multiplies.
        bare = Attention(own | {"wo": jnp.eye(own["wo"].shape[-1])[None]}, attention.options, model.precision)
        norms = [getattr(layer, BEFORE[name]) for name in ("attention", "feed_forward")]
        x, *observed = _observe(norms, attention, mlp, bare, x, rotary, config.num_key_value_heads)
        for block, kind, write, what in (
            ("attention", attention.options, "wo", observed[0]),
            ("feed_forward", mlp.options, "w2", observed[1]),
        ):
            path = f"layers.{n}."
            gain = np.asarray(weights[path + BEFORE[block]], np.float32).reshape(-1)
            read = [weights[f"{path}{block}.{name}"] for name in _reading(kind)]
            modules.append(_units(read, gain, weights[f"{path}{block}.{write}"], what))
    return modules


def _reading(options: AttentionOptions | MlpOptions) -> list[str]:
    """Names of a block's matrices that read the stream."""
    table = BLOCKS[type(options)].table(options, "")
    return [path.removeprefix(".") for path, weight in table.items() if weight.initial == "normal"]


@jax.jit(static_argnums=6)
def _observe(
    norms: list[RMSNorm], attention: Attention, mlp: Mlp, bare: Attention, x: jax.Array, rotary, heads: int
) -> tuple[jax.Array, _Observed, _Observed]:
    """The stream after a layer, and the statistics of its attention and its MLP, which read it after these norms."""
    einsum, eps = mlp.precision.einsum, norms[1].eps

    def statistics(x: jax.Array, h: jax.Array, a: jax.Array, weights: list[jax.Array], units: int) -> _Observed:
        a = a.reshape(-1, units, a.shape[-1] // units)
        projections = (einsum("lbsd,lod->lbso", h, w).reshape(a.shape[0], units, -1) for w in weights)
        return _Observed(
            a, tuple(jnp.square(p).mean(0).sum(-1) for p in projections), (1 / (jnp.square(x).mean(-1) + eps)).mean()
        )

    h = norms[0](x)
    a, _ = bare(h, rotary)
    first = statistics(x, h, a, [getattr(attention, name)[...] for name in _reading(attention.options)], heads)
    x = x + einsum("lbsi,ldi->lbsd", a, attention.wo[...])
    h = norms[1](x)
    a = mlp.hidden(h)
    second = statistics(x, h, a, [getattr(mlp, name)[...] for name in _reading(mlp.options)], a.shape[-1])
    return x + einsum("lbsf,ldf->lbsd", a, mlp.w2[...]), first, second


def _units(weights: list[jax.Array], gain: np.ndarray, write: jax.Array, observed: _Observed) -> Units:
    activations = np.asarray(observed.activations)
    units = activations.shape[1]
    writes = np.ascontiguousarray(np.asarray(write, np.float32)[0].T).reshape(units, -1, gain.size)
    written = _second_moments(activations, writes, np.eye(gain.size, dtype=np.float32))
    shares, reads = written / max(written.sum(), 1e-30), []
    for weight, energy in zip(weights, observed.energies, strict=True):
        rows = np.asarray(weight, np.float32).reshape(units, -1, gain.size) * gain
        factor = shares * float(observed.scale) / (len(weights) * np.maximum(np.asarray(energy), 1e-30))
        reads.append(rows * np.sqrt(factor)[:, None, None])
    return Units(np.concatenate(reads, 1), activations, writes)


def _second_moments(activations: np.ndarray, writes: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """E c^T metric c for the output c = sum over channels of activation * write of each unit: [units]."""
    moments = np.einsum("tuc,tue->uce", activations, activations, optimize=True) / len(activations)
    return np.einsum("uce,ucd,ued->u", moments, writes @ metric, writes, optimize=True)


def late_pairs(schedule: Schedule) -> Late:
    """Pairs of modules with a delayed exchange -> share of the output that is delayed."""
    shares = {(m, n): 1.0 - _landed(schedule, m, n) for m, n in combinations(range(schedule.num_modules), 2)}
    return {pair: share for pair, share in shares.items() if share > 0}


def _landed(schedule: Schedule, m: int, n: int) -> float:
    """Share of module m's output that has landed in other lanes when module n reads, at most 1."""
    share = 0.0
    for at, payload in schedule.landings:
        if at < n and payload.stream_mean_at is not None and payload.stream_mean_at >= m:
            return 1.0  # the averaged streams include m's part
        share += sum(weight * payload.channels for part, weight in payload.parts if part == m and at < n)
    return min(share, 1.0)


def contiguous(sizes: list[int], count: int) -> Lanes:
    """The assignment of tensor parallelism: the first units in lane 0."""
    return [np.repeat(np.arange(count), size // count) for size in sizes]


def random(sizes: list[int], count: int, seed: int) -> Lanes:
    """A random assignment, every module shuffled separately."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(lanes) for lanes in contiguous(sizes, count)]


class Assignment:
    """An assignment with equally many units of every module in each of `count` lanes, and the part it reads late."""

    def __init__(self, modules: list[Units], late: Late, lanes: Lanes, count: int):
        self.modules, self.late, self.count = modules, late, count
        self.lanes: Lanes = list(lanes)
        size = len(modules)
        self.rest: list = [None] * size  # [lane, t, d]: output of the other lanes
        self.rest_moments: list = [None] * size  # [lane, d, d]
        self.metrics: list = [None] * size  # [lane, d, d]: sum of r r^T over the rows of a lane's projections
        for m in range(size):
            self.place(m, lanes[m])

    def place(self, m: int, lanes: np.ndarray) -> None:
        """Assigns the units of module m to these lanes."""
        units, self.lanes[m] = self.modules[m], lanes
        t, d = len(units.activations), units.writes.shape[-1]
        parts = [
            units.activations[:, lanes == l].reshape(t, -1) @ units.writes[lanes == l].reshape(-1, d)
            for l in range(self.count)
        ]
        self.rest[m] = sum(parts) - np.stack(parts)
        self.rest_moments[m] = self.rest[m].swapaxes(1, 2) @ self.rest[m] / t
        rows = [units.reads[lanes == l].reshape(-1, d) for l in range(self.count)]
        self.metrics[m] = np.stack([r.T @ r for r in rows])

    def missed(self, m: int | None = None) -> float:
        """The measure above, or the part of it that depends on module m."""
        return float(
            sum(
                late * np.vdot(self.metrics[n], self.rest_moments[w])
                for (w, n), late in self.late.items()
                if m in (None, w, n)
            )
        )

    def value(self, m: int) -> np.ndarray:
        """Decrease of `missed` with each unit of module m in each lane, all others unchanged: [units, lanes]."""
        units, value = self.modules[m], np.zeros((len(self.lanes[m]), self.count))
        for (writer, reader), late in self.late.items():
            for lane in range(self.count) if m in (writer, reader) else ():
                if m == reader:
                    value[:, lane] -= late * ((units.reads @ self.rest_moments[writer][lane]) * units.reads).sum((1, 2))
                else:
                    metric = self.metrics[reader][lane]
                    felt = np.einsum(
                        "tuc,td->ucd", units.activations, self.rest[m][lane] @ metric, optimize=True
                    ) / len(self.rest[m][lane])
                    sign = np.where(self.lanes[m] == lane, 1, -1)
                    own = _second_moments(units.activations, units.writes, metric)
                    value[:, lane] += late * (2 * (felt * units.writes).sum((1, 2)) + sign * own)
        return value

    def improve(self, m: int) -> None:
        """Exchanges units of module m between lanes, as many at once as still improve the measure."""
        value, before, before_missed = self.value(m), self.lanes[m], self.missed(m)
        most = len(before)
        while most:
            self.place(m, exchanged(value, before, most))
            if self.missed(m) < before_missed:
                return
            most //= 4  # the value of a unit changes with the others that move
        self.place(m, before)

    def rename(self, first: int) -> None:
        """Renumbers the lanes of module `first` and of all later modules so that these read as little as possible of
        earlier modules late.
        """
        from scipy.optimize import linear_sum_assignment  # takes a second to import

        missed = np.zeros((self.count, self.count))  # [lane of earlier modules, lane of modules from `first` on]
        for (m, n), late in self.late.items():
            if m < first <= n:
                missed += late * np.einsum("ide,jde->ij", self.rest_moments[m], self.metrics[n], optimize=True)
        before, after = linear_sum_assignment(missed)
        names = np.empty(self.count, int)
        names[after] = before
        if (names != np.arange(self.count)).any():
            for n in range(first, len(self.lanes)):
                self.place(n, names[self.lanes[n]])


def exchanged(value: np.ndarray, lanes: np.ndarray, most: int) -> np.ndarray:
    """`lanes` after at most `most` exchanges between each pair of lanes: the exchanges that most increase the sum of
    value[unit, its lane].
    """
    lanes = lanes.copy()
    for one, other in combinations(range(value.shape[1]), 2):
        ranked = []
        for here, there in ((one, other), (other, one)):
            units = np.flatnonzero(lanes == here)
            gain = value[units, there] - value[units, here]
            order = np.argsort(-gain, kind="stable")
            ranked.append((units[order], gain[order]))
        (a, gain_a), (b, gain_b) = ranked
        better = min(int((gain_a + gain_b > 0).sum()), most)
        lanes[a[:better]], lanes[b[:better]] = other, one
    return lanes


def assign(modules: list[Units], late: Late, count: int, seed: int, progress: Callable[[str], None] = _silent) -> Lanes:
    """A good assignment: from random ones, alternates exchanges in each module and renumbering until neither helps.

    progress: receives lines.
    """
    ends = []
    for restart in range(RESTARTS):
        state = Assignment(
            modules, late, random([len(units.reads) for units in modules], count, seed + 1_000_003 * restart), count
        )
        before, sweep = float("inf"), 0
        while (missed := state.missed()) < before * (1 - LEAST):
            before, sweep = missed, sweep + 1
            for m in range(len(modules)):
                progress(
                    f"assigning: start {restart + 1} of {RESTARTS}, sweep {sweep}, module {m + 1} of {len(modules)},"
                    f" {missed:.4f} read late"
                )
                state.improve(m)
            for first in range(1, len(modules)):
                progress(f"assigning: start {restart + 1} of {RESTARTS}, sweep {sweep}, lanes from module {first + 1}")
                state.rename(first)
        ends.append((state.missed(), restart, state.lanes))
    return min(ends)[2]
