"""Rotary positions in Hugging Face's files: the spellings of base and scaling, and the order of channels."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from laneformer.config import RopeScaling
from laneformer.errors import ConfigError
from laneformer.hf.fields import Fields

log = logging.getLogger("laneformer")

THETA = 10000.0
_NAMES = tuple(field.name for field in dataclasses.fields(RopeScaling))
TYPES = ("default", "linear", "llama3", "yarn")
UNCOMPUTED: dict[str, tuple[Any, ...]] = {  # fields of a scaling that change all logits -> values without effect
    **dict.fromkeys(("attn_factor", "extrapolation_factor"), (1,)),
    **dict.fromkeys(("llama_4_scaling_beta", "alpha"), (0,)),
    **dict.fromkeys(("short_factor", "long_factor", "short_mscale", "long_mscale"), ()),
}
_NO_EFFECT = ("finetuned", "mrope_section", "mrope_interleaved", "max_position_embeddings")
_OLD_NAMES = ("old_context_len", "old_context_length")  # older names of original_max_position_embeddings


def read_rope(
    fields: Fields,
    longest: int,
    theta: float = THETA,
    usual: Mapping[str, Any] | None = None,
    partial: bool = False,
    layers: str | None = None,
) -> tuple[float, RopeScaling | None]:
    """The base and scaling of the rotary frequencies, from `rope_parameters` (transformers 5), `rope_scaling`
    (transformers 4) or `rope_scaling_args` (Laneformer: llama3). Raises ConfigError.

    longest: longest context in tokens. theta: the family's default base. usual: the family's default scaling. partial:
    whether the family supports rotating only some channels of a head, see `rotated_channels`. layers: type of the
    layers that are meant, if the family has settings by the type of layers.
    """
    args = _given(fields, "rope_scaling_args")
    scaling = _parameters(fields, layers) or dict(usual or {})
    theta = scaling.pop("rope_theta", fields.get("rope_theta", theta))
    types = [scaling.pop(name, None) for name in ("rope_type", "type")]
    kind = types[0] or types[1] or ("llama3" if args else "default")
    if kind not in TYPES:
        raise ConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(TYPES)}")
    scaling |= args
    for name, value in scaling.items():
        if name in UNCOMPUTED and value not in UNCOMPUTED[name]:
            raise ConfigError(f"rope scaling field {name} = {value!r} changes all logits, and is not computed")
    for where in (scaling.pop("partial_rotary_factor", None), fields.get("partial_rotary_factor")):
        if where not in (None, 1) and not partial:
            raise ConfigError(f"partial_rotary_factor = {where!r}: only 1 is supported, which rotates all channels")
    if kind == "default":
        return theta, None
    for name in _OLD_NAMES:
        if name in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop(name)
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int) and isinstance(longest, int) and min(original, longest) > 0:
        scaling.setdefault("factor", longest / original)
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", longest)
    if unknown := sorted(set(scaling) - {*_NAMES, *_NO_EFFECT, *UNCOMPUTED}):
        log.warning("config.json: ignored rope scaling fields %s", ", ".join(unknown))
    if "factor" not in scaling:
        raise ConfigError(f"rope scaling of type {kind!r} has no factor: add it")
    given: dict[str, Any] = {name: scaling[name] for name in _NAMES if name in scaling}
    return theta, RopeScaling(**{**given, "type": kind})


def read_local_base(fields: Fields, layers: str, usual: float) -> float:
    """The base of the rotary frequencies in layers of a type that does not scale them, from `rope_parameters`
    (transformers 5) or `rope_local_base_freq`. usual: its default. Raises ConfigError.
    """
    older: float = fields.get("rope_local_base_freq", usual)
    own = (fields.mapping("rope_parameters") or {}).get(layers)
    if not isinstance(own, Mapping):
        return older
    if own.get("rope_type") not in (None, "default"):
        raise ConfigError(f"rope_parameters.{layers}.rope_type = {own['rope_type']!r}: only 'default' is supported")
    return older if (base := own.get("rope_theta")) is None else base


def rotated_channels(fields: Fields, head_dim: int, usual: float) -> int | None:
    """Channels of a head that are rotated, from `partial_rotary_factor`; None for all. usual: default of that field.
    Raises ConfigError.
    """
    share = _parameters(fields).get("partial_rotary_factor")
    share = fields.get("partial_rotary_factor", usual) if share is None else share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"partial_rotary_factor = {share!r} must be a number above 0 and at most 1")
    found = int(head_dim * share)
    return None if found == head_dim else found


def _parameters(fields: Fields, layers: str | None = None) -> dict[str, Any]:
    """The values of `rope_scaling` or, without them, of `rope_parameters`, as transformers chooses between them."""
    parameters, scaling = _given(fields, "rope_parameters", layers), _given(fields, "rope_scaling")
    return scaling or parameters


def _given(fields: Fields, name: str, layers: str | None = None) -> dict[str, Any]:
    """The values of a field that is an object, without nulls. layers: type of layers that may have an object there, for
    the values in it. Raises ConfigError for other nested objects.
    """
    given = fields.mapping(name) or {}
    if layers is not None:
        of_layers = given.get(layers)
        shared = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
        given = of_layers if isinstance(of_layers, Mapping) else shared
    found = {key: value for key, value in given.items() if value is not None}
    for key, value in found.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"{name}.{key} is an object: only one rotary setting for all layers is supported")
    return found


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The value of the field `rope_scaling` in a config.json."""
    if scaling is None:
        return None
    given = {name: value for name in _NAMES if (value := getattr(scaling, name)) is not None}
    return {"rope_type": given.pop("type")} | given


def interleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows [heads * head_dim, ...]: half-split rotary pairs (i, i + e/2) of each head become (2i, 2i + 1)."""
    return w.reshape(-1, 2, head_dim // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def deinterleave(w: np.ndarray, head_dim: int) -> np.ndarray:
    """The inverse of `interleave`."""
    return w.reshape(-1, head_dim // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
