"""Attention and its gradients against float64 NumPy with all scores in memory: tilings, meshes, memory, kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer import make_mesh
from laneformer.blocks import tiled_attention as attention
from laneformer.blocks.tiled_attention import attend
from laneformer.mesh import DATA, LANE
from tests.support.attention_reference import assert_close, expected, random_inputs, with_gradients


@settings(max_examples=8)
@given(st.data())
def test_values_and_gradients_equal_float64(data):
    """For any lengths (below, at and between multiples of a block), windows and groups, and any order of segments."""
    s = data.draw(st.integers(1, 70), "s")
    b, group = data.draw(st.integers(1, 2), "b"), data.draw(st.sampled_from((1, 2, 3)), "group")
    inputs = random_inputs(
        b=b, s=s, group=group, n=data.draw(st.integers(1, 2), "n"), k=data.draw(st.sampled_from((2, 8)), "k"), seed=s
    )
    which = {"window": data.draw(st.none() | st.integers(1, s + 3), "window")}
    if data.draw(st.booleans(), "scored otherwise?"):
        which |= {"scale": 0.7, "softcap": 0.9}
    segments = st.lists(st.integers(0, 2), min_size=b * s, max_size=b * s)
    if data.draw(st.booleans(), "segments?"):
        which["segments"] = np.array(data.draw(segments), np.int32).reshape(b, s)
    assert_close(with_gradients(*inputs, **which), expected(*inputs, **which))


def test_reference_gradient_equals_differences():
    """Checks the equations of `expected` along a random direction of q, k and v."""
    inputs, which = [np.asarray(x, np.float64) for x in random_inputs(s=9, group=2)], {"window": 5}
    along, step = [np.random.default_rng(1).standard_normal(x.shape) for x in inputs[:3]], 1e-5

    def loss(factor):
        moved = [x + factor * d for x, d in zip(inputs, along, strict=False)]
        return (expected(*moved, inputs[3], **which)[0] * inputs[3]).sum()

    gradient = sum((g * d).sum() for g, d in zip(expected(*inputs, **which)[1:], along, strict=True))
    assert (loss(step) - loss(-step)) / (2 * step) == pytest.approx(gradient, rel=1e-8)


@pytest.mark.parametrize(
    ("sizes", "window"), [((1, 1), 7), ((5, 5), None), ((16, 7), 30), ((7, 16), 1), ((64, 64), 44)]
)
def test_every_tiling_gives_the_same_result(monkeypatch, sizes, window):
    inputs = random_inputs(s=45, group=2)
    segments = np.repeat([[0, 1, 2], [3, 3, 5]], (15, 27, 3), axis=1).astype(np.int32)
    monkeypatch.setattr(attention, "_block_sizes", lambda s, t: sizes)
    fresh = jax.jit(with_gradients.__wrapped__, static_argnames="window")  # traced with these sizes
    found = fresh(*inputs, window=window, segments=segments)
    assert_close(found, expected(*inputs, window=window, segments=segments))


def test_default_sizes_give_several_tiles():
    """The sizes in this file's tests span several blocks. A few queries on a cache are one tile."""
    assert attention._block_sizes(256, 256) == (64, 64)
    assert attention._block_sizes(70, 5000) == (32, 128)
    assert attention._block_sizes(8, 5000) == (8, 5000)


def test_window_of_one_key_returns_its_value():
    inputs = random_inputs(s=40)
    o, dq, dk, dv = with_gradients(*inputs, window=1)
    assert_close((o, dq, dk, dv), (inputs[2], 0 * inputs[0], 0 * inputs[1], inputs[3]), 1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e4], ids=str)
def test_extreme_scores_stay_finite(size):
    """Scores of 1e8 give one key all the weight, tiny scores give a mean. Neither overflows."""
    q, k, v, do = random_inputs(s=40)
    inputs = (q * size, k * size, v, do)
    o, *gradients = with_gradients(*inputs)
    assert_close((o,), expected(*inputs)[:1], 1e-4 if size > 1 else 3e-6)
    assert all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_rounds_only_inputs_probabilities_and_results():
    inputs = random_inputs(s=45, group=2, dtype="bfloat16")
    found = with_gradients(*inputs, window=20)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    for x, y, bound in zip(found, expected(*inputs, window=20), (0.0022, 0.0032, 0.0032, 0.0032), strict=True):
        # With bfloat16 scores the error of o is at least 0.0027.
        assert np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2) / np.mean(y**2)) < bound


def test_segments_equal_separate_sequences():
    """Whole blocks belong to other segments than the query's."""
    q, k, v, do = map(np.asarray, random_inputs(b=1, s=96))
    segments = np.repeat([[7, 2]], 48, axis=1).astype(np.int32)
    together = with_gradients(q, k, v, do, segments=segments)
    apart = [with_gradients(*(x[:, :, part] for x in (q, k, v, do))) for part in (slice(48), slice(48, None))]
    assert_close(together, [np.concatenate(pair, axis=2) for pair in zip(*apart, strict=True)])


def test_tiles_that_no_query_sees_are_not_computed():
    """nan values propagate even with probability 0: a block of nan marks every query whose tile was computed."""
    q, k, v, _ = map(np.asarray, random_inputs(s=96))
    block = attention._block_sizes(96, 96)[0]
    assert block == 32

    def outputs(hidden: slice, window: int | None) -> np.ndarray:
        marked = v.copy()
        marked[:, :, hidden] = np.nan
        return np.asarray(jax.jit(attend, static_argnames="window")(q, k, marked, window=window))

    later = outputs(slice(64, None), None)
    assert np.isfinite(later[:, :, :64]).all()
    assert np.isnan(later[:, :, 64:]).all()
    assert np.isfinite(outputs(slice(32), 33)[:, :, 64:]).all()  # position 64 attends to 32..64
    assert np.isnan(outputs(slice(32), 34)[:, :, 64]).all()


