"""Folders with matrices in 12 bits per weight: every bit is kept, and every kind of damage is refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer.hf.bf12
import laneformer.hf.folder
import laneformer.hf.safetensors
from laneformer import CheckpointError, ConfigError, load, save_hf
from laneformer.checkpoint import open_checkpoint
from laneformer.formats import BF12_END
from laneformer.hf.folder import HfFolder
from laneformer.hf.safetensors import MappedFile, read_header
from laneformer.weights import packing_order
from tests.support import tiny
from tests.support.hostile.mutations import mutants, slowest

HEADS = {
    "head and table apart": {},
    "head over all lanes, odd sizes": {"lm_head_type": "lane", "vocab_size": 41, "intermediate_size": 20},
    "head in slices, wide": {"lm_head_type": "vocab_parallel", "hidden_size": 72, "head_dim": 10},
    "tied": {"tie_word_embeddings": True},
    "gate, mlp without one": {"attention_gate": True, "gated_mlp": False, "hidden_act": "relu2", "vocab_size": 300},
}


def model_of(**changes):
    """A model with random bfloat16 weights: every matrix has exceptions, and one consists of random bits."""
    values = tiny.values(**changes)
    arrays = {name: w.astype("bfloat16") for name, w in tiny.random_weights(values).items()}
    for name, w in arrays.items():
        if w.ndim > 1:
            rare = w.reshape(-1)[::31]
            rare[...] = np.resize(np.float32(10.0) ** -np.arange(6, 40, 2), rare.shape).astype(w.dtype)
        if name == "model.layers.1.feed_forward.w2.weight":
            w.view(np.uint16)[...] = np.random.default_rng(1).integers(0, 1 << 16, w.shape, np.uint16)
    return tiny.model_of(values, arrays)


def bits_of(model) -> dict[str, bytes]:
    return {path: np.asarray(weight).tobytes() for path, weight in model.weights().items()}


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def many_exceptions(monkeypatch):
    """Allows many exceptions, which small matrices have."""
    monkeypatch.setattr(laneformer.hf.bf12, "BF12_MOST_EXCEPTIONS", 0.2)


@pytest.mark.usefixtures("many_exceptions")
@pytest.mark.parametrize("name", HEADS)
def test_saved_model_keeps_every_bit(name, tmp_path, monkeypatch):
    """In one and in several files. A bfloat16 folder written from these has the bytes of one written directly."""
    model = model_of(**HEADS[name])
    save_hf(model, tmp_path / "plain")
    save_hf(model, tmp_path / "packed", weights="bf12")
    monkeypatch.setattr(laneformer.hf.folder, "_FILE_BYTES", 10_000)
    monkeypatch.setattr(laneformer.hf.bf12, "_AT_ONCE", 1)
    monkeypatch.setattr(laneformer.hf.safetensors, "_WRITTEN", 1000)
    save_hf(model, tmp_path / "parts", weights="bf12")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    for folder in ("parts", "packed"):
        again = load(tmp_path / folder)
        assert bits_of(again) == bits_of(model) and again.config == model.config
        monkeypatch.setattr(laneformer.hf.bf12, "_AT_ONCE", 32)
        one_by_one = {path: weight.tobytes() for path, weight in open_checkpoint(tmp_path / folder).weights()}
        assert one_by_one == bits_of(model) and list(one_by_one) == packing_order(model.config)
    monkeypatch.undo()
    save_hf(again, tmp_path / "back", weights="bfloat16")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "plain")


@pytest.mark.usefixtures("many_exceptions")
def test_files_are_readable_and_aligned(tmp_path):
    """Any reader lists the tensors. A matrix is in one group or unchanged, and tiles begin at cache lines."""
    save_hf(model_of(), tmp_path, weights="bf12")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.feed_forward.w2.weight"].dtype == "bfloat16", "random bits stay"
    tiles = [name for name in stored if name.endswith("bf12_tiles")]
    assert "model.layers.0.attention.wq.weight.bf12_tiles" in tiles
    assert "model.layers.0.attention.wk.weight.bf12_tiles" not in tiles, "with wq"
    header = read_header(tmp_path / "model.safetensors")
    pages = MappedFile(tmp_path / "model.safetensors").pages
    assert all(header.tensors[name].within(pages).ctypes.data % 64 == 0 for name in tiles)
    named = [name for group in json.loads(header.metadata["bf12"])["groups"] for name in group["matrices"]]
    assert len(named) == len({*named}) and {"lm_head.weight", "model.tok_embeddings.weight"} < {*named}
    assert len(tiles) == len(json.loads(header.metadata["bf12"])["groups"])
    listed = sum(int((stored[f"{name[:-5]}exceptions"] != BF12_END).sum()) for name in tiles)
    assert listed > 2 * len(tiles)


def test_files_are_a_quarter_smaller(tmp_path):
    model = tiny.random_model(tiny.values(vocab_size=512, hidden_size=128, intermediate_size=256))
    weights = {path: w.astype("bfloat16") for path, w in model.weights().items()}
    model = laneformer.Laneformer(model.config, weights)
    sizes = {}
    for kind in ("bfloat16", "bf12"):
        folder = save_hf(model, tmp_path / kind, weights=kind)
        sizes[kind] = (folder / "model.safetensors").stat().st_size
    assert 0.74 < sizes["bf12"] / sizes["bfloat16"] < 0.78


@pytest.mark.usefixtures("many_exceptions")
def test_rounded_exceptions_are_the_nearest_values(tmp_path):
    """All other weights keep their bits, also the matrix with too many exceptions. The folder has no exceptions."""
    model = model_of()
    save_hf(model, tmp_path / "packed", weights="bf12")
    save_hf(model, tmp_path / "rounded", weights="bf12", round_exceptions=True)
    expected, changed = bits_of(model), 0
    packed, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "rounded"))
    assert packed.keys() == rounded.keys()
    assert all((words == BF12_END).all() for name, words in rounded.items() if name.endswith("_exceptions"))
    weights = load(tmp_path / "rounded").weights()
    every = np.arange(1 << 16).astype(np.uint16)
    for group in json.loads(read_header(tmp_path / "packed" / "model.safetensors").metadata["bf12"])["groups"]:
        table = packed[f"{next(iter(group['matrices']))}.bf12_table"]
        held = value(every[np.isin(every >> 8 & 0x7F, table)])
        for path in (name.removeprefix("model.").removesuffix(".weight") for name in group["matrices"]):
            before = np.frombuffer(expected.pop(path), np.uint16)
            after = np.asarray(weights[path]).view(np.uint16).reshape(-1)
            rare = ~np.isin(before >> 8 & 0x7F, table)
            assert (before[~rare] == after[~rare]).all() and (before >> 15 == after >> 15).all()
            nearest = np.abs(held - value(before[rare])[:, None]).min(1)
            assert (np.abs(value(after[rare]) - value(before[rare])) == nearest).all()
            changed += rare.sum()
    assert changed > 100 and {path: np.asarray(weights[path]).tobytes() for path in expected} == expected
    counts = [HfFolder(tmp_path / name).rounded_weights for name in ("packed", "rounded")]
    assert counts == [0, changed]


def value(bits: np.ndarray) -> np.ndarray:
    """The values of bfloat16 bits, float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.usefixtures("many_exceptions")
