"""Quantized weights on GPUs: the packed lines contain every code and scale, and the kernel's logits match the
dequantized weights.
"""

import dataclasses

import jax
import numpy as np
import pytest

from laneformer.custom_calls import NativeError
from laneformer.custom_calls.gpu import codes
from laneformer.custom_calls.gpu.codes import CodesChoice, format_of
from laneformer.custom_calls.gpu.formats import product_weights
from laneformer.custom_calls.gpu.tiling import H200, MI300X, tile
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.quantized import E2M1, E4M3, Quantized
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.gpu_cases import AMD, WAYS, jitted, packed, rounded, some, with_zero_points

pytestmark = [small.needs_library, emulated.needs_gpu]


def scale_values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values of scales, float64 [threads], from their bytes [threads, bytes of a scale]."""
    if dtype == "e8m0":
        return np.exp2(bits.astype(float) - 127)
    if dtype == "e4m3":
        return E4M3[bits].astype(float)
    return np.ascontiguousarray(bits).view(dtype).astype(float)


def unpacked(stream: np.ndarray, tiling) -> np.ndarray:
    """The weights of a warp without the rows' factors, float64 [takes, vectors, threads, 8], read as codes.h does from
    its lines, uint32 [lines, threads, 4].
    """
    format, (takes, vectors, threads, per) = tiling.format, tiling.dealt
    own, halves = format.own_scales(vectors, tiling.cluster), format.halves
    taken = iter(stream)
    found = np.zeros((takes, vectors, threads, per))
    beside = np.zeros((threads, 0), np.uint8)
    size = own * format.scale_bytes if format.scale else 0
    room = 16 * format.lines(vectors) - vectors * format.bits  # free bytes in a step's last line
    for take in range(takes):
        if size > max(room, beside.shape[1]):  # the next lines of scales, for as many steps as they have room for
            beside = np.concatenate([next(taken).view(np.uint8) for _ in range(-(-size // 16) + format.more)], -1)
        scales, beside = beside[:, :size], beside[:, size:]
        lines = np.stack([next(taken) for _ in range(format.lines(vectors))])
        if 0 < size <= room:
            scales = lines[-1].view(np.uint8)[:, 16 - -(-size // 4) * 4 :][:, :size]
        for vector in range(vectors):
            line, place = divmod(vector, 128 // (8 * format.bits))
            words = lines[line].view(np.uint8)[:, place * format.bits : (place + 1) * format.bits]
            if format.code == "int8":
                numbers = words.astype(float) - 128
            elif format.code == "e4m3":
                assert (words != 0x80).all()
                numbers = E4M3[words].astype(float)
            else:
                nibbles = np.stack([words & 15, words >> 4], -1).reshape(threads, 8)
                index, sign = format.places
                four = nibbles[:, list(index)] & 7 | nibbles[:, list(sign)] & 8
                numbers = E2M1[four].astype(float) if format.code == "e2m1" else four.astype(float)
            for half in range(halves):
                here = slice(half * per // halves, (half + 1) * per // halves)
                value, zero = 1.0, np.full(threads, 8)
                if format.scale:
                    holder, slot = np.divmod((vector * halves + half) // format.joined, own)
                    holder = np.arange(threads) // tiling.cluster * tiling.cluster + holder
                    bits = scales[holder].reshape(threads, own, -1)[:, slot]
                    if format.zeros:
                        zero = np.ascontiguousarray(bits[:, 2:]).view(np.uint16)[:, 0]
                        zero = (256 - zero & 0xFF if format.by_tensor else zero & 0x3FF).astype(int)
                        bits = np.ascontiguousarray(bits[:, :2])
                    value = scale_values(bits, format.scale)
                if format.code == "int4" and format.by_tensor and not format.zeros:
                    numbers[:, here] = (numbers[:, here] + 8) % 16  # stored in two's complement
                less = zero[:, None] if format.code == "int4" else 0
                found[take, vector, :, here] = (numbers[:, here] - less) * np.reshape(value, (-1, 1))
    assert next(taken, None) is None, "a line is left over"
    return found


@pytest.mark.parametrize(
    ("machine", "way"),
    [  # ways alternate between the machines; those of the other machine are exhaustive tests
        pytest.param(machine, way, id=f"{way}-{name}", marks=() if m == n % 2 else pytest.mark.exhaustive)
        for m, (name, machine) in enumerate({"H200": H200, "MI300X": MI300X}.items())
        for n, way in enumerate(WAYS)
    ],
)
def test_packed_lines_contain_every_weight(machine, way):
    for rows, columns, warps in ((33, 300, 2), (70, 1024, 8)):
        weights = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        record = rounded(weights, way)
        format = dataclasses.replace(format_of(["w"], {"w": record}), selector_bits=machine.selector_bits)
        for each in format.ways:
            tiling = tile(rows, columns, 2, dataclasses.replace(machine, warps=warps), each)
            check_packing(record, tiling)


def check_packing(record: Quantized, tiling) -> None:
    format, rows, warps = tiling.format, len(record.codes), tiling.warps
    lines, numbers, factors, dealt = (np.asarray(array) for array in packed(record, tiling))
    streams = lines.reshape(2, warps, tiling.lines, tiling.warp_size, 4)
    exact = record.dequantize()
    if format.factors:
        assert (dealt.reshape(2, -1)[:, : tiling.rows].reshape(-1)[:rows] == factors[:, 0]).all()
        exact = record.dequantize() / factors.astype(np.float64)
    padded = np.concatenate([[0], exact.reshape(-1)])
    for cta in range(2):
        for warp in range(warps):
            found, own = unpacked(streams[cta, warp], tiling), numbers[cta, warp]
            assert np.isfinite(found).all()
            np.testing.assert_allclose(found[own > 0], padded[own][own > 0], rtol=1e-6 * format.factors)


SIZES = {"hidden_size": 64, "head_dim": 8, "ff": 48, "num_hidden_layers": 2, "vocab_size": 72, "lm_head_type": "lane"}


def model_of(**changes):
    """A config, its weights, and records of all product weights, with another format for each product."""
    config = small.make_config(**SIZES | {"lanes": 2} | changes)
    weights = small.make_weights(config)
    groups = product_weights(plan_of(config))
    ways = [name for name in WAYS if name not in ("fp8 tensor", "int4 group 16", "int4 row", "int4 zeros group 16")]
    records = {
        path: rounded(weights[path], ways[number % len(ways)]) for number, paths in enumerate(groups) for path in paths
    }
    return config, weights, records


def plan_of(config):
    return make_plan(decoder_ops(config), config.schedule)


CONFIG, WEIGHTS, RECORDS = model_of()
IDS = small.prompt_of(CONFIG, 9)


def choice_of(records, config=None) -> CodesChoice:
    return CodesChoice.of(plan_of(config or CONFIG), records.items())


def opened(records, config=CONFIG, weights=WEIGHTS, by_tensor=True, **options):
    """A session with these records. by_tensor: use tensor cores for 4 bits even if the layout prefers vector code."""
    choice = choice_of(records, config)
    with pytest.MonkeyPatch.context() as patch:
        if by_tensor:
            patch.setattr(codes, "INSTRUCTIONS", dict.fromkeys(codes.INSTRUCTIONS, (1e6, 0.0)))
        return emulated.open_session(plan_of(config), weights | records, codes=choice, **options)


def answer(session, config=CONFIG, mesh=None):
    """The outputs of a call that draws four tokens."""
    call = jitted(session, mesh, room=4, top=2, logits=True)
    outputs, _ = call(small.make_inputs(IDS, 4, temperature=0.7), small.make_state(config, 64, mesh=mesh))
    assert session.failure is None
    return outputs


def check(outputs, config, weights, records) -> None:
    exact = {path: record.dequantize(np.float64) for path, record in records.items()}
    expected = small.interpreted_logits(config, weights | exact, [*IDS, *outputs.tokens[:3].tolist()])[-4:]
    tolerance = 1e-4 if emulated.REAL else 1e-5  # on a real GPU the tolerance of other weights
    assert np.abs(outputs.logits[:4] - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"by_tensor": False}, marks=pytest.mark.exhaustive),
        pytest.param({"machine": AMD}, marks=emulated.only_emulated),
        pytest.param({"launch": "graph"}, marks=pytest.mark.exhaustive),
        pytest.param({"launch": "graph", "machine": AMD}, marks=[emulated.only_emulated, pytest.mark.exhaustive]),
    ],
    ids=str,
)
def test_logits_match_the_dequantized_weights(options):
    session = opened(RECORDS, **options)
    check(answer(session), CONFIG, WEIGHTS, RECORDS)
    formats = [tiling.format for tiling in session.layout.tilings]
    if not options:
        assert all(format.by_tensor == (format.bits == 4) for format in formats)
    facts = session.quantized_weights
    assert facts["quantized_formats"] == sorted({record.name for record in RECORDS.values()})
    assert facts["quantized_weights"] == sum(WEIGHTS[path].size for path in RECORDS)
    padding = 4 * session.layout.line_words * session.layout.machine.warps * session.layout.ctas * CONFIG.num_lanes * 16
    assert 0 <= session.packed_bytes - facts["quantized_bytes"] + 4 * 1000 < padding + 4000


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": 3, "layout": "dtp(1)", "lm_head_type": "replicate"},
        {"layout": "ladder", "lm_head_type": "vocab_parallel"},
        {"lanes": 1, "layout": "tp", "qkv_bias": True},
    ],
    ids=str,
)
@pytest.mark.exhaustive
def test_other_models_match_the_dequantized_weights(changes):
    config, weights, records = model_of(**changes)
    check(answer(opened(records, config, weights), config), config, weights, records)


@pytest.mark.slow
@emulated.only_emulated
def test_two_devices_give_the_bits_of_one():
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    machine = dataclasses.replace(emulated.SMALL, ctas=4)
    assert small.same(
        *(answer(opened(RECORDS, **each), mesh=each.get("mesh")) for each in ({}, {"mesh": mesh, "machine": machine}))
    )


def test_every_code_matches_its_value():
    """Rows contain every code, and the largest sums. The kernels are those of other tests in this file."""
    records = dict(RECORDS)
    for path, record in RECORDS.items():
        changed = record.codes.copy()
        row = changed.reshape(-1, changed.shape[-1])
        every = np.arange(256).astype(np.uint8)
        if record.kind == "fp8":
            every = every[every & 0x7F != 0x7F]
        row[:8] = np.resize(every, row[:8].shape).view(changed.dtype)
        row[8] = 0x7F if record.kind == "int8" else 0x7E if record.kind == "fp8" else 0x77
        records[path] = dataclasses.replace(record, codes=changed)
        assert records[path].problem() is None
    check(answer(opened(records)), CONFIG, WEIGHTS, records)


def test_single_product_may_be_quantized():
    path = product_weights(plan_of(CONFIG))[1][0]
    choice = choice_of({path: RECORDS[path]})
    assert list(choice.formats) == [path] and choice.names == {path: RECORDS[path].name}


def refusals():
    path = "layers.0.feed_forward.w2"  # of 48 columns
    int4, int8 = (round_to(WEIGHTS[path], kind) for kind in ("int4", "int8"))
    order = np.arange(int4.columns, dtype=np.int32)[::-1].copy()
    groups = {"group": (1, 24), "scales": np.ones((*int4.shape[:-1], -(-int4.columns // 24)), np.float32)}
    zeros = np.zeros(int8.scales.shape, np.int8)
    wide = with_zero_points(int4)
    wide = dataclasses.replace(wide, scales=wide.scales.astype(np.float32))
    return {
        "has reordered columns": {path: dataclasses.replace(int4, order=order)},
        "has groups of 24 columns": {path: dataclasses.replace(int4, **groups)},
        "has zero points": {path: dataclasses.replace(int8, zero_points=zeros)},
        "has zero points beside scales of float32": {path: wide},
    }


@pytest.mark.parametrize("words", refusals())
def test_unsupported_records_are_refused(words):
    with pytest.raises(
        NativeError, match=rf"weight layers.0.feed_forward.w2 .* {words}, which the GPU kernel cannot hold:"
    ):
        choice_of(refusals()[words])


MIXED = [{"wq": "int8", "wk": "int4 zeros"}, {"wk": "fp8", "wv": "fp8 rows of 16"}]  # in layers 0 and 1


@emulated.only_emulated
@pytest.mark.parametrize(
    "options", some({"SMALL": {}, "AMD": {"machine": AMD}, "graph": {"launch": "graph"}}, {"SMALL"})
)
def test_matrices_of_one_product_may_have_several_formats(options):
    """Some matrices are not quantized. The model has biases, a norm, and different layers."""
    config, weights, _ = model_of(qkv_bias=True, hidden_size=40)
    ways = {f"layers.{n}.attention.{name}": way for n, of in enumerate(MIXED) for name, way in of.items()}
    records = {path: rounded(weights[path], way) for path, way in ways.items()}
    given = {"SMALL": {}, "AMD": {"machine": AMD}, "graph": {"launch": "graph"}}[options]
    session = opened(records, config, weights, **given)
    assert [len(stages) for stages in session.layout.stages] == [7, 6]
    assert session.quantized_weights["quantized_weights"] == sum(weights[path].size for path in records)
    check(answer(session, config), config, weights, records)


def test_gate_and_up_in_different_formats_are_refused():
    paths = [f"layers.0.feed_forward.{name}" for name in ("w1", "w3")]
    for first, second in (paths, paths[::-1]):
        for rest in ({}, {second: round_to(WEIGHTS[second], "int8")}):
            with pytest.raises(NativeError, match=r"in one product, .*: use backend xla"):
                choice_of({first: round_to(WEIGHTS[first], "int4")} | rest)
    with pytest.raises(NativeError, match="not a matrix of a product: dequantize it"):
        choice_of({"tok_embeddings": round_to(WEIGHTS["tok_embeddings"], "int8")})
