"""Losses and figures of routers against float64 NumPy, in every layout and on meshes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laneformer.model
from laneformer import make_mesh
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.routing import Routing, in_common, load_of, router_figures, router_losses, router_sums
from laneformer.weights import parameter_table
from tests.support import small, tiny

EXPERTS, USED = 6, 2
WEIGHTS = np.random.default_rng(3).uniform(0, 2, (4, 12)).astype(np.float32)


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def reference(layers, weights_bs):
    """Both losses and the figures in float64, from each layer's logits [l, b, s, e], by lane and by token."""
    balance, z, fullest, dead, entropy = [], [], [], [], []
    for logits in np.float64(layers):
        rows = []
        for of_lane in logits:
            uses, shares, squares, surprise = np.zeros(EXPERTS), np.zeros(EXPERTS), 0.0, 0.0
            for place in np.ndindex(weights_bs.shape):
                p, w = softmax(of_lane[place]), np.float64(weights_bs[place])
                uses[np.argsort(-of_lane[place], kind="stable")[:USED]] += w
                shares += w * p
                squares += w * np.log(np.exp(of_lane[place]).sum()) ** 2
                surprise -= w * (p * np.log(p)).sum()
            total = np.float64(weights_bs).sum()
            balance.append(EXPERTS * (uses / total * shares / total).sum())
            z.append(squares / total)
            rows.append((uses.max() / total * EXPERTS / USED, (uses == 0).sum(), surprise / total))
        for found, values in zip((fullest, dead, entropy), zip(*rows, strict=True), strict=True):
            found.append(np.mean(values))
    return np.mean(balance), np.mean(z), {"fullest": fullest, "dead": dead, "entropy": entropy}


def routing(logits) -> Routing:
    return Routing(jnp.float32(logits), jax.lax.top_k(jnp.float32(logits), USED)[1])


@partial(jax.jit, static_argnames="lanes")
def summed(layers, weights, lanes: int):
    """The sums of the routers, and both losses."""
    sums = router_sums([routing(logits) for logits in layers], weights)
    return sums, router_losses(sums, load_of(sums.chosen_nle, USED), lanes)


def test_losses_and_figures_equal_float64():
    """One layer has an expert that no token uses. The tokens have different weights."""
    layers = np.random.default_rng(0).normal(size=(3, 2, 4, 12, EXPERTS)).astype(np.float32)
    layers[1, ..., 4] -= 9
    sums, losses = summed(layers, WEIGHTS, 2)
    *expected, figures = reference(layers, WEIGHTS)
    np.testing.assert_allclose(np.array(losses) / WEIGHTS.sum(), expected, rtol=1e-5)
    found = jax.jit(router_figures, static_argnums=1)(sums, USED)
    assert found["dead"].tolist() == figures["dead"] == [0, 1, 0]
    for name, values in figures.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_load_balancing_loss_equals_that_of_mixtral():
    """As in transformers: one-hot experts [tokens, k, E], means over tokens, their product summed over k and E."""
    logits = np.random.default_rng(1).normal(size=(24, EXPERTS))
    one_hot = np.eye(EXPERTS)[np.argsort(-logits, -1)[:, :USED]]
    wanted = (one_hot.mean(0) * softmax(logits).mean(0)[None]).sum() * EXPERTS
    _, (balance, _) = summed(logits[None, None, None], np.ones((1, 24)), 1)
    assert float(balance) / 24 == pytest.approx(wanted, rel=1e-6)
    even, _ = summed(np.zeros((1, 1, 1, 3, EXPERTS)), np.ones((1, 3)), 1)
    loss = jax.jit(router_losses, static_argnums=2)(even, jnp.full((1, 1, EXPERTS), USED / EXPERTS), 1)[0]
    assert float(loss) / 3 == pytest.approx(USED)


def test_in_common_is_the_mean_over_pairs_of_lanes():
    chosen = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 4]], [[0, 5], [5, 0]]])[:, None]  # [l, b, s, j]
    users = jax.nn.one_hot(chosen, EXPERTS).sum((0, 3))
    pairs = [
        len({*chosen[a, 0, t]} & {*chosen[b, 0, t]}) / USED
        for t in range(2)
        for a in range(3)
        for b in range(3)
        if a != b
    ]
    assert float(jax.jit(in_common, static_argnums=(1, 2))(users, 3, USED)) == pytest.approx(np.mean(pairs))


@cache
def model_of(layout: str, mesh: tuple[int, int] | None, dense: tuple[int, ...] = ()) -> Laneformer:
    """A model with 2 layers and 4 lanes. mesh: sizes of the data and lane axes. dense: layers with an MLP."""
    config = tiny.config(layout=layout, num_hidden_layers=2).replace(
        num_experts=EXPERTS, num_experts_per_tok=USED, moe_intermediate_size=8, mlp_only_layers=dense
    )
    mesh = mesh and make_mesh(4, data=mesh[0], lane=mesh[1])
    weights = {
        path: jax.device_put(w, mesh and sharding(parameter_table(config)[path].spec, w.shape, mesh))
        for path, w in small.make_weights(config).items()
    }
    return Laneformer(config, weights, mesh=mesh)


IDS = tiny.token_ids(40, (4, 12))
TARGETS = np.roll(IDS, -1, 1)


