"""ModelConfig: derived values, and errors that name the field, its value and the remedy."""

import ast
import dataclasses
import inspect
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer import ConfigError, LaneformerError, ModelConfig, RopeScaling
from laneformer.blocks.layer import after, after_sum, before
from laneformer.config import (
    LARGEST,
    LARGEST_OTHER,
    AttentionOptions,
    MlpOptions,
    NormOptions,
    Norms,
    RotaryOptions,
    recorded_fields,
)
from laneformer.config.rules import OF_EXPERTS
from laneformer.hf import config_from_hf
from laneformer.hf.fields import Fields
from laneformer.ops import LATER, Activation
from laneformer.weights import parameter_count, parameter_table
from tests.support import reference, tiny

FIELDS = {name: value for name, value in tiny.BASE.items() if name != "model_type"}


def make(**changes) -> ModelConfig:
    """A config from keyword arguments instead of a config.json."""
    return ModelConfig(**(FIELDS | changes))


DENSE_FAMILIES = ("llama", "mistral", "qwen2", "smollm3")


@pytest.mark.parametrize("name", LARGEST)
def test_impossible_sizes_are_refused_before_tables_are_made(name):
    for value in (LARGEST[name] + 1, 10**9 * LARGEST[name], 10**400):
        with pytest.raises(ConfigError, match=f"^{name} = {value} must be a whole number .* at most {LARGEST[name]}$"):
            make(**{name: value})
        dense = [] if name in ("num_lanes", *OF_EXPERTS) else DENSE_FAMILIES
        for family in ("laneformer", *dense):
            with pytest.raises(ConfigError, match=f"^{name} = "):
                config_from_hf(tiny.BASE | {"model_type": family, name: value})
        with pytest.raises(ConfigError, match=f"^{name} = "):
            Fields({name: value}).size(name)
    for value in (LARGEST_OTHER + 1, 10**400):
        with pytest.raises(ConfigError, match=r"^other = [0-9,]+ must be at most"):
            Fields({"other": value}).size("other")


def test_tables_of_the_largest_models_are_built_quickly():
    """For 10^12 weights in 64 lanes, and for the deepest config."""
    began = time.process_time()
    large = ModelConfig(
        vocab_size=2**18,
        hidden_size=2**15,
        intermediate_size=2**16,
        num_hidden_layers=128,
        num_attention_heads=256,
        num_key_value_heads=64,
        num_lanes=64,
        max_position_embeddings=10**7,
    )
    assert parameter_count(large) > 1e12
    deepest = make(num_hidden_layers=LARGEST["num_hidden_layers"], sliding_window=3, swa_layers=list(range(4096)))
    assert len(parameter_table(deepest)) == 3 + 9 * 4096 and time.process_time() - began < 10
    with pytest.raises(ConfigError, match="swa_layers has 5,000 entries"):
        make(sliding_window=3, swa_layers=[0] * 5000)


@given(
    n=st.integers(1, 8),
    s=st.integers(-10, 10),
    unclamped=st.sets(st.integers(0, 7)),
    listed=st.none() | st.sets(st.integers(0, 7)),
    window=st.none() | st.integers(1, 9),
)
def test_layer_windows_equal_the_reference(n, s, unclamped, listed, window):
    unclamped = sorted(layer for layer in unclamped if layer < n)
    listed = None if listed is None or window is None else sorted(layer for layer in listed if layer < n)
    values = {"num_hidden_layers": n, "sliding_window": window, "unclamped_layers": unclamped}
    values |= {"sliding_window_n_layers": s} if listed is None else {"swa_layers": listed}
    config = make(**values)
    assert config.layer_windows == tuple(reference.window_of_layer(FIELDS | values, layer) for layer in range(n))


def test_layer_windows_of_simple_configs_are_exact():
    def windows(**changes) -> tuple:
        return make(num_hidden_layers=4, sliding_window=7, **changes).layer_windows

    assert windows(sliding_window_n_layers=1) == (7, None, None, None)
    assert windows(sliding_window_n_layers=-1) == (None, None, None, 7)
    assert windows(swa_layers=(0, 2), unclamped_layers=(2,)) == (7, None, None, None)
    assert windows() == (None,) * 4


def test_head_size_and_norm_scales_follow_the_options():
    assert make().head_size == 4
    assert make(head_dim=6).head_size == 6
    assert make().lane_norm_scales == (False, False)
    assert make(replicated_rmsn_scale=False).lane_norm_scales == (True, True)
    assert make(replicated_rmsn_scale=False, pre_norm_lane_agg=True).lane_norm_scales == (True, False)


