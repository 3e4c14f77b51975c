"""Fields of config.json that change all logits and are not computed."""

import pytest

from laneformer.errors import ConfigError
from laneformer.hf import config_from_hf, rope
from laneformer.hf.fields import UNCOMPUTED

LLAMA = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize("name", UNCOMPUTED)
def test_uncomputed_fields_are_refused(name):
    for value in (0.123, [0.5, 2.0], {"a": 1}, "other"):
        with pytest.raises(ConfigError, match=f"^{name} = .*changes all logits"):
            config_from_hf(LLAMA | {name: value})
    for value in (None, *UNCOMPUTED[name]):
        assert config_from_hf(LLAMA | {name: value}) == config_from_hf(LLAMA)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078,
            "logits_scaling": 8.0,
        },
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"llama_4_scaling_beta": 0.1},
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        {"alibi": True},
        {"use_qk_norm": True},
        {"clip_qkv": 8.0},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "mixtral"])
def test_published_spellings_are_refused(kind, fields):
    with pytest.raises(ConfigError, match="changes all logits"):
        config_from_hf(LLAMA | {"model_type": kind} | fields)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.2}, "attn_factor = 1.2 changes all logits"),
        ({"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta = 0.1 changes all logits"),
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "rope type 'mrope' is not supported"),
        ({"type": "su", "long_factor": [1.0], "short_factor": [1.0]}, "rope type 'su' is not supported"),
        ({"rope_type": "longrope", "long_factor": [1.0]}, "rope type 'longrope' is not supported"),
        ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported"),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_uncomputed_rotary_scaling_is_refused(field, scaling, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(LLAMA | {field: scaling})


def test_rotary_fields_without_effect_are_accepted():
    plain = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    neutral = {name: values[0] for name, values in rope.UNCOMPUTED.items() if values}
    found = config_from_hf(LLAMA | {"rope_scaling": plain | neutral | {"finetuned": True}})
    assert found == config_from_hf(LLAMA | {"rope_scaling": plain})


def test_rope_scaling_precedes_rope_parameters():
    """As in transformers, which then takes the base from the top level."""
    older, newer = {"type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 7.0}
    found = config_from_hf(LLAMA | {"rope_scaling": older, "rope_parameters": newer})
    assert found.rope_scaling.factor == 2.0 and found.rope_theta == 10000.0
    found = config_from_hf(LLAMA | {"rope_scaling": older | {"rope_theta": 5.0}, "rope_parameters": newer})
    assert found.rope_theta == 5.0
    for nothing in (None, {}):
        assert config_from_hf(LLAMA | {"rope_scaling": nothing, "rope_parameters": newer}).rope_theta == 7.0


def test_a_begin_token_outside_the_vocabulary_means_none():
    for token in (-1, 40, 128000):
        assert config_from_hf(LLAMA | {"bos_token_id": token}).bos_token_id is None
    assert config_from_hf(LLAMA | {"bos_token_id": 39}).bos_token_id == 39
