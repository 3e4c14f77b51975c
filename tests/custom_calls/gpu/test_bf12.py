"""Weights in 12 bits on GPUs: the packed lines contain every bit, and the kernel's results equal those of bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.custom_calls.gpu.formats import Bf12, Bf12Choice, product_weights
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.packing import gathered
from laneformer.custom_calls.gpu.tiling import H200, MI300X, tile
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.formats import BF12_END, bf12_table
from tests.support import emulated, small
from tests.support.gpu_cases import AMD, jitted

pytestmark = [small.needs_library, emulated.needs_gpu]

BF16 = jnp.bfloat16.dtype


def unpacked(lines, listed, table, vectors: int, selector_bits: int) -> np.ndarray:
    """The weights of a warp, uint16 [steps, vectors, threads, 8], read as formats.h does from its lines, uint32 [steps,
    lines, threads, 4], and its exceptions.
    """
    steps, _, threads, _ = lines.shape
    units = vectors // 4
    found = np.empty((steps, vectors, threads, 8), np.uint16)
    for k in range(8):
        if selector_bits == 4:  # nibbles in order; the signs of the first four weights are in every second nibble
            index, sign = 4 * k, 4 * (2 * k + 1 if k < 4 else 2 * (k - 4)) + 3
        else:  # the low nibbles of four bytes, then the high nibbles
            index = 8 * k if k < 4 else 8 * (k - 4) + 4
            sign = index + 3
        for vector in range(4 * units):
            codes, low = lines[:, vector // 4 * 3, :, vector % 4], lines[:, vector // 4 * 3 + 1 + vector % 4 // 2]
            high = table[codes >> index & 7] | (codes >> sign & 1) << 7
            low = low[:, :, vector % 2 * 2 + k // 4] >> 8 * (k % 4) & 0xFF
            found[:, vector, :, k] = high << 8 | low
        for vector in range(4 * units, vectors):
            words = lines[:, units * 3 + vector - 4 * units, :, k // 2]
            found[:, vector, :, k] = words >> 16 * (k % 2)
    for word in listed[listed != BF12_END].tolist():
        step, unit = divmod(word >> 19, units)
        slot = word >> 8 & 31
        place = step, 4 * unit + slot // 8, word >> 13 & 63, slot % 8
        found[place] = (word & 0xFF) << 8 | found[place] & 0xFF
    return found


def encoded(matrix: np.ndarray, table: np.ndarray, tiling):
    """The lines and the exceptions of each warp, as the session packs them."""

    @jax.jit
    def packed(matrix, table):
        steps = tiling.deal(tiling.format.encode(matrix, table))
        return tiling.format.pack(steps), tiling.format.listed(steps)

    lines, words = packed(matrix.view(BF16), table)
    most = int((np.asarray(words) != BF12_END).sum(-1).max())
    return np.asarray(lines), np.asarray(jax.jit(gathered, static_argnums=1)(words, most + 1))


PACKED = [
    (48, 384, "normal"), (33, 300, "random bits"), (512, 1, "normal"), (16, 1024, "in one unit"),
    (300, 37, "random bits"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "rows", "columns", "kind"),
    [
        pytest.param(machine, *case, id=f"{name}-{case}", marks=() if m == n % 2 else pytest.mark.slow)
        for m, (name, machine) in enumerate({"H200": H200, "MI300X": MI300X}.items())
        for n, case in enumerate(PACKED)
    ],
)
def test_packing_gives_every_bit_back(machine, rows, columns, kind):
    machine = dataclasses.replace(machine, warps=2)
    rng = np.random.default_rng(rows)
    matrix = np.asarray(0.02 * rng.standard_normal((rows, columns)), BF16).view(np.uint16)
    if kind == "random bits":
        matrix = rng.integers(0, 1 << 16, (rows, columns)).astype(np.uint16)
    tiling = tile(rows, columns, 2, machine, Bf12.of(machine.selector_bits))
    numbers = np.asarray(jax.jit(tiling.deal)(np.arange(1, rows * columns + 1).reshape(rows, columns)))
    wanted = None
    table = bf12_table(np.bincount((matrix >> 8 & 0x7F).reshape(-1), minlength=128))
    if kind == "in one unit":  # 33 in the last unit of a warp, one in the first of another
        spots = numbers[0, 1, -1, :4].reshape(-1)
        wanted = [*spots[spots > 0][:33], numbers[1, 0, 0, 2, 3, 4]]
        table = np.array([60, *range(7)], np.uint8)
        matrix = matrix & 0x80FF | 60 << 8
        matrix.reshape(-1)[np.array(wanted) - 1] = 0xFFC1
    lines, listed = encoded(matrix, table, tiling)
    assert lines.shape[2:4] == (tiling.dealt[0], tiling.lines // tiling.dealt[0])
    if wanted:
        assert (listed != BF12_END).sum(-1).tolist() == [[0, 33], [1, 0]]
    padded = np.concatenate([[0], matrix.reshape(-1)])
    for cta in range(2):
        for warp in range(2):
            own = numbers[cta, warp]
            found = unpacked(lines[cta, warp], listed[cta, warp], table, own.shape[1], machine.selector_bits)
            assert (found == padded[own])[own > 0].all()
            assert (found & 0x807F)[own == 0].max(initial=0) == 0, "padding is finite and positive"


def test_product_with_many_exceptions_stays_bfloat16():
    _, plan, weights = make_model(num_hidden_layers=1)
    path = "layers.0.attention.wq"
    weights[path] = np.resize(np.exp2(np.arange(-60, 60, dtype=np.float32)), weights[path].shape).astype(BF16)
    for given in (weights, {name: jnp.asarray(weight) for name, weight in weights.items()}):
        choice = Bf12Choice.of(plan, given.items())
        rest = {path for paths in product_weights(plan)[1:] for path in paths}
        assert set(choice.tables) == rest and choice.left == 3
        layout = Layout(plan, emulated.SMALL, 3, bf12=frozenset(choice.tables))
        assert [tiling.units > 0 for tiling in layout.tilings] == [False, False, True, True, True]
        assert Layout(plan, emulated.SMALL, 3, bf12={path}).tilings[0].units > 0


CONFIG = {"hidden_size": 80, "ff": 300, "head_dim": 16, "heads": 4, "kv_heads": 2, "vocab_size": 400}
WRONG = np.array([60, 61, 62, 1, 2, 3, 4, 5], np.uint8)  # a table that makes most weights exceptions


def make_model(**changes):
    config = small.make_config(**CONFIG | {"layout": "dtp(1)", "lanes": 3, "num_hidden_layers": 2} | changes)
    plan = make_plan(decoder_ops(config), config.schedule, weight_dtype="bfloat16", cache_dtype="bfloat16")
    return config, plan, small.make_weights(config, "bfloat16")


def answer(config, plan, weights, choice=None, mesh=None, **options):
    """The results of a call (outputs and state), and its session."""
    session = emulated.open_session(plan, weights, bf12=choice, mesh=mesh, **options)
    call = jitted(session, mesh, room=5, top=3, logits=True)
    ids, state = small.prompt_of(config, 6), small.make_state(config, 64, "bfloat16", mesh)
    results = call(small.make_inputs(ids, 5, temperature=0.8), state)
    assert session.failure is None
    return results, session


def same_in_both(config, plan, weights, **options) -> None:
    """Checks that 12 bits give the bits of bfloat16, with few exceptions and with many in each unit."""
    plain, session = answer(config, plan, weights, **options)
    paths = [path for paths in product_weights(plan) for path in paths]
    for choice in (Bf12Choice.of(plan, weights.items()), Bf12Choice(dict.fromkeys(paths, WRONG))):
        packed, other = answer(config, plan, weights, choice, **options)
        assert small.same(plain, packed)
        held = other.bf12_weights
        assert held.weights > 0 and other.packed_bytes < session.packed_bytes
        assert (held.exceptions > 0.05 * held.weights) == (choice.tables[paths[0]] is WRONG)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        pytest.param(
            {"lanes": 1, "layout": "tp"},
            {"launch": "graph", "machine": AMD},
            marks=[emulated.only_emulated, pytest.mark.slow],
        ),
        pytest.param({"lanes": 1, "layout": "tp"}, {"launch": "graph"}, marks=pytest.mark.exhaustive),
        pytest.param({}, {"machine": AMD}, marks=[emulated.only_emulated, pytest.mark.exhaustive]),
        pytest.param({"layout": "ladder", "lm_head_type": "lane"}, {}, marks=pytest.mark.exhaustive),
        pytest.param({"layout": "desync(2)", "tie_word_embeddings": True}, {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_results_have_the_bits_of_bfloat16(changes, options):
    same_in_both(*make_model(**changes), **options)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_results_on_two_devices_have_the_bits_of_bfloat16():
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    machine = dataclasses.replace(emulated.SMALL, ctas=4)
    same_in_both(*make_model(lanes=4), mesh=mesh, machine=machine)


def test_rows_of_any_bits_have_the_bits_of_bfloat16():
    """Rows of the head have random bits, NaN, infinities, zeros of both signs and subnormals. The kernels are those of
    other tests in this file.
    """
    config, plan, weights = make_model()
    head = weights["lm_head"].view(np.uint16).copy()
    rng = np.random.default_rng(1)
    head[:40] = rng.integers(0, 1 << 16, head[:40].shape)
    head[40:50] = rng.integers(0, 2, head[40:50].shape) << 15
    head[50:60] = rng.integers(1, 128, head[50:60].shape)
    head[60, 3], head[61, 5], head[62, 7] = 0x7F80, 0xFF80, 0xFFC1
    weights["lm_head"] = head.view(BF16)
    counts = np.bincount((head >> 8 & 0x7F).reshape(-1), minlength=128)
    tables = Bf12Choice.of(plan, weights.items()).tables | {"lm_head": bf12_table(counts)}
    (plain, _), _ = answer(config, plan, weights)
    (packed, _), session = answer(config, plan, weights, Bf12Choice(tables))
    assert session.layout.head.units > 0
    logits = [np.asarray(outputs.logits) for outputs in (plain, packed)]
    nan = np.isnan(logits[0])
    assert nan[:, 62].all() and not nan[:, 40:60].any() and (np.abs(logits[0][:, 50:60]) < 1e-36).all()
    assert (nan == np.isnan(logits[1])).all()
    assert (logits[0].view(np.uint32) == logits[1].view(np.uint32))[~nan].all()
    np.testing.assert_array_equal(plain.tokens, packed.tokens)
