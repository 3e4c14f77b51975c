"""Training configs: what cannot work is refused by name, what continues a run is told from what does not."""

import dataclasses
import math
from pathlib import Path

import pytest
from tiny_recipe import changed, tiny

from laneformer import ConfigError
from train.config import check_same_run, recorded


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *((name, value, rf"^{name.replace('__', '.')} = {value}: it must be at least 1$")
          for name in ("steps", "accumulate", "log_every", "validate_every", "save_every", "keep", "mesh__data", "data__batch_size",
                       "data__sequence_length") for value in (0, -3)),
        ("data__batch_size", 9, None),
        ("accumulate", 3, r"data\.batch_size = 8 must be a multiple of accumulate x mesh\.data = 3"),
        ("mesh__data", 16, r"accumulate x mesh\.data = 16"),
        ("data__sequence_length", 33, r"data\.sequence_length = 33 is longer .*model\.max_position_embeddings = 32"),
        *((f"optimizer__{name}", value, rf"optimizer\.{name} = {value}: it must be a positive number")
          for name in ("learning_rate", "eps", "clip_norm") for value in (0.0, -1.0, math.inf, math.nan)),
        *((f"optimizer__{name}", value, rf"optimizer\.{name} = {value}: it must be at least 0 and below {top}")
          for name, top in (("beta1", 1), ("beta2", 1), ("weight_decay", math.inf)) for value in (-0.1, top, math.nan)),
        ("optimizer__decay_fraction", 1.5, "decay_fraction"),
        ("optimizer__decay_fraction", math.nan, "decay_fraction"),
        ("optimizer__warmup_steps", -1, "warmup_steps"),
        ("data__validation_batches", -1, r"data\.validation_batches = -1: it must be at least 0"),
        ("mesh__host_devices", 0, r"mesh\.host_devices = 0: it must be at least 1"),
        ("compute_dtype", "int8", r"compute_dtype = 'int8'"),
    ],
)  # fmt: skip
def test_values_that_cannot_work(option, value, message):
    if message is None:
        assert changed(tiny(), **{option: value}).data.batch_size == value
        return
    with pytest.raises(ConfigError, match=message):
        changed(tiny(), **{option: value})


def test_the_run_folder():
    assert tiny().run_folder == Path("runs/tiny")
    assert changed(tiny(), run=Path("elsewhere")).run_folder == Path("elsewhere")


def test_a_config_is_frozen_and_recorded_whole():
    config = tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    record = recorded(config)
    assert record["steps"] == 60 and record["data.path"] == "no/store" and record["mesh.lane"] is None
    assert record["model.num_lanes"] == 8 and record["model.unclamped_layers"] == [] and record["optimizer.beta2"] == 0.95
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    count = sum(len(dataclasses.fields(s)) if dataclasses.is_dataclass(s) else 1 for s in sections.values())
    assert len(record) == count


@pytest.mark.parametrize(
    "changes",
    [
        {"run": Path("x"), "name": "y", "log_every": 3, "validate_every": 7, "save_every": 9, "keep": 9},
        {"mesh__data": 2, "mesh__lane": 4, "mesh__host_devices": None, "remat": True},
        {"data__path": Path("moved"), "data__validation_batches": 1},
    ],
)
def test_what_may_change_when_a_run_goes_on(changes):
    check_same_run(recorded(tiny()), changed(tiny(), **changes), Path("run"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 61}, "steps (60 before, 61 now)"),
        ({"seed": 1}, "seed (0 before, 1 now)"),
        ({"data__seed": 1}, "data.seed (0 before, 1 now)"),
        ({"data__batch_size": 16}, "data.batch_size (8 before, 16 now)"),
        ({"accumulate": 2}, "accumulate (1 before, 2 now)"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype ('auto' before, 'bfloat16' now)"),
        ({"model__layout": "tp"}, "model.layout ('laneformer' before, 'tp' now)"),
        ({"optimizer__beta1": 0.8}, "optimizer.beta1 (0.9 before, 0.8 now)"),
    ],
)
def test_what_may_not(changes, named):
    with pytest.raises(ConfigError) as told:
        check_same_run(recorded(tiny()), changed(tiny(), **changes), Path("the/run"))
    assert named in str(told.value) and "the/run" in str(told.value) and "--run" in str(told.value)


def test_fields_that_came_or_went_since_are_named():
    before = recorded(tiny())
    before["gone"] = before.pop("seed")
    with pytest.raises(ConfigError, match=r"gone \(0 before, None now\), seed \(None before, 0 now\)"):
        check_same_run(before, tiny(), Path("run"))
