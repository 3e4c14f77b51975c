"""DeepSeek-V3 and Kimi K2 against reference models, saved and loaded again, and files that are refused."""

import json
import shutil
from functools import cache

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import laneformer
from laneformer import CheckpointError, ConfigError
from laneformer.checkpoint import packed_bytes
from laneformer.hf import config_from_hf, dimensions_from_hf, read_values
from laneformer.hf.safetensors import find_tensors
from laneformer.infer import Engine, Sampling
from laneformer.quantized import Quantized
from laneformer.recipes.models import DEEPSEEK_V3, KIMI_K2, MOONLIGHT_16B
from laneformer.weights import kv_bytes_per_token, matmul_parameters, parameter_count
from tests.support import tiny
from tests.support.hf.configs import MIXTURES
from tests.support.hf.packers import E4M3
from tests.support.paths import MOE

FAST = ("deepseek_v3_2", 4, 2)
CASES = ("deepseek_v3_1", "deepseek_v3_2", "kimi_1", "kimi_2")


@cache
def io(case: str):
    return np.load(MOE / case / "io.npz")


@cache
def model(case: str) -> laneformer.Laneformer:
    return laneformer.load(MOE / case, dtype="float32")


def tensors_of(case: str) -> dict[str, np.ndarray]:
    """The tensors of the case's file by name. safetensors' reader for NumPy does not support FP8."""
    found = find_tensors(MOE / case)[0]
    return {name: t.values().view(E4M3) if t.dtype == "F8_E4M3" else t.values() for name, t in found.items()}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models_equal_the_reference(case):
    """Logits, and greedy tokens with a cache. FP8 and INT4 stay packed; draft layers and vision towers are ignored."""
    assert tiny.difference(model(case)(io(case)["input_ids"]), io(case)["logits"]) < 1e-4
    greedy = tiny.continue_greedily(model(case), io(case)["greedy_prompt"], len(io(case)["greedy_ids"]))
    assert greedy == io(case)["greedy_ids"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lanes", "devices"),
    [
        FAST,
        slow("kimi_2", 2, 0),
        slow("kimi_1", 4, 2),
        *(pytest.param(case, 4, 2, marks=pytest.mark.exhaustive) for case in ("deepseek_v3_1", "kimi_2")),
        *(pytest.param(case, *cut, marks=pytest.mark.exhaustive) for case in CASES for cut in ((2, 2), (4, 0))),
    ],
)
def test_lanes_equal_the_reference(case, lanes, devices):
    """The lanes' shares of rows and columns cut blocks of FP8 and groups of INT4."""
    mesh = laneformer.make_mesh(lanes, lane=devices) if devices else None
    cut = laneformer.load(MOE / case, dtype="float32", num_lanes=lanes, mesh=mesh)
    ids = io(case)["input_ids"]
    assert tiny.difference(cut(ids), io(case)["logits"]) < 1e-4
    if devices and (case, lanes, devices) != FAST:
        greedy = tiny.continue_greedily(cut, io(case)["greedy_prompt"], len(io(case)["greedy_ids"]))
        assert greedy == io(case)["greedy_ids"].tolist()


@pytest.mark.parametrize("case", ["deepseek_v3_1", *map(slow, CASES[1:])])
def test_routes_equal_the_reference(case):
    """The chosen experts in every layer with experts."""

    @jax.jit
    def routes(model, ids_bs):
        routings = []
        model._streams(ids_bs, None, None, "none", routings=routings)
        return [x.chosen_lbsj[0, 0] for x in routings]

    found = routes(model(case), io(case)["input_ids"][:1])
    expected = io(case)["router_indices_row0"]
    assert len(found) == len(expected) == 2
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))


@pytest.mark.parametrize("parts", [(1, 47), slow((17, 30, 1)), slow((16, 16, 16))], ids=str)
def test_any_split_of_a_prompt_gives_the_same_logits(parts):
    case = "deepseek_v3_1"
    found = tiny.in_pieces(model(case), io(case)["input_ids"], parts, capacity=64)
    assert tiny.difference(found, io(case)["logits"]) < 1e-4


@pytest.mark.slow
def test_engine_generates_the_reference_tokens():
    case = "kimi_2"
    engine = Engine(model(case), backend="xla")
    tokens = [*engine.generate(io(case)["greedy_prompt"].tolist(), max_new_tokens=5, sampling=Sampling(temperature=0))]
    assert tokens == io(case)["greedy_ids"][:5].tolist()


