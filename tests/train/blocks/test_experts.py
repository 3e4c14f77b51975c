"""Training models with experts: steps on meshes and in parts, router losses, Muon per expert, records, and resuming."""

import json
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import ConfigError, Laneformer, make_mesh, parameter_count
from laneformer.train.config import LaterPhase, OptimizerConfig
from laneformer.train.flops import train_flops_per_token
from laneformer.train.optimizer import make_optimizer
from laneformer.train.step import Trainer
from laneformer.weights import initial_weights, matmul_parameters, parameter_table, parameters_per_token
from tests.support.tiny_recipe import changed, losses, records, tiny

MODEL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FLAGS = [word for name, value in MODEL.items() for word in (f"--model.{name.replace('_', '-')}", str(value))]


@cache
def trainer(data=1, lane=8, **changes) -> Trainer:
    config = changed(tiny(), **{f"model__{name}": value for name, value in MODEL.items()}, **changes)
    return Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))


@cache
def initial_state():
    return jax.device_get(trainer(2, 4).init())


def put(trainer: Trainer, seed: int):
    """A batch on the mesh, and the same arrays in NumPy. Rows differ in counted tokens; the first three have none."""
    random = np.random.default_rng(seed)
    weights = random.integers(0, 2, (8, 16)).astype(np.float32)
    weights[:3] = 0
    rows = {"ids": random.integers(1, 64, (8, 17)).astype(np.int32), "weights": weights}
    return trainer.put_batch(lambda span: {key: x[span] for key, x in rows.items()}, rows), rows


def run(trainer: Trainer, steps: int = 3):
    """Losses, gradient norms, router losses, and the loads of the fullest experts in the first steps."""
    state, found = jax.tree.map(jax.device_put, initial_state(), trainer.state_shardings), []
    for n in range(steps):
        state, values = trainer.step(state, put(trainer, n)[0], trainer.put_asked(False))
        names = ("loss", "grad_norm", "load_balance_loss", "router_z_loss")
        found.append([*(float(values[name]) for name in names), *values["experts"]["fullest"].tolist()])
    return np.array(found)


@cache
def usual():
    return run(trainer(2, 4))


@pytest.mark.parametrize(
    ("data", "lane", "changes"),
    [
        pytest.param(2, 4, {"accumulate": 4}, marks=pytest.mark.slow),
        pytest.param(1, 1, {"remat": "block"}, marks=pytest.mark.slow),
        pytest.param(1, 1, {}, marks=pytest.mark.exhaustive),
        pytest.param(1, 8, {}, marks=pytest.mark.exhaustive),
        pytest.param(8, 1, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, 4, {"remat": "block"}, marks=pytest.mark.exhaustive),
        pytest.param(1, 2, {"accumulate": 2, "remat": "dots"}, marks=pytest.mark.exhaustive),
    ],
)
def test_meshes_parts_and_recomputation_change_no_loss(data, lane, changes):
    np.testing.assert_allclose(run(trainer(data, lane, **changes)), usual(), rtol=2e-5)


@pytest.mark.slow
def test_validation_is_only_the_cross_entropy():
    t = trainer(2, 4)
    state = jax.tree.map(jax.device_put, initial_state(), t.state_shardings)
    batch, rows = put(t, 0)
    ids, weights = rows.values()
    sums = t.evaluate(state.params, batch)
    logits = np.float64(Laneformer(t.config.model, state.params, t.precision)(ids[:, :-1]))
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    assert float(sums["nll"]) == pytest.approx((weights * nll).sum(), rel=1e-5)
    wanted = (weights * nll).sum() / weights.sum()
    assert usual()[0, 0] == pytest.approx(wanted, rel=1e-5), "the reported training loss is the cross-entropy too"


@pytest.mark.slow
def test_router_losses_of_weight_zero_have_no_effect():
    """The gradient is that of the cross-entropy, and metrics lack the router losses."""
    t = trainer(1, 1, load_balance_loss=0.0, router_z_loss=0.0)
    state = jax.tree.map(jax.device_put, initial_state(), t.state_shardings)
    batch, rows = put(t, 0)

    @jax.jit
    @jax.grad
    def gradient(params, ids, weights):
        logits = jax.nn.log_softmax(Laneformer(t.config.model, params, t.precision)(ids[:, :-1]))
        nll = -jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return (weights * nll).sum() / weights.sum()

    found = gradient(initial_state().params, **rows)
    norm = math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in found.values()))
    _, values = t.step(state, batch, t.put_asked(False))
    assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert not {"load_balance_loss", "router_z_loss"} & values.keys()


