"""Causal attention of every lane: cuDNN's kernel where it applies, otherwise tiles of queries and keys, so that only
one tile's scores are in memory.

Shape letters as in laneformer/model.py, and: i block of queries, j block of keys, r row of a block of queries. A block
has one row for each of its positions and each of the h / n query heads that read the same key head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer.blocks.softcap import capped, slope_of_cap
from laneformer.mesh import DATA, fit_spec

_UNSEEN = -1e30  # finite: inf - inf in a row without visible keys so far would be nan
Two = tuple[jax.Array, jax.Array]
Three = tuple[jax.Array, jax.Array, jax.Array]


class _Scoring(NamedTuple):
    """How queries score keys; see `attend`."""

    window: int | None
    scale: float
    softcap: float | None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segments: jax.Array | None = None,
    start: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """softmax(scores) v over the visible keys of each query, for each lane; the softmax is in float32. The
    scores are scale q k^T or, with a softcap, softcap tanh(scale q k^T / softcap).

    q [l, b, s, h, k], k [l, b, t, n, k], v [l, b, t, n, e] -> [l, b, s, h, e]. Query head m reads key head
    m // (h / n). Key j is at position j, query i at position start + i. The visible keys of a query are the newest
    `window` keys up to its own position, within its segment.

    window: None for all keys. segments: int32 [b, s], only for q, k and v at the same positions. start: int32 scalar,
    for queries that continue a cache of t positions; None if q, k and v have the same positions (t = s). sinks:
    [l, h], one more logit among each head's scores, which has a share of the softmax but no value (gpt-oss). scale: by
    default 1 / sqrt(channels of k).

    Memory is linear in s + t, also for gradients. They recompute the probabilities, tile by tile, from the log-sum-exp
    of each query's scores (FlashAttention-2: Dao, arXiv 2307.08691). Tiles outside the window or after the query are
    skipped.
    """
    usual = scale is None and softcap is None and q.shape[-1] == v.shape[-1]
    if usual and start is None and segments is None and sinks is None and _has_cudnn_kernel(q):
        if jax.sharding.get_abstract_mesh().size > 1:
            return _attend_on_mesh(window, q, k, v)
        by_lane: jax.Array = jax.vmap(_cudnn_kernel(window))(q, k, v)
        return by_lane
    start = jnp.int32(0) if start is None else start
    scoring = _Scoring(window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    return _attend_in_tiles(_block_sizes(q.shape[2], k.shape[2]), scoring, q, k, v, segments, start, sinks)


def _device() -> Any:
    """A device of the program: one of the mesh, otherwise JAX's first. This machine may lack the mesh's devices."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _has_cudnn_kernel(q: jax.Array) -> bool:
    device = _device()
    on_nvidia = device.platform == "gpu" and "NVIDIA" in device.device_kind
    return on_nvidia and q.dtype != jnp.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128


