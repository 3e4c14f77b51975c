"""The options of each block of a layer, as its class in laneformer/blocks takes them. Sizes are those of one lane."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from laneformer.config.sizes import DeltaNetSizes, LatentAttention, RopeScaling
from laneformer.ops import QUICK_GELU_FACTOR, Activation, AttentionVariant, ModuleVariant


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Options of a norm of the stream; see laneformer/blocks/norm.py."""

    hidden_size: int
    num_lanes: int
    eps: float
    """Added to the mean square."""
    per_lane: bool
    """Whether each lane has its own scale."""
    plus_one: bool = False
    """Whether the factor on each channel is 1 + scale instead of scale."""


@dataclass(frozen=True, kw_only=True)
class Norms(ModuleVariant):
    """What surrounds the modules of a model, laneformer/blocks/layer.py."""

    in_layers: NormOptions
    """A norm before or after a module."""
    final: NormOptions
    """The norm of the stream before the head."""
    streams: "StreamsOptions | None" = None
    """How modules read and write several residual streams; None: there is one."""


@dataclass(frozen=True)
class RotaryOptions:
    """Options of the rotation of channels by their position; see laneformer/blocks/rotary.py."""

    channels: int
    """Channels of a head that rotate."""
    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies to longer contexts."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(AttentionVariant):
    """Options of the attention of one layer; see laneformer/blocks/attention.py."""

    hidden_size: int
    num_lanes: int
    heads: int
    """Query heads of one lane."""
    kv_heads: int
    """Key/value heads of one lane."""
    head_dim: int
    """Channels of one head."""
    window: int | None
    """Keys that a query attends to, including its own position; None for all."""
    scale: float | None = None
    """Factor on the scores q . k; None: 1 / sqrt(head_dim)."""
    rotary: RotaryOptions | None
    """How q and k are rotated by their positions; None: they are not."""
    qkv_bias: bool
    """Whether the projections of q, k, v and the gate have biases."""
    out_bias: bool = False
    """Whether the output projection has a bias, one per lane."""
    sinks: bool = False
    """Whether every query head has one more logit among its scores, without key and value."""
    qk_norm: Literal["head", "projection"] | None
    """RMSNorm of q and k before the rotation: over each head, over all heads of the one lane (projection), or none."""
    norm_eps: float
    """Added to the mean square in the norms of q and k."""
    norm_plus_one: bool = False
    """Whether the norms of q and k multiply by 1 + their weights."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions:
    """Options of the gated DeltaNet of one layer; see laneformer/blocks/delta_net.py."""

    hidden_size: int
    num_lanes: int
    sizes: DeltaNetSizes
    """Sizes of one lane's share."""
    norm_eps: float
    """Added to the mean square in the norm of each head's results."""

    rotary: ClassVar[RotaryOptions | None] = None

    @property
    def keys(self) -> int:
        """Channels of q, equal to those of k, in one lane."""
        return self.sizes.key_heads * self.sizes.key_dim

    @property
    def values(self) -> int:
        """Channels of v, equal to those of the gate z, in one lane."""
        return self.sizes.value_heads * self.sizes.value_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions(LatentAttention):
    """Options of the latent attention of one layer; see laneformer/blocks/latent_attention.py."""

    hidden_size: int
    num_lanes: int
    heads: int
    """Heads of one lane."""
    scale: float
    """Factor on the scores q . k."""
    rotary: RotaryOptions
    """How the last channels of a head are rotated."""


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """Options of the MLP of one layer; see laneformer/blocks/mlp.py."""

    hidden_size: int
    num_lanes: int
    columns: int
    """Feed-forward columns of one lane."""
    activation: Activation
    gated: bool
    """Whether there is a gate projection in addition to the up projection."""
    limit: float | None = None
    """With a gate: upper bound of the gate, and bound of the absolute value of up; None for no bounds."""


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """Options of the mixture of experts of one layer; see laneformer/blocks/experts.py."""

    hidden_size: int
    num_lanes: int
    columns: int
    """Columns of one expert in one lane."""
    experts: int
    """Number of experts."""
    used: int
    """Experts that a token uses."""
    normalized: bool
    """Whether the shares of the chosen experts sum to 1; otherwise they are the scores, which the softmax takes over
    all experts.
    """
    activation: Activation
    router_bias: bool = False
    """Whether the router's logits have a bias."""
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function that turns logits into scores. The next five fields require sigmoid or sqrtsoftplus."""
    table_rows: int = 0
    """Rows (tokens of the vocabulary) of a table of each token's experts, which replaces the choice by scores; 0: no
    table.
    """
    correction: bool = False
    """Whether the scores by which experts are chosen have a bias. The shares do not include it."""
    groups: int = 1
    """Groups of experts with consecutive numbers."""
    groups_used: int = 1
    """Groups that a token may choose from: those with the largest sums of their two best scores."""
    factor: float = 1.0
    """Factor on the shares."""
    biases: bool = False
    """Whether all matrices of the experts have biases; each lane has its own bias of w2."""
    limit: float | None = None
    """Clamped SwiGLU: upper bound of the gate, and bound of the absolute value of up; None: not clamped."""
    alpha: float = QUICK_GELU_FACTOR
    """Clamped SwiGLU: factor on the gate in its sigmoid."""
    up_offset: float = 1.0
    """Clamped SwiGLU: added to up."""
    shared: MlpOptions | None = None
    """An MLP that every token uses in addition to the chosen experts."""
    shared_gate: bool = False
    """Whether the output of `shared` is multiplied by the sigmoid of one row times the stream."""


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionOptions:
    """Options of the compressed attention of one layer; see laneformer/blocks/compressed_attention.py. The other fields
    are those of config.CompressedAttention.
    """

    hidden_size: int
    num_lanes: int
    heads: int
    """Query heads of one lane."""
    head_dim: int
    """Channels of a head, and of the vector that is key and value of all heads."""
    ratio: int
    """Positions per entry; 0: no entries."""
    overlaps: bool
    """Whether entries also cover the positions of the entry before, and an indexer chooses among them."""
    window: int
    q_lora_rank: int
    rotary: RotaryOptions
    """How the last channels of a head are rotated."""
    o_groups: int
    """Groups of heads of one lane."""
    o_lora_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    """Options of several residual streams; see laneformer/blocks/streams.py and config.ResidualStreams."""

    hidden_size: int
    count: int
    iterations: int
    eps: float
    norm_eps: float


BlockOptions = (
    AttentionOptions
    | CompressedAttentionOptions
    | DeltaNetOptions
    | LatentAttentionOptions
    | MlpOptions
    | ExpertsOptions
)


class LayerOptions(NamedTuple):
    """The options of a layer's two blocks, named as in the weights' paths. `laneformer.blocks.BLOCKS` maps their types
    to the classes of the blocks.
    """

    attention: AttentionOptions | CompressedAttentionOptions | DeltaNetOptions | LatentAttentionOptions
    feed_forward: MlpOptions | ExpertsOptions
