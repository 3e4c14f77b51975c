"""A config.json that `infer roofline` is given: a mixture of experts by its dimensions, or a model that runs here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.roofline.published import MoeModel
from laneformer.errors import CheckpointError, ConfigError, InputError
from laneformer.hf import FAMILIES, dimensions_from_hf, read_values


@dataclass(frozen=True)
class ConfigFile:
    """A config.json with its parsed values."""

    file: Path
    name: str
    """The model's name: the file's, or its folder's where the file is called config.json."""
    values: Mapping[str, Any]

    @property
    def is_moe(self) -> bool:
        """Whether it is read by `moe`: every model that laneformer cannot run."""
        family = FAMILIES.get(str(self.values.get("model_type")))
        return family is None or family.dimensions is not None

    def moe(self) -> MoeModel:
        """What a token reads. Raises ConfigError, naming the field, for an unknown architecture."""
        try:
            dimensions = dimensions_from_hf(self.values)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None
        return MoeModel(
            name=self.name, dimensions=dimensions, source=f"{self.file}", precision_source=dimensions.formats
        )


def read_config_file(path: str) -> ConfigFile:
    """A config.json, under any name, or that of a folder. Raises InputError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise InputError(f"{file} does not exist: give the config.json of a model on the Hugging Face hub")
    try:
        values = read_values(file)
    except CheckpointError as error:
        raise InputError(str(error)) from None
    return ConfigFile(file, file.resolve().parent.name if file.name == "config.json" else file.stem, values)
