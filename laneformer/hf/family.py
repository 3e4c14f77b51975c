"""The description of a family of checkpoints, as the registry in laneformer/hf/__init__.py contains it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laneformer.config import ModelConfig
from laneformer.hf.dimensions import Dimensions
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import Rules
from laneformer.hf.safetensors import Source

if TYPE_CHECKING:  # imports JAX
    from laneformer.blocks.block import Weight


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family that `laneformer.load` opens has `config_from` and `sources`. A mixture of experts has `dimensions`."""

    name: str
    """Name for messages, as people write it."""
    config_from: Callable[[Fields, int | None], ModelConfig] | None = None
    """Makes the config; a dense model is cut into the given number of lanes."""
    sources: "Callable[[ModelConfig, Mapping[str, Weight]], dict[str, Source]]" = lambda config, table: {}
    """Maps each weight's path to the tensor that contains the weight, for a config and its `parameter_table`."""
    ignored: Callable[[Fields], tuple[str, ...]] = lambda fields: ()
    """Prefixes of the names of tensors that the model does not use, such as those that draft further tokens."""
    variant: "Callable[[Fields], Family] | None" = None
    """Returns the family for a config whose tensors mean something else, such as another order of rows."""
    renamed: Callable[[str], str] = lambda name: name
    """Returns the name in `sources` of a tensor that some files name differently."""
    never_packed: tuple[str, ...] = ()
    """Suffixes of the paths of matrices that are not quantized, although the config's quantization does not except
    them. Files in which they are quantized are refused.
    """
    rules: Callable[[Fields], Rules] = lambda fields: []
    """Packings of matrices that fields outside of quantization_config determine, for quantized models."""
    dimensions: Callable[[Fields], Dimensions] | None = None
    """Sizes and formats of a mixture of experts, for the roofline."""
