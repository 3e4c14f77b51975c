"""Training configs: errors name bad values, and phases follow each other."""

import dataclasses
import math
from pathlib import Path

import pytest

from laneformer import ConfigError, ModelConfig, RopeScaling
from laneformer.ops import LATER
from laneformer.train.config import LaterPhase, OptimizerConfig, recorded
from laneformer.train.same_run import check_same_run
from tests.support.tiny_recipe import changed, tiny

INF, NAN = math.inf, math.nan
BAD = {  # dataclass -> keyword of `changed` -> bad values; the error names the option and the value
    "TrainConfig": {
        "steps": (0, -3),
        "accumulate": (0, -3, 3),
        "log_every": (0,),
        "validate_every": (0,),
        "save_every": (0,),
        "keep": (0,),
        "loss_chunk": (0,),
        "keep_every": (-1,),
        "z_loss": (-0.5, INF),
        "seed": (-1, 2**32),
        **dict.fromkeys(("compute_dtype", "exchange_dtype", "activation_dtype", "stream_dtype"), ("int8",)),
    },
    "MeshConfig": {"mesh__data": (0, 16), "mesh__lane": (0,), "mesh__host_devices": (0,)},
    "DataConfig": {
        "data__path": ((), "text"),
        "data__weights": ((1.0, 2.0), (0.0,), (INF,)),
        "data__batch_size": (0, -3),
        "data__sequence_length": (0, 33),
        "data__validation_batches": (-1,),
    },
    "OptimizerConfig": {
        **dict.fromkeys(
            [f"optimizer__{name}" for name in ("learning_rate", "eps", "clip_norm", "embedding_rate", "head_rate")],
            (0.0, -1.0, INF, NAN),
        ),
        **dict.fromkeys(("optimizer__beta1", "optimizer__beta2", "optimizer__momentum"), (-0.1, 1.0, NAN)),
        "optimizer__weight_decay": (-0.1, INF, NAN),
        "optimizer__decay_fraction": (-0.1, 1.5, NAN),
        "optimizer__final_fraction": (-0.1, 1.5),
        "optimizer__warmup_steps": (-1,),
        "optimizer__kind": ("sgd",),
    },
    "WatchConfig": {
        **dict.fromkeys(("watch__samples_every", "watch__humaneval_every", "watch__humaneval_problems"), (-1,)),
        **dict.fromkeys(("watch__max_skipped", "watch__sample_tokens", "watch__humaneval_tokens"), (0,)),
        "watch__profile_steps": (0,),
        "watch__max_rise": (0.0, NAN),
    },
    "DistillConfig": {
        "distill__kl_weight": (-1.0, INF),
        "distill__temperature": (0.0, INF),
        "distill__anneal_steps": (-1,),
        "distill__anneal_stages": (0,),
    },
}


@pytest.mark.parametrize("section", BAD)
def test_bad_values_raise(section):
    for option, values in BAD[section].items():
        for value in values:
            with pytest.raises(ConfigError) as error:
                changed(tiny(), **{option: value})
            text = str(error.value)
            # For an empty tuple and for factors of a product, the error contains no value.
            named = value in ((), 16, (1.0, 2.0)) or option == "accumulate" or f"{value}" in text
            assert option.replace("__", ".") in text and named and "\n" not in text, (option, value, text)


def test_experts_by_token_are_refused():
    model = tiny().model.replace(num_experts=4, scoring_func="sigmoid", hash_layers=1)
    with pytest.raises(ConfigError, match=r"model\.hash_layers: only generation is supported"):
        dataclasses.replace(tiny(), model=model)


def test_batch_must_be_a_multiple_of_parts_and_devices():
    assert changed(tiny(), data__batch_size=9).data.batch_size == 9
    with pytest.raises(ConfigError, match=r"accumulate x mesh\.data = 2, got 9"):
        changed(tiny(), data__batch_size=9, accumulate=2, mesh__data=2)


def test_run_folder_follows_name_and_option():
    assert tiny().run_folder == Path("runs/tiny")
    assert changed(tiny(), run=Path("elsewhere")).run_folder == Path("elsewhere")


LATER_FIELDS = [field.name for field in dataclasses.fields(ModelConfig) if field.metadata == LATER]


def test_config_is_frozen_and_recorded_whole():
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
    own = [
        field
        for section in (config, config.optimizer)
        for field in dataclasses.fields(section)
        if field.metadata == LATER
    ]
    assert len(record) == count - len(LATER_FIELDS) - len(own)


