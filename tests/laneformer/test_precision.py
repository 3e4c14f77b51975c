"""The einsum of a Precision, against NumPy, and its gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Precision

SIZES = {"l": 2, "g": 3, "b": 2, "s": 5, "d": 8, "h": 3, "v": 7}
OF_POSITIONS = ["lbsd,lvd->lbsv", "lbsd,lvd->bslv", "lgbsd,lvd->gbsv", "lbshd,lhvd->lbshv"]
OTHERS = ["lgbsd,lgbsv->lgdv", "sd,vd->sv", "lbd,lvd->lbv"]


def operands(subscripts):
    random = np.random.default_rng(1)
    shapes = [[SIZES[letter] for letter in of] for of in subscripts.split("->")[0].split(",")]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("subscripts", OF_POSITIONS + OTHERS)
def test_einsum_equals_numpy(subscripts):
    x, w = operands(subscripts)
    expected = np.einsum(subscripts, *(a.astype(np.float64) for a in (x, w)))
    y = Precision().einsum(subscripts, jnp.asarray(x), jnp.asarray(w))
    assert y.shape == expected.shape and y.dtype == np.float32
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("subscripts", OF_POSITIONS[:1] + OTHERS[:1])
def test_both_factors_are_rounded_to_the_compute_dtype(subscripts):
    factors = operands(subscripts)
    rounded = [np.asarray(factor.astype("bfloat16"), np.float64) for factor in factors]
    y = Precision(compute="bfloat16").einsum(subscripts, *map(jnp.asarray, factors))
    np.testing.assert_allclose(y, np.einsum(subscripts, *rounded), atol=1e-5)


@pytest.mark.parametrize("subscripts", OF_POSITIONS)
def test_gradient_contracts_positions_as_one_axis(subscripts):
    x, w = operands(subscripts)
    gradient = jax.grad(lambda w: Precision().einsum(subscripts, x, w).sum())
    [axes] = re.findall(r"contracting_dims = \[([\d, ]+)\]", jax.jit(gradient).lower(w).as_text())
    assert len(axes.split(",")) == 1 + ("l" not in subscripts.split("->")[1])
