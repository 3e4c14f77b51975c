"""scripts.gpu_rows on an emulated GPU: passes of several rows are measured and give the bits of one row."""

import pytest

from laneformer import ConfigError
from laneformer.commands.lab.gpu_rows import Options, main, measure, table
from laneformer.custom_calls.gpu.tiling import Machine
from tests.support import emulated, small

pytestmark = [small.needs_library, emulated.needs_gpu]
RECIPE = """
from pathlib import Path
from laneformer import ModelConfig
from laneformer.train.config import DataConfig, TrainConfig

def small():
    data = DataConfig(path=(Path("none"),), sequence_length=64, batch_size=1)
    return TrainConfig(name="small", steps=1000, data=data, model=ModelConfig(
        vocab_size=40, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_lanes=2, max_position_embeddings=128))
"""
MACHINE = Machine(warp_size=32, ctas=4, warps=2, shared_bytes=232_448, bulk_copies=True)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    return f"{tmp_path}/mine.py:small"


@pytest.mark.slow
def test_several_rows_give_the_bits_of_one(recipe):
    devices = (
        {}
        if emulated.REAL
        else {"machine": MACHINE, "compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver()}
    )
    records = measure(Options(recipe=recipe, rows=(1, 3), context=8, tokens=10, runs=1), **devices)
    assert [record["rows"] for record in records] == [1, 3] and all(record["same_bits"] for record in records)
    assert records[0]["all_rows_us"] is None and records[0]["tokens_per_pass"] == 1
    assert records[1]["all_rows_us"]["median"] > 0 and records[1]["tokens_per_pass"] > 2
    text = table(records)
    assert text.count("| yes |") == 2 and "random bfloat16 weights" in text


def test_bad_options_are_one_line(recipe, capsys):
    with pytest.raises(ConfigError, match="must begin with 1"):
        measure(Options(recipe=recipe, rows=(2, 4)))
    with pytest.raises(ConfigError, match="take 704 positions"):
        measure(Options(recipe=recipe))
    assert main([recipe]) == 2 and "found no GPU" in capsys.readouterr().err
