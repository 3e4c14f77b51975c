"""The checks of a model's config: the value of each field, and which values work together."""

import dataclasses
import operator

from laneformer.config.checks import LARGEST, MOST_MATRICES, choices_of, require_int, require_number
from laneformer.config.fields import ModelFields
from laneformer.config.sizes import CompressedAttention
from laneformer.errors import ConfigError
from laneformer.layout import make_schedule
from laneformer.ops import Activation, AttentionVariant

# Sizes that are None in models without experts
OF_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
OF_SCORES = (  # options of routers whose scores depend on one logit each
    *("router_correction", "hash_layers", "n_group", "topk_group", "routed_scaling_factor"),
)
OF_GROUPED = (  # options of grouped-query attention
    *("sliding_window", "qkv_bias", "out_bias", "attention_sinks", "qk_norm", "rotary_dim", "delta_layers"),
    *("rope_local_base_freq", "attention_multiplier"),
    *(field.name for field in dataclasses.fields(AttentionVariant)),
)
LAYER_LISTS = ("unclamped_layers", "swa_layers", "nope_layers", "mlp_only_layers", "delta_layers")
HIDDEN_ACTS = tuple(kind.name.lower() for kind in Activation if kind)


def check_values(config: ModelFields) -> None:
    """Raises ConfigError for a field that has a wrong type, or a value that no model can have."""
    for name, most in LARGEST.items():
        if name != "head_dim" and not (name in OF_EXPERTS and getattr(config, name) is None):
            require_int(name, getattr(config, name), at_least=1, at_most=most)
    require_int("broadcast_delay", config.broadcast_delay, at_least=0, at_most=LARGEST["num_hidden_layers"])
    require_int("sliding_window_n_layers", config.sliding_window_n_layers)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{field.name} = {value!r} must be true or false")
        if field.type is float or (field.type == float | None and value is not None):
            require_number(field.name, value, above=0.0)
        if (choices := choices_of(field.type)) and value not in choices:
            names = ", ".join(choice for choice in choices if choice)
            left = ", or leave it out" if None in choices else ""
            raise ConfigError(f"unknown {field.name} {value!r}; choose {names}{left}")
    for name in (*LAYER_LISTS, "eos_token_id"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"{name} = {value!r} must be a list of whole numbers")
    if config.hidden_act not in HIDDEN_ACTS:
        raise ConfigError(f"unknown hidden_act {config.hidden_act!r}; choose {', '.join(HIDDEN_ACTS)}")


def check_together(config: ModelFields) -> None:
    """Raises ConfigError for values that do not work together."""
    _check_heads(config)
    if config.num_experts is None:
        _check_without_experts(config)
    else:
        _check_experts(config, config.num_experts)
    _check_lanes(config)
    _check_windows(config)
    _check_delta_net(config)
    for name, tokens in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", config.eos_token_id)):
        for token in tokens:
            if token is not None:
                require_int(name, token, at_least=0, at_most=config.vocab_size - 1)
    _check_norms(config)


def _check_heads(config: ModelFields) -> None:
    if config.compressed_attention is not None:
        _check_compressed_attention(config, config.compressed_attention)
    if config.latent_attention is not None:
        _check_latent_attention(config)
        return
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads = {config.num_attention_heads} must be a multiple of num_key_value_heads ="
            f" {config.num_key_value_heads}"
        )
    if config.head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"hidden_size = {config.hidden_size} must be a multiple of num_attention_heads ="
                f" {config.num_attention_heads}; change one of them or set head_dim"
            )
    else:
        require_int("head_dim", config.head_dim, at_least=2, at_most=LARGEST["head_dim"])
    if config.head_size % 2:
        raise ConfigError(
            f"head_dim (by default hidden_size / num_attention_heads) = {config.head_size} must be even; rotary"
            " positions rotate pairs of channels"
        )
    if config.rotary_dim is not None:
        require_int("rotary_dim", config.rotary_dim, at_least=2, at_most=config.head_size)
        if config.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim = {config.rotary_dim} must be even; rotary positions rotate pairs of channels"
            )


def _check_compressed_attention(config: ModelFields, own: CompressedAttention) -> None:
    own.check(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_size)
    for name in ("latent_attention", "nope_layers", *OF_GROUPED):
        if (value := getattr(config, name)) != getattr(ModelFields, name):
            raise ConfigError(
                f"{name} = {value!r} is not an option of compressed attention: remove it or compressed_attention"
            )


def _check_delta_net(config: ModelFields) -> None:
    if config.delta_net is None:
        if config.delta_layers:
            raise ConfigError(
                f"delta_layers = {list(config.delta_layers)} requires delta_net; set the sizes of its heads"
            )
        return
    if len(set(config.delta_layers)) == config.num_hidden_layers:
        raise ConfigError("delta_layers has all layers: leave at least one layer to attention")


def _check_latent_attention(config: ModelFields) -> None:
    if config.num_key_value_heads != config.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads = {config.num_key_value_heads} with latent_attention must be num_attention_heads ="
            f" {config.num_attention_heads}"
        )
    for name in ("head_dim", "nope_layers", *OF_GROUPED):
        if (value := getattr(config, name)) != getattr(ModelFields, name):
            raise ConfigError(
                f"{name} = {value!r} is an option of grouped-query attention: remove it or latent_attention"
            )


def _check_without_experts(config: ModelFields) -> None:
    for name in (
        *("moe_intermediate_size", "mlp_only_layers", "router_bias", "expert_bias", "swiglu_limit"),
        *("shared_expert_intermediate_size", "shared_expert_gate", "scoring_func", *OF_SCORES),
    ):
        if getattr(config, name) != getattr(ModelFields, name):
            raise ConfigError(f"{name} = {getattr(config, name)!r} requires num_experts; set the experts per layer")


