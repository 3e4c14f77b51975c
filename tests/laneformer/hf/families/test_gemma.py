"""config.json of Gemma, Gemma 2 and Gemma 3: defaults, windows, rotations, softcaps, and a model that takes images."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from laneformer import ConfigError, load
from laneformer.config import RopeScaling, RotaryOptions
from laneformer.hf import config_from_hf
from tests.support import tiny

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 8}
LAYERS = {kind: SIZES | {"model_type": kind, "num_hidden_layers": 12} for kind in ("gemma", "gemma2", "gemma3_text")}


@pytest.mark.parametrize(
    ("kind", "longest", "theta", "caps", "full"),
    [
        ("gemma", 8192, 1e4, (None, None), range(12)),
        ("gemma2", 8192, 1e4, (50.0, 30.0), range(1, 12, 2)),
        ("gemma3_text", 131_072, 1e6, (None, None), (5, 11)),
    ],
)
def test_defaults_equal_those_of_transformers(kind, longest, theta, caps, full):
    """The defaults are copied from the configuration classes of transformers 5.24."""
    found = config_from_hf(LAYERS[kind])
    assert (found.max_position_embeddings, found.rope_theta, found.tie_word_embeddings) == (longest, theta, True)
    assert (found.hidden_act, found.head_size, found.norm_eps) == ("gelu_pytorch_tanh", 256, 1e-6)
    assert found.norm_plus_one and found.embedding_multiplier == math.sqrt(32)
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == caps
    assert found.norm_after == (None if kind == "gemma" else "sum") and found.norm_before
    assert found.qk_norm == (kind == "gemma3_text")
    assert found.layer_windows == tuple(None if n in full else 4096 for n in range(12))
    scale = None if kind == "gemma" else 1 / 16
    assert {layer.attention.scale for layer in found.layers} == {scale}
    local = RotaryOptions(256, 1e4)
    expected = [RotaryOptions(256, theta) if n in full else local for n in range(12)]
    assert [layer.attention.rotary for layer in found.layers] == expected


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_pattern_of_windows_has_two_names(name):
    found = config_from_hf(LAYERS["gemma3_text"] | {name: 4, "sliding_window": 9})
    assert found.layer_windows == (9, 9, 9, None) * 3
    listed = {"layer_types": ["full_attention", *["sliding_attention"] * 11]}
    assert config_from_hf(LAYERS["gemma3_text"] | {name: 4} | listed).layer_windows == (None, *(4096,) * 11)
    assert config_from_hf(LAYERS["gemma3_text"] | {"sliding_window": None}).rope_local_base_freq is None


def test_rotations_of_older_and_newer_files_are_equal():
    scaled = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": scaled}
    newer = {
        "rope_parameters": {
            "full_attention": scaled | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    }
    found = config_from_hf(LAYERS["gemma3_text"] | older)
    assert found == config_from_hf(LAYERS["gemma3_text"] | newer)
    assert found.layers[5].attention.rotary == RotaryOptions(256, 5e5, RopeScaling(type="linear", factor=8.0))
    assert found.layers[4].attention.rotary == RotaryOptions(256, 300.0)


def test_null_is_no_softcap():
    found = config_from_hf(LAYERS["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": 5})
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == (None, 5)


def test_gelu_of_the_first_files_is_its_approximation():
    assert config_from_hf(LAYERS["gemma"] | {"hidden_act": "gelu"}).hidden_act == "gelu_pytorch_tanh"
    assert config_from_hf(LAYERS["gemma"] | {"hidden_act": "silu"}).hidden_act == "silu"
    assert config_from_hf(LAYERS["gemma2"] | {"hidden_activation": "gelu"}).hidden_act == "gelu"


def test_published_config_of_a_model_for_images_is_read():
    """Gemma 3 4B: text_config has few fields, end tokens are outside."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    found = config_from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}})
    assert (found.vocab_size, found.num_attention_heads, found.num_key_value_heads) == (262_208, 8, 4)
    assert (found.eos_token_id, found.bos_token_id, found.head_size) == ((1, 106), 2, 256)
    assert found.layer_windows == (((1024,) * 5 + (None,)) * 6)[:34]


def test_language_model_of_a_model_for_images_is_loaded(tmp_path):
    folder = tiny.TESTS / "dense" / "gemma3"
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    unsaid = ("rope_theta", "rope_local_base_freq", "max_position_embeddings", "hidden_activation", "eos_token_id")
    text = {name: value for name, value in values.items() if name not in unsaid}
    outside = {"model_type": "gemma3", "eos_token_id": values["eos_token_id"], "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outside | {"text_config": text}))
    inner = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    images = {"vision_tower.a.weight": np.ones((2, 2), "float32"), "multi_modal_projector.b": np.ones(2, "float32")}
    save_file(inner | images, tmp_path / "model.safetensors")
    expected, found = load(folder), load(tmp_path)
    assert found.config == expected.config.replace(max_position_embeddings=131_072)
    for path, weight in expected.weights().items():
        np.testing.assert_array_equal(found.weights()[path], weight, err_msg=path)


@pytest.mark.parametrize(
    ("kind", "changes", "shown"),
    [
        ("gemma2", {"attention_bias": True}, "attention_bias"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True changes all"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping = '30'"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq = 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type = 'linear'",
        ),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention is an object"),
    ],
)
def test_unsupported_values_name_the_field(kind, changes, shown):
    with pytest.raises(ConfigError) as error:
        config_from_hf(LAYERS[kind] | changes)
    assert shown in str(error.value)
