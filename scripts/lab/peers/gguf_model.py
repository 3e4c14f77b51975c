"""Describes a model for llama.cpp: its architecture, metadata and tensors, from our config. Imports no JAX, because the
environment of llama.cpp has only NumPy.

Names and sizes: src/models/ARCHITECTURE.cpp and src/llama-arch.cpp of https://github.com/ggml-org/llama.cpp; values of
published models: conversion/ of the same repository.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.commands.lab.peers import gguf_file
from laneformer.commands.lab.peers.gguf_file import BF16, F32, QUANTIZED, Tensor, Type
from laneformer.commands.lab.peers.protocol import LONGEST, Task
from laneformer.config import ModelConfig, RopeScaling
from laneformer.errors import ConfigError

EMBEDDING = "token_embd.weight"  # bfloat16 as in our kernel, even if it is also the head
LLAMA, GPT_OSS, QWEN3_NEXT, DEEPSEEK = "llama", "gpt-oss", "qwen3next", "deepseek2"
SIGMOID = 2  # value of expert_gating_func
FLOAT32 = ("bias", "ffn_gate_inp.weight", "ssm_conv1d.weight")  # biases, and matrices that llama.cpp keeps exact

Named = list[tuple[str, tuple[int, ...]]]


def model_file(
    task: Task, values: Callable[[Tensor], np.ndarray] | None = None
) -> tuple[Path, ModelConfig, list[Tensor]]:
    """The file of a task's model, the model's config and its tensors; writes the file unless it exists.

    values: see `gguf_file.write`.
    """
    config, type = from_json(task.model), type_of(task.weights)
    metadata, listed = fields(config, type), tensors(config, type, task.formats)
    name = f"{task.shape.name}-{type.name}-{gguf_file.digest(metadata, listed)}"
    path = Path(task.folder) / f"{metadata['general.architecture']}-{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        gguf_file.write(part, metadata, listed, values)
        part.rename(path)
    return path, config, listed


def type_of(weights: str) -> Type:
    """Type of the matrices for a value of --weights."""
    return F32 if weights == F32.name else QUANTIZED.get(weights, BF16)


def architecture(config: ModelConfig) -> str:
    """The name of the model's architecture in llama.cpp. Raises ConfigError for a model that is not compared."""
    if config.compressed_attention or config.residual_streams:
        raise ConfigError("has compressed attention or residual streams, which are not compared; choose another")
    if config.latent_attention:
        _require(DEEPSEEK, _deepseek_needs(config) if config.num_experts else {})
        return DEEPSEEK
    if config.delta_net:
        _require(QWEN3_NEXT, _qwen3_next_needs(config))
        return QWEN3_NEXT
    if config.num_experts is None:
        return LLAMA
    if not config.attention_sinks:
        raise ConfigError(
            "is a mixture of experts that is not compared: choose gpt_oss_20b, qwen3_next_12 or a shape of"
            " scripts.peers.shapes"
        )
    return GPT_OSS


def _deepseek_needs(config: ModelConfig) -> dict[str, bool]:
    """Property of llama.cpp's architecture -> whether the model has it."""
    columns, dense = config.shared_expert_intermediate_size or 0, config.mlp_only_layers
    return {
        "scores by sigmoid": config.scoring_func == "sigmoid",
        "the layers without experts first": dense == tuple(range(len(dense))),
        "a shared expert of whole experts' columns": columns > 0 and columns % _expert_columns(config) == 0,
    }


def _qwen3_next_needs(config: ModelConfig) -> dict[str, bool]:
    return {
        "experts in every layer": config.num_experts is not None and not config.mlp_only_layers,
        "a gated shared expert": config.shared_expert_gate,
        "scores by softmax that sum to 1": config.scoring_func == "softmax" and config.norm_topk_prob,
        "gated attention with norms of q and k": config.attention_gate and config.qk_norm,
        "delta_net.key_dim = delta_net.value_dim": config.delta_net.key_dim == config.delta_net.value_dim,
    }


def _require(name: str, needs: Mapping[str, bool]) -> None:
    for what, found in needs.items():
        if not found:
            raise ConfigError(f"differs from {name} in llama.cpp, which has {what}; choose another")


def tensors(config: ModelConfig, type: Type = BF16, formats: Mapping[str, str] | None = None) -> list[Tensor]:
    """The model's tensors in the order of the file. Sizes of a matrix are [outputs, inputs], or with all
    experts or heads [experts, outputs, inputs].

    type: type of the matrices except the embedding's table, which is bfloat16. formats: see PackedModel.
    """
    experts = QUANTIZED["mxfp4"] if "mxfp4" in (formats or {}).values() else type
    return [Tensor(name, sizes, _type(name, sizes, type, experts)) for name, sizes in _named(config)]


