"""The models that --checkpoint names: checkpoints, and the models of recipes with random weights."""

import dataclasses
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from laneformer.checkpoint import read_config
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.infer.engine.backend import model_of, on_host
from laneformer.mesh import put_weight
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.quantized import E2M1, Quantized
from laneformer.recipe import call_recipe
from laneformer.recipes.models import MODELS, PACKED, PackedModel
from laneformer.weights import packing_order, parameter_table

BLOCK = 1_048_573  # a prime, so that the rows of a matrix differ


class RandomSource:
    """Any model with random weights, for measurements. The weights are made one at a time, as fast as memory can be
    written. A `Source`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype="bfloat16",
        *,
        mesh: Mesh | None = None,
        precision: Precision | None = None,
        formats: Mapping[str, str] | None = None,
    ):
        """dtype: dtype of the weights. precision: by default `Precision.default(dtype)`. formats: formats of the
        quantized weights; see PackedModel in configs/models.py.
        """
        self.config, self.mesh, self.stored_dtype = config, mesh, jnp.dtype(dtype).name
        self._formats = _quantized(config, formats or {})
        self.quantized = tuple(self._formats)
        self.precision = dataclasses.replace(precision or Precision.default(dtype), param=self.stored_dtype)

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Each weight repeats one block of normal numbers from a different offset, with the standard deviation of
        `initial_weights`. Records are made of random codes directly, not by rounding floats.
        """
        return self._made(_repeated)

    def _made(self, repeated: "Repeat") -> Iterator[tuple[str, Any]]:
        """The weights. repeated: makes an array that repeats a block."""
        size = min(BLOCK, max(math.prod(p.shape) for p in parameter_table(self.config).values()))
        normal = np.random.default_rng(0).standard_normal(size, np.float32)
        outputs = 0.02 / math.sqrt(2 * self.config.num_hidden_layers)
        deviations = {"normal": 0.02, "embedding": 0.02, "output": outputs}
        scaled = {name: (one * normal).astype(self.stored_dtype) for name, one in deviations.items()}
        codes = {kind: _random_codes(kind, normal) for kind in set(self._formats.values())}
        table = parameter_table(self.config)
        for path in packing_order(self.config):
            parameter, offset = table[path], zlib.crc32(path.encode()) % size
            if kind := self._formats.get(path):
                repeat = partial(repeated, codes[kind], offset)
                yield path, _record(kind, repeat, parameter.shape, deviations[parameter.initial])
            elif parameter.initial in scaled:
                yield path, repeated(scaled[parameter.initial], offset, parameter.shape)
            elif parameter.below is not None:  # a table of the experts of each token: consecutive ones
                rows, used = parameter.shape
                first = used * np.arange(rows, dtype=parameter.dtype)[:, None]
                yield path, (first + np.arange(used, dtype=parameter.dtype)) % parameter.below
            else:
                yield path, np.full(parameter.shape, parameter.initial == "ones", self.stored_dtype)

    def model(self) -> Laneformer:
        """The model as JAX arrays, on the mesh. On one accelerator they are made there, because the host would need
        longer to make and send them; the values are the same.
        """
        if self.mesh is not None or on_host():
            return model_of(self)
        return Laneformer(self.config, dict(self._on_device()), self.precision, None)

    def _on_device(self) -> Iterator[tuple[str, jax.Array | Quantized[jax.Array]]]:
        """The weights on the first device. Blocks are sent again for each weight: they are small."""

        def repeated(block: np.ndarray, offset: int, shape: tuple[int, ...]) -> jax.Array:
            return _repeat(block, np.int32(offset), shape)

        for path, weight in self._made(repeated):
            yield path, put_weight(weight, parameter_table(self.config)[path].spec, None)


Repeat = Callable[[np.ndarray, int, tuple[int, ...]], Any]
"""(block, offset, shape) -> an array of the shape that repeats the block, which is rolled by the offset."""


def _repeated(block: np.ndarray, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.roll(block, offset), shape)


