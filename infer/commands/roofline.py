"""python -m infer roofline: project the speed of a model on hardware that you do not have."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from laneformer.errors import ConfigError
from laneformer.hf import read_values
from laneformer.infer.roofline.hf_config import ConfigFile, read_config_file
from laneformer.infer.roofline.options import Options, check
from laneformer.infer.roofline.published import MoeModel, find_moe

if TYPE_CHECKING:
    from laneformer.config import ModelConfig

__all__ = ["Options", "run"]

SCHEMA = "laneformer.roofline/1"


def run(options: Options) -> int:
    file = read_config_file(options.config) if options.config else None
    check(options, file)
    from laneformer.infer.roofline import (
        plot,  # here, because it imports JAX, which --help and wrong options do not need
    )
    from laneformer.infer.roofline.report import make_report

    model = find_model(options, file)
    packed = find_packed(options, file, model)
    report = make_report(options, model, options.checkpoint or (file.name if file else ""), packed)
    print("\n\n".join(table.text() for table in report.tables))
    for note in report.notes:
        print(f"Note: {note}")
    if options.json:
        record = {
            "schema": SCHEMA,
            "asked": dataclasses.asdict(options),
            "tables": [table.record() for table in report.tables],
            "notes": report.notes,
        }
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    if options.png:
        plot.draw(options.png, report.title, report.panels, report.assumptions)
    return 0


def find_model(options: Options, file: ConfigFile | None) -> "ModelConfig | list[MoeModel] | None":
    """The model, or the mixture-of-experts models, that the options name. Raises ConfigError or CheckpointError."""
    if file is not None and file.is_moe:
        return [file.moe()]
    if options.checkpoint or file is not None:
        config = read_file(file, options.lanes) if file else read_checkpoint(options.checkpoint, options.lanes)
        return config.replace(layout=options.layout) if options.layout else config
    return find_moe(options.moe) if options.moe else None


def find_packed(
    options: Options, file: ConfigFile | None, model: "ModelConfig | list[MoeModel] | None"
) -> dict[str, float]:
    """Bytes per weight of each quantized matrix of the model, by its path; empty for a model that is known only by its
    parts. Raises ConfigError.
    """
    if model is None or isinstance(model, list):
        return {}
    from laneformer.checkpoint import packed_bytes
    from laneformer.infer.engine import sources

    if file is None and sources.is_recipe(options.checkpoint):
        return sources.packed_bytes(options.checkpoint)
    path = file.file if file else Path(options.checkpoint)
    config = path / "config.json" if path.is_dir() else path
    return packed_bytes(config.parent, read_values(config), model) if config.exists() else {}


def read_file(file: ConfigFile, lanes: int | None) -> "ModelConfig":
    """The config of the model of a config.json. Raises ConfigError with the name of the file."""
    from laneformer.hf import config_from_hf

    try:
        return config_from_hf(file.values, lanes)
    except ConfigError as error:
        raise ConfigError(f"{file.file}: {error}") from None


def read_checkpoint(checkpoint: str, lanes: int | None) -> "ModelConfig":
    """The config of the model of --checkpoint, which may also be the config.json of an HF folder."""
    from laneformer.infer.engine.sources import model_config

    path = Path(checkpoint)
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"--checkpoint {path} must be a folder or its config.json; give other files as CONFIG.json")
    return model_config(str(path.parent) if path.is_file() else checkpoint, lanes)
