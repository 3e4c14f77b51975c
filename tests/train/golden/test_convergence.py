"""A hundred steps of our trainer give the losses of an independent trainer in PyTorch with the same initial weights and
data.

The independent trainer is tests/support/training/torch_trainer.py, which records its losses in float64. In float32 the
same program deviates by 2.5e-7; TOLERANCE is ten times as large. The smallest mistake in the file deviates by 50 times
TOLERANCE.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import laneformer
from laneformer.train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from laneformer.train.step import State, Trainer
from tests.support.training.convergence import BATCH, CONFIG, LENGTH, STEPS, Recipe, batch, initial_weights

FILE = Path(__file__).with_name("convergence.json")
TOLERANCE = 2.5e-6
RECIPES = {"adamw": Recipe(), "muon": Recipe(kind="muon"), "muon, 2 lanes": Recipe(kind="muon")}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return {name: np.array(curve) for name, curve in json.loads(FILE.read_text()).items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The initial weights as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(initial_weights(), folder / "model.safetensors")
    return folder


def our_losses(checkpoint: Path, recipe: Recipe, lanes: int, data: int, lane: int, accumulate: int) -> list[float]:
    model = laneformer.load(checkpoint, num_lanes=lanes)
    config = TrainConfig(
        name="convergence",
        steps=STEPS,
        model=model.config,
        data=DataConfig(path=(Path("no/store"),), sequence_length=LENGTH, batch_size=BATCH),
        optimizer=OptimizerConfig(**dataclasses.asdict(recipe)),
        accumulate=accumulate,
        mesh=MeshConfig(data=data, lane=lane),
    )
    trainer = Trainer(config, config.phases[0], laneformer.make_mesh(lanes, data=data, lane=lane))
    fresh, found = trainer.init(), []
    state = State({path: model.weights()[path] for path in fresh.params}, fresh.optimizer, fresh.step)
    for step in range(STEPS):
        ids = batch(step)
        rows = trainer.put_batch(lambda part, ids=ids: {"ids": ids[part]})
        state, values = trainer.step(state, rows, trainer.put_asked(False))
        found.append(float(values["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lanes", "data", "lane", "accumulate"),
    [
        ("adamw", 1, 1, 1, 1),
        pytest.param("adamw", 2, 2, 2, 2, marks=pytest.mark.exhaustive),  # both mesh axes, and a batch in two parts
        pytest.param("muon", 1, 2, 1, 1, marks=pytest.mark.exhaustive),
        ("muon, 2 lanes", 2, 2, 2, 1),
    ],
)
def test_losses_equal_those_of_an_independent_trainer(checkpoint, recorded, name, lanes, data, lane, accumulate):
    found = our_losses(checkpoint, RECIPES[name], lanes, data, lane, accumulate)
    np.testing.assert_allclose(found, recorded[name], rtol=TOLERANCE)


def test_recorded_losses_distinguish_mistakes(recorded):
    for name, curve in recorded.items():
        kind, _, rest = name.partition(": ")
        if kind in ("wrong", "published"):
            right = recorded["muon" if kind == "published" or "momentum" in rest else "adamw"]
            assert np.abs(curve / right - 1).max() > 40 * TOLERANCE, name
        elif kind == "float32":
            assert np.abs(curve / recorded[rest] - 1).max() < TOLERANCE / 8, name
        else:
            assert curve[-1] < 0.5 * curve[0], name


@pytest.mark.parametrize("name", RECIPES)
def test_independent_trainer_gives_the_recorded_losses(recorded, name):
    pytest.importorskip("torch")
    from tests.support.training.torch_trainer import curves

    np.testing.assert_allclose([loss for loss, _ in curves()[name]], recorded[name], rtol=1e-7)


def test_independent_muon_matches_torch():
    """Four steps of both optimizers. torch.optim.Muon has plain lookahead, and Newton-Schulz in bfloat16."""
    torch = pytest.importorskip("torch", minversion="2.9")
    from tests.support.training.torch_trainer import Muon

    first = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    ours, theirs = (first.clone().requires_grad_() for _ in range(2))
    both = (
        Muon({"up_proj": ours}, lr=0.1, weight_decay=0.1, lookahead="plain"),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(4):
        gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(1 + step))
        for p, optimizer in zip((ours, theirs), both, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    moved, apart = (ours - first).norm(), (ours - theirs).norm()
    assert apart < 0.01 * moved, "the optimizers differ only by bfloat16 rounding"
