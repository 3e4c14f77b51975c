"""The sampling settings that a checkpoint's generation_config.json recommends. Commands use them where the user gives
none.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from laneformer.checkpoint import checkpoint_files
from laneformer.errors import ConfigError
from laneformer.hf.fields import GENERATION, read_generation
from laneformer.infer.engine.sources import is_recipe
from laneformer.infer.sampling import Sampling

log = logging.getLogger("laneformer")

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL: dict[str, tuple] = {  # fields that change which token is chosen and are not supported -> values without effect
    **dict.fromkeys(
        ("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), (1,)
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("penalty_alpha", "encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("stop_strings", "top_h", "dola_layers"), ([],)),
}


def recommended(checkpoint: str | Path) -> dict[str, float | int]:
    """The recommended settings of a checkpoint, by the names of Sampling; {} for a recipe or without a recommendation.
    do_sample false means greedy, and true without a temperature means 1. Logs fields that are not supported.

    Raises CheckpointError for a damaged file, and ConfigError, naming file and field, for a bad value.
    """
    if is_recipe(str(checkpoint)):
        return {}
    file = checkpoint_files(checkpoint) / GENERATION
    values = read_generation(file.parent)
    found = {name: values[name] for name in RECOMMENDED if name in values}
    draws = values.get("do_sample")
    if draws not in (None, True, False):
        raise ConfigError(f"{file}: do_sample = {draws!r}: write true or false")
    if draws is False:
        found = {name: value for name, value in found.items() if name.endswith("_penalty")} | {"temperature": 0.0}
    elif draws:
        found = {"temperature": 1.0} | found
    try:
        settings = Sampling(**found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if other := [name for name, neutral in NEUTRAL.items() if name in values and values[name] not in neutral]:
        log.warning("%s: ignored %s, which would change answers but is not supported", file, ", ".join(other))
    return {name: getattr(settings, name) for name in found}


def named(settings: Mapping[str, Any]) -> str:
    """Settings as text, as in: temperature 0.6, top_p 0.95."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _optional(field: dataclasses.Field) -> Any:
    kind: Any = field.type
    if field.name == "logit_bias":
        return kind | None
    return Annotated[kind | None, tyro.conf.arg(metavar=kind.__name__.upper())]


def over(given: Sampling, recommended: Mapping[str, Any]) -> Sampling:
    """The given settings, and the recommended ones where none are given. given: a GivenSampling."""
    values = {name: value for name, value in vars(given).items() if value is not None}
    return Sampling(**{**recommended, **values})


if TYPE_CHECKING:
    GivenSampling = Sampling
else:
    GivenSampling = dataclasses.make_dataclass(  # without source, so that tyro finds the help texts in Sampling
        "GivenSampling",
        [(field.name, _optional(field), None) for field in dataclasses.fields(Sampling)],
        bases=(Sampling,),
        frozen=True,
        kw_only=True,
        namespace={
            "__doc__": "Settings of `Sampling` that a user gave; None for the others.",
            "__post_init__": lambda self: None,
        },
    )
