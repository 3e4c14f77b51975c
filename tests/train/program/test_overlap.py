"""Exchanges beside kernels: programs written by hand, whose times are known, and steps of the 2B in XLA:GPU's order.

tests/support/training/recorded_programs.py made the recorded ones.
"""

from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import laneformer as lf
from laneformer.weights import attention_flops_per_token, matmul_parameters
from tests.support.training.recorded_programs import CASES, model_of, read
from train.planning.cluster import Speeds, find_device, speeds_of
from train.program.hlo import Module
from train.program.overlap import BACKWARD, FORWARD, GRADIENTS, HEAD, MERGED, OTHER, WEIGHTS, Overlap, overlaps
from train.step import PARALLEL, START_EARLY, compiler_options

# 8 MB of products' bytes take 8 s, and so does an all-reduce of 4 MB along 2 lanes: it sends 4 MB.
SPEEDS = Speeds(products=1e30, memory=1e6, link=0.5e6, network=1e6, inside=frozenset({"lane"}), members={})
REDUCE = 'replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/jvp()/reduce_0/psum"}'


@pytest.fixture(scope="module")
def mesh():
    return lf.make_mesh(2, data=2, lane=2)


def program(*body: str, before: str = "") -> Module:
    """A program of these instructions; %k reads and writes 1 MB each: 2 s. %r is 1 MB."""
    kernel = "%f (p: f32[250000]) -> f32[250000] {\n  %p = f32[250000] parameter(0)\n"
    kernel += "  ROOT %n = f32[250000] negate(%p)\n}\n"
    lines = "\n".join(f"  {line}" for line in body)
    return Module(f"{kernel}\n{before}\nENTRY %main (x: f32[250000]) -> f32[250000] {{\n{lines}\n}}\n")


def kernel(name: str, of: str = "%x") -> str:
    return f"%{name} = f32[250000] fusion({of}), kind=kLoop, calls=%f"


def start(name: str, attributes: str = REDUCE) -> str:
    return f"%{name} = f32[1000000] all-reduce-start(%x), {attributes}"


def done(name: str, of: str) -> str:
    return f"%{name} = f32[1000000] all-reduce-done(%{of})"


X = "%x = f32[250000] parameter(0)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # kernels of 2 s each, exchanges of 8 s each
        ([start("s"), done("s_end", "s"), kernel("a")], Overlap(FORWARD, 1, 0, 0, 8.0, 8.0)),
        ([start("s"), kernel("a"), done("s_end", "s")], Overlap(FORWARD, 1, 0, 1, 8.0, 6.0)),
        ([start("s"), *map(kernel, "abcd"), done("s_end", "s")], Overlap(FORWARD, 1, 1, 0, 8.0, 0.0)),
        ([start("s"), *map(kernel, "abcdef"), done("s_end", "s")], Overlap(FORWARD, 1, 1, 0, 8.0, 0.0)),
        # two on the same link: the second begins when the first has ended
        (
            [start("s"), start("t"), *map(kernel, "abcd"), done("s_end", "s"), *map(kernel, "ef"), done("t_end", "t")],
            Overlap(FORWARD, 2, 1, 1, 16.0, 4.0),
        ),
        # a wait for the second is one for the first, too
        (
            [start("s"), start("t"), *map(kernel, "ab"), done("t_end", "t"), done("s_end", "s")],
            Overlap(FORWARD, 2, 0, 1, 16.0, 12.0),
        ),
        # no end in the text
        ([start("s"), kernel("a")], Overlap(FORWARD, 1, 0, 1, 8.0, 6.0)),
    ],
)
def test_kernels_between_start_and_end_hide_an_exchange(mesh, body, expected):
    assert overlaps(program(X, *body).steps(mesh), SPEEDS) == (expected,)


