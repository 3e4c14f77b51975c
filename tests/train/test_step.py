"""Training steps: equal to numpy, and equal on every mesh and for every number of accumulated parts."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Laneformer, make_mesh
from laneformer.train.config import LaterPhase, OptimizerConfig
from laneformer.train.program.program import read_program
from laneformer.train.step import LIBRARY, Trainer, known_options
from laneformer.weights import parameter_table
from tests.support.tiny_recipe import changed, tiny


@cache
def trainer(data=1, lane=8, **changes):
    """The trainer, cached with its compiled programs for the same arguments."""
    config = changed(tiny(), **changes)
    return Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))


@cache
def initial_state(muon):
    """The state of `trainer()` before the first step, in host memory, with the optimizer Muon or AdamW."""
    return jax.device_get(trainer(1, 1, optimizer__kind="muon" if muon else "adamw").init())


def initial(t):
    """The initial state on the trainer's mesh. It depends only on model and seed, so `init` is not compiled again."""
    state = initial_state(t.phase.optimizer.kind == "muon")
    return jax.tree.map(jax.device_put, state, t.state_shardings)


def batch_of(step: int, rows: int = 8) -> np.ndarray:
    random = np.random.default_rng(step)
    return ((np.arange(17) * random.integers(1, 5, (rows, 1)) + random.integers(63, size=(rows, 1))) % 63 + 1).astype(
        np.int32
    )


def put(trainer, ids, **more):
    rows = {"ids": ids, **more}
    return trainer.put_batch(lambda span: {key: values[span] for key, values in rows.items()}, rows)


ONES = np.ones((8, 16), np.float32)  # weights of all targets of a batch


def step(trainer, state, batch):
    return trainer.step(state, batch, trainer.put_asked(False))


def run(trainer, steps=5, **more):
    """Losses and gradient norms [steps, 2], and the state after the steps."""
    state, losses = initial(trainer), []
    for n in range(steps):
        state, values = step(trainer, state, put(trainer, batch_of(n), **more))
        losses.append([float(values["loss"]), float(values["grad_norm"])])
    return np.array(losses), state


@pytest.fixture(scope="module")
def reference():
    return run(trainer())


def close(a, b):
    """Losses, norms and weights are equal up to rounding. Adam enlarges the rounding of weights: it divides small
    gradients by small roots.
    """
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
    for path, weight in a[1].params.items():
        np.testing.assert_allclose(weight, b[1].params[path], rtol=0, atol=1e-4, err_msg=path)


def test_loss_equals_cross_entropy_of_the_logits():
    t, one, batch = trainer(), trainer(lane=1), batch_of(0)
    params = initial(one).params
    logits = np.asarray(Laneformer(t.config.model, params, t.precision)(batch[:, :-1]), np.float64)
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    expected = (log_sum - np.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]).mean()
    sums = one.evaluate(params, put(one, batch, weights=ONES, segments=np.zeros((8, 17), np.int32)))
    assert float(sums["nll"]) / 128 == pytest.approx(expected, rel=1e-6) and float(sums["weight"]) == 128
    assert float(sums["lse_squared"]) / 128 == pytest.approx((log_sum**2).mean(), rel=1e-6)
    _, values = step(t, initial(t), put(t, batch))
    assert float(values["loss"]) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(np.log(64), abs=0.2), "initial weights predict a uniform distribution"


@pytest.mark.slow
def test_mlp_without_a_gate_learns():
    t = trainer(1, 1, model__hidden_act="relu2", model__gated_mlp=False)
    state, losses = t.init(), []
    for _ in range(12):
        state, values = step(t, state, put(t, batch_of(0)))
        losses.append(float(values["loss"]))
    assert losses[0] == pytest.approx(np.log(64), abs=0.2) and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("data", "lane"),
    [
        (2, 4),
        pytest.param(4, 2, marks=pytest.mark.exhaustive),
        pytest.param(8, 1, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.exhaustive),  # tests with `single` compare this mesh with NumPy
    ],
)
def test_losses_with_unit_weights_agree_on_every_mesh(reference, data, lane):
    close(run(trainer(data, lane), weights=ONES), reference)


