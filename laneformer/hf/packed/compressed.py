"""Writes quantized weights in the form of compressed-tensors: a module's tensors, and the `quantization_config`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from laneformer.quantized import Quantized

FORMATS = {
    "int4": "pack-quantized",
    "int8": "pack-quantized",
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def tensors_of(record: Quantized) -> dict[str, np.ndarray]:
    """The tensors of a record by their suffixes. laneformer/hf/packed/packings.py reads the same record from them."""
    record = _unsorted(record)
    if record.kind == "fp8":
        return {"weight": record.codes.view(E4M3), "weight_scale": record.scales}
    if record.format.code == "e2m1":
        found = {"weight_packed": record.codes, "weight_scale": record.scales}
        if record.kind == "nvfp4":
            whole = np.float32(1) if record.global_scale is None else record.global_scale
            found |= {"weight_scale": record.scales.view(E4M3), "weight_global_scale": np.reshape(whole, 1)}
        return found
    found = {
        "weight_packed": _words(record.codes, record.kind),
        "weight_scale": record.scales,
        "weight_shape": np.array(record.shape, np.int64),
    }
    if (zeros := record.zero_points) is not None:
        across = np.ascontiguousarray(zeros.swapaxes(-1, -2))
        words = _words(record.format.pack(across), record.kind)
        found["weight_zero_point"] = np.ascontiguousarray(words.swapaxes(-1, -2))
    if record.order is not None:
        index = np.empty(record.columns, np.int32)
        index[record.order] = np.arange(record.columns) // record.group[1]
        found["weight_g_idx"] = index
    return found


def _unsorted(record: Quantized) -> Quantized:
    """The record with its codes in the order of the vector. `order` is unchanged and still gives the sorted order."""
    if record.order is None:
        return record
    codes = np.empty_like(record.each())
    codes[..., record.order] = record.each()
    return replace(record, codes=record.format.pack(codes))


def _words(codes: np.ndarray, kind: str) -> np.ndarray:
    """Codes of 4 bits (two per byte) or 8 bits as int32 words, padded with 0."""
    codes = codes ^ np.int8(-128) if kind == "int8" else codes
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 4)]
    return np.pad(codes.view(np.uint8), padding).view(np.int32)


def settings_of(record: Quantized) -> str:
    """A record's group in the `quantization_config`, without targets, as JSON. Records with equal settings can be in
    one group.
    """
    return json.dumps({"format": FORMATS[record.kind], "weights": _settings(record), "input_activations": None})


def config_of(settings: Mapping[str, str], plain: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a model. settings: module -> `settings_of` its record. plain: modules of the
    matrices that are not quantized.
    """
    groups: dict[str, list[str]] = {}
    for module, text in settings.items():
        groups.setdefault(text, []).append(module)
    forms = {json.loads(text)["format"] for text in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{n}": {"targets": ["Linear"] if len(groups) == 1 else modules, **json.loads(text)}
            for n, (text, modules) in enumerate(groups.items())
        },
        "ignore": sorted(plain),
    }


def _settings(record: Quantized) -> dict[str, Any]:
    rows, columns = record.group
    found = {
        "num_bits": record.format.bits,
        "type": "int" if record.format.code == "int" else "float",
        "symmetric": record.zero_points is None,
        "actorder": None if record.order is None else "group",
        "dynamic": False,
    }
    if record.format.code == "e2m1":
        strategy = "tensor_group" if record.kind == "nvfp4" else "group"
        return found | {"strategy": strategy, "group_size": columns}
    if rows == 1:
        whole = columns == record.columns
        return found | ({"strategy": "channel"} if whole else {"strategy": "group", "group_size": columns})
    if (rows, columns) == record.shape[-2:]:
        return found | {"strategy": "tensor"}
    return found | {"strategy": "block", "block_structure": [rows, columns]}