def _check_experts(config: ModelFields, experts: int) -> None:
    require_int("num_experts_per_tok", config.num_experts_per_tok, at_least=1, at_most=experts)
    if (all_experts := config.num_hidden_layers * experts) > MOST_MATRICES:
        raise ConfigError(
            f"num_experts = {experts:,} in num_hidden_layers = {config.num_hidden_layers:,} layers are"
            f" {all_experts:,} experts; use at most {MOST_MATRICES:,}"
        )
    if not config.gated_mlp:
        raise ConfigError("gated_mlp = false with num_experts is not supported: experts have a gate; remove gated_mlp")
    _check_router(config, experts)
    if config.shared_expert_gate and config.shared_expert_intermediate_size is None:
        raise ConfigError(
            "shared_expert_gate = true requires shared_expert_intermediate_size; set the shared expert's columns"
        )
    if config.swiglu_limit is not None and config.hidden_act != "silu":
        raise ConfigError(f"swiglu_limit requires hidden_act = 'silu', got {config.hidden_act!r}")


def _check_router(config: ModelFields, experts: int) -> None:
    require_int("hash_layers", config.hash_layers, at_least=0, at_most=config.num_hidden_layers)
    if config.scoring_func == "softmax":
        for name in OF_SCORES:
            if (value := getattr(config, name)) != getattr(ModelFields, name):
                raise ConfigError(f"{name} = {value!r} requires another scoring_func than 'softmax'")
    elif config.router_bias:
        raise ConfigError("router_bias = true requires scoring_func = 'softmax'; did you mean router_correction?")
    require_int("n_group", config.n_group, at_least=1, at_most=experts)
    require_int("topk_group", config.topk_group, at_least=1, at_most=config.n_group)
    if config.n_group == 1:
        return
    if experts % config.n_group or experts < 2 * config.n_group:
        raise ConfigError(f"n_group = {config.n_group} must divide num_experts = {experts} into groups of at least 2")
    if config.num_experts_per_tok > (fits := experts // config.n_group * config.topk_group):
        raise ConfigError(
            f"num_experts_per_tok = {config.num_experts_per_tok} exceeds the {fits} experts in topk_group ="
            f" {config.topk_group} groups; lower num_experts_per_tok or raise topk_group"
        )


def _check_lanes(config: ModelFields) -> None:
    divided = ["num_attention_heads"]
    sparse = config.num_experts is not None and config.moe_intermediate_size is not None
    divided += ["moe_intermediate_size"] if sparse else ["intermediate_size"]
    if sparse and config.mlp_only_layers:
        divided.append("intermediate_size")
    if config.shared_expert_intermediate_size is not None:
        divided.append("shared_expert_intermediate_size")
    if config.lm_head_type == "vocab_parallel":
        divided.append("vocab_size")

    def unfit(lanes: int) -> str | None:
        wrong = [name for name in divided if getattr(config, name) % lanes]
        if config.delta_layers and config.delta_net and config.delta_net.key_heads % lanes:
            wrong.append("delta_net.key_heads")
        if config.compressed_attention and config.compressed_attention.o_groups % lanes:
            wrong.append("compressed_attention.o_groups")
        copied = config.num_key_value_heads % lanes and lanes % config.num_key_value_heads
        return "num_key_value_heads" if copied else wrong[0] if wrong else None

    if name := unfit(config.num_lanes):
        fitting = [n for n in range(1, config.num_lanes) if not unfit(n)]
        raise ConfigError(
            f"num_lanes = {config.num_lanes} does not divide {name} ="
            f" {operator.attrgetter(name)(config)}; smaller lane counts"
            f" that do: {', '.join(map(str, fitting))}"
        )
    if config.lm_head_type != "replicate" and (config.pre_norm_lane_agg or config.tie_word_embeddings):
        field = "pre_norm_lane_agg" if config.pre_norm_lane_agg else "tie_word_embeddings"
        raise ConfigError(
            f"{field} = true requires lm_head_type = 'replicate', got {config.lm_head_type!r}, which has one head per"
            " lane"
        )


def _check_norms(config: ModelFields) -> None:
    if config.qk_norm and config.qk_norm_over == "projection" and config.num_lanes > 1:
        raise ConfigError(
            f"num_lanes = {config.num_lanes} with qk_norm_over = 'projection' is not supported: every lane would need"
            " a sum over all lanes before its attention; use num_lanes = 1"
        )
    schedule = make_schedule(config)  # raises ConfigError for unknown layouts and arguments
    if config.residual_streams and (config.norm_after or not config.replicated_rmsn_scale):
        raise ConfigError("residual_streams with norm_after or replicated_rmsn_scale = false is not supported")
    if reason := config.unfit(config.layout, config.num_lanes == 1 or schedule.adds_whole_sums):
        raise ConfigError(reason)


def _check_windows(config: ModelFields) -> None:
    if config.sliding_window is not None:
        require_int("sliding_window", config.sliding_window, at_least=1)
    for name in LAYER_LISTS:
        listed = getattr(config, name) or ()
        if len(listed) > LARGEST["num_hidden_layers"]:
            raise ConfigError(f"{name} has {len(listed):,} entries: list each layer once")
        for layer in listed:
            require_int(name, layer, at_least=0, at_most=config.num_hidden_layers - 1)
    if config.swa_layers and config.sliding_window is None:
        raise ConfigError(
            f"swa_layers = {list(config.swa_layers)} requires sliding_window; set the keys in a layer's window"
        )
    if config.swa_layers and config.sliding_window_n_layers:
        raise ConfigError("swa_layers and sliding_window_n_layers both choose the sliding layers; set only one")
