"""Generation: engines that run a model, and the sampling they share."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # `python -m` imports this package before the command
    from laneformer.interrupts import end_at_interrupt

    end_at_interrupt()

if TYPE_CHECKING:
    from laneformer.infer.engine.engine import BACKENDS as BACKENDS
    from laneformer.infer.engine.engine import Engine as Engine
    from laneformer.infer.engine.generation import Generation as Generation
    from laneformer.infer.engine.generation import Result as Result
    from laneformer.infer.engine.generation import Token as Token
    from laneformer.infer.sampling import Sampling as Sampling
    from laneformer.infer.text.grammar import Grammar as Grammar
    from laneformer.infer.text.tokenizer import Tokenizer as Tokenizer

# Name -> module, imported when the name is first used: the server's web process and many commands do not need JAX.
_HOMES = {
    "BACKENDS": "engine.engine",
    "Engine": "engine.engine",
    "Generation": "engine.generation",
    "Grammar": "text.grammar",
    "Result": "engine.generation",
    "Sampling": "sampling",
    "Token": "engine.generation",
    "Tokenizer": "text.tokenizer",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"laneformer.infer.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
