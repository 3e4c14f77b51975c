"""Reads the `quantization_config` of a published model: how each matrix is packed (`Schemes`, to load it), and the
number formats of the model's parts (`Formats`, for the roofline).
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laneformer.errors import CheckpointError, ConfigError
from laneformer.files import parse_json, read_file
from laneformer.formats import FORMATS
from laneformer.hf.fields import Fields

FP8_METHODS = ("fp8", "finegrained_fp8", "fbgemm_fp8")
DTYPES = ("bfloat16", "float16", "float32")
# For each part, the name of a representative module, to compare with a config's list of unquantized modules.
MODULES = {
    "routed": "model.layers.{n}.mlp.experts.0.gate_proj",
    "shared": "model.layers.{n}.mlp.shared_experts.gate_proj",
    "shared expert": "model.layers.{n}.mlp.shared_expert.gate_proj",
    "dense": "model.layers.0.mlp.gate_proj",
    "attention": "model.layers.{n}.self_attn.o_proj",
    "linear attention": "model.layers.{n}.linear_attn.out_proj",
}


@dataclass(frozen=True)
class Formats:
    """The number formats of a model's parts."""

    usual: str
    """Dtype of the model: of the router, the head and all other matrices that are not quantized."""
    quantized: str
    """Format of the quantized matrices."""
    kept: tuple[str, ...]
    """Patterns of modules that are not quantized."""
    layers: int
    """Number of layers."""
    rule: str
    """Description of these formats, for reports."""

    def of(self, part: str) -> str:
        """The format of a part, a key of MODULES."""
        module = MODULES[part].format(n=self.layers - 1)
        return self.usual if any(_matches(pattern, module) for pattern in self.kept) else self.quantized


def read_formats(fields: Fields) -> Formats:
    """The formats of a model, from its config.json. Raises ConfigError, naming the field, for unsupported formats."""
    usual = fields.word("dtype", fields.word("torch_dtype", "bfloat16"))
    if usual not in DTYPES:
        raise ConfigError(f"unknown dtype {usual!r}; choose {', '.join(DTYPES)}")
    given = fields.mapping("quantization_config")
    if given is None:
        return Formats(usual, usual, (), fields.layers, f"all in {usual}, as the config has no quantization")
    quantization = Fields(given)
    method = quantization.word("quant_method", "")
    if method in FP8_METHODS:
        quantized = "fp8"
    elif method == "mxfp4":
        quantized = "mxfp4"
    elif method == "compressed-tensors":
        quantized = _compressed(quantization)
    else:
        known = ", ".join((*FP8_METHODS, "mxfp4", "compressed-tensors"))
        raise ConfigError(f"quantization_config.quant_method = {method!r} is not supported; supported are {known}")
    lists = [quantization.sequence(name) or [] for name in ("modules_to_not_convert", "ignore")]
    kept = tuple(str(pattern) for patterns in lists for pattern in patterns)
    rule = f"matrices in {quantized} but for those that the config keeps in {usual}, router and head {usual}"
    return Formats(usual, quantized, kept, fields.layers, rule)


def _compressed(quantization: Fields) -> str:
    """The format of compressed-tensors' only group. Raises ConfigError for several groups or unsupported settings."""
    where = "quantization_config.config_groups"
    groups = quantization.mapping("config_groups") or {}
    if len(groups) != 1:
        raise ConfigError(f"{where} has {len(groups)} groups: only one is supported")
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where} has no weights: add their num_bits, type and group_size")
    bits, kind, size = found = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if (bits, kind) in ((8, "float"), (8, "int")):
        return "fp8" if kind == "float" else "int8"
    if (bits, kind, size) == (4, "int", 32):
        return "int4"
    raise ConfigError(
        f"{where}: num_bits, type, group_size = {', '.join(map(str, found))} is not supported; supported are 8 bits,"
        " and int of 4 bits in groups of 32"
    )


