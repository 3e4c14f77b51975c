"""The chunked cross-entropy against float64 NumPy, for every head, mesh and chunk; collectives and memory."""

import re
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer import Precision, make_mesh
from laneformer.loss import TokenLoss, cross_entropy
from laneformer.mesh import DATA, LANE, lane_spec

BATCH, LENGTH, WIDTH, LANES = 4, 7, 12, 8
Z_LOSS = 0.03
FLOAT32 = Precision()


@dataclass(frozen=True)
class Head:
    """One of the model's heads: shapes and shardings of its arrays, and its arguments for `cross_entropy`."""

    y: tuple[int, ...]
    w: tuple[int, ...]
    y_spec: P
    w_spec: P
    split: bool = True
    add_lanes: bool = False
    cap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.w[1] if self.add_lanes else self.w[0] * self.w[1]

    def loss(self, mesh, *, chunk=3, precision=FLOAT32, z_loss=Z_LOSS):
        """A function of y, w, targets and weights that calls cross_entropy on the mesh as the model does."""
        axis = LANE if mesh is not None and self.split else None

        def local(y, w, targets, weights):
            if axis is not None and LANE not in self.y_spec:
                y = jax.lax.pcast(y, LANE, to="varying")
            return cross_entropy(
                y,
                w,
                targets,
                weights,
                chunk=chunk,
                z_loss=z_loss,
                precision=precision,
                axis=axis,
                add_lanes=self.add_lanes,
                cap=self.cap,
            )

        if mesh is None:
            return local
        in_specs = (*(lane_spec(spec) for spec in (self.y_spec, self.w_spec)), P(), P())
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), axis_names={LANE})

    def arrays(self, batch=BATCH, scale=1.0):
        """y, w, targets and weights. All token ids are targets, including both ends of every slice. One weight is 0."""
        rng = np.random.default_rng(3)
        y, w = (scale * rng.standard_normal(shape).astype(np.float32) for shape in (self.y, self.w))
        targets = rng.permutation(np.arange(BATCH * LENGTH) % self.vocabulary).reshape(BATCH, LENGTH).astype(np.int32)
        weights = rng.uniform(0.1, 2, (BATCH, LENGTH)).astype(np.float32)
        weights[1, 2] = 0
        return y[:, :batch], w, targets[:batch], weights[:batch]

    def put(self, arrays, mesh):
        """The arrays, sharded as in training: weights over both axes, the batch over data."""
        if mesh is None:
            return arrays
        specs = (self.y_spec, self.w_spec, P(DATA), P(DATA))
        return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


SHARED, OF_LANES = P(None, DATA), P(LANE, DATA)
HEADS = {
    "shared, in slices": Head((1, BATCH, LENGTH, WIDTH), (1, 24, WIDTH), SHARED, P(None, LANE, DATA)),
    "shared, whole": Head((1, BATCH, LENGTH, WIDTH), (1, 23, WIDTH), SHARED, P(None, None, DATA), split=False),
    "vocab_parallel": Head((LANES, BATCH, LENGTH, WIDTH), (LANES, 3, WIDTH), OF_LANES, P(LANE, None, DATA), cap=2.0),
    "lane": Head((LANES, BATCH, LENGTH, WIDTH), (LANES, 24, WIDTH), OF_LANES, P(LANE, None, DATA), add_lanes=True),
    "lane, a slice without tokens": Head(
        (LANES, BATCH, LENGTH, WIDTH), (LANES, 17, WIDTH), OF_LANES, P(LANE, None, DATA), add_lanes=True, cap=3.0
    ),
}
MESHES = {"none": None, "1": (1, 1), "2": (1, 2), "4": (1, 4), "8": (1, 8), "2x4": (2, 4)}
FAST = ("none", "2x4")  # no mesh; two lanes per device, and data. The others are slow.

ONE_LANE_EACH = ("lane, a slice without tokens", "8")


def mesh_of(name: str):
    return None if MESHES[name] is None else make_mesh(LANES, data=MESHES[name][0], lane=MESHES[name][1])


