"""Published mixtures of experts as dimensions: weights by part, the share that one token reads, and their formats.

Matrices count; norms, biases, gates of one value per head or expert, and blocks for multi-token prediction do not.
"""

from dataclasses import dataclass
from fractions import Fraction

from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.hf.fields import Fields
from laneformer.hf.packed.quantization import Formats


@dataclass(frozen=True)
class Part:
    """Matrices that are read alike."""

    name: str
    parameters: int
    """Weights, with all experts."""
    format: str
    """Number format, a key of laneformer.formats.FORMATS."""
    share: Fraction = Fraction(1)
    """Share of the weights that one token reads: experts used / experts, otherwise 1."""

    @property
    def read(self) -> int:
        """Weights that one token reads."""
        return int(self.parameters * self.share)

    @property
    def bytes(self) -> float:
        """Bytes that one token reads."""
        return self.read * FORMATS[self.format].bytes


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What one token of a model reads at batch 1."""

    layers: int
    parts: tuple[Part, ...]
    formats: str
    """Where the formats are from, in words."""
    kv_full: int | None
    """Cached values that a token reads of every earlier position; None: the config does not determine it."""
    kv_window: tuple[int, int] = (0, 0)
    """Cached values of a position in sliding layers, and their window in positions."""
    state: int = 0
    """Values of recurrent state that a token reads and writes."""


def routed_experts(fields: Fields, layers: int, experts: int, width: int, format: str) -> Part:
    """The experts of `layers` layers, each `width` columns wide, of which a token uses a few."""
    used = fields.size("num_experts_per_tok")
    if used > experts:
        raise ConfigError(f"num_experts_per_tok = {used}: there are {experts} experts")
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
    """The output head; of the embedding table a token reads one row, which does not count."""
    return Part("head", fields.size("vocab_size") * fields.hidden, formats.usual)


def grouped_attention(fields: Fields) -> tuple[int, int]:
    """Weights of one layer's attention with grouped queries, and cached values of a position."""
    heads, kv, dim = fields.size("num_attention_heads"), fields.kv_heads, fields.head_dim
    return fields.hidden * dim * (2 * heads + 2 * kv), 2 * kv * dim


def layers_of_type(fields: Fields, kind: str) -> int:
    """How many layers `layer_types` gives as `kind`."""
    types = fields.sequence("layer_types")
    if types is None or len(types) != fields.layers:
        raise ConfigError(f"layer_types = {types!r}: name the type of each of the {fields.layers} layers")
    return types.count(kind)


def sparse_layers(fields: Fields) -> int:
    """Layers with experts in Qwen's mixtures: every decoder_sparse_step-th but for mlp_only_layers."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.sequence("mlp_only_layers") or []
    return sum((n + 1) % step == 0 and n not in dense for n in range(fields.layers))