def test_loops_count_each_iteration(mesh):
    """Three iterations of an exchange with two kernels beside it; then one with a loop of four kernels beside it."""
    inner = "\n".join(f"  {line}" for line in (X, start("s"), kernel("a"), kernel("b"), done("s_end", "s")))
    plain = f"  {X}\n  {kernel('k')}"
    bodies = (
        f"%body (x: f32[250000]) -> f32[250000] {{\n{inner}\n}}\n%plain (x: f32[250000]) -> f32[250000] {{\n{plain}\n}}"
    )
    loop = '%{} = f32[250000] while(%x), body=%{}, backend_config={{"known_trip_count":{{"n":"{}"}}}}'
    module = program(
        X, loop.format("w", "body", 3), start("t"), loop.format("v", "plain", 4), done("t_end", "t"), before=bodies
    )
    assert overlaps(module.steps(mesh), SPEEDS) == (Overlap(FORWARD, 4, 1, 3, 32.0, 12.0),)


def test_links_and_network_run_side_by_side(mesh):
    """Along the data axis the network takes an all-reduce of 4 MB in 4 s, while the link has its own."""
    data = 'replica_groups={{0,2},{1,3}}, to_apply=%add, metadata={op_name="jit(f)/transpose(jvp())/psum"}'
    body = [
        start("s"),
        start("t", data),
        *map(kernel, "ab"),
        done("t_end", "t"),
        *map(kernel, "cd"),
        done("s_end", "s"),
    ]
    found = overlaps(program(X, *body).steps(mesh), SPEEDS)
    assert found == (Overlap(FORWARD, 1, 1, 0, 8.0, 0.0), Overlap(GRADIENTS, 1, 1, 0, 4.0, 0.0))


def test_wrapped_exchanges_are_read(mesh):
    wrapped = f"%w (x: f32[1000000]) -> f32[500000] {{\n  %r = f32[500000] reduce-scatter(%x), {REDUCE}\n}}"
    lines = ["%s = ((f32[1000000]), f32[500000]) async-start(%x), calls=%w", kernel("a")]
    lines += ["%d = f32[500000] async-done(%s)"]
    assert overlaps(program(X, *lines, before=wrapped).steps(mesh), SPEEDS) == (Overlap(FORWARD, 1, 0, 1, 4.0, 2.0),)


@pytest.mark.parametrize(
    ("name", "op", "groups", "purpose"),
    [
        ("jit(f)/jvp()/reduce_12/psum", "all-reduce", "{0,1},{2,3}", FORWARD),
        ("jit(f)/transpose(jvp())/landing_3/psum", "all-reduce", "{0,1},{2,3}", BACKWARD),
        ("jit(f)/transpose(jvp())/head/psum", "all-reduce", "{0,1},{2,3}", HEAD),
        ("jit(f)/jvp()/loss/while/pmax", "all-reduce", "{0,1},{2,3}", HEAD),
        ("jit(f)/reduce_max", "all-reduce", "{0,1},{2,3}", OTHER),
        ("jit(f)/jvp()/layer_0_mlp/dot", "all-gather", "{0,2},{1,3}", WEIGHTS),
        ("jit(f)/transpose(jvp())/layer_0_mlp/dot", "all-reduce", "{0,2},{1,3}", GRADIENTS),
        ("", "all-reduce", "{0,1},{2,3}", MERGED),
    ],
)
def test_purposes(mesh, name, op, groups, purpose):
    attributes = f"replica_groups={{{groups}}}" + (f', metadata={{op_name="{name}"}}' if name else "")
    lines = [f"%s = f32[1000000] {op}-start(%x), {attributes}", f"%d = f32[1000000] {op}-done(%s)"]
    [found] = overlaps(program(X, *lines).steps(mesh), SPEEDS)
    assert found.purpose == purpose


def test_programs_without_pairs_have_no_figure(mesh):
    """XLA:CPU runs an exchange as one instruction; without any exchange nothing is exposed."""
    assert overlaps(program(X, f"%r = f32[1000000] all-reduce(%x), {REDUCE}").steps(mesh), SPEEDS) is None
    assert overlaps(program(X, kernel("a")).steps(mesh), SPEEDS) == ()