def weighed(model: Laneformer, load_balance, router_z, load=None, remat="none"):
    """The loss with its parts, and its gradient."""

    def loss(model):
        options = {"load_balance": load_balance, "router_z": router_z, "load_nle": load, "remat": remat}
        return model.loss(IDS, TARGETS, WEIGHTS, **options)

    return jax.value_and_grad(loss, has_aux=True)(model)


objective = jax.jit(weighed, static_argnames=("load_balance", "router_z", "remat"))


@jax.jit
def logits_of(model: Laneformer):
    routings = []
    model._streams(IDS, None, None, "none", routings=routings)
    return [routing.logits_lbse for routing in routings]


@pytest.mark.parametrize("layout", ["dtp(1)", pytest.param("tp", marks=pytest.mark.exhaustive)])
def test_losses_are_added_to_the_cross_entropy(layout, monkeypatch):
    def observed(routings, weights_bs):
        return router_sums(routings, weights_bs), [routing.logits_lbse for routing in routings]

    model, one_program = model_of(layout, None), jax.jit(weighed)
    (total, parts), gradient = one_program(model, 0.5, 0.25)
    (plain, _), gradient_of_plain = one_program(model, 0.0, 0.0)
    monkeypatch.setattr(laneformer.model, "router_sums", observed)
    sums, logits = jax.jit(Laneformer.routers)(model, IDS, WEIGHTS)
    logits = np.array(logits)
    balance, z, _ = reference(logits, WEIGHTS)
    assert logits.shape == (2, 4, 4, 12, EXPERTS)
    assert float(plain) == pytest.approx(float(parts["nll"]), rel=1e-6)
    assert float(total - plain) == pytest.approx((0.5 * balance + 0.25 * z) * WEIGHTS.sum(), rel=1e-4)
    routers = [np.asarray(g.layers[0].feed_forward.router[...]) for g in (gradient, gradient_of_plain)]
    assert np.abs(routers[0] - routers[1]).max() > 1e-3
    for found, wanted in zip(sums, parts["routers"], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_gradient_passes_only_through_the_shares():
    """The slope equals finite differences, in float64, of E sum f P with a fixed load f."""
    rng = np.random.default_rng(2)
    logits, direction = rng.normal(size=(2, 1, 1, 5, EXPERTS))
    weights = np.ones((1, 5))

    def loss(logits):
        sums = router_sums([Routing(logits, jax.lax.top_k(logits, USED)[1])], jnp.float32(weights))
        return router_losses(sums, load_of(sums.chosen_nle, USED), 1)[0]

    slope = (np.asarray(jax.jit(jax.grad(loss))(jnp.float32(logits))) * direction).sum()
    load = np.eye(EXPERTS)[np.argsort(-logits[0, 0], -1)[:, :USED]].sum((0, 1)) / 5
    step = 1e-6
    ends = [EXPERTS * (load * softmax(logits + sign * step * direction).sum((0, 1, 2))).sum() for sign in (1, -1)]
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


def apart(one: Laneformer, other: Laneformer) -> float:
    """The largest difference of two gradients, relative to the largest entry of each weight's gradient."""
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(one.weights().values(), other.weights().values(), strict=True)
    ]
    return max(np.abs(a - b).max() / max(np.abs(a).max(), 1e-3) for a, b in pairs)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        pytest.param("tp", (2, 2), marks=pytest.mark.slow),
        pytest.param("laneformer", (2, 4), marks=pytest.mark.exhaustive),
        pytest.param("desync(2)", (1, 4), marks=pytest.mark.exhaustive),
        pytest.param("dtp(1)", (4, 2), marks=pytest.mark.exhaustive),
        pytest.param("laneformer", (4, 1), marks=pytest.mark.exhaustive),
    ],
)
def test_meshes_give_the_losses_and_gradients_of_one_device(layout, mesh):
    (total, parts), gradient = objective(model_of(layout, None), 0.5, 0.25)
    (found, others), other = objective(model_of(layout, mesh), 0.5, 0.25)
    assert float(found) == pytest.approx(float(total), rel=1e-5)
    np.testing.assert_allclose(parts["routers"].chosen_nle, others["routers"].chosen_nle, rtol=2e-5)
    assert apart(gradient, other) < 1e-4


@pytest.mark.parametrize("remat", [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("block", "dots")])
def test_recomputation_changes_no_gradient(remat):
    _, gradient = objective(model_of("laneformer", None), 0.5, 0.25)
    _, other = objective(model_of("laneformer", None), 0.5, 0.25, remat=remat)
    assert apart(gradient, other) < 1e-5


@pytest.mark.parametrize(("layout", "equal"), [("ladder", True), ("laneformer", False)])
def test_lanes_with_equal_streams_choose_the_same_experts(layout, equal):
    """Equal lanes have the same logits bit for bit. The model's first layer has an MLP, the second has experts."""
    model = model_of(layout, None, (0,))
    (logits,) = (np.asarray(x) for x in logits_of(model))
    assert (logits == logits[:1]).all() == equal
    (shared,) = np.asarray(jax.jit(Laneformer.lane_statistics)(model, IDS)["in_common"])
    assert shared == pytest.approx(1, abs=1e-6) if equal else 0 < shared < 0.99
