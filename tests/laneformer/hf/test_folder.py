"""Hugging Face folders: dense models against transformers, and models saved and loaded bit for bit."""

import json
import re
import shutil
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer.hf.folder
from laneformer import CheckpointError, ConfigError, load, make_mesh, save_hf
from laneformer.checkpoint import open_checkpoint, read_config
from laneformer.hf import read_hf_config
from laneformer.hf.families import llama
from laneformer.weights import packing_order, parameter_table
from tests.support import tiny

DENSE = sorted(path.parent for path in (tiny.TESTS / "dense").glob("*/config.json"))
SEVERAL = [folder for folder in DENSE if folder.name != "olmo2"]  # models that can have several lanes
CACHED = ("exaone4",)  # models that decode with a cache, or have one lane, in every run of the tests
FOLDERS = {folder.name: folder for folder in DENSE}
LANES = {folder.name: 2 + number % 2 * 2 for number, folder in enumerate(SEVERAL)}  # in every run of the tests
OLD_STYLE = [folder for folder in DENSE if (folder / "config_old_style.json").exists()]


def marks_in_lanes(folder, lanes):
    """The marks of a test of logits in one call: none in several lanes and for CACHED, but models that differ from
    another one only in an option of config.json are slow: their configs and these options are compared with a reference
    elsewhere. The others have one lane and are exhaustive.
    """
    if folder.name in ("llama_linear", "llama_yarn", "qwen3_gelu", "qwen3_window"):
        return pytest.mark.slow if lanes > 1 else pytest.mark.exhaustive
    return () if lanes > 1 or folder.name in CACHED else pytest.mark.exhaustive


def marks_of(folder, number):
    """The marks of a test that decodes with a cache: none for CACHED; of the others, every fourth one is slow, the rest
    exhaustive.
    """
    return () if folder.name in CACHED else pytest.mark.exhaustive if number % 4 else pytest.mark.slow


def name_of(value) -> str:
    """A folder's name as test id."""
    return getattr(value, "name", str(value))


# --------------------------------------------------------------------------------------------------------- dense models


def test_dense_fixtures_are_complete():
    assert [folder.name for folder in DENSE] == [
        "arcee",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_linear",
        "llama2",
        "llama3",
        "llama_linear",
        "llama_relu2",
        "llama_yarn",
        "ministral",
        "mistral",
        "olmo2",
        "qwen2",
        "qwen2_gelu_tanh",
        "qwen2_window",
        "qwen3",
        "qwen3_gelu",
        "qwen3_window",
        "smollm3",
        "smollm3_nope",
    ]
    assert [folder.name for folder in OLD_STYLE] == [
        "gemma2",
        "llama3",
        "llama_linear",
        "llama_yarn",
        "mistral",
        "qwen2",
        "qwen2_window",
    ]


@pytest.mark.parametrize(
    ("folder", "lanes"),
    [
        *(
            pytest.param(folder, lanes, marks=marks_in_lanes(folder, lanes))
            for folder in SEVERAL
            for lanes in (1, LANES[folder.name])
        ),
        (FOLDERS["olmo2"], 1),
    ],
    ids=name_of,
)
def test_dense_models_in_lanes_equal_the_reference(folder, lanes):
    io = np.load(folder / "io.npz")
    model = load(folder, num_lanes=lanes)
    assert (model.config.num_lanes, model.config.layout) == (lanes, "tp")
    assert tiny.difference(model(io["input_ids"]), io["logits"]) < 1e-4


@pytest.mark.parametrize(
    ("folder", "devices"),
    [
        pytest.param(folder, 4 - i % 2 * 2, marks=marks_of(folder, i), id=folder.name)
        for i, folder in enumerate(SEVERAL)
    ],
)
def test_dense_models_on_a_mesh_with_a_cache_equal_the_reference(folder, devices):
    """Weights spread over devices equal those on one device, and cached steps give the reference's greedy tokens."""
    io = np.load(folder / "io.npz")
    mesh = make_mesh(4, lane=devices)
    model, one = load(folder, num_lanes=4, mesh=mesh), load(folder, num_lanes=4)
    assert all((np.asarray(w) == np.asarray(one.weights()[path])).all() for path, w in model.weights().items())
    assert tiny.continue_greedily(model, io["greedy_prompt"], len(io["greedy_ids"])) == io["greedy_ids"].tolist()


@pytest.mark.parametrize("folder", OLD_STYLE, ids=name_of)
def test_old_spelling_of_dense_configs_gives_the_same_model(folder, tmp_path):
    """Equal configs and weights mean equal logits."""
    for file in folder.glob("*.safetensors*"):
        shutil.copy(file, tmp_path)
    shutil.copy(folder / "config_old_style.json", tmp_path / "config.json")
    model, new = (load(path, num_lanes=LANES[folder.name]) for path in (tmp_path, folder))
    assert model.config == new.config
    for path, weight in new.weights().items():
        np.testing.assert_array_equal(model.weights()[path], weight, err_msg=path)


