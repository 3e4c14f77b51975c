"""laneformer.load on training runs and their steps, and on folders that are neither."""

import json
import os
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from laneformer import CheckpointError, ConfigError, load, make_mesh, save_hf
from laneformer.checkpoint import checkpoint_files, complete_steps, fingerprint, newest_step, open_checkpoint
from laneformer.errors import say_errors_once
from laneformer.hf import config_to_hf
from tests.support import tiny


@pytest.fixture(scope="module")
def model():
    say_errors_once()  # otherwise pytest reports the unraised errors of a failed Orbax read
    return tiny.random_model(tiny.values(num_hidden_layers=1, lm_head_type="lane"))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, model):
    """A run folder as training writes it: two complete steps and one that was cut short."""
    run = tmp_path_factory.mktemp("run")
    for number in (5, 10):
        step = run / "checkpoints" / str(number)
        with ocp.StandardCheckpointer() as writer:
            weights = {path: jax.device_put(np.asarray(w) * np.float32(number)) for path, w in model.weights().items()}
            writer.save(step / "params", weights)
        write_meta(step, meta_of(model.config, weights))
    (run / "checkpoints" / "15" / "params").mkdir(parents=True)
    return run


def meta_of(config, weights):
    return {"config": config_to_hf(config), "param_dtype": "float32", "fingerprint": {"params": fingerprint(weights)}}


def write_meta(step, values):
    """Writes the item meta of a step, as Orbax's JsonSave does."""
    (step / "meta").mkdir(parents=True, exist_ok=True)
    (step / "meta" / "metadata").write_text(values if isinstance(values, str) else json.dumps(values))


def test_runs_and_steps_are_loaded(saved_run, model):
    assert complete_steps(saved_run) == [5, 10]
    assert newest_step(saved_run) == saved_run / "checkpoints" / "10"
    for path, factor in ((saved_run, 10), (str(saved_run), 10), (saved_run / "checkpoints" / "5", 5)):
        loaded = load(path)
        assert loaded.config == model.config
        assert all(
            (np.asarray(w) == factor * np.asarray(model.weights()[name])).all() for name, w in loaded.weights().items()
        )


def test_run_is_loaded_on_a_mesh_in_another_dtype(saved_run, model):
    loaded = load(saved_run, "bfloat16", mesh=make_mesh(4, data=2, lane=4), num_lanes=4)
    w = loaded.weights()["layers.0.attention.wq"]
    assert w.dtype == "bfloat16" and w.sharding.shard_shape(w.shape) == (1, 8, 16)
    expected = (10 * np.asarray(model.weights()["layers.0.attention.wq"])).astype("bfloat16")
    assert (np.asarray(w) == expected).all()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_one_by_one_equal_the_loaded_model(saved_run, dtype):
    loaded, checkpoint = load(saved_run, dtype).weights(), open_checkpoint(saved_run, dtype)
    assert checkpoint.dtype == (dtype or "float32") and checkpoint.config == load(saved_run).config
    given = list(checkpoint.weights())
    assert sorted(path for path, _ in given) == sorted(loaded)
    assert all(w.dtype == loaded[path].dtype and w.tobytes() == np.asarray(loaded[path]).tobytes() for path, w in given)


def test_each_weight_of_a_run_is_freed_with_the_next(saved_run, monkeypatch):
    restored = load(saved_run).weights()
    monkeypatch.setattr("laneformer.checkpoint.restore_params", lambda *args: restored)
    count = len(restored)
    for n, _ in enumerate(open_checkpoint(saved_run).weights()):
        assert len(restored) == count - n - 1


def test_tokenizer_of_a_step_is_in_the_folder_of_its_run(saved_run):
    assert checkpoint_files(saved_run / "checkpoints" / "5") == saved_run
    assert checkpoint_files(saved_run) == saved_run


