"""Bytes per token of mixture-of-experts models against hand arithmetic."""

import pytest

from laneformer.errors import ConfigError
from laneformer.infer.engine.sources import packed_bytes
from laneformer.infer.roofline.devices import make_node
from laneformer.infer.roofline.model import Work, bytes_by_part
from laneformer.infer.roofline.published import MOE, find_moe
from laneformer.infer.roofline.report import nominal_table
from laneformer.recipes.models import DEEPSEEK_V4_FLASH, QWEN3_NEXT_80B

# Billions of weights that one token reads, rounded by hand from the published dimensions, and bytes per weight.
HAND = {
    "qwen3-coder-next": [(1.510, 1), (0.151, 1), (0.050, 2), (0.327, 1), (1.213, 1), (0.311, 2)],
    "gpt-oss-120b": [(3.583, 4.25 / 8), (0.013, 2), (0.956, 2), (0.579, 2)],
    "deepseek-v4-flash": [(6.493, 4.25 / 8), (1.082, 1), (4.60, 1), (0.49, 1), (0.045, 2), (0.53, 2)],
    "kimi-k2.6": [(21.14, 4.5 / 8), (2.64, 2), (0.40, 2), (6.17, 2), (0.17, 2), (1.17, 2)],
}
GIGABYTES = {"qwen3-coder-next": 3.92, "gpt-oss-120b": 5.00, "deepseek-v4-flash": 10.80, "kimi-k2.6": 32.98}


# Name of each part, number of weights that one token reads, and their format, by hand from the published dimensions.
PARTS = {
    "qwen3-coder-next": (
        ("routed experts, 10 of 512", 48 * 10 * 3 * 512 * 2048, "fp8"),
        ("shared expert", 48 * 3 * 512 * 2048, "fp8"),
        ("router", 48 * 512 * 2048, "bfloat16"),
        ("attention, 12 layers, gated", 12 * 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256), "fp8"),
        ("gated DeltaNet, 36 layers", 36 * (2048 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) + 4 * 2 * 32 * 128), "fp8"),
        ("head", 151_936 * 2048, "bfloat16"),
    ),
    "gpt-oss-120b": (
        ("routed experts, 4 of 128", 36 * 4 * 3 * 2880 * 2880, "mxfp4"),
        ("router", 36 * 128 * 2880, "bfloat16"),
        ("attention", 36 * 2880 * 64 * (64 + 2 * 8 + 64), "bfloat16"),
        ("head", 201_088 * 2880, "bfloat16"),
    ),
    "deepseek-v4-flash": (
        ("routed experts, 6 of 256", 43 * 6 * 3 * 2048 * 4096, "mxfp4"),
        ("shared expert", 43 * 3 * 2048 * 4096, "fp8"),
        (
            "attention, 64 heads of 512",
            43 * (4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096),
            "fp8",
        ),
        # 21 layers compress 4 positions, with an indexer of 64 heads of 128; 20 layers 128; the first two none
        (
            "compressor and indexer",
            21 * (4 * 4096 * 512 + 1024 * 64 * 128 + 4096 * 64 + 4 * 4096 * 128) + 20 * 2 * 4096 * 512,
            "fp8",
        ),
        ("router", 43 * 256 * 4096, "bfloat16"),
        ("head", 129_280 * 4096, "bfloat16"),
    ),
    "kimi-k2.6": (
        ("routed experts, 8 of 384", 60 * 8 * 3 * 2048 * 7168, "int4"),
        ("shared expert", 60 * 3 * 2048 * 7168, "bfloat16"),
        ("dense layer", 3 * 18_432 * 7168, "bfloat16"),
        (
            "latent attention",
            61 * (7168 * 1536 + 1536 * 64 * (128 + 64) + 7168 * (512 + 64) + 512 * 64 * (128 + 128) + 64 * 128 * 7168),
            "bfloat16",
        ),
        ("router", 60 * 384 * 7168, "bfloat16"),
        ("head", 163_840 * 7168, "bfloat16"),
    ),
}


@pytest.mark.parametrize("name", MOE)
def test_parts_match_hand_computation(name):
    assert tuple((part.name, part.read, part.format) for part in MOE[name].parts) == PARTS[name]


