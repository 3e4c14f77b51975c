"""The values of a config.json or generation_config.json, each checked when it is read. A null field means the same as
a missing one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laneformer.config import LARGEST, LARGEST_OTHER
from laneformer.errors import CheckpointError, ConfigError
from laneformer.files import parse_json, read_file

GENERATION = "generation_config.json"
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NO_EFFECT = frozenset(  # fields without effect on inference, such as bookkeeping, dropout and training
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pad_token_id",
        "auto_map",
        "initializer_range",
        "attention_dropout",
        "attention_bias",
        "mlp_bias",
        "pretraining_tp",
        "_name_or_path",
        "layer_types",
        "use_sliding_window",
        "max_window_layers",
        "hidden_dropout",
        "is_causal",
        "quantization_config",  # laneformer/hf/packed/quantization.py reads it
        "compression_config",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "cache_implementation",
    }
)

# Fields of several families that choose the kind of router -> values of a softmax router
ROUTERS: dict[str, tuple[Any, ...]] = {
    **{"scoring_func": ("softmax",), "score_func": ("softmax",), "router_activation": ("softmax",)},
    **{
        "router_type": ("softmax", "topk", "top_k"),
        "topk_method": ("greedy",),
        "moe_router_activation_func": ("softmax",),
    },
    **{"n_group": (1,), "topk_group": (1,), "routed_scaling_factor": (1,)},
}
# Fields of other families that change all logits, which no family here computes -> values without effect (null always
# is one). From the configuration classes of transformers 5.24 and the published code of Granite, Gemma, Cohere,
# MiniCPM, Falcon-H1, OLMo, Phi, Llama 4, Qwen 1 and Grok.
UNCOMPUTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "lm_head_multiplier"), (1,)),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), (1,)),
    **dict.fromkeys(("embedding_scale", "logit_scale", "logits_scale", "output_multiplier_scale", "scale_emb"), (1,)),
    **dict.fromkeys(
        ("embedding_multiplier_scale", "attn_output_multiplier", "residual_scale", "mup_width_scale"), (1,)
    ),
    **dict.fromkeys(("attention_multiplier", "mlp_multipliers", "query_pre_attn_scalar", "scale_depth"), ()),
    **dict.fromkeys(("dim_model_base", "mup_base_width", "softmax_scale", "attention_scale", "max_logits"), ()),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "attn_logit_softcap"), (0,)),
    **dict.fromkeys(("final_logit_softcap", "logits_soft_cap", "router_logit_softcapping", "logit_cap"), (0,)),
    **dict.fromkeys(("llama_4_scaling_beta", "clip_qkv", "attention_chunk_size", "num_kv_shared_layers"), (0,)),
    **dict.fromkeys(("use_bidirectional_attention",), (False,)),
    **dict.fromkeys(("alibi", "use_alibi", "attn_temperature_tuning", "use_logn_attn", "use_dynamic_ntk"), (False,)),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn", "normalize_embedding", "scale_embedding"), (False,)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "scale_attn_by_inverse_layer_idx", "use_bias"), (False,)),
    **dict.fromkeys(("attention_out_bias", "lm_head_bias", "rope_interleaved", "rope_interleave"), (False,)),
    **dict.fromkeys(("rotary_pct", "rotary_emb_fraction"), (1,)),
    **dict.fromkeys(("rope_local_base_freq", "layer_rope_theta", "longrope_scaling"), ()),
    **{"scale_attn_weights": (True,), "hidden_size_per_layer_input": (0,), "position_embedding_type": ("rope",)},
}
SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}  # two names of one function


class Fields:
    """Typed access to the values of a config.json. Wrong values raise ConfigError, naming field and value."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self._usual: dict[str, Any] = {}
        self._read: set[str] = set()

    @property
    def values(self) -> Mapping[str, Any]:
        """All values, unchecked."""
        return self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value, unchecked."""
        self._read.add(name)
        value = self._values.get(name)
        return self._usual.get(name, default) if value is None else value

    def usually(self, values: Mapping[str, Any]) -> None:
        """Sets the values of fields that are missing or null."""
        self._usual |= values

    def given(self, *names: str) -> dict[str, Any]:
        """Name -> unchecked value of the named fields that are neither missing nor null."""
        return {name: value for name in names if (value := self.get(name)) is not None}

    def is_null(self, name: str) -> bool:
        """Whether the field is null and not missing, for the few fields where this makes a difference."""
        return name in self._values and self._values[name] is None

    def size(self, name: str, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """A whole number from `least` to `most`, by default LARGEST of that name. Raises ConfigError if missing."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} = {value!r} must be a whole number of at least {least}")
        if value > (most := most or LARGEST.get(name, LARGEST_OTHER)):
            raise ConfigError(f"{name} = {value:,} must be at most {most:,}")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number of at least 1, or None if the field is null, or missing without a default."""
        return None if self.is_null(name) or self.get(name, default) is None else self.size(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} = {value!r} must be true or false")
        return value

    def word(self, name: str, default: str) -> str:
        return str(self.get(name, default))

    def sequence(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{name} = {value!r} must be a list")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} must be an object with named values")
        return value

    def require(self, *names: str) -> None:
        """Raises ConfigError if any of these fields is missing, naming all missing ones."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)} missing: add {'it' if len(missing) == 1 else 'them'}")

    def activation(self, default: str = "silu") -> str:
        """The value of `hidden_act`, as ModelConfig spells it. ModelConfig checks it."""
        name = self.word("hidden_act", default)
        return SAME_ACTIVATION.get(name, name)

    def refuse_other_routers(self) -> None:
        """Raises ConfigError if the router is not a softmax over its logits."""
        for name, known in ROUTERS.items():
            if (value := self.get(name, known[0])) not in known:
                raise ConfigError(f"{name} = {value!r}: only models with {name} = {known[0]!r} are supported")

    def refuse_uncomputed(self) -> None:
        """Raises ConfigError for a field that was not read and changes all logits. Those whose values have no effect
        count as read.
        """
        for name in self.unread():
            value = self._values[name]
            if name in UNCOMPUTED and value not in UNCOMPUTED[name]:
                raise ConfigError(
                    f"{name} = {value!r} changes all logits, and no family here computes it: the model cannot be used"
                )
        self._read |= UNCOMPUTED.keys()

    def unread(self) -> list[str]:
        """Names of the fields that have a value, were not read, and may have an effect."""
        given = {name for name, value in self._values.items() if value is not None}
        return sorted(given - self._read - NO_EFFECT)

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers")

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.hidden // self.size("num_attention_heads"))

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", self.size("num_attention_heads"))

    @property
    def begin_token(self) -> int | None:
        """Token that begins a text; one outside the vocabulary, such as -1, means that there is none."""
        token = self.get("bos_token_id")
        outside = isinstance(token, int) and not 0 <= token < self.size("vocab_size")
        return None if outside else token

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return end_tokens(self.get("eos_token_id"))


def read_generation(folder: Path) -> dict[str, Any]:
    """The values of a folder's generation_config.json, without nulls; {} without the file. Raises CheckpointError for a
    damaged file.
    """
    file = folder / GENERATION
    try:
        values = parse_json(read_file(file))
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
    except FileNotFoundError:
        return {}
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file} as JSON ({error}): copy it again") from None
    return {name: value for name, value in values.items() if value is not None}


def end_tokens(values: Any) -> tuple[int, ...]:
    """Tokens that end a text, from the value of `eos_token_id`: a token, a list of tokens, or None. Negative ones mean
    that there is none. Raises ConfigError for other values.
    """
    tokens = values if isinstance(values, list) else [] if values is None else [values]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(f"eos_token_id = {values!r} must be a token id or a list of token ids")
    return tuple(token for token in tokens if token >= 0)
