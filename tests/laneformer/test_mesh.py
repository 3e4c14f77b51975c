"""Meshes: shapes, errors, and models on meshes that fit them or do not."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from laneformer import ConfigError, Laneformer, Precision, make_mesh, use_host_devices
from laneformer.mesh import fit_spec, lane_spec
from tests.support import tiny
from tests.support.paths import ROOT


@given(lanes=st.integers(1, 12), data=st.integers(1, 8))
def test_default_lane_axis_is_the_largest_that_fits(lanes, data):
    mesh = make_mesh(lanes, data=data)
    assert dict(mesh.shape)["data"] == data
    lane = mesh.shape["lane"]
    assert lanes % lane == 0 and data * lane <= 8
    assert not any(lanes % n == 0 and data * n <= 8 for n in range(lane + 1, lanes + 1))


def test_make_mesh_uses_the_given_devices():
    devices = jax.devices()[3:6]
    assert make_mesh(8, devices=devices).devices.ravel().tolist() == devices[:2]
    assert make_mesh(8, data=2, lane=4).devices.shape == (2, 4)
    assert set(make_mesh(8).axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("lanes", "options", "message"),
    [
        (8, {"lane": 3}, "lane = 3 must divide 8 lanes; choose 1, 2, 4, 8$"),
        (8, {"lane": 0}, "lane = 0"),
        (8, {"lane": -2}, "lane = -2"),
        (8, {"lane": 16}, "lane = 16"),
        (8, {"data": 2, "lane": 8}, "data = 2 x lane = 8 needs 16 devices, but only 8"),
        (8, {"data": 0}, "data = 0 must be 1 to 8"),
        (8, {"data": 9}, "data = 9"),
    ],
)
def test_impossible_meshes_are_refused(lanes, options, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(lanes, **options)


def test_other_number_of_host_devices_after_start_is_refused():
    assert len(jax.devices("cpu")) == 8
    use_host_devices(8)  # the same number is allowed
    with pytest.raises(ConfigError, match=r"4 CPU devices.* with 8; call use_host_devices"):
        use_host_devices(4)


@pytest.mark.parametrize("devices", [3, 8])
def test_mesh_that_does_not_divide_the_lanes_is_refused(devices):
    """Without the check the model would run, with lanes lost or counted twice."""
    values = tiny.values()
    mesh = make_mesh(devices)
    with pytest.raises(ConfigError, match=rf"lane axis of {devices} devices .* 4 lanes.*make_mesh\(4\)"):
        tiny.model_of(values, tiny.random_weights(values), mesh)
    with pytest.raises(ConfigError, match=rf"lane axis of {devices} devices .* 4 lanes"):
        Laneformer.init(tiny.config(), mesh=mesh)


def test_mesh_with_other_axes_is_refused():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    with pytest.raises(ConfigError, match=r"axes model; .*make_mesh\(4\)"):
        Laneformer.init(tiny.config(), mesh=mesh)


def test_bfloat16_stream_on_several_cpu_devices_is_refused():
    """XLA:CPU aborts the process when it compiles a bfloat16 sum over devices."""
    with pytest.raises(ConfigError, match=r"precision.stream = 'bfloat16'.*float32, or one device"):
        tiny.random_model(tiny.values(), lane_devices=2, precision=Precision(stream="bfloat16"))
    values = tiny.values(num_hidden_layers=1)
    one = tiny.random_model(values, lane_devices=1, precision=Precision(stream="bfloat16"))
    assert np.isfinite(one(tiny.token_ids(40))).all()


def test_fit_spec_drops_axes_that_do_not_divide():
    mesh = make_mesh(4, data=2, lane=4)
    assert fit_spec(P("lane", "data"), (40, 32), mesh) == P("lane", "data")
    assert fit_spec(P("lane", "data"), (41, 32), mesh) == P(None, "data")
    assert fit_spec(P("lane", "data"), (40, 31), mesh) == P("lane", None)
    assert fit_spec(P(("data", "lane")), (8,), mesh) == P(("data", "lane"))
    assert fit_spec(P(("data", "lane")), (4,), mesh) == P(None)
    assert lane_spec(P("lane", None, "data")) == P("lane", None, None)


def test_batch_that_the_data_axis_does_not_divide_has_the_same_logits():
    """Three sequences on a data axis of 2: the batch cannot be split, so that every device has the whole cache."""
    values = tiny.values(num_hidden_layers=1)
    model = tiny.model_of(values, tiny.random_weights(values), make_mesh(4, data=2, lane=4))
    ids = tiny.token_ids(40, (3, 5))
    logits, _ = model.extend(ids, model.make_cache(3, 5))
    assert tiny.difference(logits, tiny.random_model(values)(ids)) < 1e-4


@pytest.mark.parametrize(
    "head",
    [
        "replicate",
        pytest.param("lane", marks=pytest.mark.slow),
        pytest.param("vocab_parallel", marks=pytest.mark.exhaustive),
    ],
)
def test_mesh_of_data_alone_equals_one_device(head):
    """On a mesh that splits only the batch, logits, cache, loss and gradients equal those of one device."""
    values = tiny.values(num_hidden_layers=1, lm_head_type=head)
    weights, ids = tiny.random_weights(values), tiny.token_ids(40, (4, 6))

    def run(mesh):
        model = tiny.model_of(values, weights, mesh)
        logits, cache = model.extend(ids[:, :5], model.make_cache(4, 5))
        objective = jax.jit(jax.value_and_grad(lambda model: model.loss(ids[:, :-1], ids[:, 1:])[0]))
        return logits, cache, objective(model)

    for alone, split in zip(
        *(jax.tree.leaves(run(mesh)) for mesh in (None, make_mesh(4, data=2, lane=1))), strict=True
    ):
        np.testing.assert_allclose(split, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_many_queued_passes_do_not_deadlock():
    """Eight devices from XLA_FLAGS, with hundreds of passes in flight: XLA's default pool of 8 threads would hang."""
    program = """
import jax, laneformer, numpy as np
config = laneformer.ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                num_attention_heads=8, num_key_value_heads=8, num_lanes=8, layout="tp")
model = laneformer.Laneformer.init(config, mesh=laneformer.make_mesh(8))
assert dict(model.mesh.shape) == {"data": 1, "lane": 8}
step = jax.jit(lambda model, ids: model(ids).argmax(-1).astype(np.int32))
ids = np.zeros((1, 4), np.int32)
for _ in range(400):
    ids = step(model, ids)
print(ids.shape)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "(1, 4)" in done.stdout, done.stderr
