"""Dimensions of mixtures of experts from their config.json, against published totals and arithmetic by hand."""

from fractions import Fraction

import pytest

from laneformer.errors import ConfigError
from laneformer.hf import dimensions_from_hf
from tests.support.hf.configs import GPT, INT4, K2, KIMI, MIXTRAL, MIXTURES, QWEN, QWEN_MOE, V3, V4


@pytest.mark.parametrize(("values", "billions"), [(MIXTRAL, 12.9), (QWEN_MOE, 3.3), (V3, 37), (K2, 32)])
def test_active_weights_equal_published_numbers(values, billions):
    """The published numbers include the embedding and have two or three digits."""
    model = dimensions_from_hf(values)
    active = sum(part.read for part in model.parts) + values["vocab_size"] * values["hidden_size"]
    assert active / 1e9 == pytest.approx(billions, rel=0.03)


def test_formats_follow_the_quantization():
    def formats(values):
        return {part.name.split(",")[0]: part.format for part in dimensions_from_hf(values).parts}

    assert {*formats(MIXTRAL).values()} == {"bfloat16"} and {
        *formats(MIXTRAL | {"torch_dtype": "float32"}).values()
    } == {"float32"}
    found = formats(V3)
    assert (found.pop("router"), found.pop("head")) == ("bfloat16", "bfloat16") and {*found.values()} == {"fp8"}
    assert formats(V4 | {"expert_dtype": "fp8"})["routed experts"] == "fp8"
    without = {name: value for name, value in V4.items() if name not in ("expert_dtype", "quantization_config")}
    assert formats(without)["routed experts"] == "bfloat16"
    assert formats(V4 | {"expert_dtype": None})["routed experts"] == "mxfp4"
    int8 = {"group": {"weights": {"num_bits": 8, "type": "int"}}}
    for published in (K2, V4):  # the quantization_config of scripts.quantize includes the experts
        given = published | {"quantization_config": INT4 | {"config_groups": int8}}
        assert formats(given)["routed experts"] == "int8"


def test_dimensions_follow_the_fields():
    def parts(values):
        return {part.name: part.read for part in dimensions_from_hf(values).parts}

    dense = parts(QWEN_MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert dense["dense layers, 24"] == 24 * 3 * 6144 * 2048 and dense["router"] == 24 * 128 * 2048, (
        "layer 0 is already dense because of the step"
    )
    window = dimensions_from_hf(MIXTRAL | {"sliding_window": 4096})
    assert (window.kv_full, window.kv_window) == (0, (32 * 2 * 8 * 128, 4096))
    assert dimensions_from_hf(MIXTRAL).kv_full == 32 * 2 * 8 * 128
    straight = parts(V3 | {"q_lora_rank": None})["latent attention"] - parts(V3)["latent attention"]
    assert straight == 61 * (7168 * 128 * 192 - 7168 * 1536 - 1536 * 128 * 192)
    types = ["linear_attention"] * 3 + ["full_attention"]
    assert parts(QWEN | {"layer_types": types * 12, "full_attention_interval": None}) == parts(QWEN)
    assert "shared expert" not in parts(V3 | {"n_shared_experts": None})


def test_shares_equal_those_of_the_routed_experts():
    for values, share in ((MIXTRAL, (2, 8)), (GPT, (4, 128)), (QWEN, (10, 512)), (V4, (6, 256)), (KIMI, (8, 384))):
        routed, *others = dimensions_from_hf(values).parts
        assert routed.share == Fraction(*share) and {part.share for part in others} == {1}
        assert routed.parameters * share[0] == routed.read * share[1]


def test_all_weights_of_mixtral_equal_the_published_number():
    """46.7 billion parameters with the embedding table (mistral.ai, Mixtral of experts)."""
    weights = sum(part.parameters for part in dimensions_from_hf(MIXTRAL).parts) + 32_000 * 4096
    assert weights / 1e9 == pytest.approx(46.7, abs=0.05)


@pytest.mark.parametrize("values", MIXTURES.values(), ids=MIXTURES)
def test_null_fields_equal_missing_ones(values):
    inner = values.get("text_config", values)
    unused = {name: None for name in ("norm_topk_prob", "mlp_only_layers", "n_group", "torch_dtype", "dtype")}
    nulls = {name: value for name, value in unused.items() if name not in inner} | {"tie_word_embeddings": None}
    changed = values | {"text_config": inner | nulls} if "text_config" in values else values | nulls
    assert dimensions_from_hf(changed) == dimensions_from_hf(values)


def test_missing_key_value_heads_equal_the_query_heads():
    full = dimensions_from_hf(MIXTRAL | {"num_key_value_heads": 32})
    assert dimensions_from_hf(MIXTRAL | {"num_key_value_heads": None}) == full


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"model_type": "jamba"}, "'jamba'"),
        ({}, "model_type None"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts"),
        ({**MIXTRAL, "hidden_size": "4096"}, "hidden_size = '4096'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ({**MIXTRAL, "torch_dtype": "int8"}, "dtype 'int8'"),
        ({**MIXTRAL, "quantization_config": "fp8"}, "quantization_config = 'fp8'"),
        ({**MIXTRAL, "quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method = 'awq'"),
        ({**K2, "quantization_config": {**INT4, "config_groups": {}}}, "config_groups has 0 groups"),
        (
            {
                **K2,
                "quantization_config": {
                    **INT4,
                    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
                },
            },
            "num_bits, type, group_size = 4, float, 16",
        ),
        ({**K2, "quantization_config": {**INT4, "ignore": ["re:("]}}, "'re:('"),
        ({**K2, "moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({**K2, "first_k_dense_replace": 61}, "first_k_dense_replace = 61"),
        ({**GPT, "layer_types": ["full_attention"]}, "36 layers"),
        ({**V4, "compress_ratios": [4]}, "compress_ratios = [4]"),
        ({**V4, "expert_dtype": "fp6"}, "expert_dtype 'fp6'"),
        ({**QWEN_MOE, "use_sliding_window": True}, "use_sliding_window = true"),
    ],
)
def test_unsupported_values_name_the_field(values, shown):
    with pytest.raises(ConfigError) as error:
        dimensions_from_hf(values)
    assert shown in str(error.value) and "\n" not in str(error.value)
