"""Quantized matrices in a session: the logits of the dequantized weights, the same bits however they are computed, and
what cannot be held.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from custom_calls import NativeError
from custom_calls.cpu.tiles import beside, make_tiles
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import USUAL, round_to
from tests.support import small

pytestmark = small.needs_library

CONFIG = small.make_config(lanes=2, hidden_size=64, head_dim=8, ff=48)
WEIGHTS = small.make_weights(CONFIG)
IDS = small.prompt_of(CONFIG, 9)


def with_zero_points(record: Quantized) -> Quantized:
    zeros = np.random.default_rng(1).integers(0, 16, record.scales.shape).astype(np.uint8)
    return dataclasses.replace(record, zero_points=zeros)


def with_scale(record: Quantized) -> Quantized:
    return dataclasses.replace(record, global_scale=np.array(1.7 * record.global_scale, np.float32))


def with_halves(record: Quantized) -> Quantized:
    """Groups of 16 rows, whose scales are float16."""
    rows = -(-record.shape[-2] // 16)
    scales = np.random.default_rng(2).uniform(0.001, 0.01, (*record.shape[:-2], rows, 1)).astype(np.float16)
    return dataclasses.replace(record, scales=scales, group=(16, record.columns))


WAYS = {kind: (kind, lambda record: record) for kind in USUAL} | {
    "int4 with zero points": ("int4", with_zero_points),
    "nvfp4 with a scale of all": ("nvfp4", with_scale),
    "fp8 with a scale of 16 rows": ("fp8", with_halves),
}


def packed(records: dict, **options):
    session = small.open_session(CONFIG, "float32", **options)
    for path, weight in (WEIGHTS | records).items():
        session.pack(path, weight)
    return session


def logits_of(session) -> np.ndarray:
    """Of the prompt's last token and three drawn ones."""
    run = small.jitted(session, room=4, top=0, logits=True)
    return np.asarray(run(small.make_inputs(IDS, 4), small.make_state(CONFIG, 64))[0].logits)


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_the_dequantized_weights(way):
    kind, change = WAYS[way]
    paths = small.open_session(CONFIG, "float32", threads=1).plan.matrices
    assert {"lm_head", "tok_embeddings"} - paths == {"tok_embeddings"}
    records = {path: change(round_to(WEIGHTS[path], kind)) for path in paths}
    assert not any(record.problem() for record in records.values())
    session = packed(records, threads=2)
    found = logits_of(session)
    exact = {path: record.dequantize(np.float32) for path, record in records.items()}
    expected = small.reference_logits(CONFIG, WEIGHTS | exact, IDS)[-1]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    facts = session.quantized_weights
    assert facts["quantized_weights"] == sum(WEIGHTS[path].size for path in paths)
    assert session.packed_bytes == facts["quantized_bytes"] + WEIGHTS["tok_embeddings"].nbytes
    assert session.read_pass() > 0
    for other in ({"threads": 1, "instructions": "portable"}, {"threads": 3}, {"one_thread_per_lane": True}):
        again = logits_of(packed(records, **other))
        if "instructions" in other:  # norms and attention round in their own order
            assert np.abs(again[0] - found[0]).max() < 1e-5 * np.abs(found[0]).max()
        else:
            assert again.tobytes() == found.tobytes()


def test_some_products_may_be_quantized():
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": np.arange(64, dtype=np.int32)[::-1].copy()}, "has columns in an order of their own"),
        ({"group": (1, 24), "scales": np.ones((1, 1, 1))}, "has groups of 24 columns"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(change, words):
    session = small.open_session(CONFIG, "float32", threads=1)
    path = next(path for path in sorted(session.plan.matrices) if session.plan.shape_of(path)[-1] == 64)
    record = dataclasses.replace(round_to(WEIGHTS[path], "int4"), **change)
    with pytest.raises(NativeError, match=f"weight {path} .*{words}.*: use backend xla"):
        session.pack(path, record)


def test_matrices_of_one_product_have_one_format():
    session = small.open_session(CONFIG, "float32", threads=1)
    first, second = next(paths for paths, _ in session._products if len(paths) > 1)[:2]
    session.pack(first, round_to(WEIGHTS[first], "int8"))
    for weight in (WEIGHTS[second], round_to(WEIGHTS[second], "int4")):
        with pytest.raises(NativeError, match="are one product, whose matrices must have one format: use backend xla"):
            session.pack(second, weight)


def test_the_embedding_is_never_quantized():
    session = small.open_session(CONFIG, "float32", threads=1)
    with pytest.raises(NativeError, match="no matrix of a product: dequantize it"):
        session.pack("tok_embeddings", round_to(WEIGHTS["tok_embeddings"], "int8"))


def test_lanes_beside_each_other_have_the_same_weights():
    weights = np.random.default_rng(3).standard_normal((3, 5, 64)).astype(np.float32)
    for kind in ("int4", "int8"):
        record = round_to(weights, kind)
        joined = beside(record)
        assert joined.problem() is None
        assert (joined.dequantize() == np.concatenate(list(record.dequantize()), -1)).all()
    with pytest.raises(ValueError, match="lanes of 48 columns, whose groups of 32"):
        beside(round_to(weights[..., :48], "int4"))


def test_tiles_hold_codes_and_scales_where_the_kernel_reads_them():
    """By the text of cpu/kernels/quantized.h."""
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