def test_infinite_exceptions_are_not_rounded(tmp_path):
    model = model_of()
    weights = model.weights() | {"lm_head": model.weights()["lm_head"].at[0, 0].set(np.inf)}
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight: a weight is infinite, NaN or at least 2\^127: round no"
    ):
        save_hf(laneformer.Laneformer(model.config, weights), tmp_path, weights="bf12", round_exceptions=True)


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="weights bf12 must be bfloat16, got float32: convert them with --dtype"):
        save_hf(tiny.random_model(tiny.values()), tmp_path, weights="bf12")


def test_folder_of_another_writer_is_read_but_not_mapped(tmp_path, caplog, many_exceptions):
    """safetensors' own writer aligns to 8 bytes."""
    save_hf(model_of(), tmp_path, weights="bf12")
    expected, file = bits_of(load(tmp_path)), tmp_path / "model.safetensors"
    assert len([*open_checkpoint(tmp_path).packed()]) > 8 and not caplog.messages
    assert not [*open_checkpoint(tmp_path, "float32").packed()]
    save_file(load_file(file), file, metadata={name: str(text) for name, text in read_header(file).metadata.items()})
    assert bits_of(load(tmp_path)) == expected
    caplog.set_level("INFO", "laneformer")
    starts = [tensor.start % 64 for name, tensor in read_header(file).tensors.items() if name.endswith("tiles")]
    assert len([*open_checkpoint(tmp_path).packed()]) == starts.count(0) < len(starts)
    assert "is packed again: its tiles begin at byte" in caplog.messages[0]


