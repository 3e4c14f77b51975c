"""`python -m scripts.quantize MODEL OUT --weights int4 --group 32`: rounds a model's matrices to 8 or 4 bits a weight.

OUT is a Hugging Face folder in the format of compressed-tensors, with MODEL's names, so that other engines can read it.
Embedding table, head, norms and biases are not changed. docs/quantized.md describes the rounding.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import laneformer as lf
from laneformer.commands.convert import TOKENIZER_FILES
from laneformer.errors import CheckpointError, ConfigError, run_command
from laneformer.files import files_inside
from laneformer.hf import read_values
from laneformer.hf.folder import HfFolder
from laneformer.hf.packed.compressed import config_of, settings_of, tensors_of
from laneformer.hf.safetensors import DTYPES, INDEX, Stack, Tensor, write_tensors
from laneformer.quantized.rounding import Kind, relative_error, round_to
from laneformer.train.config import DataConfig
from laneformer.train.data.batches import Batches
from laneformer.train.data.store import TokenStore

EXACT = ("router", "shared_gate", "wba")  # small, sensitive matrices, which published models do not round either


@dataclass(frozen=True, kw_only=True)
class Options:
    """Round the matrices of a Hugging Face folder to 8 or 4 bits per weight, written as compressed-tensors."""

    model: tyro.conf.Positional[Path]
    """Hugging Face folder with weights of 16 or 32 bits: a Laneformer or a model of docs/conversion.md."""
    out: tyro.conf.Positional[Path]
    """Folder to write."""
    weights: Kind
    """Format: int8 and fp8 keep 8 bits of each weight, int4 and mxfp4 4."""
    group: Annotated[str | None, tyro.conf.arg(metavar="{INT,row,block,tensor}")] = None
    """Weights that share a scale: 32, 64 or 128 columns, a row, a block of 128 x 128 or the tensor (default: int4,
    mxfp4 32; int8 row; fp8 block).
    """
    head: bool = False
    """Round the head as well, unless it is the embedding table."""
    data: Path | None = None
    """Folder of `python -m scripts.tokenize` with text on which both models are compared."""
    rows: int = 16
    """Number of sequences of --data to compare on, each of up to 512 tokens."""
    overwrite: bool = False
    """Replace a checkpoint in OUT."""


class Rounded(NamedTuple):
    """A matrix that was rounded."""

    settings: str
    """Settings in the file's config, see `settings_of`."""
    error: float
    """Error relative to the matrix's root mean square."""
    bytes: int
    weights: int


def quantize(options: Options) -> str:
    """Writes the folder and returns the report. Raises LaneformerError."""
    if (options.out / "config.json").exists() and not options.overwrite:
        raise CheckpointError(f"{options.out} already holds a checkpoint; choose another folder, or give --overwrite")
    if options.out.absolute() == options.model.absolute():
        raise CheckpointError("MODEL and OUT are the same folder; choose another OUT")
    if not (options.model / "config.json").exists():
        raise CheckpointError(
            f"{options.model} has no config.json; write a Hugging Face folder with python -m scripts.convert first"
        )
    if options.rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {options.rows}")
    tokenizer_files = files_inside(options.model, TOKENIZER_FILES)
    folder = HfFolder(options.model)
    if folder.quantized:
        raise CheckpointError(f"{options.model} is quantized already; give the model that it was made from")
    ids = None if options.data is None else read_rows(options.data, folder.config, options.rows)
    rounded = write(folder, options)
    for file in tokenizer_files:
        shutil.copyfile(file, options.out / file.name)
    lines = [f"{name}  {100 * found.error:.2f} %" for name, found in rounded.items()]
    weights, size = (sum(getattr(found, field) for found in rounded.values()) for field in ("weights", "bytes"))
    lines.append(
        f"{options.out}: {len(rounded)} matrices, {weights:,} weights in {8 * size / weights:.2f} bits each; mean error"
        f" {100 * np.mean([found.error for found in rounded.values()]):.2f} % of a matrix's root mean square"
    )
    return "\n".join(lines if ids is None else [*lines, compare(options, ids)])


