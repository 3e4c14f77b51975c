"""Gated DeltaNet in chunks, with state, documents and lanes, against the recurrence in float64."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import ConfigError, Laneformer, Precision, make_mesh
from laneformer.blocks.block import Memory
from laneformer.blocks.delta_net import CHUNK, DRAWS, DeltaNet, recur, unit, unit_inverse
from laneformer.config import DeltaNetOptions, DeltaNetSizes
from laneformer.mesh import sharding
from laneformer.weights import parameter_table
from tests.support import tiny

SIZES = DeltaNetSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_kernel=4)
OPTIONS = DeltaNetOptions(hidden_size=12, num_lanes=2, sizes=SIZES, norm_eps=1e-6)


def block(options: DeltaNetOptions = OPTIONS) -> DeltaNet:
    rng = np.random.default_rng(0)
    table = DeltaNet.table(options, "at")
    weights = {path.removeprefix("at."): rng.normal(size=weight.shape) for path, weight in table.items()}
    return DeltaNet({name: jax.device_put(np.float32(w)) for name, w in weights.items()}, options, Precision())


def reference(own: DeltaNet, h_sd: np.ndarray, lane: int, state=None) -> tuple[np.ndarray, tuple]:
    """One lane's output for one sequence, float64 [s, d], computed token by token, and the state after it. state: the
    convolution's inputs, and S.
    """
    sizes, sigmoid = own.options.sizes, lambda x: 1 / (1 + np.exp(-x))
    ratio = sizes.value_heads // sizes.key_heads
    table = DeltaNet.table(own.options, "")
    weights = {path[1:]: np.float64(getattr(own, path[1:])[...]) for path in table}
    win, wba, conv, decay, step, wo = (weights[n][lane] for n in ("win", "wba", "convolution", "decay", "step", "wo"))
    inputs, s = state or (np.zeros((sizes.conv_kernel - 1, len(conv))), np.zeros((sizes.value_heads, sizes.key_dim, 6)))
    inputs, s, out = inputs.copy(), s.copy(), []
    for h in np.float64(h_sd):
        each = (win @ h).reshape(sizes.key_heads, -1)
        q, k, v, z = np.split(each, [sizes.key_dim, 2 * sizes.key_dim, 2 * sizes.key_dim + ratio * 6], 1)
        b, a = np.split((wba @ h).reshape(sizes.key_heads, -1), 2, 1)
        inputs = np.concatenate([inputs, np.concatenate([q.ravel(), k.ravel(), v.ravel()])[None]])
        mixed = (conv * inputs.T).sum(1)
        inputs = inputs[1:]
        mixed = mixed * sigmoid(mixed)
        q, k, v = np.split(mixed, [sizes.key_heads * sizes.key_dim, 2 * sizes.key_heads * sizes.key_dim])
        v, heads = v.reshape(-1, 6), []
        for j in range(sizes.value_heads):
            qj, kj = (x.reshape(sizes.key_heads, -1)[j // ratio] for x in (q, k))
            qj, kj = qj / np.sqrt(qj @ qj + 1e-6) / np.sqrt(sizes.key_dim), kj / np.sqrt(kj @ kj + 1e-6)
            s[j] *= np.exp(-np.exp(decay[j]) * np.log1p(np.exp(a.ravel()[j] + step[j])))
            s[j] += np.outer(kj, sigmoid(b.ravel()[j]) * (v[j] - kj @ s[j]))
            o = qj @ s[j]
            gate = z.reshape(-1, 6)[j]
            heads.append(o / np.sqrt(np.mean(o * o) + 1e-6) * weights["norm"] * gate * sigmoid(gate))
        out.append(wo @ np.concatenate(heads))
    return np.array(out), (inputs, s)


compiled = jax.jit(lambda own, *arguments: own(*arguments))


def run(own, h, memory=None, segments=None):
    """The output, and the state after it, as NumPy arrays."""
    return jax.tree.map(np.asarray, compiled(own, h, None, memory, segments))


def fresh(options: DeltaNetOptions = OPTIONS, batch: int = 1) -> dict[str, np.ndarray]:
    return {k.name: np.zeros((k.num_lanes, batch, 1, *k.shape), k.dtype or "float32") for k in DeltaNet.state(options)}


H = np.float32(np.random.default_rng(1).normal(size=(2, 1, 2 * CHUNK + 7, 12)))


def assert_close(found, expected):
    """The difference must be at most some roundings of the largest expected value in float32."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 7])
def test_lengths_equal_the_float64_recurrence(length):
    own = block()
    expected, (inputs, state) = reference(own, H[1, 0, :length], 1)
    assert_close(run(own, H[:, :, :length])[0][1, 0], expected)
    found, kept = run(own, H[:, :, :length], Memory(fresh(), np.int32(0)))
    assert_close(found[1, 0], expected)
    assert_close(kept["inputs"][1, 0, 0], inputs)
    assert_close(kept["state"][1, 0, 0].reshape(state.shape), state)


PADDED = {1: 1, 6: 9, CHUNK + 6: CHUNK + 9}  # tokens of a piece -> with padding


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(PADDED)), min_size=2, max_size=6).filter(lambda x: sum(x) <= H.shape[2]))
def test_pieces_with_padding_equal_the_whole(pieces):
    own, kept, start, found = block(), fresh(), 0, []
    for piece in pieces:
        h = np.full((2, 1, PADDED[piece], 12), 3, np.float32)
        h[:, :, :piece] = H[:, :, start : start + piece]
        o, kept = run(own, h, Memory(kept, np.int32(start), np.int32(piece)))
        found.append(o[:, :, :piece])
        start += piece
    assert_close(np.concatenate(found, 2), run(own, H)[0][:, :, :start])