@pytest.mark.slow
def test_muon_orthogonalises_each_expert_and_leaves_routers_to_adam():
    """The update of an expert depends only on its own gradient, and its singular values are about equal."""
    config = trainer(2, 4).config
    o = OptimizerConfig(kind="muon", weight_decay=0.0, clip_norm=1e9)
    muon, adam = (
        make_optimizer(o.__class__(**{**o.__dict__, "kind": kind}), config.model) for kind in ("muon", "adamw")
    )
    params = initial_weights(config.model, 0)
    random = np.random.default_rng(1)
    grads = {path: jnp.float32(random.standard_normal(p.shape)) for path, p in params.items()}
    path = "layers.0.feed_forward.w1"
    scaled = grads | {path: grads[path].at[:, 1].multiply(100.0)}

    by_muon, by_adam = (
        jax.jit(lambda g, rule=rule: rule.update(g, rule.init(params), params)[0]) for rule in (muon, adam)
    )
    found, other = by_muon(grads), by_muon(scaled)
    sizes = np.linalg.svd(np.asarray(found[path]), compute_uv=False) / (0.2 * math.sqrt(32))
    assert sizes.shape == (8, 4, 4) and (sizes > 0.6).all() and (sizes < 1.3).all()
    np.testing.assert_allclose(other[path], found[path], atol=1e-3)
    router = "layers.0.feed_forward.router"
    np.testing.assert_allclose(found[router], by_adam(grads)[router], rtol=1e-6)


def test_routers_and_experts_decay():
    config = changed(trainer(2, 4).config, optimizer__weight_decay=0.5)
    params = {path: jnp.ones(p.shape) for path, p in parameter_table(config.model).items()}
    rule = make_optimizer(config.optimizer, config.model)
    updates = jax.jit(lambda p: rule.update(jax.tree.map(jnp.zeros_like, p), rule.init(p), p)[0])(params)
    for name in ("router", "w1", "w2", "w3"):
        assert (updates[f"layers.1.feed_forward.{name}"] == -0.5).all(), name


def test_flops_count_only_used_experts():
    """Counted by hand: attention, 2 of 4 experts with 32 columns, the router, and the head."""
    model = trainer(2, 4).config.model
    layer = 4 * 32 * 32 + 4 * 32
    used = 2 * (layer + 2 * 3 * 32 * 32) + 64 * 32
    assert matmul_parameters(model) == used
    assert parameter_count(model) == used + 2 * 2 * 3 * 32 * 32 + 64 * 32 + 5 * 32
    assert parameters_per_token(model) == used + 5 * 32
    assert train_flops_per_token(model, 16) == 6 * used + 3 * 2 * 4 * 32 * 17 / 2


@pytest.mark.slow
def test_run_reports_its_experts_and_resumes_bitwise(resumed):
    run, out = resumed(11, *FLAGS, "--steps", "20", "--save-every", "8", "--validate-every", "10")
    assert " per token), 8 lanes" in out and "step 10/20  loss " in out and "  fullest expert " in out
    found = records(run)
    step = next(line for line in found if line["step"] == 20 and "loss" in line)
    assert {name: len(x) for name, x in step["experts"].items()} == {"fullest": 2, "dead": 2, "entropy": 2}
    assert all(1 <= x <= 2 for x in step["experts"]["fullest"]) and set(step["experts"]["dead"]) == {0.0}
    assert all(0 < x <= math.log(4) for x in step["experts"]["entropy"])
    assert step["load_balance_loss"] == pytest.approx(0.01 * 2, rel=0.1) and step["router_z_loss"] > 0
    lanes = next(line["lanes"] for line in found if "lanes" in line)
    assert len(lanes["experts_in_common"]) == 2 and all(0 < x <= 1 for x in lanes["experts_in_common"])
    assert not any("bf12" in line for line in found)
    assert losses(run)[-1] < losses(run)[0] - 0.5
    assert json.loads((run / "run.json").read_text())["config"]["model.num_experts"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill__teacher": "teacher"}, "distill.teacher"),
        ({"weights": "int4"}, "weights = int4"),
        (
            {
                "then": {
                    "last": LaterPhase(
                        steps=1, data=tiny().data, optimizer=OptimizerConfig(warmup_steps=0), weights="int8"
                    )
                }
            },
            r"then\.last\.weights = int8 with model\.num_experts = 4",
        ),
        ({"activation_dtype": "bfloat16"}, r"activation_dtype = bfloat16 with model\.num_experts = 4"),
        ({"load_balance_loss": -1.0}, "load_balance_loss"),
        ({"router_z_loss": math.nan}, "router_z_loss"),
    ],
)
def test_bad_values_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        changed(trainer(2, 4).config, **changes)