def expected(head: Head, y, w, targets, weights, z_loss=Z_LOSS):
    """(total, nll, lse) and the gradient of total for (y, w, weights), in float64."""
    y, w, weights = (np.asarray(x, np.float64) for x in (y, w, weights))
    if head.add_lanes:
        logits = np.einsum("lbsd,lvd->bsv", y, w)
    else:
        logits = np.concatenate(list(np.einsum("lbsd,lvd->lbsv", y, w)), axis=-1)
    slope = 1.0
    if head.cap:
        logits = head.cap * np.tanh(logits / head.cap)
        slope = 1 - (logits / head.cap) ** 2
    highest = logits.max(-1, keepdims=True)
    exp = np.exp(logits - highest)
    lse = np.log(exp.sum(-1)) + highest[..., 0]
    one_hot = targets[..., None] == np.arange(head.vocabulary)
    nll = lse - (logits * one_hot).sum(-1)
    cost = nll + z_loss * lse**2
    dlogits = (
        weights[..., None] * ((1 + 2 * z_loss * lse)[..., None] * exp / exp.sum(-1, keepdims=True) - one_hot) * slope
    )
    dlogits = np.stack([dlogits] * len(w)) if head.add_lanes else np.stack(np.split(dlogits, len(w), axis=-1))
    gradient = np.einsum("lbsv,lvd->lbsd", dlogits, w), np.einsum("lbsv,lbsd->lvd", dlogits, y), cost
    return TokenLoss((weights * cost).sum(), nll, lse), gradient


def loss_and_gradient(loss):
    """A compiled function: arrays -> TokenLoss, and the gradient of half its total for (y, w, weights)."""

    def half(*arrays):
        result = loss(*arrays)
        return result.total / 2, result

    def both(*arrays):
        gradient, result = jax.grad(half, argnums=(0, 1, 3), has_aux=True)(*arrays)
        return result, gradient

    return jax.jit(both)


@cache
def compiled(head: str, mesh: str):
    """The program of `loss_and_gradient` for a head on a mesh, and its arrays."""
    placed = HEADS[head].put(HEADS[head].arrays(), mesh_of(mesh))
    return loss_and_gradient(HEADS[head].loss(mesh_of(mesh))).lower(*placed).compile(), placed


def check(results, expectations, tolerance: float):
    """Every array must be within `tolerance` of the expected one, relative to its largest entry."""
    (loss, gradient), (expected_loss, expected_gradient) = results, expectations
    for found, right in zip((*loss, *gradient), (*expected_loss, *(g / 2 for g in expected_gradient)), strict=True):
        assert found.shape == np.shape(right) and found.dtype == jnp.float32
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize(
    ("head", "mesh"),
    [
        pytest.param(head, mesh, marks=() if mesh in FAST or (head, mesh) == ONE_LANE_EACH else pytest.mark.slow)
        for head in HEADS
        for mesh in MESHES
    ],
)
def test_value_and_gradient_equal_float64(head, mesh):
    program, placed = compiled(head, mesh)
    check(program(*placed), expected(HEADS[head], *HEADS[head].arrays()), 3e-6)


@pytest.mark.parametrize("chunk", [1, 100])
def test_chunk_size_changes_nothing(chunk):
    head = HEADS["shared, in slices"]
    arrays = head.arrays()
    check(loss_and_gradient(head.loss(None, chunk=chunk))(*arrays), expected(head, *arrays), 3e-6)


@pytest.mark.parametrize("mesh", ["none", "2x4"])
def test_without_weights_every_token_counts_once(mesh):
    head = HEADS["vocab_parallel"]
    y, w, targets, _ = head.arrays()
    result = jax.jit(head.loss(mesh_of(mesh), z_loss=0.0))(y, w, targets, None)
    (total, *_), _ = expected(head, y, w, targets, np.ones(targets.shape), z_loss=0.0)
    assert float(result.total) == pytest.approx(total, rel=1e-6)
    assert float(result.total) == pytest.approx(float(result.nll_bs.sum()), rel=1e-6)


@pytest.mark.parametrize("head", ["shared, in slices", "lane"])
def test_batch_that_the_data_axis_does_not_divide_equals_float64(head):
    head = HEADS[head]
    arrays = head.arrays(batch=3)
    check(loss_and_gradient(head.loss(mesh_of("2x4")))(*arrays), expected(head, *arrays), 3e-6)


@pytest.mark.parametrize("mesh", ["none", "8"])
def test_large_logits_keep_their_precision(mesh):
    """Integers make exact logits. Each logit appears twice, so that a target with the highest one has nll = ln 2."""
    head = HEADS["lane"]
    _, _, targets, weights = head.arrays()
    rng = np.random.default_rng(0)
    y, w = (rng.integers(-50, 51, shape).astype(np.float32) for shape in (head.y, head.w))
    w[:, 1::2] = w[:, ::2]
    targets[:2] = np.einsum("lbsd,lvd->bsv", y, w).argmax(-1)[:2]
    right = expected(head, y, w, targets, weights)
    assert right[0].lse_bs.max() > 1e4 and right[0].nll_bs.max() > 1e4
    result, gradient = loss_and_gradient(head.loss(mesh_of(mesh)))(y, w, targets, weights)
    check((result, gradient), right, 3e-6)
    np.testing.assert_allclose(result.nll_bs, right[0].nll_bs, rtol=1e-6)


