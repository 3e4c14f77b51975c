"""The registry of families: any config.json gives a config or a clear error; missing and null fields mean defaults."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import CheckpointError, ConfigError, LaneformerError, ModelConfig, load
from laneformer.hf import FAMILIES, config_from_hf, config_to_hf, dimensions_from_hf, find_family, read_hf_config
from laneformer.hf.fields import REQUIRED
from tests.support import tiny
from tests.support.hf.configs import MIXTURES, with_missing

OPTIONAL = {  # model_type -> optional fields, with the meaning of a missing or null one
    "laneformer_tp": {
        "head_dim": 4,
        "max_position_embeddings": 4096,
        "num_lanes": 1,
        "layout": "laneformer",
        "broadcast_delay": 2,
        "use_comm": True,
        "use_early_comm": True,
        "early_lands_twice": True,
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": False,
        "replicated_rmsn_scale": True,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "sliding_window_n_layers": 0,
        "unclamped_layers": [],
        "swa_layers": None,
        "rope_theta": 10000.0,
        "rope_scaling": {},
        "rope_scaling_args": {},
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "qk_norm": False,
        "qk_norm_over": "head",
        "norm_before": True,
        "norm_after": None,
        "nope_layers": [],
        "bos_token_id": None,
        "eos_token_id": [],
        "hidden_act": "silu",
        "gated_mlp": True,
        "attention_gate": False,
    },
    "laneformer": {"use_attention_comm": True, "use_mlp_comm": True, "num_key_value_heads": 8},
    "llama": {
        "num_key_value_heads": 8,
        "head_dim": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": {},
        "rope_parameters": {"rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "arcee": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "mlp_bias": False},
    "mistral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "head_dim": 4,
        "tie_word_embeddings": False,
        "layer_types": None,
    },
    "ministral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "layer_types": None},
    "qwen2": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    "qwen3": {"max_position_embeddings": 32768, "use_sliding_window": False, "num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "attention_bias": False,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "rope_scaling": {},
        "layer_types": None,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "layer_types": None,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window_pattern": 4, "layer_types": None},
}


def meaning(config: ModelConfig) -> ModelConfig:
    """The config with head_dim written out."""
    return config.replace(head_dim=config.head_size)


@settings(max_examples=200)
@given(data=st.data(), kind=st.sampled_from(sorted(OPTIONAL)))
def test_null_and_missing_fields_mean_the_default(data, kind):
    required = {"model_type": kind} | {name: tiny.BASE[name] for name in REQUIRED}
    found = config_from_hf(required | with_missing(data.draw, OPTIONAL[kind]))
    assert meaning(found) == meaning(config_from_hf(required | OPTIONAL[kind])) == meaning(config_from_hf(required))
    usual = OPTIONAL[kind].get("num_key_value_heads", required["num_attention_heads"])
    assert found.num_key_value_heads == usual


def test_unknown_fields_are_reported(caplog):
    with caplog.at_level(logging.WARNING, "laneformer"):
        tiny.config(torch_dtype="float32", use_cache=True)
        assert not caplog.records
        tiny.config(brodcast_delay=3)
    assert "brodcast_delay" in caplog.text


WRONG = [
    ({"model_type": None}, ["None", *FAMILIES]),
    ({"model_type": "gpt2"}, ["'gpt2'", *FAMILIES]),
    ({"model_type": ["llama"]}, ["['llama']"]),
    ({"model_type": "olmo2", "attention_bias": True}, ["attention_bias"]),
    ({"norm_after": "sum"}, ["norm_after = 'sum'", "laneformer"]),
    ({"vocab_size": None}, ["vocab_size missing"]),
    ({"vocab_size": None, "hidden_size": None}, ["vocab_size, hidden_size missing"]),
    ({"hidden_act": "relu"}, ["hidden_act 'relu'", "silu, gelu, gelu_pytorch_tanh, relu2"]),
    ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']"]),
    ({"gated_mlp": "no"}, ["gated_mlp = 'no'"]),
    ({"norm_eps": float("nan")}, ["norm_eps = nan"]),
    ({"rope_theta": float("inf")}, ["rope_theta = inf"]),
    ({"rope_theta": -1}, ["rope_theta = -1"]),
    ({"hidden_size": "32"}, ["hidden_size = '32'"]),
    ({"num_lanes": 3}, ["num_lanes = 3", "num_key_value_heads = 4"]),
    ({"use_comm": "yes"}, ["use_attention_comm = 'yes'"]),
    ({"swa_layers": 3}, ["swa_layers = 3"]),
    ({"layout": ["tp"]}, ["layout", "['tp']"]),
    ({"model_type": "llama", "max_position_embeddings": "9"}, ["max_position_embeddings = '9'"]),
    ({"model_type": "llama", "text_config": {"model_type": "llama"}}, ["text_config"]),
]


@pytest.mark.parametrize(("changes", "shown"), WRONG)
def test_wrong_values_name_file_and_field(tmp_path, changes, shown):
    """config.json has NaN and Infinity as Python writes and reads them."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.values(**changes)))
    with pytest.raises(ConfigError) as caught:
        read_hf_config(tmp_path)
    for text in (str(tmp_path / "config.json"), *shown):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_have_dimensions_and_run_or_are_refused(tmp_path, values):
    assert dimensions_from_hf(values).parts
    if find_family(values).config_from is not None:
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        text = values.get("text_config", values)
        assert config_from_hf(values).num_experts in [text.get(name) for name in names]
        return
    (tmp_path / "config.json").write_text(json.dumps(values))
    kind = values.get("text_config", values)["model_type"]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    for text in (str(tmp_path / "config.json"), repr(kind), "infer roofline"):
        assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "laneformer", "olmo2"])
def test_models_without_experts_have_no_dimensions(kind):
    with pytest.raises(ConfigError, match=kind):
        dimensions_from_hf(tiny.values(model_type=kind))


def test_every_family_runs_or_has_dimensions():
    for family in FAMILIES.values():
        assert (family.config_from is None) == (family.sources is None), family.name
        assert family.config_from is not None or family.dimensions is not None, family.name


@pytest.mark.parametrize("text", ["", "{", '{"vocab_size": 1', "[1, 2]", "3", "null", '"llama"', "\ufffe{}"])
def test_damaged_files_are_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_and_undecodable_files_are_named(tmp_path):
    for content in (None, b"\xff\xfe\x00"):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_hf_config(tmp_path)
        assert str(tmp_path / "config.json") in str(caught.value)


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 50),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "x"]), st.none() | st.floats() | st.text(max_size=3), max_size=3
    ),
)


fields = sorted(
    set(config_to_hf(tiny.config(), "laneformer"))
    | {"use_comm", "rope_scaling_args", "rope_parameters", "rms_norm_eps", "hidden_act"}
    | {"layer_types", "max_window_layers", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}
    | {"partial_rotary_factor", "text_config", "attention_bias"}
)


@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from(fields), json_values, min_size=1, max_size=2),
    kind=st.sampled_from(sorted(FAMILIES)),
)
def test_any_values_give_a_config_or_a_clear_error(changes, kind):
    try:
        config_from_hf(tiny.values(model_type=kind) | changes)
    except LaneformerError as error:
        assert len(str(error)) > 10
