"""config.json of the Laneformer family in both spellings."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import ConfigError, ModelConfig, RopeScaling
from laneformer.hf import config_from_hf, config_to_hf, read_hf_config
from tests.support import tiny

scalings = st.one_of(
    st.none(),
    st.builds(RopeScaling, type=st.just("linear"), factor=st.floats(1, 9)),
    st.builds(
        RopeScaling,
        type=st.sampled_from(["llama3", "yarn"]),
        factor=st.floats(1, 9),
        original_max_position_embeddings=st.integers(1, 99),
        mscale=st.none() | st.floats(0, 2),
        attention_factor=st.none() | st.floats(0, 2),
        truncate=st.booleans(),
    ),
)


@st.composite
def configs(draw) -> ModelConfig:
    """Valid configs that together use every field."""
    head = draw(st.sampled_from(["replicate", "lane", "vocab_parallel"]))
    whole_head = head == "replicate"
    fields = {name: value for name, value in tiny.BASE.items() if name != "model_type"}
    listed = draw(st.booleans())
    fields |= (
        {"swa_layers": draw(st.lists(st.integers(0, 2)))}
        if listed
        else {"sliding_window_n_layers": draw(st.integers(-3, 3))}
    )
    return ModelConfig(
        **fields
        | {
            "head_dim": draw(st.sampled_from([None, 6])),
            "num_lanes": draw(st.sampled_from([1, 2, 4])),
            "layout": draw(st.sampled_from(["laneformer", "tp", "dtp(1.5)", "spd(0, 2)"])),
            "broadcast_delay": draw(st.integers(0, 5)),
            "lm_head_type": head,
            **{
                name: draw(st.booleans())
                for name in (
                    "use_early_comm",
                    "early_lands_twice",
                    "use_attention_comm",
                    "use_mlp_comm",
                    "replicated_rmsn_scale",
                    "qkv_bias",
                    "qk_norm",
                    "gated_mlp",
                    "attention_gate",
                    "attention_sinks",
                    "out_bias",
                )
            },
            "pre_norm_lane_agg": whole_head and draw(st.booleans()),
            "tie_word_embeddings": whole_head and draw(st.booleans()),
            "sliding_window": 5 if listed else draw(st.none() | st.integers(1, 9)),
            "unclamped_layers": draw(st.lists(st.integers(0, 2))),
            "rope_theta": draw(st.floats(1, 1e6)),
            "rope_scaling": draw(scalings),
            "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu2"])),
            "norm_eps": draw(st.floats(1e-8, 1e-2)),
            **{
                name: draw(st.none() | st.floats(0.1, 100))
                for name in (
                    "attn_logit_softcapping",
                    "final_logit_softcapping",
                    "attention_multiplier",
                    "rope_local_base_freq",
                )
            },
            "embedding_multiplier": draw(st.floats(0.1, 100)),
            "bos_token_id": draw(st.none() | st.integers(0, 39)),
            "eos_token_id": draw(st.lists(st.integers(0, 39), max_size=3)),
        }
    )


@settings(max_examples=100)
@given(config=configs(), spelling=st.sampled_from(["laneformer_tp", "laneformer"]))
def test_both_spellings_round_trip(config, spelling):
    values = json.loads(json.dumps(config_to_hf(config, spelling)))
    assert config_from_hf(values) == config
    assert values["model_type"] == spelling
    assert values["architectures"] == [
        {"laneformer_tp": "LaneformerTPForCausalLM", "laneformer": "LaneformerForCausalLM"}[spelling]
    ]
    one_switch = spelling == "laneformer_tp" and config.use_attention_comm == config.use_mlp_comm
    assert ("use_comm" in values) == one_switch and ("use_mlp_comm" in values) != one_switch


def test_every_field_is_written():
    values = config_to_hf(tiny.config(), "laneformer")
    assert set(ModelConfig.__dataclass_fields__) <= set(values)


def test_published_files_are_read():
    for folder in tiny.ORACLE:
        values = json.loads((folder / "config.json").read_text())
        config = read_hf_config(folder)
        assert config.layout == "laneformer" and config.early_lands_twice
        assert config.use_attention_comm == config.use_mlp_comm == values["use_comm"]
        for name in (
            "num_lanes",
            "broadcast_delay",
            "lm_head_type",
            "pre_norm_lane_agg",
            "replicated_rmsn_scale",
            "sliding_window",
        ):
            assert getattr(config, name) == values[name]


def test_both_spellings_of_the_exchange_switches_are_read():
    assert not tiny.config(use_comm=False).use_mlp_comm
    newer = tiny.config(model_type="laneformer", use_attention_comm=False, use_mlp_comm=True)
    assert (newer.use_attention_comm, newer.use_mlp_comm) == (False, True)
    assert tiny.config(model_type="laneformer").use_attention_comm


def test_fields_of_older_files_are_read():
    assert tiny.config(rms_norm_eps=1e-6).norm_eps == tiny.config(rms_norm_eps=1e-6, norm_eps=None).norm_eps == 1e-6
    assert tiny.config(rms_norm_eps=1e-6, norm_eps=1e-4).norm_eps == 1e-4
    assert tiny.config(num_key_value_heads=None).num_key_value_heads == 8
    assert tiny.config(eos_token_id=None).eos_token_id == ()
    assert tiny.config(eos_token_id=2).eos_token_id == (2,)
    assert tiny.config(eos_token_id=[2, 3]).eos_token_id == (2, 3)
    for token in (None, 2, [2, 3]):
        assert config_to_hf(tiny.config(eos_token_id=token))["eos_token_id"] == token
    assert (
        tiny.config(sliding_window_n_layers=None, unclamped_layers=None, swa_layers=None).layer_windows == (None,) * 3
    )
    assert tiny.config(sliding_window=4, sliding_window_n_layers=2, swa_layers=[2]).layer_windows == (
        None,
        None,
        4,
    )  # the list decides


def test_other_number_of_lanes_is_refused():
    assert config_from_hf(tiny.values(), num_lanes=4).num_lanes == 4
    with pytest.raises(ConfigError, match=r"num_lanes = 2\b.*\b4 lanes"):
        config_from_hf(tiny.values(), num_lanes=2)


def test_unknown_spelling_is_refused():
    with pytest.raises(ConfigError, match=r"'llama'.*laneformer_tp, laneformer"):
        config_to_hf(tiny.config(), "llama")