@pytest.mark.parametrize(
    "folder", [FOLDERS[name] for name in ("qwen2", "qwen3", "mistral", "arcee", "exaone4")], ids=name_of
)
def test_converted_dense_models_are_saved_as_laneformers(folder, tmp_path):
    io = np.load(folder / "io.npz")
    save_hf(load(folder, num_lanes=LANES[folder.name]), tmp_path, spelling="laneformer")
    again = load(tmp_path)
    assert (again.config.num_lanes, again.config.layout) == (LANES[folder.name], "tp")
    assert tiny.difference(again(io["input_ids"]), io["logits"]) < 1e-4


def test_more_lanes_than_heads_are_refused():
    words = r"qwen2.config\.json: .*num_lanes = 16\b.*num_attention_heads = 8.*1, 2, 4, 8$"
    with pytest.raises(ConfigError, match=words):
        load(FOLDERS["qwen2"], num_lanes=16)


def test_norm_over_all_heads_requires_one_lane(tmp_path):
    """With one lane, OLMo-2 is saved and loaded as a Laneformer."""
    with pytest.raises(ConfigError, match=r"olmo2.config\.json: num_lanes = 2 with qk_norm_over = 'projection'.*= 1"):
        load(FOLDERS["olmo2"], num_lanes=2)
    model = load(FOLDERS["olmo2"])
    save_hf(model, tmp_path)
    assert same_bits(load(tmp_path), model)


@pytest.mark.slow
def test_norm_over_all_heads_decodes_with_a_cache():
    io, model = np.load(FOLDERS["olmo2"] / "io.npz"), load(FOLDERS["olmo2"])
    assert tiny.continue_greedily(model, io["greedy_prompt"], len(io["greedy_ids"])) == io["greedy_ids"].tolist()


def test_other_number_of_lanes_is_refused():
    with pytest.raises(ConfigError, match=r"config\.json: .*num_lanes = 2\b.*\b8 lanes"):
        load(tiny.ORACLE[0], num_lanes=2)


# ----------------------------------------------------------------------------------------------------- saved and loaded

HEADS = [
    {},
    {"lm_head_type": "lane", "vocab_size": 41},
    {"lm_head_type": "vocab_parallel", "replicated_rmsn_scale": False},
    {"tie_word_embeddings": True, "pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
    {"attention_gate": True, "gated_mlp": False, "hidden_act": "relu2", "attention_sinks": True, "out_bias": True},
]


def same_bits(one, other) -> bool:
    """Whether two models have the same weights bit for bit, in the same dtypes and order."""
    first, second = one.weights(), other.weights()
    alike = [
        w.dtype == second[path].dtype and np.asarray(w).tobytes() == np.asarray(second[path]).tobytes()
        for path, w in first.items()
    ]
    return list(first) == list(second) and all(alike)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_saved_models_load_bit_for_bit(head, dtype, tmp_path):
    values = tiny.values(**head)
    model = tiny.model_of(values, {name: w.astype(dtype) for name, w in tiny.random_weights(values).items()})
    assert save_hf(model, tmp_path) == tmp_path
    again = load(tmp_path)
    assert same_bits(model, again)
    assert again.config == model.config and again.precision == model.precision
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_saved_files_have_the_published_names_and_values(head, tmp_path):
    """Files have the names, shapes and values of the reference."""
    values = tiny.values(**head)
    save_hf(tiny.random_model(values), tmp_path)
    found, wanted = load_file(tmp_path / "model.safetensors"), tiny.random_weights(values)
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


@pytest.mark.parametrize("case", tiny.ORACLE, ids=name_of)
@pytest.mark.parametrize("spelling", ["laneformer_tp", "laneformer"])
def test_published_models_round_trip_in_both_spellings(case, spelling, tmp_path):
    model = load(case)
    save_hf(model, tmp_path, spelling=spelling)
    again = load(tmp_path)
    assert again.config == model.config and same_bits(model, again)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == spelling


def test_large_models_are_saved_in_several_files(tmp_path, monkeypatch):
    model = tiny.random_model(tiny.values(lm_head_type="lane"))
    monkeypatch.setattr(laneformer.hf.folder, "_FILE_BYTES", 12_000)
    save_hf(model, tmp_path)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert all(
        (tmp_path / file).stat().st_size < 12_000 + 4_000 or len(load_file(tmp_path / file)) == 1 for file in files
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in model.weights().values())
    assert same_bits(model, load(tmp_path))
    monkeypatch.undo()
    save_hf(model, tmp_path)  # replaces the folder by one file: the parts and the index must be removed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert same_bits(model, load(tmp_path))


def test_models_on_a_mesh_are_saved_and_loaded(tmp_path):
    values = tiny.values(num_hidden_layers=1, lm_head_type="lane", replicated_rmsn_scale=False)
    mesh = make_mesh(4, data=2, lane=4)
    model = tiny.model_of(values, tiny.random_weights(values), mesh)
    save_hf(model, tmp_path)
    spread = load(tmp_path, mesh=mesh)
    assert same_bits(model, spread) and same_bits(model, load(tmp_path))
    for path, w in spread.weights().items():
        assert w.sharding == model.weights()[path].sharding, path
    ids = tiny.token_ids(40)
    assert tiny.difference(spread(ids), model(ids)) == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_loaded_in_another_dtype(dtype, tmp_path):
    values = tiny.values()
    save_hf(tiny.random_model(values), tmp_path)
    weights = load(tmp_path, dtype).weights()
    wanted = tiny.random_weights(values)["model.layers.0.attention.wq.weight"].astype(dtype)
    assert {w.dtype.name for w in weights.values()} == {dtype}
    assert np.asarray(weights["layers.0.attention.wq"]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "float64", "float33", 3.5])
