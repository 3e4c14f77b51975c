"""One optimizer step against numpy, and the same on every mesh, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_recipe import changed, tiny

from laneformer import Laneformer, make_mesh
from laneformer.parameters import parameter_table
from train.config import OptimizerConfig
from train.step import Trainer, make_optimizer, schedule

MESHES = [(1, 8), (2, 4), (4, 2), (1, 1)]


def trainer(data=1, lane=8, **changes):
    return Trainer(changed(tiny(), **changes), make_mesh(8, data=data, lane=lane))


def batch_of(step: int, rows: int = 8) -> np.ndarray:
    random = np.random.default_rng(step)
    return ((np.arange(17) * random.integers(1, 5, (rows, 1)) + random.integers(63, size=(rows, 1))) % 63 + 1).astype(np.int32)


def run(trainer, steps=5):
    """The losses and gradient norms of the first steps, and the state after them."""
    state, losses = trainer.init(), []
    for step in range(steps):
        state, values = trainer.step(state, trainer.put_batch(batch_of(step).__getitem__))
        losses.append([float(values["loss"]), float(values["grad_norm"])])
    return np.array(losses), state


@pytest.fixture(scope="module")
def reference():
    return run(trainer())


def close(a, b):
    """Equal losses and norms to rounding, and weights to rounding as Adam passes it on (it divides small gradients by small roots)."""
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
    for path, weight in a[1].params.items():
        np.testing.assert_allclose(weight, b[1].params[path], rtol=0, atol=1e-4, err_msg=path)


def test_the_loss_is_the_cross_entropy_of_the_models_logits():
    t = trainer()
    state, batch = t.init(), batch_of(0)
    logits = np.asarray(Laneformer(t.config.model, state.params, t.precision)(batch[:, :-1]), np.float64)
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    expected = (log_sum - np.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]).mean()
    assert float(t.evaluate(state.params, t.put_batch(batch.__getitem__))) == pytest.approx(expected, rel=1e-6)
    _, values = t.step(state, t.put_batch(batch.__getitem__))
    assert float(values["loss"]) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(np.log(64), abs=0.2), "fresh weights know nothing"


@pytest.mark.parametrize(("data", "lane"), MESHES[1:])
def test_every_mesh_gives_the_same_losses(reference, data, lane):
    close(run(trainer(data, lane)), reference)


@pytest.mark.parametrize(("data", "parts"), [(1, 4), (2, 4)])
def test_accumulating_over_parts_changes_nothing(reference, data, parts):
    close(run(trainer(data, 8 // data, accumulate=parts)), reference)


def test_recomputing_activations_changes_nothing(reference):
    close(run(trainer(remat=True)), reference)


def test_bfloat16_products_leave_float32_masters(reference):
    losses, state = run(trainer(compute_dtype="bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}
    assert not (losses == reference[0]).any()
    np.testing.assert_allclose(losses[:, 0], reference[0][:, 0], rtol=2e-2)


def test_the_state_lies_where_the_table_says():
    t = trainer(2, 4)
    state = t.init()
    wq, mu = "layers.0.attention.wq", state.optimizer[1][0].mu
    assert state.params[wq].sharding.shard_shape((8, 4, 32)) == (2, 4, 16)
    assert mu[wq].sharding == state.params[wq].sharding
    assert [x.sharding for x in jax.tree.leaves(t.abstract_state())] == [x.sharding for x in jax.tree.leaves(state)]
    assert state.step.sharding.is_fully_replicated
    after, _ = t.step(state, t.put_batch(batch_of(0).__getitem__))
    assert after.params[wq].sharding == t.state_shardings.params[wq]
    assert int(after.step) == 1


def test_a_host_reads_each_of_its_rows_once():
    t, read = trainer(2, 4), []

    def rows(part):
        read.append((part.start, part.stop))
        return batch_of(0)[part]

    batch = t.put_batch(rows)
    assert sorted(read) == [(0, 4), (4, 8)]
    np.testing.assert_array_equal(batch, batch_of(0))


def test_adamw_and_clipping_against_numpy(clip_norm=0.8):
    """Loshchilov & Hutter, algorithm 2, written out in float64, over three steps with different gradients."""
    t = trainer(lane=1, optimizer__clip_norm=clip_norm, optimizer__eps=1e-3, optimizer__warmup_steps=2)
    o, table = t.config.optimizer, parameter_table(t.config.model)
    state = t.init()
    w = {path: np.asarray(x, np.float64) for path, x in state.params.items()}
    m, v = ({path: np.zeros_like(x) for path, x in w.items()} for _ in "mv")
    gradient, norms = jax.jit(jax.grad(t._loss)), []
    for n, rate in enumerate((0.005, 0.01, 0.01), 1):
        batch = t.put_batch(batch_of(n).__getitem__)
        g = {path: np.asarray(x, np.float64) for path, x in gradient(state.params, batch).items()}
        state, values = t.step(state, batch)
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        norms.append(norm)
        assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5), "before clipping"
        assert float(values["learning_rate"]) == pytest.approx(rate, rel=1e-6)
        for path in table:
            clipped = g[path] * min(1, clip_norm / norm)
            m[path] = o.beta1 * m[path] + (1 - o.beta1) * clipped
            v[path] = o.beta2 * v[path] + (1 - o.beta2) * clipped**2
            direction = m[path] / (1 - o.beta1**n) / (np.sqrt(v[path] / (1 - o.beta2**n)) + o.eps)
            decay = o.weight_decay if table[path].initial in ("normal", "output", "embedding") else 0
            w[path] = w[path] - rate * (direction + decay * w[path])
            np.testing.assert_allclose(state.params[path], w[path], rtol=1e-5, atol=1e-6, err_msg=path)
            np.testing.assert_allclose(state.optimizer[1][0].mu[path], m[path], rtol=1e-3, atol=1e-8, err_msg=path)
    assert min(norms) < clip_norm < max(norms), "one step was clipped and one was not"


def test_only_matrices_and_embeddings_decay():
    config = changed(
        tiny(), optimizer__weight_decay=0.5, optimizer__warmup_steps=0, model__qkv_bias=True, model__qk_norm=True,
        model__replicated_rmsn_scale=False,
    )  # fmt: skip
    params = {path: jnp.ones(p.shape) for path, p in parameter_table(config.model).items()}
    optimizer = make_optimizer(config)
    updates = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p)[0])(params)
    decayed = {path.split(".")[-1] for path, update in updates.items() if (update == -0.01 * 0.5).all()}
    kept = {path.split(".")[-1] for path, update in updates.items() if (update == 0).all()}
    assert decayed == {"tok_embeddings", "lm_head", "wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert kept == {"attention_norm", "ffn_norm", "norm", "wq_bias", "wk_bias", "wv_bias", "q_norm", "k_norm"}


def test_the_schedule_at_its_corners():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10, decay_fraction=0.2), 100)
    assert [round(float(rate(step)), 6) for step in (0, 1, 8, 9, 10, 79, 80, 81, 99, 100)] == [
        0.1, 0.2, 0.9, 1.0, 1.0, 1.0, 1.0, 0.95, 0.05, 0.0
    ]  # fmt: skip
    values = [float(rate(step)) for step in range(101)]
    assert max(values) == 1.0 and min(values[:100]) > 0


@pytest.mark.parametrize(
    ("warmup", "fraction", "steps", "expected"),
    [
        (0, 0.0, 4, [1, 1, 1, 1]),
        (1, 0.0, 3, [1, 1, 1]),
        (0, 1.0, 4, [1, 0.75, 0.5, 0.25]),
        (100, 0.5, 4, [0.5, 1, 1, 0.5]),  # a warm-up longer than the run ends where the decay begins
        (2, 0.01, 4, [0.5, 1, 1, 1]),
        (100, 1.0, 1, [1]),
        (3, 0.0, 3, [1 / 3, 2 / 3, 1]),
    ],
)
def test_schedules_of_odd_lengths(warmup, fraction, steps, expected):
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=warmup, decay_fraction=fraction), steps)
    np.testing.assert_allclose([float(rate(step)) for step in range(steps)], expected, rtol=1e-6)


def test_first_weights_depend_on_the_seed_and_not_on_the_mesh(reference):
    first = trainer().init().params
    other = trainer(2, 4).init().params
    for path, weight in first.items():
        np.testing.assert_array_equal(weight, other[path], err_msg=path)
    assert not np.array_equal(first["lm_head"], trainer(seed=1).init().params["lm_head"])