@pytest.mark.exhaustive  # the test of unit weights and one segment has a batch in four parts
@pytest.mark.parametrize(("data", "parts"), [(1, 4), (2, 4)])
def test_accumulation_leaves_losses_unchanged(reference, data, parts):
    close(run(trainer(data, 8 // data, accumulate=parts)), reference)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_remat_leaves_losses_unchanged(reference, remat):
    close(run(trainer(remat=remat)), reference)


@pytest.mark.slow
def test_loss_chunk_leaves_losses_unchanged(reference):
    close(run(trainer(loss_chunk=24)), reference)  # 3 of 16 positions at a time


@pytest.mark.slow
def test_unit_weights_and_one_segment_leave_losses_unchanged(reference):
    close(run(trainer(2, 4, accumulate=4), weights=ONES, segments=np.zeros((8, 17), np.int32)), reference)


@pytest.mark.slow
def test_tokens_of_weight_zero_are_ignored():
    """A step on rows with masked last halves equals a step on the first halves, even if parts differ in tokens."""
    t, cut, batch = trainer(accumulate=2), trainer(data__sequence_length=8), batch_of(3)
    weights = np.where(np.arange(16) < 8, 1, 0).astype(np.float32) * np.ones((8, 1), np.float32)
    state, values = step(t, initial(t), put(t, batch, weights=weights))
    expected, other = step(cut, initial(cut), put(cut, batch[:, :9]))
    assert float(values["loss"]) == pytest.approx(float(other["loss"]), rel=1e-6)
    close(([[0]], state), ([[0]], expected))
    weights[::2] = 0  # whole rows
    alone = trainer(data__sequence_length=8, data__batch_size=4)
    _, values = step(t, initial(t), put(t, batch, weights=weights))
    _, other = step(alone, initial(alone), put(alone, batch[1::2, :9]))
    np.testing.assert_allclose([values["loss"], values["grad_norm"]], [other["loss"], other["grad_norm"]], rtol=1e-5)


def test_segments_separate_documents_of_a_row():
    """The loss of a row with two documents is the sum of their losses in separate rows, filled up with weight 0."""
    t, batch, at = trainer(lane=1), batch_of(5), np.arange(17)
    params = initial(t).params

    def nll(ids, counted, segments) -> float:
        """Sum over the counted targets [16] of the rows, whose documents are numbered by segments [17]."""
        rows = {"weights": ONES * counted, "segments": np.tile(segments.astype(np.int32), (8, 1))}
        return float(t.evaluate(params, put(t, ids, **rows))["nll"])

    counted = at[:-1] != 7  # target 7 is the first token of the second document
    apart = nll(batch, at[:-1] < 7, 0 * at) + nll(np.roll(batch, -8, 1), at[:-1] < 8, 0 * at)
    assert nll(batch, counted, at >= 8) == pytest.approx(apart, rel=1e-5)
    assert nll(batch, counted, 0 * at) != pytest.approx(apart, rel=1e-5)


Z_LOSS, CLIP_NORM = 0.5, 1.2


@pytest.fixture(scope="module")
def single():
    """A trainer on one device with z-loss and clipping, and a function from weights and ids to the mean objective and
    its gradient, computed by the model.
    """
    optimizer = {"optimizer__clip_norm": CLIP_NORM, "optimizer__eps": 1e-3, "optimizer__warmup_steps": 2}
    t = trainer(lane=1, z_loss=Z_LOSS, **optimizer)

    @jax.jit
    @jax.value_and_grad
    def objective(params, ids):
        logits = Laneformer(t.phase.model, params, t.precision)(ids[:, :-1])
        lse = jax.nn.logsumexp(logits, -1)
        return (lse - jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0] + Z_LOSS * lse**2).mean()

    return t, objective


def test_z_loss_enters_the_gradient_and_has_its_own_metric(single):
    t, objective = single
    state, batch = initial(t), batch_of(0)
    total, grads = objective(state.params, batch)
    norm = np.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in grads.values()))
    _, values = step(t, state, put(t, batch))
    assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(values["loss"] + values["z_loss"]) == pytest.approx(float(total), rel=1e-6)
    assert float(values["z_loss"]) > 1, "the z-loss is at least its weight x (ln 64)^2"


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_step_that_is_not_finite_is_skipped(broken):
    t = trainer(2, 4)
    state, _ = step(t, initial(t), put(t, batch_of(0), weights=ONES))
    before = jax.device_get(state)
    weights = ONES.copy()
    weights[2, 3] = broken
    state, values = step(t, state, put(t, batch_of(1), weights=weights))
    assert bool(values["skipped"]) and int(state.step) == 2
    for kept, now in zip(
        jax.tree.leaves((before.params, before.optimizer)),
        jax.tree.leaves((state.params, state.optimizer)),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, now)
    _, values = step(t, state, put(t, batch_of(2), weights=ONES))
    assert not bool(values["skipped"]) and np.isfinite(float(values["loss"]))