def test_unsupported_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match=r"dtype .*float32, bfloat16, float16"):
        load(tiny.ORACLE[0], dtype)


# ------------------------------------------------------------------------------------------------------- one at a time


def same_weights(folder, dtype=None, num_lanes=None) -> bool:
    """Whether weights that are read one by one equal those of load() bit for bit, are contiguous, and are in order."""
    loaded = load(folder, dtype, num_lanes=num_lanes).weights()
    paths = []
    for path, weight in open_checkpoint(folder, dtype, num_lanes).weights():
        wanted = np.asarray(loaded[path])
        alike = weight.dtype == wanted.dtype and weight.shape == wanted.shape and weight.tobytes() == wanted.tobytes()
        if not alike or not weight.flags.c_contiguous:
            return False
        paths.append(path)
    return sorted(paths) == sorted(loaded) and paths == packing_order(read_config(folder, num_lanes))


@pytest.mark.parametrize("folder", tiny.ORACLE, ids=name_of)
def test_published_models_read_one_by_one_are_equal(folder):
    assert same_weights(folder) and same_weights(folder, "bfloat16")


@pytest.mark.parametrize("folder", DENSE, ids=name_of)  # llama2 has four files
def test_dense_models_read_one_by_one_are_equal(folder):
    lanes = (4, 2) if folder in SEVERAL else (1, 1)
    assert same_weights(folder, num_lanes=lanes[0]) and same_weights(folder, "float16", lanes[1])


def test_files_of_mixed_dtypes_keep_them(tmp_path):
    """Files may mix dtypes."""
    values = tiny.values(lm_head_type="lane")
    arrays = {
        name: w.astype(("float32", "float16", "bfloat16")[n % 3])
        for n, (name, w) in enumerate(tiny.random_weights(values).items())
    }
    model = tiny.model_of(values, arrays)
    save_hf(model, tmp_path)
    assert same_weights(tmp_path) and same_bits(load(tmp_path), model)
    assert open_checkpoint(tmp_path).dtype == load(tmp_path).tok_embeddings[...].dtype.name
    assert open_checkpoint(tmp_path, "bfloat16").dtype == "bfloat16"


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """A dense model of ones, 20 MB of float32 in matrices of at most 2 MB, and the same model as a Laneformer."""
    folder = tmp_path_factory.mktemp("large")
    dense = json.loads((FOLDERS["qwen3"] / "config.json").read_text())
    dense |= {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    del dense["layer_types"]  # it is for two layers
    (folder / "dense").mkdir()
    (folder / "dense" / "config.json").write_text(json.dumps(dense))
    config = read_hf_config(folder / "dense", 4)
    ones = {
        source.name: np.ones(source.shape, np.float32)
        for source in llama.sources(config, parameter_table(config)).values()
    }
    save_file(ones, folder / "dense" / "model.safetensors")
    save_hf(load(folder / "dense", num_lanes=4), folder / "laneformer")
    return folder


@pytest.mark.parametrize(("kind", "copies"), [("laneformer", 1), ("dense", 2)])
def test_only_one_weight_is_in_memory(large_folder, kind, copies):
    """For a dense model, there are also the bytes from which the weight's columns were taken. The embedding table stays
    in memory until the first weight of a layer is read.
    """
    checkpoint = open_checkpoint(large_folder / kind, num_lanes=4)
    tracemalloc.start()
    sizes = [weight.nbytes for _, weight in checkpoint.weights()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    of_layers = sorted(sizes)[-2]
    assert sum(sizes) > 9 * max(sizes) and max(sizes) < peak < copies * max(sizes) + of_layers + 200_000


def test_array_is_overwritten_by_the_next_one(large_folder):
    """All weights of layers share one memory, so that a caller must not keep them. The embedding table has its own."""
    table, first, second, *_ = (weight for _, weight in open_checkpoint(large_folder / "laneformer").weights())
    assert np.shares_memory(first, second) and not np.shares_memory(table, first)


def test_folders_that_cannot_be_written_are_named(tmp_path):
    model = tiny.random_model(tiny.values())
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            save_hf(model, path)
    (tmp_path / "model" / "model.safetensors.part").mkdir(parents=True)  # safetensors raises its own error
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model"))):
        save_hf(model, tmp_path / "model")
