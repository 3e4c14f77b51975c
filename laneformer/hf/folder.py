"""Reads and writes Hugging Face folders: config.json and one or several safetensors files, one tensor in memory at a
time.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError

from laneformer.blocks.block import plain
from laneformer.errors import CheckpointError, ConfigError
from laneformer.formats import Bf12Product
from laneformer.hf import config_to_hf, find_family, language_model, read_hf_config, read_values, tensor_prefixes
from laneformer.hf.bf12 import GroupPlan, groups_of, metadata_of, unpacked
from laneformer.hf.experts import with_separate_experts
from laneformer.hf.families import laneformer as own
from laneformer.hf.llama_files import KIND, config_to_llama, llama_sources, to_llama
from laneformer.hf.packed.compressed import config_of, settings_of, tensors_of
from laneformer.hf.packed.packings import REMEDY, with_records
from laneformer.hf.packed.quantization import read_schemes
from laneformer.hf.safetensors import (
    DTYPES,
    INDEX,
    QUANTIZED,
    MappedFile,
    Output,
    Source,
    Stack,
    Tensor,
    check_tensors,
    find_tensors,
    with_stacks,
    write_outputs,
    write_tensors,
)
from laneformer.mesh import put_weight
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.quantized import Quantized, stack
from laneformer.weights import packing_order, parameter_table

log = logging.getLogger("laneformer")

HEAD = "lm_head.weight"  # of all families that can tie it
_FILE_BYTES = 5_000_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # dtype -> its name in files


class HfFolder:
    """A folder with config.json and safetensors files. Opening it checks the files' headers; weights are read later.

    Attributes: `config`; `table`, path -> Weight; `sources`, path -> Source, the tensor that contains the weight;
    `tensors`, name -> Tensor of the files, in which all tensors of a packed weight are one Tensor.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: DTypeLike | None = None,
        num_lanes: int | None = None,
        weights: Literal["bfloat16"] | None = None,
    ):
        """Arguments and errors are those of `laneformer.load`."""
        path, values = Path(path), read_values(Path(path) / "config.json")
        self.path, self.config = path, read_hf_config(path, num_lanes)
        self._family = find_family(values)
        prefix, ignored = tensor_prefixes(values)
        tensors, metadata = find_tensors(path, ignored)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(ignored)}
        tensors = {self._family.renamed(name): tensor for name, tensor in tensors.items()}
        self._set_sources(prefix)
        if self.config.tie_word_embeddings and (head := tensors.pop(f"{prefix}{HEAD}", None)) is not None:
            table = tensors.get(self.sources["tok_embeddings"].name)
            if table is not None and not head.same_values(table):  # then transformers uses the head
                log.info("%s: %s differs from the embedding table, so they are not tied", path, HEAD)
                tensors[f"{prefix}{HEAD}"] = head
                self.config = self.config.replace(tie_word_embeddings=False)
                self._set_sources(prefix)
        tensors = with_separate_experts(path, self.sources, tensors)
        if schemes := read_schemes(path, language_model(values), self._family.rules):
            tensors = with_records(path, schemes, self.sources, tensors, metadata)
        tensors, self._groups = unpacked(tensors, metadata)
        self.tensors = with_stacks(path, self.sources, tensors)
        self._widened = weights == "bfloat16"
        self.mapped: dict[Path, MappedFile] = {}  # the files whose pages `packed` has returned
        check_tensors(path, self.sources, self.tensors)
        self._dtype = None if dtype is None else jnp.dtype(dtype)
        for weight in filter(self._is_record, self.sources):
            if weight == "tok_embeddings" or weight.endswith(self._family.never_packed):
                what = "an embedding table" if weight == "tok_embeddings" else f"{weight} of {self._family.name}"
                name = self.sources[weight].names[0]
                raise CheckpointError(f"{path}: tensor {name} is quantized, which {what} cannot be; {REMEDY}")

    def _set_sources(self, prefix: str) -> None:
        """Sets `table` and `sources` for the config. prefix: of the tensors' names."""
        self.table = parameter_table(self.config)
        sources = self._family.sources(self.config, self.table).items()
        self.sources = {path: dataclasses.replace(source, name=f"{prefix}{source.name}") for path, source in sources}

    @property
    def never_packed(self) -> tuple[str, ...]:
        """Suffixes of the paths of matrices that are refused if they are quantized."""
        return self._family.never_packed

    @property
    def dtype(self) -> str:
        """Name of the dtype in which weights are read; by default the stored dtype of the embedding table."""
        stored = DTYPES.get(self.tensors[self.sources["tok_embeddings"].name].dtype, np.dtype(jnp.bfloat16))
        dtype = stored if self._dtype is None else self._dtype
        return dtype.name

    @property
    def quantized(self) -> tuple[str, ...]:
        """Paths of the weights that are records in memory."""
        return tuple(path for path in self.sources if self._is_record(path))

    @property
    def packed_weights(self) -> int:
        """Number of weights that the files store in 12 bits."""
        return sum(stored.group.weights for stored in self._groups)

    @property
    def rounded_weights(self) -> int:
        """Number of weights whose values were changed when they were written in 12 bits."""
        return sum(stored.group.rounded for stored in self._groups)

    def weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Path and array (or record, if it is quantized) of each weight, lane-first and contiguous, in `packing_order`,
        except the paths in `without`.

        An array is valid until the next one is read, because weights of the layers share one memory, and so do the
        embedding table and the head.
        """
        paths = [path for path in packing_order(self.config) if path not in without]
        for _, alike in groupby(paths, lambda path: self.table[path].group == "embedding"):
            names = list(alike)
            memory = _aligned(max(self.tensors[self.sources[path].name].size for path in names))
            yield from self._read(partial(_beginning, memory), names)

    def packed(self) -> Iterator[Bf12Product]:
        """The matrices that the files store in 12 bits per weight, product by product, as mapped pages of the files.
        Products that no kernel can use in this form are left out and logged.
        """
        paths = {source.name: path for path, source in self.sources.items()}
        if self._family is not own.FAMILY or self._dtype not in (None, jnp.bfloat16):
            return
        for stored in self._groups:
            if reason := stored.unfit:
                log.info("%s: %s is packed again: %s", self.path, stored.group.name, reason)
                continue
            group, file = stored.group, stored.tiles.file
            if file not in self.mapped:
                self.mapped[file] = MappedFile(file)
            yield Bf12Product(
                tuple(paths[name] for name in group.shapes), group.interleaved, stored.within(self.mapped[file].pages)
            )

    def model(self, mesh: Mesh | None = None, precision: Precision | None = None) -> Laneformer:
        """The model with all weights; see `laneformer.load`."""
        weights = {}
        for path, weight in self._read(_aligned, self.table):
            weights[path] = put_weight(weight, self.table[path].spec, mesh)  # at most one is in memory twice
        return Laneformer(self.config, weights, precision, mesh)

    def _read(
        self, memory: Callable[[int], np.ndarray], paths: Collection[str]
    ) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Path and array or record of each weight. memory: returns uint8 memory of the given size in bytes."""
        for path in paths:
            source = self.sources[path]
            tensor = self.tensors[source.name]
            if tensor.dtype == QUANTIZED:
                yield path, self._record(source, tensor)
            else:
                dtype = self.table[path].dtype or self._dtype
                yield path, np.ascontiguousarray(source.convert(tensor.read(memory(tensor.size))), dtype)

    def _is_record(self, path: str) -> bool:
        return self.tensors[self.sources[path].name].dtype == QUANTIZED and not self._widened

    def _record(self, source: Source, tensor: Tensor) -> np.ndarray | Quantized:
        parts = tensor.parts if isinstance(tensor, Stack) else (tensor,)
        if self._widened:
            each = [part.record().dequantize(self.dtype) for part in parts]
            whole = np.stack(each) if isinstance(tensor, Stack) else each[0]
            return np.ascontiguousarray(dataclasses.replace(source, transposed=False).convert(whole))
        found = [part.record() for part in parts]
        try:
            if any(record.group[1] == 1 for record in found):
                raise ValueError("its groups have different numbers of columns")
            return source.convert_record(stack(found) if isinstance(tensor, Stack) else found[0])
        except ValueError as error:
            name = f"{source.name} ({found[0].name})"
            raise CheckpointError(f"{tensor.file}: tensor {name}: {error}; {REMEDY}") from None


