"""The model's passes for training, against NumPy: loss of every head on meshes, separate documents, lane statistics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import laneformer.model
from laneformer import make_mesh
from laneformer.model import Laneformer
from laneformer.precision import Precision
from tests.support import reference, tiny

IDS = tiny.token_ids(40, (4, 12))
TARGETS = np.roll(IDS, -1, 1)
WEIGHTS = np.random.default_rng(2).uniform(0, 2, IDS.shape).astype(np.float32)
HEADS = {
    "replicate": {},
    "not divisible": {"vocab_size": 41},
    "tied": {"tie_word_embeddings": True},
    "aggregated before the norm": {"pre_norm_lane_agg": True},
    "lane": {"lm_head_type": "lane"},
    "lane, not divisible": {"lm_head_type": "lane", "vocab_size": 41},
    "vocab_parallel": {"lm_head_type": "vocab_parallel"},
}


@partial(jax.jit, static_argnames=("z_loss", "chunk"))
def loss_of(model: Laneformer, ids, targets, weights, **options):
    return model.loss(ids, targets, weights, **options)


def expected_loss(logits, z_loss):
    logits = np.asarray(logits, np.float64)
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    nll = lse - np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    return (WEIGHTS * (nll + z_loss * lse**2)).sum(), (WEIGHTS * nll).sum(), (WEIGHTS * lse**2).sum()


FAST, SLOW = ("replicate", "lane"), ("vocab_parallel", "tied")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(head, marks=() if head in FAST else pytest.mark.slow if head in SLOW else pytest.mark.exhaustive)
        for head in HEADS
    ],
)
def test_loss_of_every_head_equals_that_of_the_reference(head):
    values = tiny.values(num_hidden_layers=1, **HEADS[head])
    one = tiny.random_model(values)
    expected = expected_loss(reference.reference_logits(values, tiny.random_weights(values), IDS), 0.01)
    on_mesh = tiny.model_of(values, tiny.random_weights(values), make_mesh(4, data=2, lane=4))
    for model, chunk in ((one, None), (on_mesh, 5)):
        total, parts = loss_of(model, IDS, TARGETS, WEIGHTS, z_loss=0.01, chunk=chunk)
        np.testing.assert_allclose([total, parts["nll"], parts["lse_squared"]], expected, rtol=1e-5)
        assert float(parts["weight"]) == pytest.approx(float(WEIGHTS.sum()), rel=1e-6)


def test_narrow_exchange_rounds_what_devices_send():
    """In the forward and the backward pass, every device's share is rounded to bfloat16, and so is the sum of the
    shares. Values are multiples of 1/8, so that sums in float32 are exact in any order.
    """
    values = tiny.values(num_hidden_layers=2)
    mesh = make_mesh(4, lane=2)
    wide = tiny.model_of(values, tiny.random_weights(values), mesh)
    model = Laneformer(wide.config, wide.weights(), Precision(exchange="bfloat16"), mesh)
    x, g = (np.random.default_rng(seed).integers(-4000, 4000, (4, 2, 3, 5)).astype(np.float32) / 8 for seed in (0, 1))

    @jax.jit
    def sent(x, g):
        run = jax.shard_map(model._exchange, mesh=mesh, in_specs=P("lane"), out_specs=P("lane"), axis_names={"lane"})
        total, pull = jax.vjp(run, x)
        return total, *pull(g)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    total, pulled = sent(x, g[:2])
    shares = x.reshape(2, 2, 2, 3, 5).sum(1)
    np.testing.assert_array_equal(total, np.tile(rounded(rounded(shares).sum(0)), (2, 1, 1, 1)))
    np.testing.assert_array_equal(pulled, np.tile(rounded(rounded(g[:2]).sum(0)), (4, 1, 1, 1)))
    assert (np.asarray(total) != x.sum(0)).any()


def test_narrow_activations_are_kept_in_bfloat16():
    """The results of all products in the blocks are rounded, and nothing else. The streams stay float32."""
    values = tiny.values(num_hidden_layers=2)
    model = tiny.random_model(values, precision=Precision(activation="bfloat16"))
    text = str(jax.make_jaxpr(model)(IDS))
    assert text.count("reduce_precision") == 2 * (2 + 2), "q with k and v, o; gate with up, down"
    logits = model(IDS)
    assert logits.dtype == jnp.float32
    exact = reference.reference_logits(values, tiny.random_weights(values), IDS)
    assert 1e-3 < tiny.difference(logits, exact) < 0.2


@pytest.mark.parametrize("names", [("wq", "wk", "wv"), ("w1", "w3")])
def test_narrow_products_of_one_operand_are_joined(names):
    """The joint product has the rounded rows of each product. The gradient of h is the sum over the products, that of
    each weight belongs to its own product.
    """
    values = tiny.values(num_hidden_layers=1)
    random = np.random.default_rng(0)
    h = random.normal(size=(4, 2, 3, values["hidden_size"])).astype(np.float32)

    def block(activation, weights):
        model = Laneformer(wide.config, {**wide.weights(), **weights}, Precision(activation=activation), None)
        return model.layers[0].attention if names[0] == "wq" else model.layers[0].feed_forward

    wide = tiny.random_model(values)
    paths = {name: f"layers.0.{'attention' if names[0] == 'wq' else 'feed_forward'}.{name}" for name in names}
    weights = {path: wide.weights()[path] for path in paths.values()}

    def narrow(h, weights):
        return block("bfloat16", weights).products(names, h)

    assert str(jax.make_jaxpr(narrow)(h, weights)).count("dot_general") == 1
    wide_text = str(jax.make_jaxpr(lambda h: block("float32", weights).products(names, h))(h))
    assert wide_text.count("dot_general") == len(names)
    slopes = [random.integers(-8, 8, (*h.shape[:3], w.shape[1])).astype(np.float32) for w in weights.values()]

    @jax.jit
    def run(h, weights, slopes):  # the slopes are exact in bfloat16
        found, pull = jax.vjp(narrow, h, weights)
        return found, *pull(slopes)

    found, dh, dweights = run(h, weights, slopes)
    exact = [np.einsum("lbsd,lod->lbso", h.astype(np.float64), weights[path]) for path in paths.values()]
    for y, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(y, expected, rtol=2**-8, atol=1e-6)
        np.testing.assert_array_equal(y, np.asarray(y).astype(jnp.bfloat16).astype(np.float32))
    pairs = list(zip(slopes, paths.values(), strict=True))
    expected = sum(np.einsum("lbso,lod->lbsd", dy.astype(np.float64), weights[path]) for dy, path in pairs)
    np.testing.assert_allclose(dh, expected, rtol=1e-5, atol=1e-5)
    for dy, path in pairs:
        expected = np.einsum("lbso,lbsd->lod", dy.astype(np.float64), h)
        np.testing.assert_allclose(dweights[path], expected, rtol=1e-5, atol=1e-5)


def test_attention_stays_within_a_document():
    model = tiny.random_model(tiny.values(num_hidden_layers=2), lane_devices=2)
    two, one = (np.repeat([[0, n]], (5, 7), axis=1).astype(np.int32).repeat(4, 0) for n in (1, 0))
    together, whole = (np.asarray(model(IDS, segments_bs=segments)) for segments in (two, one))
    changed = IDS.copy()
    changed[:, :5] = (changed[:, :5] + 3) % 40
    assert tiny.difference(together[:, :5], whole[:, :5]) < 1e-6
    assert tiny.difference(together[:, 5:], np.asarray(model(changed, segments_bs=two))[:, 5:]) < 1e-6
    alone = model(IDS[:, 5:])  # rotary positions are relative
    assert tiny.difference(together[:, 5:], alone) < 1e-4
    assert tiny.difference(together[:, 5:], whole[:, 5:]) > 1e-2


STATISTICS = [
    ("laneformer", 2, {}),
    pytest.param("tp", 4, {}, marks=pytest.mark.exhaustive),
    pytest.param("desync(2)", None, {}, marks=pytest.mark.exhaustive),
    pytest.param("none", 4, {}, marks=pytest.mark.slow),
    ("tp", 2, {"norm_after": "sum"}),
]


@pytest.mark.parametrize(("layout", "lane_devices", "changes"), STATISTICS)
def test_lane_statistics_equal_float64(layout, lane_devices, changes, monkeypatch):
    """The expected figures are computed in float64 from the streams of a run on one device."""
    values = tiny.values(layout=layout, num_hidden_layers=2, **changes)
    run_schedule = laneformer.model.run_schedule

    @jax.jit
    def streams(model):
        seen = []

        def observed(schedule, x, module, sum_lanes, lanes, observe, *more):
            return run_schedule(schedule, x, module, sum_lanes, lanes, lambda *at: seen.append(at), *more)

        with monkeypatch.context() as patch:
            patch.setattr(laneformer.model, "run_schedule", observed)
            model._streams(IDS, None, None, "none")
        return seen

    seen = [[np.float64(x) for x in at] for at in streams(tiny.random_model(values))]
    found = jax.jit(Laneformer.lane_statistics)(tiny.random_model(values, lane_devices=lane_devices), IDS)
    assert len(seen) == 5
    for t, (before, own, after) in enumerate(seen):
        unit = before / np.linalg.norm(before, axis=-1, keepdims=True)
        cosines = np.einsum("lbsd,mbsd->lmbs", unit, unit).mean((2, 3))
        expected = cosines[~np.eye(4, dtype=bool)].mean()
        if layout == "tp":  # nothing but the lanes' own parts is added, also with a norm of their sum
            np.testing.assert_allclose(own.sum(0), (after - before)[0], atol=1e-5)
        assert float(found["similarity"][t]) == pytest.approx(expected, abs=1e-5)
        assert float(found["own"][t]) == pytest.approx(np.sqrt((own**2).mean()), abs=1e-5)
        assert float(found["landed"][t]) == pytest.approx(np.sqrt(((after - before - own) ** 2).mean()), abs=1e-5)
    if layout == "none":
        np.testing.assert_allclose(found["landed"], 0, atol=1e-5)
    if layout == "tp":
        np.testing.assert_allclose(found["similarity"], 1, atol=1e-5)


@pytest.mark.slow
def test_similarity_of_one_lane_is_nan():
    found = tiny.random_model(tiny.values(num_lanes=1, num_hidden_layers=1)).lane_statistics(IDS)
    assert np.isnan(found["similarity"]).all() and np.isfinite(found["own"]).all()