def _cudnn_kernel(window: int | None) -> Callable[..., jax.Array]:
    local = None if window is None else (window - 1, 0)
    return partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=local, implementation="cudnn")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_on_mesh(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's kernel where the lane axis of a mesh is manual.

    XLA (jaxlib 0.10) cannot partition jax.nn's call over the data axis, so that axis becomes manual too, for the kernel
    alone. The custom gradient is needed because JAX (0.10) cannot differentiate a shard_map inside another: it assumes
    that the residuals are split over the axes of both.
    """
    o: jax.Array = _by_sequence(_cudnn_kernel(window), q, k, v)
    return o


def _on_mesh_forward(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    return _by_sequence(partial(jax.vjp, _cudnn_kernel(window)), q, k, v)


def _on_mesh_backward(window: int | None, pull: Any, do: jax.Array) -> Any:
    return _by_sequence(lambda pull, do: pull(do), pull, do)


_attend_on_mesh.defvjp(_on_mesh_forward, _on_mesh_backward)


def _by_sequence(function: Callable[..., Any], *args: Any) -> Any:
    """Maps `function` over lanes and sequences, on the devices of the data axis. All arrays are [l, b, ...]."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = fit_spec(P(None, DATA), jax.tree.leaves(args)[0].shape, mesh)
    return jax.shard_map(jax.vmap(jax.vmap(function)), in_specs=spec, out_specs=spec, axis_names=set(mesh.auto_axes))(
        *args
    )


def _block_sizes(s: int, t: int) -> tuple[int, int]:
    """Positions per block of s queries and of t keys: one tile for a few queries on a cache, otherwise at least four
    blocks, so that short texts have tiles to skip too.
    """
    if s < 16:
        return s, t
    largest = 128 if _device().platform == "cpu" else 256  # a tile's scores should fit the cache of a CPU core
    s, t = (16 * math.ceil(length / max(4, math.ceil(length / largest)) / 16) for length in (s, t))
    return s, t


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_in_tiles(
    sizes: tuple[int, int],
    scoring: _Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    start: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    return _forward(sizes, scoring, q, k, v, segments, start, sinks)[0]


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array | None, jax.Array, jax.Array]
"""q, k, v, segments, start, sinks, output, log-sum-exp."""


def _forward(
    sizes: tuple[int, int],
    scoring: _Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    start: jax.Array,
    sinks: jax.Array | None,
) -> tuple[jax.Array, Residuals]:
    """The output and the residuals, which include the log-sum-exp of every query's scores [i, l, b, n, r, 1]."""
    tiles = _Tiles(sizes, scoring, q, k, segments, start)
    keys, values = tiles.key_blocks(k), tiles.key_blocks(v)

    def block(_: tuple[()], inputs: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
        i, q_i = inputs

        def tile(j: jax.Array, carry: Three) -> Three:
            top, total, o = carry
            scores, seen = tiles.scores(i, j, q_i, keys[j])
            new_top = jnp.maximum(top, jnp.where(seen, scores, _UNSEEN).max(-1, keepdims=True))
            p = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
            shrink = jnp.exp(top - new_top)
            o = o * shrink + _product("lbnrt,lbntk->lbnrk", p.astype(v.dtype), values[j])
            return new_top, total * shrink + p.sum(-1, keepdims=True), o

        o = jnp.zeros_like(q_i, jnp.float32, shape=(*q_i.shape[:-1], v.shape[-1]))
        first = o[..., :1] + _UNSEEN, o[..., :1]
        if sinks is not None:  # the sum begins with the sink's exponential
            first = o[..., :1] + tiles.of_rows(sinks), o[..., :1] + 1.0
        top, total, o = jax.lax.fori_loop(*tiles.range_of(i), tile, (*first, o))
        return (), (o / total, top + jnp.log(total))

    _, (o, lse) = jax.lax.scan(block, (), (jnp.arange(tiles.rows), tiles.query_blocks(q)))
    o = checkpoint_name(tiles.queries(o).astype(q.dtype), "product")
    return o, (q, k, v, segments, start, sinks, o, checkpoint_name(lse, "product"))


def _backward(
    sizes: tuple[int, int], scoring: _Scoring, kept: Residuals, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, jax.Array | None]:
    """With p = exp(scores - lse): dv = p^T do, ds = p (do v^T - sum(do o)), dq = ds k, dk = ds^T q; with a softcap, ds
    is also multiplied by its slope.

    dk and dv are summed as [k, t], because XLA:CPU multiplies several times slower when it transposes a tile of p or
    ds. A sink's score has ds = -exp(sink - lse) sum(do o), because its value is 0.
    """
    q, k, v, segments, start, sinks, o, lse = kept
    tiles = _Tiles(sizes, scoring, q, k, segments, start)
    keys, values = tiles.key_blocks(k), tiles.key_blocks(v)
    do_o = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1, keepdims=True)

    def block(carry: Two, inputs: tuple[jax.Array, ...]) -> tuple[Two, jax.Array]:
        i, q_i, do_i, do_o_i, lse_i = inputs
        q_kr, do_kr = q_i.swapaxes(-1, -2), do_i.swapaxes(-1, -2)

        def tile(j: jax.Array, carry: Three) -> Three:
            dq, dk, dv = carry
            scores, seen = tiles.scores(i, j, q_i, keys[j])
            p = jnp.where(seen, jnp.exp(scores - lse_i), 0.0)
            ds = p * (_product("lbnrk,lbntk->lbnrt", do_i, values[j]) - do_o_i)
            ds = (ds * slope_of_cap(scores, scoring.softcap)).astype(q.dtype)
            dq = dq + _product("lbnrt,lbntk->lbnrk", ds, keys[j])
            dk = dk.at[j].add(_product("lbnkr,lbnrt->lbnkt", q_kr, ds))
            return dq, dk, dv.at[j].add(_product("lbnkr,lbnrt->lbnkt", do_kr, p.astype(v.dtype)))

        dq, dk, dv = jax.lax.fori_loop(*tiles.range_of(i), tile, (jnp.zeros_like(q_i, jnp.float32), *carry))
        return (dk, dv), dq

    zero_k, zero_v = (jnp.zeros_like(blocks.swapaxes(-1, -2), jnp.float32) for blocks in (keys, values))
    inputs = (jnp.arange(tiles.rows), tiles.query_blocks(q), tiles.query_blocks(do), tiles.query_blocks(do_o), lse)
    (dk, dv), dq = jax.lax.scan(block, (zero_k, zero_v), inputs)
    dq, dk, dv = (
        tiles.queries(dq) * tiles.scale,
        tiles.keys(dk.swapaxes(-1, -2)) * tiles.scale,
        tiles.keys(dv.swapaxes(-1, -2)),
    )
    dsinks = None
    if sinks is not None:
        ds = tiles.queries(-jnp.exp(tiles.of_rows(sinks) - lse) * tiles.query_blocks(do_o))
        dsinks = ds.sum((1, 2, 4)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, dsinks


_attend_in_tiles.defvjp(_forward, _backward)


class _Tiles:
    """Positions cut into blocks of `sizes` (queries, keys), and the keys that each query attends to."""

    def __init__(
        self,
        sizes: tuple[int, int],
        scoring: _Scoring,
        q: jax.Array,
        k: jax.Array,
        segments: jax.Array | None,
        start: jax.Array,
    ):
        self.size, self.key_size = sizes
        self.s, self.t, self.n, self.group = q.shape[2], k.shape[2], k.shape[3], q.shape[3] // k.shape[3]
        self.rows, self.columns = math.ceil(self.s / self.size), math.ceil(self.t / self.key_size)
        self.window, self.start, self.scale, self.softcap = scoring.window, start, scoring.scale, scoring.softcap
        length = max(self.rows * self.size, self.columns * self.key_size)
        self.segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, length - self.s)))

    def query_blocks(self, x: jax.Array) -> jax.Array:
        """[l, b, s, h, k] -> [i, l, b, n, r, k], padded with zeros."""
        return _blocks(x, self.size, self.rows, self.n)

    def key_blocks(self, x: jax.Array) -> jax.Array:
        """[l, b, t, n, k] -> [j, l, b, n, t, k], padded with zeros, at positions after every query."""
        return _blocks(x, self.key_size, self.columns, self.n)

    def queries(self, blocks: jax.Array) -> jax.Array:
        """The inverse of query_blocks."""
        return _positions(blocks, self.size)[:, :, : self.s]

    def keys(self, blocks: jax.Array) -> jax.Array:
        """The inverse of key_blocks."""
        return _positions(blocks, self.key_size)[:, :, : self.t]

    def of_rows(self, x: jax.Array) -> jax.Array:
        """[l, h] -> float32 [l, 1, n, r, 1], as the rows of any block."""
        rows = jnp.repeat(x.astype(jnp.float32).reshape(len(x), self.n, self.group), self.size, -1)
        return rows[:, None, :, :, None]

    def range_of(self, i: jax.Array) -> tuple[jax.Array | int, jax.Array]:
        """The first block of keys with positions visible to block i of queries, and one past the last."""
        first, last = self.start + i * self.size, self.start + (i + 1) * self.size - 1
        lowest = 0 if self.window is None else jnp.maximum(first - self.window + 1, 0) // self.key_size
        return lowest, jnp.minimum(last // self.key_size + 1, self.columns)

    def scores(self, i: jax.Array, j: jax.Array, q_i: jax.Array, k_j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The scores of a tile, float32 [l, b, n, r, t], and whether each query attends to each key, bool in a shape
        that broadcasts to the scores.
        """
        distance = (
            self.start
            + i * self.size
            + jnp.arange(self.size)[:, None]
            - (j * self.key_size + jnp.arange(self.key_size))
        )
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.segments is not None:
            of_query = jax.lax.dynamic_slice_in_dim(self.segments, i * self.size, self.size, 1)
            of_key = jax.lax.dynamic_slice_in_dim(self.segments, j * self.key_size, self.key_size, 1)
            seen = seen & (of_query[:, None, :, None] == of_key[:, None, None, :])
        scores = capped(_product("lbnrk,lbntk->lbnrt", q_i, k_j) * self.scale, self.softcap)
        return scores, jnp.tile(seen, (self.group, 1))


def _blocks(x: jax.Array, size: int, count: int, n: int) -> jax.Array:
    l, b, s, h, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, count * size - s), (0, 0), (0, 0)))
    return (
        x.reshape(l, b, count, size, n, h // n, k)
        .transpose(2, 0, 1, 4, 5, 3, 6)
        .reshape(count, l, b, n, h // n * size, k)
    )


def _positions(blocks: jax.Array, size: int) -> jax.Array:
    count, l, b, n, r, k = blocks.shape
    return (
        blocks.reshape(count, l, b, n, r // size, size, k)
        .transpose(1, 2, 0, 5, 3, 4, 6)
        .reshape(l, b, count * size, -1, k)
    )


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum in float32; float32 operands are never rounded to TF32."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, y, precision=exact, preferred_element_type=jnp.float32)
