"""The norm of a stream, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer.blocks.norm import rms_norm


@pytest.mark.parametrize("of", ["itself", "another"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_computed_in_float32(dtype, of):
    random = np.random.default_rng(0)
    x, other = (jnp.asarray(random.standard_normal((3, 96)), dtype) for _ in range(2))
    scale, divided = jnp.asarray(random.standard_normal(96), dtype), x if of == "itself" else other
    y = jax.jit(lambda x, scale, divided: rms_norm(x, scale, 1e-5, None if of == "itself" else divided, True))(
        x, scale, divided
    )
    wide, gain, square = (np.asarray(a, np.float64) for a in (x, scale, divided))
    assert y.dtype == np.float32
    expected = wide / np.sqrt((square**2).mean(-1, keepdims=True) + 1e-5) * (1 + gain)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
