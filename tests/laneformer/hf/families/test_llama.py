"""config.json of Llama and the families that use its names: fields, defaults, windows, and values that are refused."""

import logging

import pytest

from laneformer import ConfigError
from laneformer.blocks.layer import after_sum
from laneformer.hf import config_from_hf

DENSE_TYPES = ("llama", "arcee", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "olmo2", "exaone4")
DENSE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 8}


def test_fields_of_dense_families_are_read():
    llama = config_from_hf(DENSE | {"model_type": "llama", "rms_norm_eps": 1e-6}, num_lanes=2)
    assert (llama.num_key_value_heads, llama.num_lanes, llama.layout, llama.norm_eps) == (8, 2, "tp", 1e-6)
    assert config_from_hf(DENSE | {"model_type": "llama"}).num_lanes == 1
    qwen2 = config_from_hf(DENSE | {"model_type": "qwen2", "num_key_value_heads": 4})
    assert qwen2.qkv_bias and not qwen2.qk_norm
    qwen3 = config_from_hf(DENSE | {"model_type": "qwen3", "head_dim": 6, "tie_word_embeddings": True})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_size == 6 and qwen3.tie_word_embeddings


@pytest.mark.parametrize("kind", DENSE_TYPES)
def test_defaults_equal_those_of_transformers(kind):
    """The defaults are copied from the configuration classes of transformers 5.23."""
    longest, theta, tied = {
        "llama": (2048, 10000.0, False),
        "arcee": (4096, 10000.0, False),
        "mistral": (131072, 10000.0, False),
        "ministral": (131072, 10000.0, False),
        "qwen2": (32768, 10000.0, False),
        "qwen3": (32768, 10000.0, False),
        "smollm3": (32768, 2000000.0, True),
        "olmo2": (2048, 10000.0, False),
        "exaone4": (2048, 10000.0, False),
    }[kind]
    found = config_from_hf(DENSE | {"model_type": kind})
    assert (found.max_position_embeddings, found.rope_theta, found.tie_word_embeddings) == (longest, theta, tied)
    assert found.norm_eps == (1e-5 if kind in ("arcee", "olmo2", "exaone4") else 1e-6)
    assert (found.hidden_act, found.gated_mlp) == (("relu2", False) if kind == "arcee" else ("silu", True))
    assert found.num_key_value_heads == 8 and found.rope_scaling is None
    assert found.head_size == (128 if kind == "qwen3" else 4)
    assert found.bos_token_id is None and found.eos_token_id == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_pytorch_tanh"), ("relu2", "relu2"), (None, "silu")],
)
def test_activation_names_of_transformers_are_read(name, meant):
    found = config_from_hf(DENSE | {"model_type": "llama", "hidden_act": name})
    assert found.hidden_act == meant and found.gated_mlp


@pytest.mark.parametrize(("kind", "more"), [("qwen2", {}), ("qwen3", {"head_dim": 4})])
def test_windows_of_qwen_are_read(kind, more):
    window = DENSE | {"model_type": kind, "sliding_window": 5, "use_sliding_window": True} | more
    assert config_from_hf(window | {"max_window_layers": 2}).layer_windows == (None, None, 5)
    assert config_from_hf(window | {"max_window_layers": 0}).layer_windows == (5, 5, 5)
    assert config_from_hf(window | {"max_window_layers": None}).layer_windows == (None, None, None)  # 28
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_from_hf(window | {"layer_types": kinds}).layer_windows == (5, None, 5)
    assert config_from_hf(window | {"use_sliding_window": False}).layer_windows == (None, None, None)
    first = window | {"max_window_layers": 0}
    assert config_from_hf(first | {"sliding_window": None}).layer_windows == (None, None, None)
    del first["sliding_window"]
    assert config_from_hf(first).layer_windows == (4096, 4096, 4096)


def test_windows_of_mistral_are_read():
    mistral = DENSE | {"model_type": "mistral", "head_dim": 6}
    assert config_from_hf(mistral | {"sliding_window": 5}).layer_windows == (5, 5, 5)
    assert config_from_hf(mistral | {"sliding_window": 5}).head_size == 6
    assert config_from_hf(mistral | {"sliding_window": None}).layer_windows == (None, None, None)
    assert config_from_hf(mistral).layer_windows == (4096, 4096, 4096)
    uniform = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3}
    assert config_from_hf(mistral | uniform).layer_windows == (5, 5, 5)


