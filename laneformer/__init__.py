"""A decoder cut into lanes. Parallelism layouts are schedule tables; any mesh that divides the lanes can run them.

The packages train, infer, custom_calls, recipes (configs/) and commands (scripts/) lie beside this folder in the
repository. Links in it make them parts of this package, in a clone as in a wheel.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laneformer.checkpoint import load as load
    from laneformer.config import ModelConfig as ModelConfig
    from laneformer.config import RopeScaling as RopeScaling
    from laneformer.errors import CheckpointError as CheckpointError
    from laneformer.errors import ConfigError as ConfigError
    from laneformer.errors import InputError as InputError
    from laneformer.errors import LaneformerError as LaneformerError
    from laneformer.hf.folder import save_hf as save_hf
    from laneformer.infer.engine.engine import Engine as Engine
    from laneformer.infer.engine.generation import Generation as Generation
    from laneformer.infer.engine.generation import Result as Result
    from laneformer.infer.sampling import Sampling as Sampling
    from laneformer.infer.text.grammar import Grammar as Grammar
    from laneformer.infer.text.tokenizer import Tokenizer as Tokenizer
    from laneformer.layout import LAYOUTS as LAYOUTS
    from laneformer.layout import Schedule as Schedule
    from laneformer.mesh import make_mesh as make_mesh
    from laneformer.mesh import use_host_devices as use_host_devices
    from laneformer.model import Laneformer as Laneformer
    from laneformer.precision import Precision as Precision
    from laneformer.state import Cache as Cache
    from laneformer.weights import kv_bytes_per_token as kv_bytes_per_token
    from laneformer.weights import parameter_count as parameter_count
    from laneformer.weights import parameters_per_token as parameters_per_token
    from laneformer.weights import weight_bytes_per_token as weight_bytes_per_token

__version__ = "0.1.0"

# Name -> module, imported on first use: errors and configs are used in processes without JAX.
_HOMES = {
    "LAYOUTS": "layout",
    "Cache": "state",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Engine": "infer.engine.engine",
    "Generation": "infer.engine.generation",
    "Grammar": "infer.text.grammar",
    "InputError": "errors",
    "Laneformer": "model",
    "LaneformerError": "errors",
    "ModelConfig": "config",
    "Precision": "precision",
    "Result": "infer.engine.generation",
    "RopeScaling": "config",
    "Sampling": "infer.sampling",
    "Schedule": "layout",
    "Tokenizer": "infer.text.tokenizer",
    "kv_bytes_per_token": "weights",
    "load": "checkpoint",
    "make_mesh": "mesh",
    "parameter_count": "weights",
    "parameters_per_token": "weights",
    "save_hf": "hf.folder",
    "use_host_devices": "mesh",
    "weight_bytes_per_token": "weights",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