def test_documents_equal_separate_sequences():
    own, cuts = block(), [0, 5, CHUNK - 2, CHUNK + 1, 2 * CHUNK, H.shape[2]]
    segments = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))[None].astype(np.int32)
    alone = [reference(own, H[1, 0, a:b], 1)[0] for a, b in pairwise(cuts)]
    assert_close(run(own, H, None, segments)[0][1, 0], np.concatenate(alone))


def test_equal_keys_without_decay_stay_exact():
    """The worst case of the triangular system: every token replaces what the previous one wrote."""
    length = 2 * CHUNK
    k = np.full((1, 1, length, 1, 8), 8**-0.5, np.float32)
    v = np.asarray(np.random.default_rng(2).normal(size=(1, 1, length, 1, 1, 6)), np.float32)
    found, _ = jax.jit(recur)(k, k, v, *(np.full((1, 1, length, 1, 1), x, np.float32) for x in (0, 1)))
    np.testing.assert_allclose(found, v, atol=1e-5)


def test_unit_inverse_is_the_inverse():
    lower = np.tril(np.random.default_rng(3).normal(size=(3, 16, 16)), -1)
    expected = np.linalg.inv(np.eye(16) + lower)
    np.testing.assert_allclose(
        jax.jit(unit_inverse)(np.float32(lower)), expected, rtol=1e-3, atol=1e-3 * abs(expected).max()
    )


def test_gradients_of_chunks_equal_those_of_the_recurrence():
    """Pieces of one token against chunks, with padding and documents."""
    length, segments = CHUNK + 5, np.repeat([0, 1, 2], [20, CHUNK - 21, 6])[None]
    inputs = _random_inputs(length)

    def chunks(*inputs):
        return jnp.sum(jnp.sin(recur(*inputs, segments_bs=jnp.asarray(segments))[0]))

    def tokens(q, k, v, g, beta):
        g = jnp.where(np.diff(segments[0], prepend=0)[None, None, :, None, None] > 0, -1e9, g)

        def step(state, of):
            state, total = state
            o, state = recur(*(x[:, :, None] for x in of), state)
            return (state, total + jnp.sum(jnp.sin(o))), None

        each = [jnp.moveaxis(x, 2, 0) for x in (q, k, v, g, beta)]
        return jax.lax.scan(step, (jnp.zeros((1, 1, 2, 2, 4, 3)), 0.0), each)[0][1]

    for a, b in zip(*(jax.jit(jax.grad(f, range(5)))(*inputs) for f in (chunks, tokens)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def _random_inputs(length: int):
    rng = np.random.default_rng(4)
    q, k = (np.asarray(unit(np.float32(rng.normal(size=(1, 1, length, 2, 4))))) for _ in "qk")
    v = np.float32(rng.normal(size=(1, 1, length, 2, 2, 3)))
    g, beta = (np.float32(rng.uniform(low, high, size=v.shape[:-1])) for low, high in ((-0.5, 0), (0, 1)))
    return q, k, v, g, beta


def test_fresh_weights_forget_slowly():
    step, decay = (np.float64(DRAWS[name](jax.random.key(0), (500,))) for name in ("step", "decay"))
    steps = np.log1p(np.exp(step))
    assert 0.001 <= steps.min() < 0.002 and 0.05 < steps.max() < 0.11 and decay.min() >= 0 and decay.max() < np.log(16)


DELTA = {"delta_net": SIZES, "delta_layers": (0,)}


@pytest.mark.parametrize(("changes", "message"), [
    ({"delta_layers": (0,)}, "delta_layers = .*requires delta_net"),
    (DELTA | {"delta_layers": tuple(range(4))}, "leave at least one"),
    (DELTA | {"delta_layers": (4,)}, "delta_layers = 4 must be .* at most 3"),
    (DELTA | {"num_lanes": 4}, r"num_lanes = 4 does not divide delta_net.key_heads = 2; .* that do: 1, 2"),
    (DELTA | {"delta_net": {"key_heads": 2}}, "delta_net = .*give key_heads, value_heads"),
    (DELTA | {"delta_net": 3}, "delta_net = 3 must be an object"),
    ({"rotary_dim": 3}, "rotary_dim = 3 must be even"),
    ({"rotary_dim": 6}, "rotary_dim = 6 .*at most 4"),
])  # fmt: skip
def test_wrong_sizes_are_refused_in_one_line(changes, message):
    usual = {"num_hidden_layers": 4, "num_lanes": 2}
    with pytest.raises(ConfigError, match=message) as error:
        tiny.config(**usual | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [{"value_heads": 3}, {"conv_kernel": 1}, {"key_dim": 0}], ids=str)
def test_wrong_heads_are_refused(changes):
    with pytest.raises(ConfigError, match=rf"delta_net.{next(iter(changes))} = "):
        DeltaNetSizes(**{"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6} | changes)


@pytest.mark.slow
def test_pieces_on_a_mesh_with_a_delayed_layout_equal_the_whole():
    config = tiny.config(**DELTA, num_lanes=2, num_hidden_layers=2, layout="dtp(1)", broadcast_delay=0)
    model = Laneformer.init(config, 3)
    ids, table = tiny.token_ids(40), parameter_table(config)
    mesh = make_mesh(2, lane=2)
    weights = {
        path: jax.device_put(w, sharding(table[path].spec, w.shape, mesh)) for path, w in model.weights().items()
    }
    spread, found = Laneformer(config, weights, mesh=mesh), []
    cache = spread.make_cache(2, 12)
    for start in (0, 6):
        logits, cache = spread.extend(ids[:, start : start + 6], cache)
        found.append(logits)
    assert_close(np.concatenate(found, 1), np.asarray(model(ids)))
