"""The decisions of a model's routers, and the losses that train them. Shape letters as in
laneformer/blocks/experts.py, and: n layers with experts.

Every lane routes from its own stream, so each lane of each layer is counted separately. Let p be a router's softmax
over the E experts (or its scores divided by their sum), w the weights of the tokens, T the sum of w, and k the number
of experts that a token uses:

    load f[e] = (sum of w over the tokens that use e) / T       (the sum over e is k)
    share P[e] = (sum of w p[e]) / T                            (the sum over e is 1)
    load-balancing loss = E sum_e f[e] P[e]                     (k if the load is even; the gradient passes through P)
    z-loss = (sum of w (log sum exp of the logits)^2) / T

Both losses are means over layers and lanes. The load-balancing loss is that of the Switch Transformer (Fedus et al.,
arXiv 2101.03961), as transformers computes it for one layer of Mixtral or Qwen3-MoE. With sigmoids it is k times the
loss of DeepSeek-V3 (arXiv 2412.19437, equation 17), over the batch instead of each sequence. The z-loss is that of
ST-MoE (Zoph et al., arXiv 2202.08906).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """The decisions of a layer's router for every token of every lane."""

    logits_lbse: jax.Array
    """Logits of all experts, float32."""
    chosen_lbsj: jax.Array
    """Numbers of the experts that the token uses, int32."""
    share_lbse: jax.Array | None = None
    """p of the opening comment, which sums to 1 over the experts, float32; None: the softmax of the logits."""


class RouterSums(NamedTuple):
    """Sums over the tokens of a batch, each times its weight, in float32. The sums of parts of a batch can be added."""

    chosen_nle: jax.Array
    """Tokens that use the expert."""
    share_nle: jax.Array
    """p of the opening comment."""
    lse_squared_nl: jax.Array
    """Square of the log sum exp of the logits."""
    entropy_nl: jax.Array
    """Entropy of p in nats."""


def router_sums(routings: Sequence[Routing], weights_bs: jax.Array) -> RouterSums | None:
    """The sums over all tokens of a batch, for each layer with experts; None without such layers. weights: of the
    tokens, float32 [b, s].
    """
    if not routings:
        return None

    def total(x_lbs_: jax.Array) -> jax.Array:
        return (weights_bs.reshape(*weights_bs.shape, *[1] * (x_lbs_.ndim - 3)) * x_lbs_).sum((1, 2))

    def of_layer(routing: Routing) -> RouterSums:
        logits_lbse = routing.logits_lbse
        lse_lbs = jax.nn.logsumexp(logits_lbse, -1)
        if routing.share_lbse is None:
            share_lbse = jnp.exp(logits_lbse - lse_lbs[..., None])
            entropy_lbs = lse_lbs - (share_lbse * logits_lbse).sum(-1)
        else:
            share_lbse = routing.share_lbse
            entropy_lbs = -(share_lbse * jnp.log(share_lbse + 1e-30)).sum(-1)
        used_lbse = jax.nn.one_hot(routing.chosen_lbsj, logits_lbse.shape[-1]).sum(-2)
        return RouterSums(*map(total, (used_lbse, share_lbse, jnp.square(lse_lbs), entropy_lbs)))

    sums: RouterSums = jax.tree.map(lambda *layers: jnp.stack(layers), *map(of_layer, routings))
    return sums


def load_of(chosen_nle: jax.Array, used: int) -> jax.Array:
    """The load f [n, l, e] from a batch's weighted counts of tokens; 0 if no token was counted. used: experts per
    token.
    """
    return used * chosen_nle / jnp.maximum(chosen_nle.sum(-1, keepdims=True), 1e-6)


def router_losses(sums: RouterSums, load_nle: jax.Array, lanes: int) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss for the given load and the z-loss, both times T. The results are the contributions of the
    lanes in `sums` to the means over layers and all `lanes` lanes.
    """
    layers, _, experts = sums.chosen_nle.shape
    mean = 1 / (layers * lanes)
    balance = experts * (jax.lax.stop_gradient(load_nle) * sums.share_nle).sum()
    return mean * balance, mean * sums.lse_squared_nl.sum()


def router_figures(sums: RouterSums, used: int) -> dict[str, jax.Array]:
    """How evenly each layer's load is spread, float32 [n], as means over lanes.

    fullest: largest load of an expert, divided by the even load. dead: number of experts that no token uses. entropy:
    mean over tokens of the entropy of p in nats, at most log E.
    """
    load_nle = load_of(sums.chosen_nle, used)
    tokens_nl = jnp.maximum(sums.chosen_nle.sum(-1) / used, 1e-6)
    return {
        "fullest": load_nle.max(-1).mean(-1) * load_nle.shape[-1] / used,
        "dead": (sums.chosen_nle == 0).sum(-1).mean(-1),
        "entropy": (sums.entropy_nl / tokens_nl).mean(-1),
    }


def in_common(users_bse: jax.Array, lanes: int, used: int) -> jax.Array:
    """The share of a token's experts that two lanes both chose: the mean over tokens and pairs of lanes, nan with one
    lane. users: number of lanes that use each expert, [b, s, e]. used: experts per token.
    """
    pairs = (users_bse * (users_bse - 1)).sum(-1).mean()
    return pairs / (used * lanes * (lanes - 1)) if lanes > 1 else jnp.float32(jnp.nan)
