"""Checks of the values in a config."""

import dataclasses
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from laneformer.errors import ConfigError

# Largest allowed sizes: far above any model, and small enough that each table of a model is built within a second.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**31 - 1,
    "num_lanes": 2**10,
    "num_experts": 2**16,
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
}
MOST_MATRICES = 2**20  # layers times experts of each
LARGEST_OTHER = 2**40  # largest allowed value of other sizes in a config.json
LARGEST_NUMBER = 1e18  # largest allowed real number, and the inverse of the smallest above 0: squares fit float32


def require_int(name: str, value: object, *, at_least: int | None = None, at_most: int | None = None) -> None:
    """Raises ConfigError, naming the field, unless the value is an int within these bounds (inclusive)."""
    lowest = "" if at_least is None else f" of at least {at_least}"
    highest = "" if at_most is None else f" and at most {at_most}"
    too_low = isinstance(value, int) and at_least is not None and value < at_least
    too_high = isinstance(value, int) and at_most is not None and value > at_most
    if isinstance(value, bool) or not isinstance(value, int) or too_low or too_high:
        raise ConfigError(f"{name} = {value!r} must be a whole number{lowest}{highest}")


def require_number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """Raises ConfigError, naming the field, unless the value is a number within these bounds. Its size may be at most
    LARGEST_NUMBER, and with above = 0 at least 1 / LARGEST_NUMBER.
    """
    least = 1 / LARGEST_NUMBER if above == 0 else at_least
    # NaN is never <=; an int may be too large for a float.
    fits = isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER
    if isinstance(value, bool) or not fits or value <= above or value < least:
        bound = f"above {above}" if above > -math.inf else f"of at least {at_least}"
        raise ConfigError(f"{name} = {value!r} must be a finite number {bound}, and at most {LARGEST_NUMBER:g}")


def choices_of(kind: Any) -> tuple[Any, ...]:
    """The values of a field whose type is a Literal, or one or None; empty for any other type."""
    values = [value for one in (kind, *get_args(kind)) if get_origin(one) is Literal for value in get_args(one)]
    return (*values, None) if values and NoneType in get_args(kind) else tuple(values)


def part_of(name: str, kind: type[Any], value: Any) -> Any:
    """The part `name` of a config: an instance of `kind`, made from a mapping if it comes from JSON, or None. Raises
    ConfigError.
    """
    if isinstance(value, kind | None):
        return value
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r} must be an object with {names}")
    try:
        return kind(**value)
    except TypeError as error:
        raise ConfigError(f"{name} = {dict(value)!r}: give {names} ({error})") from None
