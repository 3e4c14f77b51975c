"""Estimated figures of a training step are close to those of compiled steps."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import laneformer as lf
from laneformer.errors import ConfigError
from laneformer.train.planning.cluster import find_device, speeds_of
from laneformer.train.planning.estimate import estimate
from laneformer.train.step import Trainer
from tests.support.tiny_recipe import changed, tiny
from tests.support.training.compiled_steps import CASES, FILE, Case, recipe_of

COMPILED = json.loads(FILE.read_text())


def counted(case: Case):
    config = recipe_of(case)
    return estimate(config, config.phases[0], {"data": case.data, "lane": case.lane})


@pytest.mark.parametrize(("data", "lane"), [(1, 8), (8, 1), (2, 4), (1, 1)])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_estimated_state_equals_that_of_the_step(data, lane, kind):
    config = changed(tiny(), optimizer__kind=kind, model__qkv_bias=True)
    mesh = lf.make_mesh(8, data=data, lane=lane)
    state = Trainer(config, config.phases[0], mesh).abstract_state()
    arrays = jax.tree.leaves((state.params, state.optimizer))
    held = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * 4 for x in arrays)
    assert estimate(config, config.phases[0], dict(mesh.shape)).state == pytest.approx(held, abs=64)  # counters


def test_recorded_steps_match_the_cases():
    assert [Case(**found["case"]) for found in COMPILED] == list(CASES)


@pytest.mark.parametrize("found", COMPILED, ids=lambda found: "-".join(map(str, found["case"].values())))
def test_figures_are_near_those_of_a_compiled_step(found):
    """State, FLOPs and exchanges are counted; memory and times are fitted, with the errors in docs/training.md."""
    case = Case(**found["case"])
    figures = counted(case)
    assert figures.state == pytest.approx(found["state"], rel=1e-4)
    assert figures.flops == pytest.approx(found["flops"], rel=1e-3)
    for axis, sent in found["sent"].items():
        total = sum(count for (_, of), count in figures.sent.items() if of == axis)
        assert total == pytest.approx(sent, rel=0.005, abs=1e6), axis
    speeds = speeds_of(find_device("h200", 8), {"data": case.data, "lane": case.lane})
    seconds = figures.flops / speeds.products + figures.traffic / speeds.memory
    assert seconds == pytest.approx(found["device_seconds"], rel=0.17)
    assert figures.memory == pytest.approx(found["memory"], rel=0.25)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__num_experts": 4, "model__num_experts_per_tok": 2, "model__moe_intermediate_size": 32}, "num_experts"),
        ({"model__lm_head_type": "lane"}, "lm_head_type = lane"),
        ({"weights": "int8"}, "weights = int8"),
    ],
)
def test_uncounted_options_raise(changes, named):
    config = changed(tiny(), **{name: value for name, value in changes.items() if not name.startswith("model__")})
    model = {name.removeprefix("model__"): value for name, value in changes.items() if name.startswith("model__")}
    config = dataclasses.replace(config, model=config.model.replace(**model))
    with pytest.raises(ConfigError, match=f"{named}.*--sweep"):
        estimate(config, config.phases[0], {"data": 1, "lane": 8})
