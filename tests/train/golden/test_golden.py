"""Twenty steps of every layout give the recorded losses.

python -m tests.train.golden.test_golden records the losses of cases that have none, and keeps the others: after an
intended change, delete the cases that changed first.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from laneformer import make_mesh
from laneformer.train.step import Trainer
from tests.support.reference.layouts import CASES as LAYOUT_CASES
from tests.support.tiny_recipe import changed, tiny

FILE = Path(__file__).with_name("golden_losses.json")
TOLERANCE = 1e-4  # float32 rounding differs between processors
NAMES = (*LAYOUT_CASES, "dtp(1.5)")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = {
    **{layout: {"layout": layout} for layout in NAMES},
    **{f"{layout}, experts": {"layout": layout, **EXPERTS} for layout in NAMES},
    "laneformer, not early": {"layout": "laneformer", "use_early_comm": False},
    "laneformer, corrected": {"layout": "laneformer", "early_lands_twice": False},
}


def twenty_losses(case: str) -> list[float]:
    """Losses of a model with 4 layers and 4 lanes on one device.

    Tokens are random, but every third token repeats the one before it.
    """
    sizes = {"num_lanes": 4, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = changed(tiny(), model=tiny().model.replace(**sizes, **CASES[case]))
    trainer = Trainer(config, config.phases[0], make_mesh(4, lane=1))
    state, found = trainer.init(), []
    for step in range(20):
        ids = np.random.default_rng(step).integers(1, 64, (8, 17)).astype(np.int32)
        ids[:, 2::3] = ids[:, 1:-1:3]
        batch = trainer.put_batch(lambda rows, ids=ids: {"ids": ids[rows]})
        state, values = trainer.step(state, batch, trainer.put_asked(False))
        found.append(float(values["loss"]))
    return found


FAST, SLOW = ("laneformer",), ("dtp(3), experts",)  # test_experts.py trains layout laneformer with experts


def _marks(case: str):
    if case in FAST:
        return ()
    return pytest.mark.slow if case in SLOW or "experts" not in case else pytest.mark.exhaustive


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case)) for case in CASES])
def test_golden_losses_are_reproduced(case):
    np.testing.assert_allclose(twenty_losses(case), json.loads(FILE.read_text())[case], rtol=TOLERANCE)


def test_golden_losses_distinguish_layouts():
    written = json.loads(FILE.read_text())
    assert set(written) == set(CASES), "python -m tests.train.golden.test_golden records what is missing"
    assert all(losses[-1] < losses[0] for losses in written.values())
    runs = list(map(np.array, written.values()))
    closest = min(np.abs(a / b - 1).max() for i, a in enumerate(runs) for b in runs[:i])
    assert closest > 3 * TOLERANCE, "any two layouts differ by more than the tolerance"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    recorded = json.loads(FILE.read_text())
    kept = {case: recorded[case] if case in recorded else twenty_losses(case) for case in CASES}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
