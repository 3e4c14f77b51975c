"""Published models in the forms that transformers 5 gives them: the weights are those of the published form."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from laneformer import CheckpointError, load
from laneformer.hf import read_hf_config
from tests.support.paths import ROOT

MOE = ROOT / "tests" / "moe"
EXPERT = re.compile(r"(?P<layer>.*layers\.\d+\.)\w+\.experts\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def rewritten(source, folder, change, fields=lambda values: values):
    """A copy of a folder whose tensors, by name, and config values are changed."""
    folder.mkdir()
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({name: np.ascontiguousarray(t) for name, t in change(tensors).items()}, folder / "model.safetensors")
    values = fields(json.loads((source / "config.json").read_bytes()))
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def assert_same(folder, source, lanes=None):
    found, expected = load(folder, num_lanes=lanes), load(source, num_lanes=lanes)
    assert found.config == expected.config
    weights = expected.weights()
    assert found.weights().keys() == weights.keys()
    for path, weight in found.weights().items():
        assert (np.asarray(weight) == np.asarray(weights[path])).all(), path


def joined(tensors):
    """Experts as one tensor, written from the modules of transformers 5."""
    found, parts = {}, {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            parts.setdefault(match["layer"], {})[match["matrix"], int(match["number"])] = tensor
        else:
            found[name.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensor
    for layer, each in parts.items():
        names = {matrix for matrix, _ in each}
        gate, up, down = ((names & {*kind}).pop() for kind in (GATE, UP, DOWN))
        numbers = range(len(each) // 3)
        both = [np.concatenate([each[gate, n], each[up, n]]) for n in numbers]
        found[f"{layer}mlp.experts.gate_up_proj"] = np.stack(both)
        found[f"{layer}mlp.experts.down_proj"] = np.stack([each[down, n] for n in numbers])
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_1", "qwen3_next_1", "deepseek_v3_1"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_experts_may_be_one_tensor(tmp_path, name, lanes):
    folder = rewritten(MOE / name, tmp_path / "joined", joined)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(folder / "model.safetensors"))
    assert_same(folder, MOE / name, lanes)


@pytest.mark.parametrize("shape", [(6, 41, 32), (5, 40, 32), (6, 40)])
def test_experts_of_another_shape_are_refused(tmp_path, shape):
    def change(tensors):
        found = joined(tensors)
        return found | {name: np.zeros(shape, np.float32) for name in found if name.endswith("gate_up_proj")}

    with pytest.raises(CheckpointError, match=re.escape(f"gate_up_proj has shape {list(shape)}")):
        load(rewritten(MOE / "qwen3_moe_1", tmp_path / "joined", change))


def half_split(tensors, nope, rotary, rank):
    """Rotary rows of latent attention as rope_interleave false orders them: first the even ones, then the odd ones."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        first = {"q_b_proj": nope, "q_proj": nope, "kv_a_proj_with_mqa": rank}.get(name.split(".")[-2])
        if first is not None:
            heads = tensor.reshape(-1, first + rotary, tensor.shape[1])
            last = heads[:, first:]
            parts = [heads[:, :first], last[:, ::2], last[:, 1::2]]
            found[name] = np.concatenate(parts, 1).reshape(tensor.shape)
    return found


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("name", ["deepseek_v3_1"])
def test_latent_attention_with_half_split_pairs(tmp_path, name, lanes):
    sizes = read_hf_config(MOE / name).latent_attention
    numbers = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.kv_lora_rank
    folder = rewritten(
        MOE / name,
        tmp_path / "split",
        lambda tensors: half_split(tensors, *numbers),
        lambda values: values | {"rope_interleave": False},
    )
    assert_same(folder, MOE / name, lanes)


def as_transformers_saves_v4(values):
    """config.json of DeepSeek V4 by transformers 5.24."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    layers, hashed = values["num_hidden_layers"], values["num_hash_layers"]
    share = {"partial_rotary_factor": values["qk_rope_head_dim"] / values["head_dim"]}
    scaling = dict(values.get("rope_scaling") or {"type": "default"})
    theta, compressed = values["rope_theta"], values["compress_rope_theta"]
    made = {name: value for name, value in values.items() if name not in ("compress_ratios", "num_hash_layers")}
    made |= share | {
        "layer_types": [kinds[ratio] for ratio in values["compress_ratios"][:layers]],
        "compress_rates": {kind: ratio for ratio, kind in kinds.items() if ratio},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": theta, **share},
            "compress": {"rope_type": scaling.pop("type"), "rope_theta": compressed, **scaling, **share},
        },
    }
    made.pop("rope_scaling", None)
    return made


def renamed_v4(tensors):
    """Names of DeepSeek V4's tensors in files of transformers 5.24."""
    names = {"embed.weight": "embed_tokens.weight"}
    names |= {f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "scale", "base")}
    made = {}
    for name, tensor in tensors.items():
        new = names.get(name, name).replace(".attn.kv_norm.", ".attn.norm.")
        made[name if name == "head.weight" else f"model.{new}"] = tensor
    return made


def test_deepseek_v4_as_transformers_saves_it(tmp_path):
    source = MOE / "deepseek_v4_1"
    folder = rewritten(source, tmp_path / "saved", renamed_v4, as_transformers_saves_v4)
    assert_same(folder, source)