def test_folders_without_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder; .*HF folder .* or a training run"):
        load(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file is not a folder"):
        load(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has neither config\.json .* nor checkpoints/"):
        load(tmp_path / "empty")


def test_run_without_a_complete_step_is_refused(tmp_path):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        load(tmp_path)


def test_other_numbers_of_lanes_are_refused(saved_run):
    with pytest.raises(CheckpointError, match=r"num_lanes = 2: .*10 was trained with 4 lanes"):
        load(saved_run, num_lanes=2)
    with pytest.raises(ConfigError, match=r"lane axis of 8 devices .* 4 lanes"):
        load(saved_run, mesh=make_mesh(8))


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"config": 3}', '{"param_dtype": "float32"}'])
def test_damaged_meta_is_refused(tmp_path, text):
    step = tmp_path / "checkpoints" / "5"
    write_meta(step, text)
    with pytest.raises(CheckpointError, match=r"checkpoints.5 is damaged .*; restore a copy"):
        load(tmp_path)


def test_missing_or_unfit_weights_are_refused(tmp_path, model):
    step = tmp_path / "checkpoints" / "5"
    write_meta(step, meta_of(model.config, model.weights()))
    with pytest.raises(CheckpointError, match=r"checkpoints.5 is damaged or does not fit its config"):
        load(tmp_path)
    with ocp.StandardCheckpointer() as writer:
        writer.save(step / "params", model.weights())
    write_meta(step, meta_of(model.config.replace(num_hidden_layers=2), model.weights()))
    with pytest.raises(CheckpointError, match=r"checkpoints.5 is damaged or does not fit its config"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["meta/metadata", "params"])
def test_damaged_step_names_the_newest_other_one_in_one_line(tmp_path, saved_run, damage):
    run = shutil.copytree(saved_run, tmp_path / "run")
    step = run / "checkpoints" / "10"
    if damage == "params":
        shutil.rmtree(step / "params" / "d")
    else:
        (step / damage).write_text("{")
    with pytest.raises(CheckpointError) as raised:
        load(run)
    text = str(raised.value)
    assert text.startswith(f"{step} is damaged") and text.endswith(f"; use {run / 'checkpoints' / '5'} instead")
    assert "\n" not in text and "tensorstore_spec" not in text and len(text) < 800
    with pytest.raises(CheckpointError, match="; restore a copy"):  # a step that was copied out of its run
        load(shutil.copytree(step, tmp_path / "alone"))


@pytest.mark.parametrize("trick", ["link to a file", "link to a folder", "pipe"])
def test_steps_with_links_or_pipes_are_refused(tmp_path, saved_run, trick):
    """The library would read files outside of the run, or wait for the pipe without end."""
    step = shutil.copytree(saved_run / "checkpoints" / "5", tmp_path / "step")
    outside = shutil.copytree(step / "params", tmp_path / "outside")
    if trick == "link to a folder":
        shutil.rmtree(step / "params" / "d")
        (step / "params" / "d").symlink_to(outside / "d")
    else:
        file = step / "params" / "manifest.ocdbt"
        file.unlink()
        if trick == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to(outside / "manifest.ocdbt")
    with pytest.raises(CheckpointError, match="not a regular file" if trick == "pipe" else "outside of its folder"):
        load(step)


def test_hf_folder_is_loaded(tmp_path, saved_run):
    model = tiny.random_model(tiny.values())
    save_hf(model, tmp_path)
    assert load(tmp_path).config == model.config


def test_changed_weights_are_refused(tmp_path, model):
    step = tmp_path / "checkpoints" / "5"
    with ocp.StandardCheckpointer() as writer:
        writer.save(step / "params", model.weights() | {"norm": model.weights()["norm"] + 1e-6})
    write_meta(step, meta_of(model.config, model.weights()))
    with pytest.raises(CheckpointError, match="is damaged: its weights differ"):
        load(step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fingerprint_changes_with_every_bit(dtype):
    values = {"a": np.linspace(-1, 1, 6).reshape(2, 3).astype(dtype), "b": np.ones(3).astype(dtype)}
    tree = {name: jax.device_put(x) for name, x in values.items()}
    before = fingerprint(tree)
    for name, x in values.items():
        bits = x.view(f"uint{8 * x.dtype.itemsize}")
        for place in np.ndindex(x.shape):
            for bit in (0, 1, 8 * x.dtype.itemsize - 1):
                flipped = bits.copy()
                flipped[place] ^= np.array(1 << bit, bits.dtype)
                changed = jax.device_put(flipped.view(x.dtype))
                assert fingerprint(tree | {name: changed}) != before, f"{name}{place}, bit {bit}"
