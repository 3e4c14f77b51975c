"""Number formats of a published model from its `quantization_config`: which matrices have which."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from laneformer.errors import ConfigError
from laneformer.hf.fields import Fields

FP8_METHODS = ("fp8", "finegrained_fp8", "fbgemm_fp8")
DTYPES = ("bfloat16", "float16", "float32")
# A module that stands for a part's matrices where a config lists modules that keep the model's dtype.
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
    """Format of every part of a model."""

    usual: str
    """The model's dtype, in which router, head and all that is not quantized are."""
    quantized: str
    """Format of the quantized matrices."""
    kept: tuple[str, ...]
    """Patterns of modules that keep the model's dtype."""
    layers: int
    """Layers of the model."""
    rule: str
    """All of this in words."""

    def of(self, part: str) -> str:
        """Format of a part, a key of MODULES."""
        module = MODULES[part].format(n=self.layers - 1)
        return self.usual if any(_matches(pattern, module) for pattern in self.kept) else self.quantized


def read_formats(fields: Fields) -> Formats:
    """Raises ConfigError, naming the field, for a format that is not supported."""
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
    """The format of compressed-tensors' one group."""
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


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern names the module, as Hugging Face's libraries read it: a regular expression after re:, else a
    name or part of one, also with *.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ConfigError(f"quantization_config.ignore: {pattern!r} is no regular expression ({error})") from None
    return fnmatch.fnmatch(f".{module}.", f"*.{pattern}.*")
