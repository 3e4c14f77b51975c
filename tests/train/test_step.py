"""One optimizer step against numpy, and the same on every mesh, however the batch is cut."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Laneformer, make_mesh
from laneformer.weights import parameter_table
from tests.support.tiny_recipe import changed, tiny
from train.config import LaterPhase, OptimizerConfig
from train.program.program import read_program
from train.step import Trainer


@cache
def trainer(data=1, lane=8, **changes):
    """The same one for the same arguments: it keeps its compiled programs."""
    config = changed(tiny(), **changes)
    return Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))


def batch_of(step: int, rows: int = 8) -> np.ndarray:
    random = np.random.default_rng(step)
    return ((np.arange(17) * random.integers(1, 5, (rows, 1)) + random.integers(63, size=(rows, 1))) % 63 + 1).astype(
        np.int32
    )


def put(trainer, ids, **more):
    rows = {"ids": ids, **more}
    return trainer.put_batch(lambda span: {key: values[span] for key, values in rows.items()}, rows)


def step(trainer, state, batch):
    return trainer.step(state, batch, trainer.put_asked(False))


def run(trainer, steps=5, **more):
    """The losses and gradient norms of the first steps, and the state after them."""
    state, losses = trainer.init(), []
    for n in range(steps):
        state, values = step(trainer, state, put(trainer, batch_of(n), **more))
        losses.append([float(values["loss"]), float(values["grad_norm"])])
    return np.array(losses), state


@pytest.fixture(scope="module")
def reference():
    return run(trainer())


def close(a, b):
    """Equal losses and norms to rounding, and weights to rounding as Adam passes it on (it divides small gradients by
    small roots).
    """
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
    for path, weight in a[1].params.items():
        np.testing.assert_allclose(weight, b[1].params[path], rtol=0, atol=1e-4, err_msg=path)


def test_the_loss_is_the_cross_entropy_of_the_models_logits():
    t = trainer()
    state, batch = t.init(), batch_of(0)
    logits = np.asarray(Laneformer(t.config.model, state.params, t.precision)(batch[:, :-1]), np.float64)
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    expected = (log_sum - np.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]).mean()
    sums = t.evaluate(state.params, put(t, batch))
    assert float(sums["nll"]) / 128 == pytest.approx(expected, rel=1e-6) and float(sums["weight"]) == 128
    assert float(sums["lse_squared"]) / 128 == pytest.approx((log_sum**2).mean(), rel=1e-6)
    _, values = step(t, state, put(t, batch))
    assert float(values["loss"]) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(np.log(64), abs=0.2), "fresh weights know nothing"


@pytest.mark.parametrize(
    ("data", "lane"),
    [
        (2, 4),
        pytest.param(4, 2, marks=pytest.mark.exhaustive),
        *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((8, 1), (1, 1))),
    ],
)
def test_every_mesh_gives_the_same_losses(reference, data, lane):
    close(run(trainer(data, lane)), reference)


@pytest.mark.parametrize(
    ("data", "parts"), [pytest.param(1, 4, marks=pytest.mark.exhaustive), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_accumulating_over_parts_changes_nothing(reference, data, parts):
    close(run(trainer(data, 8 // data, accumulate=parts)), reference)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["block", "dots"])
def test_recomputing_activations_changes_nothing(reference, remat):
    close(run(trainer(remat=remat)), reference)


@pytest.mark.slow
def test_the_chunk_of_the_loss_changes_nothing(reference):
    close(run(trainer(loss_chunk=24)), reference)  # 3 of 16 positions at a time


def test_weights_of_one_and_one_segment_change_nothing(reference):
    ones, one = np.ones((8, 16), np.float32), np.zeros((8, 17), np.int32)
    close(run(trainer(2, 4, accumulate=2), weights=ones, segments=one), reference)


@pytest.mark.slow
def test_tokens_of_weight_zero_do_not_count():
    """The step on rows whose last half is masked is that on the first half alone, also where parts have unequally many
    tokens.
    """
    t, cut, batch = trainer(accumulate=2), trainer(data__sequence_length=8), batch_of(3)
    weights = np.where(np.arange(16) < 8, 1, 0).astype(np.float32) * np.ones((8, 1), np.float32)
    state, values = step(t, t.init(), put(t, batch, weights=weights))
    expected, other = step(cut, cut.init(), put(cut, batch[:, :9]))
    assert float(values["loss"]) == pytest.approx(float(other["loss"]), rel=1e-6)
    close(([[0]], state), ([[0]], expected))
    weights[::2] = 0  # whole rows
    alone = trainer(data__sequence_length=8, data__batch_size=4)
    _, values = step(t, t.init(), put(t, batch, weights=weights))
    _, other = step(alone, alone.init(), put(alone, batch[1::2, :9]))
    np.testing.assert_allclose([values["loss"], values["grad_norm"]], [other["loss"], other["grad_norm"]], rtol=1e-5)


def test_documents_of_a_row_do_not_see_each_other():
    """A row of two documents costs what they cost as rows of their own."""
    batch = batch_of(5)
    segments = (np.arange(17) >= 8).astype(np.int32) * np.ones((8, 1), np.int32)
    weights = np.where(np.arange(16) == 7, 0, 1).astype(np.float32) * np.ones(
        (8, 1), np.float32
    )  # the target that begins the second
    both, first, second = trainer(), trainer(data__sequence_length=7), trainer(data__sequence_length=8)
    params = both.init().params
    sums = both.evaluate(params, put(both, batch, weights=weights, segments=segments))
    apart = sum(
        float(t.evaluate(params, put(t, part))["nll"]) for t, part in ((first, batch[:, :8]), (second, batch[:, 8:]))
    )
    assert float(sums["nll"]) == pytest.approx(apart, rel=1e-5)
    assert float(both.evaluate(params, put(both, batch, weights=weights))["nll"]) != pytest.approx(apart, rel=1e-5)


def test_the_z_loss_is_in_the_gradient_and_apart_in_the_metrics(weight=0.5):
    t, plain = trainer(z_loss=weight), trainer()
    state, batch = plain.init(), batch_of(0)

    @jax.jit
    @jax.value_and_grad
    def objective(params):
        logits = Laneformer(plain.phase.model, params, plain.precision)(batch[:, :-1])
        lse = jax.nn.logsumexp(logits, -1)
        return (lse - jnp.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0] + weight * lse**2).mean()

    total, grads = objective(state.params)
    norm = np.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in grads.values()))
    _, values = step(t, t.init(), put(t, batch))
    assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(values["loss"] + values["z_loss"]) == pytest.approx(float(total), rel=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_count(broken):
    t = trainer(2, 4)
    state, _ = step(t, t.init(), put(t, batch_of(0)))
    before = jax.device_get(state)
    weights = np.ones((8, 16), np.float32)
    weights[2, 3] = broken
    state, values = step(t, state, put(t, batch_of(1), weights=weights))
    assert bool(values["skipped"]) and int(state.step) == 2
    for kept, now in zip(
        jax.tree.leaves((before.params, before.optimizer)),
        jax.tree.leaves((state.params, state.optimizer)),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, now)
    _, values = step(t, state, put(t, batch_of(2)))
    assert not bool(values["skipped"]) and np.isfinite(float(values["loss"]))


def test_a_batch_without_targets_has_no_gradient():
    t = trainer()
    _, values = step(t, t.init(), put(t, batch_of(0), weights=np.zeros((8, 16), np.float32)))
    assert float(values["loss"]) == 0 and float(values["grad_norm"]) == 0 and not bool(values["skipped"])


@pytest.mark.slow
def test_a_later_phase_keeps_the_moments_of_its_own_kind_of_optimizer():
    data = tiny().data
    config = changed(
        tiny(),
        then={
            "same": LaterPhase(steps=3, data=data, optimizer=OptimizerConfig(learning_rate=1e-3)),
            "other": LaterPhase(steps=3, data=data, optimizer=OptimizerConfig(kind="muon")),
        },
    )
    first, same, other = (Trainer(config, phase, make_mesh(8)) for phase in config.phases)
    state, _ = step(first, first.init(), put(first, batch_of(0)))
    mu = np.asarray(state.optimizer[1].mu["lm_head"])
    assert mu.any()
    kept = same.adopt(state, first.phase)
    np.testing.assert_array_equal(kept.optimizer[1].mu["lm_head"], mu)
    fresh = other.adopt(kept, same.phase)
    assert jax.tree.structure(fresh) == jax.tree.structure(other.abstract_state())
    moments = [x for x in jax.tree.leaves(fresh.optimizer) if x.shape in {p.shape for p in fresh.params.values()}]
    assert len(moments) > len(fresh.params) and not any(np.asarray(x).any() for x in moments)
    state, values = step(other, fresh, put(other, batch_of(1)))
    assert int(state.step) == 2 and np.isfinite(float(values["loss"]))


@pytest.mark.slow
def test_the_rate_of_a_phase_counts_from_its_beginning():
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup_steps=4)
    config = changed(tiny(), then={"next": LaterPhase(steps=10, data=tiny().data, optimizer=optimizer)})
    t = Trainer(config, config.phases[1], make_mesh(8))
    state = dataclasses.replace(t.init(), step=jax.device_put(np.int32(61), t.state_shardings.step))
    _, values = step(t, state, put(t, batch_of(0)))
    assert float(values["learning_rate"]) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("data", "lane"), [pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(1, 8, marks=pytest.mark.exhaustive)]
)
def test_muon_on_every_mesh(data, lane):
    close(run(trainer(data, lane, optimizer__kind="muon")), run(trainer(1, 1, optimizer__kind="muon")))


def test_lane_statistics_of_a_phase():
    t = trainer()
    lanes = t.lanes(t.init().params, put(t, batch_of(0)))
    assert {name: x.shape for name, x in lanes.items()} == dict.fromkeys(("similarity", "own", "landed"), (5,))


def test_any_process_can_ask_to_stop():
    t = trainer(2, 4)
    asked = np.zeros(8, np.int32)
    asked[5] = 1
    state, values = t.step(t.init(), put(t, batch_of(0)), jax.device_put(asked, t.asked_sharding))
    assert int(values["asked"]) == 1
    assert int(t.step(state, put(t, batch_of(0)), t.put_asked(False))[1]["asked"]) == 0
    assert int(t.put_asked(True).sum()) == 8


@pytest.mark.slow
def test_bfloat16_products_leave_float32_masters(reference):
    losses, state = run(trainer(compute_dtype="bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}
    assert not (losses == reference[0]).any()
    np.testing.assert_allclose(losses[:, 0], reference[0][:, 0], rtol=2e-2)


def test_the_state_lies_where_the_table_says():
    t = trainer(2, 4)
    state = t.init()
    wq, mu = "layers.0.attention.wq", state.optimizer[1].mu
    assert state.params[wq].sharding.shard_shape((8, 4, 32)) == (2, 4, 16)
    assert mu[wq].sharding == state.params[wq].sharding
    assert [x.sharding for x in jax.tree.leaves(t.abstract_state())] == [x.sharding for x in jax.tree.leaves(state)]
    assert state.step.sharding.is_fully_replicated
    after, _ = step(t, state, put(t, batch_of(0)))
    assert after.params[wq].sharding == t.state_shardings.params[wq]
    assert int(after.step) == 1


def test_a_host_reads_each_of_its_rows_once():
    t, read = trainer(2, 4), []

    def rows(part):
        read.append((part.start, part.stop))
        return {"ids": batch_of(0)[part], "weights": np.ones((4, 16), np.float32)}

    batch = t.put_batch(rows, ["ids", "weights"])
    assert sorted(read) == [(0, 4), (4, 8)]
    np.testing.assert_array_equal(batch["ids"], batch_of(0))


def test_adamw_and_clipping_against_numpy(clip_norm=0.8):
    """Loshchilov & Hutter, algorithm 2, written out in float64, over three steps with different gradients."""
    t = trainer(lane=1, optimizer__clip_norm=clip_norm, optimizer__eps=1e-3, optimizer__warmup_steps=2)
    o, table = t.phase.optimizer, parameter_table(t.config.model)
    state = t.init()
    w = {path: np.asarray(x, np.float64) for path, x in state.params.items()}
    m, v = ({path: np.zeros_like(x) for path, x in w.items()} for _ in "mv")
    gradient, norms = jax.jit(jax.grad(lambda params, batch: t._sums(params, batch)[0] / 128)), []
    for n, rate in enumerate((0.005, 0.01, 0.01), 1):
        batch = put(t, batch_of(n))
        g = {path: np.asarray(x, np.float64) for path, x in gradient(state.params, batch).items()}
        state, values = step(t, state, batch)
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
            np.testing.assert_allclose(state.optimizer[1].mu[path], m[path], rtol=1e-3, atol=1e-8, err_msg=path)
    assert min(norms) < clip_norm < max(norms), "one step was clipped and one was not"


def test_first_weights_depend_on_the_seed_and_not_on_the_mesh(reference):
    first = trainer().init().params
    other = trainer(2, 4).init().params
    for path, weight in first.items():
        np.testing.assert_array_equal(weight, other[path], err_msg=path)
    assert not np.array_equal(first["lm_head"], trainer(seed=1).init().params["lm_head"])


@pytest.mark.slow
def test_fsdp_gathers_weights_and_not_activations():
    """What is sent along the data axis grows with the batch by the embedding's rows alone, there and back."""

    def sent(rows: int) -> int:
        t = trainer(2, 4, data__batch_size=rows)
        lowered = t.lower_step()
        return read_program(lowered, lowered.compile(), t.mesh).sent("data")

    tokens_more, width = (64 - 8) * 16, 32
    assert 0 < sent(64) - sent(8) < 3 * tokens_more * width * 4
