"""ModelConfig: derived values, and errors that name the field, its value and the remedy."""

import ast
import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer import ConfigError, LaneformerError, ModelConfig, RopeScaling
from tests.support import reference, tiny

FIELDS = {name: value for name, value in tiny.BASE.items() if name != "model_type"}


def make(**changes) -> ModelConfig:
    """A config from keyword arguments, as Python code makes it."""
    return ModelConfig(**(FIELDS | changes))


@given(
    n=st.integers(1, 8),
    s=st.integers(-10, 10),
    unclamped=st.sets(st.integers(0, 7)),
    listed=st.none() | st.sets(st.integers(0, 7)),
    window=st.none() | st.integers(1, 9),
)
def test_windows_of_the_layers(n, s, unclamped, listed, window):
    unclamped = sorted(layer for layer in unclamped if layer < n)
    listed = None if listed is None or window is None else sorted(layer for layer in listed if layer < n)
    values = {"num_hidden_layers": n, "sliding_window": window, "unclamped_layers": unclamped}
    values |= {"sliding_window_n_layers": s} if listed is None else {"swa_layers": listed}
    config = make(**values)
    assert config.layer_windows == tuple(reference.window_of_layer(FIELDS | values, layer) for layer in range(n))


def test_windows_written_out():
    assert make(num_hidden_layers=4, sliding_window=7, sliding_window_n_layers=1).layer_windows == (7, None, None, None)
    assert make(num_hidden_layers=4, sliding_window=7, sliding_window_n_layers=-1).layer_windows == (
        None,
        None,
        None,
        7,
    )
    assert make(num_hidden_layers=4, sliding_window=7, swa_layers=(0, 2), unclamped_layers=(2,)).layer_windows == (
        7,
        None,
        None,
        None,
    )
    assert make(num_hidden_layers=4, sliding_window=7).layer_windows == (None,) * 4


def test_head_size_and_norm_scales():
    assert make().head_size == 4
    assert make(head_dim=6).head_size == 6
    assert make().lane_norm_scales == (False, False)
    assert make(replicated_rmsn_scale=False).lane_norm_scales == (True, True)
    assert make(replicated_rmsn_scale=False, pre_norm_lane_agg=True).lane_norm_scales == (True, False)


