"""The dimensions of published mixtures of experts: weights by part, the share that one token reads, and their formats.

Only matrices are counted, without norms, biases, gates of one value per head or expert, and blocks for multi-token
prediction.
"""

from dataclasses import dataclass
from fractions import Fraction

from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import Formats


@dataclass(frozen=True)
class Part:
    """Matrices of one format, of which a token reads the same share."""

    name: str
    parameters: int
    """Number of weights, including all experts."""
    format: str
    """Number format, a key of laneformer.formats.FORMATS."""
    share: Fraction = Fraction(1)
    """Share of the weights that one token reads: experts used / experts, otherwise 1."""

    @property
    def read(self) -> int:
        """Number of weights that one token reads."""
        return int(self.parameters * self.share)

    @property
    def bytes(self) -> float:
        """Bytes that one token reads."""
        return self.read * FORMATS[self.format].bytes


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The weights and cached values that one token of a model reads at batch 1."""

    layers: int
    parts: tuple[Part, ...]
    formats: str
    """Explanation of the formats, for reports."""
    kv_full: int | None
    """Cached values that a token reads for every earlier position; None: the config does not determine them."""
    kv_window: tuple[int, int] = (0, 0)
    """Cached values per position in all sliding layers, and their window in positions."""
    state: int = 0
    """Number of recurrent state values that a token reads and writes."""


def routed_experts(fields: Fields, layers: int, experts: int, width: int, format: str) -> Part:
    """The experts of `layers` layers. experts: number per layer. width: columns of one expert."""
    used = fields.size("num_experts_per_tok")
    if used > experts:
        raise ConfigError(f"num_experts_per_tok = {used} must be at most the number of experts, {experts}")
    weights = layers * experts * 3 * width * fields.hidden
    return Part(f"routed experts, {used} of {experts}", weights, format, Fraction(used, experts))


def router(fields: Fields, layers: int, experts: int, formats: Formats) -> Part:
    """The matrices that choose experts."""
    return Part("router", layers * experts * fields.hidden, formats.usual)


def dense_layers(fields: Fields, count: int, formats: Formats) -> list[Part]:
    """Feed-forward modules of the layers without experts."""
    if not count:
        return []
    weights = count * 3 * fields.size("intermediate_size") * fields.hidden
    return [Part("dense layer" if count == 1 else f"dense layers, {count}", weights, formats.of("dense"))]


def head(fields: Fields, formats: Formats) -> Part:
    """The output head. The embedding table is not counted, because a token reads only one row of it."""
    return Part("head", fields.size("vocab_size") * fields.hidden, formats.usual)


def grouped_attention(fields: Fields) -> tuple[int, int]:
    """Number of weights in one layer's grouped-query attention, and of its cached values per position."""
    heads, kv, dim = fields.size("num_attention_heads"), fields.kv_heads, fields.head_dim
    return fields.hidden * dim * (2 * heads + 2 * kv), 2 * kv * dim


def layers_of_type(fields: Fields, kind: str) -> int:
    """Number of layers whose type in `layer_types` is `kind`."""
    types = fields.sequence("layer_types")
    if types is None or len(types) != fields.layers:
        raise ConfigError(f"layer_types = {types!r}: name the type of each of the {fields.layers} layers")
    return types.count(kind)


def sparse_layers(fields: Fields) -> int:
    """Number of layers with experts in Qwen's mixtures: every decoder_sparse_step-th layer, except mlp_only_layers."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.sequence("mlp_only_layers") or []
    return sum((n + 1) % step == 0 and n not in dense for n in range(fields.layers))