@partial(jax.jit, static_argnums=2)
def _repeat(block: jax.Array, offset: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`_repeated` on the block's device."""
    total = math.prod(shape)
    return jnp.tile(jnp.roll(block, offset), -(-total // len(block)))[:total].reshape(shape)


def _quantized(config: ModelConfig, formats: Mapping[str, str]) -> dict[str, str]:
    """The format of each quantized matrix, by its path. formats: the same, by paths without the layer's number."""
    matrices = (path for path, weight in parameter_table(config).items() if weight.group == "matrix")
    return {path: kind for path in matrices if (kind := formats.get(path.split(".", 2)[-1]))}


def _random_codes(kind: str, normal: np.ndarray) -> np.ndarray:
    """Bytes of codes, uint8, as many as `normal` has numbers: uniform for mxfp4, the rounded numbers for fp8. Raises
    ConfigError for another format.
    """
    if kind == "mxfp4":
        return np.random.default_rng(1).integers(0, 256, len(normal), np.uint8)
    if kind == "fp8":
        return normal.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    raise ConfigError(f"unknown format {kind!r} of random weights; choose mxfp4 or fp8")


def _record(kind: str, repeat: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...], deviation: float) -> Quantized:
    """A record of this shape. Its weights have the standard deviation `deviation`; for mxfp4 this holds to the nearest
    power of 2. repeat: makes an array of random codes, uint8.
    """
    *lead, rows, columns = shape
    if kind == "mxfp4":
        exponent = 127 + round(math.log2(deviation / np.sqrt(np.mean(E2M1**2))))
        scales = np.full((*lead, rows, -(-columns // 32)), exponent, np.uint8)
        return Quantized(kind, repeat((*lead, rows, columns // 2)), scales, (1, 32), columns)
    scales = np.full((*lead, -(-rows // 128), -(-columns // 128)), deviation, ml_dtypes.bfloat16)
    return Quantized(kind, repeat(shape), scales, (128, 128), columns)


def is_recipe(name: str) -> bool:
    """Whether a --checkpoint names a recipe: FILE.py:FUNCTION, MODULE:FUNCTION, or a word that is not a folder here."""
    return not Path(name).exists() and (":" in name or os.sep not in name)


def recipe_config(name: str) -> ModelConfig:
    """The config of the model of a recipe; see `recipe_model`."""
    return recipe_model(name).config


def recipe_model(name: str, lanes: int | None = None) -> PackedModel:
    """The model of a recipe after its last phase.

    name: a name in configs/models.py, or a user's MODULE:FUNCTION or FILE.py:FUNCTION that returns a TrainConfig, a
    ModelConfig or a PackedModel. lanes: number of lanes to cut a model of one lane into. Raises ConfigError for
    anything else.
    """
    made = _made(name)
    if lanes is None:
        return made
    if made.config.num_lanes != 1:
        raise ConfigError(f"--lanes {lanes}: {name} has {made.config.num_lanes} lanes, which are fixed; leave it out")
    return made._replace(config=made.config.replace(num_lanes=lanes))


def _made(name: str) -> PackedModel:
    if ":" not in name:
        if name not in MODELS:
            raise ConfigError(
                f"--checkpoint {name} is neither a folder nor a recipe; choose a folder, {', '.join(MODELS)}, or"
                " FILE.py:FUNCTION"
            )
        return PACKED.get(name, PackedModel(MODELS[name]))
    made = call_recipe(name)
    if phases := getattr(made, "phases", None):  # a TrainConfig, whose class may not be imported here
        made = phases[-1].model
    made = PackedModel(made) if isinstance(made, ModelConfig) else made
    if not isinstance(made, PackedModel):
        raise ConfigError(
            f"--checkpoint {name} returns a {type(made).__name__}; return a TrainConfig, a ModelConfig or a PackedModel"
        )
    return made


def packed_bytes(name: str) -> dict[str, float]:
    """Bytes per weight of each quantized matrix of a recipe's model, by its path; see laneformer.checkpoint."""
    model = recipe_model(name)
    return {path: FORMATS[kind].bytes for path, kind in _quantized(model.config, model.formats).items()}


def model_config(checkpoint: str, lanes: int | None = None) -> ModelConfig:
    """The config of the model of a checkpoint or a recipe, read without weights. lanes: see `recipe_model`. Raises
    ConfigError or CheckpointError.
    """
    if not is_recipe(checkpoint):
        return read_config(checkpoint, lanes)
    return recipe_model(checkpoint, lanes).config