def _type(name: str, sizes: tuple[int, ...], type: Type, experts: Type) -> Type:
    if name == EMBEDDING:
        return BF16
    if len(sizes) == 1 or name.endswith(FLOAT32):
        return F32
    return experts if "_exps." in name else type


def _named(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, d = architecture(config), config.hidden_size
    yield EMBEDDING, (config.vocab_size, d)
    yield "output_norm.weight", (d,)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, d)
    between = "post_attention_norm.weight" if kind in (GPT_OSS, QWEN3_NEXT) else "ffn_norm.weight"
    for n in range(config.num_hidden_layers):
        layer = [("attn_norm.weight", (d,)), *_mixer(config, n), (between, (d,)), *_feed_forward(config, n)]
        yield from ((f"blk.{n}.{name}", sizes) for name, sizes in layer)


def _mixer(config: ModelConfig, layer: int) -> Named:
    if config.latent_attention:
        return _latent_attention(config)
    if layer in config.delta_layers:
        return _delta_net(config)
    d, e, llama = config.hidden_size, config.head_size, architecture(config) == LLAMA
    q, kv = config.num_attention_heads * e, config.num_key_value_heads * e
    gate = q if config.attention_gate and not llama else 0  # rows of the gate, beside the queries of each head
    found = _weights(attn_q=(q + gate, d), attn_k=(kv, d), attn_v=(kv, d), attn_output=(d, q))
    if llama:  # a dense model is compared without norms of q and k, biases and gates
        return found
    if config.qk_norm:
        found += _weights(attn_q_norm=(e,), attn_k_norm=(e,))
    if config.attention_sinks:
        found += _weights(attn_sinks=(config.num_attention_heads,))
    biased = ("attn_q", "attn_k", "attn_v") * config.qkv_bias + ("attn_output",) * config.out_bias
    return found + _biases(found, biased)


def _latent_attention(config: ModelConfig) -> Named:
    """The absorbed form: the matrix that maps latents to keys is transposed, so that it multiplies queries."""
    sizes, d, heads = config.latent_attention, config.hidden_size, config.num_attention_heads
    rank, still, rotated = sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
    queries = heads * (still + rotated)
    if sizes.q_lora_rank is None:
        found = _weights(attn_q=(queries, d))
    else:
        own = sizes.q_lora_rank
        found = _weights(attn_q_a=(own, d), attn_q_a_norm=(own,), attn_q_b=(queries, own))
    return found + _weights(
        attn_kv_a_mqa=(rank + rotated, d),
        attn_kv_a_norm=(rank,),
        attn_k_b=(heads, rank, still),
        attn_v_b=(heads, sizes.v_head_dim, rank),
        attn_output=(d, heads * sizes.v_head_dim),
    )


def _delta_net(config: ModelConfig) -> Named:
    sizes, d = config.delta_net, config.hidden_size
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    channels = 2 * keys + values
    return [
        *_weights(attn_qkv=(channels, d), attn_gate=(values, d), ssm_conv1d=(channels, sizes.conv_kernel)),
        ("ssm_dt.bias", (sizes.value_heads,)),
        ("ssm_a", (sizes.value_heads,)),
        *_weights(ssm_ba=(2 * sizes.value_heads, d), ssm_norm=(sizes.value_dim,), ssm_out=(d, values)),
    ]


def _feed_forward(config: ModelConfig, layer: int) -> Named:
    if config.num_experts is None or layer in config.mlp_only_layers:
        return _mlp(config, config.intermediate_size, "")
    d, experts = config.hidden_size, config.num_experts
    routed = [(name, (experts, *sizes)) for name, sizes in _mlp(config, _expert_columns(config), "_exps")]
    router = _weights(ffn_gate_inp=(experts, d))
    found = [*router, *routed]
    if config.router_bias:
        found += _biases(router, ("ffn_gate_inp",))
    if config.expert_bias:
        found += _biases(routed, tuple(name.removesuffix(".weight") for name, _ in routed))
    if config.router_correction:
        found.append(("exp_probs_b.bias", (experts,)))
    if config.shared_expert_gate:
        found += _weights(ffn_gate_inp_shexp=(d,))
    if config.shared_expert_intermediate_size:
        found += _mlp(config, config.shared_expert_intermediate_size, "_shexp")
    return found


def _mlp(config: ModelConfig, columns: int, suffix: str) -> Named:
    d = config.hidden_size
    sizes = {"gate": (columns, d), "up": (columns, d), "down": (d, columns)}
    return [(f"ffn_{name}{suffix}.weight", shape) for name, shape in sizes.items()]


def _expert_columns(config: ModelConfig) -> int:
    return config.moe_intermediate_size or config.intermediate_size


