"""scripts.gpu_rank on an emulated GPU: a lane with emulated peers finishes, and waits only for exposed exchanges."""

import numpy as np
import pytest

from laneformer import ConfigError
from laneformer.commands.lab import gpu_rank
from laneformer.commands.lab.gpu_rank import Options, measure, table
from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.infer.engine.sources import recipe_config
from tests.support import emulated, small

pytestmark = [small.needs_library, emulated.needs_gpu]
RECIPE = """
from pathlib import Path
from laneformer import ModelConfig
from laneformer.train.config import DataConfig, TrainConfig

def small():
    data = DataConfig(path=(Path("none"),), sequence_length=64, batch_size=1)
    return TrainConfig(name="small", steps=1000, data=data, model=ModelConfig(
        vocab_size=40, hidden_size=24, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_lanes=4, max_position_embeddings=64, lm_head_type="HEAD"))
"""
MACHINE = Machine(warp_size=32, ctas=4, warps=2, shared_bytes=232_448, bulk_copies=True)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["replicate", pytest.param("vocab_parallel", marks=pytest.mark.exhaustive)])
def test_delays_are_hidden_or_waited_for(head, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_rank, "PEER_CTAS", 2)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.replace("HEAD", head))
    options = Options(recipe=f"{file}:small", delays=(0, 3000), context=8, tokens=4, runs=1)
    devices = (
        {}
        if emulated.REAL
        else {"machine": MACHINE, "compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver()}
    )
    records = measure(options, "tp", **devices) + measure(options, "none", **devices)
    times = {(r["layout"], r["delay_us"]): r["us_per_token"]["median"] for r in records}
    exposed = {"tp": 8, "none": 0}
    for layout, count in exposed.items():
        waits = count + 1 + (head == "replicate")  # the exchange of the token and the exchange of the head
        assert times[layout, 3000] > 3000 * waits * 0.9, "every exposed exchange takes the delay"
    assert times["tp", 3000] - times["none", 3000] > 3000 * 8 * 0.6
    text = table(records)
    assert "emulated 1 of 4, not 4 GPUs" in text and text.count("| tp |") == 2


def test_bf12_weights_run(tmp_path, monkeypatch):
    """The weights are random values, few of which are exceptions of bf12."""
    monkeypatch.setattr(gpu_rank, "PEER_CTAS", 2)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.replace("HEAD", "replicate").replace("=48", "=800").replace("=24", "=64"))
    config = recipe_config(f"{file}:small")
    devices = {} if emulated.REAL else {"compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver()}
    if not emulated.REAL:
        devices["machine"] = MACHINE
    options = Options(weights="bf12", context=8, tokens=2)
    session = gpu_rank.open_lane(config, options, 0, **devices)
    held = session.bf12_weights
    assert 0 < held.exceptions < 1e-3 * held.weights
    assert gpu_rank.Calls(session, options.context, options.tokens).answer(0).seconds > 0
    with pytest.raises(ConfigError, match="needs bfloat16 weights, got float16"):
        gpu_rank.open_lane(config, Options(weights="bf12", dtype="float16"), 0)


@pytest.mark.slow
def test_random_codes_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_rank, "PEER_CTAS", 2)
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.replace("HEAD", "replicate").replace("=48", "=800").replace("=24", "=64"))
    config = recipe_config(f"{file}:small")
    devices = {"compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver(), "machine": MACHINE}
    options = Options(weights="nvfp4", context=8, tokens=2)
    session = gpu_rank.open_lane(config, options, 0, **({} if emulated.REAL else devices))
    assert gpu_rank.held_as(session, options.dtype) == "nvfp4 group 16 and nvfp4 row"
    assert gpu_rank.Calls(session, options.context, options.tokens).answer(0).seconds > 0
    packed = np.asarray(session.operands[0])
    assert packed.any(-1).all(), "every warp has weights"


def test_machine_without_gpu_raises():
    with pytest.raises(ConfigError, match="GPU"):
        gpu_rank.run(Options())