# ---------------------------------------------------------------------------------------------------------- damage

GROUP = "model.layers.0.attention.wq.weight"  # with wk and wv
TABLE, WORDS = f"{GROUP}.bf12_table", f"{GROUP}.bf12_exceptions"


class Parts:
    """The parts of a file: its header, the groups in its metadata, and its data."""

    def __init__(self, file):
        self.file, data = file, file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        self.header, self.data = json.loads(data[8:end]), bytearray(data[end:])
        self.packed = json.loads(self.header["__metadata__"]["bf12"])
        self.group = next(group for group in self.packed["groups"] if GROUP in group["matrices"])

    def values(self, name, dtype) -> np.ndarray:
        begin, end = self.header[name]["data_offsets"]
        return np.frombuffer(self.data, dtype)[begin // np.dtype(dtype).itemsize : end // np.dtype(dtype).itemsize]

    def write(self, text=None):
        self.header["__metadata__"]["bf12"] = json.dumps(self.packed) if text is None else text
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 64 + 56)
        self.file.write_bytes(len(text).to_bytes(8, "little") + text + self.data)


def renamed(name, other):
    def change(parts):
        parts.header[other] = parts.header.pop(name)

    return change


def table(place, to):
    def change(parts):
        parts.values(TABLE, np.uint8)[place] = to

    return change


def word(to):
    """Replaces the first exception."""

    def change(parts):
        words = parts.values(WORDS, np.uint32)
        words[np.argmax(words != BF12_END)] = to

    return change


def last_word(parts):
    parts.values(WORDS, np.uint32)[-1] = 0


def matrices(**shapes):
    """Replaces shapes of the group's matrices: end of a name -> shape."""

    def change(parts):
        for end, shape in shapes.items():
            parts.group["matrices"][GROUP.replace("wq", end)] = shape

    return change


def swap_words(parts):
    words = parts.values(WORDS, np.uint32)
    first = next(n for n in range(len(words) - 1) if BF12_END not in words[n : n + 2])
    words[first : first + 2] = words[first : first + 2][::-1].copy()