@cache
def recorded(*case: str) -> dict[str, Overlap]:
    mesh = lf.make_mesh(8, lane=8)
    found = overlaps(Module(read(*case)).steps(mesh), speeds_of(find_device("h200", 8), dict(mesh.shape)))
    return {overlap.purpose: overlap for overlap in found}


@pytest.mark.parametrize("remat", [case[1] for case in CASES if case[0] == "dtp(4)" and case[2] == "float32"])
def test_products_hide_all_delayed_sums(remat):
    """Forward and backward, at the sizes of the 2B: 4 of 8 sums are sent, each 403 MB and 1.57 ms on NVLink. The
    backward pass has one more, of the embedding.
    """
    found = recorded("dtp(4)", remat)
    assert (found[FORWARD].count, found[BACKWARD].count) == (4, 4 + 1)
    assert found[FORWARD].seconds == pytest.approx(4 * 8 * 4096 * 3072 * 4 * 2 * 7 / 8 / 450e9)
    for purpose in (FORWARD, BACKWARD):
        assert found[purpose].hidden == found[purpose].count
        assert found[purpose].exposed == 0


def test_sums_that_are_used_at_once_are_exposed():
    """In Megatron's layout, and for ladder where attention is shorter than its sum."""
    tp, ladder = recorded("tp")[FORWARD], recorded("ladder")[FORWARD]
    assert tp.alone == tp.count == 8 and tp.exposed == pytest.approx(tp.seconds, rel=0.01)
    assert ladder.alone <= 1 and ladder.exposed < 0.3 * ladder.seconds


def test_recorded_products_are_those_of_the_model():
    """6 FLOPs for each weight and token but the embedding's, and 3 times attention's of the forward pass; with remat
    more. cuDNN's backward pass has five products for two.
    """
    model = model_of("tp")
    tokens = 8 * 4096
    attention = attention_flops_per_token(model, 4096) * tokens / 8
    expected = 6 * matmul_parameters(model) * tokens / 8 + 3.5 * attention
    kernels = Module(read("tp")).kernels
    assert sum(k.flops * k.times for k in kernels) == pytest.approx(expected, rel=1e-3)


def test_bfloat16_halves_exchanges_and_saves_traffic():
    """Every delayed sum and its gradient are sent in half the bytes; the sum of the embedding's gradient stays float32.
    Results of products in bfloat16 save a fifth of the traffic.
    """
    wide, narrow = recorded("dtp(4)", "dots"), recorded("dtp(4)", "dots", "bfloat16")
    assert narrow[FORWARD].seconds == pytest.approx(wide[FORWARD].seconds / 2)
    assert narrow[BACKWARD].seconds == pytest.approx(wide[BACKWARD].seconds * (4 / 2 + 1) / 5)
    assert narrow[FORWARD].exposed == narrow[BACKWARD].exposed == 0
    traffic = {
        dtype: sum(k.bytes * k.times for k in Module(read("dtp(4)", "dots", dtype)).kernels)
        for dtype in ("float32", "bfloat16")
    }
    assert traffic["bfloat16"] < 0.85 * traffic["float32"]


def test_options_for_gpus_are_those_that_this_jaxlib_knows():
    """An unknown option fails to compile, so jaxlib's own list is asked, on the CPU."""
    for option, value in ((START_EARLY, True), (PARALLEL, 4)):
        jax.jit(lambda x: x + 1).lower(1.0).compile({option: value})


@pytest.mark.parametrize(("layout", "expected"), [("tp", None), ("ladder", 6), ("dtp(4)", 12), ("none", None)])
def test_options_follow_the_schedule(layout, expected):
    """Twice one more than the sums under way at once; none on a CPU, or without delay."""
    schedule = model_of(layout).replace(num_hidden_layers=6).schedule
    gpu = SimpleNamespace(shape={"lane": 8}, devices=np.array([SimpleNamespace(platform="gpu")]))
    assert compiler_options(schedule, gpu).get(PARALLEL) == expected
    assert compiler_options(schedule, gpu).get(START_EARLY) == (None if expected is None else True)
    assert not {PARALLEL, START_EARLY} & {*compiler_options(schedule, lf.make_mesh(8, lane=8))}
