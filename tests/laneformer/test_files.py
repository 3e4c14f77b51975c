"""Files of others: pipes, devices, loops of links and deep JSON are refused in one line, without waiting."""

import gzip
import json
import os
import shutil

import pytest

from laneformer import CheckpointError, InputError, files, load, save_hf
from laneformer.files import DEEPEST, files_inside, parse_json, read_file, refuse_link_loops, unzip
from tests.support import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_hf(tiny.random_model(tiny.values()), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def test_regular_files_are_read(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_file(file) == read_file(tmp_path / "link") == b"content"
    monkeypatch.setattr(files, "MOST_BYTES", 6)
    with pytest.raises(CheckpointError, match="file has 7 bytes, more than 6"):
        read_file(file)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "other")


def test_gzip_data_is_unpacked_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    parts = gzip.compress(b"a" * 400) + gzip.compress(b"b" * 600)
    assert unzip(b"plain") == b"plain" and unzip(parts) == b"a" * 400 + b"b" * 600
    for packed, words in (
        (gzip.compress(bytes(1001)), "more than 1,000 bytes"),
        (parts + gzip.compress(b"c"), "more than 1,000 bytes"),
        (parts[:-4], "damaged gzip"),
        (b"\x1f\x8bbroken", "damaged gzip"),
    ):
        with pytest.raises(InputError, match=words):
            unzip(packed)


def test_files_outside_of_a_folder_are_not_copied_with_it(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "secret", blobs / "2e", snapshot / "plain", snapshot / "other"):
        file.write_text("{}")
    (snapshot / "inner").symlink_to("plain")
    (snapshot / "cached").symlink_to("../../blobs/2e")  # as the cache of huggingface_hub has it
    names = ("missing", "plain", "inner", "cached")
    assert [file.name for file in files_inside(snapshot, names)] == ["plain", "inner", "cached"]
    (tmp_path / "link").symlink_to(snapshot)  # the folder itself may be a link
    assert len(files_inside(tmp_path / "link", names)) == 3
    for target in ("../../../secret", str(tmp_path / "secret"), "../../blobs/../../secret", "../1f/../../../secret"):
        (snapshot / "bad").unlink(missing_ok=True)
        (snapshot / "bad").symlink_to(target)
        with pytest.raises(CheckpointError, match=r"bad is a symbolic link to .*secret, outside of its folder"):
            files_inside(snapshot, ("plain", "bad"))
    for name, target in (("loop", "loop"), ("broken", "nowhere"), ("folder", ".")):
        (snapshot / name).symlink_to(target)
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            files_inside(snapshot, (name,))


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_deeply_nested_json_is_refused(opening, closing):
    text = opening * DEEPEST + "1" + closing * DEEPEST
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    for depth in (DEEPEST + 1, 950, 100_000):
        with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST}"):
            parse_json(opening * depth + "1" + closing * depth)


NAMES = ["config.json", "model.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", NAMES)
def test_pipes_and_devices_are_refused_at_once(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        load(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        load(folder)


@pytest.mark.parametrize("name", [*NAMES, "tokenizer.json"])
def test_loop_of_links_is_refused_by_name(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "second")
    (folder / "second").symlink_to(name)
    with pytest.raises(CheckpointError, match=f"(second|{name}) is a symbolic link that leads back to itself"):
        load(folder)


def test_folder_in_a_loop_of_links_is_refused_by_name(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "below" / "it"):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/loop is a symbolic link"):
            load(path)
    (tmp_path / "away").symlink_to("nowhere")
    refuse_link_loops(tmp_path / "away")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_deep_json_in_a_checkpoint_is_refused_in_one_line(folder, name):
    text = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    if name == "model.safetensors":
        text = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{folder / name}" in str(caught.value) and "nested deeper" in str(caught.value)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_link_to_a_missing_file_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist, its symbolic link is broken"):
        load(folder)
