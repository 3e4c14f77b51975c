"""The config of a whole model: one frozen dataclass, checked when it is made."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, Literal

from laneformer.config.checks import LARGEST, MOST_MATRICES, choices_of, part_of, require_int, require_number
from laneformer.config.options import (
    AttentionOptions,
    CompressedAttentionOptions,
    DeltaNetOptions,
    ExpertsOptions,
    LatentAttentionOptions,
    LayerOptions,
    MlpOptions,
    NormOptions,
    Norms,
    StreamsOptions,
)
from laneformer.config.sizes import CompressedAttention, DeltaNetSizes, LatentAttention, ResidualStreams, RopeScaling
from laneformer.errors import ConfigError
from laneformer.layout import Schedule, make_schedule
from laneformer.ops import LATER, QUICK_GELU_FACTOR, Activation, AttentionVariant, ModuleVariant

# Sizes that are None in models without experts
OF_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
OF_SCORES = (  # options of routers whose scores depend on one logit each
    *("router_correction", "hash_layers", "n_group", "topk_group", "routed_scaling_factor"),
)
OF_GROUPED = (  # options of grouped-query attention
    *("sliding_window", "qkv_bias", "out_bias", "attention_sinks", "qk_norm", "rotary_dim", "delta_layers"),
    *(field.name for field in dataclasses.fields(AttentionVariant)),
)
SIZES = {  # grouped parts of the config, which are objects in JSON
    "delta_net": DeltaNetSizes,
    "latent_attention": LatentAttention,
    "compressed_attention": CompressedAttention,
    "residual_streams": ResidualStreams,
}
LAYER_LISTS = ("unclamped_layers", "swa_layers", "nope_layers", "mlp_only_layers", "delta_layers")
HIDDEN_ACTS = tuple(kind.name.lower() for kind in Activation if kind)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AttentionVariant, ModuleVariant):
    """The architecture of a Laneformer. Field names follow Hugging Face where it has one. laneformer/ops.py defines the
    fields of `AttentionVariant` and `ModuleVariant`.

    Raises ConfigError, naming the field, its value and the remedy, for values that cannot work.
    """

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

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            if name != "head_dim" and not (name in OF_EXPERTS and getattr(self, name) is None):
                require_int(name, getattr(self, name), at_least=1, at_most=most)
        require_int("broadcast_delay", self.broadcast_delay, at_least=0, at_most=LARGEST["num_hidden_layers"])
        require_int("sliding_window_n_layers", self.sliding_window_n_layers)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ConfigError(f"{field.name} = {value!r} must be true or false")
            if field.type is float:
                require_number(field.name, value, above=0.0)
            if (choices := choices_of(field.type)) and value not in choices:
                names = ", ".join(choice for choice in choices if choice)
                left = ", or leave it out" if None in choices else ""
                raise ConfigError(f"unknown {field.name} {value!r}; choose {names}{left}")
        # Values from JSON are lists; tuples make the config hashable.
        for name, kind in SIZES.items():
            object.__setattr__(self, name, part_of(name, kind, getattr(self, name)))
        for name in (*LAYER_LISTS, "eos_token_id"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple):
                raise ConfigError(f"{name} = {value!r} must be a list of whole numbers")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.hidden_act not in HIDDEN_ACTS:
            raise ConfigError(f"unknown hidden_act {self.hidden_act!r}; choose {', '.join(HIDDEN_ACTS)}")
        self._check_heads()
        if self.num_experts is None:
            self._check_without_experts()
        else:
            self._check_experts(self.num_experts)
        self._check_lanes()
        self._check_windows()
        self._check_delta_net()
        for name, tokens in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_id)):
            for token in tokens:
                if token is not None:
                    require_int(name, token, at_least=0, at_most=self.vocab_size - 1)
        self._check_norms()

    def _check_heads(self) -> None:
        if self.compressed_attention is not None:
            self._check_compressed_attention(self.compressed_attention)
        if self.latent_attention is not None:
            self._check_latent_attention()
            return
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of num_key_value_heads ="
                f" {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size = {self.hidden_size} must be a multiple of num_attention_heads ="
                    f" {self.num_attention_heads}; change one of them or set head_dim"
                )
        else:
            require_int("head_dim", self.head_dim, at_least=2, at_most=LARGEST["head_dim"])
        if self.head_size % 2:
            raise ConfigError(
                f"head_dim (by default hidden_size / num_attention_heads) = {self.head_size} must be even; rotary"
                " positions rotate pairs of channels"
            )
        if self.rotary_dim is not None:
            require_int("rotary_dim", self.rotary_dim, at_least=2, at_most=self.head_size)
            if self.rotary_dim % 2:
                raise ConfigError(
                    f"rotary_dim = {self.rotary_dim} must be even; rotary positions rotate pairs of channels"
                )

    def _check_compressed_attention(self, own: CompressedAttention) -> None:
        own.check(self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads, self.head_size)
        for name in ("latent_attention", "nope_layers", *OF_GROUPED):
            if (value := getattr(self, name)) != getattr(ModelConfig, name):
                raise ConfigError(
                    f"{name} = {value!r} is not an option of compressed attention: remove it or compressed_attention"
                )

    def _check_delta_net(self) -> None:
        if self.delta_net is None:
            if self.delta_layers:
                raise ConfigError(
                    f"delta_layers = {list(self.delta_layers)} requires delta_net; set the sizes of its heads"
                )
            return
        if len(set(self.delta_layers)) == self.num_hidden_layers:
            raise ConfigError("delta_layers has all layers: leave at least one layer to attention")

    def _check_latent_attention(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads = {self.num_key_value_heads} with latent_attention must be num_attention_heads ="
                f" {self.num_attention_heads}"
            )
        for name in ("head_dim", "nope_layers", *OF_GROUPED):
            if (value := getattr(self, name)) != getattr(ModelConfig, name):
                raise ConfigError(
                    f"{name} = {value!r} is an option of grouped-query attention: remove it or latent_attention"
                )

    def _check_without_experts(self) -> None:
        for name in (
            *("moe_intermediate_size", "mlp_only_layers", "router_bias", "expert_bias", "swiglu_limit"),
            *("shared_expert_intermediate_size", "shared_expert_gate", "scoring_func", *OF_SCORES),
        ):
            if getattr(self, name) != getattr(ModelConfig, name):
                raise ConfigError(f"{name} = {getattr(self, name)!r} requires num_experts; set the experts per layer")

    def _check_experts(self, experts: int) -> None:
        require_int("num_experts_per_tok", self.num_experts_per_tok, at_least=1, at_most=experts)
        if (all_experts := self.num_hidden_layers * experts) > MOST_MATRICES:
            raise ConfigError(
                f"num_experts = {experts:,} in num_hidden_layers = {self.num_hidden_layers:,} layers are"
                f" {all_experts:,} experts; use at most {MOST_MATRICES:,}"
            )
        if not self.gated_mlp:
            raise ConfigError(
                "gated_mlp = false with num_experts is not supported: experts have a gate; remove gated_mlp"
            )
        self._check_router(experts)
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ConfigError(
                "shared_expert_gate = true requires shared_expert_intermediate_size; set the shared expert's columns"
            )
        if self.swiglu_limit is not None:
            require_number("swiglu_limit", self.swiglu_limit, above=0.0)
            if self.hidden_act != "silu":
                raise ConfigError(f"swiglu_limit requires hidden_act = 'silu', got {self.hidden_act!r}")

    def _check_router(self, experts: int) -> None:
        require_int("hash_layers", self.hash_layers, at_least=0, at_most=self.num_hidden_layers)
        if self.scoring_func == "softmax":
            for name in OF_SCORES:
                if (value := getattr(self, name)) != getattr(ModelConfig, name):
                    raise ConfigError(f"{name} = {value!r} requires another scoring_func than 'softmax'")
        elif self.router_bias:
            raise ConfigError("router_bias = true requires scoring_func = 'softmax'; did you mean router_correction?")
        require_int("n_group", self.n_group, at_least=1, at_most=experts)
        require_int("topk_group", self.topk_group, at_least=1, at_most=self.n_group)
        if self.n_group == 1:
            return
        if experts % self.n_group or experts < 2 * self.n_group:
            raise ConfigError(f"n_group = {self.n_group} must divide num_experts = {experts} into groups of at least 2")
        if self.num_experts_per_tok > (fits := experts // self.n_group * self.topk_group):
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok} exceeds the {fits} experts in topk_group ="
                f" {self.topk_group} groups; lower num_experts_per_tok or raise topk_group"
            )

    def _check_lanes(self) -> None:
        divided = ["num_attention_heads"]
        sparse = self.num_experts is not None and self.moe_intermediate_size is not None
        divided += ["moe_intermediate_size"] if sparse else ["intermediate_size"]
        if sparse and self.mlp_only_layers:
            divided.append("intermediate_size")
        if self.shared_expert_intermediate_size is not None:
            divided.append("shared_expert_intermediate_size")
        if self.lm_head_type == "vocab_parallel":
            divided.append("vocab_size")

        def unfit(lanes: int) -> str | None:
            wrong = [name for name in divided if getattr(self, name) % lanes]
            if self.delta_layers and self.delta_net and self.delta_net.key_heads % lanes:
                wrong.append("delta_net.key_heads")
            if self.compressed_attention and self.compressed_attention.o_groups % lanes:
                wrong.append("compressed_attention.o_groups")
            copied = self.num_key_value_heads % lanes and lanes % self.num_key_value_heads
            return "num_key_value_heads" if copied else wrong[0] if wrong else None

        if name := unfit(self.num_lanes):
            fitting = [n for n in range(1, self.num_lanes) if not unfit(n)]
            raise ConfigError(
                f"num_lanes = {self.num_lanes} does not divide {name} ="
                f" {operator.attrgetter(name)(self)}; smaller lane counts"
                f" that do: {', '.join(map(str, fitting))}"
            )
        if self.lm_head_type != "replicate" and (self.pre_norm_lane_agg or self.tie_word_embeddings):
            field = "pre_norm_lane_agg" if self.pre_norm_lane_agg else "tie_word_embeddings"
            raise ConfigError(
                f"{field} = true requires lm_head_type = 'replicate', got {self.lm_head_type!r}, which has one head per"
                " lane"
            )

    def _check_norms(self) -> None:
        if self.qk_norm and self.qk_norm_over == "projection" and self.num_lanes > 1:
            raise ConfigError(
                f"num_lanes = {self.num_lanes} with qk_norm_over = 'projection' is not supported: every lane would need"
                " a sum over all lanes before its attention; use num_lanes = 1"
            )
        schedule = make_schedule(self)  # raises ConfigError for unknown layouts and arguments
        if self.residual_streams and (self.norm_after or not self.replicated_rmsn_scale):
            raise ConfigError("residual_streams with norm_after or replicated_rmsn_scale = false is not supported")
        if reason := self.unfit(self.layout, self.num_lanes == 1 or schedule.adds_whole_sums):
            raise ConfigError(reason)

    def _check_windows(self) -> None:
        if self.sliding_window is not None:
            require_int("sliding_window", self.sliding_window, at_least=1)
        for name in LAYER_LISTS:
            listed = getattr(self, name) or ()
            if len(listed) > LARGEST["num_hidden_layers"]:
                raise ConfigError(f"{name} has {len(listed):,} entries: list each layer once")
            for layer in listed:
                require_int(name, layer, at_least=0, at_most=self.num_hidden_layers - 1)
        if self.swa_layers and self.sliding_window is None:
            raise ConfigError(
                f"swa_layers = {list(self.swa_layers)} requires sliding_window; set the keys in a layer's window"
            )
        if self.swa_layers and self.sliding_window_n_layers:
            raise ConfigError("swa_layers and sliding_window_n_layers both choose the sliding layers; set only one")

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

    @property
    def layers(self) -> tuple[LayerOptions, ...]:
        """The options of each layer's blocks."""
        if self.latent_attention is not None:
            latent = LatentAttentionOptions(
                hidden_size=self.hidden_size,
                num_lanes=self.num_lanes,
                **dataclasses.asdict(self.latent_attention),
                heads=self.num_attention_heads // self.num_lanes,
                scale=self.head_size**-0.5 * (self.rope_scaling.score_factor if self.rope_scaling else 1.0),
            )
            return tuple(LayerOptions(latent, self._feed_forward(n)) for n in range(self.num_hidden_layers))
        if (own := self.compressed_attention) is not None:
            return tuple(
                LayerOptions(self._compressed(own, n), self._feed_forward(n)) for n in range(self.num_hidden_layers)
            )
        return tuple(
            LayerOptions(self._mixer(layer, window), self._feed_forward(layer))
            for layer, window in enumerate(self.layer_windows)
        )

    def _mixer(self, layer: int, window: int | None) -> AttentionOptions | DeltaNetOptions:
        if self.delta_net is not None and layer in self.delta_layers:
            return DeltaNetOptions(
                hidden_size=self.hidden_size,
                num_lanes=self.num_lanes,
                sizes=_of_lane(self.delta_net, self.num_lanes),
                norm_eps=self.norm_eps,
            )
        return AttentionOptions(
            hidden_size=self.hidden_size,
            num_lanes=self.num_lanes,
            heads=self.num_attention_heads // self.num_lanes,
            kv_heads=max(1, self.num_key_value_heads // self.num_lanes),
            head_dim=self.head_size,
            window=window,
            rotary=layer not in self.nope_layers,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            sinks=self.attention_sinks,
            qk_norm=self.qk_norm_over if self.qk_norm else None,
            norm_eps=self.norm_eps,
            norm_plus_one=self.norm_plus_one,
            **self.attention_variant,
        )

    def _compressed(self, own: CompressedAttention, layer: int) -> CompressedAttentionOptions:
        ratio, lanes = own.ratios[layer], self.num_lanes
        rope = own if ratio else self
        return CompressedAttentionOptions(
            hidden_size=self.hidden_size,
            num_lanes=lanes,
            heads=self.num_attention_heads // lanes,
            head_dim=self.head_size,
            ratio=ratio,
            overlaps=ratio == own.overlap_ratio,
            window=own.window,
            q_lora_rank=own.q_lora_rank,
            qk_rope_head_dim=own.qk_rope_head_dim,
            o_groups=own.o_groups // lanes,
            o_lora_rank=own.o_lora_rank,
            index_heads=own.index_heads,
            index_head_dim=own.index_head_dim,
            index_topk=own.index_topk,
            rope_theta=rope.rope_theta,
            rope_scaling=rope.rope_scaling,
            norm_eps=self.norm_eps,
        )

    def _feed_forward(self, layer: int) -> MlpOptions | ExpertsOptions:
        activation = Activation[self.hidden_act.upper()]

        def mlp(columns: int, limit: float | None = None) -> MlpOptions:
            return MlpOptions(
                hidden_size=self.hidden_size,
                num_lanes=self.num_lanes,
                activation=activation,
                columns=columns // self.num_lanes,
                gated=self.gated_mlp,
                limit=limit,
            )

        if self.num_experts is None or layer in self.mlp_only_layers:
            return mlp(self.intermediate_size)
        beside = self.shared_expert_intermediate_size
        return ExpertsOptions(
            hidden_size=self.hidden_size,
            num_lanes=self.num_lanes,
            activation=activation,
            columns=(self.moe_intermediate_size or self.intermediate_size) // self.num_lanes,
            experts=self.num_experts,
            used=self.num_experts_per_tok,
            normalized=self.norm_topk_prob,
            router_bias=self.router_bias,
            scores=self.scoring_func,
            table_rows=self.vocab_size if layer < self.hash_layers else 0,
            correction=self.router_correction and layer >= self.hash_layers,
            groups=self.n_group,
            groups_used=self.topk_group,
            factor=self.routed_scaling_factor,
            biases=self.expert_bias,
            limit=self.swiglu_limit,
            alpha=self.swiglu_alpha,
            up_offset=float(self.swiglu_plus_one),
            shared=mlp(beside, None if self.swiglu_plus_one else self.swiglu_limit) if beside else None,
            shared_gate=self.shared_expert_gate,
        )

    @property
    def norms(self) -> Norms:
        """The norms in the layers, the final norm, and the options of several residual streams."""
        in_layers, final = (
            NormOptions(
                hidden_size=self.hidden_size,
                num_lanes=self.num_lanes,
                eps=self.norm_eps,
                per_lane=own,
                plus_one=self.norm_plus_one,
            )
            for own in self.lane_norm_scales
        )
        streams = None
        if self.residual_streams is not None:
            sizes = dataclasses.asdict(self.residual_streams)
            streams = StreamsOptions(hidden_size=self.hidden_size, norm_eps=self.norm_eps, **sizes)
        return Norms(in_layers=in_layers, final=final, streams=streams, **self.module_variant)

    @property
    def lane_norm_scales(self) -> tuple[bool, bool]:
        """Whether each lane has its own scale: (in the layers, in the final norm)."""
        own = not self.replicated_rmsn_scale
        return own, own and not self.pre_norm_lane_agg

    @property
    def schedule(self) -> Schedule:
        """When each module's output is added to its lane, and when the other lanes' outputs land."""
        return make_schedule(self)

    def replace(self, **changes: Any) -> "ModelConfig":
        """A validated copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _of_lane(sizes: DeltaNetSizes, lanes: int) -> DeltaNetSizes:
    """The sizes of one lane's share."""
    return dataclasses.replace(sizes, key_heads=sizes.key_heads // lanes, value_heads=sizes.value_heads // lanes)


def recorded_fields(config: Any) -> dict[str, object]:
    """Name -> value of a dataclass's fields, for records and digests. Fields marked LATER are included only if they
    differ from their default, so that records made before these fields existed stay equal.
    """
    return {
        field.name: value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default or field.metadata != LATER
    }
