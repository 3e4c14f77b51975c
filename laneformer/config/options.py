"""What each block of a layer computes: the options that its class in laneformer/blocks takes, in sizes of one lane."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from laneformer.config.sizes import DeltaNetSizes, LatentAttention, RopeScaling
from laneformer.ops import QUICK_GELU_FACTOR, Activation, AttentionVariant, ModuleVariant


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """A norm of the stream, laneformer/blocks/norm.py."""

    hidden_size: int
    num_lanes: int
    eps: float
    """Added to the mean square."""
    per_lane: bool
    """Each lane has its own scale."""
    plus_one: bool = False
    """The factor on each channel is 1 + scale."""


@dataclass(frozen=True, kw_only=True)
class Norms(ModuleVariant):
    """What surrounds the modules of a model, laneformer/blocks/layer.py."""

    in_layers: NormOptions
    """A norm before or after a module."""
    final: NormOptions
    """The norm of the stream before the head."""
    streams: "StreamsOptions | None" = None
    """How modules read and write several residual streams; None: there is one."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(AttentionVariant):
    """The attention of one layer, laneformer/blocks/attention.py."""

    hidden_size: int
    num_lanes: int
    heads: int
    """Query heads of one lane."""
    kv_heads: int
    """Key/value heads of one lane."""
    head_dim: int
    """Channels of one head."""
    window: int | None
    """Keys that a query sees, its own position included; None for all."""
    rotary: bool
    """q and k are rotated by their positions."""
    qkv_bias: bool
    """Biases on the q, k and v projections, and on that of the gate."""
    out_bias: bool = False
    """A bias on the output projection; each lane has its own."""
    sinks: bool = False
    """Every query head has one more logit among its scores, without key and value."""
    qk_norm: Literal["head", "projection"] | None
    """RMSNorm before the rotation over each q and k head, or over all q heads and all k heads of the one lane."""
    norm_eps: float
    """Added to the mean square in the norms of q and k."""
    norm_plus_one: bool = False
    """The factors of these norms are 1 + their weights."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions:
    """The gated DeltaNet of one layer, laneformer/blocks/delta_net.py."""

    hidden_size: int
    num_lanes: int
    sizes: DeltaNetSizes
    """Of one lane."""
    norm_eps: float
    """Added to the mean square in the norm of each head's results."""

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.sizes.key_heads * self.sizes.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of its gate."""
        return self.sizes.value_heads * self.sizes.value_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions(LatentAttention):
    """The latent attention of one layer, laneformer/blocks/latent_attention.py."""

    hidden_size: int
    num_lanes: int
    heads: int
    """Heads of one lane."""
    scale: float
    """Factor on the scores."""


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """The MLP of one layer, laneformer/blocks/mlp.py."""

    hidden_size: int
    num_lanes: int
    columns: int
    """Feed-forward columns of one lane."""
    activation: Activation
    gated: bool
    """A gate and an up projection, instead of the latter alone."""
    limit: float | None = None
    """Gated: the gate is at most this, up at most this and at least minus this."""


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """The mixture of experts of one layer, laneformer/blocks/experts.py."""

    hidden_size: int
    num_lanes: int
    columns: int
    """Columns of one expert in one lane."""
    experts: int
    used: int
    """Experts that a token uses."""
    normalized: bool
    """The shares of the chosen experts sum to 1; otherwise they are the softmax over all."""
    activation: Activation
    router_bias: bool = False
    """A bias on the router's logits."""
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """What is made of the logits; what follows requires another than the softmax."""
    table_rows: int = 0
    """Tokens of the vocabulary, whose experts a table has, instead of those with the best scores; 0: no table."""
    correction: bool = False
    """A bias on the scores by which experts are chosen; their shares are without it."""
    groups: int = 1
    """Groups of experts with neighbouring numbers."""
    groups_used: int = 1
    """Groups that a token may choose from: those with the largest sums of their two best scores."""
    factor: float = 1.0
    """Factor on the shares."""
    biases: bool = False
    """Biases on all matrices of the experts; each lane has its own of w2."""
    limit: float | None = None
    """Clamped SwiGLU: the gate is at most this, up at most this and at least minus this."""
    alpha: float = QUICK_GELU_FACTOR
    """Clamped SwiGLU: factor on the gate in its sigmoid."""
    up_offset: float = 1.0
    """Clamped SwiGLU: added to up."""
    shared: MlpOptions | None = None
    """An MLP that every token uses beside the chosen experts."""
    shared_gate: bool = False
    """The output of `shared` times the sigmoid of one value, a row of a matrix times the stream."""


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionOptions:
    """The compressed attention of one layer, laneformer/blocks/compressed_attention.py."""

    hidden_size: int
    num_lanes: int
    heads: int
    """Query heads of one lane."""
    head_dim: int
    """Channels of a head, and of the vector that is key and value of all."""
    ratio: int
    """Positions that one entry is made of; 0: no entries."""
    overlaps: bool
    """Entries also contain the positions of the entry before, and an indexer chooses among them."""
    window: int
    q_lora_rank: int
    qk_rope_head_dim: int
    o_groups: int
    """Groups of heads of one lane."""
    o_lora_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    """How modules read and write several residual streams, laneformer/blocks/streams.py."""

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
    """The two blocks of a layer, named as in the weights' paths. `laneformer.blocks.BLOCKS` maps each to its class."""

    attention: AttentionOptions | CompressedAttentionOptions | DeltaNetOptions | LatentAttentionOptions
    feed_forward: MlpOptions | ExpertsOptions