def _beginning(memory: np.ndarray, size: int) -> np.ndarray:
    return memory[:size]


def _aligned(size: int) -> np.ndarray:
    """Fresh memory, uint8 [size], aligned to a cache line. JAX on a CPU uses such memory instead of copying it."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def save_hf(
    model: Laneformer,
    path: str | Path,
    *,
    spelling: str = "laneformer_tp",
    weights: Literal["bfloat16", "bf12"] | None = None,
    round_exceptions: bool = False,
) -> Path:
    """Writes config.json and model.safetensors (above 5 GB several files and an index) and returns the folder.

    The weights keep their dtype and can be loaded again bit for bit. A file is replaced only once its successor is
    complete.

    spelling: the model_type in config.json: laneformer_tp or laneformer, or llama if the model is a Llama (layout tp
        or one lane, without options that a Llama does not have, and without quantized weights).
    weights: bf12 writes bfloat16 matrices in 12 bits per weight (docs/bf12.md). Both values require bfloat16 weights.
    round_exceptions: with bf12, round up to 1e-3 of a matrix's weights to the nearest value that its table can
    represent. This changes values.

    Raises ConfigError for weights of another dtype and for round_exceptions without bf12, and CheckpointError if the
    folder cannot be written.
    """
    path, dtype = Path(path), model.tok_embeddings[...].dtype.name
    tensors = _Tensors(model, spelling)
    if spelling == KIND and (weights == "bf12" or set(tensors.paths) != set(tensors.dtypes)):
        raise ConfigError(f"a {KIND} has weights of 16 or 32 bits: add --weights bfloat16")
    if weights is not None and dtype != "bfloat16":
        raise ConfigError(f"weights {weights} must be bfloat16, got {dtype}: convert them with --dtype bfloat16")
    if round_exceptions and weights != "bf12":
        raise ConfigError("round_exceptions requires weights of 12 bits: add --weights bf12")
    try:
        path.mkdir(parents=True, exist_ok=True)
        files = list(_bf12_files(model, round_exceptions) if weights == "bf12" else _plain_files(tensors))
        stale = set(path.glob("*.safetensors")) | {path / INDEX}
        weight_map: dict[str, str] = {}
        total = 0
        for i, file in enumerate(files):
            name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            file.write(path / name)
            stale.discard(path / name)
            weight_map |= dict.fromkeys(file.names, name)
            total += file.size
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_text(path / INDEX, json.dumps(index, indent=1))
            stale.discard(path / INDEX)
        values = tensors.config | {"torch_dtype": dtype} | tensors.quantization
        _write_text(path / "config.json", json.dumps(values, indent=1) + "\n")
        for old in stale:  # files of an earlier save that was split differently
            old.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path} ({error}): make room or choose another folder") from None
    return path


class _File(NamedTuple):
    """A file to be written."""

    names: list[str]
    """Names of its tensors."""
    size: int
    """Bytes of its tensors."""
    write: Callable[[Path], None]
    """Writes the file at a path."""


class _Tensors:
    """The weights of a model in the form of files: tensor name -> array or record."""

    def __init__(self, model: Laneformer, spelling: str = "laneformer_tp"):
        self._config, self._weights = model.config, model.weights()
        table = parameter_table(model.config)
        convert = config_to_llama if spelling == KIND else partial(config_to_hf, spelling=spelling)
        self.config = convert(model.config)
        """Values of config.json."""
        self._llama = llama_sources(model.config) if spelling == KIND else None
        files = {path: self._llama[path].name if self._llama else weight.file_name for path, weight in table.items()}
        self.paths = {name: path for path, name in files.items()}
        self.sizes = {name: self._weights[path].nbytes for name, path in self.paths.items()}
        weights = {name: self._weights[path] for name, path in self.paths.items()}
        self.dtypes = {name: weight.dtype for name, weight in weights.items() if not isinstance(weight, Quantized)}
        matrices = {name for name, path in self.paths.items() if table[path].group != "vector"}
        self.matrices = matrices - {files["tok_embeddings"]}

    def array(self, name: str) -> np.ndarray:
        """The tensor of a weight that is an array, one of `dtypes`."""
        path = self.paths[name]
        weight = np.asarray(plain(self._weights[path]))
        if self._llama:
            return np.ascontiguousarray(to_llama(self._llama[path], path, weight))
        return np.ascontiguousarray(own.to_file(self._config, path, weight))

    def record(self, name: str) -> Quantized:
        """The record of any other weight, as it is in files."""
        weight = self._weights[self.paths[name]]
        if not isinstance(weight, Quantized):
            raise TypeError(f"{name} is an array")
        return own.record_to_file(self._config, self.paths[name], weight.on_host())

    def written(self, name: str) -> dict[str, np.ndarray]:
        """Name -> array of a weight's tensors, several for a record. name: the weight's name in files."""
        if name in self.dtypes:
            return {name: self.array(name)}
        module = name.removesuffix(".weight")
        return {f"{module}.{suffix}": array for suffix, array in tensors_of(self.record(name)).items()}

    def parts(self, name: str) -> list[str]:
        """Names of the tensors of a weight."""
        return [name] if name in self.dtypes else [*self.written(name)]

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config` of config.json for the records; empty without records."""
        records = [name for name in self.paths if name not in self.dtypes]
        settings = {name.removesuffix(".weight"): settings_of(self.record(name)) for name in records}
        plain = {name.removesuffix(".weight") for name in self.matrices & {*self.dtypes}}
        return {"quantization_config": config_of(settings, plain)} if settings else {}