@pytest.mark.parametrize(
    ("s", "start", "window"), [(1, 0, None), (1, 50, 9), (5, 20, 60), (16, 0, None), (30, 21, None), (40, 11, 9)]
)
def test_queries_that_continue_a_cache_equal_float64(s, start, window):
    """Entries of the cache after the last query are not read."""
    q, k, v, do = map(np.array, random_inputs(s=s, t=51, group=2))
    k[:, :, start + s :] = v[:, :, start + s :] = 1e4
    o = jax.jit(partial(attend, window=window))(q, k, v, start=jnp.int32(start))
    assert_close((o,), expected(q, k, v, do, window=window, start=start)[:1])


def test_mesh_needs_no_exchange():
    """Lanes are split manually, the batch by the compiler. Values and gradients are exact, sharded like the inputs, and
    nothing is exchanged.
    """
    inputs, window = random_inputs(l=4, b=4, s=70, group=2), 40
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (4, 70))).astype(np.int32)
    mesh = make_mesh(4, data=2, lane=4)
    here = NamedSharding(mesh, P(LANE, DATA))

    def local(q, k, v, do, segments):
        o, pull = jax.vjp(jax.checkpoint(lambda q, k, v: attend(q, k, v, window=window, segments=segments)), q, k, v)
        return o, *pull(do)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(*[P(LANE)] * 4, P()), out_specs=(P(LANE),) * 4, axis_names={LANE}
    )
    args = (*jax.device_put(inputs, here), jax.device_put(segments, NamedSharding(mesh, P(DATA))))
    program = jax.jit(mapped).lower(*args).compile()
    found = program(*args)
    assert all(x.sharding.is_equivalent_to(here, x.ndim) for x in found)
    text = program.as_text()
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if name in text]
    assert_close(found, expected(*inputs, window=window, segments=segments))


def test_vmap_equals_separate_calls():
    many = [np.stack(pair) for pair in zip(random_inputs(seed=1), random_inputs(seed=2), strict=True)]
    found = [np.asarray(x) for x in jax.vmap(partial(with_gradients, window=7))(*many)]
    for n in range(2):
        assert_close([x[n] for x in found], expected(*(x[n] for x in many), window=7))


@pytest.mark.parametrize(("window", "segmented"), [(None, True), (100, False)])
def test_memory_is_linear(window, segmented):
    """Twice the positions take about twice the memory, including gradients, and less than one matrix of scores."""

    def temporary(s: int) -> int:
        x = jax.ShapeDtypeStruct((1, 1, s, 2, 32), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, s), jnp.int32) if segmented else None
        return (
            with_gradients.lower(x, x, x, x, window=window, segments=segments)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    short, long = temporary(4096), temporary(8192)
    assert long < 2.2 * short
    assert long < 2 * 4 * 8192**2 / 10


def test_forward_pass_is_recomputed_only_if_nothing_is_kept():
    """A policy that saves the name "product" saves all residuals, so that the forward loops do not run again."""

    def loops(policy) -> int:
        def loss(q, k, v):
            return jax.checkpoint(attend, policy=policy)(q, k, v).sum()

        x = jax.ShapeDtypeStruct((1, 1, 64, 1, 8), jnp.float32)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, x, x).compile().as_text().count(" while(")

    policies = jax.checkpoint_policies
    assert loops(policies.save_only_these_names("product")) == loops(policies.everything_saveable) == 4
    assert loops(policies.nothing_saveable) == 6


def test_cudnn_is_used_only_where_it_applies(monkeypatch):
    """cuDNN's kernel applies to 16-bit inputs of its head sizes, without segments or a cache; tiles do the rest."""
    calls = []
    gpu = partial(jax.sharding.AbstractDevice, num_cores=None, platform="gpu")

    def kernel(q, k, v, **options):
        calls.append(options)
        return q

    monkeypatch.setattr(attention, "_device", lambda: gpu("NVIDIA H200"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    q, k, v, _ = random_inputs(dtype="bfloat16")
    attend(q, k, v, window=5)
    assert calls == [{"is_causal": True, "local_window_size": (4, 0), "implementation": "cudnn"}]
    for others, options in (
        ((q, k, v), {"segments": jnp.zeros((2, 24), jnp.int32)}),
        ((q, k, v), {"start": jnp.int32(0)}),
        ([x.astype(jnp.float32) for x in (q, k, v)], {}),
        ([x[..., :7] for x in (q, k, v)], {}),
    ):
        assert jax.eval_shape(partial(attend, **options), *others).shape == others[0].shape
    for lanes, data in ((1, 1), (2, 1), (2, 2)):
        mesh, before = make_mesh(2, lane=lanes, data=data), len(calls)
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=jax.P("lane"), out_specs=jax.P("lane"), axis_names={"lane"})
        assert jax.eval_shape(mapped, q, k, v).shape == q.shape
        assert len(calls) == before + 1
    monkeypatch.setattr(attention, "_device", lambda: gpu("AMD Instinct MI300X"))
    assert jax.eval_shape(attend, q, k, v).shape == q.shape
    assert len(calls) == before + 1
