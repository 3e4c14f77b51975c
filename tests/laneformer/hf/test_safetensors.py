"""Safetensors files and their index: every kind of damage is refused, naming the file."""

import json
import shutil

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import laneformer.hf.folder
from laneformer import CheckpointError, load, save_hf
from laneformer.checkpoint import open_checkpoint
from laneformer.hf.safetensors import find_tensors, read_header
from tests.support import tiny
from tests.support.hostile.mutations import mutants, slowest


@pytest.fixture
def folder(tmp_path):
    """A folder with one file, to be damaged."""
    return save_hf(tiny.random_model(tiny.values()), tmp_path / "model")


@pytest.fixture
def folder_of_parts(tmp_path, monkeypatch):
    """A folder with several files and an index, to be damaged."""
    monkeypatch.setattr(laneformer.hf.folder, "_FILE_BYTES", 20_000)
    return save_hf(tiny.random_model(tiny.values()), tmp_path / "model")


def change_tensors(folder, **changes):
    """Rewrites model.safetensors with some tensors replaced, or removed if None. __ in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def refused(folder, *messages) -> None:
    """load() must raise a CheckpointError that contains the messages and names the folder."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for message in (str(folder), *messages):
        assert message in str(caught.value)


def test_missing_tensor_is_refused(folder):
    change_tensors(folder, model__layers__1__attention__wo__weight=None)
    refused(folder, "model.layers.1.attention.wo.weight")


