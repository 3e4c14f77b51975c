"""Cross-entropy over the vocabulary, computed in chunks of the sequence: only one chunk's logits exist at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from laneformer.blocks.softcap import capped, slope_of_cap
from laneformer.mesh import DATA
from laneformer.precision import Precision


class TokenLoss(NamedTuple):
    """The result of `cross_entropy`. Only `total` has a gradient; the others are for metrics."""

    total: jax.Array
    """Sum over tokens of weight * (nll + z_loss * lse^2), float32 scalar."""
    nll_bs: jax.Array
    """Negative log-likelihood of every token, lse - logit[target] in nats, float32 [b, s]."""
    lse_bs: jax.Array
    """Log sum exp of every token's logits over the vocabulary, float32 [b, s]."""


Gradients = tuple[jax.Array, jax.Array, jax.Array]
"""Gradients of the total for y, w and weights."""


def cross_entropy(
    y_lbsd: jax.Array,
    head_lvd: jax.Array,
    targets_bs: jax.Array,
    weights_bs: jax.Array | None,
    *,
    chunk: int,
    z_loss: float = 0.0,
    precision: Precision,
    axis: str | None = None,
    add_lanes: bool = False,
    cap: float | None = None,
) -> TokenLoss:
    """Weighted cross-entropy of a head's logits, with z-loss (PaLM, Chowdhery et al., arXiv 2204.02311).

    total = sum of weight * (lse - logit[target] + z_loss * lse^2), with gradients for y, head and weights. Each device
    has y [l, b, s, d], head [l, v, d], targets int [b, s] and weights float32 [b, s] (None: all 1). It computes either
    - head[l] y[l], slice l of its part of the vocabulary (l = 1: a head that all lanes share), or,
    - with add_lanes, the sum over l of head[l] y[l] over the whole vocabulary, to be summed over the devices.

    axis: the manual mesh axis over which slices or lanes are spread; None: each device has the whole head. y (float32)
    must vary over this axis: `jax.lax.pcast` does that, and its transpose sums dy once, at the end. The batch may be
    sharded over the mesh axis "data". cap: softcap of the logits, or None.

    The sequence is cut into equal chunks of at most `chunk` positions. As the loss is a weighted sum, a chunk's dlogits
    are known as soon as its logits are. For a gradient, the same sweep therefore sums dy and, in float32, dhead, and
    the head costs no more than its three products. Collectives per chunk: two all-reduces of [b, chunk] floats over
    `axis`; with add_lanes also a reduce-scatter of logits and an all-gather of dlogits. Do not call this inside
    `jax.checkpoint`, which would repeat the collectives.
    """
    if weights_bs is None:
        weights_bs = jnp.ones(targets_bs.shape, jnp.float32)
    batch, data = targets_bs.shape[0], jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    head = _Head(precision, axis, add_lanes, data if batch % data == 0 else 1, cap)
    with jax.named_scope("loss"):
        found: TokenLoss = _cross_entropy(head, chunk, z_loss, y_lbsd, head_lvd, targets_bs, weights_bs)
    return found


