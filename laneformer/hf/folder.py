"""Reads and writes Hugging Face folders: config.json and one or several safetensors files, one tensor in memory at a
time.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError

from laneformer.errors import CheckpointError
from laneformer.hf import config_to_hf, find_family, read_hf_config, read_values
from laneformer.hf.laneformer import to_file
from laneformer.hf.safetensors import DTYPES, INDEX, check_tensors, find_tensors, write_tensors
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.weights import parameter_table

_FILE_BYTES = 5_000_000_000


class HfFolder:
    """A folder with config.json and safetensors. Opening it checks the files' headers; weights are read afterwards."""

    def __init__(self, path: str | Path, dtype=None, num_lanes: int | None = None):
        """Arguments and errors are those of laneformer.load."""
        path = Path(path)
        self.config = read_hf_config(path, num_lanes)
        self._table = parameter_table(self.config)
        self._sources = find_family(read_values(path / "config.json")).sources(self.config, self._table)
        self._tensors = find_tensors(path)
        check_tensors(path, self._sources, self._tensors, tied=self.config.tie_word_embeddings)
        self._dtype = None if dtype is None else jnp.dtype(dtype)

    @property
    def dtype(self) -> str:
        """Name of the dtype that weights are read in; where the files have several, that of the embedding table."""
        return (self._dtype or DTYPES[self._tensors[self._sources["tok_embeddings"].name].dtype]).name

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Path and array of each weight, lane-first and contiguous, in the order of `parameter_table`.

        All of them are read into the same memory: an array is valid until the next one is read.
        """
        memory = _aligned(max(self._tensors[source.name].size for source in self._sources.values()))
        return self._read(lambda size: memory[:size])

    def model(self, mesh: Mesh | None = None, precision: Precision | None = None) -> Laneformer:
        """All weights as a model; see laneformer.load."""
        weights = {}
        for path, weight in self._read(_aligned):
            entry = self._table[path]
            device = None if mesh is None else sharding(entry.spec, entry.shape, mesh)
            weights[path] = jax.block_until_ready(jax.device_put(weight, device))  # at most one is in memory twice
        return Laneformer(self.config, weights, precision, mesh)

    def _read(self, memory: Callable[[int], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """memory: returns uint8 memory of the given size in bytes."""
        for path in self._table:
            source = self._sources[path]
            tensor = self._tensors[source.name]
            yield path, np.ascontiguousarray(source.convert(tensor.read(memory(tensor.size))), self._dtype)


def _aligned(size: int) -> np.ndarray:
    """Fresh memory, uint8 [size], aligned to a cache line: JAX on a CPU adopts such memory instead of copying it."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def save_hf(model: Laneformer, path: str | Path, *, spelling: str = "laneformer_tp") -> Path:
    """Writes config.json and model.safetensors (several files with an index above 5 GB) and returns the folder.

    The weights keep their dtype and load again bit for bit. Files are replaced only once their successors are complete.
    Raises CheckpointError if the folder cannot be written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        groups, weights = list(_groups(model)), model.weights()
        stale = set(path.glob("*.safetensors")) | {path / INDEX}
        weight_map, total = {}, 0
        for i, group in enumerate(groups):
            name = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            tensors = {
                file_name: np.ascontiguousarray(to_file(model.config, p, np.asarray(weights[p])))
                for file_name, p in group.items()
            }
            write_tensors(path / name, tensors)
            stale.discard(path / name)
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.nbytes for t in tensors.values())
        if len(groups) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_text(path / INDEX, json.dumps(index, indent=1))
            stale.discard(path / INDEX)
        values = config_to_hf(model.config, spelling) | {"torch_dtype": model.tok_embeddings[...].dtype.name}
        _write_text(path / "config.json", json.dumps(values, indent=1) + "\n")
        for file in stale:  # of an earlier, differently split save
            file.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path} ({error}): make room or choose another folder") from None
    return path


def _groups(model: Laneformer) -> Iterator[dict[str, str]]:
    """Tensor name -> path of the weights that go into each file."""
    weights, group, size = model.weights(), {}, 0
    for path, parameter in parameter_table(model.config).items():
        if group and size + weights[path].nbytes > _FILE_BYTES:
            yield group
            group, size = {}, 0
        group[parameter.file_name] = path
        size += weights[path].nbytes
    yield group


def _write_text(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
