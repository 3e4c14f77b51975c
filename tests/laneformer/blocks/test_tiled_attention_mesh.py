"""cuDNN's kernel on meshes: with a stand-in for the kernel on CPU devices, and compiled for GPUs that this machine need
not have.
"""

import importlib.util
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer import Laneformer, make_mesh
from laneformer.blocks import tiled_attention as attention
from laneformer.mesh import DATA, LANE
from tests.support.attention_reference import assert_close, expected, on_lanes, random_inputs
from tests.support.paths import ROOT
from tests.support.tiny import config, token_ids

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


@pytest.fixture
def kernel_calls(monkeypatch) -> list:
    """Replaces cuDNN by jax.nn's attention in plain XLA, for any dtype. Returns a list with q's shape and the manual
    axes of each call.
    """
    calls, dot_product_attention = [], jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **options):
        calls.append((q.shape, set(jax.sharding.get_abstract_mesh().manual_axes)))
        return dot_product_attention(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(attention, "_has_cudnn_kernel", lambda q: True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return calls


@pytest.mark.parametrize(("data", "lane", "window"), [(2, 4, None), (4, 2, 20)])
def test_mesh_equals_float64_without_exchange(kernel_calls, data, lane, window):
    inputs, mesh = random_inputs(l=4, b=4, s=40, group=2), make_mesh(4, data=data, lane=lane)
    here = NamedSharding(mesh, P(LANE, DATA))
    args = jax.device_put(inputs, here)
    program = on_lanes(mesh, window).lower(*args).compile()
    assert kernel_calls == [((40, 4, 8), {DATA, LANE})]
    found = program(*args)
    assert all(x.sharding.is_equivalent_to(here, x.ndim) for x in found)
    assert not [name for name in COLLECTIVES if name in program.as_text()]
    assert_close(found, expected(*inputs, window=window))


def test_batch_that_devices_cannot_share_equals_float64(kernel_calls):
    """Each device computes the whole batch."""
    inputs = random_inputs(l=4, b=3, s=12)
    assert_close(on_lanes(make_mesh(4, data=2, lane=4))(*inputs), expected(*inputs))
    assert len(kernel_calls) == 1


def test_checkpoint_in_a_loop_equals_float64(kernel_calls):
    """As in a training step with remat and accumulated gradients."""
    inputs, mesh = random_inputs(l=4, b=4, s=12), make_mesh(4, data=2, lane=4)

    def twice(function):
        checkpointed = jax.checkpoint(function, policy=jax.checkpoint_policies.nothing_saveable)
        return lambda *qkv: jax.lax.scan(lambda o, _: (o + checkpointed(*qkv) / 2, None), 0 * qkv[0], length=2)[0]

    assert_close(on_lanes(mesh, wrap=twice)(*inputs), expected(*inputs))
    assert kernel_calls


@pytest.mark.slow  # compiles two training programs
def test_model_with_the_kernel_equals_the_tiles(kernel_calls, monkeypatch):
    """The loss and every weight's gradient are the same with the kernel and with the tiles."""
    model, ids = Laneformer.init(config(num_hidden_layers=1), mesh=make_mesh(4, data=2, lane=4)), token_ids(40, (4, 13))

    def loss_and_gradients():
        return jax.jit(jax.value_and_grad(lambda model: model.loss(ids[:, :-1], ids[:, 1:])[0]))(model)

    found = loss_and_gradients()
    assert kernel_calls == [((12, 2, 4), {DATA, LANE})]
    monkeypatch.setattr(attention, "_has_cudnn_kernel", lambda q: False)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(loss_and_gradients()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_device_of_the_mesh_decides():
    """This machine's device does not decide, because a program can be compiled for GPUs of another machine."""
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    q = jax.ShapeDtypeStruct((1, 1, 4096, 2, 64), "bfloat16")
    assert not attention._has_cudnn_kernel(q) and attention._block_sizes(4096, 4096) == (128, 128)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 4), (DATA, LANE), abstract_device=h200)):
        assert attention._has_cudnn_kernel(q) and attention._block_sizes(4096, 4096) == (256, 256)


COMPILE = """
import sys
import jax
from laneformer import make_mesh
from laneformer.mesh import DATA, LANE
from tests.support.attention_reference import on_lanes
from laneformer.train.planning.cluster import find_device
from laneformer.train.planning.compile_only import OPTIONS, compile_only_devices

data, lane = map(int, sys.argv[1:])
mesh = make_mesh(8, data=data, lane=lane, devices=compile_only_devices("h200", find_device("h200", 8), 1, "cuda")[0])
sharding = jax.NamedSharding(mesh, jax.P(LANE, DATA))
q, k = (jax.ShapeDtypeStruct((8, 8, 128, heads, 64), "bfloat16", sharding=sharding) for heads in (2, 1))
print(on_lanes(mesh, 100).lower(q, k, k, q).compile(OPTIONS["cuda"]).as_text())
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins"), reason="needs jax's CUDA plugin: pip install 'jax[cuda12]'"
)
@pytest.mark.parametrize("mesh", ["1 8", "2 4", "8 1"])
def test_gpu_program_has_the_kernel_and_no_exchange(mesh):
    """The program calls cuDNN's two kernels on each device's eighth of the sequences, and exchanges nothing. Compiling
    it needs no GPU.
    """
    run = [sys.executable, "-c", COMPILE, *mesh.split()]
    text = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300).stdout
    calls = re.findall(r"= \((bf16\S+?)\{.* custom_call_target=\"(__cudnn\S+)\"", text)
    assert sorted(calls) == [
        ("bf16[8,2,128,64]", "__cudnn$fmhaSoftmax"),
        ("bf16[8,2,128,64]", "__cudnn$fmhaSoftmaxBackward"),
    ]
    assert not [name for name in COLLECTIVES if name in text]
