"""Reading the text of compiled programs whose products, memory traffic and exchanges are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import laneformer as lf
from laneformer.train.program.hlo import Collective, Module, _groups


@pytest.fixture(scope="module")
def mesh():
    return lf.make_mesh(4, data=2, lane=4)


def compiled(f, *shapes, **options) -> Module:
    return Module(
        jax.jit(f, **options).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).compile().as_text()
    )


def flops(module: Module) -> int:
    return sum(k.flops * k.times for k in module.kernels)


def traffic(module: Module) -> float:
    return sum(k.bytes * k.times for k in module.kernels)


# JAX function -> kind of exchange, and for a group of g devices the size of the whole array and the bytes sent per
# device, both in units of the array on a device.
EXCHANGES = {
    "psum": ("all-reduce", lambda g: 1, lambda g: 2 * (g - 1) / g),
    "all_gather": ("all-gather", lambda g: g, lambda g: g - 1),
    "psum_scatter": ("reduce-scatter", lambda g: 1, lambda g: (g - 1) / g),
    "all_to_all": ("all-to-all", lambda g: 1, lambda g: (g - 1) / g),
    "ppermute": ("collective-permute", lambda g: 1, lambda g: 1),
}


AXES = [("data", 2), ("lane", 4), (("data", "lane"), 8)]


@pytest.mark.parametrize(
    ("name", "axes", "size"),
    [
        (name, *axes)
        for name in EXCHANGES
        for axes in AXES
        if (name, axes[1]) != ("ppermute", 8)  # JAX permutes along one axis only
    ],
)
def test_exchanges_are_read_along_each_axis(mesh, name, axes, size):
    arguments = {
        "all_gather": {"tiled": True},
        "psum_scatter": {"tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
        "ppermute": {"perm": [(i, (i + 1) % size) for i in range(size)]},
    }.get(name, {})

    def local(x):
        return getattr(jax.lax, name)(x * 2, axes, **arguments)

    f = jax.shard_map(local, mesh=mesh, in_specs=P(("data", "lane")), out_specs=P(("data", "lane")), check_vma=False)
    found = compiled(f, (8 * 1024,)).collectives(mesh)
    kind, full, sent = EXCHANGES[name]
    axis, array = " x ".join(axes) if isinstance(axes, tuple) else axes, 4 * 1024
    if name == "ppermute":
        size = 2  # a permutation exchanges between pairs
    if found[0].kind == "all-reduce" and kind == "reduce-scatter":
        kind, sent = "all-reduce", EXCHANGES["psum"][2]  # XLA:CPU may replace a reduce-scatter
    group = {"data": 2, "lane": 4}.get(axis, 8)
    assert found == [Collective(kind, axis, size, 1, int(array * full(group)), int(array * sent(group)))]


def test_loops_count_once_per_iteration(mesh):
    """A scan of 3 contains a scan of 5 iterations with a product [8, 16] [16, 16] and an all-reduce of [8, 16]."""

    def local(x, w):
        def turn(x, _):
            return jax.lax.psum(jnp.tanh(x @ w), "lane"), None

        def outer(x, _):
            return jax.lax.scan(turn, x, None, length=5)

        return jax.lax.scan(lambda x, _: (outer(x, None)[0], None), x, None, length=3)[0]

    module = compiled(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False), (8, 16), (16, 16)
    )
    assert flops(module) == 3 * 5 * 2 * 8 * 16 * 16
    [found] = module.collectives(mesh)
    assert (found.count, found.bytes, found.axis) == (15, 15 * 8 * 16 * 4, "lane")
    assert module.unknown_loops == ()


def test_loops_of_unknown_length_count_once_and_are_named():
    def f(x, w, n):
        return jax.lax.fori_loop(0, n[0].astype(int), lambda _, x: x @ w, x)

    module = compiled(f, (8, 16), (16, 16), (1,))
    assert flops(module) == 2 * 8 * 16 * 16
    assert len(module.unknown_loops) == 1


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("ij,jk->ik", (8, 16), (16, 32)),
        ("lbsd,lod->lbso", (4, 2, 8, 16), (4, 24, 16)),
        ("ij,ij->", (8, 16), (8, 16)),
        ("abc,cab->b", (4, 6, 8), (8, 4, 6)),
    ],
)
def test_products_count_two_flops_per_term(equation, a, b):
    """The terms are all combinations of indices. XLA may compute a sum of products elementwise, which counts as no
    product.
    """
    sizes = dict(zip("".join(equation.split("->")[0].split(",")), a + b, strict=True))
    counted = flops(compiled(lambda x, y: jnp.einsum(equation, x, y), a, b))
    assert counted in (
        2 * int(np.prod(list(sizes.values()))),
        0 if "->b" in equation or equation.endswith("->") else None,
    )


def test_fused_kernel_reads_and_writes_each_array_once():
    """x and y are read once and the result is written once, although the kernel has several operations."""
    module = compiled(lambda x, y: jnp.tanh(x * y + 1) / y, (1024, 64), (1024, 64))
    assert traffic(module) == 3 * 1024 * 64 * 4


def test_traffic_counts_slices_of_what_a_loop_reads_and_writes():
    """Each of 100 iterations reads a row and writes a row. Counting whole arrays instead would give 100 times as much.

    A copy may read and write each whole array once.
    """

    def f(x):
        return jax.lax.scan(lambda total, row: (total + row, jnp.sin(total * row)), x[0], x)[1]

    row, rows = 4 * 4096, 100
    assert 2 * rows * row < traffic(compiled(f, (rows, 4096))) < 12 * rows * row


def test_groups_are_read_in_every_form():
    """The same four groups of two are listed, counted and transposed, given by mesh axes, and by axes of renumbered
    devices.
    """
    expected = [[0, 4], [1, 5], [2, 6], [3, 7]]
    for text in (
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, x",
        "replica_groups=[4,2]<=[2,4]T(1,0), x",
        "replica_groups=mesh['a'=2,'b'=4] {'a'}, x",
        "replica_groups=mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)) {'a'}, x",
    ):
        assert sorted(_groups(text, 8).tolist()) == expected, text
    assert _groups("replica_groups=[2,4]<=[8], x", 8).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _groups("replica_groups={}, x", 4).tolist() == [[0, 1, 2, 3]]
    assert _groups("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x", 8) is None, "parts of axes are not supported"


GPU = """HloModule m

