"""Reads and writes Hugging Face folders: config.json and one or several safetensors files, one tensor in memory at a
time.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError
from laneformer.hf.config import DENSE_TYPES, config_to_hf, read_hf_config
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.weights import parameter_table

_IGNORED = ("rotary_emb.inv_freq",)  # buffers of old Llama files that the config already determines
_FILE_BYTES = 5_000_000_000
_PIECE = 2**20  # bytes that are compared at once
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class _Source:
    """Where one of our weights comes from: a tensor of a file, the shape it has there, and how it becomes
    lane-first.
    """

    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda w: w


@dataclass(frozen=True)
class _Tensor:
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str
    """In the format's spelling."""
    shape: tuple[int, ...]
    start: int
    """Of its bytes, from the file's beginning."""
    size: int
    """Bytes."""

    def read(self, memory: np.ndarray) -> np.ndarray:
        """The tensor in memory uint8 [size], read past any mapping: mapped pages that were read count as memory
        in use.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                if file.readinto(memory) != self.size:
                    raise OSError("it ends too early")
        except OSError as error:
            raise _damaged(self.file, error) from None
        return memory.view(_DTYPES[self.dtype]).reshape(self.shape)


class HfFolder:
    """A folder with config.json and safetensors, whose files' headers are checked when it is opened; weights are read
    afterwards.
    """

    def __init__(self, path: str | Path, dtype=None, num_lanes: int | None = None):
        """Arguments and errors are those of laneformer.load."""
        path = Path(path)
        self.config = read_hf_config(path, num_lanes)
        dense = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] in DENSE_TYPES
        self._sources = (_dense_sources if dense else _lane_sources)(self.config)
        self._tensors = _find_tensors(path)
        _check_tensors(path, self._sources, self.config, self._tensors)
        self._dtype = None if dtype is None else jnp.dtype(dtype)

    @property
    def dtype(self) -> str:
        """Of the weights as they come; where the files have several, that of the embedding table."""
        return (self._dtype or _DTYPES[self._tensors[self._sources["tok_embeddings"].name].dtype]).name

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Path and array of each weight, lane-first and contiguous, in the order of `parameter_table`.

        All of them are read into the same memory: an array is valid until the next one is asked for.
        """
        memory = _aligned(max(self._tensors[source.name].size for source in self._sources.values()))
        return self._read(lambda size: memory[:size])

    def model(self, mesh: Mesh | None = None, precision: Precision | None = None) -> Laneformer:
        """All weights as a model; see laneformer.load."""
        table, weights = parameter_table(self.config), {}
        for path, weight in self._read(_aligned):
            parameter = table[path]
            device = None if mesh is None else sharding(parameter.spec, parameter.shape, mesh)
            weights[path] = jax.block_until_ready(
                jax.device_put(weight, device)
            )  # so that no more than one is held twice
        return Laneformer(self.config, weights, precision, mesh)

    def _read(self, memory: Callable[[int], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """memory: gives room for so many bytes."""
        for path in parameter_table(self.config):
            source = self._sources[path]
            tensor = self._tensors[source.name]
            yield path, np.ascontiguousarray(source.convert(tensor.read(memory(tensor.size))), self._dtype)


def _aligned(size: int) -> np.ndarray:
    """Fresh memory, uint8 [size], that begins with a cache line: JAX on a CPU takes such memory over instead of copying
    it.
    """
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _find_tensors(path: Path) -> dict[str, _Tensor]:
    """Tensor name -> where it is, for all files of the folder."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged ({error!r}): copy the folder again") from None
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{path} has no .safetensors files")
    tensors: dict[str, _Tensor] = {}
    for name in names:
        try:
            found = _read_header(path / name)
        except FileNotFoundError:
            raise CheckpointError(f"{path / name} is missing: {index.name} names it") from None
        except (SafetensorError, OSError) as error:
            raise _damaged(path / name, error) from None
        for tensor in found:
            if tensor in tensors:
                raise CheckpointError(
                    f"{path}: tensor {tensor} stands in more than one file; remove the file that does not belong here"
                )
        tensors |= found
    return tensors


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Tensor name -> where it is. Raises SafetensorError or OSError for a file that is not whole."""
    with safe_open(file, framework="numpy"):
        pass  # this checks that dtypes, shapes and offsets agree with each other and with the file's size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]  # from the header's end
        tensors[name] = _Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return tensors


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is damaged or truncated ({error}): copy it again")


def _check_tensors(path: Path, sources: dict[str, _Source], config: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    """Raises CheckpointError unless the files have just the weights that the config asks for."""
    found, wanted = set(tensors), {source.name for source in sources.values()}
    missing, extra = sorted(wanted - found), sorted(n for n in found - wanted if not n.endswith(_IGNORED))
    if config.tie_word_embeddings and extra == ["lm_head.weight"] and not missing:
        extra = [] if _same_bytes(tensors["lm_head.weight"], tensors[sources["tok_embeddings"].name]) else extra
    for kind, names in (("misses", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(
                f"{path} {kind} tensor(s) {shown}: config.json and the safetensors files do not belong together"
            )
    for source in sources.values():
        tensor = tensors[source.name]
        if tensor.shape != source.shape:
            raise CheckpointError(
                f"{path}: tensor {source.name} has shape {list(tensor.shape)}, config.json asks for"
                f" {list(source.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {source.name} is stored as {tensor.dtype}; {', '.join(_DTYPES)} are read"
            )


def _same_bytes(one: _Tensor, other: _Tensor) -> bool:
    """Whether two tensors are the same, without holding either."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        pieces = [min(_PIECE, one.size - n) for n in range(0, one.size, _PIECE)]
        return all(first.read(piece) == second.read(piece) for piece in pieces)


def _lane_sources(config: ModelConfig) -> dict[str, _Source]:
    """Our own names; only the lane head lies differently in files: [v, l d] with the lanes end to end."""
    sources = {
        path: _Source(parameter.file_name, parameter.shape) for path, parameter in parameter_table(config).items()
    }
    if config.lm_head_type == "lane":
        lanes, v, d = sources["lm_head"].shape
        sources["lm_head"] = _Source(
            sources["lm_head"].name, (v, lanes * d), lambda w: w.reshape(v, lanes, d).swapaxes(0, 1)
        )
    return sources


_DENSE_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def _dense_sources(config: ModelConfig) -> dict[str, _Source]:
    """Dense Llama and Qwen names. Lane l gets the l-th share of the output rows (q, k, v, gate, up) or input columns
    (o, down).
    """
    lanes, e = config.num_lanes, config.head_size

    def interleave(w: np.ndarray) -> np.ndarray:
        """Rotary pairs (i, i + e/2) of each head become (2i, 2i + 1)."""
        return w.reshape(-1, 2, e // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

    def rows(w: np.ndarray) -> np.ndarray:
        return w.reshape(lanes, -1, *w.shape[1:])

    def columns(w: np.ndarray) -> np.ndarray:
        return w.reshape(w.shape[0], lanes, -1).swapaxes(0, 1)

    def source(path: str, shape: tuple[int, ...]) -> _Source:
        prefix, name = "", path
        if path.startswith("layers."):
            layers, n, name = path.split(".", 2)
            prefix = f"model.{layers}.{n}."
        kind = "bias" if name.endswith("_bias") else "weight"
        file_name = f"{prefix}{_DENSE_NAMES[name.removesuffix('_bias')]}.{kind}"
        base = name.removeprefix("attention.").removeprefix("feed_forward.").removesuffix("_bias")
        if base in ("wo", "w2"):
            return _Source(file_name, (shape[1], shape[0] * shape[2]), columns)
        if base in ("wq", "wk"):
            return _Source(file_name, (shape[0] * shape[1], *shape[2:]), lambda w: rows(interleave(w)))
        if base in ("wv", "w1", "w3"):
            return _Source(file_name, (shape[0] * shape[1], *shape[2:]), rows)
        return _Source(file_name, shape, interleave if base in ("q_norm", "k_norm") else lambda w: w)

    return {path: source(path, parameter.shape) for path, parameter in parameter_table(config).items()}


def save_hf(model: Laneformer, path: str | Path, *, spelling: str = "laneformer_tp") -> Path:
    """Writes config.json and model.safetensors (several files with an index above 5 GB) and returns the folder.

    The weights keep their dtype and load again bit for bit. Files are replaced only once their successors are complete.
    Raises CheckpointError if the folder cannot be written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        groups = list(_groups(model))
        stale = set(path.glob("*.safetensors")) | {path / "model.safetensors.index.json"}
        weight_map, total = {}, 0
        for i, group in enumerate(groups):
            name = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            tensors = {file_name: np.ascontiguousarray(_to_file(model, p)) for file_name, p in group.items()}
            save_file(tensors, path / f"{name}.part", metadata={"format": "pt"})
            os.replace(path / f"{name}.part", path / name)
            stale.discard(path / name)
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.nbytes for t in tensors.values())
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_text(path / "model.safetensors.index.json", json.dumps(index, indent=1))
            stale.discard(path / "model.safetensors.index.json")
        values = config_to_hf(model.config, spelling) | {"torch_dtype": model.tok_embeddings[...].dtype.name}
        _write_text(path / "config.json", json.dumps(values, indent=1) + "\n")
        for file in stale:  # of an earlier, differently split save
            file.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from None
    return path


def _groups(model: Laneformer) -> Iterator[dict[str, str]]:
    """File name -> path of the weights that go into one file."""
    weights, group, size = model.weights(), {}, 0
    for path, parameter in parameter_table(model.config).items():
        if group and size + weights[path].nbytes > _FILE_BYTES:
            yield group
            group, size = {}, 0
        group[parameter.file_name] = path
        size += weights[path].nbytes
    yield group


def _to_file(model: Laneformer, path: str) -> np.ndarray:
    w = np.asarray(model.weights()[path])
    if path == "lm_head" and model.config.lm_head_type == "lane":
        return w.swapaxes(0, 1).reshape(w.shape[1], -1)
    return w


def _write_text(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