@pytest.mark.parametrize(("head", "mesh"), [("shared, in slices", "2x4"), ("lane", "none"), ("lane", "8")])
def test_bfloat16_products_have_float32_results(head, mesh):
    head, mesh = HEADS[head], mesh_of(mesh)
    arrays = head.arrays()
    program = loss_and_gradient(head.loss(mesh, precision=Precision(compute="bfloat16")))
    placed = head.put(arrays, mesh)
    check(program(*placed), expected(head, *arrays), 0.02)
    text = program.lower(*placed).as_text()
    assert all("xbf16>" in line for line in text.splitlines() if "stablehlo.all_gather" in line)
    products = re.findall(r"dot_general.*: \((.*)\) -> (.*)", text)
    assert len(products) == 3
    for operands, result in products:
        assert operands.count("xbf16>") == 2 and "xf32>" in result


def test_gradients_have_the_dtype_of_their_weights():
    head = HEADS["shared, whole"]
    y, w, *rest = head.arrays()
    w = w.astype(jnp.bfloat16)
    _, gradient = loss_and_gradient(head.loss(None))(y, w, *rest)
    _, (_, right, _) = expected(head, y, w, *rest)
    assert gradient[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient[1].astype(np.float32), right / 2, rtol=2**-7, atol=1e-6)


def test_metrics_have_no_gradient():
    head = HEADS["shared, whole"]
    y, *rest = head.arrays()

    def metrics(y):
        result = head.loss(None)(y, *rest)
        return result.nll_bs.sum() + result.lse_bs.sum()

    assert not jax.jit(jax.grad(metrics))(y).any()


@pytest.mark.parametrize("head", HEADS)
def test_products_and_collectives_are_written_once_for_all_chunks(head):
    head, mesh, length = HEADS[head], mesh_of("2x4"), 60
    tokens = [jax.ShapeDtypeStruct((BATCH, length), dtype) for dtype in (jnp.int32, jnp.float32)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*head.y[:2], length, WIDTH), head.w)]
    loss = head.loss(mesh)

    def counts(program) -> list[int]:
        text = program.lower(*shapes, *tokens).as_text()
        return [text.count(f"stablehlo.{op}") for op in ("dot_general", "all_reduce", "reduce_scatter", "all_gather")]

    over_softmax = 2 if head.split else 0
    over_dy = 1 if head.split and LANE not in head.y_spec else 0
    of_logits = 1 if head.add_lanes else 0
    assert counts(jax.jit(loss)) == [1, over_softmax, of_logits, 0]
    assert counts(loss_and_gradient(loss)) == [3, over_softmax + over_dy, of_logits, of_logits]


@pytest.mark.parametrize("head", HEADS)
def test_data_axis_communicates_once_for_all_chunks(head):
    """The compiled loop communicates only over lanes. Outside the loop, weights are gathered once and their gradient is
    summed once.
    """
    program = compiled(head, "2x4")[0].as_text()
    head = HEADS[head]
    collectives = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
    loop, outside = ([text.count(f" {op}(") for op in collectives] for text in program.split("\nENTRY "))
    of_logits = 1 if head.add_lanes else 0
    over_dy = 1 if head.split and LANE not in head.y_spec else 0
    assert loop == [2 if head.split else 0, of_logits, of_logits, 0, 0]
    assert outside == [1 + over_dy, 0, 1, 0, 0]


@pytest.mark.parametrize("mesh", ["none", "8"])
def test_memory_grows_with_the_chunk_and_not_with_the_length(mesh):
    mesh, batch, width, vocabulary = mesh_of(mesh), 2, 8, 8192
    head = Head((1, batch, 0, width), (1, vocabulary, width), SHARED, P(None, LANE, DATA))

    def temporary(length: int, chunk: int) -> int:
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, batch, length, width), head.w)]
        tokens = [jax.ShapeDtypeStruct((batch, length), dtype) for dtype in (jnp.int32, jnp.float32)]
        program = loss_and_gradient(head.loss(mesh, chunk=chunk))
        return program.lower(*floats, *tokens).compile().memory_analysis().temp_size_in_bytes

    logits_of_a_position = 4 * batch * vocabulary // (1 if mesh is None else 8)
    short, long, unchunked = temporary(128, 16), temporary(512, 16), temporary(512, 512)
    assert long < 1.2 * short
    assert long < 100 * logits_of_a_position
    assert unchunked > 512 * logits_of_a_position