def test_layers_are_the_shares_of_one_lane():
    config = make(sliding_window=3, sliding_window_n_layers=1, head_dim=6, qk_norm=True, norm_eps=1e-3)
    first, *others = config.layers
    assert len(config.layers) == 3 and first.feed_forward == others[0].feed_forward == MlpOptions(
        hidden_size=32, num_lanes=4, columns=6, activation=Activation.SILU, gated=True
    )
    assert first.attention == AttentionOptions(
        hidden_size=32,
        num_lanes=4,
        heads=2,
        kv_heads=1,
        head_dim=6,
        window=3,
        rotary=RotaryOptions(6, 10000.0),
        qkv_bias=False,
        qk_norm="head",
        norm_eps=1e-3,
        attention_gate=False,
    )
    shared = make(num_lanes=8).layers[0].attention
    assert (shared.heads, shared.kv_heads) == (1, 1), "two lanes have copies of a key/value head"
    rotary = RotaryOptions(4, 10000.0)
    assert [layer.attention.rotary for layer in make(nope_layers=[1]).layers] == [rotary, None, rotary]
    assert [layer.attention for layer in others] == [dataclasses.replace(first.attention, window=None)] * 2


def test_norms_follow_the_options():
    lane_scales = {"replicated_rmsn_scale": False, "norm_eps": 1e-3}
    own = NormOptions(hidden_size=32, num_lanes=4, eps=1e-3, per_lane=True)
    shared = dataclasses.replace(own, per_lane=False)
    assert make(**lane_scales, pre_norm_lane_agg=True).norms == Norms(in_layers=own, final=shared)
    found = make(**lane_scales, norm_after="lane").norms
    assert found == Norms(in_layers=own, final=own, norm_after="lane")
    assert (before(found), after(found), after_sum(found)) == (own, own, False)
    sums = make(**lane_scales, norm_before=False, norm_after="sum", layout="tp")
    assert (before(sums.norms), after(sums.norms), after_sum(sums.norms)) == (None, shared, True)
    assert not after_sum(sums.replace(num_lanes=1).norms)
    with pytest.raises(ConfigError, match="norm_before = false requires norm_after"):
        make(norm_before=False)
    assert make(qk_norm_over="projection").layers[0].attention.qk_norm is None
    assert make(qk_norm=True, qk_norm_over="projection", num_lanes=1).layers[0].attention.qk_norm == "projection"
    with pytest.raises(ConfigError, match="num_lanes = 4 with qk_norm_over = 'projection'"):
        make(qk_norm=True, qk_norm_over="projection")


def test_configs_are_immutable_values():
    assert make() == make() and hash(make()) == hash(make())
    assert make(unclamped_layers=[0, 1]) == make(unclamped_layers=(0, 1))
    assert hash(make(unclamped_layers=[0, 1], swa_layers=[], eos_token_id=[2])) is not None
    assert make().replace(layout="tp").layout == "tp"
    with pytest.raises(ConfigError, match="vocab_size = 0"):
        make().replace(vocab_size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().layout = "tp"


def test_every_field_is_documented():
    """--help shows these texts."""
    classes = ModelConfig.__mro__[:-1]  # all but object
    body = [node for one in classes for node in ast.parse(inspect.getsource(one)).body[0].body]
    for field in dataclasses.fields(ModelConfig):
        at = next(i for i, node in enumerate(body) if getattr(getattr(node, "target", None), "id", None) == field.name)
        assert body[at + 1].value.value.strip().endswith("."), field.name


WHOLE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_lanes",
)
NUMBERS = ("rope_theta", "norm_eps", "swiglu_alpha")
LISTS = ("unclamped_layers", "swa_layers", "nope_layers")
BOOLEANS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.type is bool)
NAN, INF = float("nan"), float("inf")
WRONG = {
    **dict.fromkeys(WHOLE, (0, -1, 2.0, "8", None, True, NAN, [4])),
    "broadcast_delay": (-1, 1.5, None, "1", False),
    "head_dim": (0, 1, 3, -2, 4.0, "4", True),
    **dict.fromkeys(NUMBERS, (0, -1.0, NAN, INF, -INF, "1", None, True, 10**400)),
    **dict.fromkeys(BOOLEANS, (1, "true", None)),
    "lm_head_type": ("dense", None, ["lane"]),
    "hidden_act": ("none", "SILU", None, ["silu"]),
    "norm_after": ("mean", True, ["lane"]),
    "qk_norm_over": ("all", None, ["head"]),
    "sliding_window": (0, -3, 2.5, "4", True),
    "sliding_window_n_layers": (1.0, "1", None, True),
    "bos_token_id": (-1, 40, 1.0, "1", [1]),
    "eos_token_id": (2, [40], [-1], ["2"], "2", [None, 1.5]),
    **dict.fromkeys(LISTS, (3, "0", [3], [-1], ["0"], [0.0], [True], {"a": 1})),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name):
    for value in WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            make(**{"sliding_window": 4, name: value})
        text = str(caught.value)
        shown = value[-1] if name in (*LISTS, "eos_token_id") and isinstance(value, list) else value
        assert name in text and str(shown)[:40] in text, (value, text)
        assert "must be" in text or "choose" in text, text
        assert isinstance(caught.value, LaneformerError)