def _plain_files(tensors: _Tensors) -> Iterator[_File]:
    def write(names: list[str], file: Path) -> None:
        write_tensors(file, {part: array for name in names for part, array in tensors.written(name).items()})

    for names in _by_file(tensors.sizes):
        parts = [part for name in names for part in tensors.parts(name)]
        yield _File(parts, sum(tensors.sizes[name] for name in names), partial(write, names))


def _by_file(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names of the weights in each file. sizes: name -> bytes."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > _FILE_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def _bf12_files(model: Laneformer, round_exceptions: bool) -> Iterator[_File]:
    """Files with groups of few exceptions in 12 bits per weight, and all other weights unchanged."""
    tensors = _Tensors(model)
    plans: dict[str, GroupPlan] = {}
    for group in groups_of(model.config, own.sources(model.config, parameter_table(model.config))):
        if all(tensors.dtypes.get(name) == jnp.bfloat16 for name in group.shapes):
            plan = GroupPlan.of(group, _bits(tensors, group.shapes), round_exceptions)
            plans |= {group.name: plan} if plan.fits else {}
    packed = {name for plan in plans.values() for name in plan.group.shapes}
    plain = {name: size for name, size in tensors.sizes.items() if name not in packed}

    def values(name: str) -> list[np.ndarray]:
        return [tensors.array(name)]

    def outputs(names: list[str]) -> dict[str, Output]:
        found: dict[str, Output] = {}
        for name in names:
            if name in plans:
                found |= plans[name].outputs(partial(_bits, tensors, plans[name].group.shapes))
            else:
                array = tensors.array(name)
                found[name] = Output(_NAMES[array.dtype], array.shape, array.nbytes, partial(values, name))
        return found

    def write(names: list[str], file: Path) -> None:
        groups = [plans[name].group for name in names if name in plans]
        write_outputs(file, outputs(names), metadata_of(groups))

    sizes = {name: plan.size for name, plan in plans.items()} | plain
    for names in _by_file(sizes):
        found = outputs(names)
        yield _File([*found], sum(output.size for output in found.values()), partial(write, names))


def _bits(tensors: _Tensors, names: Collection[str]) -> dict[str, np.ndarray]:
    """Name -> bits of bfloat16, uint16, of these tensors."""
    return {name: tensors.array(name).view(np.uint16) for name in names}


def _write_text(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
