"""Recipes: functions without arguments that return a configuration, named MODULE:FUNCTION or FILE.py:FUNCTION."""

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from laneformer.errors import ConfigError


def call_recipe(name: str) -> Any:
    """Calls the recipe named MODULE:FUNCTION or FILE.py:FUNCTION and returns its result, or the object of that name if
    it is not callable. Raises ConfigError if the recipe is not found or takes arguments.
    """
    place, _, function = name.rpartition(":")
    if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"recipe {name!r}: {place!r} is not a module; write MODULE:FUNCTION or FILE.py:FUNCTION")
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        recipe = getattr(module, function)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"recipe {name!r}: {error}; write MODULE:FUNCTION or FILE.py:FUNCTION") from None
    if not callable(recipe):
        return recipe
    try:
        inspect.signature(recipe).bind()
    except (TypeError, ValueError) as error:  # ValueError: the signature of a built-in function is unknown
        raise ConfigError(f"recipe {name!r}: {error}; a recipe is a function without arguments") from None
    return recipe()


def _module_from_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise ConfigError(f"recipe file {file} does not exist")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
