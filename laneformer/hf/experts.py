"""Experts that are one tensor of all experts, as the modules of transformers 5 have them: `mlp.experts.gate_up_proj`
[experts, 2 x columns, hidden], with the gate first, and `mlp.experts.down_proj` [experts, hidden, columns].
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from laneformer.errors import CheckpointError
from laneformer.hf.safetensors import Source, Tensor

# Matrix -> the tensor of all experts that has it, its place among equal parts of an expert's rows, and their number
PARTS = {"w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1)}
SUFFIXES = {"": "", "_scale_inv": "_scale_inv", "_scale": "_scale"}  # suffix of all experts -> of one expert's weight


def with_separate_experts(
    folder: Path, sources: Mapping[str, Source], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a folder, in which each expert has its own, under the names of `sources`, path -> Source. The
    experts' bytes stay in their place. Raises CheckpointError for a tensor that cannot be cut.
    """
    found, used = dict(tensors), set()
    for path, source in sources.items():
        matrix = path.rpartition(".")[2]
        head = layer[0] if (layer := re.match(r".*?layers\.\d+\.", source.name)) else ""
        if source.experts is None or matrix not in PARTS or any(name in found for name in source.names):
            continue
        joined, place, of = PARTS[matrix]
        for suffix, own in SUFFIXES.items():
            if (whole := found.get(name := f"{head}mlp.experts.{joined}{suffix}")) is not None:
                parts = _parts(folder, name, whole, source.experts, place, of)
                found |= {f"{each}{own}": part for each, part in zip(source.names, parts, strict=True)}
                used.add(name)
    return {name: tensor for name, tensor in found.items() if name not in used}


def _parts(folder: Path, name: str, whole: Tensor, experts: int, place: int, of: int) -> list[Tensor]:
    """For each expert, the `place`-th of `of` equal parts of its rows."""
    if len(whole.shape) != 3 or whole.shape[0] != experts or whole.shape[1] % of:
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(whole.shape)}, which is not that of {experts} experts with"
            f" {of} matrices each: use the config.json and safetensors files of one model"
        )
    shape = (whole.shape[1] // of, whole.shape[2])
    size = whole.size // math.prod(whole.shape) * math.prod(shape)
    return [
        dataclasses.replace(whole, shape=shape, start=whole.start + (expert * of + place) * size, size=size)
        for expert in range(experts)
    ]