def test_batch_without_targets_has_zero_gradient():
    t = trainer(2, 4)
    _, values = step(t, initial(t), put(t, batch_of(0), weights=0 * ONES))
    assert float(values["loss"]) == 0 and float(values["grad_norm"]) == 0 and not bool(values["skipped"])


@pytest.mark.slow
def test_later_phase_keeps_moments_of_the_same_optimizer_and_warms_up():
    data = tiny().data
    config = changed(
        tiny(),
        then={
            "same": LaterPhase(steps=3, data=data, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2)),
            "other": LaterPhase(
                steps=10, data=data, optimizer=OptimizerConfig(kind="muon", learning_rate=2e-3, warmup_steps=4)
            ),
        },
    )
    first, same, other = (Trainer(config, phase, make_mesh(8)) for phase in config.phases)
    state, _ = step(first, initial(first), put(first, batch_of(0)))
    mu = np.asarray(state.optimizer[1].mu["lm_head"])
    assert mu.any()
    kept = same.adopt(state, first.phase)
    np.testing.assert_array_equal(kept.optimizer[1].mu["lm_head"], mu)
    fresh = other.adopt(kept, same.phase)
    assert jax.tree.structure(fresh) == jax.tree.structure(other.abstract_state())
    moments = [x for x in jax.tree.leaves(fresh.optimizer) if x.shape in {p.shape for p in fresh.params.values()}]
    assert len(moments) > len(fresh.params) and not any(np.asarray(x).any() for x in moments)
    second = dataclasses.replace(fresh, step=jax.device_put(np.int32(60 + 3 + 1), other.state_shardings.step))
    state, values = step(other, second, put(other, batch_of(1)))
    assert int(state.step) == 65 and np.isfinite(float(values["loss"]))
    assert float(values["learning_rate"]) == pytest.approx(2e-3 * 2 / 4), "the second of four steps of warmup"


@pytest.mark.parametrize(
    ("data", "lane"), [pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(1, 8, marks=pytest.mark.exhaustive)]
)
def test_muon_agrees_on_every_mesh(data, lane):
    close(run(trainer(data, lane, optimizer__kind="muon")), run(trainer(1, 1, optimizer__kind="muon")))


def test_stop_requested_by_any_process_reaches_all():
    t = trainer(2, 4)
    asked = np.zeros(8, np.int32)
    asked[5] = 1
    batch = put(t, batch_of(0), weights=ONES)
    state, values = t.step(initial(t), batch, jax.device_put(asked, t.asked_sharding))
    assert int(values["asked"]) == 1
    assert int(t.step(state, batch, t.put_asked(False))[1]["asked"]) == 0
    assert int(t.put_asked(True).sum()) == 8