@pytest.mark.parametrize("name", MOE)
def test_bytes_match_hand_computation(name):
    model = MOE[name]
    assert [part.read / 1e9 for part in model.parts] == pytest.approx(
        [weights for weights, _ in HAND[name]], abs=0.0055
    )
    assert model.weight_bytes / 1e9 == pytest.approx(sum(weights * size for weights, size in HAND[name]), rel=2e-3)
    assert model.weight_bytes / 1e9 == pytest.approx(GIGABYTES[name], rel=4e-3)


def test_nominal_figures_match_their_rules():
    table = nominal_table(list(MOE.values()), make_node("b200", 8))
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    rules = {"qwen3-coder-next": 3.00, "gpt-oss-120b": 5.00, "deepseek-v4-flash": 9.45, "kimi-k2.6": 33.6}
    nominal = [row for row in rows if row["nominal tok/s"] is not None]
    assert len(nominal) == 8 and len(rows) == 12  # the requested node has no nominal figures
    for row in nominal:
        assert row["its GB/token"] == pytest.approx(rules[row["model"]], rel=8e-3)
        assert row["27.3% tok/s"] < row["35.7% tok/s"] < row["ceiling tok/s"]
        assert row["to nominal %"] == pytest.approx(100 * (row["its GB/token"] / row["bottom-up GB"] - 1))
    close = {row["model"]: row["to nominal %"] for row in nominal}
    assert abs(close["gpt-oss-120b"]) < 1 and close["qwen3-coder-next"] < -20
    assert len(nominal_table(list(MOE.values()), make_node("h200", 8)).rows) == 8  # this node is one of the public ones


def test_labels_give_different_ceilings():
    h200 = make_node("h200", 8).total_bandwidth
    for active, size, rate in ((13e9, 1, 844), (32e9, 0.5, 686), (5.1e9, 0.5, 4303)):
        assert 0.357 * h200 / (active * size) == pytest.approx(rate, rel=2e-3)


def test_cache_and_state_are_counted():
    gpt = MOE["gpt-oss-120b"]  # 36 layers of 2 x 8 heads x 64, every other one with a window of 128
    assert gpt.kv_bytes(100, "bfloat16") == 36 * 2 * 8 * 64 * 100 * 2
    assert gpt.kv_bytes(1000, "fp8") == 18 * 2 * 8 * 64 * (1000 + 128)
    assert MOE["kimi-k2.6"].kv_bytes(10, "bfloat16") == 61 * 576 * 10 * 2
    qwen = MOE["qwen3-coder-next"]
    assert qwen.kv_bytes(10, "bfloat16") == 2 * 12 * 4 * 256 * 10 + 2 * 4 * 36 * 32 * 128 * 128
    assert MOE["deepseek-v4-flash"].kv_bytes(10, "bfloat16") is None


def test_unknown_names_are_refused():
    assert find_moe("all") == list(MOE.values()) and find_moe("kimi-k2.6") == [MOE["kimi-k2.6"]]
    with pytest.raises(ConfigError, match=r"--moe kimi;.*qwen3-coder-next"):
        find_moe("kimi")


def test_runnable_models_read_the_bytes_of_their_dimensions():
    """Compares the weights and state of the blocks to the published dimensions. The dimensions leave out the vectors of
    Qwen3-Next. They count the compressors and indexers of DeepSeek-V4 in FP8, which are bfloat16 in the blocks.
    """
    found, work = MOE["qwen3-coder-next"], Work(context=100, packed=packed_bytes("qwen3_next_80b"))
    assert sum(bytes_by_part(QWEN3_NEXT_80B, work).values()) == pytest.approx(
        found.weight_bytes + found.kv_bytes(100, "bfloat16"), rel=4e-3
    )
    found, work = MOE["deepseek-v4-flash"], Work(context=1, packed=packed_bytes("deepseek_v4_flash"))
    assert sum(bytes_by_part(DEEPSEEK_V4_FLASH, work).values()) == pytest.approx(found.weight_bytes, rel=4e-2)