%fused (p: f32[8,16], q: f32[16,4]) -> f32[8,4] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped (r: f32[64]) -> f32[8] {
  %r = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%r), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[8,16], b: f32[16,4], c: f32[64]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  %c = f32[64]{0} parameter(2)
  %g = ((f32[8,16]{1,0}, bf16[2]{0}), (f32[32,16]{1,0}, /*index=1*/bf16[8]{0})) all-gather-start(%a, %x), replica_groups=[2,4]<=[8], dimensions={0}
  %h = (f32[32,16]{1,0}, bf16[8]{0}) all-gather-done(%g)
  %s = ((f32[64]{0}), f32[8]{0}) async-start(%c), calls=%wrapped
  %y = (f32[8,4]{1,0}, s8[128]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %z = f32[8,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused, backend_config={"n":"(0)"}
}
"""  # noqa: E501


def test_xla_gpu_text_is_read(mesh):
    """The text has started and wrapped exchanges, and products in a fusion and in a call of cuBLAS."""
    module = Module(GPU)
    gathered = 32 * 16 * 4 + 8 * 2
    assert module.collectives(mesh) == [
        Collective("all-gather", "lane", 4, 1, gathered, gathered * 3 // 4),
        Collective("reduce-scatter", "data x lane", 8, 1, 64 * 4, 64 * 4 * 7 // 8),
    ]
    assert flops(module) == 2 * (2 * 8 * 16 * 4)
    assert module.libraries == {"__cublas$gemm": 1}
    assert [k.op for k in module.kernels] == ["custom-call", "fusion"]
    assert module.kernels[1].bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
