"""The config of a whole model: one frozen dataclass, checked when it is made."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from laneformer.config.checks import part_of
from laneformer.config.fields import ModelFields
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
    RotaryOptions,
    StreamsOptions,
)
from laneformer.config.rules import LAYER_LISTS, check_together, check_values
from laneformer.config.sizes import CompressedAttention, DeltaNetSizes, LatentAttention, ResidualStreams
from laneformer.layout import Schedule, make_schedule
from laneformer.ops import LATER, Activation

SIZES = {  # grouped parts of the config, which are objects in JSON
    "delta_net": DeltaNetSizes,
    "latent_attention": LatentAttention,
    "compressed_attention": CompressedAttention,
    "residual_streams": ResidualStreams,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelFields):
    """The architecture of a Laneformer.

    Raises ConfigError, naming the field, its value and the remedy, for values that cannot work.
    """

    def __post_init__(self) -> None:
        check_values(self)
        # Values from JSON are lists and objects; tuples and dataclasses make the config hashable.
        for name, kind in SIZES.items():
            object.__setattr__(self, name, part_of(name, kind, getattr(self, name)))
        for name in (*LAYER_LISTS, "eos_token_id"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(value))
        check_together(self)

    @property
    def layers(self) -> tuple[LayerOptions, ...]:
        """The options of each layer's blocks."""
        if self.latent_attention is not None:
            latent = LatentAttentionOptions(
                hidden_size=self.hidden_size,
                num_lanes=self.num_lanes,
                **dataclasses.asdict(self.latent_attention),
                heads=self.num_attention_heads // self.num_lanes,
                rotary=self._rotary(),
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
            scale=self.attention_multiplier,
            rotary=None if layer in self.nope_layers else self._rotary(window),
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            sinks=self.attention_sinks,
            qk_norm=self.qk_norm_over if self.qk_norm else None,
            norm_eps=self.norm_eps,
            norm_plus_one=self.norm_plus_one,
            **self.attention_variant,
        )

    def _rotary(self, window: int | None = None) -> RotaryOptions:
        """The rotation of a layer with this window."""
        if window is not None and self.rope_local_base_freq is not None:
            return RotaryOptions(self.rotary_size, self.rope_local_base_freq)
        return RotaryOptions(self.rotary_size, self.rope_theta, self.rope_scaling)

    def _compressed(self, own: CompressedAttention, layer: int) -> CompressedAttentionOptions:
        ratio, lanes = own.ratios[layer], self.num_lanes
        return CompressedAttentionOptions(
            hidden_size=self.hidden_size,
            num_lanes=lanes,
            heads=self.num_attention_heads // lanes,
            head_dim=self.head_size,
            ratio=ratio,
            overlaps=ratio == own.overlap_ratio,
            window=own.window,
            q_lora_rank=own.q_lora_rank,
            rotary=RotaryOptions(own.qk_rope_head_dim, own.rope_theta, own.rope_scaling) if ratio else self._rotary(),
            o_groups=own.o_groups // lanes,
            o_lora_rank=own.o_lora_rank,
            index_heads=own.index_heads,
            index_head_dim=own.index_head_dim,
            index_topk=own.index_topk,
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