E2M1 = {
    "modelopt NVFP4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "fp4": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
"""Packing of E2M1 codes -> format."""


@dataclass(frozen=True)
class Scheme:
    """How the weights of a module are packed."""

    packing: str
    """A key of PACKINGS in laneformer/hf/packed/packings.py; other packings cannot be read."""
    bits: int = 8
    """Bits of one integer code."""
    group: int | None = None
    """Columns that share a scale; None for all."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None without blocks."""
    zeros_less_one: bool = False
    """Whether zero points are stored minus 1."""
    zero_points: bool = False
    """Whether zero points may differ from the middle of the range."""

    @property
    def bytes(self) -> float:
        """Bytes of one weight, including its share of the group's zero point and scale (16 bits)."""
        if self.packing in E2M1:
            return FORMATS[E2M1[self.packing]].bytes
        return (self.bits + ((16 + self.bits * self.zero_points) / self.group if self.group else 0)) / 8


@dataclass(frozen=True)
class Schemes:
    """How the weights of a folder are packed."""

    rules: tuple[tuple[str, Scheme | None], ...]
    """(pattern of modules, packing), where None means not packed. The first pattern that matches a module decides."""

    def of(self, module: str) -> Scheme | None:
        """The scheme of a module; None if it is not packed."""
        return next((scheme for pattern, scheme in self.rules if pattern == "*" or _matches(pattern, module)), None)

    def bytes(self, names: Mapping[str, str]) -> dict[str, float]:
        """Path -> bytes per weight of each packed matrix. names: path -> name of the tensor, which is module.weight or
        the parameter of all experts.
        """
        found = {path: self.of(name.removesuffix(".weight")) for path, name in names.items()}
        return {path: scheme.bytes for path, scheme in found.items() if scheme is not None}


# Files of older folders next to config.json -> the method, and old -> new names of its fields
OLD_FILES = {
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
    "hf_quant_config.json": ("modelopt", {}),
}


Rules = list[tuple[str, Scheme | None]]


def read_schemes(
    folder: Path, values: Mapping[str, Any], own_rules: Callable[[Fields], Rules] = lambda fields: []
) -> Schemes | None:
    """The schemes of a folder with the parsed config.json `values`; None if the model is not quantized. Raises
    ConfigError, naming file and field, for unknown settings.

    own_rules: rules of a family, from the fields of its config. They take precedence over the rules of the quantization
    method.
    """
    file = folder / "config.json"
    given = values.get("quantization_config", values.get("compression_config"))
    if given is None:
        for name, (method, names) in OLD_FILES.items():
            if (folder / name).exists():
                file, given = folder / name, _old_values(folder / name)
                given = {"quant_method": method} | {names.get(key, key): value for key, value in given.items()}
                break
        else:
            return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{file}: quantization_config = {given!r} must be an object with named values")
    fields = Fields(given)
    method = fields.word("quant_method", "compressed-tensors" if "config_groups" in given else "")
    try:
        rules = [(str(pattern), None) for pattern in _kept(fields)]
        return Schemes((*rules, *own_rules(Fields(values)), *_RULES.get(method, _others)(fields, method)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _old_values(file: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_file(file))
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}")
        return values
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file} as JSON ({error}): copy it again") from None


def _kept(fields: Fields) -> list[Any]:
    """Patterns of modules that are not packed."""
    return [
        pattern
        for name in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
        for pattern in fields.sequence(name) or ()
    ]


def _fp8(fields: Fields, method: str) -> Rules:
    return [("*", Scheme("fp8", block=_block(fields, "weight_block_size")))]


def _gptq(fields: Fields, method: str) -> Rules:
    """The rules of GPTQ. `dynamic` maps regular expressions of modules to their own settings, with or without a prefix
    "+:". Modules with the prefix "-:" are not packed.
    """
    version = fields.word("checkpoint_format", "gptq")
    usual = _gptq_scheme(fields, version == "gptq")
    if version not in ("gptq", "gptq_v2"):
        usual = Scheme(f"gptq's checkpoint_format {version}")
    rules: Rules = []
    for pattern, changes in (fields.mapping("dynamic") or {}).items():
        changed = Fields(changes if isinstance(changes, Mapping) else {})
        own = replace(usual, bits=changed.size("bits", usual.bits), group=_group(changed, usual.group))
        rules.append((f"re:{pattern.removeprefix('-:').removeprefix('+:')}", None if pattern.startswith("-:") else own))
    return [*rules, ("*", usual)]


def _gptq_scheme(fields: Fields, zeros_less_one: bool) -> Scheme:
    bits, symmetric = fields.size("bits", 4), fields.flag("sym", True)
    return Scheme("gptq", bits, _group(fields), zeros_less_one=zeros_less_one, zero_points=not symmetric)


def _auto_round(fields: Fields, method: str) -> Rules:
    """The rules of AutoRound, which packs as GPTQ or AWQ do. `extra_config` maps modules to their own settings; modules
    of 16 bits or more are not packed. Only GPTQ's packing stores zero points minus 1.
    """
    packing = fields.word("packing_format", fields.word("backend", "auto_round"))
    rules: Rules = []
    everything = [("*", fields)]
    for module, changes in (fields.mapping("extra_config") or {}).items():
        changed = changes if isinstance(changes, Mapping) else {}
        everything.insert(-1, (str(module), Fields({**fields.values, **changed})))
    for pattern, own in everything:
        kind = own.word("data_type", "int")
        if own.size("bits", 4) >= 16:
            rules.append((pattern, None))
        elif kind != "int":
            rules.append((pattern, Scheme(f"{method}'s data_type {kind}")))
        elif "awq" in packing:
            rules += [(pattern, scheme) for _, scheme in _awq(own, method)]
        else:
            rules.append((pattern, _gptq_scheme(own, "gptq" in packing)))
    return rules


def _modelopt(fields: Fields, method: str) -> Rules:
    """The rules of ModelOpt: one algorithm for all modules, or one for each of `quantized_layers`."""
    inner = fields.mapping("quantization")  # in hf_quant_config.json
    fields = fields if inner is None else Fields(inner)
    rules: Rules = [(str(pattern), None) for pattern in _kept(fields)] if inner is not None else []
    for module, values in (fields.mapping("quantized_layers") or {}).items():
        rules.append((str(module), _modelopt_scheme(Fields(values if isinstance(values, Mapping) else {}))))
    if fields.word("quant_algo", "") != "MIXED_PRECISION":
        rules.append(("*", _modelopt_scheme(fields)))
    return rules


def _modelopt_scheme(fields: Fields) -> Scheme:
    algorithm = fields.word("quant_algo", "")
    if algorithm == "NVFP4":
        return Scheme("modelopt NVFP4", 4, _group(fields, 16))
    return Scheme("fp8" if algorithm == "FP8" else f"modelopt {algorithm}")


def _awq(fields: Fields, method: str) -> Rules:
    version, bits = fields.word("version", "gemm").lower(), fields.size("bits", 4)
    packing = "awq" if (version, bits) == ("gemm", 4) else f"awq's version {version} of {bits} bits"
    return [("*", Scheme(packing, bits, _group(fields), zero_points=fields.flag("zero_point", True)))]


def _compressed_tensors(fields: Fields, method: str) -> Rules:
    """The rules of compressed-tensors. Targets that are names or regular expressions precede classes such as Linear."""
    named: Rules = []
    classes: Rules = []
    for values in (fields.mapping("config_groups") or {}).values():
        group = Fields(values if isinstance(values, Mapping) else {})
        weights = group.mapping("weights")
        if weights is None:
            continue
        scheme = _compressed_scheme(Fields(weights), group.word("format", fields.word("format", "")))
        for target in map(str, group.sequence("targets") or ["Linear"]):
            is_class = target.isidentifier() and target[:1].isupper()
            (classes if is_class else named).append(("*" if is_class else target, scheme))
    return [*named, *classes]


def _compressed_scheme(weights: Fields, form: str) -> Scheme:
    bits, kind = weights.size("num_bits", 8), weights.word("type", "int")
    usual = {("float", 8): "float-quantized", ("int", 8): "int-quantized", ("int", 4): "pack-quantized"}.get(
        (kind, bits)
    )
    if form in ("", "naive-quantized", "mixed-precision"):
        form = usual or f"{form or 'compressed-tensors'} of {kind} {bits} bits"
    strategy = weights.word("strategy", "")
    block = _block(weights, "block_structure") if strategy == "block" else None
    grouped = strategy in ("group", "tensor_group", "") and weights.get("group_size") is not None
    symmetric = weights.flag("symmetric", True)
    return Scheme(form, bits, _group(weights) if grouped else None, block, zero_points=not symmetric)


def _mxfp4(fields: Fields, method: str) -> Rules:
    return [("*", Scheme("mxfp4"))]


def _torchao(fields: Fields, method: str) -> Rules:
    return [("*", Scheme("torchao"))]


def _others(fields: Fields, method: str) -> Rules:
    return [("*", Scheme(f"quant_method {method!r}"))]


_RULES = {
    **dict.fromkeys(FP8_METHODS, _fp8),
    **{"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "torchao": _torchao, "mxfp4": _mxfp4},
    **{"auto-round": _auto_round, "intel/auto-round": _auto_round, "modelopt": _modelopt, "modelopt_fp4": _modelopt},
}


def _group(fields: Fields, default: int | None = None) -> int | None:
    """The field group_size: columns that share a scale. -1 or a missing field is `default`, where None means all."""
    return default if fields.get("group_size", -1) == -1 else fields.size("group_size")


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    block = fields.sequence(name)
    if block is not None and (len(block) != 2 or not all(type(size) is int and size > 0 for size in block)):
        raise ConfigError(f"quantization_config.{name} = {block} must be two whole numbers")
    return None if block is None else tuple(block)


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern matches the module, as Hugging Face's libraries read it: a regular expression after re:,
    otherwise a name or a part of one, which may contain *.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ConfigError(
                f"quantization_config.ignore: {pattern!r} is not a regular expression ({error})"
            ) from None
    return fnmatch.fnmatch(f".{module}.", f"*.{pattern}.*")
