"""Finds a recipe by name and changes its fields from the command line."""

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, overload

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from laneformer import errors
from laneformer.checkpoint import read_config
from laneformer.config import DeltaNetSizes, RopeScaling
from laneformer.errors import ConfigError
from laneformer.recipe import call_recipe
from laneformer.train.config import TrainConfig

HOUSE = "laneformer.recipes"  # package whose RECIPES maps the names of the project's recipes
T = TypeVar("T")


@overload
def find_recipe(name: str) -> TrainConfig: ...
@overload
def find_recipe(name: str, house: str, kind: type[T]) -> T: ...
def find_recipe(name: str, house: str = HOUSE, kind: type = TrainConfig) -> Any:
    """Returns the config of a recipe.

    name: a recipe of the package `house`, or a function of the user as MODULE:FUNCTION or FILE.py:FUNCTION. Raises
    ConfigError if the recipe is unknown or does not return a `kind`.
    """
    recipes = importlib.import_module(house).RECIPES
    if ":" not in name and name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}; choose {', '.join(recipes)}, or your own as FILE.py:FUNCTION")
    config = call_recipe(recipes.get(name, name))
    if not isinstance(config, kind):
        raise ConfigError(
            f"recipe {name!r} returns a {type(config).__name__}; write a function that returns a {kind.__name__}"
        )
    return config


def list_recipes(house: str = HOUSE) -> str:
    """One line per recipe: its name and the first line of its docstring."""
    lines = []
    for name, place in importlib.import_module(house).RECIPES.items():
        module, function = place.split(":")
        summary = getattr(importlib.import_module(module), function).__doc__.splitlines()[0]
        lines.append(f"  {name:<16}{summary}")
    return "\n".join(lines)


def parse(arguments: Sequence[str], program: str = "python -m train") -> TrainConfig:
    """Reads RECIPE [--section.option value ...] into a config; prints help and exits on --help.

    Raises ConfigError for an unknown recipe or option, or an invalid value.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            f"usage: {program} RECIPE [--section.option value ...]\n       {program} RECIPE --help\n       {program}"
            " RECIPE --dry-run [--cluster.device h200 --cluster.nodes 32 ...] [--json FILE]\n"
            f"       {program} RECIPE --dry-run --sweep mesh [--gpus 8 64 ...] [--price PER_GPU_HOUR] [--best]\n\n"
            f"recipes:\n{list_recipes()}"
        )
        sys.exit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(f"{arguments[0]} precedes the recipe; write {program} RECIPE [--section.option value ...]")
    recipe = _with_initial(find_recipe(arguments[0]), arguments[1:])
    return read_options(recipe, f"{program} {arguments[0]}", arguments[1:], tyro.conf.FlagConversionOff)


def _with_initial(recipe: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The recipe with the model of the checkpoint that --initial names, cut into --model.num-lanes, if it is given.

    Raises the errors of `read_config`.
    """
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--initial")
    options.add_argument("--model.num-lanes", "--model.num_lanes", dest="lanes")
    try:
        found, _ = options.parse_known_args(arguments)
        lanes = found.lanes and int(found.lanes)
    except (argparse.ArgumentError, ValueError):
        return recipe  # reading all options reports it
    if found.initial in (None, "None"):
        return recipe
    model = read_config(found.initial)
    if lanes not in (None, model.num_lanes):
        model = read_config(found.initial, lanes)
    recipe = copy.copy(recipe)
    object.__setattr__(recipe, "model", model)  # without the checks, because further options may change more
    return recipe


def read_options(default: T, program: str, arguments: Sequence[str], *markers) -> T:
    """Returns `default` with the changes that the arguments make. markers: markers of tyro.conf.

    Raises ConfigError for an unknown option or an invalid value.
    """
    with _SPELLINGS:
        config = (*markers, tyro.conf.AvoidSubcommands)
        return errors.read_options(type(default), program, arguments, default=default, config=config)


_SPELLINGS = ConstructorRegistry()
_ROPE_FORMS = {
    "linear": "linear:factor=4",
    "llama3": "llama3:factor=8,original_max_position_embeddings=8192",
    "yarn": "yarn:factor=4,original_max_position_embeddings=4096",
}


@_SPELLINGS.primitive_rule
def _rope_scaling(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Lets `--model.rope-scaling yarn:factor=4,original_max_position_embeddings=4096` set a field that may be None."""
    if info.type not in (RopeScaling, RopeScaling | None):
        return None

    def read(words: list[str]) -> RopeScaling | None:
        if words[0] == "None":
            return None
        kind, _, rest = words[0].partition(":")
        try:
            named: dict[str, Any] = {"type": kind}
            return RopeScaling(**named, **_read_fields(rest))
        except (ValueError, TypeError) as error:
            raise ValueError(f"write it as {_ROPE_FORMS.get(kind, _ROPE_FORMS['linear'])} ({error})") from None

    def write(value: RopeScaling | None) -> list[str]:
        if value is None:
            return ["None"]
        return [f"{value.type}:{_write_fields(value)}"]

    return _spelled(RopeScaling, "TYPE:FIELD=VALUE,...", read, write)


@_SPELLINGS.primitive_rule
def _delta_net(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Lets `--model.delta-net key_heads=8,value_heads=8,key_dim=32,value_dim=32` set a field that may be None."""
    if info.type not in (DeltaNetSizes, DeltaNetSizes | None):
        return None

    def read(words: list[str]) -> DeltaNetSizes | None:
        try:
            return None if words[0] == "None" else DeltaNetSizes(**_read_fields(words[0]))
        except (ValueError, TypeError) as error:
            raise ValueError(f"write it as key_heads=8,value_heads=8,key_dim=32,value_dim=32 ({error})") from None

    def write(value: DeltaNetSizes | None) -> list[str]:
        return ["None" if value is None else _write_fields(value)]

    return _spelled(DeltaNetSizes, "FIELD=VALUE,...", read, write)


def _spelled(kind: type, metavar: str, read: Callable, write: Callable) -> PrimitiveConstructorSpec:
    """An option with a value of type `kind`, or None, written as one word."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        str_from_instance=write,
        is_instance=lambda value: value is None or isinstance(value, kind),
    )


def _read_fields(text: str) -> dict[str, Any]:
    """Parses FIELD=VALUE,... with JSON values. Raises ValueError for any other form."""
    return {name: json.loads(value) for name, value in (field.split("=") for field in text.split(",") if field)}


def _write_fields(value) -> str:
    """Writes a dataclass as FIELD=VALUE,... without `type` and fields that have their default."""
    changed = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "type"}
    usual = {f.name: f.default for f in fields(value)}
    return ",".join(f"{name}={json.dumps(field)}" for name, field in changed.items() if field != usual[name])
