"""The fields of a model's config. Field names follow Hugging Face where it has one."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from laneformer.config.sizes import CompressedAttention, DeltaNetSizes, LatentAttention, ResidualStreams, RopeScaling
from laneformer.ops import LATER, QUICK_GELU_FACTOR, AttentionVariant, ModuleVariant


@dataclass(frozen=True, kw_only=True)
class ModelFields(AttentionVariant, ModuleVariant):
    """The fields of a ModelConfig. laneformer/ops.py defines those of `AttentionVariant` and `ModuleVariant`."""

    vocab_size: int
    """Tokens in the vocabulary (V)."""
    hidden_size: int
    """Width of each lane's residual stream (D)."""
    intermediate_size: int
    """Feed-forward columns over all lanes (F)."""
    num_hidden_layers: int
    """Layers (N), each with an attention module and an MLP module."""
    num_attention_heads: int
    """Query heads over all lanes (H)."""
    num_key_value_heads: int
    """Key/value heads over all lanes (K): a multiple or a divisor of the lanes (L). If L > K, each head has a copy in
    L / K lanes, which training changes independently.
    """
    head_dim: int | None = None
    """Channels of one head (e); by default hidden_size / num_attention_heads."""
    max_position_embeddings: int = 4096
    """Longest context in tokens."""

    num_lanes: int = 1
    """Lanes (L): equal shares of the model, on at most L devices. 1 is a dense model."""
    layout: str = "laneformer"
    """Parallelism schedule: a name of laneformer.LAYOUTS with its arguments, as in tp, dtp(4), desync(2), caat(0.5)."""
    broadcast_delay: int = 2
    """Layout laneformer: layers until the other lanes' outputs arrive (d)."""
    use_early_comm: bool = True
    """Layout laneformer: sum the outputs of the first d layers over all lanes at once, instead of scaling each lane's
    output by sqrt(L).
    """
    early_lands_twice: bool = True
    """Layout laneformer: outputs of the first d layers also arrive d layers later, as in the published model; false
    corrects this.
    """
    use_attention_comm: bool = True
    """Layout laneformer: exchange attention outputs between lanes."""
    use_mlp_comm: bool = True
    """Layout laneformer: exchange MLP outputs between lanes."""

    lm_head_type: Literal["replicate", "lane", "vocab_parallel"] = "replicate"
    """Head over the mean of the lanes' streams (replicate), over the streams of all lanes end to end (lane), or one
    slice of V / L logits per lane (vocab_parallel).
    """
    pre_norm_lane_agg: bool = False
    """Head replicate: sum the lanes' streams before the final norm, instead of averaging them after it."""
    replicated_rmsn_scale: bool = True
    """All lanes share the scale of each norm (true), or each lane has its own (false)."""
    tie_word_embeddings: bool = False
    """The head reuses the embedding table."""

    sliding_window: int | None = None
    """Keys that a query of a sliding layer attends to, including its own position; none makes every layer full."""
    sliding_window_n_layers: int = 0
    """The first n layers slide; if negative, the last |n| layers."""
    unclamped_layers: tuple[int, ...] = ()
    """Layers that are full regardless of sliding_window_n_layers and swa_layers."""
    swa_layers: tuple[int, ...] | None = None
    """The sliding layers as a list, instead of sliding_window_n_layers."""

    nope_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=LATER)
    """Layers that do not rotate q and k by their positions (SmolLM3, arXiv 2501.18795)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts."""
    rope_local_base_freq: float | None = dataclasses.field(default=None, metadata=LATER)
    """Base of the rotary frequencies in sliding layers, which are not scaled (Gemma 3, arXiv 2503.19786); none: as in
    the other layers.
    """
    embedding_multiplier: float = dataclasses.field(default=1.0, metadata=LATER)
    """Factor on the rows of the embedding table."""
    attention_multiplier: float | None = dataclasses.field(default=None, metadata=LATER)
    """Factor on the scores q . k; by default 1 / sqrt(head_dim)."""
    final_logit_softcapping: float | None = dataclasses.field(default=None, metadata=LATER)
    """Softcap of the logits: cap tanh(logits / cap) (Gemma 2, arXiv 2408.00118); none: no cap."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    qkv_bias: bool = False
    """Biases on the projections of q, k, v (Qwen2) and the gate."""
    out_bias: bool = dataclasses.field(default=False, metadata=LATER)
    """A bias on the output projection of attention (gpt-oss), one per lane."""
    attention_sinks: bool = dataclasses.field(default=False, metadata=LATER)
    """Every query head has one more logit among its scores, without key and value (gpt-oss; arXiv 2309.17453)."""
    qk_norm: bool = False
    """RMSNorm of q and k before the rotation (Qwen3)."""
    norm_plus_one: bool = dataclasses.field(default=False, metadata=LATER)
    """All RMSNorms, including those of q and k, multiply by 1 + their weights (Gemma, Qwen3-Next)."""
    rotary_dim: int | None = dataclasses.field(default=None, metadata=LATER)
    """Channels of each head that are rotated, the first ones (GPT-J); by default all."""
    delta_net: DeltaNetSizes | None = dataclasses.field(default=None, metadata=LATER)
    """Sizes of the gated DeltaNet in delta_layers."""
    delta_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=LATER)
    """Layers that have a gated DeltaNet instead of attention (Qwen3-Next); at least one layer must keep attention."""
    qk_norm_over: Literal["head", "projection"] = dataclasses.field(default="head", metadata=LATER)
    """Channels that share a mean square in qk_norm: each head, or all heads together (projection; OLMo-2), which
    requires one lane.
    """
    latent_attention: LatentAttention | None = dataclasses.field(default=None, metadata=LATER)
    """Every layer has multi-head latent attention with num_attention_heads heads, instead of grouped queries."""
    compressed_attention: CompressedAttention | None = dataclasses.field(default=None, metadata=LATER)
    """Every layer has compressed attention with num_attention_heads heads, instead of grouped queries (DeepSeek-V4)."""
    residual_streams: ResidualStreams | None = dataclasses.field(default=None, metadata=LATER)
    """Several residual streams, which require layout tp; none is one stream, to which each module adds its output."""

    hidden_act: str = dataclasses.field(default="silu", metadata=LATER)
    """Activation of the MLP: silu, gelu, gelu_pytorch_tanh or relu2."""
    gated_mlp: bool = dataclasses.field(default=True, metadata=LATER)
    """The MLP multiplies its activated gate projection by an up projection (GLU, arXiv 2002.05202); false removes the
    gate and activates the up projection (Arcee).
    """

    num_experts: int | None = dataclasses.field(default=None, metadata=LATER)
    """Experts per layer (E), instead of one MLP; none: no experts."""
    num_experts_per_tok: int = dataclasses.field(default=2, metadata=LATER)
    """Experts that a token uses."""
    moe_intermediate_size: int | None = dataclasses.field(default=None, metadata=LATER)
    """Columns of one expert over all lanes; by default intermediate_size."""
    norm_topk_prob: bool = dataclasses.field(default=True, metadata=LATER)
    """The shares of a token's experts sum to 1; false keeps their scores, such as the softmax over all experts."""
    mlp_only_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=LATER)
    """Layers that have an MLP of intermediate_size instead of experts."""
    router_bias: bool = dataclasses.field(default=False, metadata=LATER)
    """A bias on the router's logits."""
    expert_bias: bool = dataclasses.field(default=False, metadata=LATER)
    """Biases on all matrices of the experts; each lane has its own bias of the down projection."""
    swiglu_limit: float | None = dataclasses.field(default=None, metadata=LATER)
    """Clamped SwiGLU of the experts (gpt-oss): gate sigmoid(swiglu_alpha gate) (up + 1), with gate <= limit and
    |up| <= limit; none: activation(gate) up.
    """
    swiglu_alpha: float = dataclasses.field(default=QUICK_GELU_FACTOR, metadata=LATER)
    """Clamped SwiGLU: factor on the gate in its sigmoid."""
    swiglu_plus_one: bool = dataclasses.field(default=True, metadata=LATER)
    """Clamped SwiGLU: add 1 to up; false does not, and clamps the shared expert too (DeepSeek-V4)."""
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus"] = dataclasses.field(default="softmax", metadata=LATER)
    """Scores that choose experts and determine their shares: the softmax of the router's logits, or for each logit the
    sigmoid (DeepSeek-V3, arXiv 2412.19437) or the square root of the softplus (DeepSeek-V4). The next five options
    require one of the last two.
    """
    hash_layers: int = dataclasses.field(default=0, metadata=LATER)
    """The first n layers look up a token's experts in a table by its id, without router_correction."""
    router_correction: bool = dataclasses.field(default=False, metadata=LATER)
    """A float32 bias on the scores by which experts are chosen; their shares do not include it (arXiv 2408.15664)."""
    n_group: int = dataclasses.field(default=1, metadata=LATER)
    """Groups of experts with consecutive numbers."""
    topk_group: int = dataclasses.field(default=1, metadata=LATER)
    """Groups that a token may choose from: those with the largest sums of their two best scores."""
    routed_scaling_factor: float = dataclasses.field(default=1.0, metadata=LATER)
    """Factor on the shares of a token's experts."""
    shared_expert_intermediate_size: int | None = dataclasses.field(default=None, metadata=LATER)
    """Columns over all lanes of a shared expert: an MLP that every token uses in addition to its chosen experts
    (DeepSeekMoE, arXiv 2401.06066).
    """
    shared_expert_gate: bool = dataclasses.field(default=False, metadata=LATER)
    """Multiply the output of the shared expert by sigmoid(gate . x) for each token (Qwen2-MoE, arXiv 2407.10671)."""

    bos_token_id: int | None = None
    """Token that begins a text. In a training run it is put before prompts if the tokenizer does not decide that."""
    eos_token_id: tuple[int, ...] = ()
    """Tokens that end a text."""

    @property
    def head_size(self) -> int:
        """Channels of one head's queries and keys (e)."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_nope_head_dim + self.latent_attention.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Channels of one head that are rotated by their position."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_rope_head_dim
        if self.compressed_attention is not None:
            return self.compressed_attention.qk_rope_head_dim
        return self.rotary_dim or self.head_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, the keys that a query attends to; None for all."""
        n, s = self.num_hidden_layers, self.sliding_window_n_layers

        def slides(layer: int) -> bool:
            listed = layer in self.swa_layers if self.swa_layers is not None else layer < s or layer >= n + s
            return listed and layer not in self.unclamped_layers

        return tuple(self.sliding_window if slides(layer) else None for layer in range(n))
