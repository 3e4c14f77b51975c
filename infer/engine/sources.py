"""What the benchmark runs: a checkpoint, or the model of a recipe with random weights."""

import dataclasses
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs.models import MODELS
from laneformer.checkpoint import read_config
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.mesh import sharding
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.recipe import call_recipe
from laneformer.weights import packing_order, parameter_table

BLOCK = 1_048_573  # a prime, so that the rows of a matrix differ


class RandomSource:
    """Any model with random weights, for measurements: made one at a time, as fast as memory is written. A `Source`."""

    quantized: tuple[str, ...] = ()

    def __init__(
        self, config: ModelConfig, dtype="bfloat16", *, mesh: Mesh | None = None, precision: Precision | None = None
    ):
        """dtype: of the weights. precision: by default `Precision.default(dtype)`."""
        self.config, self.mesh, self.stored_dtype = config, mesh, jnp.dtype(dtype).name
        self.precision = dataclasses.replace(precision or Precision.default(dtype), param=self.stored_dtype)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """One block of normal numbers repeated, from another place for each weight; deviations are those of
        `initial_weights`.
        """
        size = min(BLOCK, max(math.prod(p.shape) for p in parameter_table(self.config).values()))
        normal = np.random.default_rng(0).standard_normal(size, np.float32)
        outputs = 0.02 / math.sqrt(2 * self.config.num_hidden_layers)
        scaled = {
            name: (deviation * normal).astype(self.stored_dtype)
            for name, deviation in (("normal", 0.02), ("embedding", 0.02), ("output", outputs))
        }
        table = parameter_table(self.config)
        for path in packing_order(self.config):
            parameter = table[path]
            if parameter.initial in scaled:
                block = np.roll(scaled[parameter.initial], zlib.crc32(path.encode()) % size)
                yield path, np.resize(block, parameter.shape)
            else:
                yield path, np.full(parameter.shape, parameter.initial == "ones", self.stored_dtype)

    def model(self) -> Laneformer:
        """All of it as JAX arrays, on the mesh."""
        weights = {}
        for path, array in self.weights():
            spec = parameter_table(self.config)[path].spec
            weights[path] = jax.device_put(array, None if self.mesh is None else sharding(spec, array.shape, self.mesh))
        return Laneformer(self.config, weights, self.precision, self.mesh)


def is_recipe(name: str) -> bool:
    """Whether a --checkpoint means a recipe: FILE.py:FUNCTION, MODULE:FUNCTION, or a word that is no folder here."""
    return not Path(name).exists() and (":" in name or os.sep not in name)


def recipe_config(name: str) -> ModelConfig:
    """Model of a recipe after its last phase: a name in configs/models.py, or a user's MODULE:FUNCTION or
    FILE.py:FUNCTION, which returns a TrainConfig or a ModelConfig. Raises ConfigError for anything else.
    """
    if ":" not in name:
        if name not in MODELS:
            raise ConfigError(
                f"--checkpoint {name} is neither a folder nor a recipe; choose a folder, {', '.join(MODELS)}, or"
                " FILE.py:FUNCTION"
            )
        return MODELS[name]
    made = call_recipe(name)
    if phases := getattr(made, "phases", None):  # of a TrainConfig, which is not imported here
        made = phases[-1].model
    if not isinstance(made, ModelConfig):
        raise ConfigError(f"--checkpoint {name} returns a {type(made).__name__}; return a TrainConfig or a ModelConfig")
    return made


def model_config(checkpoint: str, lanes: int | None = None) -> ModelConfig:
    """Of a checkpoint or a recipe, without weights. Raises ConfigError or CheckpointError."""
    if not is_recipe(checkpoint):
        return read_config(checkpoint, lanes)
    if lanes is not None:
        raise ConfigError("--lanes is for dense checkpoints: a recipe has its own number")
    return recipe_config(checkpoint)
