"""Training models with gated DeltaNet: meshes, recomputation, FLOPs, and a run that resumes bitwise."""

import json
from functools import cache

import jax
import numpy as np
import pytest

from laneformer import make_mesh
from laneformer.config import DeltaNetSizes
from laneformer.train.flops import train_flops_per_token
from laneformer.train.step import Trainer
from laneformer.weights import matmul_parameters
from tests.support.tiny_recipe import changed, losses, tiny

SIZES = DeltaNetSizes(key_heads=8, value_heads=16, key_dim=4, value_dim=6)
FLAGS = ["--model.delta-net", "key_heads=8,value_heads=16,key_dim=4,value_dim=6", "--model.delta-layers", "0"]


@cache
def trainer(data=1, lane=8, **changes) -> Trainer:
    config = changed(tiny(), model__delta_net=SIZES, model__delta_layers=(0,), **changes)
    return Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))


@cache
def initial_state():
    return jax.device_get(trainer(2, 4).init())


def run(trainer: Trainer, steps: int = 3):
    """Losses and gradient norms of the first steps, [steps, 2]."""
    state, found = jax.tree.map(jax.device_put, initial_state(), trainer.state_shardings), []
    for n in range(steps):
        random = np.random.default_rng(n)
        rows = {"ids": random.integers(1, 64, (8, 17)).astype(np.int32)}
        if "segments" in trainer.keys:
            rows["segments"] = np.cumsum(random.integers(0, 5, (8, 17)) == 0, 1).astype(np.int32)
        batch = trainer.put_batch(lambda span, rows=rows: {key: x[span] for key, x in rows.items()}, rows)
        state, values = trainer.step(state, batch, trainer.put_asked(False))
        found.append([float(values[name]) for name in ("loss", "grad_norm")])
    return np.array(found)


@cache
def usual():
    return run(trainer(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "lane", "changes"),
    [(1, 8, {"remat": "block"}), pytest.param(8, 1, {}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_meshes_and_recomputation_change_no_loss(data, lane, changes):
    np.testing.assert_allclose(run(trainer(data, lane, **changes)), usual(), rtol=2e-5)


def test_recurrence_counts_in_flops():
    """A token takes 7 k v FLOPs per value head and 2 per weight of the convolution, in addition to the attention of the
    other layer over 16 positions.
    """
    model = trainer(2, 4).config.model
    own = 16 * 7 * 4 * 6 + 2 * 4 * (2 * 8 * 4 + 16 * 6)
    expected = 6 * matmul_parameters(model) + 3 * (own + 4 * 32 * 17 / 2)
    assert train_flops_per_token(model, 16) == expected


@pytest.mark.slow
def test_run_resumes_bitwise(resumed):
    """Rows contain whole documents, which do not read each other."""
    options = [*FLAGS, "--steps", "20", "--save-every", "8", "--validate-every", "10", "--data.packing", "best_fit"]
    run, _ = resumed(11, *options, "--data.attend-across-documents", "False")
    assert losses(run)[-1] < losses(run)[0] - 0.3
    assert json.loads((run / "run.json").read_text())["config"]["model.delta_net.value_dim"] == 6
