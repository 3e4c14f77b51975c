"""Hugging Face checkpoints: the supported families, and how their config.json is read. A family is a file in
families/ and a line in FAMILIES. This file does not import JAX; folder.py, which reads and writes folders, does.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError, ConfigError
from laneformer.files import parse_json, read_file
from laneformer.hf.dimensions import Dimensions
from laneformer.hf.families import (
    deepseek,
    deepseek_v4,
    exaone4,
    gemma,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    qwen3_moe,
    qwen3_next,
)
from laneformer.hf.families import laneformer as own
from laneformer.hf.families.laneformer import config_to_hf
from laneformer.hf.family import Family
from laneformer.hf.fields import GENERATION, Fields, end_tokens, read_generation

__all__ = [
    "FAMILIES",
    "config_from_hf",
    "config_to_hf",
    "dimensions_from_hf",
    "find_family",
    "language_model",
    "read_hf_config",
    "read_values",
    "tensor_prefixes",
]

log = logging.getLogger("laneformer")


class Vision(NamedTuple):
    """Tensor names of a model that also takes images, whose language model can be used alone."""

    prefix: str
    """Prefix of the names of the language model's tensors."""
    ignored: tuple[str, ...]
    """Prefixes of the names of all other tensors."""


MULTIMODAL = {  # by model_type
    "gemma3": Vision("language_model.", ("vision_tower.", "multi_modal_projector.")),
    "kimi_k25": Vision("language_model.", ("vision_tower.", "mm_projector.")),
}
OUTSIDE = (  # fields of the language model that may be beside text_config
    *("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)

FAMILIES: dict[str, Family] = {  # by model_type
    "laneformer_tp": own.FAMILY,
    "laneformer": own.FAMILY,
    "llama": llama.LLAMA,
    "arcee": llama.ARCEE,
    "mistral": llama.MISTRAL,
    "ministral": llama.MINISTRAL,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "smollm3": llama.SMOLLM3,
    "olmo2": olmo2.FAMILY,
    "exaone4": exaone4.FAMILY,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA_2,
    "gemma3_text": gemma.GEMMA_3,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "deepseek_v3": deepseek.V3,
    "kimi_k2": deepseek.KIMI_K2,
    "deepseek_v4": deepseek_v4.FAMILY,
}


def find_family(values: Mapping[str, Any]) -> Family:
    """The family of the parsed config.json `values`. Raises ConfigError for an unknown model_type."""
    kind = language_model(values).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"unknown model_type {kind!r}; choose {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    return family if family.variant is None else family.variant(Fields(language_model(values)))


def language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config values of the language model. In models that also take images, `text_config` contains them."""
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        return values
    return {key: values[key] for key in OUTSIDE if key in values} | dict(text)


def tensor_prefixes(values: Mapping[str, Any]) -> Vision:
    """The prefix of the language model's tensor names, and the prefixes of the tensors that it does not use."""
    vision = MULTIMODAL.get(str(values.get("model_type")), Vision("", ()))
    drafts = find_family(values).ignored(Fields(language_model(values)))
    return Vision(vision.prefix, (*vision.ignored, *(f"{vision.prefix}{name}" for name in drafts)))


def config_from_hf(values: Mapping[str, Any], num_lanes: int | None = None) -> ModelConfig:
    """The ModelConfig of the parsed config.json `values`. `num_lanes` cuts a dense model into lanes; the number of
    lanes of a Laneformer cannot be changed. Raises ConfigError.
    """
    family = find_family(values)
    if family.config_from is None:
        raise ConfigError(
            f"model_type = {language_model(values)['model_type']!r}: {family.name} cannot be run yet;"
            " `python -m infer roofline CONFIG.json` projects its speed"
        )
    if language_model(values) is not values and str(values.get("model_type")) not in MULTIMODAL:
        raise ConfigError("text_config: models that also take images are not supported; use a language model's folder")
    fields = Fields(language_model(values))
    config = family.config_from(fields, num_lanes)
    fields.refuse_uncomputed()
    if unread := fields.unread():
        log.warning("config.json: ignored unknown fields %s", ", ".join(unread))
    return config


def dimensions_from_hf(values: Mapping[str, Any]) -> Dimensions:
    """The dimensions of the mixture of experts with the parsed config.json `values`. Raises ConfigError for other
    models.
    """
    family = find_family(values)
    if family.dimensions is None:
        raise ConfigError(f"model_type = {values.get('model_type')!r}: {family.name} is not a mixture of experts")
    return family.dimensions(Fields(language_model(values)))


def read_hf_config(path: str | Path, num_lanes: int | None = None) -> ModelConfig:
    """The config of an HF folder; see `config_from_hf`. eos_token_id is that of generation_config.json, if it has one.

    Raises CheckpointError for a missing or unreadable config.json, and ConfigError for invalid values.
    """
    file = Path(path) / "config.json"
    values, generation = read_values(file), read_generation(Path(path))
    try:
        config = config_from_hf(values, num_lanes)
        if "eos_token_id" in generation:  # it decides in transformers, too
            file = file.with_name(GENERATION)
            config = config.replace(eos_token_id=end_tokens(generation["eos_token_id"]))
        return config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_values(file: Path) -> dict[str, Any]:
    """The values of a config.json. Raises CheckpointError if the file is missing, unreadable or not a JSON object."""
    try:
        values = parse_json(read_file(file))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist: a checkpoint folder needs a config.json next to its safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file} as JSON ({error}): copy it again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is a JSON {type(values).__name__}, not an object: copy it again")
    return values
