"""Training configs: what cannot work is refused by name, what continues a run is told from what does not."""

import dataclasses
import math
from pathlib import Path

import pytest

from laneformer import ConfigError, RopeScaling
from tests.support.tiny_recipe import changed, tiny
from train.config import LaterPhase, OptimizerConfig, check_same_run, recorded


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(
            (name, value, rf"^{name.replace('__', '.')} = {value}: it must be at least 1$")
            for name in (
                "steps",
                "accumulate",
                "log_every",
                "validate_every",
                "save_every",
                "keep",
                "mesh__data",
                "data__batch_size",
                "data__sequence_length",
            )
            for value in (0, -3)
        ),
        ("data__batch_size", 9, None),
        ("accumulate", 3, r"data\.batch_size = 8 must be a multiple of accumulate x mesh\.data = 3"),
        ("mesh__data", 16, r"accumulate x mesh\.data = 16"),
        ("data__sequence_length", 33, r"data\.sequence_length = 33 is longer .*model\.max_position_embeddings = 32"),
        *(
            (f"optimizer__{name}", value, rf"optimizer\.{name} = {value}: it must be a positive number")
            for name in ("learning_rate", "eps", "clip_norm")
            for value in (0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (f"optimizer__{name}", value, rf"optimizer\.{name} = {value}: it must be at least 0 and below {top}")
            for name, top in (("beta1", 1), ("beta2", 1), ("weight_decay", math.inf))
            for value in (-0.1, top, math.nan)
        ),
        ("optimizer__decay_fraction", 1.5, "decay_fraction"),
        ("optimizer__decay_fraction", math.nan, "decay_fraction"),
        ("optimizer__warmup_steps", -1, "warmup_steps"),
        ("data__validation_batches", -1, r"data\.validation_batches = -1: it must be at least 0"),
        ("mesh__host_devices", 0, r"mesh\.host_devices = 0: it must be at least 1"),
        ("seed", -1, r"seed = -1: it lies in 0\.\.4294967295"),
        ("seed", 2**32, r"seed = 4294967296: it lies in 0\.\.4294967295"),
        ("compute_dtype", "int8", r"compute_dtype = 'int8'"),
    ],
)
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
    assert record["steps"] == 60 and record["data.path"] == ["no/store"] and record["mesh.lane"] is None
    assert (
        record["model.num_lanes"] == 8 and record["model.unclamped_layers"] == [] and record["optimizer.beta2"] == 0.95
    )
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    count = sum(len(dataclasses.fields(s)) if dataclasses.is_dataclass(s) else s != {} for s in sections.values())
    assert len(record) == count


@pytest.mark.parametrize(
    "changes",
    [
        {
            "run": Path("x"),
            "name": "y",
            "log_every": 3,
            "validate_every": 7,
            "save_every": 9,
            "keep": 9,
            "keep_every": 5,
        },
        {
            "mesh__data": 2,
            "mesh__lane": 4,
            "mesh__host_devices": None,
            "remat": "block",
            "loss_chunk": 64,
            "watch__lanes": False,
        },
        {"data__path": (Path("moved"),), "data__validation_batches": 1},
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


def later(**changes):
    return {"mid": dataclasses.replace(LaterPhase(steps=10, data=tiny().data), **changes)}


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ({"pretrain": LaterPhase(steps=1, data=tiny().data)}, r"then\.pretrain: the first phase has that name"),
        (later(steps=0), r"then\.mid\.steps = 0: it must be at least 1"),
        (
            later(data=dataclasses.replace(tiny().data, batch_size=9), accumulate=2),
            r"then\.mid\.data\.batch_size = 9 must be",
        ),
        (later(sliding_window=0), "sliding_window = 0"),
        (later(optimizer=OptimizerConfig(kind="sgd")), r"then\.mid\.optimizer\.kind = 'sgd': known are adamw, muon"),
    ],
)
def test_later_phases_that_cannot_work(then, message):
    with pytest.raises(ConfigError, match=message):
        changed(tiny(), then=then)


def test_phases_follow_each_other_and_change_the_model():
    long = dataclasses.replace(tiny().data, sequence_length=64, batch_size=2)
    scaling = RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=32)
    config = changed(
        tiny(),
        then={
            "mid": LaterPhase(steps=10, data=tiny().data, sliding_window=8),
            "long": LaterPhase(steps=5, data=long, rope_scaling=scaling, rope_theta=500.0),
        },
    )
    first, mid, last = config.phases
    assert [phase.first_step for phase in config.phases] == [0, 60, 70] and config.total_steps == 75
    assert [phase.last_step for phase in config.phases] == [60, 70, 75]
    assert first.model == config.model and mid.model == config.model.replace(sliding_window=8)
    assert last.model == mid.model.replace(max_position_embeddings=64, rope_scaling=scaling, rope_theta=500.0)
    assert [config.phase_at(step).name for step in (0, 59, 60, 69, 70, 74, 75)] == [
        "pretrain",
        "pretrain",
        "mid",
        "mid",
        "long",
        "long",
        "long",
    ]
    assert last.tokens_at(72) == 60 * 128 + 10 * 128 + 2 * 128
    record = recorded(config)
    assert record["then.long.rope_scaling.factor"] == 2.0 and record["then.mid.data.batch_size"] == 8
    check_same_run(
        record,
        changed(
            config,
            then=config.then
            | {
                "mid": dataclasses.replace(
                    config.then["mid"], data=dataclasses.replace(tiny().data, path=(Path("elsewhere"),))
                )
            },
        ),
        Path("run"),
    )
    with pytest.raises(ConfigError, match=r"then\.mid\.steps \(10 before, 11 now\)"):
        check_same_run(
            record,
            changed(config, then=config.then | {"mid": dataclasses.replace(config.then["mid"], steps=11)}),
            Path("run"),
        )


def test_fields_that_came_or_went_since_are_named():
    before = recorded(tiny())
    before["gone"] = before.pop("seed")
    with pytest.raises(ConfigError, match=r"gone \(0 before, None now\), seed \(None before, 0 now\)"):
        check_same_run(before, tiny(), Path("run"))
