"""Reads and writes Hugging Face folders: config.json and one or several safetensors files, one tensor in memory at a time."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, in which safetensors hands it out
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError
from laneformer.hf_config import DENSE_TYPES, config_to_hf, read_hf_config
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.parameters import parameter_table
from laneformer.precision import Precision

_IGNORED = ("rotary_emb.inv_freq",)  # buffers of old Llama files that the config already determines
_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class _Source:
    """Where one of our weights comes from: a tensor of a file, the shape it has there, and how it becomes lane-first."""

    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda w: w


def load_hf(path: str | Path, dtype=None, *, mesh=None, num_lanes: int | None = None, precision: Precision | None = None) -> Laneformer:
    """The model in an HF folder; see laneformer.load."""
    path = Path(path)
    config = read_hf_config(path, num_lanes)
    dense = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] in DENSE_TYPES
    sources = (_dense_sources if dense else _lane_sources)(config)
    files = _find_tensors(path)
    _check_names(path, sources, config, files)
    weights = {}
    for weight_path, parameter in parameter_table(config).items():
        tensor = _read(files, sources[weight_path], path)
        tensor = tensor if dtype is None else tensor.astype(dtype)
        weights[weight_path] = _place(tensor, None if mesh is None else sharding(parameter.spec, parameter.shape, mesh))
    return Laneformer(config, weights, precision, mesh)


def _place(tensor: np.ndarray, device) -> jax.Array:
    """On the device, contiguous, and waited for, so that no more than one weight is held twice."""
    return jax.block_until_ready(jax.device_put(np.ascontiguousarray(tensor), device))


def _find_tensors(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that has it."""
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
    files: dict[str, Path] = {}
    for name in names:
        try:
            with safe_open(path / name, framework="numpy") as file:
                tensors = list(file.keys())
        except FileNotFoundError:
            raise CheckpointError(f"{path / name} is missing: {index.name} names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path / name} is damaged or truncated ({error}): copy it again") from None
        for tensor in tensors:
            if tensor in files:
                raise CheckpointError(f"{path}: tensor {tensor} stands in more than one file; remove the file that does not belong here")
            files[tensor] = path / name
    return files


def _check_names(path: Path, sources: dict[str, _Source], config: ModelConfig, files: dict[str, Path]) -> None:
    found, wanted = set(files), {source.name for source in sources.values()}
    missing, extra = sorted(wanted - found), sorted(n for n in found - wanted if not n.endswith(_IGNORED))
    if config.tie_word_embeddings and extra == ["lm_head.weight"]:
        embedding = sources["tok_embeddings"].name
        head, table = (_tensor(files, name) if name in files else None for name in ("lm_head.weight", embedding))
        extra = [] if np.array_equal(head, table) else extra
    for kind, names in (("misses", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{path} {kind} tensor(s) {shown}: config.json and the safetensors files do not belong together")


def _tensor(files: dict[str, Path], name: str) -> np.ndarray:
    """A copy of one tensor. The file is mapped for that long only: mapped pages that were read count as memory in use."""
    with safe_open(files[name], framework="numpy") as file:
        return file.get_tensor(name)


def _read(files: dict[str, Path], source: _Source, path: Path) -> np.ndarray:
    tensor = _tensor(files, source.name)
    if tensor.shape != source.shape:
        raise CheckpointError(f"{path}: tensor {source.name} has shape {list(tensor.shape)}, config.json asks for {list(source.shape)}")
    if tensor.dtype.name not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"{path}: tensor {source.name} is {tensor.dtype}; float32, float16 and bfloat16 are read")
    return source.convert(tensor)


def _lane_sources(config: ModelConfig) -> dict[str, _Source]:
    """Our own names; only the lane head lies differently in files: [v, l d] with the lanes end to end."""
    sources = {path: _Source(parameter.file_name, parameter.shape) for path, parameter in parameter_table(config).items()}
    if config.lm_head_type == "lane":
        lanes, v, d = sources["lm_head"].shape
        sources["lm_head"] = _Source(sources["lm_head"].name, (v, lanes * d), lambda w: w.reshape(v, lanes, d).swapaxes(0, 1))
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
    """Dense Llama and Qwen names. Lane l gets the l-th share of the output rows (q, k, v, gate, up) or input columns (o, down)."""
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