def test_configs_are_values():
    assert make() == make() and hash(make()) == hash(make())
    assert make(unclamped_layers=[0, 1]) == make(unclamped_layers=(0, 1))
    assert hash(make(unclamped_layers=[0, 1], swa_layers=[], eos_token_id=[2])) is not None
    assert make().replace(layout="tp").layout == "tp"
    with pytest.raises(ConfigError, match="vocab_size = 0"):
        make().replace(vocab_size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().layout = "tp"


def test_every_field_says_what_it_is():
    """--help is made of these texts."""
    body = ast.parse(inspect.getsource(ModelConfig)).body[0].body
    for field in dataclasses.fields(ModelConfig):
        at = next(i for i, node in enumerate(body) if getattr(getattr(node, "target", None), "id", None) == field.name)
        assert body[at + 1].value.value.strip().endswith("."), field.name


WHOLE = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_lanes",
]
NAN, INF = float("nan"), float("inf")
WRONG = [
    *((name, value) for name in WHOLE for value in (0, -1, 2.0, "8", None, True, NAN, [4])),
    *(("broadcast_delay", value) for value in (-1, 1.5, None, "1", False)),
    *(("head_dim", value) for value in (0, 1, 3, -2, 4.0, "4", True)),
    *(
        (name, value)
        for name in ("rope_theta", "norm_eps")
        for value in (0, -1.0, NAN, INF, -INF, "1", None, True, 10**400)
    ),
    *(
        (name, 1)
        for name in (
            "use_early_comm",
            "early_lands_twice",
            "use_attention_comm",
            "use_mlp_comm",
            "pre_norm_lane_agg",
            "replicated_rmsn_scale",
            "tie_word_embeddings",
            "qkv_bias",
            "qk_norm",
        )
    ),
    ("use_mlp_comm", "true"),
    ("tie_word_embeddings", None),
    ("lm_head_type", "dense"),
    ("lm_head_type", None),
    ("lm_head_type", ["lane"]),
    *(("sliding_window", value) for value in (0, -3, 2.5, "4", True)),
    *(("sliding_window_n_layers", value) for value in (1.0, "1", None, True)),
    *(
        (name, value)
        for name in ("unclamped_layers", "swa_layers")
        for value in (3, "0", [3], [-1], ["0"], [0.0], [True], {"a": 1})
    ),
    *(("bos_token_id", value) for value in (-1, 40, 1.0, "1", [1])),
    *(("eos_token_id", value) for value in (2, [40], [-1], ["2"], "2", [None, 1.5])),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_values_are_named(name, value):
    with pytest.raises(ConfigError) as caught:
        make(**{"sliding_window": 4, name: value})
    text = str(caught.value)
    shown = (
        value[-1] if name in ("unclamped_layers", "swa_layers", "eos_token_id") and isinstance(value, list) else value
    )
    assert name in text and str(shown)[:40] in text
    assert any(word in text for word in ("write", "must be", "known are"))
    assert isinstance(caught.value, LaneformerError)


OLD = {"factor": 2.0, "original_max_position_embeddings": 8}
WRONG_SCALING = [
    (
        {"type": "dynamic", "factor": 2.0},
        "rope_scaling.type = 'dynamic'.*linear, llama3 and yarn.*leave rope_scaling out",
    ),
    ({"type": "linear", "factor": 0.5}, "rope_scaling.factor = 0.5.*at least 1"),
    ({"type": "linear", "factor": NAN}, "rope_scaling.factor = nan.*finite"),
    ({"type": "linear", "factor": "2"}, "rope_scaling.factor = '2'.*finite number"),
    ({"type": "llama3", "factor": 2.0}, "rope_scaling.original_max_position_embeddings = 0"),
    ({"type": "yarn", "factor": 2.0}, "rope_scaling.original_max_position_embeddings = 0"),
    (
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8.0},
        "original_max_position_embeddings = 8.0.*whole number",
    ),
    ({"type": "llama3", **OLD, "low_freq_factor": 4.0}, "high_freq_factor = 4.0 must be greater"),
    ({"type": "llama3", **OLD, "low_freq_factor": 0.0}, "low_freq_factor = 0.0.*above 0"),
    ({"type": "yarn", **OLD, "beta_fast": INF}, "beta_fast = inf"),
    ({"type": "yarn", **OLD, "mscale": -1.0}, "mscale = -1.0"),
    ({"type": "yarn", **OLD, "truncate": "no"}, "truncate = 'no'.*true or false"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_SCALING)
def test_wrong_rope_scaling(values, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**values)


CONTRADICTIONS = [
    ({"num_attention_heads": 6}, "num_attention_heads = 6 must be a multiple of num_key_value_heads = 4"),
    ({"hidden_size": 30}, "hidden_size = 30 is not a multiple of num_attention_heads = 8.*give head_dim"),
    ({"hidden_size": 24}, "head_dim .*= 3 must be even"),
    (
        {"num_lanes": 8},
        "num_lanes = 8 does not divide num_key_value_heads = 4: .*lane counts that fit below it: 1, 2, 4$",
    ),
    ({"num_lanes": 3}, "num_lanes = 3 does not divide num_key_value_heads = 4.*1, 2$"),
    ({"intermediate_size": 26}, "num_lanes = 4 does not divide intermediate_size = 26.*1, 2$"),
    ({"lm_head_type": "vocab_parallel", "vocab_size": 41}, "num_lanes = 4 does not divide vocab_size = 41.*1$"),
    (
        {"lm_head_type": "lane", "pre_norm_lane_agg": True},
        "pre_norm_lane_agg = true needs lm_head_type = 'replicate'.*'lane'",
    ),
    (
        {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
        "tie_word_embeddings = true needs lm_head_type = 'replicate'",
    ),
    ({"swa_layers": [1]}, r"swa_layers = \[1\] needs sliding_window"),
    (
        {"swa_layers": [1], "sliding_window": 4, "sliding_window_n_layers": 1},
        "swa_layers and sliding_window_n_layers.*give one",
    ),
    ({"layout": "dtp(-1)"}, "layout dtp: delta = -1"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_values_that_do_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_odd_vocabularies_are_fine_where_no_lane_owns_a_part():
    assert make(vocab_size=41).vocab_size == 41
    assert make(vocab_size=41, lm_head_type="lane").vocab_size == 41
