"""Gated DeltaNet (Yang et al., arXiv 2412.06464) of every lane over its own heads.

Shape letters as in laneformer/model.py, and: n key heads, r value heads per key head, k and v channels of their heads,
c tokens of a chunk.

Each value head keeps a matrix S [k, v], float32. A token first decays S, then moves the value that S returns for its
key towards its own value: S <- e^g S; S <- S + k (x) beta (v - S^T k). The result is S^T q. `recur` computes many
tokens at once.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer import ops
from laneformer.blocks.block import (
    Group,
    Held,
    Initial,
    KeptArray,
    Memory,
    Mixer,
    Plain,
    Weight,
    attention_weight,
    weight_of_op,
)
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import Rotations
from laneformer.config import DeltaNetOptions
from laneformer.ops import Matrix, Norm, Op, Product, ProductName, Value

CHUNK = 64  # tokens that are computed together, a power of two
UNIT_EPS = 1e-6  # added to the squared lengths of q and k


class DeltaNet(Mixer):
    """o[l] = wo[l] (norm(recur(q, k, v, g, beta)) * silu(z)), where q, k and v are silu of short convolutions of
    win[l] h.
    """

    options: DeltaNetOptions
    convolution: Plain
    decay: Plain
    step: Plain
    norm: Plain
    wo: Held

    def project(self, name: str, h_lbsd: jax.Array) -> jax.Array:
        """The matrix `win` or `wba` times h, by key head: [l, b, s, n, rows]."""
        weight = getattr(self, name)[...]
        y = checkpoint_name(self.precision.block_einsum("lbsd,lod->lbso", h_lbsd, weight), "product")
        return self.precision.widened(y).reshape(*y.shape[:-1], self.options.sizes.key_heads, -1)

    def __call__(
        self, h_lbsd: jax.Array, rotary: Rotations, memory: Memory | None = None, segments_bs: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h [l, b, s, d] -> o [l, b, s, d], and the arrays that `state` lists. segments: see `Laneformer.__call__`."""
        sizes, compute = self.options.sizes, self.precision.compute
        tokens, ratio = h_lbsd.shape[2], sizes.value_heads // sizes.key_heads
        ends = np.cumsum([sizes.key_dim, sizes.key_dim, ratio * sizes.value_dim])
        *qkv, z = jnp.split(self.project("win", h_lbsd), ends, -1)
        b, a = jnp.split(self.project("wba", h_lbsd), 2, -1)
        u_lbsc = jnp.concatenate([x.reshape(*x.shape[:3], -1) for x in qkv], -1).astype(compute)
        before = jnp.zeros((*u_lbsc.shape[:2], sizes.conv_kernel - 1, u_lbsc.shape[-1]), compute)
        state = None
        if memory is not None:
            before, state = memory.arrays["inputs"][:, :, 0].astype(compute), memory.arrays["state"][:, :, 0]
        u_lbtc = jnp.concatenate([before, u_lbsc], 2)
        mixed = jax.nn.silu(convolve(u_lbtc, self.convolution[...], segments_bs))
        q, k, v = jnp.split(mixed, np.cumsum([self.options.keys, self.options.keys]), -1)
        q, k = (unit(x.reshape(*x.shape[:3], sizes.key_heads, -1)) for x in (q, k))
        heads = (*v.shape[:3], sizes.key_heads, ratio)
        beta = jax.nn.sigmoid(b)
        rate, step = (weight[...].astype(jnp.float32) for weight in (self.decay, self.step))
        rate, step = (x.reshape(-1, 1, 1, *heads[3:]) for x in (jnp.exp(rate), step))
        g = -rate * jax.nn.softplus(a + step)
        if memory is not None and memory.count is not None:  # padding neither decays nor writes
            real = (jnp.arange(tokens) < memory.count)[:, None, None]
            beta, g = beta * real, g * real
        o, state = recur(q / math.sqrt(sizes.key_dim), k, v.reshape(*heads, -1), g, beta, state, segments_bs)
        o = rms_norm(o, self.norm[...], self.options.norm_eps) * jax.nn.silu(z.reshape(o.shape))
        o_lbsd = self.precision.block_einsum("lbsi,ldi->lbsd", o.reshape(*o.shape[:3], -1), self.wo[...])
        if memory is None:
            return o_lbsd, {}
        last = tokens if memory.count is None else memory.count
        inputs = jax.lax.dynamic_slice_in_dim(u_lbtc, last, sizes.conv_kernel - 1, 2)
        kept = {"inputs": inputs, "state": state}
        return o_lbsd, {name: kept[name][:, :, None].astype(old.dtype) for name, old in memory.arrays.items()}

    @staticmethod
    def table(options: DeltaNetOptions, path: str) -> dict[str, Weight]:
        l, d, sizes = options.num_lanes, options.hidden_size, options.sizes
        read, own, channels = P("lane", None, "data"), P("lane", None), 2 * options.keys + options.values
        rows: dict[str, tuple[tuple[int, ...], P, Initial, Group]] = {
            "win": ((l, channels + options.values, d), read, "normal", "matrix"),
            "wba": ((l, 2 * sizes.value_heads, d), read, "normal", "matrix"),
            "convolution": ((l, channels, sizes.conv_kernel), P("lane", None, None), "convolution", "vector"),
            "decay": ((l, sizes.value_heads), own, "decay", "vector"),
            "step": ((l, sizes.value_heads), own, "step", "vector"),
            "norm": ((sizes.value_dim,), P(None), "ones", "vector"),
            "wo": ((l, d, options.values), P("lane", "data", None), "output", "matrix"),
        }
        return {f"{path}.{name}": attention_weight(f"{path}.{name}", *row) for name, row in rows.items()}

    @staticmethod
    def ops(options: DeltaNetOptions, path: str, norm: Norm | None) -> tuple[Op, ...]:
        weight = partial(weight_of_op, DeltaNet.table(options, path))

        def matrices(*names: str) -> tuple[Matrix, ...]:
            return tuple(Matrix(weight(f"{path}.{name}")) for name in names)

        sizes = options.sizes
        rule = ops.DeltaNet(
            sizes.key_heads,
            sizes.value_heads,
            sizes.key_dim,
            sizes.value_dim,
            weight(f"{path}.convolution", small=True),
            weight(f"{path}.decay"),
            weight(f"{path}.step"),
            Norm(weight(f"{path}.norm"), options.norm_eps),
            UNIT_EPS,
        )
        return (
            Product(ProductName.QKV, matrices("win", "wba"), reads=Value.STREAM, writes=Value.PROJECTED, norm=norm),
            rule,
            Product(ProductName.OUT, matrices("wo"), reads=Value.ATTENDED, writes=Value.OUTPUT),
        )

    @staticmethod
    def state(options: DeltaNetOptions) -> tuple[KeptArray, ...]:
        """The newest inputs of the convolution, and S of every value head."""
        sizes, lanes = options.sizes, options.num_lanes
        inputs = (sizes.conv_kernel - 1, 2 * options.keys + options.values)
        matrix = (sizes.key_heads, sizes.value_heads // sizes.key_heads, sizes.key_dim, sizes.value_dim)
        return (
            KeptArray(name="inputs", num_lanes=lanes, shape=inputs, fixed=True),
            KeptArray(name="state", num_lanes=lanes, shape=matrix, fixed=True, dtype="float32"),
        )

    @staticmethod
    def context_flops(options: DeltaNetOptions, length: int) -> float:
        """FLOPs of the convolution and of the recurrence token by token: S decays, is read with k, updated, and read
        with q, which takes 7 k v per value head.
        """
        sizes = options.sizes
        per_head, channels = 7 * sizes.key_dim * sizes.value_dim, 2 * options.keys + options.values
        return options.num_lanes * (sizes.value_heads * per_head + 2 * sizes.conv_kernel * channels)


def unit(x: jax.Array) -> jax.Array:
    """x scaled to length 1 over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + UNIT_EPS)


def convolve(u_lbtc: jax.Array, weight_lci: jax.Array, segments_bs: jax.Array | None) -> jax.Array:
    """Each channel's weighted sum over the last i tokens, float32 [l, b, s, c].

    u: t = s + i - 1 tokens. weight: [l, c, i], the oldest token first. segments: document of each token, int [b, s];
    tokens of other documents do not count.
    """
    kernel = weight_lci.shape[-1]
    tokens = u_lbtc.shape[2] - kernel + 1
    u, weight = u_lbtc.astype(jnp.float32), weight_lci.astype(jnp.float32)
    found = jnp.zeros((*u.shape[:2], tokens, u.shape[-1]), jnp.float32)
    for i in range(kernel):
        term = u[:, :, i : i + tokens] * weight[:, None, None, :, i]
        back = kernel - 1 - i
        if segments_bs is not None and back:
            same = jnp.pad(segments_bs, ((0, 0), (back, 0)), constant_values=-1)[:, :tokens] == segments_bs
            term = jnp.where(same[None, :, :, None], term, 0)
        found += term
    return found


def recur(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array | None = None,
    segments_bs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over s tokens, from `state` (by default zero): results [l, b, s, n, r, v], and the state
    after the tokens [l, b, n, r, k, v]. All arrays are float32.

    q, k: [l, b, s, n, k]. v: [l, b, s, n, r, v]. g, beta: [l, b, s, n, r]. segments: document of each token, int
    [b, s]; a token reads only what its own document has added to S.

    The tokens are computed chunk by chunk (section 3.3 of the paper). With G = g summed from the chunk's start, token t
    adds k_t (x) u_t to S, where u_t = beta_t (v_t - e^G_t S^T k_t - sum_{j < t} e^(G_t - G_j) (k_t . k_j) u_j). This is
    a triangular system for all u of a chunk, whose inverse does not depend on S. No exponent is positive.
    """
    tokens, size = q.shape[2], min(CHUNK, 1 << (q.shape[2] - 1).bit_length())
    q, k, v, g, beta = (_chunks(x.astype(jnp.float32), size) for x in (q, k, v, g, beta))  # [chunks, l, b, c, ...]
    total = jnp.cumsum(g, 3)
    at = jnp.arange(size)
    seen = at[:, None] >= at
    since_start = jnp.exp(total)  # decay of S since the chunk's start
    to_end = jnp.exp(total[:, :, :, -1:] - total)
    if segments_bs is not None:
        segments = _chunks(segments_bs[None], size, "edge")[:, 0]  # [chunks, b, c]
        seen = (seen & (segments[..., :, None] == segments[..., None, :]))[:, None, :, None, None]
        ends = segments[..., -1]
        before = jnp.concatenate([segments[:1, :, 0], ends[:-1]])
        since_start *= (segments == before[..., None])[:, None, :, :, None, None]
        to_end *= (segments == ends[..., None])[:, None, :, :, None, None]
    by_head = jnp.moveaxis(total, 3, -1)  # [chunks, l, b, n, r, c]
    left = jnp.exp(jnp.where(seen, by_head[..., :, None] - by_head[..., None, :], -jnp.inf))
    kk, qk = (_product("zlbcnk,zlbtnk->zlbnct", x, k)[..., None, :, :] for x in (k, q))
    system = jnp.moveaxis(beta, 3, -1)[..., None] * kk * left * (at[:, None] > at)
    inverse = unit_inverse(system)
    keys = _product("zlbnrct,zlbtnr,zlbtnk->zlbcnrk", inverse, beta * since_start, k)
    values = _product("zlbnrct,zlbtnr,zlbtnrv->zlbcnrv", inverse, beta, v)
    kept = since_start[:, :, :, -1]
    if state is None:
        begin = jnp.zeros_like(_product("lbcnk,lbcnrv->lbnrkv", k[0, :, :, :1], v[0, :, :, :1]))
    else:
        begin = state

    def chunk(state: jax.Array, of: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, keys, values, scores, since_start, to_end, kept = of
        u = values - _product("lbcnrk,lbnrkv->lbcnrv", keys, state)
        o = since_start[..., None] * _product("lbcnk,lbnrkv->lbcnrv", q, state)
        o += _product("lbnrct,lbtnrv->lbcnrv", scores, u)
        state = kept[..., None, None] * state + _product("lbcnk,lbcnrv->lbnrkv", k, u * to_end[..., None])
        return state, o

    of = (q, k, keys, values, qk * left, since_start, to_end, kept)
    if len(q) == 1:
        end, o = chunk(begin, [x[0] for x in of])
        return o[:, :, :tokens], end
    end, o = jax.lax.scan(chunk, begin, of)
    o = jnp.moveaxis(o, 0, 2)
    return o.reshape(*o.shape[:2], -1, *o.shape[4:])[:, :, :tokens], end


def _product(formula: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *arrays, precision=jax.lax.Precision.HIGHEST)


def _chunks(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """[l, b, s, ...] -> [chunks, l, b, size, ...]. Padding is zero by default: it neither decays nor writes."""
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, -x.shape[2] % size)
    x = jnp.pad(x, padding, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)


def unit_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of 1 + lower, [..., c, c], where lower is zero on and above the diagonal and c is a power of two.

    Computed by halves: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. These are batched products, which
    a mesh can split.
    """
    half = lower.shape[-1] // 2
    if not half:
        return jnp.ones_like(lower)
    first, second = unit_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_product("...ij,...jk,...kl->...il", second, lower[..., half:, :half], first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)


def _inverse_softplus(x: jax.Array) -> jax.Array:
    return x + jnp.log(-jnp.expm1(-x))


def _draw_step(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Fresh steps whose softplus is between 0.001 and 0.1, with a uniform logarithm."""
    return _inverse_softplus(jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1))))


DRAWS = {  # fresh weights by `Weight.initial`; decay and step as in Mamba-2 (Dao and Gu, arXiv 2405.21060)
    "convolution": lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1) / math.sqrt(shape[-1]),
    "decay": lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16)),
    "step": _draw_step,
}
