"""The grouped parts of a model's config: scaled rotary positions, gated DeltaNet, latent and compressed attention,
several residual streams.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from laneformer.config.checks import LARGEST, require_int, require_number
from laneformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies to contexts longer than those of the original training.

    `linear` divides every frequency by `factor`. `llama3` divides only those of long wavelengths (Llama 3.1). `yarn`
    blends both per pair of channels and also scales cos and sin (Peng et al., arXiv 2309.00071).
    """

    type: Literal["linear", "llama3", "yarn"]
    factor: float
    """Ratio of the new context to the original one, at least 1."""
    original_max_position_embeddings: int = 0
    """Context length of the original training in tokens; required by llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with wavelengths above original / low_freq_factor are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with wavelengths below original / high_freq_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: pairs that rotate more often than this over the original context are unchanged."""
    beta_slow: float = 1.0
    """yarn: frequencies of pairs that rotate less often than this are divided by the whole factor."""
    attention_factor: float | None = None
    """yarn: factor on cos and sin; by default derived from `factor` and the two mscale fields."""
    mscale: float | None = None
    """yarn: sets the numerator of the derived attention factor (DeepSeek's form; give both mscales or none)."""
    mscale_all_dim: float | None = None
    """yarn: sets the denominator of the derived attention factor."""
    truncate: bool = True
    """yarn: round the ends of the blended range to whole pairs."""

    @property
    def score_factor(self) -> float:
        """yarn: factor on the scores of latent attention, the square of the temperature at mscale_all_dim."""
        if self.type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self.temperature(self.mscale_all_dim) ** 2

    def temperature(self, mscale: float) -> float:
        """yarn: 0.1 mscale ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def __post_init__(self) -> None:
        if self.type not in ("linear", "llama3", "yarn"):
            raise ConfigError(
                f"unknown rope_scaling.type {self.type!r}; choose linear, llama3 or yarn, or remove rope_scaling"
            )
        require_number("rope_scaling.factor", self.factor, at_least=1.0)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            require_number(f"rope_scaling.{name}", getattr(self, name), above=0.0)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                require_number(f"rope_scaling.{name}", getattr(self, name), at_least=0.0)
        if self.type in ("llama3", "yarn"):
            original = "original_max_position_embeddings"
            require_int(
                f"rope_scaling.{original}",
                getattr(self, original),
                at_least=1,
                at_most=LARGEST["max_position_embeddings"],
            )
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"rope_scaling.truncate = {self.truncate!r} must be true or false")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be greater than low_freq_factor ="
                f" {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of gated DeltaNet (Yang et al., arXiv 2412.06464), over all lanes."""

    key_heads: int
    """Heads of q and k, a multiple of the lanes."""
    value_heads: int
    """Heads of v, of the gates and of the state, a multiple of key_heads."""
    key_dim: int
    """Channels of a head of q and k."""
    value_dim: int
    """Channels of a head of v."""
    conv_kernel: int = 4
    """Tokens that the convolution of q, k and v covers, including the current one."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_int(f"delta_net.{field.name}", getattr(self, field.name), at_least=1, at_most=2**16)
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"delta_net.value_heads = {self.value_heads} must be a multiple of delta_net.key_heads ="
                f" {self.key_heads}"
            )
        if self.conv_kernel < 2:
            raise ConfigError("delta_net.conv_kernel = 1 covers only the current token; use at least 2")


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are computed from one
    latent vector per position. All heads share one rotated key.
    """

    q_lora_rank: int | None = None
    """Channels between the two matrices that compute the queries; none: a single matrix computes them."""
    kv_lora_rank: int
    """Channels of the latent vector of keys and values."""
    qk_nope_head_dim: int
    """Channels of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: int
    """Channels of a head's queries that are rotated, and of the rotated key that all heads share."""
    v_head_dim: int
    """Channels of a head's values."""
    latent_norm_eps: float = 1e-6
    """Added to the mean square in the norms of the latent vectors."""

    def __post_init__(self) -> None:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if name != "q_lora_rank" or self.q_lora_rank is not None:
                require_int(name, getattr(self, name), at_least=1, at_most=LARGEST["head_dim"])
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even; rotary positions rotate pairs of channels"
            )
        require_number("latent_norm_eps", self.latent_norm_eps, above=0.0)


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """Attention to the newest positions and to compressed entries, each computed from several positions (DeepSeek-V4).
    One vector is key and value of all heads.
    """

    ratios: tuple[int, ...]
    """For each layer, the positions per entry; 0: the layer has no entries."""
    window: int
    """Newest positions that a query attends to in addition to the entries, including its own."""
    q_lora_rank: int
    """Channels between the two matrices that compute the queries."""
    qk_rope_head_dim: int
    """Channels that are rotated, the last ones of a head."""
    o_groups: int
    """Groups of heads, each with its own first output projection; a multiple of the lanes."""
    o_lora_rank: int
    """Rows of one group's projection."""
    overlap_ratio: int = 4
    """Entries of layers with this ratio also cover the positions of the entry before, and an indexer chooses among
    them.
    """
    index_heads: int = 64
    """Query heads of the indexer."""
    index_head_dim: int = 128
    """Channels of one head of the indexer, and of its keys."""
    index_topk: int = 512
    """Entries that the indexer chooses."""
    rope_theta: float = 160000.0
    """Base of the rotary frequencies in layers with entries; other layers use the model's rope_theta."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies in layers with entries."""

    def __post_init__(self) -> None:
        # Lists and mappings come from JSON.
        if isinstance(self.ratios, list):
            object.__setattr__(self, "ratios", tuple(self.ratios))
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if not isinstance(self.ratios, tuple):
            raise ConfigError(f"compressed_attention.ratios = {self.ratios!r} must be a list of whole numbers")
        for ratio in self.ratios:
            require_int("compressed_attention.ratios", ratio, at_least=0, at_most=2**16)
        for field in dataclasses.fields(self):
            if field.type is int:
                require_int(f"compressed_attention.{field.name}", getattr(self, field.name), at_least=1, at_most=2**24)
        require_number("compressed_attention.rope_theta", self.rope_theta, above=0.0)
        size = self.qk_rope_head_dim
        if size % 2 or size > self.index_head_dim:
            raise ConfigError(
                f"compressed_attention.qk_rope_head_dim = {size} must be even, and at most index_head_dim ="
                f" {self.index_head_dim}: rotary positions rotate pairs of channels"
            )

    def check(self, layers: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """Raises ConfigError unless these options fit a model of the given sizes."""
        if len(self.ratios) != layers:
            raise ConfigError(
                f"compressed_attention.ratios has {len(self.ratios)} entries: give a number for each of the {layers}"
                " layers"
            )
        if kv_heads != 1:
            raise ConfigError(
                f"num_key_value_heads = {kv_heads} with compressed_attention must be 1: one vector is key and value of"
                " all heads"
            )
        if heads % self.o_groups:
            raise ConfigError(
                f"compressed_attention.o_groups = {self.o_groups} must divide num_attention_heads = {heads}"
            )
        if self.qk_rope_head_dim > head_dim:
            raise ConfigError(
                f"compressed_attention.qk_rope_head_dim = {self.qk_rope_head_dim} must be at most head_dim = {head_dim}"
            )


@dataclass(frozen=True, kw_only=True)
class ResidualStreams:
    """Several residual streams, which each module reads and writes through its own mixture (hyper-connections, Zhu et
    al., arXiv 2409.19606, in the form of DeepSeek-V4).
    """

    count: int
    """Number of streams."""
    iterations: int = 20
    """Iterations that scale the rows and columns of the matrix between the streams to sum to 1 (Sinkhorn)."""
    eps: float = 1e-6
    """Added to the sigmoids of the read weights, to the softmax of the matrix, and to the sums that divide it."""

    def __post_init__(self) -> None:
        require_int("residual_streams.count", self.count, at_least=1, at_most=64)
        require_int("residual_streams.iterations", self.iterations, at_least=1, at_most=1000)
        require_number("residual_streams.eps", self.eps, above=0.0)
