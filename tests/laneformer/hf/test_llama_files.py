"""Models that are written as `llama`: the files that they came from, and the logits of what is loaded again."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import laneformer
from laneformer.errors import ConfigError
from tests.support import tiny
from tests.support.paths import ROOT

DENSE = ROOT / "tests" / "dense"


def files(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama_yarn", "llama_linear", "llama_relu2"])
@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_tensors_and_config_are_those_of_transformers(tmp_path, name, lanes):
    """With 8 lanes and 4 key/value heads, two lanes have a copy of each head."""
    model = laneformer.load(DENSE / name, num_lanes=lanes)
    folder = laneformer.save_hf(model, tmp_path / "out", spelling="llama")
    found, expected = files(folder), files(DENSE / name)
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == expected[key].dtype and (found[key] == expected[key]).all() for key in expected)
    values, published = (json.loads((path / "config.json").read_bytes()) for path in (folder, DENSE / name))
    same = (
        "model_type",
        "architectures",
        "hidden_act",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    )
    assert {key: values[key] for key in same} == {key: published[key] for key in same}
    again = laneformer.load(folder, num_lanes=lanes)
    assert again.config.replace(bos_token_id=None) == model.config.replace(bos_token_id=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "laneformer", "early_lands_twice": True},
        pytest.param(
            {"layout": "dtp(2)", "lm_head_type": "lane", "replicated_rmsn_scale": False}, marks=pytest.mark.slow
        ),
        pytest.param({"layout": "none", "lm_head_type": "vocab_parallel"}, marks=pytest.mark.slow),
        pytest.param({"layout": "tp", "tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)
def test_one_lane_is_a_llama(tmp_path, changes):
    usual = {"num_lanes": 1, "sliding_window": None, "qkv_bias": False, "qk_norm": False}
    model = tiny.random_model(tiny.values(**usual | changes))
    folder = laneformer.save_hf(model, tmp_path / "out", spelling="llama")
    assert json.loads((folder / "config.json").read_bytes())["model_type"] == "llama"
    again, ids = laneformer.load(folder), np.arange(12)[None] % 40
    assert again.config.layout == "tp" and again.config.lm_head_type == "replicate"
    np.testing.assert_allclose(again(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gated_mlp": False}, "gated_mlp = False"),
        ({"sliding_window": 4, "sliding_window_n_layers": 1}, "sliding_window = 4"),
        ({"nope_layers": (1,)}, "nope_layers"),
        ({"num_lanes": 2, "layout": "laneformer"}, "layout laneformer of 2 lanes"),
        ({"num_lanes": 2, "layout": "none"}, "layout none of 2 lanes"),
        ({"layout": "parallel"}, "layout parallel of 1 lanes"),
        ({"layout": "ladder"}, "layout ladder of 1 lanes"),
        ({"num_lanes": 2, "lm_head_type": "lane"}, "lm_head_type = 'lane'"),
        ({"num_lanes": 2, "replicated_rmsn_scale": False}, "norm has different values in different lanes"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    usual = {"num_lanes": 1, "layout": "tp", "sliding_window": None, "qkv_bias": False, "qk_norm": False}
    model = tiny.random_model(tiny.values(**usual | changes))
    with pytest.raises(ConfigError, match=message):
        laneformer.save_hf(model, tmp_path / "out", spelling="llama")


def test_quantized_weights_are_refused(tmp_path):
    model = laneformer.load(DENSE / "llama2", "bfloat16")
    with pytest.raises(ConfigError, match="add --weights bfloat16"):
        laneformer.save_hf(model, tmp_path / "out", spelling="llama", weights="bf12")


@pytest.mark.parametrize(("name", "field"), [("qwen3", "qk_norm"), ("qwen2", "qkv_bias"), ("olmo2", "norm_before")])
def test_other_families_are_refused(tmp_path, name, field):
    with pytest.raises(ConfigError, match=f"{field} = "):
        laneformer.save_hf(laneformer.load(DENSE / name), tmp_path / "out", spelling="llama")
