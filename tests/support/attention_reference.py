"""Attention and its gradients in float64 NumPy, with all scores in memory."""

from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from laneformer.blocks.tiled_attention import attend
from laneformer.mesh import LANE


def on_lanes(mesh, window=None, wrap=lambda f: f):
    """A compiled function (q, k, v, do) -> (o, dq, dk, dv), divided as in the model: the lanes by shard_map, the batch
    by the compiler. wrap is applied to `attend`.
    """

    def local(q, k, v, do):
        o, pull = jax.vjp(wrap(partial(attend, window=window)), q, k, v)
        return o, *pull(do)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(LANE), out_specs=P(LANE), axis_names={LANE}))


def visible(s: int, t: int, window=None, segments=None, start=0) -> np.ndarray:
    """Whether each query sees each key, bool [1 or b, s, t], compared pair by pair. start: position of the first
    query.
    """
    seen = np.zeros((1 if segments is None else len(segments), s, t), bool)
    for row, i, j in np.ndindex(seen.shape):
        newest = start + i
        oldest = 0 if window is None else newest - window + 1
        seen[row, i, j] = oldest <= j <= newest and (segments is None or segments[row, i] == segments[row, j])
    return seen


def expected(q, k, v, do, scale=None, softcap=None, **which) -> tuple[np.ndarray, ...]:
    """o, dq, dk, dv of softmax attention in float64; do is the gradient of o. which: arguments of `visible`."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    group, scale = q.shape[3] // k.shape[3], scale or q.shape[-1] ** -0.5
    keys, values = k.repeat(group, 3), v.repeat(group, 3)
    seen = visible(q.shape[2], k.shape[2], **which)[None, :, None]
    scores, slope = np.einsum("lbshk,lbthk->lbhst", q, keys) * scale, scale
    if softcap:
        slope = scale / np.cosh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("lbshk,lbthk->lbhst", do, values)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope
    dq = np.einsum("lbhst,lbthk->lbshk", ds, keys)
    dk, dv = np.einsum("lbhst,lbshk->lbthk", ds, q), np.einsum("lbhst,lbshk->lbthk", p, do)
    dk, dv = (x.reshape(*x.shape[:3], -1, group, x.shape[-1]).sum(4) for x in (dk, dv))
    return np.einsum("lbhst,lbthk->lbshk", p, values), dq, dk, dv


def random_inputs(l=2, b=2, s=24, n=2, group=1, k=8, t=None, seed=0, dtype="float32") -> tuple[jax.Array, ...]:
    """q [l, b, s, n * group, k], k and v [l, b, t, n, k], and the gradient of the output, in q's shape. t is s by
    default.
    """
    r = np.random.default_rng(seed)
    queries, keys = (l, b, s, n * group, k), (l, b, t or s, n, k)
    draws = (r.standard_normal(shape).astype(np.float32) for shape in (queries, keys, keys, queries))
    return tuple(jax.device_put(x.astype(dtype)) for x in draws)


@partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def with_gradients(q, k, v, do, window=None, segments=None, scale=None, softcap=None) -> tuple[jax.Array, ...]:
    """o, dq, dk, dv of `attend` without a mesh."""
    which = {"window": window, "segments": segments, "scale": scale, "softcap": softcap}
    o, pull = jax.vjp(partial(attend, **which), q, k, v)
    return o, *pull(do)


def assert_close(found, wanted, tolerance=3e-6):
    """Asserts that the error of each array is at most `tolerance` times its largest entry (or 1, if that is larger)."""
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, wanted, strict=False):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()
        assert error <= tolerance * max(1.0, float(np.abs(y).max())), name  # also fails for nan