def test_windows_of_ministral_are_read():
    ministral = DENSE | {"model_type": "ministral", "sliding_window": 5}
    assert config_from_hf(ministral).layer_windows == (5, 5, 5)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert config_from_hf(ministral | {"layer_types": kinds}).layer_windows == (5, None, None)
    assert config_from_hf(ministral | {"layer_types": kinds, "sliding_window": None}).layer_windows == (None,) * 3


def test_windows_of_smollm3_are_read():
    smollm3 = DENSE | {"model_type": "smollm3", "no_rope_layers": [1, 1, 1], "sliding_window": 5}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert config_from_hf(smollm3 | {"use_sliding_window": True}).layer_windows == (None, None, None)
    listed = smollm3 | {"use_sliding_window": True, "layer_types": kinds}
    assert config_from_hf(listed).layer_windows == (None, 5, None)
    assert config_from_hf(smollm3 | {"layer_types": kinds}).layer_windows == (None, None, None)


def test_layers_without_rotation_are_read():
    smollm3 = DENSE | {"model_type": "smollm3", "num_hidden_layers": 8}
    assert config_from_hf(smollm3).nope_layers == (3, 7)
    assert config_from_hf(smollm3 | {"no_rope_layer_interval": 3}).nope_layers == (2, 5)
    assert config_from_hf(smollm3 | {"no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 0]}).nope_layers == (1, 2, 7)
    exaone4 = DENSE | {"model_type": "exaone4", "num_hidden_layers": 8}
    found = config_from_hf(exaone4)
    assert found.nope_layers == (3, 7) and found.layer_windows == ((4096,) * 3 + (None,)) * 2
    full = config_from_hf(exaone4 | {"sliding_window": None})
    assert full.nope_layers == () and full.layer_windows == (None,) * 8
    named = {
        "sliding_window": 5,
        "sliding_window_pattern": "LG",
        "layer_types": ["full_attention", *["sliding_attention"] * 7],
    }
    found = config_from_hf(exaone4 | named)
    assert found.nope_layers == (0,) and found.layer_windows == (None, *(5,) * 7)


def test_norms_after_modules_are_read():
    olmo2 = config_from_hf(DENSE | {"model_type": "olmo2"})
    assert (olmo2.norm_before, olmo2.norm_after) == (False, "sum")
    assert olmo2.layers[0].attention.qk_norm == "projection"
    exaone4 = config_from_hf(DENSE | {"model_type": "exaone4"}, num_lanes=2)
    assert not exaone4.norm_before and after_sum(exaone4.norms)
    assert exaone4.layers[0].attention.qk_norm == "head"


def test_llama_ignores_windows_and_reports_it(caplog):
    with caplog.at_level(logging.WARNING, "laneformer"):
        found = config_from_hf(DENSE | {"model_type": "llama", "sliding_window": 5})
    assert found.layer_windows == (None, None, None) and "sliding_window" in caplog.text


SLIDING = {"use_sliding_window": True, "sliding_window": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "shown"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("smollm3", {"attention_bias": "no"}, "attention_bias = 'no'"),
        ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("arcee", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", SLIDING | {"num_hidden_layers": "3"}, "num_hidden_layers = '3'"),
        ("qwen2", SLIDING | {"sliding_window": 0}, "sliding_window = 0"),
        ("qwen2", SLIDING | {"max_window_layers": -1}, "max_window_layers = -1"),
        ("qwen2", SLIDING | {"layer_types": 3}, "layer_types = 3"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window = 1"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": "4"}, "sliding_window = '4'"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
        ("olmo2", {"attention_bias": True}, "attention_bias"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1"),
    ],
)
def test_unsupported_values_name_the_field(kind, changes, shown):
    with pytest.raises(ConfigError) as error:
        config_from_hf(DENSE | {"model_type": kind} | changes)
    assert shown in str(error.value)


@pytest.mark.parametrize("lanes", [3, 16, 0, -1])
def test_unfit_numbers_of_lanes_are_refused(lanes):
    with pytest.raises(ConfigError, match=f"num_lanes = {lanes}"):
        config_from_hf(DENSE | {"model_type": "llama"}, num_lanes=lanes)
