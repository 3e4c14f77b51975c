"""A model's config (`model`): its fields (`fields`), the parts of it with their own sizes (`sizes`), its checks
(`rules`), and the options of each layer's blocks that follow from it (`options`).
"""

from laneformer.config.checks import LARGEST, LARGEST_OTHER
from laneformer.config.model import ModelConfig, recorded_fields
from laneformer.config.options import (
    AttentionOptions,
    BlockOptions,
    CompressedAttentionOptions,
    DeltaNetOptions,
    ExpertsOptions,
    LatentAttentionOptions,
    LayerOptions,
    MlpOptions,
    NormOptions,
    Norms,
    RotaryOptions,
    StreamsOptions,
)
from laneformer.config.rules import HIDDEN_ACTS
from laneformer.config.sizes import CompressedAttention, DeltaNetSizes, LatentAttention, ResidualStreams, RopeScaling

__all__ = [
    "HIDDEN_ACTS",
    "LARGEST",
    "LARGEST_OTHER",
    "AttentionOptions",
    "BlockOptions",
    "CompressedAttention",
    "CompressedAttentionOptions",
    "DeltaNetOptions",
    "DeltaNetSizes",
    "ExpertsOptions",
    "LatentAttention",
    "LatentAttentionOptions",
    "LayerOptions",
    "MlpOptions",
    "ModelConfig",
    "NormOptions",
    "Norms",
    "ResidualStreams",
    "RopeScaling",
    "RotaryOptions",
    "StreamsOptions",
    "recorded_fields",
]
