"""Quantized matrices in a session: the logits of the dequantized weights, and matrices that are refused. Any number of
threads gives the same bits.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from laneformer.custom_calls import NativeError
from laneformer.custom_calls.cpu.tiles import in_blocks, make_tiles
from laneformer.formats import FORMATS
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import USUAL, round_to
from tests.support import small

pytestmark = small.needs_library

CONFIG = small.make_config(lanes=2, hidden_size=64, head_dim=8, ff=48, lm_head_type="lane")
WEIGHTS = small.make_weights(CONFIG)
IDS = small.prompt_of(CONFIG, 9)
REMEDY = "use backend xla, or add --weights bfloat16"


def with_zero_points(record: Quantized) -> Quantized:
    zeros = np.random.default_rng(1).integers(0, 16, record.scales.shape).astype(np.uint8)
    return dataclasses.replace(record, zero_points=zeros)


def with_scale(record: Quantized) -> Quantized:
    return dataclasses.replace(record, global_scale=np.array(1.7 * record.global_scale, np.float32))


def with_halves(record: Quantized) -> Quantized:
    """The record with random float16 scales for groups of 16 rows."""
    rows = -(-record.shape[-2] // 16)
    scales = np.random.default_rng(2).uniform(0.001, 0.01, (*record.shape[:-2], rows, 1)).astype(np.float16)
    return dataclasses.replace(record, scales=scales, group=(16, record.columns))


def integers(weight: np.ndarray, kind: str, group: int, order: bool = False) -> Quantized:
    """A record with random codes, scales and zero points. The order of columns depends only on their number."""
    rng, columns = np.random.default_rng(weight.view(np.uint32).flat[0]), weight.shape[-1]
    dtype, most = ("uint8", 16) if kind == "int4" else ("int8", 256)
    shapes = [(*weight.shape[:-1], n) for n in (columns, -(-columns // group))]
    codes, zeros = (rng.integers(0, most, shape).astype(np.uint8).view(dtype) for shape in shapes)
    scales = rng.uniform(2, 6, zeros.shape).astype(np.float32) / np.float32(most * columns**0.5)
    codes = FORMATS[kind].pack(codes)
    places = np.random.default_rng(columns).permutation(columns).astype(np.int32) if order else None
    return Quantized(kind, codes, scales, (1, group), columns, zeros, order=places)


def mixed(path: str, weight: np.ndarray) -> Quantized | np.ndarray:
    """Matrices in several formats within products that have several matrices."""
    name = path.rpartition(".")[2]
    return {
        "wq": lambda: integers(weight, "int4", 24, order=True),
        "w1": lambda: integers(weight, "int8", 32),
        "w2": lambda: round_to(weight, "mxfp4").regrouped(1, 16),
        "wo": lambda: integers(weight, "int8", 16, order=True),
        "lm_head": lambda: integers(weight, "int4", 24, order=True),
    }.get(name, lambda: weight)()


WAYS = {kind: lambda _, weight, kind=kind: round_to(weight, kind) for kind in USUAL} | {
    "int4 with zero points": lambda _, weight: with_zero_points(round_to(weight, "int4")),
    "nvfp4 with a scale of all": lambda _, weight: with_scale(round_to(weight, "nvfp4")),
    "fp8 with a scale of 16 rows": lambda _, weight: with_halves(round_to(weight, "fp8")),
    "int4 with an order, groups of 24": lambda _, weight: integers(weight, "int4", 24, order=True),
    "int8 with zero points, groups of 40": lambda _, weight: integers(weight, "int8", 40),
    "several formats in a product": mixed,
}


def packed(records: dict, **options):
    session = small.open_session(CONFIG, "float32", **options)
    for path, weight in (WEIGHTS | records).items():
        session.pack(path, weight)
    return session


def logits_of(session) -> np.ndarray:
    """Logits of four draws after the prompt."""
    run = small.jitted(session, room=4, top=0, logits=True)
    return np.asarray(run(small.make_inputs(IDS, 4), small.make_state(CONFIG, 64))[0].logits)


@pytest.mark.parametrize("way", WAYS)
def test_logits_match_the_dequantized_weights(way):
    paths = small.open_session(CONFIG, "float32", threads=1).plan.matrices
    assert {"lm_head", "tok_embeddings"} - paths == {"tok_embeddings"}
    made = {path: WAYS[way](path, WEIGHTS[path]) for path in paths}
    records = {path: record for path, record in made.items() if isinstance(record, Quantized)}
    plain = [WEIGHTS[path] for path in made.keys() - records.keys()]
    assert records and not any(record.problem() for record in records.values())
    session = packed(records, threads=2)
    found = logits_of(session)
    exact = {path: record.dequantize(np.float32) for path, record in records.items()}
    expected = small.reference_logits(CONFIG, WEIGHTS | exact, IDS)[-1]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    facts = session.quantized_weights
    assert facts["quantized_weights"] == sum(WEIGHTS[path].size for path in records)
    others = sum(weight.nbytes for weight in [*plain, WEIGHTS["tok_embeddings"]])
    assert session.packed_bytes == facts["quantized_bytes"] + others
    assert session.read_pass() > 0
    for other in ({"threads": 1, "instructions": "portable"}, {"threads": 3}, {"one_thread_per_lane": True}):
        again = logits_of(packed(records, **other))
        if "instructions" in other:  # norms and attention round in another order
            assert np.abs(again[0] - found[0]).max() < 1e-5 * np.abs(found[0]).max()
        else:
            assert again.tobytes() == found.tobytes()


def test_single_product_may_be_quantized():
    products = small.open_session(CONFIG, "float32", threads=1).plan.products
    path = next(op.matrices[0].weight.path for op in products if len(op.matrices) == 1)
    record = round_to(WEIGHTS[path], "int8")
    session = packed({path: record}, threads=1)
    found = logits_of(session)
    expected = small.reference_logits(CONFIG, WEIGHTS | {path: record.dequantize(np.float32)}, IDS)[-1]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    whole = packed({}, threads=1)
    saved = WEIGHTS[path].nbytes // WEIGHTS[path].shape[-2] * -(-WEIGHTS[path].shape[-2] // 16) * 16
    assert whole.packed_bytes - session.packed_bytes == saved - session.quantized_weights["quantized_bytes"]


def test_unsupported_records_are_refused():
    session = small.open_session(CONFIG, "float32", threads=1)
    path = next(path for path in sorted(session.plan.matrices) if session.plan.shape_of(path)[-1] == 64)
    with pytest.raises(NativeError, match=rf"weight {path} .* has groups of 4 .* 16 bits.*: {REMEDY}"):
        session.pack(path, integers(WEIGHTS[path], "int4", 4))
    query, key, value = next(paths for paths, _ in session._products if len(paths) == 3)
    for name, weight in ((query, WEIGHTS[query]), (key, WEIGHTS[key])):
        session.pack(name, weight)
    with pytest.raises(NativeError, match=rf"weight {value} differs from {key} .*\(24\).* 16: {REMEDY}"):
        session.pack(value, round_to(WEIGHTS[value], "int4"))
    session = small.open_session(CONFIG, "bfloat16", threads=1, bf12=True)
    session.pack(query, round_to(WEIGHTS[query], "int4"))
    session.pack(key, WEIGHTS[key])
    with pytest.raises(NativeError, match="quantized and other matrices: open the session without bf12"):
        session.pack(value, WEIGHTS[value])


def test_quantized_embedding_is_refused():
    session = small.open_session(CONFIG, "float32", threads=1)
    with pytest.raises(NativeError, match="not a matrix of a product: dequantize it"):
        session.pack("tok_embeddings", round_to(WEIGHTS["tok_embeddings"], "int8"))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("way", "columns"), [("int4", 64), ("int4", 48), ("int8", 40), ("int4 with an order, groups of 24", 64)]
)
def test_columns_in_blocks_have_the_same_weights(way, columns, joined):
    """With and without lanes joined side by side."""
    record = WAYS[way]("", np.random.default_rng(3).standard_normal((3, 5, columns)).astype(np.float32))
    found, entries = in_blocks(record, joined)
    assert found.problem() is None and found.order is None and (joined or found.shape[:2] == (3, 5))
    assert (entries is None) == (way in USUAL and (columns == 64 or not joined))
    expected = record.dequantize()
    expected = np.concatenate(list(expected), -1) if joined else expected
    entries = np.arange(expected.shape[-1]) if entries is None else entries
    assert sorted(entries[entries >= 0]) == list(range(expected.shape[-1]))
    assert (found.dequantize()[..., entries >= 0] == expected[..., entries[entries >= 0]]).all()


def test_tiles_have_the_layout_of_the_kernel():
    """cpu/kernels/quantized.h describes the layout."""
    record = round_to(np.random.default_rng(4).standard_normal((36, 544)).astype(np.float32), "int4")
    tiles = make_tiles([record], 1, False)
    assert tiles.format == (0, 3, 32, False, False, False)
    chunk, rest = 16 * 32 + 512 * 8, 64 + 32 * 8  # bytes of the first and the second chunk of a tile
    assert tiles.data.shape == (1, 3 * (chunk + rest))
    codes, scales = record.each(), record.scales
    for row, column in ((0, 0), (3, 5), (19, 511), (19, 515), (17, 543), (8, 540), (35, 1), (33, 530)):
        tile, here, place = row // 16, row % 16, column % 512
        pair, of_scales = 1 if tile == 2 else 2, 64 if column >= 512 else 16 * 32
        begin = (tile - tile % 2) * (chunk + rest) + (pair * chunk if column >= 512 else 0)
        stored = tiles.data[0, begin + tile % 2 * of_scales :][:of_scales].view(ml_dtypes.bfloat16)
        assert stored[place // 32 * 16 + here] == scales[row, column // 32]
        line = tiles.data[0, begin + pair * of_scales + (place // 8 * pair + tile % 2) * 64 :]
        assert line[4 * here + place % 4] >> (place % 8 // 4 * 4) & 15 == codes[row, column]