def test_every_boolean_is_in_the_table():
    assert len(BOOLEANS) >= 21 and {"use_early_comm", "qk_norm"} <= {*BOOLEANS}


OLD = {"factor": 2.0, "original_max_position_embeddings": 8}
WRONG_SCALING = [
    ({"type": "dynamic", "factor": 2.0}, "type 'dynamic'; choose linear, llama3 or yarn"),
    ({"type": "linear", "factor": 0.5}, "factor = 0.5 .* at least 1"),
    ({"type": "linear", "factor": NAN}, "factor = nan .*finite"),
    ({"type": "linear", "factor": "2"}, "factor = '2' .*finite number"),
    ({"type": "llama3", "factor": 2.0}, "original_max_position_embeddings = 0"),
    ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings = 0"),
    ({"type": "yarn", **OLD, "original_max_position_embeddings": 8.0}, "original_max_position_embeddings = 8.0"),
    ({"type": "llama3", **OLD, "low_freq_factor": 4.0}, "high_freq_factor = 4.0 .* low_freq_factor = 4.0"),
    ({"type": "llama3", **OLD, "low_freq_factor": 0.0}, "low_freq_factor = 0.0 .* above 0"),
    ({"type": "yarn", **OLD, "beta_fast": INF}, "beta_fast = inf"),
    ({"type": "yarn", **OLD, "beta_slow": 0.0}, "beta_slow = 0.0"),
    ({"type": "yarn", **OLD, "mscale": -1.0}, "mscale = -1.0"),
    ({"type": "yarn", **OLD, "truncate": "no"}, "truncate = 'no'"),
]


def test_wrong_rope_scaling_is_named():
    for values, message in WRONG_SCALING:
        with pytest.raises(ConfigError, match=rf"rope_scaling\.{message}"):
            RopeScaling(**values)


TOGETHER = [
    ({"num_attention_heads": 6}, "num_attention_heads = 6 .*num_key_value_heads = 4"),
    ({"hidden_size": 30}, "hidden_size = 30 .*num_attention_heads = 8.*head_dim"),
    ({"hidden_size": 24}, "head_dim .*= 3 .*even"),
    ({"num_lanes": 16}, "num_lanes = 16 .*num_attention_heads = 8; .*: 1, 2, 4, 8$"),
    ({"num_lanes": 3}, "num_lanes = 3 .*num_key_value_heads = 4; .*: 1, 2$"),
    ({"intermediate_size": 26}, "num_lanes = 4 .*intermediate_size = 26; .*: 1, 2$"),
    ({"lm_head_type": "vocab_parallel", "vocab_size": 41}, "num_lanes = 4 .*vocab_size = 41; .*: 1$"),
    ({"lm_head_type": "lane", "pre_norm_lane_agg": True}, "pre_norm_lane_agg = true .*'replicate'.*'lane'"),
    (
        {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
        "tie_word_embeddings = true .*'replicate'.*'vocab_parallel'",
    ),
    ({"swa_layers": [1]}, r"swa_layers = \[1\] requires sliding_window"),
    ({"swa_layers": [1], "sliding_window": 4, "sliding_window_n_layers": 1}, "swa_layers and sliding_window_n_layers"),
    ({"layout": "dtp(-1)"}, "delta = -1 of layout dtp"),
]


def test_contradicting_values_are_named():
    for changes, message in TOGETHER:
        with pytest.raises(ConfigError, match=message):
            make(**changes)


def test_odd_vocabulary_is_valid_unless_it_is_cut():
    assert make(vocab_size=41).vocab_size == 41
    assert make(vocab_size=41, lm_head_type="lane").vocab_size == 41


def test_later_fields_are_recorded_only_if_they_differ():
    @dataclasses.dataclass
    class Settings:
        size: int
        eps: float = 1e-5
        gate: bool = dataclasses.field(default=False, metadata=LATER)

    assert recorded_fields(Settings(3)) == {"size": 3, "eps": 1e-5}
    assert recorded_fields(Settings(3, gate=True)) == {"size": 3, "eps": 1e-5, "gate": True}
