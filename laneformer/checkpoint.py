"""Opens any checkpoint: an HF folder, a training run, or one saved step of a run."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError, ConfigError, one_line
from laneformer.files import check_folder, parse_json, read_file, refuse_link_loops
from laneformer.formats import KERNEL_FORMATS, Bf12Product
from laneformer.hf import config_from_hf, find_family, language_model, read_hf_config
from laneformer.hf.folder import HfFolder
from laneformer.hf.packed.quantization import read_schemes
from laneformer.hf.safetensors import MappedFile
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.weights import packing_order, parameter_table

STEPS = "checkpoints"  # folder in a run's folder, with one folder per saved step
PARAMS, META = "params", "meta"  # Orbax items of a step


def load(
    path: str | Path,
    dtype: DTypeLike | None = None,
    *,
    mesh: Mesh | None = None,
    num_lanes: int | None = None,
    precision: Precision | None = None,
    weights: Literal["bfloat16"] | None = None,
) -> Laneformer:
    """The model in `path`, with its config as `.config`. Raises CheckpointError or ConfigError, naming file and remedy.

    path: an HF folder (config.json and safetensors), a training run (its newest complete step), or the folder of one
    step. An HF folder contains a Laneformer, or a model of another family in docs/conversion.md, which becomes
    `num_lanes` lanes with layout tp.
    dtype: dtype of the weights, by default the stored one. Quantized weights (docs/quantized.md) stay quantized.
    mesh: from `make_mesh`, by default one device.
    precision: dtypes of the computation, by default `Precision.default(dtype)`.
    weights: "bfloat16" converts quantized weights to arrays of `dtype`.
    """
    return open_checkpoint(path, dtype, num_lanes, weights).model(mesh, precision)


def open_checkpoint(
    path: str | Path,
    dtype: DTypeLike | None = None,
    num_lanes: int | None = None,
    weights: Literal["bfloat16"] | None = None,
) -> "HfFolder | SavedStep":
    """The checkpoint in `path`, validated without reading weights. Arguments and errors are those of `load`.

    The result has `.config`, `.dtype`, `.weights()` (one weight at a time), `.packed()` (weights that a kernel can use
    as they are stored), `.mapped` (the files that these use) and `.model()`.
    """
    if dtype is not None:
        _check_dtype(dtype)
    step = _step_folder(Path(path))
    return HfFolder(path, dtype, num_lanes, weights) if step is None else SavedStep(step, dtype, num_lanes)


def open_plain(
    path: str | Path, dtype: DTypeLike | None = None, num_lanes: int | None = None
) -> "HfFolder | SavedStep":
    """Like `open_checkpoint`, for programs that change weights. Raises CheckpointError if any weight is quantized."""
    found = open_checkpoint(path, dtype, num_lanes)
    if found.quantized:
        raise CheckpointError(
            f"{path} has quantized weights: convert it to 16 bits first with python -m scripts.convert {path} OUT"
            " --dtype bfloat16 --weights bfloat16"
        )
    return found


class SavedStep:
    """A saved step of a training run, with the attributes of `HfFolder`."""

    quantized: tuple[str, ...] = ()

    def __init__(self, step: Path, dtype: DTypeLike | None = None, num_lanes: int | None = None):
        meta = read_meta(step)
        self.step, self.config = step, config_from_hf(meta["config"])
        if num_lanes not in (None, self.config.num_lanes):
            raise CheckpointError(f"num_lanes = {num_lanes}: {step} was trained with {self.config.num_lanes} lanes")
        self.dtype = jnp.dtype(dtype or meta["param_dtype"]).name
        self.mapped: dict[Path, MappedFile] = {}  # a run does not store packed weights

    def weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, np.ndarray]]:
        """Path and array of each weight, in `packing_order`, except the paths in `without`. All weights are restored at
        once; each is freed when the next one is requested.
        """
        weights = restore_params(self.step, self.config, self.dtype)
        for path in packing_order(self.config):
            weight = np.asarray(weights.pop(path))
            if path not in without:
                yield path, weight

    def packed(self) -> Iterator[Bf12Product]:
        """An empty iterator."""
        return iter(())

    def model(self, mesh: Mesh | None = None, precision: Precision | None = None) -> Laneformer:
        """The model with all weights; see `load`."""
        return Laneformer(self.config, restore_params(self.step, self.config, self.dtype, mesh), precision, mesh)


def read_config(path: str | Path, num_lanes: int | None = None) -> ModelConfig:
    """The config of the checkpoint in `path`; no weights are read. Raises the errors of `load`."""
    step = _step_folder(Path(path))
    return read_hf_config(path, num_lanes) if step is None else SavedStep(step, num_lanes=num_lanes).config


def packed_bytes(path: Path, values: Mapping[str, Any], config: ModelConfig) -> dict[str, float]:
    """Path -> bytes per weight of each quantized matrix, according to the config.json `values` in the folder `path`. No
    weights are read. Raises ConfigError, naming file and field.
    """
    family = find_family(values)
    schemes = read_schemes(path, language_model(values), family.rules)
    table = parameter_table(config)
    sources = family.sources(config, table)
    if schemes is None or not sources:
        return {}
    return schemes.bytes(
        {
            path: sources[path].names[0]
            for path, weight in table.items()
            if weight.group == "matrix" and not path.endswith(family.never_packed)
        }
    )


def _step_folder(path: Path) -> Path | None:
    """The folder of the saved step in `path`, or None if `path` is an HF folder. Otherwise raises CheckpointError."""
    refuse_link_loops(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; choose an HF folder (config.json + safetensors) or a training run"
        )
    if (path / "config.json").exists():
        return None
    step = newest_step(path) if (path / STEPS).is_dir() else path
    if not (step / META).is_dir():
        raise CheckpointError(f"{path} has neither config.json (HF folder) nor {STEPS}/ (training run)")
    return step


def _check_dtype(dtype: DTypeLike) -> None:
    try:
        known = jnp.dtype(dtype).name in KERNEL_FORMATS
    except TypeError:
        known = False
    if not known:
        raise ConfigError(f"unknown dtype {dtype!r} of weights; choose {', '.join(KERNEL_FORMATS)}")


def checkpoint_files(path: str | Path) -> Path:
    """The folder with the checkpoint's tokenizer.json: the run for a step of a run, otherwise the folder itself."""
    path = Path(path).absolute()
    return path.parent.parent if path.parent.name == STEPS else path


