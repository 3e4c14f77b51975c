"""gpt-oss: fields and defaults of config.json, MXFP4 in its files, the transposed matrices, and damaged folders."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer
from laneformer import CheckpointError, ConfigError
from laneformer.hf import config_from_hf
from laneformer.hf.rope import interleave
from laneformer.quantized import E2M1
from tests.support.paths import MOE

SMALL = {
    "model_type": "gpt_oss",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
FIRST = "model.layers.0.mlp.experts"


def test_defaults_equal_those_of_transformers():
    """The defaults are copied from transformers' configuration class."""
    found = config_from_hf(SMALL)
    assert (found.num_key_value_heads, found.head_size, found.max_position_embeddings) == (8, 64, 131072)
    assert (found.num_experts, found.num_experts_per_tok, found.moe_intermediate_size) == (128, 4, 24)
    assert (found.rope_theta, found.norm_eps, found.tie_word_embeddings) == (150000.0, 1e-5, False)
    assert found.layer_windows == (128, None, 128)
    rope = found.rope_scaling
    assert (rope.type, rope.factor, rope.original_max_position_embeddings, rope.truncate) == ("yarn", 32.0, 4096, False)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    attention, experts = found.layers[0]
    assert attention.sinks and attention.qkv_bias and attention.out_bias
    assert (
        experts.router_bias and experts.biases and experts.normalized and (experts.limit, experts.alpha) == (7.0, 1.702)
    )


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"head_dim": None}, {"head_size": 4}),
        ({"num_key_value_heads": None, "num_attention_heads": 4}, {"num_key_value_heads": 4}),
        ({"num_experts": 6}, {"num_experts": 6}),
        ({"num_local_experts": 8, "num_experts": 6}, {"num_experts": 8}),
        ({"experts_per_token": 2}, {"num_experts_per_tok": 2}),
        ({"num_experts_per_tok": 3, "experts_per_token": 2}, {"num_experts_per_tok": 3}),
        ({"attention_bias": False}, {"qkv_bias": False, "out_bias": False, "router_bias": True, "expert_bias": True}),
        ({"swiglu_limit": 5, "swiglu_alpha": 1.5}, {"swiglu_limit": 5, "swiglu_alpha": 1.5}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"sliding_window": 500}, {"layer_windows": (500, None, 500)}),
        ({"layer_types": ["full_attention"] * 3, "sliding_window": None}, {"layer_windows": (None,) * 3}),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 100.0}, {"rope_scaling": None, "rope_theta": 100.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_scaling": None, "rope_theta": 7.0}),
    ],
    ids=str,
)
def test_fields_set_the_config(changes, meant):
    found = config_from_hf(SMALL | changes)
    assert {name: getattr(found, name) for name in meant} == meant


def test_all_spellings_of_rope_are_read():
    """A null scaling is the default scaling. transformers 5 writes base and scaling under one name."""
    usual = config_from_hf(SMALL)
    assert config_from_hf(SMALL | {"rope_scaling": None, "rope_parameters": None}) == usual
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
    older = config_from_hf(SMALL | {"rope_scaling": yarn, "rope_theta": 50.0})
    assert config_from_hf(SMALL | {"rope_parameters": yarn | {"rope_theta": 50.0}}) == older
    assert older.rope_scaling.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'silu', got 'gelu'"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0"),
        ({"swiglu_alpha": "x"}, "swiglu_alpha = 'x'"),
        ({"sliding_window": None}, "sliding_window = null"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
    ],
    ids=str,
)
def test_unsupported_values_name_the_field(changes, shown):
    with pytest.raises(ConfigError) as error:
        config_from_hf(SMALL | changes)
    assert shown in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("lanes", [1, 4])
