"""The table of weights: names, counts, bytes per token, shardings, fresh weights."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import (
    Laneformer,
    ModelConfig,
    Precision,
    kv_bytes_per_token,
    make_mesh,
    parameter_count,
    parameters_per_token,
    weight_bytes_per_token,
)
from laneformer.blocks.mlp import Mlp
from laneformer.weights import module_weights, parameter_table
from tests.support import tiny

TWO_BILLION = ModelConfig(
    vocab_size=32000,
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=15,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_lanes=8,
    broadcast_delay=2,
    sliding_window=2048,
    sliding_window_n_layers=10,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=(2,),
)


def test_counts_of_the_published_model_are_exact():
    assert parameter_count(TWO_BILLION) == 2_320_069_632
    assert parameters_per_token(TWO_BILLION) == 2_221_765_632
    assert weight_bytes_per_token(TWO_BILLION) == (2_221_765_632 + 3072) * 2
    assert f"{weight_bytes_per_token(TWO_BILLION) / 1e9:.4f} GB" == "4.4435 GB"
    assert weight_bytes_per_token(TWO_BILLION, 4) == 2 * weight_bytes_per_token(TWO_BILLION)
    assert TWO_BILLION.head_size == 96
    shapes = {path: parameter.shape for path, parameter in parameter_table(TWO_BILLION).items()}
    assert shapes["layers.0.attention.wq"] == (8, 4 * 96, 3072)
    assert shapes["layers.14.attention.wk"] == shapes["layers.0.attention.wv"] == (8, 2 * 96, 3072)
    assert shapes["layers.0.feed_forward.w2"] == (8, 3072, 1536)


def test_counts_follow_the_head_and_the_norms():
    assert parameter_count(TWO_BILLION.replace(lm_head_type="vocab_parallel")) == 2_320_069_632
    assert parameter_count(TWO_BILLION.replace(lm_head_type="lane")) == 2_320_069_632 + 7 * 32000 * 3072
    tied = TWO_BILLION.replace(tie_word_embeddings=True)
    assert parameter_count(tied) == parameters_per_token(tied) == 2_221_765_632
    assert parameter_count(TWO_BILLION.replace(replicated_rmsn_scale=False)) == 2_320_069_632 + 7 * 31 * 3072


def test_key_value_bytes_follow_context_and_windows():
    """Keys and values of one position, 16 heads of 96 channels in 16 bits, take 6,144 bytes per layer."""
    assert kv_bytes_per_token(TWO_BILLION) == 15 * 6144
    assert kv_bytes_per_token(TWO_BILLION, 1000) == 15 * 1001 * 6144
    assert kv_bytes_per_token(TWO_BILLION, 2047) == 15 * 2048 * 6144
    # Ten layers read 2,048 positions, including the token's own.
    assert kv_bytes_per_token(TWO_BILLION, 4095) == (5 * 4096 + 10 * 2048) * 6144
    assert kv_bytes_per_token(TWO_BILLION, 4095, 1) * 2 == kv_bytes_per_token(TWO_BILLION, 4095)


@settings(max_examples=60)
@given(
    lanes=st.sampled_from([1, 2, 4]),
    n=st.integers(1, 3),
    head=st.sampled_from(["replicate", "lane", "vocab_parallel"]),
    shared=st.booleans(),
    before=st.booleans(),
    tied=st.booleans(),
    head_dim=st.sampled_from([None, 6]),
)
def test_names_and_sizes_equal_the_reference(lanes, n, head, shared, before, tied, head_dim):
    """The reference has its own list of weights."""
    tied, before = tied and head == "replicate", before and head == "replicate"
    changes = {
        "num_lanes": lanes,
        "num_hidden_layers": n,
        "lm_head_type": head,
        "replicated_rmsn_scale": shared,
        "pre_norm_lane_agg": before,
        "tie_word_embeddings": tied,
        "head_dim": head_dim,
    }
    arrays = tiny.random_weights(tiny.values(**changes))
    config = tiny.config(**changes)
    found = {parameter.file_name: math.prod(parameter.shape) for parameter in parameter_table(config).values()}
    assert found == {name: w.size for name, w in arrays.items()}
    assert parameter_count(config) == sum(w.size for w in arrays.values())


def test_qkv_biases_and_qk_norms_are_counted():
    plain, extra = tiny.config(), tiny.config().replace(qkv_bias=True, qk_norm=True)
    assert parameter_count(extra) - parameter_count(plain) == 3 * ((8 + 4 + 4) * 4 + 2 * 4)


def test_counts_follow_the_share_that_a_token_reads(monkeypatch):
    """A token uses 2 of a block's 8 experts, and looks up 3 values in w2."""
    config, table = tiny.config(), Mlp.table

    def experts(options, path):
        return {
            name: dataclasses.replace(weight, share=2 / 8, looked_up=3 if name.endswith("w2") else 0)
            for name, weight in table(options, path).items()
        }

    count, read, size = parameter_count(config), parameters_per_token(config), weight_bytes_per_token(config)
    monkeypatch.setattr(Mlp, "table", staticmethod(experts))
    mlps = 3 * 3 * 24 * 32
    assert parameter_count(config) == count
    assert parameters_per_token(config) == read - mlps * 6 // 8
    assert weight_bytes_per_token(config) == size - 2 * (mlps * 6 // 8 - 3 * 3)


def test_weights_have_their_groups_and_parts():
    table = parameter_table(tiny.config().replace(qkv_bias=True, qk_norm=True))
    layer = {path.removeprefix("layers.1."): w for path, w in table.items() if path.startswith("layers.1.")}
    matrices = {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")} | {
        f"feed_forward.{name}" for name in ("w1", "w2", "w3")
    }
    assert {path for path, w in layer.items() if w.group == "matrix"} == matrices
    assert {path for path, w in layer.items() if w.group == "vector"} == {*layer} - matrices
    assert {path for path, w in table.items() if w.group == "embedding"} == {"tok_embeddings", "lm_head"}
    assert {path for path, w in layer.items() if w.part == "norms"} == {
        "attention_norm",
        "attention.q_norm",
        "attention.k_norm",
        "ffn_norm",
    }
    assert {w.part for path, w in layer.items() if "feed_forward" in path} == {"MLP"}
    assert [len(weights) for weights in module_weights(tiny.config())] == [5, 4] * 3


@pytest.fixture(scope="module")
def fresh() -> Laneformer:
    """A model with weights from seed 3 on one device."""
    return Laneformer.init(tiny.config(num_hidden_layers=2, replicated_rmsn_scale=False).replace(qkv_bias=True), 3)


def test_mlp_without_a_gate_has_two_matrices(fresh):
    config = fresh.config
    plain = config.replace(gated_mlp=False, hidden_act="relu2")
    assert parameter_table(config).keys() - parameter_table(plain).keys() == {
        f"layers.{n}.feed_forward.w3" for n in range(2)
    }
    assert parameters_per_token(config) - parameters_per_token(plain) == 2 * 24 * 32
    first, other = fresh.weights(), Laneformer.init(plain, 3).weights()
    assert all((np.asarray(other[path]) == np.asarray(first[path])).all() for path in other)


def test_attention_gate_has_a_row_per_channel(fresh):
    config = fresh.config
    gated = config.replace(attention_gate=True)
    table = parameter_table(gated)
    added = table.keys() - parameter_table(config).keys()
    assert added == {f"layers.{n}.attention.{name}" for n in range(2) for name in ("wg", "wg_bias")}
    assert all(table[path].shape == table[path.replace("wg", "wq")].shape for path in added)
    first, other = fresh.weights(), Laneformer.init(gated, 3).weights()
    assert all((np.asarray(other[path]) == np.asarray(first[path])).all() for path in first)


def test_fresh_weights_have_their_deviations(fresh):
    weights = fresh.weights()
    assert list(weights) == list(parameter_table(fresh.config))
    weights = {path: np.asarray(w) for path, w in weights.items()}
    assert (weights["norm"] == 1).all() and (weights["layers.0.attention.wq_bias"] == 0).all()
    assert float(weights["layers.0.attention.wq"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights["layers.1.feed_forward.w2"].std()) == pytest.approx(0.02 / 2, rel=0.1)
    assert float(abs(weights["tok_embeddings"]).max()) <= 0.06
    values = [np.asarray(w).tobytes() for path, w in weights.items() if "norm" not in path and "bias" not in path]
    assert len(set(values)) == len(values)  # no two weights are equal


def test_fresh_weights_follow_seed_and_dtype(fresh):
    other = Laneformer.init(fresh.config, 4, precision=Precision.default("bfloat16")).weights()
    assert {w.dtype.name for w in other.values()} == {"bfloat16"}
    assert (np.asarray(other["lm_head"]) != np.asarray(fresh.weights()["lm_head"]).astype("bfloat16")).any()


def test_fresh_weights_on_a_mesh_are_equal_and_sharded(fresh):
    spread = Laneformer.init(fresh.config, 3, mesh=make_mesh(4, data=2, lane=4)).weights()
    for path, w in fresh.weights().items():
        assert (np.asarray(w) == np.asarray(spread[path])).all(), path
    parts = {path: w.sharding.shard_shape(w.shape) for path, w in spread.items()}
    assert parts["layers.0.attention.wq"] == (1, 8, 16)
    assert parts["layers.0.feed_forward.w2"] == (1, 16, 6)
    assert parts["lm_head"] == (10, 16)
    assert parts["norm"] == (1, 32)