def is_run(path: str | Path) -> bool:
    """Whether a path is a training run or one step of a run."""
    path = Path(path)
    return not (path / "config.json").exists() and any((path / name).is_dir() for name in (STEPS, META))


def complete_steps(run: Path) -> list[int]:
    """Completely saved steps of a run, ascending. Orbax renames a step's folder after writing its last file."""
    folder = Path(run) / STEPS
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and (p / META).is_dir())


def newest_step(run: Path) -> Path:
    """The folder of the newest complete step. Raises CheckpointError if there is none."""
    steps = complete_steps(run)
    if not steps:
        raise CheckpointError(f"{run} has no complete checkpoint yet; train until the first one is saved")
    return Path(run) / STEPS / str(steps[-1])


def read_meta(step: Path) -> dict[str, Any]:
    """A step's record: config, step, versions, tokenizer. Raises CheckpointError if it is unreadable."""
    try:
        meta = parse_json(read_file(step / META / "metadata"))
        wanted = {"config": dict, "param_dtype": str, "fingerprint": dict}
        if not isinstance(meta, dict) or not all(isinstance(meta.get(name), kind) for name, kind in wanted.items()):
            raise ValueError(f"{META} lacks config, param_dtype or fingerprint")
        return meta
    except (OSError, ValueError) as error:
        raise _damaged(step, f"is damaged ({one_line(error)})") from None


def restore_params(step: Path, config: ModelConfig, dtype: str, mesh: Mesh | None = None) -> dict[str, jax.Array]:
    """Path -> weight in the given dtype. Each is read directly onto its devices, whatever mesh saved it. Raises
    CheckpointError for a damaged step, or one that does not fit the config.
    """
    single = SingleDeviceSharding(jax.devices()[0])
    meta = read_meta(step)
    table = parameter_table(config)
    wanted = {
        path: jax.ShapeDtypeStruct(
            p.shape, p.dtype or dtype, sharding=single if mesh is None else sharding(p.spec, p.shape, mesh)
        )
        for path, p in table.items()
    }
    check_folder(step / PARAMS)
    try:
        with ocp.StandardCheckpointer() as reader:
            weights: dict[str, jax.Array] = reader.restore((step / PARAMS).absolute(), wanted)
    except Exception as error:  # Orbax raises the errors of its threads, even a plain Exception
        raise _damaged(step, f"is damaged or does not fit its config ({one_line(error)})") from None
    if dtype == meta["param_dtype"] and fingerprint(weights) != meta["fingerprint"][PARAMS]:
        raise _damaged(step, "is damaged: its weights differ from those saved")
    return weights


def _damaged(step: Path, what: str) -> CheckpointError:
    """The error for a step that cannot be read; its remedy is the newest other step of the run."""
    others = [n for n in complete_steps(step.parent.parent) if str(n) != step.name] if step.parent.name == STEPS else []
    return CheckpointError(
        f"{step} {what}; {f'use {step.with_name(str(others[-1]))} instead' if others else 'restore a copy'}"
    )


def fingerprint(tree: Any) -> int:
    """A 32-bit checksum of the arrays in `tree`, which any single changed bit changes, and which is the same on every
    mesh.

    It is the sum of bits[i] (2 i + 1) mod 2^32 over all elements, numbered across the leaves. An odd factor loses no
    bit, and the sum of integers does not depend on their order. TensorStore keeps no checksums of some files, and
    nothing else would detect a wrong weight.
    """
    total, first = 0, 0
    # One leaf at a time: on a CPU, many queued programs with sums over devices block each other.
    for x in jax.tree.leaves(tree):
        total += int(_leaf_fingerprint(x, np.uint32(first % 2**32)))
        first += x.size
    return total % 2**32


@jax.jit
def _leaf_fingerprint(x: jax.Array, first: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index, stride = first, 1
    for axis in reversed(range(x.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
