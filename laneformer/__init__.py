"""Laneformer: a decoder cut into lanes, every parallelism layout as a schedule table, on any mesh that divides the lanes."""

from laneformer.cache import Cache
from laneformer.checkpoint import load
from laneformer.config import ModelConfig, RopeScaling
from laneformer.errors import CheckpointError, ConfigError, InputError, LaneformerError
from laneformer.hf import save_hf
from laneformer.layout import LAYOUTS, Schedule
from laneformer.mesh import make_mesh, use_host_devices
from laneformer.model import Laneformer
from laneformer.parameters import kv_bytes_per_token, parameter_count, parameters_per_token, weight_bytes_per_token
from laneformer.precision import Precision

__all__ = [
    "LAYOUTS",
    "Cache",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "Laneformer",
    "LaneformerError",
    "ModelConfig",
    "Precision",
    "RopeScaling",
    "Schedule",
    "kv_bytes_per_token",
    "load",
    "make_mesh",
    "parameter_count",
    "parameters_per_token",
    "save_hf",
    "use_host_devices",
    "weight_bytes_per_token",
]
