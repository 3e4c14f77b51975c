"""Optimizers and learning rates equal computations in numpy or by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.train.config import OptimizerConfig
from laneformer.train.optimizer import learning_rate, make_optimizer
from laneformer.weights import parameter_table
from tests.support.tiny_recipe import changed, tiny


def test_only_matrices_and_embeddings_decay():
    config = changed(
        tiny(),
        optimizer__weight_decay=0.5,
        optimizer__warmup_steps=0,
        model__qkv_bias=True,
        model__qk_norm=True,
        model__replicated_rmsn_scale=False,
    )
    params = {path: np.ones(p.shape, np.float32) for path, p in parameter_table(config.model).items()}
    optimizer = make_optimizer(config.optimizer, config.model)
    run = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p)[0])
    updates = jax.device_get(run(params))
    decayed = {path.split(".")[-1] for path, update in updates.items() if (update == -0.5).all()}
    kept = {path.split(".")[-1] for path, update in updates.items() if (update == 0).all()}
    assert decayed == {"tok_embeddings", "lm_head", "wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert kept == {"attention_norm", "ffn_norm", "norm", "wq_bias", "wk_bias", "wv_bias", "q_norm", "k_norm"}


def test_embeddings_and_head_have_their_own_rates_and_decay():
    """One AdamW step, whose first update is the sign of the gradient."""
    config = changed(
        tiny(),
        optimizer__weight_decay=0.5,
        optimizer__decay_embeddings=False,
        optimizer__embedding_rate=0.25,
        optimizer__head_rate=3.0,
        optimizer__clip_norm=1e9,
    )
    for model in (config.model, config.model.replace(tie_word_embeddings=True)):
        params = {path: np.ones(p.shape, np.float32) for path, p in parameter_table(model).items()}
        optimizer = make_optimizer(config.optimizer, model)
        run = jax.jit(lambda p, o=optimizer: o.update(p, o.init(p), p)[0])
        updates = {path: float(np.unique(update).item()) for path, update in jax.device_get(run(params)).items()}
        assert updates.pop("tok_embeddings") == pytest.approx(-0.25)
        assert ("lm_head" in updates) == (not model.tie_word_embeddings)
        assert updates.pop("lm_head", -3.0) == pytest.approx(-3.0)
        for path, update in updates.items():
            assert update == pytest.approx(-1.0 if path.endswith("norm") else -1.5, rel=1e-5), path


def test_schedule_has_known_corner_values():
    rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=10, decay_fraction=0.2), 100)
    assert [round(float(rate(step)), 6) for step in (0, 1, 8, 9, 10, 79, 80, 81, 99, 100)] == [
        0.1,
        0.2,
        0.9,
        1.0,
        1.0,
        1.0,
        1.0,
        0.95,
        0.05,
        0.0,
    ]
    values = [float(rate(step)) for step in range(101)]
    assert max(values) == 1.0 and min(values[:100]) > 0


@pytest.mark.parametrize(
    ("warmup", "fraction", "steps", "expected"),
    [
        (0, 0.0, 4, [1, 1, 1, 1]),
        (1, 0.0, 3, [1, 1, 1]),
        (0, 1.0, 4, [1, 0.75, 0.5, 0.25]),
        (2, 0.5, 4, [0.5, 1, 1, 0.5]),
        (2, 0.01, 4, [0.5, 1, 1, 1]),
        (0, 1.0, 1, [1]),
        (3, 0.0, 3, [1 / 3, 2 / 3, 1]),
        (0, 0.5, 5, [1, 1, 1, 2 / 3, 1 / 3]),  # half of five steps is three
    ],
)
def test_schedules_of_odd_lengths_match_by_hand(warmup, fraction, steps, expected):
    rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=warmup, decay_fraction=fraction), steps)
    np.testing.assert_allclose([float(rate(step)) for step in range(steps)], expected, rtol=1e-6)


def test_cosine_and_constant_schedules_match_numpy():
    cosine = learning_rate(
        OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=10, final_fraction=0.1), 110
    )
    steps = np.arange(10, 111)
    expected = 2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (steps - 10) / 100)))
    np.testing.assert_allclose([float(cosine(step)) for step in steps], expected, rtol=1e-5)
    assert float(cosine(4)) == pytest.approx(1.0)
    constant = learning_rate(OptimizerConfig(learning_rate=2.0, schedule="constant", warmup_steps=4), 20)
    assert [float(constant(step)) for step in (0, 1, 3, 4, 19)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_rate_decays_to_the_final_fraction():
    rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=0, decay_fraction=0.5, final_fraction=0.2), 10)
    np.testing.assert_allclose([float(rate(step)) for step in (4, 5, 6, 9)], [1, 1, 0.84, 0.36], rtol=1e-6)


def test_decay_by_one_minus_the_root_matches_numpy():
    """Equation of Haegele et al. (arXiv 2405.18392, 1-sqrt), scaled to end at the final fraction."""
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=5, decay_fraction=0.4, decay="1-sqrt", final_fraction=0.1)
    rate = jax.jit(learning_rate(config, 50))
    over = (np.arange(30, 51) - 30) / 20
    np.testing.assert_allclose([float(rate(s)) for s in range(30, 51)], 0.2 + 1.8 * (1 - np.sqrt(over)), rtol=1e-6)
    assert [float(rate(step)) for step in (4, 5, 29)] == [2.0, 2.0, 2.0]


def orthogonal(g):
    """Five Newton-Schulz steps of Jordan's quintic (github.com/KellerJordan/modded-nanogpt), in float64."""
    x = g / np.linalg.norm(g)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def test_muon_orthogonalises_each_lane_separately():
    """Two steps with momentum: each lane's matrices equal numpy's, and weights that are not matrices of a layer follow
    Adam.
    """
    config = changed(tiny(), model__hidden_size=48, model__qkv_bias=True, model__num_hidden_layers=1)
    o = OptimizerConfig(kind="muon", weight_decay=0.1, clip_norm=1e9, momentum=0.9)
    optimizer, adam = (make_optimizer(dataclasses.replace(o, kind=kind), config.model) for kind in ("muon", "adamw"))
    table, random = parameter_table(config.model), np.random.default_rng(0)
    params = {path: 0.02 * random.standard_normal(p.shape, np.float32) for path, p in table.items()}
    state, other = jax.jit(optimizer.init)(params), jax.jit(adam.init)(params)
    update_muon, update_adam, mean = jax.jit(optimizer.update), jax.jit(adam.update), dict.fromkeys(params, 0.0)
    for n in (1, 2):
        random = np.random.default_rng(n)
        grads = {path: random.standard_normal(p.shape, np.float32) for path, p in params.items()}
        updates, state = update_muon(grads, state, params)
        expected, other = update_adam(grads, other, params)
        for path, update in jax.device_get(updates).items():
            if not (path.startswith("layers.") and len(table[path].shape) == 3):
                np.testing.assert_allclose(update, expected[path], rtol=1e-6, err_msg=path)
                continue
            g = np.asarray(grads[path], np.float64)
            mean[path] = 0.9 * mean[path] + 0.1 * g
            nesterov = (0.9 * mean[path] / (1 - 0.9 ** (n + 1))) + 0.1 * g / (1 - 0.9**n)
            for lane in range(8):
                size = 0.2 * np.sqrt(max(g.shape[1:]))
                wanted = -size * orthogonal(nesterov[lane]) - 0.1 * np.asarray(params[path][lane], np.float64)
                np.testing.assert_allclose(update[lane], wanted, atol=3e-3 * size, err_msg=path)


def test_gradient_is_clipped_first():
    config = tiny()
    optimizer = make_optimizer(dataclasses.replace(config.optimizer, clip_norm=1.0), config.model)
    params = {path: np.ones(p.shape, np.float32) for path, p in parameter_table(config.model).items()}
    grads = {path: np.full(p.shape, 100, np.float32) for path, p in params.items()}
    _, state = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)
    norm = np.sqrt(sum((np.float64(m) ** 2).sum() for m in state[1].mu.values()))
    assert norm == pytest.approx(0.1, rel=1e-5)  # (1 - beta1) of a gradient of norm 1
