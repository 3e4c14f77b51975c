"""Rotary frequencies and rotations against the float64 reference and against formulas by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.blocks.rotary import rotary_frequencies, rotary_tables, rotate
from tests.support import reference, tiny

factors = st.floats(1.0, 40.0)
contexts = st.integers(8, 100_000)
rotated = jax.jit(lambda options, x, positions: rotate(x, rotary_tables(options, positions)), static_argnums=0)
scalings = st.one_of(
    st.just(None),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "original_max_position_embeddings": contexts,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": factors, "original_max_position_embeddings": contexts},
        optional={
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.25, 4.0),
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.0, 2.0),
            "mscale_all_dim": st.floats(0.0, 2.0),
            "truncate": st.booleans(),
        },
    ),
)


def rotary_of(**values):
    """The rotation of all layers of a tiny model with these values in its config.json."""
    return tiny.config(**values).layers[0].attention.rotary


@settings(max_examples=150)
@given(scaling=scalings, theta=st.floats(10.0, 1e6), half=st.integers(1, 64))
def test_frequencies_equal_the_reference(scaling, theta, half):
    values = tiny.values(rope_theta=theta, rope_scaling=scaling, head_dim=2 * half)
    expected, expected_factor = reference.rope_frequencies(values)
    found, factor = rotary_frequencies(rotary_of(rope_theta=theta, rope_scaling=scaling, head_dim=2 * half))
    assert found.dtype == np.float32 and found.shape == (half,)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert factor == pytest.approx(expected_factor, rel=1e-9)


def test_frequencies_equal_values_by_hand():
    found, factor = rotary_frequencies(rotary_of(head_dim=4, rope_theta=100.0))
    assert found.tolist() == pytest.approx([1.0, 0.1]) and factor == 1.0
    found, _ = rotary_frequencies(
        rotary_of(head_dim=4, rope_theta=100.0, rope_scaling={"type": "linear", "factor": 4.0})
    )
    assert found.tolist() == pytest.approx([0.25, 0.025])
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found, _ = rotary_frequencies(  # 63 positions: pairs rotate 10 and 1 times; kept from 4 on, divided up to 1
        rotary_of(head_dim=4, rope_theta=100.0, rope_scaling=llama3 | {"original_max_position_embeddings": 63})
    )
    assert found[0] == 1.0 and found[1] == pytest.approx(0.1 / 8, rel=0.02)
    _, factor = rotary_frequencies(
        rotary_of(rope_scaling={"type": "yarn", "factor": 10.0, "original_max_position_embeddings": 8})
    )
    assert factor == pytest.approx(0.1 * math.log(10.0) + 1)


def test_pairs_are_interleaved_and_positions_count_from_the_start():
    options = rotary_of(head_dim=4, rope_theta=100.0)
    x = np.zeros((3, 2, 4), np.float32)  # [s, heads, e]
    x[..., 0], x[..., 2] = 1.0, 2.0
    turned = np.asarray(rotated(options, x, np.arange(5, 8)))
    for s, position in enumerate((5, 6, 7)):
        for head in range(2):
            expected = [
                math.cos(position),
                math.sin(position),
                2 * math.cos(position / 10),
                2 * math.sin(position / 10),
            ]
            assert turned[s, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_rotation_equals_the_reference():
    values = tiny.values(
        head_dim=8,
        rope_theta=50.0,
        rope_scaling={"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
    )
    x = np.random.default_rng(0).standard_normal((2, 9, 3, 8)).astype(np.float32)
    options = rotary_of(**values)
    turned = rotated(options, x, np.arange(9))
    assert tiny.difference(turned, reference.rotate(values, x.astype(np.float64))) < 1e-5


def test_low_precision_is_rotated_in_float32():
    options = rotary_of(head_dim=8)
    positions = np.arange(4000, 4004)
    x = np.random.default_rng(0).standard_normal((4, 1, 8)).astype(jnp.bfloat16)
    turned = np.asarray(rotated(options, x, positions))
    tables = jax.eval_shape(lambda: rotary_tables(options, positions))
    assert tables[0].dtype == jnp.float32 and turned.dtype == jnp.bfloat16
    assert (turned == np.asarray(rotated(options, x.astype(np.float32), positions)).astype(jnp.bfloat16)).all()
