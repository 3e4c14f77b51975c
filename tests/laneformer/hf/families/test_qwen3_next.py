"""Qwen3-Next: reference outputs with lanes, caches and meshes, the order of rows, saved models, and damaged folders."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer
from laneformer import CheckpointError, ConfigError
from laneformer.decoder import decoder_ops
from laneformer.hf import config_from_hf, read_hf_config
from laneformer.ops import without_kernel
from tests.support import tiny
from tests.support.paths import MOE

FIRST = "model.layers.0.linear_attn"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lanes", "devices"),
    [
        ("qwen3_next_2", 4, 2),
        *(pytest.param("qwen3_next_1", *cut, marks=pytest.mark.exhaustive) for cut in ((1, 0), (2, 0), (2, 2))),
        *(pytest.param("qwen3_next_2", *cut, marks=pytest.mark.exhaustive) for cut in ((1, 0), (2, 2), (4, 0), (4, 4))),
    ],
)
def test_models_equal_the_reference(case, lanes, devices):
    """Logits, and greedy tokens with a cache. The reference, torch's float32, is within 2.5e-4 of float64."""
    mesh = laneformer.make_mesh(lanes, lane=devices) if devices else None
    model = laneformer.load(MOE / case, dtype="float32", num_lanes=lanes, mesh=mesh)
    io = np.load(MOE / case / "io.npz")
    assert tiny.difference(model(io["input_ids"]), io["logits"]) < 5e-4
    greedy = tiny.continue_greedily(model, io["greedy_prompt"], len(io["greedy_ids"]))
    assert greedy == io["greedy_ids"].tolist()


def test_padding_does_not_change_the_state():
    """Parts are padded like compiled prompts. The logits of their texts equal those of the whole text."""
    model, io = laneformer.load(MOE / "qwen3_next_1", dtype="float32"), np.load(MOE / "qwen3_next_1" / "io.npz")
    cache, found, start = model.make_cache(2, 32), [], 0
    for count in (6, 3, 8):
        padded = np.full((2, 8), 7)
        padded[:, :count] = io["input_ids"][:, start : start + count]
        logits, cache = model.extend(padded, cache, count=np.int32(count))
        found.append(logits[:, :count])
        start += count
    assert int(cache.length) == start
    assert tiny.difference(np.concatenate(found, 1), io["logits"][:, :start]) < 5e-4


def test_rows_are_reordered():
    """Queries and gates alternate by head, the first 8 of 32 channels are rotated, a lane has its own q, k and v."""
    weights = laneformer.load(MOE / "qwen3_next_1", num_lanes=2).weights()
    tensors = load_file(MOE / "qwen3_next_1" / "model.safetensors")
    rotated = [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 32)]
    heads = tensors["model.layers.3.self_attn.q_proj.weight"].reshape(4, 2, 32, 64)
    for path, wanted in (("wq", heads[:, 0, rotated]), ("wg", heads[:, 1])):
        np.testing.assert_array_equal(weights[f"layers.3.attention.{path}"], wanted.reshape(2, 64, 64))
    k_norm = tensors["model.layers.3.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(weights["layers.3.attention.k_norm"], k_norm[rotated])
    q, k, v = np.split(tensors[f"{FIRST}.conv1d.weight"][:, 0], [32, 64])
    wanted = [np.concatenate([q[n * 16 :][:16], k[n * 16 :][:16], v[n * 32 :][:32]]) for n in (0, 1)]
    np.testing.assert_array_equal(weights["layers.0.attention.convolution"], wanted)
    np.testing.assert_array_equal(weights["layers.0.attention.decay"], tensors[f"{FIRST}.A_log"].reshape(2, 2))


def test_state_is_float32_with_the_size_of_its_heads():
    cache = laneformer.load(MOE / "qwen3_next_2", num_lanes=2).make_cache(1, 16)
    found = {name: (array.shape, array.dtype.name) for name, array in cache.layers[0].items()}
    assert found["state"] == ((2, 1, 1, 2, 2, 32, 16), "float32") and found["inputs"][0] == (2, 1, 1, 3, 192)
    assert set(cache.layers[3]) == {"keys", "values"} and cache.capacity == 16


@pytest.mark.parametrize("case", ["qwen3_next_1", "qwen3_next_2"])
def test_saved_model_is_read_again_unchanged(tmp_path, case):
    """Weights are equal bit for bit, packed weights stay packed, and config.json has the sizes of DeltaNet."""
    model = laneformer.load(MOE / case, num_lanes=2)
    laneformer.save_hf(model, tmp_path / "own")
    again = laneformer.load(tmp_path / "own")
    assert again.config == model.config
    for a, b in zip(*(jax.tree.leaves(m) for m in (model, again)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def changed(folder, change=lambda tensors: None, **values):
    shutil.copytree(MOE / "qwen3_next_1", folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "values", "words"),
    [
        (lambda t: t.pop(f"{FIRST}.A_log"), {}, f"lacks tensor(s) {FIRST}.A_log:"),
        (lambda t: t.update({"mtpx": t["model.norm.weight"]}), {}, "has unknown tensor(s) mtpx:"),
        (
            lambda t: t.update({f"{FIRST}.conv1d.weight": t[f"{FIRST}.conv1d.weight"][:, 0]}),
            {},
            f"{FIRST}.conv1d.weight has shape [128, 4], but config.json gives [128, 1, 4]",
        ),
        (lambda t: None, {"linear_num_value_heads": 8}, "qkvz.weight has shape [192, 64], but config.json gives [320"),
        (lambda t: None, {"layer_types": ["full_attention"] * 4}, "lacks tensor(s) model.layers.0.self_attn"),
    ],
)
def test_damaged_folders_are_named_in_one_line(tmp_path, change, values, words):
    with pytest.raises(CheckpointError) as caught:
        laneformer.load(changed(tmp_path / "model", change, **values))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries"),
        ({"layer_types": ["mamba"] * 4}, "layer_types[0] = 'mamba' is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "delta_layers has all layers"),
        ({"linear_num_value_heads": 3}, "delta_net.value_heads = 3 must be a multiple of delta_net.key_heads = 2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"partial_rotary_factor": 0.1}, "rotary_dim = 3 must be even"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    ],
)
def test_wrong_values_are_named_in_one_line(values, words):
    given = json.loads((MOE / "qwen3_next_1" / "config.json").read_text())
    with pytest.raises(ConfigError) as caught:
        config_from_hf(given | values)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_lanes_that_do_not_divide_the_key_heads_are_refused():
    with pytest.raises(ConfigError, match=r"num_lanes = 4 does not divide delta_net.key_heads = 2; .* that do: 1, 2"):
        read_hf_config(MOE / "qwen3_next_1", 4)


def test_defaults_equal_those_of_transformers():
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = json.loads((MOE / "qwen3_next_1" / "config.json").read_text())
    config = config_from_hf({name: given[name] for name in (*names, "model_type")})
    sizes = config.delta_net
    assert (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.conv_kernel) == (
        16,
        32,
        128,
        128,
        4,
    )
    assert (config.delta_layers, config.rotary_dim, config.head_dim, config.num_experts) == ((0, 1, 2), 64, 256, 512)
    assert (config.num_key_value_heads, config.num_experts_per_tok, config.norm_topk_prob) == (2, 10, True)


def test_kernels_run_its_layers():
    assert without_kernel(decoder_ops(read_hf_config(MOE / "qwen3_next_1"))) is None