DAMAGE = {
    "another version": (lambda parts: parts.packed.update(format_version=2), "weights in version 2 of bf12"),
    "no version": (lambda parts: parts.packed.pop("format_version"), "metadata bf12: KeyError"),
    "no groups": (lambda parts: parts.packed.pop("groups"), "metadata bf12: KeyError"),
    "groups of another type": (lambda parts: parts.packed.update(groups=[3]), "metadata bf12: TypeError"),
    "no matrices": (lambda parts: parts.group.update(matrices={}), "not shapes of matrices"),
    "a shape that is a text": (matrices(wq="ab"), "not shapes of matrices"),
    "a negative shape": (matrices(wq=[4, -8, 32]), "not shapes of matrices"),
    "interleaved with a number": (lambda parts: parts.group.update(interleaved=1), "not shapes of matrices"),
    "interleaved of unlike shapes": (lambda parts: parts.group.update(interleaved=True), "do not fit each other"),
    "other lanes": (matrices(wk=[2, 8, 32]), "do not fit each other"),
    "too few dimensions": (matrices(wq=[32]), "do not fit each other"),
    "more rows": (matrices(wk=[4, 80, 32]), f"{GROUP}.bf12_tiles has shape [4, 4, 3, 64]... but its matrices need"),
    "rows exchanged": (matrices(wq=[4, 4, 32], wk=[4, 8, 32]), "config.json gives"),
    "a table is missing": (renamed(TABLE, "other"), f"tensor {TABLE} is missing, or not U8"),
    "words of another type": (lambda parts: parts.header[WORDS].update(dtype="I32"), f"{WORDS} is missing, or not U32"),
    "a table of two rows": (lambda parts: parts.header[TABLE].update(shape=[2, 4]), f"{TABLE} has shape [2, 4]"),
    "a value twice": (table(slice(0, 2), 60), f"{TABLE} is damaged: the table [60, 60, "),
    "a sign in the table": (table(7, 0xBC), f"{TABLE} is damaged: the table ["),
    "no end": (last_word, f"{WORDS} is damaged: the exceptions must have an end for each of 4"),
    "an end more": (word(BF12_END), f"{WORDS} is damaged: the exceptions must have an end"),
    "outside the columns": (word(4 << 15), f"{WORDS} is damaged: an exception is outside the 32"),
    "far outside": (word(BF12_END - 1), f"{WORDS} is damaged: an exception is outside the 32"),
    "descending": (swap_words, f"{WORDS} is damaged: the exceptions of a tile must ascend"),
    "a matrix twice": (renamed("model.norm.weight", GROUP), f"tensor {GROUP} appears twice"),
    "a group twice": (lambda parts: parts.packed["groups"].append(parts.group), f"{GROUP}.bf12_tiles is missing"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laneformer.hf.bf12, "BF12_MOST_EXCEPTIONS", 0.2)
        return save_hf(model_of(), tmp_path_factory.mktemp("whole"), weights="bf12")


def copy(folder, to):
    for file, data in files_of(folder).items():
        (to / file).write_bytes(data)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(whole, tmp_path, name):
    change, message = DAMAGE[name]
    copy(whole, tmp_path)
    parts = Parts(tmp_path / "model.safetensors")
    change(parts)
    parts.write()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    for part in message.split("..."):
        assert part in str(caught.value)


ROUNDED = '{"format_version": 1, "groups": [{"matrices": {"a": [2, 2]}, "interleaved": false, "rounded": "x"}]}'


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", '{"format_version": 1, "groups": {"a": 1}}', ROUNDED])
def test_damaged_metadata_are_refused(whole, tmp_path, text):
    copy(whole, tmp_path)
    Parts(tmp_path / "model.safetensors").write(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged \(metadata bf12: "):
        open_checkpoint(tmp_path)


def test_file_that_shrinks_after_opening_is_refused(whole, tmp_path):
    copy(whole, tmp_path)
    checkpoint, file = open_checkpoint(tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    for read in (checkpoint.packed, checkpoint.weights):
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            list(read())


@pytest.mark.usefixtures("many_exceptions")
@pytest.mark.parametrize("count", [300, pytest.param(30_000, marks=pytest.mark.exhaustive)])
def test_changed_metadata_are_read_or_refused_quickly(tmp_path, count):
    file = save_hf(model_of(), tmp_path / "model", weights="bf12") / "model.safetensors"
    header = read_header(file)
    text = header.metadata[laneformer.hf.bf12.KEY]

    def read(changed):
        laneformer.hf.bf12.unpacked(header.tensors, {file: {laneformer.hf.bf12.KEY: changed.decode(errors="replace")}})

    read(text.encode())
    assert slowest(read, mutants(text.encode(), count), CheckpointError) < 1
