"""A mixture of experts: a router chooses a few small MLPs for each token (Shazeer et al., arXiv 1701.06538).

Shape letters as in laneformer/model.py, and: e experts, j experts that a token uses, p uses (pairs of a token and one
of its experts), n blocks of uses of one expert, c uses in a block.

Every lane has an equal share of the columns of every expert, so that all lanes read the same amount. The router
computes in float32, because rounding that changes the chosen experts changes the model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import FeedForward, Initial, Plain, QuantizedParam, Weight, Weights, weight_of_op, within
from laneformer.blocks.mlp import FUNCTIONS, Mlp
from laneformer.config import ExpertsOptions
from laneformer.errors import ConfigError
from laneformer.mesh import DATA
from laneformer.ops import (
    QUICK_GELU_FACTOR,
    Activation,
    Chosen,
    Matrix,
    Norm,
    Op,
    Product,
    ProductName,
    RootRoute,
    Route,
    SharedExpert,
    SigmoidRoute,
    Value,
)
from laneformer.precision import Precision
from laneformer.quantized import Quantized
from laneformer.routing import Routing

MATRICES = ("w1", "w3", "w2")
SHARED = "shared"
Leaves = Mapping[str, jax.Array | dict[str, jax.Array]]
"""Weights of all experts by name: an array, or the arrays of a record by name."""
BIASES = tuple(f"{name}_bias" for name in MATRICES)
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
}
# An expert's mean load is cut into at most PARTS blocks, to reduce padding, of at least LEAST tokens each.
PARTS, LEAST = 8, 256


class Experts(FeedForward):
    """o[l] = sum over the chosen experts of share * w2[l] (activation(w1[l] h) * w3[l] h).

    Options add biases to the router and to each matrix, and clamp gate and up (gpt-oss). A shared expert is an MLP
    whose output is added, times sigmoid(shared_gate h) if it is gated.
    """

    options: ExpertsOptions
    router: Plain
    router_bias: Plain
    correction: Plain
    by_token: Plain
    shared_gate: Plain

    def __init__(self, weights: Weights, options: ExpertsOptions, precision: Precision):
        super().__init__({name: weight for name, weight in weights.items() if "." not in name}, options, precision)
        if options.shared:
            self.shared = Mlp(within(weights, SHARED), options.shared, precision)

    def __call__(self, h_lbsd: jax.Array) -> jax.Array:
        return self.routed(h_lbsd)[0]

    def routed(self, h_lbsd: jax.Array, ids_bs: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        shares_lbsj, routing = self.route(h_lbsd, ids_bs)
        weights = {name: _leaves(getattr(self, name)[...]) for name in self._names}
        o_lbsd = _by_rows(self._of_lanes, h_lbsd, shares_lbsj, routing.chosen_lbsj, weights)
        return (o_lbsd + self._of_shared(h_lbsd) if self.options.shared else o_lbsd), routing

    def _of_shared(self, h_lbsd: jax.Array) -> jax.Array:
        o_lbsd = self.precision.widened(self.shared(h_lbsd))
        if not self.options.shared_gate:
            return o_lbsd
        return o_lbsd * jax.nn.sigmoid(_float32_product("lbsd,od->lbso", h_lbsd, self.shared_gate[...]))

    def _of_lanes(
        self, h_lbsd: jax.Array, shares_lbsj: jax.Array, chosen_lbsj: jax.Array, weights: Leaves
    ) -> jax.Array:
        lanes, used = len(h_lbsd), self.options.used
        o_ltd = jax.vmap(self._lane)(
            h_lbsd.reshape(lanes, -1, h_lbsd.shape[-1]),
            shares_lbsj.reshape(lanes, -1, used),
            chosen_lbsj.reshape(lanes, -1, used),
            weights,
        )
        return o_ltd.reshape(h_lbsd.shape)

    def route(self, h_lbsd: jax.Array, ids_bs: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """The shares of each token's experts in the sum, float32 [l, b, s, j], and the router's decisions.

        Each lane routes from its own stream. Of equal logits, the expert with the lower number is chosen. ids: tokens,
        int [b, s], which a table of experts by token requires.
        """
        logits_lbse = _float32_product("lbsd,ed->lbse", h_lbsd, self.router[...])
        if self.options.router_bias:
            logits_lbse = logits_lbse + self.router_bias[...].astype(jnp.float32)
        if self.options.scores != "softmax":
            return self._by_scores(logits_lbse, ids_bs)
        best_lbsj, chosen_lbsj = jax.lax.top_k(logits_lbse, self.options.used)
        if self.options.normalized:
            return jax.nn.softmax(best_lbsj), Routing(logits_lbse, chosen_lbsj)
        shares_lbsj = jnp.exp(best_lbsj - jax.nn.logsumexp(logits_lbse, -1, keepdims=True))
        return shares_lbsj, Routing(logits_lbse, chosen_lbsj)

    def _by_scores(self, logits_lbse: jax.Array, ids_bs: jax.Array | None) -> tuple[jax.Array, Routing]:
        """`route` where a score depends on one logit alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
        options = self.options
        scores_lbse = SCORES[options.scores](logits_lbse)
        choice_lbse = jax.lax.stop_gradient(scores_lbse)
        if options.correction:
            choice_lbse = choice_lbse + jax.lax.stop_gradient(self.correction[...].astype(jnp.float32))
        if options.groups > 1:
            groups_lbsge = choice_lbse.reshape(*choice_lbse.shape[:-1], options.groups, -1)
            sums_lbsg = jax.lax.top_k(groups_lbsge, 2)[0].sum(-1)
            kept_lbsi = jax.lax.top_k(sums_lbsg, options.groups_used)[1]
            kept_lbsg = jax.nn.one_hot(kept_lbsi, options.groups, dtype=bool).any(-2)
            choice_lbse = jnp.where(kept_lbsg[..., None], groups_lbsge, -jnp.inf).reshape(choice_lbse.shape)
        if options.table_rows:
            chosen_bsj = self.by_token[...][ids_bs].astype(jnp.int32)
            chosen_lbsj = jnp.broadcast_to(chosen_bsj, (len(logits_lbse), *chosen_bsj.shape))
        else:
            chosen_lbsj = jax.lax.top_k(choice_lbse, options.used)[1]
        shares_lbsj = jnp.take_along_axis(scores_lbse, chosen_lbsj, -1)
        if options.normalized:
            shares_lbsj = shares_lbsj / (shares_lbsj.sum(-1, keepdims=True) + 1e-20)
        share_lbse = scores_lbse / (scores_lbse.sum(-1, keepdims=True) + 1e-20)
        return options.factor * shares_lbsj, Routing(logits_lbse, chosen_lbsj, share_lbse)

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the experts' weights."""
        return MATRICES + BIASES if self.options.biases else MATRICES

    def _lane(self, h_td: jax.Array, shares_tj: jax.Array, chosen_tj: jax.Array, weights: Leaves) -> jax.Array:
        """The output of one lane [t, d], given its weights by name.

        Uses are sorted by expert into blocks of equal size, padded with uses of no token. A block reads each matrix of
        its expert once.
        """
        tokens, used = chosen_tj.shape
        pairs, experts = tokens * used, self.options.experts
        size = max(1, pairs // experts)
        size = -(-size // min(PARTS, max(1, size // LEAST)))
        blocks = pairs if size == 1 else pairs // size + experts  # upper bound
        expert_p = chosen_tj.reshape(-1)
        order_p = jnp.argsort(expert_p)
        counts_e = jnp.bincount(expert_p, length=experts)
        blocks_e = -(-counts_e // size)
        last_e = jnp.cumsum(blocks_e)
        sorted_p = expert_p[order_p]
        rank_p = jnp.arange(pairs) - (jnp.cumsum(counts_e) - counts_e)[sorted_p]
        place_p = (last_e - blocks_e)[sorted_p] * size + rank_p
        expert_n = jnp.minimum((last_e <= jnp.arange(blocks)[:, None]).sum(1), experts - 1)
        use_nc = jnp.full(blocks * size, pairs, order_p.dtype).at[place_p].set(order_p).reshape(blocks, size)
        held = {name: getattr(self, name) for name in MATRICES}
        facts = tuple(own.facts if isinstance(own, QuantizedParam) else None for own in held.values())
        rule = Rule(self.precision, self.options, facts)
        return expert_sum(rule, h_td, shares_tj.reshape(-1), weights, use_nc, expert_n)

    @staticmethod
    def table(options: ExpertsOptions, path: str) -> dict[str, Weight]:
        l, e, d, f = options.num_lanes, options.experts, options.hidden_size, options.columns
        found: dict[str, Weight] = {}

        def add(name: str, shape: tuple[int, ...], spec: P, initial: Initial, share: float, biased: bool) -> None:
            file_name = f"model.{path}.{name}"
            found[f"{path}.{name}"] = Weight(
                file_name=f"{file_name}.weight",
                shape=shape,
                spec=spec,
                initial=initial,
                group="matrix",
                part="MLP",
                share=share,
            )
            if biased:
                found[f"{path}.{name}_bias"] = Weight(
                    file_name=f"{file_name}.bias",
                    shape=shape[:-1],
                    spec=P(*spec[:-2], None),
                    initial="zeros",
                    group="vector",
                    part="MLP",
                    share=share,
                )

        read, written = P("lane", None, None, "data"), P("lane", None, "data", None)
        share = options.used / e
        add("router", (e, d), P(None, "data"), "normal", 1.0, options.router_bias)
        if options.correction:
            found[f"{path}.correction"] = Weight(
                file_name=f"model.{path}.correction",
                shape=(e,),
                spec=P(None),
                initial="zeros",
                group="vector",
                part="MLP",
                dtype="float32",
            )
        if options.table_rows:
            found[f"{path}.by_token"] = Weight(
                file_name=f"model.{path}.by_token",
                shape=(options.table_rows, options.used),
                spec=P(None, None),
                initial="experts",
                group="vector",
                part="MLP",
                share=0.0,
                looked_up=options.used,
                dtype="int32",
                below=e,
            )
        add("w1", (l, e, f, d), read, "normal", share, options.biases)
        add("w3", (l, e, f, d), read, "normal", share, options.biases)
        add("w2", (l, e, d, f), written, "output", share, options.biases)
        if options.shared:
            found |= Mlp.table(options.shared, f"{path}.{SHARED}")
        if options.shared_gate:
            add("shared_gate", (1, d), P(None, "data"), "normal", 1.0, False)
        return found

    @staticmethod
    def ops(options: ExpertsOptions, path: str, norm: Norm | None) -> tuple[Op, ...]:
        table, clamped = Experts.table(options, path), options.limit is not None
        functions = {QUICK_GELU_FACTOR: Activation.QUICK_GELU, 1.0: Activation.SILU}
        if clamped and options.alpha not in functions:
            raise ConfigError(
                f"swiglu_alpha = {options.alpha}: kernels support only {QUICK_GELU_FACTOR} and 1; use backend xla"
            )

        def matrix(name: str, of_experts: bool) -> Matrix:
            bias = f"{path}.{name}_bias"
            return Matrix(
                weight_of_op(table, f"{path}.{name}", of_experts),
                weight_of_op(table, bias, of_experts) if bias in table else None,
            )

        w1, w3, w2 = (matrix(name, of_experts=True) for name in MATRICES)
        hidden = Product(
            ProductName.GATE_UP,
            (w1, w3),
            reads=Value.STREAM,
            writes=Value.HIDDEN,
            norm=norm,
            activation=functions[options.alpha] if clamped else options.activation,
            gated=True,
            limit=options.limit,
            up_offset=options.up_offset if clamped else 0.0,
            chosen=Chosen(options.used, summed=False),
        )
        chosen = Chosen(options.used, summed=True)
        down = Product(ProductName.DOWN, (w2,), reads=Value.HIDDEN, writes=Value.OUTPUT, chosen=chosen)
        router = matrix("router", of_experts=False), options.used, options.normalized, norm
        route: Route | SigmoidRoute | RootRoute
        if options.table_rows or options.scores == "sqrtsoftplus":
            correction = weight_of_op(table, f"{path}.correction") if options.correction else None
            by_token = weight_of_op(table, f"{path}.by_token", small=True) if options.table_rows else None
            route = RootRoute(*router, correction, options.factor, by_token)
        elif options.scores == "sigmoid":
            correction = weight_of_op(table, f"{path}.correction") if options.correction else None
            route = SigmoidRoute(*router, correction, options.groups, options.groups_used, options.factor)
        else:
            route = Route(*router)
        if not options.shared:
            return route, hidden, down
        beside = Mlp.ops(options.shared, f"{path}.{SHARED}", norm)
        gate = matrix("shared_gate", of_experts=False) if options.shared_gate else None
        return route, hidden, down, SharedExpert(beside, gate)


def draw_by_token(key: jax.Array, shape: tuple[int, ...], experts: int) -> jax.Array:
    """Fresh experts of each token, int [tokens, used]: consecutive numbers, modulo `experts`, after a random first."""
    first = jax.random.randint(key, (shape[0], 1), 0, experts)
    return (first + jnp.arange(shape[1])) % experts


def _float32_product(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *(a.astype(jnp.float32) for a in (x, w)), precision=jax.lax.Precision.HIGHEST)


def _leaves(weight: jax.Array | Quantized[jax.Array]) -> jax.Array | dict[str, jax.Array]:
    return weight.arrays if isinstance(weight, Quantized) else weight


OfLanes = Callable[[jax.Array, jax.Array, jax.Array, Leaves], jax.Array]
"""`Experts._of_lanes`."""


def _by_rows(
    of_lanes: OfLanes, h_lbsd: jax.Array, shares_lbsj: jax.Array, chosen_lbsj: jax.Array, weights: Leaves
) -> jax.Array:
    """of_lanes(...), split over the mesh axis "data" if that divides the batch: each device sorts its own tokens and
    gathers the weights once.
    """
    data = jax.sharding.get_abstract_mesh().shape.get(DATA, 1)
    if data == 1 or h_lbsd.shape[1] % data:
        return of_lanes(h_lbsd, shares_lbsj, chosen_lbsj, weights)
    return _on_devices(of_lanes, h_lbsd, shares_lbsj, chosen_lbsj, weights)


ROWS = P(None, DATA)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_devices(
    of_lanes: OfLanes, h_lbsd: jax.Array, shares_lbsj: jax.Array, chosen_lbsj: jax.Array, weights: Leaves
) -> jax.Array:
    """`of_lanes` on each device of the data axis. The custom derivative computes of_lanes again, because JAX (0.10)
    cannot differentiate a shard_map inside another.
    """
    local = jax.shard_map(of_lanes, axis_names={DATA}, in_specs=(ROWS, ROWS, ROWS, P()), out_specs=ROWS)
    return local(h_lbsd, shares_lbsj, chosen_lbsj, weights)


Kept = tuple[jax.Array, jax.Array, jax.Array, Leaves]
"""The arguments of `_on_devices` after the first."""


def _devices_forward(of_lanes: OfLanes, *kept: *Kept) -> tuple[jax.Array, Kept]:
    return _on_devices(of_lanes, *kept), kept


def _devices_backward(of_lanes: OfLanes, kept: Kept, g_lbsd: jax.Array) -> tuple[jax.Array, jax.Array, None, Leaves]:
    def local(
        h_lbsd: jax.Array, shares_lbsj: jax.Array, chosen_lbsj: jax.Array, weights: Leaves, g_lbsd: jax.Array
    ) -> tuple[jax.Array, jax.Array, Leaves]:
        weights = jax.tree.map(lambda w: jax.lax.pcast(w, DATA, to="varying"), weights)
        _, pull = jax.vjp(lambda h, shares, w: of_lanes(h, shares, chosen_lbsj, w), h_lbsd, shares_lbsj, weights)
        of_h, of_shares, gradients = pull(g_lbsd)
        return of_h, of_shares, jax.tree.map(lambda w: jax.lax.psum(w, DATA), gradients)

    specs = (ROWS, ROWS, ROWS, P(), ROWS)
    on_devices = jax.shard_map(local, axis_names={DATA}, in_specs=specs, out_specs=(ROWS, ROWS, P()))
    h_lbsd, shares_lbsj, weights = on_devices(*kept, g_lbsd)
    return h_lbsd, shares_lbsj, None, weights


_on_devices.defvjp(_devices_forward, _devices_backward)


class Rule(NamedTuple):
    """How an expert computes the block of tokens that use it."""

    precision: Precision
    options: ExpertsOptions
    facts: tuple[tuple[str, tuple[int, int], int] | None, ...]
    """For each of MATRICES: kind, group and columns of a quantized weight, which is passed as its arrays by name; None
    for a plain array.
    """

    def own(self, weights: Leaves, e: jax.Array) -> dict[str, Any]:
        """The weights of expert e, from the weights of all experts: arrays and records."""
        found: dict[str, Any] = jax.tree.map(lambda w: w[e], weights)
        for name, facts in zip(MATRICES, self.facts, strict=True):
            if facts is not None:
                kind, group, columns = facts
                found[name] = Quantized(kind, group=group, columns=columns, **found[name])
        return found

    def times(self, name: str, own: dict[str, Any], x_c: jax.Array) -> jax.Array:
        y_c = self.precision.einsum("ci,oi->co", x_c, own[name])
        return y_c + own[f"{name}_bias"] if self.options.biases else y_c

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden activations that w2 multiplies, from gate and up rows of equal shape."""
        limit = self.options.limit
        if limit is None:
            return FUNCTIONS[self.options.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(self.options.alpha * gate) * (up + self.options.up_offset)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_sum(
    rule: Rule, h_td: jax.Array, shares_p: jax.Array, weights: Leaves, use_nc: jax.Array, expert_n: jax.Array
) -> jax.Array:
    """Each token's sum over its experts, [t, d] in the accumulate dtype. It is computed block by block, so that only
    one matrix at a time is widened, and the vectors of all uses are never in memory together.

    shares_p: share of each use; the number of a use is token * used + rank. use_nc: numbers of the uses in each block,
    ascending; padding has the number of all uses, which is out of range. expert_n: expert of each block. weights: of
    all experts by name, [e, ...].
    """
    return _forward(rule, h_td, shares_p, weights, use_nc, expert_n)[0]


def _rows(x: jax.Array, index_c: jax.Array) -> jax.Array:
    """x[index], with zeros where the index is out of range."""
    return x.at[index_c].get(mode="fill", fill_value=0, indices_are_sorted=True)


def _add_rows(x: jax.Array, index_c: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[index_c].add(rows.astype(x.dtype), mode="drop", indices_are_sorted=True)


Residuals = tuple[jax.Array, jax.Array, Leaves, jax.Array, jax.Array, tuple[jax.Array, ...]]
"""The arguments of `expert_sum` after the first, and the rows of gate and up."""


def _forward(
    rule: Rule, h_td: jax.Array, shares_p: jax.Array, weights: Leaves, use_nc: jax.Array, expert_n: jax.Array
) -> tuple[jax.Array, Residuals]:
    used = rule.options.used

    def one(o_td: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        use_c, e = block
        own, token_c = rule.own(weights, e), use_c // used
        x_cd = _rows(h_td, token_c)
        gate_cf, up_cf = rule.times("w1", own, x_cd), rule.times("w3", own, x_cd)
        o_cd = rule.times("w2", own, rule.hidden(gate_cf, up_cf))
        return _add_rows(o_td, token_c, _rows(shares_p, use_c)[:, None] * o_cd), (gate_cf, up_cf)

    o_td, products = jax.lax.scan(one, jnp.zeros_like(h_td, rule.precision.accumulate), (use_nc, expert_n))
    products = tuple(checkpoint_name(x_ncf, "product") for x_ncf in products)
    return o_td, (h_td, shares_p, weights, use_nc, expert_n, products)


def _backward(
    rule: Rule, kept: Residuals, g_td: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], None, None]:
    """Adds each block's gradients in place; the transpose of the loop would make a gradient of all experts per block.

    With o = share * w2 a, the gradient of a share is a . (w2^T g), so o is not needed.
    """
    h_td, shares_p, weights, use_nc, expert_n, products = kept
    einsum, used = rule.precision.einsum, rule.options.used

    def one(carry: tuple[Any, jax.Array], block: Any) -> tuple[tuple[Any, jax.Array], jax.Array]:
        gradients, gh_td = carry
        use_c, e, (gate_cf, up_cf) = block
        own, token_c = rule.own(weights, e), use_c // used
        x_cd, g_cd, share_c = _rows(h_td, token_c), _rows(g_td, token_c), _rows(shares_p, use_c)
        a_cf, pull = jax.vjp(rule.hidden, gate_cf, up_cf)
        ga_cf = einsum("cd,df->cf", g_cd, own["w2"])
        go_cd = share_c[:, None] * g_cd
        ggate_cf, gup_cf = pull(share_c[:, None] * ga_cf)
        gx_cd = einsum("cf,fd->cd", ggate_cf, own["w1"]) + einsum("cf,fd->cd", gup_cf, own["w3"])
        gshare_c = (a_cf * ga_cf).sum(-1)
        found = {
            "w1": einsum("cf,cd->fd", ggate_cf, x_cd),
            "w3": einsum("cf,cd->fd", gup_cf, x_cd),
            "w2": einsum("cd,cf->df", go_cd, a_cf),
        }
        if rule.options.biases:
            gshare_c += g_cd @ own["w2_bias"]
            found |= {"w1_bias": ggate_cf.sum(0), "w3_bias": gup_cf.sum(0), "w2_bias": go_cd.sum(0)}
        gradients = {name: gradients[name].at[e].add(own.astype(gradients[name].dtype)) for name, own in found.items()}
        return (gradients, _add_rows(gh_td, token_c, gx_cd)), gshare_c

    begin = jax.tree.map(jnp.zeros_like, weights), jnp.zeros_like(h_td, rule.precision.accumulate)
    (gradients, gh_td), gshare_nc = jax.lax.scan(one, begin, (use_nc, expert_n, products))
    gshares_p = jnp.zeros_like(shares_p).at[use_nc].set(gshare_nc.astype(shares_p.dtype), mode="drop")
    return gh_td.astype(h_td.dtype), gshares_p, gradients, None, None


expert_sum.defvjp(_forward, _backward)