def _weights(**sizes: tuple[int, ...]) -> Named:
    return [(f"{name}.weight", shape) for name, shape in sizes.items()]


def _biases(named: Named, of: tuple[str, ...]) -> Named:
    """Biases of the matrices in `of`: a value for each output, of every expert."""
    sizes = dict(named)
    return [(f"{name}.bias", sizes[f"{name}.weight"][:-1]) for name in of]


def facts(config: ModelConfig, listed: list[Tensor]) -> dict[str, Any]:
    """Formats, number and bytes of the quantized weights that a token reads, counted as by our backends; empty without
    quantized weights.
    """
    found = [tensor for tensor in listed if tensor.type not in (F32, BF16)]
    if not found:
        return {}

    def read(tensor: Tensor, count: int) -> int:
        return count * config.num_experts_per_tok // config.num_experts if "_exps." in tensor.name else count

    return {
        "quantized_formats": list(dict.fromkeys(tensor.type.name for tensor in found)),
        "quantized_weights": sum(read(tensor, math.prod(tensor.sizes)) for tensor in found),
        "quantized_bytes": sum(read(tensor, tensor.bytes) for tensor in found),
    }


def activations(listed: list[Tensor]) -> str:
    """Text about how llama.cpp rounds activations before products: the vec_dot_type of each type in ggml-cpu.c."""
    products = {tensor.type for tensor in listed if len(tensor.sizes) > 1 and tensor.name != EMBEDDING}
    if narrow := [kind for kind, type in QUANTIZED.items() if type in products]:
        return f"bfloat16; 8 bits (Q8_0) for {', '.join(narrow)}" if BF16 in products else "8 bits (Q8_0)"
    return "bfloat16"


def fields(config: ModelConfig, type: Type = BF16) -> dict[str, Any]:
    """The metadata of the file. Values have the types of GGUF: int is uint32, float is float32."""
    kind = architecture(config)
    found = {
        "context_length": LONGEST,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        **(_latent_fields(config) if config.latent_attention else _head_fields(config)),
        **(_delta_fields(config) if config.delta_layers else {}),
        **(_expert_fields(config) if config.num_experts else {}),
        **_scaling_fields(config.rope_scaling),
    }
    if config.sliding_window and kind == GPT_OSS:
        found["attention.sliding_window"] = config.sliding_window
    return {
        "general.architecture": kind,
        "general.file_type": type.file,
        "tokenizer.ggml.model": "no_vocab",
        **{f"{kind}.{name}": value for name, value in found.items()},
    }


def _head_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.rotary_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
    }


def _latent_fields(config: ModelConfig) -> dict[str, Any]:
    """In the absorbed form the latents are the keys and values of one head; names with `mla` are the model's heads."""
    sizes, experts = config.latent_attention, bool(config.num_experts)
    dense = len(config.mlp_only_layers) if experts else config.num_hidden_layers
    columns = _expert_columns(config)
    return {
        "attention.q_lora_rank": sizes.q_lora_rank or 0,
        "rope.dimension_count": sizes.qk_rope_head_dim,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": sizes.kv_lora_rank,
        "attention.key_length": sizes.kv_lora_rank + sizes.qk_rope_head_dim,
        "attention.value_length": sizes.kv_lora_rank,
        "attention.key_length_mla": sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
        "attention.value_length_mla": sizes.v_head_dim,
        "leading_dense_block_count": dense,
        "expert_feed_forward_length": columns,  # llama.cpp reads this and the next even without experts
        "expert_shared_count": (config.shared_expert_intermediate_size or 0) // columns,
    }


def _delta_fields(config: ModelConfig) -> dict[str, Any]:
    sizes = config.delta_net
    return {
        "ssm.conv_kernel": sizes.conv_kernel,
        "ssm.state_size": sizes.key_dim,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.value_heads,
        "ssm.inner_size": sizes.value_heads * sizes.value_dim,
        "attention.recurrent_layers": tuple(n in config.delta_layers for n in range(config.num_hidden_layers)),
    }


def _expert_fields(config: ModelConfig) -> dict[str, Any]:
    found = {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": _expert_columns(config),
    }
    if config.scoring_func == "sigmoid":
        found |= {
            "expert_gating_func": SIGMOID,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
        }
    if config.n_group > 1:
        found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.shared_expert_intermediate_size:
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return found


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any]:
    """Metadata of yarn, which published mixtures use; other scalings do not change what a token costs."""
    if scaling is None or scaling.type != "yarn":
        return {}
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }
    if scaling.mscale_all_dim is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling.mscale_all_dim  # llama.cpp multiplies it by ten
    return found


def from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The config from the fields that `dataclasses.asdict` and JSON wrote."""
    scaling = values["rope_scaling"]
    return ModelConfig(**{**values, "rope_scaling": scaling and RopeScaling(**scaling)})