@pytest.mark.parametrize("case", ["deepseek_v3_2", *map(slow, ("deepseek_v3_1", "kimi_1", "kimi_2"))])
def test_saved_model_is_read_again_unchanged(case, tmp_path):
    """In two lanes, every bit is kept. The correction stays float32, even if 16 bits are requested."""
    first = laneformer.load(MOE / case, num_lanes=2)
    again = laneformer.load(laneformer.save_hf(first, tmp_path))
    assert again.config == first.config
    for path, weight in first.weights().items():
        other = again.weights()[path]
        pairs = (weight.arrays, other.arrays) if isinstance(weight, Quantized) else ({"": weight}, {"": other})
        for name, array in pairs[0].items():
            assert array.dtype == pairs[1][name].dtype, path
            np.testing.assert_array_equal(array, pairs[1][name], err_msg=path)
    narrow = laneformer.load(tmp_path, dtype="bfloat16").weights()["layers.1.feed_forward.correction"]
    assert narrow.dtype == "float32" and narrow.any()


def test_partial_blocks_end_at_multiples_of_128():
    """192 rows have two scales, the second for 64 rows. The 128 columns share a scale."""
    record = model("deepseek_v3_2").weights()["layers.0.attention.wkv_a"]
    assert (record.shape, record.group, record.scales.shape) == ((192, 128), (128, 128), (2, 1))
    tensors = tensors_of("deepseek_v3_2")
    scales = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    codes = np.asarray(tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"], np.float32)
    whole = np.concatenate([codes[:128] * scales[0], codes[128:] * scales[1]])
    np.testing.assert_array_equal(record.on_host().dequantize("float32"), whole)


def test_packed_bytes_come_from_the_config():
    """The model also takes images; its language model's config contains the quantization."""
    found = packed_bytes(MOE / "kimi_2", read_values(MOE / "kimi_2" / "config.json"), model("kimi_2").config)
    assert found == {f"layers.{n}.feed_forward.{w}": 4.5 / 8 for n in (1, 2) for w in ("w1", "w3", "w2")}


def moonlight(**changes) -> dict:
    """A DeepSeek config like Moonlight's: queries without a rank, two shared experts, no groups, no YARN."""
    values = json.loads((MOE / "deepseek_v3_1" / "config.json").read_text())
    del values["rope_scaling"]
    return values | {"q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1} | changes


def test_config_of_moonlight_is_read():
    config = config_from_hf(moonlight())
    assert config.latent_attention.q_lora_rank is None and config.shared_expert_intermediate_size == 96
    assert config.layers[0].attention.scale == 24**-0.5 and config.n_group == 1
    assert config_from_hf(moonlight(n_shared_experts=0)).shared_expert_intermediate_size is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3 must be less than num_hidden_layers = 3"),
        ({"n_group": 3}, "n_group = 3 must divide num_experts = 8"),
        ({"n_group": 4, "topk_group": 5}, "topk_group = 5"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"model_type": "other_vision", "text_config": {"model_type": "kimi_k2"}}, "text_config: models that also"),
    ],
)
def test_unknown_configs_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(moonlight(**changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k25"])
def test_weights_per_token_equal_the_dimensions(name):
    """Counts from the blocks equal counts from the config's fields, at published sizes."""
    config, found = config_from_hf(MIXTURES[name]), dimensions_from_hf(MIXTURES[name])
    assert matmul_parameters(config) == sum(part.read for part in found.parts)
    assert kv_bytes_per_token(config, 10, 2) == found.kv_full * 11 * 2


def test_recipes_have_the_published_sizes():
    """Sizes are in billions of weights."""
    for config, count in ((DEEPSEEK_V3, 671.0), (KIMI_K2, 1026.4), (MOONLIGHT_16B, 15.96)):
        assert parameter_count(config) / 1e9 == pytest.approx(count, rel=1e-3)


KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("deepseek_v3_2", lambda t: t.pop(f"{KV_A}_scale_inv"), "weight_scale_inv/weight_scale/scale is missing"),
        (
            "deepseek_v3_2",
            lambda t: t.update({f"{KV_A}_scale_inv": np.ones((1, 1), np.float32)}),
            f"tensor {KV_A}_scale_inv has shape [1, 1], but this packing needs [2, 1]",
        ),
        (
            "deepseek_v3_1",
            lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
            "lacks tensor(s) model.layers.1.mlp.gate.e_score_correction_bias",
        ),
        (
            "deepseek_v3_1",
            lambda t: t.update({"model.layers.4.enorm.weight": np.ones(4, np.float32)}),
            "has unknown tensor(s) model.layers.4.enorm.weight",
        ),
        (
            "kimi_2",
            lambda t: t.update({"audio_tower.weight": np.ones(4, np.float32)}),
            "has unknown tensor(s) audio_tower.weight",
        ),
        (
            "kimi_2",
            lambda t: t.pop("language_model.model.layers.2.mlp.experts.11.up_proj.weight_scale"),
            "language_model.model.layers.2.mlp.experts.11.up_proj.weight_scale is missing",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, case, change, words):
    folder = tmp_path / "model"
    shutil.copytree(MOE / case, folder)
    tensors = tensors_of(case)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        laneformer.load(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)
