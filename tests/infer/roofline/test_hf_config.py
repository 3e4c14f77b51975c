"""config.json of published mixtures of experts, with their published dimensions, against the built-in rows and the
published totals.
"""

import json

import pytest

from infer.roofline.hf_config import read_config_file
from infer.roofline.published import MOE
from laneformer.errors import ConfigError, InputError

QWEN = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151_936,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            *(
                f"model.layers.{n}.{name}"
                for n in range(48)
                for name in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_ba")
            ),
        ],
    },
}
GPT = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "vocab_size": 201_088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
V4 = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "vocab_size": 129_280,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last one is of the block for multi-token prediction
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129_280,
    "num_attention_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
K2 = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
KIMI = {
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 1152},
    "text_config": K2 | {"quantization_config": INT4},
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32_000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
}


@pytest.fixture
def read(tmp_path):
    def read(values, name="some-model.json"):
        (tmp_path / name).write_text(json.dumps(values))
        return read_config_file(str(tmp_path / name))

    return read


@pytest.mark.parametrize(
    ("name", "values"),
    [("qwen3-coder-next", QWEN), ("gpt-oss-120b", GPT), ("deepseek-v4-flash", V4), ("kimi-k2.6", KIMI)],
)
def test_the_built_in_rows(read, name, values):
    ours, row = read(values, f"{name}.json").moe(), MOE[name]
    assert ours.name == name and ours.layers == row.layers and ours.parts == row.parts
    for context in (0, 100, 5000):
        assert ours.kv_bytes(context, "bfloat16") == row.kv_bytes(context, "bfloat16")


@pytest.mark.parametrize(("values", "billions"), [(MIXTRAL, 12.9), (QWEN_MOE, 3.3), (V3, 37), (K2, 32)])
def test_active_weights_as_published(read, values, billions):
    """The makers count the embedding too, and write them with two or three digits."""
    model = read(values).moe()
    active = sum(part.weights for part in model.parts) + values["vocab_size"] * values["hidden_size"]
    assert active / 1e9 == pytest.approx(billions, rel=0.03)


def test_precisions(read):
    def precisions(values):
        return {part.name.split(",")[0]: part.precision for part in read(values).moe().parts}

    assert {*precisions(MIXTRAL).values()} == {"bfloat16"} and {
        *precisions(MIXTRAL | {"torch_dtype": "float32"}).values()
    } == {"float32"}
    found = precisions(V3)
    assert (found.pop("router"), found.pop("head")) == ("bfloat16", "bfloat16") and {*found.values()} == {"fp8"}
    assert precisions(V4 | {"expert_dtype": "fp8"})["routed experts"] == "fp8"
    without = {name: value for name, value in V4.items() if name not in ("expert_dtype", "quantization_config")}
    assert precisions(without)["routed experts"] == "bfloat16"
    assert precisions(V4 | {"expert_dtype": None})["routed experts"] == "mxfp4"
    int8 = {"group": {"weights": {"num_bits": 8, "type": "int"}}}
    assert precisions(K2 | {"quantization_config": INT4 | {"config_groups": int8}})["routed experts"] == "int8"


def test_variants(read):
    def parts(values):
        return {part.name: part.weights for part in read(values).moe().parts}

    dense = parts(QWEN_MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert dense["dense layers, 24"] == 24 * 3 * 6144 * 2048 and dense["router"] == 24 * 128 * 2048, (
        "layer 0 is dense by the step already"
    )
    window = read(MIXTRAL | {"sliding_window": 4096}).moe()
    assert window.kv_bytes(10_000, "fp8") == 32 * 2 * 8 * 128 * 4096
    straight = parts(V3 | {"q_lora_rank": None})["latent attention"] - parts(V3)["latent attention"]
    assert straight == 61 * (7168 * 128 * 192 - 7168 * 1536 - 1536 * 128 * 192)
    types = ["linear_attention"] * 3 + ["full_attention"]
    assert parts(QWEN | {"layer_types": types * 12, "full_attention_interval": None}) == parts(QWEN)
    assert "shared expert" not in parts(V3 | {"n_shared_experts": None})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "jamba"}, "model_type = 'jamba': known mixtures of experts are mixtral, qwen3_moe"),
        ({}, "model_type = None"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is missing"),
        ({**MIXTRAL, "hidden_size": "4096"}, "hidden_size = '4096': it must be a whole number"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok = 9: there are 8 experts"),
        ({**MIXTRAL, "torch_dtype": "int8"}, "dtype = 'int8': known are bfloat16"),
        ({**MIXTRAL, "quantization_config": "fp8"}, "quantization_config = 'fp8': it must be an object"),
        (
            {**MIXTRAL, "quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method = 'awq': known are fp8",
        ),
        ({**K2, "quantization_config": {**INT4, "config_groups": {}}}, "config_groups has 0 groups"),
        (
            {
                **K2,
                "quantization_config": {
                    **INT4,
                    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
                },
            },
            "num_bits, type, group_size = 4, float, 16: known are",
        ),
        ({**K2, "quantization_config": {**INT4, "ignore": ["re:("]}}, "no regular expression"),
        ({**K2, "moe_layer_freq": 2}, "moe_layer_freq = 2: only 1"),
        ({**K2, "first_k_dense_replace": 61}, "first_k_dense_replace = 61: there are 61 layers"),
        ({**GPT, "layer_types": ["full_attention"]}, "layer_types: it must name all 36 layers"),
        ({**V4, "compress_ratios": [4]}, "compress_ratios: it must have a number for each of the 43 layers"),
        ({**V4, "expert_dtype": "fp6"}, "expert_dtype = 'fp6': known are fp4, fp8"),
        ({**QWEN_MOE, "use_sliding_window": True}, "use_sliding_window = true"),
    ],
)
def test_what_is_not_known_names_the_field(read, values, message):
    with pytest.raises(ConfigError) as error:
        read(values).moe()
    text = str(error.value)
    assert message in text and "some-model.json: " in text and "\n" not in text


def test_files(tmp_path, read):
    (tmp_path / "big").mkdir()
    found = read(MIXTRAL, "big/config.json")
    assert found.name == "big" and read_config_file(str(tmp_path / "big")) == found and found.is_moe
    for content, message in (("[]", "holds list, not a JSON object"), ("{", "cannot be read as JSON")):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(InputError, match=message):
            read_config_file(str(tmp_path / "x.json"))
    with pytest.raises(InputError, match="does not exist: give the config"):
        read_config_file(str(tmp_path / "none.json"))
