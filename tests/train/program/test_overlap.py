"""Overlaps of exchanges with kernels, in programs written by hand with known times and in recorded steps of the 2B as
XLA:GPU orders them.

tests/support/training/recorded_programs.py recorded the steps.
"""

from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import laneformer as lf
from laneformer.train.planning.cluster import Speeds, find_device, speeds_of
from laneformer.train.program.hlo import Module
from laneformer.train.program.overlap import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    HEAD,
    MERGED,
    OTHER,
    WEIGHTS,
    Overlap,
    overlaps,
)
from laneformer.train.step import PARALLEL, START_EARLY, compiler_options
from laneformer.weights import attention_flops_per_token, matmul_parameters
from tests.support.training.recorded_programs import CASES, model_of, read

# Kernels take 1 s per MB. An all-reduce of 4 MB along 2 lanes sends 4 MB and takes 8 s.
SPEEDS = Speeds(products=1e30, memory=1e6, link=0.5e6, network=1e6, inside=frozenset({"lane"}), members={})
REDUCE = 'replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/jvp()/reduce_0/psum"}'


@pytest.fixture(scope="module")
def mesh():
    return lf.make_mesh(2, data=2, lane=2)


def program(*body: str, before: str = "") -> Module:
    """A program with these instructions. %f is a kernel that reads 1 MB and writes 1 MB in 2 s."""
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
        # each kernel takes 2 s, each exchange 8 s
        ([start("s"), done("s_end", "s"), kernel("a")], Overlap(FORWARD, 1, 0, 0, 8.0, 8.0)),
        ([start("s"), kernel("a"), done("s_end", "s")], Overlap(FORWARD, 1, 0, 1, 8.0, 6.0)),
        ([start("s"), *map(kernel, "abcd"), done("s_end", "s")], Overlap(FORWARD, 1, 1, 0, 8.0, 0.0)),
        ([start("s"), *map(kernel, "abcdef"), done("s_end", "s")], Overlap(FORWARD, 1, 1, 0, 8.0, 0.0)),
        # two exchanges share a link: the second begins when the first has ended
        (
            [start("s"), start("t"), *map(kernel, "abcd"), done("s_end", "s"), *map(kernel, "ef"), done("t_end", "t")],
            Overlap(FORWARD, 2, 1, 1, 16.0, 4.0),
        ),
        # waiting for the second exchange includes waiting for the first
        (
            [start("s"), start("t"), *map(kernel, "ab"), done("t_end", "t"), done("s_end", "s")],
            Overlap(FORWARD, 2, 0, 1, 16.0, 12.0),
        ),
        # the text has no end of the exchange
        ([start("s"), kernel("a")], Overlap(FORWARD, 1, 0, 1, 8.0, 6.0)),
    ],
)
def test_kernels_between_start_and_end_hide_an_exchange(mesh, body, expected):
    assert overlaps(program(X, *body).steps(mesh), SPEEDS) == (expected,)


def test_loops_count_each_iteration(mesh):
    """Three iterations with an exchange and two kernels are followed by an exchange and a loop of four kernels."""
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
    """The network takes 4 s for an all-reduce of 4 MB along the data axis, while the link takes 8 s for another."""
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
def test_purpose_follows_from_axis_and_scope(mesh, name, op, groups, purpose):
    attributes = f"replica_groups={{{groups}}}" + (f', metadata={{op_name="{name}"}}' if name else "")
    lines = [f"%s = f32[1000000] {op}-start(%x), {attributes}", f"%d = f32[1000000] {op}-done(%s)"]
    [found] = overlaps(program(X, *lines).steps(mesh), SPEEDS)
    assert found.purpose == purpose


def test_programs_without_pairs_have_no_figure(mesh):
    """XLA:CPU runs an exchange as one instruction. A program without exchanges has no overlaps either."""
    assert overlaps(program(X, f"%r = f32[1000000] all-reduce(%x), {REDUCE}").steps(mesh), SPEEDS) is None
    assert overlaps(program(X, kernel("a")).steps(mesh), SPEEDS) == ()


@cache
def recorded(*case: str) -> dict[str, Overlap]:
    mesh = lf.make_mesh(8, lane=8)
    found = overlaps(Module(read(*case)).steps(mesh), speeds_of(find_device("h200", 8), dict(mesh.shape)))
    return {overlap.purpose: overlap for overlap in found}


@pytest.mark.parametrize("remat", [case[1] for case in CASES if case[0] == "dtp(4)" and case[2] == "float32"])
def test_products_hide_all_delayed_sums(remat):
    """At the sizes of the 2B, each pass sends 4 of 8 sums, each of 403 MB and 1.57 ms on NVLink. The backward pass also
    sends the sum of the embedding's gradient.
    """
    found = recorded("dtp(4)", remat)
    assert (found[FORWARD].count, found[BACKWARD].count) == (4, 4 + 1)
    assert found[FORWARD].seconds == pytest.approx(4 * 8 * 4096 * 3072 * 4 * 2 * 7 / 8 / 450e9)
    for purpose in (FORWARD, BACKWARD):
        assert found[purpose].hidden == found[purpose].count
        assert found[purpose].exposed == 0


def test_sums_that_are_used_at_once_are_exposed():
    """All sums of tp are exposed. With ladder, they are exposed in part: attention takes less time than its sum."""
    tp, ladder = recorded("tp")[FORWARD], recorded("ladder")[FORWARD]
    assert tp.alone == tp.count == 8 and tp.exposed == pytest.approx(tp.seconds, rel=0.01)
    assert ladder.alone <= 1 and ladder.exposed < 0.3 * ladder.seconds


def test_recorded_products_are_those_of_the_model():
    """A token takes 6 FLOPs per weight, without the embedding, and 3.5 times the FLOPs of attention's forward pass: the
    backward pass of cuDNN has five products instead of two. With remat there would be more.
    """
    model = model_of("tp")
    tokens = 8 * 4096
    attention = attention_flops_per_token(model, 4096) * tokens / 8
    expected = 6 * matmul_parameters(model) * tokens / 8 + 3.5 * attention
    kernels = Module(read("tp")).kernels
    assert sum(k.flops * k.times for k in kernels) == pytest.approx(expected, rel=1e-3)


def test_bfloat16_halves_exchanges_and_saves_traffic():
    """Delayed sums and their gradients have half the bytes. The sum of the embedding's gradient remains float32.

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


def test_gpu_options_are_known_to_this_jaxlib():
    """jaxlib raises an error for an unknown option, also if it compiles for the CPU."""
    for option, value in ((START_EARLY, True), (PARALLEL, 4)):
        jax.jit(lambda x: x + 1).lower(1.0).compile({option: value})


@pytest.mark.parametrize(("layout", "expected"), [("tp", None), ("ladder", 6), ("dtp(4)", 12), ("none", None)])
def test_options_follow_the_schedule(layout, expected):
    """2 x (sums in flight + 1) exchanges run in parallel. Without delays, and on CPUs, the option is not set."""
    schedule = model_of(layout).replace(num_hidden_layers=6).schedule
    gpu = SimpleNamespace(shape={"lane": 8}, devices=np.array([SimpleNamespace(platform="gpu")]))
    assert compiler_options(schedule, gpu).get(PARALLEL) == expected
    assert compiler_options(schedule, gpu).get(START_EARLY) == (None if expected is None else True)
    assert not {PARALLEL, START_EARLY} & {*compiler_options(schedule, lf.make_mesh(8, lane=8))}