@dataclass(frozen=True)
class _Head:
    """Computes logits and gradients through them. The batch is cut into `groups` g, one per device of the data axis.

    With g as a separate dimension, each device sums its own dhead. A sum over the whole batch would cross the axis in
    every chunk.
    """

    precision: Precision
    axis: str | None
    add_lanes: bool
    groups: int
    cap: float | None

    def logits(self, y_lgbsd: jax.Array, w_lvd: jax.Array) -> jax.Array:
        """Logits of this device's slices of the vocabulary, float32 [l, g, b, s, v]; -inf outside the vocabulary."""
        logits = self._products(y_lgbsd, w_lvd)
        return logits if self.cap is None else jnp.where(logits == -jnp.inf, logits, capped(logits, self.cap))

    def _products(self, y_lgbsd: jax.Array, w_lvd: jax.Array) -> jax.Array:
        """The logits before their softcap."""
        if not self.add_lanes:
            return self.precision.einsum("lgbsd,lvd->lgbsv", y_lgbsd, w_lvd).astype(jnp.float32)
        logits = self.precision.einsum("lgbsd,lvd->gbsv", y_lgbsd, w_lvd).astype(jnp.float32)
        if self.axis is not None:
            surplus = -logits.shape[-1] % jax.lax.axis_size(self.axis)
            logits = jnp.pad(logits, [(0, 0)] * 3 + [(0, surplus)], constant_values=-jnp.inf)
            logits = self._in_groups(
                partial(jax.lax.psum_scatter, axis_name=self.axis, scatter_dimension=3, tiled=True), logits
            )
        return logits[None]

    def gradients(
        self, dlogits_lgbsv: jax.Array, logits_lgbsv: jax.Array, y_lgbsd: jax.Array, w_lvd: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """dy [l, g, b, s, d] and each group's dw [l, g, d, v]. This order avoids transposes as large as dlogits."""
        if self.cap is not None:
            inside = jnp.maximum(logits_lgbsv, -self.cap)  # dlogits are 0 outside the vocabulary
            dlogits_lgbsv = dlogits_lgbsv * slope_of_cap(inside, self.cap)
        dlogits, letters = dlogits_lgbsv.astype(self.precision.compute), "lgbsv"
        if self.add_lanes:
            dlogits, letters = dlogits[0], "gbsv"
            if self.axis is not None:
                dlogits = self._in_groups(partial(jax.lax.all_gather, axis_name=self.axis, axis=3, tiled=True), dlogits)
                dlogits = dlogits[..., : w_lvd.shape[1]]
        einsum = self.precision.einsum
        return einsum(f"{letters},lvd->lgbsd", dlogits, w_lvd), einsum(f"lgbsd,{letters}->lgdv", y_lgbsd, dlogits)

    def columns(self, targets_gbs: jax.Array, slices: int, width: int) -> jax.Array:
        """Column of each target in each slice of this device, int [l, g, b, s]; outside 0..width - 1 if the target is
        in another slice. width: columns of a slice.
        """
        first = 0 if self.axis is None else jax.lax.axis_index(self.axis) * slices
        return targets_gbs - (first + jnp.arange(slices)[:, None, None, None]) * width

    def over_devices(self, reduce: Callable[[jax.Array, str], jax.Array], x: jax.Array) -> jax.Array:
        """x reduced over the mesh axis, if there is one."""
        return x if self.axis is None else reduce(x, self.axis)

    def _in_groups(self, collective: Callable[[jax.Array], jax.Array], x_gbsv: jax.Array) -> jax.Array:
        """Applies the collective within each group; otherwise the compiler would gather x over the data axis first."""
        if self.groups == 1:
            return collective(x_gbsv)
        return jax.shard_map(collective, in_specs=P(DATA), out_specs=P(DATA), axis_names={DATA})(x_gbsv)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(
    head: _Head,
    chunk: int,
    z_loss: float,
    y_lbsd: jax.Array,
    w_lvd: jax.Array,
    targets_bs: jax.Array,
    weights_bs: jax.Array,
) -> TokenLoss:
    # The compiler drops the operations that only the gradient needs.
    return _sweep(head, chunk, z_loss, y_lbsd, w_lvd, targets_bs, weights_bs)[0]


def _sweep(
    head: _Head,
    chunk: int,
    z_loss: float,
    y_lbsd: jax.Array,
    w_lvd: jax.Array,
    targets_bs: jax.Array,
    weights_bs: jax.Array,
) -> tuple[TokenLoss, Gradients]:
    """The TokenLoss, and the gradient of its total for y, w and weights."""
    b, s = targets_bs.shape
    l, v, d = w_lvd.shape
    count = -(-s // chunk)
    length = -(-s // count)

    def cut(x: jax.Array, at: int) -> jax.Array:
        """[..., b, s, ...] with b at dimension `at` -> [chunk, ..., group, b, s, ...], padded with zeros."""
        x = jnp.pad(x, [(0, count * length - s if dim == at + 1 else 0) for dim in range(x.ndim)])
        x = x.reshape(*x.shape[:at], head.groups, b // head.groups, count, length, *x.shape[at + 2 :])
        return jnp.moveaxis(x, at + 2, 0)

    def join(x: jax.Array, at: int) -> jax.Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(x, 0, at + 2)
        x = x.reshape(*x.shape[:at], b, count * length, *x.shape[at + 4 :])
        return jax.lax.slice_in_dim(x, 0, s, axis=at + 1)

    w = w_lvd.astype(head.precision.compute)
    if head.groups > 1:
        w = jax.lax.with_sharding_constraint(w, P())  # gathered here, once for all chunks
    dw = jnp.zeros((l, head.groups, d, v), jnp.float32)
    if head.axis is not None:
        dw = jax.lax.pcast(dw, head.axis, to="varying")

    def step(
        dw: jax.Array, of_chunk: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        y, targets, weights = of_chunk
        logits = head.logits(y, w)
        columns = head.columns(targets, logits.shape[0], logits.shape[-1])
        here = (columns >= 0) & (columns < logits.shape[-1])
        at_target = jnp.take_along_axis(logits, jnp.where(here, columns, 0)[..., None], -1)[..., 0]
        highest = head.over_devices(jax.lax.pmax, logits.max((0, -1)))
        sums = jnp.exp(logits - highest[..., None]).sum((0, -1)), jnp.where(here, at_target, 0).sum(0)
        sum_exp, at_target = head.over_devices(jax.lax.psum, jnp.stack(sums))
        lse = highest + jnp.log(sum_exp)
        nll = jnp.log(sum_exp) - (at_target - highest)  # lse - at_target would lose digits of large logits
        slope = weights * (1 + 2 * z_loss * lse) / sum_exp
        one_hot = jax.nn.one_hot(columns, logits.shape[-1])
        dlogits = slope[..., None] * jnp.exp(logits - highest[..., None]) - weights[..., None] * one_hot
        dy, more = head.gradients(dlogits, logits, y, w)
        return dw + more.astype(jnp.float32), (nll, lse, dy)

    chunks = cut(y_lbsd.astype(head.precision.compute), 1), cut(targets_bs, 0), cut(weights_bs, 0)
    dw, (nll, lse, dy) = jax.lax.scan(step, dw, chunks)
    nll, lse, dy = join(nll, 0), join(lse, 0), join(dy, 1).astype(y_lbsd.dtype)
    dw = dw.sum(1).swapaxes(1, 2).astype(w_lvd.dtype)
    cost = nll + z_loss * lse**2
    return TokenLoss((weights_bs * cost).sum(), nll, lse), (dy, dw, cost)


def _times_cotangent(
    head: _Head, chunk: int, z_loss: float, gradient: Gradients, cotangent: TokenLoss
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    dy, dw, dweights = (cotangent.total.astype(x.dtype) * x for x in gradient)
    return dy, dw, None, dweights


_cross_entropy.defvjp(_sweep, _times_cotangent)