def test_later_options_are_recorded_unless_they_have_their_default():
    """Older runs, recorded without these options, must resume, and ablations must find their cells."""
    config, before = tiny(), recorded(tiny())
    assert not before.keys() & {f"model.{name}" for name in LATER_FIELDS}
    check_same_run(before, config, Path("run"))
    other = changed(config, model=config.model.replace(norm_after="lane"))
    assert recorded(other) == before | {"model.norm_after": "lane"}
    for record, now in ((before, other), (recorded(other), config)):
        with pytest.raises(ConfigError, match=r"model\.norm_after"):
            check_same_run(record, now, Path("run"))


@pytest.mark.parametrize(
    ("schedule", "warmup", "fraction", "room"),
    [("wsd", 49, 0.2, 48), ("wsd", 1, 1.0, 0), ("cosine", 61, 0.2, 60), ("constant", 61, 1.0, 60)],
)
def test_warmup_and_decay_must_fit_the_steps(schedule, warmup, fraction, room):
    own = dataclasses.replace(tiny().optimizer, schedule=schedule, decay_fraction=fraction, warmup_steps=warmup)
    with pytest.raises(ConfigError, match=rf"optimizer\.warmup_steps = {warmup}.* steps = 60; .* at most {room}"):
        dataclasses.replace(tiny(), optimizer=own)
    fits = dataclasses.replace(own, warmup_steps=room)
    assert dataclasses.replace(tiny(), optimizer=fits).optimizer == fits


SHORT = OptimizerConfig(warmup_steps=5)  # for phases of few steps


def test_skipped_steps_move_later_batches_up():
    then = {"mid": LaterPhase(steps=10, data=tiny().data, optimizer=SHORT)}
    config = changed(tiny(), then=then, skip_steps=("3:4", "2", "59:62"))
    first, mid = config.phases
    # Steps 1, 2, 3, ... first read batches 0, 1, 4, ...; then step 2 reads the next one.
    assert [first.batch_of(step) for step in range(5)] == [0, 4, 5, 6, 7]
    assert [first.batch_of(step) for step in (57, 58, 59)] == [60, 63, 64]
    assert [mid.batch_of(step) for step in (0, 1, 9)] == [2, 3, 11]
    for spans in (("0:3",), ("5:4",), ("71",), ("a",), ("1:",), ("1:2:3",), ("-1:3",)):
        with pytest.raises(ConfigError, match="skip_steps"):
            changed(tiny(), then=then, skip_steps=spans)


def later(**changes):
    return {"mid": dataclasses.replace(LaterPhase(steps=10, data=tiny().data, optimizer=SHORT), **changes)}


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ({"pretrain": LaterPhase(steps=1, data=tiny().data)}, r"then\.pretrain"),
        (later(steps=0), r"then\.mid\.steps must be at least 1, got 0"),
        (
            later(data=dataclasses.replace(tiny().data, batch_size=9), accumulate=2),
            r"then\.mid\.data\.batch_size .* got 9",
        ),
        (later(sliding_window=0), "sliding_window"),
        (later(optimizer=OptimizerConfig(kind="sgd")), r"then\.mid\.optimizer\.kind 'sgd'; choose adamw, muon"),
        (
            later(optimizer=OptimizerConfig(warmup_steps=9)),
            r"then\.mid\.optimizer\.warmup_steps = 9 and the 2 steps of the decay .* exceed then\.mid\.steps = 10; set "
            r"then\.mid\.optimizer\.warmup_steps to at most 8",
        ),
        (later(weights="int3"), r"unknown then\.mid\.weights 'int3'; choose float32, int4, int8"),
        (later(weights="mxfp4"), r"then\.mid\.weights = mxfp4: groups of 32 do not divide the 4 columns"),
        (later(weights="int4", group="block"), r"mid\.weights = int4: --group block: int4 has scales per 32, 64, 128"),
        (later(group=32), r"then\.mid\.group = 32 needs then\.mid\.weights in a format"),
    ],
)
def test_bad_later_phases_raise(then, message):
    with pytest.raises(ConfigError, match=message):
        changed(tiny(), then=then)


def test_phases_follow_each_other_and_change_the_model():
    long = dataclasses.replace(tiny().data, sequence_length=64, batch_size=2)
    scaling = RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=32)
    config = changed(
        tiny(),
        then={
            "mid": LaterPhase(steps=10, data=tiny().data, optimizer=SHORT, sliding_window=8),
            "long": LaterPhase(
                steps=5, data=long, optimizer=OptimizerConfig(warmup_steps=0), rope_scaling=scaling, rope_theta=500.0
            ),
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
    with pytest.raises(ConfigError, match=r"then\.mid\.steps \(was 10, now 11\)"):
        check_same_run(
            record,
            changed(config, then=config.then | {"mid": dataclasses.replace(config.then["mid"], steps=11)}),
            Path("run"),
        )
