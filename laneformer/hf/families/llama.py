"""Llama and the dense families that use its names: Arcee, Mistral, Ministral, Qwen2, Qwen3, SmolLM2, SmolLM3.

They are cut into lanes with layout tp: lane l has the l-th share of the heads and of the feed-forward columns. The
defaults of missing and null fields are those of transformers' configuration classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.dimensions import Dimensions
from laneformer.hf.family import Family
from laneformer.hf.fields import REQUIRED, Fields
from laneformer.hf.rope import THETA, read_local_base, read_rope
from laneformer.hf.safetensors import Cut, Source

if TYPE_CHECKING:
    from laneformer.blocks.block import Weight

# Path of a weight, without the layer -> name in files, without model.layers.N and .weight or .bias
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
EXPERT_NAMES = NAMES | {  # names of families with experts; * is the expert's number
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.*.gate_proj",
    "feed_forward.experts.w3": "mlp.experts.*.up_proj",
    "feed_forward.experts.w2": "mlp.experts.*.down_proj",
}
AFTER_NAMES = NAMES | {  # names of families that have norms only after their modules
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
FULL, SLIDING = "full_attention", "sliding_attention"
QWEN_WINDOW, QWEN_FULL_LAYERS = 4096, 28
MISTRAL_WINDOW = 4096
NOPE_INTERVAL = 4
READ = (*REQUIRED, "num_key_value_heads", "head_dim", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The peculiarities of one of these families."""

    longest: int
    """Default of max_position_embeddings."""
    defaults: Mapping[str, Any]
    """Other defaults and fixed values of the family, by the names of ModelConfig."""
    refused: tuple[str, ...] = ()
    """Fields that must be false."""
    theta: float = THETA
    """Default of rope_theta."""
    norm_eps: float = 1e-6
    """Default of rms_norm_eps."""
    windows: Callable[[Fields], tuple[int | None, list[str]]] = lambda fields: (None, [])
    """Returns the window in positions, if any, and the type of each layer. Raises ConfigError for unsupported types."""
    nope_layers: Callable[[Fields], tuple[int, ...]] = lambda fields: ()
    """Returns the layers without rotation."""
    rope: Mapping[str, Any] | None = None
    """Default of rope_scaling."""
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of fields that files leave out."""
    local_rope: bool = False
    """Whether sliding layers rotate by their own base, without scaling."""
    local_theta: float | None = None
    """Default of that base; None: the base of the other layers."""
    partial_rotary: bool = False
    """Whether `more` reads how many channels of a head are rotated."""
    more: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    """Returns the fields of ModelConfig that a Llama does not have or that the family reads differently, such as those
    of experts.
    """


def config_from(dialect: Dialect, fields: Fields, num_lanes: int | None) -> ModelConfig:
    """The ModelConfig of a family with this dialect, in `num_lanes` lanes, by default 1. Raises ConfigError."""
    fields.usually(dialect.usual)
    fields.require(*REQUIRED)
    for name in dialect.refused:
        if fields.flag(name):
            raise ConfigError(f"{name} = true: only checkpoints without these biases are supported")
    found = {"num_key_value_heads": fields.get("num_attention_heads")} | dict(dialect.defaults) | fields.given(*READ)
    longest = fields.size("max_position_embeddings", dialect.longest)
    full = FULL if dialect.local_rope else None
    theta, scaling = read_rope(fields, longest, dialect.theta, dialect.rope, dialect.partial_rotary, full)
    found["hidden_act"] = fields.activation(found.get("hidden_act", ModelConfig.hidden_act))
    window, types = dialect.windows(fields)
    sliding = tuple(n for n, kind in enumerate(types) if kind == SLIDING)
    if window is not None and sliding:
        found |= {"sliding_window": window, "swa_layers": sliding}
    if dialect.local_rope:
        base = read_local_base(fields, SLIDING, dialect.local_theta or theta)
        found |= {"rope_local_base_freq": base} if "swa_layers" in found else {}
    return ModelConfig(
        **found | dialect.more(fields),
        max_position_embeddings=longest,
        norm_eps=fields.get("rms_norm_eps", dialect.norm_eps),
        nope_layers=dialect.nope_layers(fields),
        rope_theta=theta,
        rope_scaling=scaling,
        bos_token_id=fields.begin_token,
        eos_token_id=fields.end_tokens,
        num_lanes=1 if num_lanes is None else num_lanes,
        layout="tp",
    )


def layer_types(fields: Fields, default: list[str]) -> list[str]:
    """The type of each layer: `layer_types`, or the default of the family. Raises ConfigError for unknown types."""
    types = fields.sequence("layer_types") or default
    if len(types) != fields.layers:
        raise ConfigError(f"layer_types has {len(types)} entries: name the type of each of the {fields.layers} layers")
    for n, kind in enumerate(types):
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"layer_types[{n}] = {kind!r} is not supported; supported are {FULL}, {SLIDING}")
    return types


def mistral_windows(fields: Fields) -> tuple[int | None, list[str]]:
    """One window on all layers; null means no window."""
    window = fields.optional_size("sliding_window", MISTRAL_WINDOW)
    uniform = [FULL if window is None else SLIDING] * fields.layers
    types = layer_types(fields, uniform)
    if types != uniform:
        raise ConfigError(
            f"layer_types = {types}: a Mistral has {uniform[0]} in all layers; is its model_type ministral?"
        )
    return window, types


def ministral_windows(fields: Fields) -> tuple[int | None, list[str]]:
    """A window on the layers that `layer_types` names, by default on all layers; null means no window."""
    window = fields.optional_size("sliding_window", MISTRAL_WINDOW)
    return window, layer_types(fields, [FULL if window is None else SLIDING] * fields.layers)


def qwen_windows(fields: Fields) -> tuple[int | None, list[str]]:
    """A window only if use_sliding_window is true, by default on the layers from max_window_layers on."""
    window = fields.optional_size("sliding_window", QWEN_WINDOW)
    first = fields.size("max_window_layers", QWEN_FULL_LAYERS, least=0)
    if not fields.flag("use_sliding_window"):
        window = None
    usual = [FULL if window is None or n < first else SLIDING for n in range(fields.layers)]
    return window, layer_types(fields, usual)


def smollm3_windows(fields: Fields) -> tuple[int | None, list[str]]:
    """A window only if use_sliding_window is true, on the layers that `layer_types` names."""
    window = fields.optional_size("sliding_window")
    if not fields.flag("use_sliding_window"):
        window = None
    return window, layer_types(fields, [FULL] * fields.layers)


def smollm3_nope_layers(fields: Fields) -> tuple[int, ...]:
    """The layers with 0 in `no_rope_layers`. By default these are every no_rope_layer_interval-th layer."""
    layers, interval = fields.layers, fields.size("no_rope_layer_interval", NOPE_INTERVAL)
    rotates = fields.sequence("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(layers)]
    if len(rotates) < layers:
        raise ConfigError(f"no_rope_layers has {len(rotates)} entries: write 1 or 0 for each of the {layers} layers")
    return tuple(n for n in range(layers) if not rotates[n])


def sources(config: ModelConfig, table: "Mapping[str, Weight]", names: Mapping[str, str] = NAMES) -> dict[str, Source]:
    """The source of each weight, by path. Lane l gets the l-th share of the output rows (q, k, v, gate, up) or of the
    input columns (o, down). With fewer key/value heads than lanes, each lane gets the head that its query heads read.
    names: like NAMES.
    """
    return {path: _source(config, path, weight.shape, names) for path, weight in table.items()}


def without_layer(path: str) -> tuple[str, str]:
    """The prefix of the tensor names of a weight's layer, and the rest of the weight's path. For weights outside of the
    layers: "" and the path.
    """
    if not path.startswith("layers."):
        return "", path
    _, n, name = path.split(".", 2)
    return f"model.layers.{n}.", name


def _source(config: ModelConfig, path: str, shape: tuple[int, ...], names: Mapping[str, str]) -> Source:
    """The source of one weight. shape: shape of the weight, lane-first."""
    prefix, name = without_layer(path)
    kind, name = ("bias" if name.endswith("_bias") else "weight"), name.removesuffix("_bias")
    names = names if config.gated_mlp else {**names, "feed_forward.w1": "mlp.up_proj"}
    of_experts = len(shape) == 4
    block, _, matrix = name.rpartition(".")
    file_name = f"{prefix}{names[f'{block}.experts.{matrix}' if of_experts else name]}.{kind}"
    if of_experts:
        lanes, experts, rows, columns = shape
        size = (rows, lanes * columns) if matrix == "w2" else (lanes * rows, columns)
        cut: Cut = "columns" if matrix == "w2" else "rows"
        return Source(file_name, (experts, *size), cut=cut, lanes=lanes, experts=experts)
    lanes = config.num_lanes
    match matrix:
        case "wo" | "w2" if kind == "bias":
            return Source(file_name, shape[1:], cut="whole", lanes=lanes, vector=True)
        case "wo" | "w2":
            return Source(file_name, (shape[1], lanes * shape[2]), cut="columns", lanes=lanes)
        case "wq" | "wk" | "wv" | "w1" | "w3":
            rotated = config.head_size if matrix in ("wq", "wk") else None
            copies = max(1, lanes // config.num_key_value_heads) if matrix in ("wk", "wv") else 1
            whole = (lanes // copies * shape[1], *shape[2:])
            return Source(file_name, whole, rotated, "rows", lanes, copies, vector=kind == "bias")
        case "q_norm" | "k_norm":
            return Source(file_name, shape, config.head_size)
    return Source(file_name, shape)


def make_family(
    name: str, names: Mapping[str, str] = NAMES, dimensions: Callable[[Fields], Dimensions] | None = None, **own: Any
) -> Family:
    """A family with these names of tensors. own: fields of its Dialect."""
    return Family(
        name=name,
        dimensions=dimensions,
        config_from=functools.partial(config_from, Dialect(**own)),
        sources=functools.partial(sources, names=names),
    )


BIASES = ("attention_bias", "mlp_bias")
LLAMA = make_family("Llama", longest=2048, defaults={}, refused=BIASES)
ARCEE = make_family(
    "Arcee", longest=4096, defaults={"hidden_act": "relu2", "gated_mlp": False}, refused=BIASES, norm_eps=1e-5
)
MISTRAL = make_family("Mistral", longest=131072, defaults={}, windows=mistral_windows)
MINISTRAL = make_family("Ministral", longest=131072, defaults={}, windows=ministral_windows)
QWEN2 = make_family("Qwen2", longest=32768, defaults={"qkv_bias": True}, windows=qwen_windows)
QWEN3 = make_family(
    "Qwen3",
    longest=32768,
    defaults={"qk_norm": True, "head_dim": 128},
    refused=("attention_bias",),
    windows=qwen_windows,
)
SMOLLM3 = make_family(
    "SmolLM3",
    longest=32768,
    defaults={"tie_word_embeddings": True},
    refused=BIASES,
    theta=2000000.0,
    windows=smollm3_windows,
    nope_layers=smollm3_nope_layers,
)
