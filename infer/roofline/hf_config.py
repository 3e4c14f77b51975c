"""The config.json given to `infer roofline`: of a mixture of experts, read by its dimensions, or of a model that this
package runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.errors import CheckpointError, ConfigError, InputError
from laneformer.hf import FAMILIES, dimensions_from_hf, read_values
from laneformer.infer.roofline.published import MoeModel


@dataclass(frozen=True)
class ConfigFile:
    """A config.json with its parsed values."""

    file: Path
    name: str
    """Name of the model: that of the file, or of its folder if the file is called config.json."""
    values: Mapping[str, Any]

    @property
    def is_moe(self) -> bool:
        """Whether to read the file with `moe`: its family has dimensions for the roofline, or is unknown."""
        family = FAMILIES.get(str(self.values.get("model_type")))
        return family is None or family.dimensions is not None

    def moe(self) -> MoeModel:
        """The model by its dimensions. Raises ConfigError with the name of the field for an unknown architecture."""
        try:
            dimensions = dimensions_from_hf(self.values)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None
        return MoeModel(
            name=self.name, dimensions=dimensions, source=f"{self.file}", precision_source=dimensions.formats
        )


def read_config_file(path: str) -> ConfigFile:
    """Reads a config.json. path: the file, which may have any name, or its folder. Raises InputError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise InputError(f"{file} does not exist: give the config.json of a model on the Hugging Face hub")
    try:
        values = read_values(file)
    except CheckpointError as error:
        raise InputError(str(error)) from None
    return ConfigFile(file, file.resolve().parent.name if file.name == "config.json" else file.stem, values)