def test_many_missing_tensors_are_counted(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    refused(folder, "model.layers.3.attention.wk.weight", "and 13 more")


def test_extra_tensor_is_refused(folder):
    change_tensors(folder, model__layers__0__attention__wq__bias=np.zeros(3, np.float32))
    refused(folder, "model.layers.0.attention.wq.bias")


def test_old_rotary_buffers_are_ignored(folder):
    change_tensors(folder, model__layers__0__attention__rotary_emb__inv_freq=np.zeros(3, np.float32))
    assert load(folder)


def test_tied_model_uses_a_head_that_differs(tmp_path):
    folder = save_hf(tiny.random_model(tiny.values(tie_word_embeddings=True)), tmp_path)
    table = load_file(folder / "model.safetensors")["model.tok_embeddings.weight"].astype("float16")
    change_tensors(folder, model__tok_embeddings__weight=table)
    last = table.astype("float32")
    last[-1, -1] += 1e-5  # less than float16 can show
    for head, tied in ((table, True), (table.astype("float32"), True), (last, False)):
        change_tensors(folder, lm_head__weight=head)
        model = load(folder)
        assert model.config.tie_word_embeddings is tied and ("lm_head" in model.weights()) is not tied
        if not tied:
            assert (np.asarray(model.weights()["lm_head"], np.float32) == head).all()
    change_tensors(folder, lm_head__weight=table[:-1])
    refused(folder, "lm_head.weight", "[39, 32]")


@pytest.mark.parametrize("shape", [(40, 31), (32, 40), (40,), (4, 10, 32)])
def test_tensor_of_another_shape_is_refused(folder, shape):
    change_tensors(folder, lm_head__weight=np.zeros(shape, np.float32))
    refused(folder, "lm_head.weight", str(list(shape)), "[40, 32]")


@pytest.mark.parametrize(
    ("dtype", "spelling"), [("int8", "I8"), ("float64", "F64"), ("int32", "I32"), ("bool", "BOOL")]
)
def test_tensor_of_another_dtype_is_refused(folder, dtype, spelling):
    change_tensors(folder, lm_head__weight=np.zeros((40, 32), dtype))
    refused(folder, "lm_head.weight", spelling, "F32, F16, BF16")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_file_is_refused(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(folder, "model.safetensors", "truncated")


def test_damaged_header_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    refused(folder, "model.safetensors", "damaged")


def test_folder_without_tensors_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, ".safetensors")


def test_missing_part_is_refused(folder_of_parts):
    part = sorted(folder_of_parts.glob("*.safetensors"))[1]
    part.unlink()
    refused(folder_of_parts, part.name, "model.safetensors.index.json")


def test_truncated_part_is_refused(folder_of_parts):
    part = sorted(folder_of_parts.glob("*.safetensors"))[1]
    part.write_bytes(part.read_bytes()[:-10])
    refused(folder_of_parts, part.name, "truncated")


def test_missing_part_without_an_index_is_refused(folder_of_parts):
    (folder_of_parts / "model.safetensors.index.json").unlink()
    assert load(folder_of_parts)
    sorted(folder_of_parts.glob("*.safetensors"))[1].unlink()
    refused(folder_of_parts, "tensor(s) model.")


def test_tensor_in_two_files_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "model-2-of-2.safetensors")
    refused(folder, "model.norm.weight", "model-1-of-2.safetensors", "model-2-of-2.safetensors")


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "other.safetensors"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_copies_and_adapters_beside_the_model_are_not_read(folder, name, sharded):
    """transformers reads model.safetensors, or what the index lists."""
    expected = load(folder).weights()
    for file in (name, "adapter_model.safetensors"):
        save_file({"tok_embeddings.weight": np.ones((2, 2), np.float32)}, folder / file)
    if sharded:
        (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
        if name == "other.safetensors":
            names = load_file(folder / "model-1-of-1.safetensors")
            index = {"weight_map": dict.fromkeys(names, "model-1-of-1.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(folder).weights()
    assert all((np.asarray(found[path]) == np.asarray(expected[path])).all() for path in expected)


def test_a_stale_index_beside_the_model_is_not_used(folder):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder)
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    refused(folder, "model-00001-of-00009.safetensors does not exist")


def test_an_index_may_list_the_missing_file_of_an_ignored_tensor(folder):
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "mtp.0.norm.weight": "mtp.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_tensors(folder, ("mtp.",))[0]
    with pytest.raises(CheckpointError, match=r"mtp\.safetensors does not exist"):
        find_tensors(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', '{"weight_map": null}', "\x00"]
)
def test_damaged_index_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("names", [{"a": 1}, {"a": 1, "b": "x"}, {"a": None}])
def test_index_of_missing_files_is_refused(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    refused(folder, "model.safetensors.index.json")


OUTSIDE = [
    "../model.safetensors",
    "/etc/passwd",
    "a/../../x",
    "..",
    ".",
    "",
    "C:\\x",
    "..\\x",
    "a\0b",
    "a\nb",
    "\udfff",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_index_of_files_outside_the_folder_is_refused(folder, name):
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, "model.safetensors.index.json", repr(name))


def test_index_of_files_in_a_folder_below_is_read(folder):
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    assert load(folder)


def test_linked_files_are_read(folder):
    """The cache of Hugging Face's hub contains links to files in another folder."""
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    assert load(folder)


def with_header(folder, change) -> None:
    """Rewrites the header of model.safetensors. change: old header -> new header, as text."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_duplicate_tensor_in_a_header_is_refused(folder):
    def twice(text: str) -> str:
        header = json.loads(text)
        return text.rstrip()[:-1] + f',"model.norm.weight":{json.dumps(header["model.norm.weight"])}}}'

    with_header(folder, twice)
    refused(folder, "model.safetensors", "model.norm.weight")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\ufffe" + text,
        lambda text: text.replace('"data_offsets"', '"offsets"'),
        lambda text: text.replace('"data_offsets":[', '"data_offsets":["x",'),
        lambda text: text.replace('"dtype"', '"type"'),
        lambda text: text.replace('"F32"', '"F99"'),
        lambda text: text.replace('"shape":[32]', '"shape":[31]'),
    ],
)
def test_damaged_header_of_the_right_length_is_refused(folder, change):
    with_header(folder, change)
    refused(folder, "model.safetensors")


def test_truncated_file_names_both_sizes(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    refused(folder, f"{len(data) - 10:,}", f"{len(data):,}")


def test_file_that_shrinks_after_opening_is_refused(folder):
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        list(checkpoint.weights())
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*No such file"):
        checkpoint.model()


@pytest.mark.parametrize("count", [300, pytest.param(30_000, marks=pytest.mark.exhaustive)])
def test_changed_headers_are_read_or_refused_quickly(tmp_path, count):
    """The length before the header is that of the changed one for two of three files."""
    file = tmp_path / "model.safetensors"
    tensors = {"a": np.ones((3, 4), np.float32), "b.c": np.ones(5, np.int8), "d": np.zeros((0, 2), np.float16)}
    save_file(tensors, file, metadata={"format": "pt", "x": "{}"})
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")

    def read(changed):
        length = whole[:8] if len(changed) % 3 == 0 else len(changed).to_bytes(8, "little")
        file.write_bytes(length + changed + whole[begin:])
        for tensor in read_header(file).tensors.values():
            assert tensor.shape is not None and 0 <= tensor.size <= len(whole)

    read(whole[8:begin])
    refusals = (CheckpointError, SafetensorError)
    assert slowest(read, mutants(whole[8:begin], count), refusals) < 1
