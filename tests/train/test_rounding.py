"""Training with rounded matrices: values equal those of exported files, gradients pass through, and a phase learns."""

import dataclasses

import jax
import numpy as np
import pytest

from laneformer import make_mesh
from laneformer.quantized.rounding import ALLOWED, round_to
from laneformer.train.config import LaterPhase, recorded
from laneformer.train.rounding import matrices_of, rounded
from laneformer.train.step import Trainer
from tests.support.tiny_recipe import changed, tiny

WEIGHTS = np.random.default_rng(0).standard_normal((2, 40, 256), np.float32)
WEIGHTS[0, :3] = 0
WEIGHTS[1, 5, :32] *= 1e-4
CASES = [(kind, shared) for kind, allowed in ALLOWED.items() for shared in allowed] + [("int4", 24)]


@pytest.mark.parametrize(("kind", "shared"), CASES)
def test_rounded_values_equal_those_of_files(kind, shared):
    """Values are bitwise equal, except with int4 if two scales have almost the same error. Gradients pass through."""
    weights = WEIGHTS[..., :24] if shared == 24 else WEIGHTS
    shared = 32 if shared == 24 else shared  # more than the 24 columns, so each row has one scale
    factors = np.random.default_rng(1).standard_normal(weights.shape, np.float32)
    found = jax.jit(lambda w: rounded(w, kind, shared))(weights)
    equal = np.asarray(found) == round_to(weights, kind, shared).dequantize(np.float32)
    assert equal.mean() > 0.99 if kind == "int4" else equal.all()
    gradient = jax.jit(jax.grad(lambda w: (rounded(w, kind, shared) * factors).sum()))(weights)
    assert (np.asarray(gradient) == factors).all()


@pytest.mark.slow
def test_phase_learns_and_evaluates_with_rounded_matrices():
    """Losses of the phase equal those of a model with rounded weights, and steps change the unrounded weights."""
    then = {"int4": LaterPhase(steps=10, data=tiny().data, optimizer=tiny().optimizer, weights="int4")}
    config, mesh = changed(tiny(), model__num_hidden_layers=1, then=then), make_mesh(8, data=2, lane=4)
    plain, last = (Trainer(config, phase, mesh) for phase in config.phases)
    state = plain.init()
    ids = np.random.default_rng(0).integers(1, 64, (8, 17)).astype(np.int32)
    batch = last.put_batch(lambda span: {"ids": ids[span]})
    weights = jax.device_get(state.params)
    paths = matrices_of(config.model)
    assert "tok_embeddings" not in paths and len(paths) == 7
    exact = weights | {path: round_to(weights[path], "int4").dequantize(np.float32) for path in paths}
    exact = {path: jax.device_put(array, plain.state_shardings.params[path]) for path, array in exact.items()}
    losses = [float(sums["nll"]) for sums in (last.evaluate(state.params, batch), plain.evaluate(exact, batch))]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0] != float(plain.evaluate(state.params, batch)["nll"])
    held = jax.device_get(last.held(state.params))
    assert all((held[path] == jax.device_get(exact[path])).mean() > 0.99 for path in weights)
    first = None
    for _ in range(5):
        state, metrics = last.step(state, batch, last.put_asked(False))
        first = float(metrics["loss"]) if first is None else first
    assert float(metrics["loss"]) < first - 0.05
    assert not np.isin(jax.device_get(state.params)[paths[0]], held[paths[0]]).all()


def test_rounding_options_are_recorded_only_if_used():
    assert not any(name.endswith("group") or name == "weights" for name in recorded(tiny()))
    config = dataclasses.replace(tiny(), weights="int8", group=32)
    assert (recorded(config)["weights"], recorded(config)["group"]) == ("int8", 32)