def write(folder: HfFolder, options: Options) -> dict[str, Rounded]:
    """Writes as many files as the source has, with one in memory at a time; returns the rounded matrices by name."""
    tensors = _tensors(folder)
    matrices: set[str] = set()
    kept: set[str] = set()
    integers: set[str] = set()
    for path, source in folder.sources.items():
        if source.integers:
            integers.update(source.names)
        elif folder.table[path].group == "matrix" or path == "lm_head":
            exact = path.endswith((*EXACT, *folder.never_packed)) or (path == "lm_head" and not options.head)
            (kept if exact else matrices).update(source.names)

    def file_of(name: str) -> Path:
        return tensors[name].file

    rounded: dict[str, Rounded] = {}
    weight_map: dict[str, str] = {}
    total = 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for file, names in groupby(sorted(tensors, key=file_of), file_of):
            written = {}
            for name in names:
                tensor = tensors[name]
                if tensor.dtype not in DTYPES and name not in integers:
                    continue
                array = tensor.read(np.empty(tensor.size, np.uint8))
                if name not in matrices:
                    written[name] = array
                    continue
                rounded[name], parts = one(name, array, options)
                written |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
            write_tensors(options.out / file.name, written)
            weight_map |= dict.fromkeys(written, file.name)
            total += sum(array.nbytes for array in written.values())
        if (options.model / INDEX).exists():
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (options.out / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        modules = {name.removesuffix(".weight"): found.settings for name, found in rounded.items()}
        values = read_values(options.model / "config.json")
        values["quantization_config"] = config_of(modules, {name.removesuffix(".weight") for name in kept})
        (options.out / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {options.out} ({error}): make room or choose another folder") from None
    return rounded


def _tensors(folder: HfFolder) -> dict[str, Tensor]:
    """Tensors of the source's files by name; stacked experts are listed one by one."""
    stacks = {source.name: source.names for source in folder.sources.values() if source.experts is not None}
    found: dict[str, Tensor] = {}
    for name, tensor in folder.tensors.items():
        found |= zip(stacks[name], tensor.parts, strict=True) if isinstance(tensor, Stack) else {name: tensor}.items()
    return found


def one(name: str, array: np.ndarray, options: Options) -> tuple[Rounded, dict[str, np.ndarray]]:
    """Rounds a matrix; returns its record and its tensors by suffix. Raises ConfigError, which names the matrix."""
    if not name.endswith(".weight"):  # gpt-oss
        raise ConfigError(f"tensor {name} has all experts: only models with a tensor for each expert can be rounded")
    shared: Any = options.group  # `round_to` reports what is no group
    if shared and shared.isdigit():
        shared = int(shared)
    try:
        record = round_to(array, options.weights, shared)
    except ConfigError as error:
        raise ConfigError(f"tensor {name}: {error}") from None
    if options.weights != "fp8" and array.shape[-1] % record.group[1]:
        raise ConfigError(
            f"tensor {name}: --group {record.group[1]} does not divide its {array.shape[-1]:,} columns; choose another"
            " group or format"
        )
    found = Rounded(settings_of(record), relative_error(array, record), record.nbytes, array.size)
    return found, tensors_of(record)


def read_rows(path: Path, config: lf.ModelConfig, rows: int) -> np.ndarray:
    """Token ids of text, int32 [rows, length + 1]. Raises InputError or ConfigError for a folder that does not fit."""
    store = TokenStore.open(path)
    if store.manifest.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{path} has a vocabulary of {store.manifest.vocab_size}, but the model has {config.vocab_size}; tokenize"
            " with the model's tokenizer.json"
        )
    length = min(512, config.max_position_embeddings - 1)
    data = DataConfig(path=(path,), sequence_length=length, batch_size=rows)
    return Batches(data, [store], 0).batch_at(0)["ids"]


def compare(options: Options, ids: np.ndarray) -> str:
    """Loss and greedy tokens of both models on the same text."""
    (before, first), (after, second) = (measure(path, ids) for path in (options.model, options.out))
    return (
        f"{ids[:, 1:].size:,} tokens of {options.data}: loss {before:.4f} -> {after:.4f} ({after - before:+.4f}), the"
        f" most likely token is the same in {100 * np.mean(first == second):.2f} %"
    )


def measure(path: Path, ids: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean loss in nats, and the most likely token at each position, int [rows, length]; products in float32."""
    model = lf.load(path, "float32")

    @jax.jit
    def row(model, ids_s):
        logits = model(ids_s[None, :-1])[0]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, ids_s[1:, None], -1)[:, 0]
        return losses.mean(), logits.argmax(-1)

    losses, tokens = zip(*(jax.device_get(row(model, ids_s)) for ids_s in ids), strict=True)
    return float(np.mean(losses)), np.stack(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(quantize, Options, "python -m scripts.quantize", arguments)


if __name__ == "__main__":
    sys.exit(main())
