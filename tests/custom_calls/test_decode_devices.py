"""The decode kernel under jax.shard_map: any number of devices in any order gives the results of one device. A call
with missing devices fails.
"""

import sys
import time

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

import laneformer
from laneformer.custom_calls import decode
from tests.support import small

pytestmark = small.needs_library

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
CAPACITY, LIMIT = 48, 25


@pytest.fixture(scope="module")
def model():
    config = small.make_config(lanes=8, layout="dtp(2)")
    return config, small.make_weights(config)


@pytest.fixture(scope="module")
def session(model):
    return small.make_session(*model, threads=2)


def inputs(limit=LIMIT):
    return small.make_inputs(PROMPT, limit, temperature=1.0, top_k=20)


def call_of(session, mesh=None):
    return small.jitted(session, mesh, room=LIMIT, top=2, logits=True)


@pytest.fixture(scope="module")
def expected(model, session):
    return call_of(session)(inputs(), small.make_state(model[0], CAPACITY))


def places(state):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for shard in x.addressable_shards]


def permuted(devices: int) -> Mesh:
    order = np.random.default_rng(devices).permutation(jax.devices())[:devices]
    assert [device.id for device in order] != sorted(device.id for device in order)
    return Mesh(order.reshape(1, devices), ("data", "lane"))


MESHES = {f"{n} devices": lambda n=n: laneformer.make_mesh(8, lane=n) for n in (1, 2, 4, 8)} | {
    f"{n} devices, permuted": lambda n=n: permuted(n) for n in (2, 4, 8)
}


@pytest.mark.parametrize("name", MESHES)
def test_any_devices_give_the_bits_of_one(name, model, session, expected):
    mesh = MESHES[name]()
    state = small.make_state(model[0], CAPACITY, mesh=mesh)
    call, before = call_of(session, mesh), places(state)
    for _ in range(3):  # three calls in a row on the same buffers
        outputs, state = call(inputs(), state._replace(seen=jax.numpy.zeros_like(state.seen)))
        assert small.same((outputs, state), expected)
        assert places(state)[mesh.size :] == before[mesh.size :]  # all arrays except `seen`, which is new here


def test_every_device_has_the_whole_answer(model, session, expected):
    mesh = laneformer.make_mesh(8, lane=4)
    outputs, state = call_of(session, mesh)(inputs(), small.make_state(model[0], CAPACITY, mesh=mesh))
    for array, wanted in zip([*outputs, state.seen], [*expected[0], expected[1].seen], strict=True):
        assert [np.asarray(shard.data).tobytes() for shard in array.addressable_shards] == [
            np.asarray(wanted).tobytes()
        ] * 4


def test_messages_between_lanes_give_the_same_bits(model, expected):
    mesh = permuted(8)
    session = small.make_session(*model, one_thread_per_lane=True, chaos_us=20)
    assert small.same(call_of(session, mesh)(inputs(), small.make_state(model[0], CAPACITY, mesh=mesh)), expected)


def test_mesh_with_a_data_axis_is_refused(session, model):
    mesh = laneformer.make_mesh(8, data=2, lane=4)
    with pytest.raises(ValueError, match="data = 1"):
        call_of(session, mesh)(inputs(), small.make_state(model[0], CAPACITY))


@pytest.mark.parametrize("present", [4, 7])
def test_missing_devices_end_only_their_call(present, model, expected, monkeypatch):
    session = small.make_session(*model, threads=2, timeout_ms=400)
    real = jax.ffi.ffi_call

    def of_eight(*arguments, **keywords):
        return lambda *operands, **attributes: real(*arguments, **keywords)(
            *operands, **attributes | {"devices": np.int64(8)}
        )

    mesh = Mesh(np.array(jax.devices()[:present]).reshape(1, present), ("data", "lane"))
    fewer = small.make_config(lanes=present, layout="dtp(2)")  # one lane per device, in a call for eight devices
    call = call_of(session, mesh)
    with monkeypatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", of_eight)
        began = time.monotonic()
        with pytest.raises(JaxRuntimeError, match=r"only [1-7] of 8 devices reached the decode call within 400 ms"):
            jax.block_until_ready(call(inputs(), small.make_state(fewer, CAPACITY, mesh=mesh)))
        assert 0.4 <= time.monotonic() - began < 20
    mesh = laneformer.make_mesh(8, lane=8)
    assert small.same(call_of(session, mesh)(inputs(), small.make_state(model[0], CAPACITY, mesh=mesh)), expected)


def test_refused_device_does_not_block_the_others(model, monkeypatch, expected):
    """Seven devices wait for the eighth, which has no place in the mesh. All of them end, and the next call works."""
    session = small.make_session(*model, threads=2, timeout_ms=400)
    module = sys.modules[decode.__module__]
    mesh = laneformer.make_mesh(8, lane=8)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_places", lambda mesh: np.array([0, 1, 2, 3, 4, 5, 6, -1], np.int32))
        call = call_of(session, mesh)
        with pytest.raises(JaxRuntimeError, match=r"has no place among the 8 devices|only 7 of 8 devices reached"):
            jax.block_until_ready(call(inputs(), small.make_state(model[0], CAPACITY, mesh=mesh)))
    del session.jitted  # its program has the wrong places
    assert small.same(call_of(session, mesh)(inputs(), small.make_state(model[0], CAPACITY, mesh=mesh)), expected)