def test_blocks_and_scales_stay_packed(lanes):
    """Codes and scales of gate and up are every second row of the file's tensors, also with dtype float32."""
    weights = laneformer.load(MOE / "gpt_oss_2", dtype="float32", num_lanes=lanes).weights()
    tensors = load_file(MOE / "gpt_oss_2" / "model.safetensors")
    codes, scales = (tensors[f"{FIRST}.gate_up_proj_{name}"] for name in ("blocks", "scales"))
    for first, name in enumerate(("w1", "w3")):
        record = weights[f"layers.0.feed_forward.{name}"]
        assert (record.kind, record.group, record.shape) == ("mxfp4", (1, 32), (lanes, 8, 64 // lanes, 96))
        for found, wanted in (
            (record.codes, codes[:, first::2].reshape(8, 64, 48)),
            (record.scales, scales[:, first::2]),
        ):
            np.testing.assert_array_equal(np.concatenate(found, 1), wanted)
    down = weights["layers.0.feed_forward.w2"].on_host().dequantize()
    codes, scales = (tensors[f"{FIRST}.down_proj_{name}"] for name in ("blocks", "scales"))
    each = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(8, 96, 2, 32)
    wanted = each * np.exp2(scales.astype(np.float64) - 127)[..., None]
    np.testing.assert_array_equal(np.concatenate(down, -1), wanted.reshape(8, 96, 64))


def test_rows_are_reordered():
    """Matrices are transposed, rows of gate and up alternate, and half-split rotary rows and biases are interleaved."""
    weights = laneformer.load(MOE / "gpt_oss_1", num_lanes=2).weights()
    tensors = load_file(MOE / "gpt_oss_1" / "model.safetensors")
    first = "layers.0"

    def joined(path: str, axis: int) -> np.ndarray:
        return np.concatenate(weights[f"{first}.{path}"], axis)

    for at, name in enumerate(("w1", "w3")):
        wanted = tensors[f"{FIRST}.gate_up_proj"].swapaxes(1, 2)[:, at::2]
        np.testing.assert_array_equal(joined(f"feed_forward.{name}", 1), wanted)
        wanted = tensors[f"{FIRST}.gate_up_proj_bias"][:, at::2]
        np.testing.assert_array_equal(joined(f"feed_forward.{name}_bias", 1), wanted)
    np.testing.assert_array_equal(joined("feed_forward.w2", 2), tensors[f"{FIRST}.down_proj"].swapaxes(1, 2))
    for path, wanted in (
        ("feed_forward.w2_bias", tensors[f"{FIRST}.down_proj_bias"]),
        ("attention.wo_bias", tensors["model.layers.0.self_attn.o_proj.bias"]),
    ):
        bias = weights[f"{first}.{path}"]
        np.testing.assert_array_equal(bias[0], wanted)
        assert not np.asarray(bias[1]).any(), "added once"
    q_bias = tensors["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(joined("attention.wq_bias", 0), interleave(q_bias, 16))
    np.testing.assert_array_equal(joined("attention.sinks", 0), tensors["model.layers.0.self_attn.sinks"])


def test_lanes_share_a_key_value_head():
    config = laneformer.hf.read_hf_config(MOE / "gpt_oss_1", 8)
    assert (config.layers[0].attention.heads, config.layers[0].attention.kv_heads) == (1, 1)
    weights = laneformer.load(MOE / "gpt_oss_1", num_lanes=8).weights()
    for name in ("wk", "wk_bias", "wv"):
        found = np.asarray(weights[f"layers.1.attention.{name}"])
        assert all((found[lane] == found[lane // 4 * 4]).all() for lane in range(8))
        assert (found[0] != found[4]).any()


@pytest.mark.parametrize(("case", "lanes"), [("gpt_oss_1", 8), ("gpt_oss_2", 2), ("qwen3_moe_2", 2)])
def test_saved_model_is_read_again_unchanged(tmp_path, case, lanes):
    """Weights are equal bit for bit, and packed weights stay packed."""
    model = laneformer.load(MOE / case, num_lanes=lanes)
    laneformer.save_hf(model, tmp_path)
    again = laneformer.load(tmp_path)
    assert again.config == model.config
    others = again.weights()
    for path, weight in model.weights().items():
        arrays, found = ([w] if not hasattr(w, "arrays") else [*w.arrays.values()] for w in (weight, others[path]))
        for one, other in zip(arrays, found, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=path)


def changed(folder, case, change, **values):
    shutil.copytree(MOE / case, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def without(name):
    return lambda tensors: tensors.pop(name)


def cut(name, *at):
    return lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][at])})


@pytest.mark.parametrize(
    ("case", "change", "values", "words"),
    [
        ("gpt_oss_2", without(f"{FIRST}.down_proj_scales"), {}, f"tensor {FIRST}.down_proj_scales is missing"),
        ("gpt_oss_2", without(f"{FIRST}.gate_up_proj_blocks"), {}, f"tensor {FIRST}.gate_up_proj_blocks is missing"),
        (
            "gpt_oss_2",
            cut(f"{FIRST}.gate_up_proj_scales", slice(None), slice(None), slice(2)),
            {},
            f"{FIRST}.gate_up_proj_scales has shape [8, 128, 2], but this packing needs [8, 128, 3]",
        ),
        ("gpt_oss_2", without(f"{FIRST}.gate_up_proj_bias"), {}, f"lacks tensor(s) {FIRST}.gate_up_proj_bias:"),
        (
            "gpt_oss_2",
            lambda tensors: None,
            {"quantization_config": {"quant_method": "mxfp5"}},
            "quant_method 'mxfp5', which cannot be read",
        ),
        ("gpt_oss_2", lambda tensors: None, {"quantization_config": None}, f"lacks tensor(s) {FIRST}.down_proj"),
        (
            "gpt_oss_2",
            lambda tensors: None,
            {"num_local_experts": 9},
            "has shape [8, 96], but config.json gives [9, 96]",
        ),
        (
            "gpt_oss_1",
            cut(f"{FIRST}.down_proj", slice(7)),
            {},
            f"{FIRST}.down_proj has shape [7, 96, 64], but config.json gives [8, 96, 64]",
        ),
        ("gpt_oss_1", without("model.layers.3.self_attn.sinks"), {}, "lacks tensor(s) model.layers.3.self_attn.sinks"),
        (
            "gpt_oss_1",
            without("model.layers.2.self_attn.o_proj.bias"),
            {},
            "lacks tensor(s) model.layers.2.self_attn.o_proj.bias",
        ),
    ],
)
def test_damaged_folders_are_named_in_one_line(tmp_path, case, change, values, words):
    with pytest.raises(CheckpointError) as caught:
        laneformer.load(changed(tmp_path / "model", case, change, **values))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_scale_that_is_not_a_number_is_refused(tmp_path):
    def change(tensors):
        tensors[f"{FIRST}.down_proj_scales"][1, 2, 1] = 0xFF

    with pytest.raises(CheckpointError, match=r"down_proj is damaged: scale 255 at \[1, 2, 1\]"):
        laneformer.load(changed(tmp_path / "model", "gpt_oss_2", change))
