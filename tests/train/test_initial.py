"""A run that starts from a checkpoint has its model and weights, and the moments of a run with the same optimizer."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import laneformer
from laneformer.errors import CheckpointError
from laneformer.train.config import recorded
from laneformer.train.initial import check_initial, read_state
from laneformer.train.recipes import parse
from laneformer.train.step import Trainer
from tests.support.paths import TESTS
from tests.support.tiny_recipe import RECIPE, losses, tiny


def state_of(config):
    mesh = laneformer.make_mesh(config.model.num_lanes, lane=config.mesh.lane)
    return read_state(config, Trainer(config, config.phases[0], mesh))


def check_weights(state, model):
    weights = model.weights()
    assert state.params.keys() == weights.keys() and int(state.step) == 0
    for path, weight in weights.items():
        np.testing.assert_array_equal(state.params[path], weight, err_msg=path)


def test_dense_folder_is_cut_into_lanes(tmp_path, capsys):
    folder = shutil.copytree(TESTS / "dense" / "llama3", tmp_path / "dense")
    config = parse([RECIPE, "--initial", str(folder), "--model.num-lanes", "2"])
    assert config.model == laneformer.load(folder, num_lanes=2).config
    assert (config.model.num_lanes, config.model.layout, config.steps) == (2, "tp", 60)
    check_weights(state_of(config), laneformer.load(folder, num_lanes=2))
    assert capsys.readouterr().out == f"initial weights from {folder}, no moments\n"
    delayed = parse([RECIPE, f"--initial={folder}", "--model.num_lanes=2", "--model.layout", "dtp(1)"])
    check_weights(state_of(delayed), laneformer.load(folder, num_lanes=2))
    (folder / "tokenizer.json").write_text("{}")
    check_initial(config, "other")
    assert f"warning: the data was not tokenized with {folder / 'tokenizer.json'}" in capsys.readouterr().err
    assert recorded(config)["initial"] == str(folder)


def test_run_supplies_the_moments_of_the_same_optimizer(tmp_path, finished, capsys):
    step = finished / "checkpoints" / "50"
    config = parse([RECIPE, "--initial", str(step)])
    assert config.model == tiny().model
    state = state_of(config)
    check_weights(state, laneformer.load(step))
    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore((step / "optimizer").absolute())
    found, expected = jax.tree.leaves(state.optimizer), jax.tree.leaves(saved["state"])
    assert len(found) == len(expected) > 10 and any(np.any(np.asarray(leaf)) for leaf in found)
    for a, b in zip(sorted(found, key=_sum), sorted(expected, key=_sum), strict=True):
        np.testing.assert_array_equal(a, b)
    assert capsys.readouterr().out == f"initial weights from {step}, moments of adamw\n"
    state_of(parse([RECIPE, "--initial", str(step), "--optimizer.kind", "muon"]))
    assert capsys.readouterr().out == f"initial weights from {step}, no moments (of adamw)\n"
    damaged = shutil.copytree(step, tmp_path / "checkpoints" / "50")
    meta = json.loads((damaged / "meta" / "metadata").read_text())
    meta["fingerprint"]["optimizer"] ^= 1
    (damaged / "meta" / "metadata").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"optimizer differs from what was saved"):
        state_of(parse([RECIPE, "--initial", str(damaged)]))


def _sum(leaf):
    leaf = np.asarray(leaf, np.float64)
    return leaf.size, float(np.abs(leaf).sum()), float((leaf**2).sum())


@pytest.mark.slow
def test_run_from_a_run_learns_and_resumes_bitwise(finished, resumed):
    options = ("--initial", str(finished), "--steps", "8", "--optimizer.warmup-steps", "2", "--validate-every", "4")
    run, out = resumed(3, *options)
    assert f"initial weights from {finished / 'checkpoints' / '60'}, moments of adamw" in out
    assert losses(run)[0] < max(losses(finished)[-20:]) < losses(finished)[0] / 2
    assert abs(np.mean(losses(run)) - np.mean(losses(finished)[-8:])) < 0.2
