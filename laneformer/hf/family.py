"""What the registry in laneformer/hf/__init__.py knows of a family of checkpoints."""

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
    """A family that `laneformer.load` opens has `config_from` and `sources`; a mixture of experts has `dimensions`."""

    name: str
    """As people write it."""
    config_from: Callable[[Fields, int | None], ModelConfig] | None = None
    """The config, with a dense model cut into the given number of lanes."""
    sources: "Callable[[ModelConfig, Mapping[str, Weight]], dict[str, Source]] | None" = None
    """Path of each weight -> the tensor that it comes from, for a config and its `parameter_table`."""
    ignored: Callable[[Fields], tuple[str, ...]] = lambda fields: ()
    """What the names of tensors begin with that the model does not use: those that draft further tokens."""
    never_packed: tuple[str, ...] = ()
    """What the paths of matrices end with that are 16 bits wide, though the quantization does not except them. Files
    that have them quantized are refused.
    """
    rules: Callable[[Fields], Rules] = lambda fields: []
    """How matrices are packed of which fields outside of quantization_config say so, where there is one."""
    dimensions: Callable[[Fields], Dimensions] | None = None
    """Sizes and formats of what `laneformer.load` cannot open yet, for the roofline."""
