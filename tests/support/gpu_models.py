"""Models whose GPU kernels are compiled with the real compilers: the 2B, and layers of published ones."""

import types

import pytest

from laneformer import ModelConfig, Precision
from laneformer.config import CompressedAttention
from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import product_weights
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200
from laneformer.decoder import decoder_ops
from laneformer.infer.engine.native import plan_of
from laneformer.ops import without_kernel
from laneformer.recipes.models import LANEFORMER_2B, PACKED, QWEN3_NEXT_20B

CASES = [
    pytest.param(lanes, dtype, id=f"lanes {lanes}, {dtype}", marks=() if quick else pytest.mark.exhaustive)
    for lanes, dtype, quick in (
        (8, "float16", False),
        (8, "bfloat16", False),
        (8, "bf12", True),
        (1, "float16", True),
        (1, "bfloat16", False),
        (1, "bf12", False),
    )
]

CODES = {
    "int8": Codes("int8", factors=True),
    "fp8": Codes("e4m3", "float32", 128),
    "int4": Codes("int4", "bfloat16", 32),
    "int4 zeros": Codes("int4", "float16", 128, zeros=True),
    "mxfp4": Codes("e2m1", "e8m0", 32),
    "nvfp4": Codes("e2m1", "e4m3", 16, factors=True),
}


def header(machine, lanes_here: int, dtype: str, rows=1, requests=1, drafts=False, variants=(), **changes) -> str:
    """The header model.h of the 2B. dtype: dtype of the weights, or bf12 or a name in CODES for bfloat16 with all
    products in 12 bits or quantized. rows, requests, drafts, variants: as in Layout. changes: changes of the config.
    """
    config, in_12_bits, format = LANEFORMER_2B.replace(**changes), dtype == "bf12", CODES.get(dtype)
    dtype = "bfloat16" if in_12_bits or format else dtype
    source = types.SimpleNamespace(config=config, precision=Precision(param=dtype, compute=dtype), stored_dtype=dtype)
    plan = plan_of(source)
    paths = [path for paths in product_weights(plan) for path in paths]
    quantized = dict.fromkeys(paths, format) if format else {}
    in_12_bits = paths if in_12_bits else ()
    options = {"bf12": in_12_bits, "codes": quantized, "rows": rows, "requests": requests, "drafts": drafts}
    return model_header(Layout(plan, machine, lanes_here, variants=variants, **options))


ON_EIGHT = ("deepseek_v3", "deepseek_v3_4", "kimi_k2")  # models on eight devices; others are on one


def of_experts(name: str, machine=H200, rows: int = 1) -> Layout:
    """The layout of a published mixture of experts in its published formats, on one device, or one of eight."""
    model, format = PACKED[name], {"mxfp4": CODES["mxfp4"], "fp8": Codes("e4m3", "bfloat16", 128)}
    config = model.config.replace(num_lanes=8) if name in ON_EIGHT else model.config
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    packed = {
        path: format[kind]
        for paths in product_weights(plan)
        for path in paths
        if (kind := model.formats.get(path.split(".", 2)[-1]))
    }
    return Layout(plan, machine, 1, codes=packed, rows=rows)


def of_delta_net(machine=H200) -> Layout:
    """The layout of Qwen3-Next's layers in bfloat16 on one device, with an MLP instead of experts."""
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    config = QWEN3_NEXT_20B.replace(**dict.fromkeys(experts), shared_expert_gate=False)
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    return Layout(plan, machine, 1)


def of_compressed(machine=H200, rows: int = 1) -> Layout:
    """The layout of layers with DeepSeek-V4-Flash's sizes in bfloat16 on one device, with one stream and MLPs."""
    sizes = {"q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024}
    config = ModelConfig(
        vocab_size=129_280,
        hidden_size=4096,
        head_dim=512,
        num_hidden_layers=6,
        num_attention_heads=64,
        num_key_value_heads=1,
        num_lanes=1,
        intermediate_size=12_288,
        max_position_embeddings=8192,
        layout="tp",
        compressed_attention=CompressedAttention(ratios=(0, 0, 4, 128, 4, 128), window=128, **sizes),
    )
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    return Layout(plan, machine, 1, rows=rows)


OF_KERNELS = [name for name, model in PACKED.items() if without_kernel(decoder_ops(model.config)) is None]
