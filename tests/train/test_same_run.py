"""A resumed run may change only what no step that is done depends on."""

import dataclasses
from pathlib import Path

import pytest

from laneformer import ConfigError
from laneformer.train.config import LaterPhase, OptimizerConfig, recorded
from laneformer.train.same_run import check_same_run
from tests.support.tiny_recipe import changed, tiny

SHORT = OptimizerConfig(warmup_steps=5)  # for phases of few steps


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
def test_resumed_run_may_change_these_options(changes):
    check_same_run(recorded(tiny()), changed(tiny(), **changes), Path("run"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 61}, "steps (was 60, now 61)"),
        ({"seed": 1}, "seed (was 0, now 1)"),
        ({"data__seed": 1}, "data.seed (was 0, now 1)"),
        ({"data__batch_size": 16}, "data.batch_size (was 8, now 16)"),
        ({"accumulate": 2}, "accumulate (was 1, now 2)"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype (was 'auto', now 'bfloat16')"),
        ({"exchange_dtype": "bfloat16"}, "exchange_dtype (was None, now 'bfloat16')"),
        ({"model__layout": "tp"}, "model.layout (was 'laneformer', now 'tp')"),
        ({"optimizer__beta1": 0.8}, "optimizer.beta1 (was 0.9, now 0.8)"),
    ],
)
def test_resumed_run_may_not_change_these_options(changes, named):
    with pytest.raises(ConfigError) as raised:
        check_same_run(recorded(tiny()), changed(tiny(), **changes), Path("the/run"))
    assert named in str(raised.value) and "the/run" in str(raised.value) and "--run" in str(raised.value)


def test_steps_to_come_may_change():
    """What changes no step that is done is allowed, and reported."""
    constant = changed(tiny(), optimizer__schedule="constant")
    more = changed(constant, steps=90)
    assert check_same_run(recorded(constant), more, Path("run")) == {"steps": (60, 90)}
    decaying = changed(more, optimizer__schedule="wsd", optimizer__decay_fraction=0.3)  # from step 63 on
    assert set(check_same_run(recorded(constant), decaying, Path("run"))) == {
        "steps",
        "optimizer.schedule",
        "optimizer.decay_fraction",
    }
    assert check_same_run(recorded(tiny()), changed(tiny(), steps=80), Path("run"), 48)
    phase = LaterPhase(steps=10, data=tiny().data, optimizer=SHORT)
    added = changed(tiny(), then={"mid": phase})
    assert check_same_run(recorded(tiny()), added, Path("run"))["then.mid.steps"] == (None, 10)
    longer = changed(tiny(), then={"mid": dataclasses.replace(phase, steps=11), "end": phase})
    assert check_same_run(recorded(added), longer, Path("run"), 60)
    skipping = changed(tiny(), skip_steps=("21:25",))
    assert check_same_run(recorded(tiny()), skipping, Path("run"), 20) == {"skip_steps": (None, ["21:25"])}
    again = changed(tiny(), skip_steps=("21:25", "22"))
    assert check_same_run(recorded(skipping), again, Path("run"), 21)
    for before, now, done, named in (
        (constant, changed(constant, steps=40), 50, r"steps \(was 60, now 40\)"),
        (constant, changed(more, optimizer__schedule="cosine"), None, "optimizer.schedule"),
        (constant, changed(more, optimizer__learning_rate=1.0), None, r"optimizer.learning_rate \(was 0.01, now 1.0\)"),
        (tiny(), changed(tiny(), steps=80), 49, r"steps \(was 60, now 80\).*add a phase"),
        (added, longer, 69, r"then\.mid\.steps \(was 10, now 11\)"),
        (added, changed(tiny(), then={"early": phase, "mid": phase}), 61, r"then\.early\."),
        (added, changed(added, steps=61), 61, r"steps \(was 60, now 61\)"),
        (tiny(), skipping, 21, r"skip_steps \(was None, now \['21:25'\]\)"),
        (skipping, again, 22, "skip_steps"),
        (skipping, tiny(), 21, "skip_steps"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_same_run(recorded(before), now, Path("run"), done)


def test_runs_recorded_without_later_fields_resume():
    assert not {"model.hidden_act", "model.gated_mlp", "model.attention_gate"} & recorded(tiny()).keys()
    check_same_run(recorded(tiny()), tiny(), Path("run"))
    other = changed(tiny(), model__hidden_act="gelu")
    check_same_run(recorded(other), other, Path("run"))
    with pytest.raises(ConfigError, match=r"model\.hidden_act \(was None, now 'gelu'\)"):
        check_same_run(recorded(tiny()), other, Path("run"))


def test_added_and_removed_fields_are_named():
    before = recorded(tiny())
    before["gone"] = before.pop("seed")
    with pytest.raises(ConfigError, match=r"gone \(was 0, now None\), seed \(was None, now 0\)"):
        check_same_run(before, tiny(), Path("run"))
