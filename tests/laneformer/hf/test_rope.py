"""Rotary settings of config.json: every spelling, and the meaning of missing and null ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import ConfigError, RopeScaling
from laneformer.hf import config_from_hf
from laneformer.hf.fields import REQUIRED
from laneformer.hf.rope import interleave
from tests.support import tiny
from tests.support.hf.configs import with_missing

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


def test_all_spellings_of_rope_scaling_are_read():
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
    assert yarn.original_max_position_embeddings == 32  # the longest context, as in transformers


@settings(max_examples=100)
@given(data=st.data(), kind=st.sampled_from(["laneformer", "llama"]), name=st.sampled_from(["scaling", "parameters"]))
def test_null_and_missing_fields_of_rope_scaling_mean_the_default(data, kind, name):
    """The default of a yarn factor is the longest context divided by the original one. Only the type is required."""
    required = {"model_type": kind, "max_position_embeddings": 32} | {n: tiny.BASE[n] for n in REQUIRED}
    optional = {n: value for n, value in SCALING.items() if n not in ("rope_type", "original_max_position_embeddings")}
    kept = {n: SCALING[n] for n in ("rope_type", "original_max_position_embeddings")}
    found = config_from_hf(required | {f"rope_{name}": kept | with_missing(data.draw, optional)})
    assert found.rope_scaling == RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=16)
    assert found.rope_theta == 10000.0


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_null_original_context_means_the_longest_context(kind):
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": None}
    assert tiny.config(rope_scaling=scaling).rope_scaling.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' has no factor"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "'yarn' has no factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor = nan"),
        ({"rope_parameters": [1]}, "rope_parameters = [1]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"rope_scaling_args": 8}, "rope_scaling_args = 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
    ],
)
def test_unsupported_rotation_names_field_and_value(changes, shown):
    with pytest.raises(ConfigError) as error:
        tiny.config(**changes)
    assert shown in str(error.value)


def test_partial_rotary_factor_of_one_means_all_channels():
    assert tiny.config(partial_rotary_factor=1.0) == tiny.config()


def test_interleave_pairs_halves():
    w = np.arange(12).reshape(12, 1)  # two heads of six
    assert interleave(w, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert interleave(np.arange(4), 4).tolist() == [0, 2, 1, 3]
