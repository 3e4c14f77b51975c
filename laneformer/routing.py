"""What the routers of a model decided, and the losses that train them. Shape letters as in
laneformer/blocks/experts.py, and: n layers with experts.

Every lane routes from its own stream, so each lane of each layer counts apart. With p a router's softmax over the E
experts, or its sigmoids over their sum, token weights w that sum to T, and k experts that a token uses:

    load f[e] = sum of w over the tokens that use e, over T     (their sum is k)
    share P[e] = sum of w p[e], over T                          (their sum is 1)
    load-balancing loss: E sum_e f[e] P[e], k where the load is even; its gradient passes through P alone
    z-loss: sum of w (log sum exp of the logits)^2, over T

both as means over layers and lanes. The first is that of the Switch Transformer (Fedus et al., arXiv 2101.03961) as
transformers computes it for one layer of Mixtral or Qwen3-MoE, the second that of ST-MoE (Zoph et al., arXiv
2202.08906). Over sigmoids the first is k times the loss of DeepSeek-V3 (arXiv 2412.19437, equation 17), over the batch
instead of each sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """What the router of a layer decided for every token of every lane."""

    logits_lbse: jax.Array
    """float32."""
    chosen_lbsj: jax.Array
    """Numbers of the experts that the token uses, int32."""
    share_lbse: jax.Array | None = None
    """What sums to 1 over the experts, float32; None: the softmax of the logits."""


class RouterSums(NamedTuple):
    """Sums over tokens, each times its weight, in float32: those of parts of a batch can be added."""

    chosen_nle: jax.Array
    """Tokens that use the expert."""
    share_nle: jax.Array
    """The router's softmax, or sigmoids over their sum."""
    lse_squared_nl: jax.Array
    """Square of the log sum exp of the logits."""
    entropy_nl: jax.Array
    """Entropy of that in nats."""


def router_sums(routings: Sequence[Routing], weights_bs: jax.Array) -> RouterSums | None:
    """The sums over all tokens of a batch, layer by layer; None without experts. weights: of the tokens, float32."""
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

    return jax.tree.map(lambda *layers: jnp.stack(layers), *map(of_layer, routings))


def load_of(chosen_nle: jax.Array, used: int) -> jax.Array:
    """The load f [n, l, e] of the batch that was counted; 0 where no token was."""
    return used * chosen_nle / jnp.maximum(chosen_nle.sum(-1, keepdims=True), 1e-6)


def router_losses(sums: RouterSums, load_nle: jax.Array, lanes: int) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss under that load and the z-loss, both times T: what the lanes in `sums` add to the means
    over layers and all `lanes`.
    """
    layers, _, experts = sums.chosen_nle.shape
    mean = 1 / (layers * lanes)
    balance = experts * (jax.lax.stop_gradient(load_nle) * sums.share_nle).sum()
    return mean * balance, mean * sums.lse_squared_nl.sum()


def router_figures(sums: RouterSums, used: int) -> dict[str, jax.Array]:
    """How the load is spread, by layer, [n]: means over lanes.

    fullest: load of the expert that most tokens use, over the even load; dead: experts that no token uses; entropy: of
    the router's softmax, mean over tokens in nats, log E at most.
    """
    load_nle = load_of(sums.chosen_nle, used)
    tokens_nl = jnp.maximum(sums.chosen_nle.sum(-1) / used, 1e-6)
    return {
        "fullest": load_nle.max(-1).mean(-1) * load_nle.shape[-1] / used,
        "dead": (sums.chosen_nle == 0).sum(-1).mean(-1),
        "entropy": (sums.entropy_nl / tokens_nl).mean(-1),
    }


def in_common(users_bse: jax.Array, lanes: int, used: int) -> jax.Array:
    """Share of a token's experts that two lanes both chose, mean over tokens and pairs of lanes; users: number of the
    lanes that use an expert.
    """
    pairs = (users_bse * (users_bse - 1)).sum(-1).mean()
    return pairs / (used * lanes * (lanes - 1)) if lanes > 1 else jnp.float32(jnp.nan)
