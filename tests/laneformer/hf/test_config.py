"""config.json in every spelling: the published family's two, dense Llama and Qwen in theirs, and damaged ones."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import CheckpointError, ConfigError, LaneformerError, ModelConfig, RopeScaling
from laneformer.hf.config import config_from_hf, config_to_hf, read_hf_config
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
    """Valid configs that use every field."""
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
                )
            },
            "pre_norm_lane_agg": whole_head and draw(st.booleans()),
            "tie_word_embeddings": whole_head and draw(st.booleans()),
            "sliding_window": 5 if listed else draw(st.none() | st.integers(1, 9)),
            "unclamped_layers": draw(st.lists(st.integers(0, 2))),
            "rope_theta": draw(st.floats(1, 1e6)),
            "rope_scaling": draw(scalings),
            "norm_eps": draw(st.floats(1e-8, 1e-2)),
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


def test_the_published_files_are_read():
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


def test_spellings_of_the_exchange_switches():
    assert not tiny.config(use_comm=False).use_mlp_comm
    newer = tiny.config(model_type="laneformer", use_attention_comm=False, use_mlp_comm=True)
    assert (newer.use_attention_comm, newer.use_mlp_comm) == (False, True)
    assert tiny.config(model_type="laneformer").use_attention_comm


def test_spellings_of_rope_scaling():
    args = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 2048}
    llama3 = RopeScaling(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048
    )
    assert tiny.config(rope_scaling_args=args).rope_scaling == llama3
    assert tiny.config(rope_scaling={"rope_type": "llama3"} | args).rope_scaling == llama3
    assert tiny.config(rope_parameters={"rope_type": "llama3", "rope_theta": 5.0} | args).rope_scaling == llama3
    assert tiny.config(rope_parameters={"rope_type": "llama3", "rope_theta": 5.0} | args).rope_theta == 5.0
    assert tiny.config(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert tiny.config(rope_scaling=None, rope_scaling_args=None).rope_scaling is None
    assert tiny.config(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling(
        type="linear", factor=2
    )
    yarn = tiny.config(rope_scaling={"type": "yarn", "factor": 2.0}).rope_scaling
    assert yarn.original_max_position_embeddings == 32  # as transformers: the context


def test_fields_of_older_files():
    assert tiny.config(rms_norm_eps=1e-6).norm_eps == 1e-6
    assert tiny.config(eos_token_id=None).eos_token_id == ()
    assert tiny.config(eos_token_id=2).eos_token_id == (2,)
    assert tiny.config(eos_token_id=[2, 3]).eos_token_id == (2, 3)
    assert (
        tiny.config(sliding_window_n_layers=None, unclamped_layers=None, swa_layers=None).layer_windows == (None,) * 3
    )
    assert tiny.config(sliding_window=4, sliding_window_n_layers=2, swa_layers=[2]).layer_windows == (
        None,
        None,
        4,
    )  # the list decides


SCALING = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
    "rope_theta": None,
}
OPTIONAL = {  # model_type -> each optional field with what a missing or null one stands for
    "laneformer_tp": {
        "head_dim": 4,
        "max_position_embeddings": 4096,
        "num_lanes": 1,
        "layout": "laneformer",
        "broadcast_delay": 2,
        "use_comm": True,
        "use_early_comm": True,
        "early_lands_twice": True,
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": False,
        "replicated_rmsn_scale": True,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "sliding_window_n_layers": 0,
        "unclamped_layers": [],
        "swa_layers": None,
        "rope_theta": 10000.0,
        "rope_scaling": {},
        "rope_scaling_args": {},
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "qk_norm": False,
        "bos_token_id": None,
        "eos_token_id": [],
        "hidden_act": "silu",
    },
    "laneformer": {"use_attention_comm": True, "use_mlp_comm": True, "num_key_value_heads": 8},
    "llama": {
        "num_key_value_heads": 8,
        "head_dim": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": {},
        "rope_parameters": {"rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "max_window_layers": 28, "layer_types": None},
    "qwen3": {"max_position_embeddings": 32768, "use_sliding_window": False, "num_key_value_heads": 8, "head_dim": 128},
}
DROPPED = "dropped"
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def with_missing(draw, fields: dict) -> dict:
    """Some of the fields left out, some null, the others as they are."""
    chosen = {name: draw(st.sampled_from([value, None, DROPPED])) for name, value in fields.items()}
    return {name: value for name, value in chosen.items() if value is not DROPPED}


def meaning(config: ModelConfig) -> ModelConfig:
    """The config with head_dim written out."""
    return config.replace(head_dim=config.head_size)


@settings(max_examples=200)
@given(data=st.data(), kind=st.sampled_from(sorted(OPTIONAL)))
def test_null_and_missing_fields_mean_the_default(data, kind):
    required = {"model_type": kind} | {name: tiny.BASE[name] for name in REQUIRED}
    found = config_from_hf(required | with_missing(data.draw, OPTIONAL[kind]))
    assert meaning(found) == meaning(config_from_hf(required | OPTIONAL[kind])) == meaning(config_from_hf(required))
    assert found.num_key_value_heads == required["num_attention_heads"]


@settings(max_examples=100)
@given(data=st.data(), kind=st.sampled_from(["laneformer", "llama"]), name=st.sampled_from(["scaling", "parameters"]))
def test_null_and_missing_fields_of_rope_scaling_mean_the_default(data, kind, name):
    """A yarn factor is the longest context over the original one; the type alone cannot be left out."""
    required = {"model_type": kind, "max_position_embeddings": 32} | {n: tiny.BASE[n] for n in REQUIRED}
    optional = {n: value for n, value in SCALING.items() if n not in ("rope_type", "original_max_position_embeddings")}
    kept = {n: SCALING[n] for n in ("rope_type", "original_max_position_embeddings")}
    found = config_from_hf(required | {f"rope_{name}": kept | with_missing(data.draw, optional)})
    assert found.rope_scaling == RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=16)
    assert found.rope_theta == 10000.0


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_null_original_context_means_the_longest_one(kind):
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": None}
    assert tiny.config(rope_scaling=scaling).rope_scaling.original_max_position_embeddings == 32


def test_unknown_fields_are_told(caplog):
    with caplog.at_level(logging.WARNING, "laneformer"):
        tiny.config(torch_dtype="float32", use_cache=True)
        assert not caplog.records
        tiny.config(brodcast_delay=3)
    assert "brodcast_delay" in caplog.text


DENSE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 8}


def test_dense_families():
    llama = config_from_hf(DENSE | {"model_type": "llama", "rms_norm_eps": 1e-6}, num_lanes=2)
    assert (llama.num_key_value_heads, llama.num_lanes, llama.layout, llama.norm_eps) == (8, 2, "tp", 1e-6)
    assert config_from_hf(DENSE | {"model_type": "llama"}).num_lanes == 1
    qwen2 = config_from_hf(DENSE | {"model_type": "qwen2", "num_key_value_heads": 4})
    assert qwen2.qkv_bias and not qwen2.qk_norm
    qwen3 = config_from_hf(DENSE | {"model_type": "qwen3", "head_dim": 6, "tie_word_embeddings": True})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_size == 6 and qwen3.tie_word_embeddings


def test_sliding_windows_of_qwen():
    window = {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True}
    assert config_from_hf(DENSE | window | {"max_window_layers": 2}).layer_windows == (None, None, 5)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_from_hf(DENSE | window | {"layer_types": kinds}).layer_windows == (5, None, 5)
    assert config_from_hf(DENSE | window | {"use_sliding_window": False}).layer_windows == (None, None, None)


WRONG = [
    ({"model_type": None}, "model_type = None: known are laneformer_tp, laneformer, llama, qwen2, qwen3"),
    ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
    ({"vocab_size": None}, "vocab_size missing"),
    ({"vocab_size": None, "hidden_size": None}, "vocab_size, hidden_size missing"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only silu"),
    ({"norm_eps": float("nan")}, "norm_eps = nan must be a finite number"),
    ({"rope_theta": float("inf")}, "rope_theta = inf"),
    ({"rope_theta": -1}, "rope_theta = -1"),
    ({"hidden_size": "32"}, "hidden_size = '32' must be a whole number"),
    ({"num_lanes": 8}, "num_lanes = 8 does not divide num_key_value_heads = 4"),
    ({"use_comm": "yes"}, "use_attention_comm = 'yes' must be true or false"),
    ({"swa_layers": 3}, "swa_layers = 3 must be a list"),
    ({"layout": ["tp"]}, r"layout = \['tp'\]"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear': write an object"),
    ({"rope_scaling": {"type": "linear"}}, "rope scaling of type 'linear' needs factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type 'dynamic'"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor = nan"),
    ({"rope_parameters": [1]}, r"rope_parameters = \[1\]: write an object"),
    ({"rope_scaling_args": 8}, "rope_scaling_args = 8: write an object"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias = true"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias = true"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": "3"},
        "num_hidden_layers = '3'",
    ),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": 3},
        "layer_types = 3: write a list",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_values_name_file_and_field(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny.values(**changes))
    )  # NaN and Infinity as Python writes and reads them
    with pytest.raises(ConfigError, match=message) as caught:
        read_hf_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"vocab_size": 1', "[1, 2]", "3", "null", '"llama"', "\ufffe{}"])
def test_damaged_files(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read as JSON|holds \w+, not a JSON object)"):
        read_hf_config(tmp_path)


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist: a checkpoint folder needs"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_hf_config(tmp_path)


json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 50),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "x"]), st.none() | st.floats() | st.text(max_size=3), max_size=3
    ),
)


fields = sorted(
    set(config_to_hf(tiny.config(), "laneformer"))
    | {"use_comm", "rope_scaling_args", "rope_parameters", "rms_norm_eps", "hidden_act"}
    | {"layer_types", "max_window_layers", "use_sliding_window"}
)


@settings(max_examples=200)
@given(
    changes=st.dictionaries(st.sampled_from(fields), json_values, min_size=1, max_size=2),
    kind=st.sampled_from(["laneformer", "llama", "qwen2"]),
)
def test_anything_in_a_file_is_a_config_or_a_clear_error(changes, kind):
    try:
        config_from_hf(tiny.values(model_type=kind) | changes)
    except LaneformerError as error:
        assert len(str(error)) > 10


def test_lanes_of_a_laneformer_are_its_own():
    assert config_from_hf(tiny.values(), num_lanes=4).num_lanes == 4
    with pytest.raises(ConfigError, match="num_lanes = 2: this Laneformer was trained with 4 lanes"):
        config_from_hf(tiny.values(), num_lanes=2)


@pytest.mark.parametrize("lanes", [3, 16, 0, -1])
def test_lanes_that_do_not_fit_a_dense_model(lanes):
    with pytest.raises(ConfigError, match=f"num_lanes = {lanes}"):
        config_from_hf(DENSE | {"model_type": "llama"}, num_lanes=lanes)


def test_unknown_spelling():
    with pytest.raises(ConfigError, match="spelling = 'llama': known are laneformer_tp, laneformer"):
        config_to_hf(tiny.config(), "llama")
