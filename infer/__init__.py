"""Generation: engines that run a model and the sampling they share."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.engine import BACKENDS as BACKENDS
    from infer.engine import Engine as Engine
    from infer.generation import Generation as Generation
    from infer.generation import Result as Result
    from infer.generation import Token as Token
    from infer.sampling import Sampling as Sampling
    from infer.tokenizer import Tokenizer as Tokenizer

# Name -> module, imported when the name is first asked for: the server's web process and many commands need no JAX.
_HOMES = {
    "BACKENDS": "engine",
    "Engine": "engine",
    "Generation": "generation",
    "Result": "generation",
    "Sampling": "sampling",
    "Token": "generation",
    "Tokenizer": "tokenizer",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
