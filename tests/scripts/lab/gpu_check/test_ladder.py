"""The ladder on emulated devices: every rung matches the model, and a wrong answer is named."""

import numpy as np
import pytest

from laneformer import ConfigError
from laneformer.commands.lab.gpu_check import ladder
from laneformer.commands.lab.gpu_check.ladder import RUNGS, Options, check, main
from laneformer.custom_calls.gpu.tiling import Machine
from tests.support import emulated, small

pytestmark = [small.needs_library, emulated.needs_gpu]
MACHINE = Machine(warp_size=32, ctas=4, warps=2, shared_bytes=232_448, bulk_copies=True)


def devices() -> dict:
    if emulated.REAL:
        return {}
    return {"machine": MACHINE, "compile_with": emulated.compile_with(MACHINE), "driver": emulated.driver()}


@pytest.mark.slow
def test_rung_matches_the_model_and_wrong_weights_are_named(monkeypatch):
    assert "tiny: 4 tokens, logits within" in check(Options(), **devices())
    model = ladder.reference
    monkeypatch.setattr(ladder, "reference", lambda source, ids: model(source, ids + 1))
    with pytest.raises(ConfigError, match="tiny: logits of token 0 differ"):
        check(Options(), **devices())
    monkeypatch.setattr(ladder, "reference", lambda source, ids: np.full_like(model(source, ids), np.nan))
    with pytest.raises(ConfigError, match="4 of 4 tokens are wrong"):
        check(Options(), **devices())


@pytest.mark.parametrize("rung", [pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNGS if name != "tiny"])
def test_layouts_match_the_model(rung):
    assert f"{rung}: 4 tokens" in check(Options(rung=rung), **devices())


def test_mistakes_are_one_line(capsys):
    assert main(["nosuch"]) == 2 and "choose tiny, laneformer, tp, dtp" in capsys.readouterr().err
    assert main(["tiny"]) == 2 and "found no GPU" in capsys.readouterr().err