@pytest.mark.slow
def test_bfloat16_products_leave_float32_masters(reference):
    losses, state = run(trainer(compute_dtype="bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}
    assert not (losses == reference[0]).any()
    np.testing.assert_allclose(losses[:, 0], reference[0][:, 0], rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "dtypes"),
    [
        pytest.param((1, 8), {"exchange_dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
        ((1, 8), {"exchange_dtype": "bfloat16", "activation_dtype": "bfloat16"}),
        ((1, 1), {"activation_dtype": "bfloat16", "stream_dtype": "bfloat16"}),
    ],
)
def test_bfloat16_arrays_leave_losses_alike(reference, mesh, dtypes):
    losses, state = run(trainer(*mesh, **dtypes))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}
    assert not (losses == reference[0]).any()
    np.testing.assert_allclose(losses[:, 0], reference[0][:, 0], rtol=2e-2)


def test_state_is_sharded_as_in_the_weight_table():
    t = trainer(2, 4)
    state = t.init()
    wq, mu = "layers.0.attention.wq", state.optimizer[1].mu
    assert state.params[wq].sharding.shard_shape((8, 4, 32)) == (2, 4, 16)
    assert mu[wq].sharding == state.params[wq].sharding
    assert [x.sharding for x in jax.tree.leaves(t.abstract_state())] == [x.sharding for x in jax.tree.leaves(state)]
    assert state.step.sharding.is_fully_replicated
    after, _ = step(t, state, put(t, batch_of(0), weights=ONES))
    assert after.params[wq].sharding == t.state_shardings.params[wq]
    assert int(after.step) == 1


def test_host_reads_each_of_its_rows_once():
    t, read = trainer(2, 4), []

    def rows(part):
        read.append((part.start, part.stop))
        return {"ids": batch_of(0)[part], "weights": np.ones((4, 16), np.float32)}

    batch = t.put_batch(rows, ["ids", "weights"])
    assert sorted(read) == [(0, 4), (4, 8)]
    np.testing.assert_array_equal(batch["ids"], batch_of(0))


def test_adamw_and_clipping_match_numpy(single):
    """Three steps with different gradients equal algorithm 2 of Loshchilov & Hutter, computed in float64."""
    t, objective = single
    o, table = t.phase.optimizer, parameter_table(t.config.model)
    state = initial(t)
    w = {path: np.asarray(x, np.float64) for path, x in state.params.items()}
    m, v = ({path: np.zeros_like(x) for path, x in w.items()} for _ in "mv")
    norms = []
    for n, rate in enumerate((0.005, 0.01, 0.01), 1):
        g = {path: np.asarray(x, np.float64) for path, x in objective(state.params, batch_of(n))[1].items()}
        state, values = step(t, state, put(t, batch_of(n)))
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        norms.append(norm)
        assert float(values["grad_norm"]) == pytest.approx(norm, rel=1e-5), "before clipping"
        assert float(values["learning_rate"]) == pytest.approx(rate, rel=1e-6)
        for path in table:
            clipped = g[path] * min(1, CLIP_NORM / norm)
            m[path] = o.beta1 * m[path] + (1 - o.beta1) * clipped
            v[path] = o.beta2 * v[path] + (1 - o.beta2) * clipped**2
            direction = m[path] / (1 - o.beta1**n) / (np.sqrt(v[path] / (1 - o.beta2**n)) + o.eps)
            decay = o.weight_decay if table[path].initial in ("normal", "output", "embedding") else 0
            w[path] = w[path] - rate * (direction + decay * w[path])
            np.testing.assert_allclose(state.params[path], w[path], rtol=1e-5, atol=1e-6, err_msg=path)
            np.testing.assert_allclose(state.optimizer[1].mu[path], m[path], rtol=1e-3, atol=1e-8, err_msg=path)
    assert min(norms) < CLIP_NORM < max(norms), "one step was clipped and one was not"


def test_initial_weights_are_the_same_on_every_mesh():
    first, other = initial(trainer()).params, trainer(2, 4).init().params
    for path, weight in first.items():
        np.testing.assert_array_equal(weight, other[path], err_msg=path)


@pytest.mark.slow
def test_fsdp_gathers_weights_and_not_activations():
    """If the batch grows, only rows of the embedding and their gradients add to the bytes sent along the data axis."""

    def sent(rows: int) -> int:
        t = trainer(2, 4, data__batch_size=rows, model__num_hidden_layers=1)
        lowered = t.lower_step()
        return read_program(lowered, lowered.compile(), t.mesh).sent("data")

    tokens_more, width = (64 - 8) * 16, 32
    assert 0 < sent(64) - sent(8) < 3 * tokens_more * width * 4


def test_unknown_compiler_options_are_left_out():
    assert known_options({"xla_cpu_no_such_option": "x"}) == known_options({LIBRARY: "no such value"}) == {}
    options = {"xla_cpu_enable_fast_math": False}
    assert known_options(options) == options
