"""One launch per op of each pass, from a graph: the bits of the persistent kernel, on emulated GPUs (or real ones, see
emulated.py).

The emulator runs the CTAs of an op one after the other unless they may wait for each other (emulator.cc).
"""

import threading

import jax
import numpy as np
import pytest

from laneformer.custom_calls import ENDS, NativeError
from tests.support import emulated, small
from tests.support.decode_cases import CONFIGS, EXPERTS, LAYOUTS, MODELS
from tests.support.gpu_cases import AMD, REFUSED, ROOM, fail_often, jitted, same, some

pytestmark = [small.needs_library, emulated.needs_gpu]

DRAWN = {"temperature": 0.9, "top_k": 20, "penalty": 1.3}


def both(config, weights, prompt=5, limit=6, *, compute="float32", mesh=None, **options):
    """Checks that sampled answers are equal with both launches."""
    ids, outputs = small.prompt_of(config, prompt), []
    for launch in ("persistent", "graph"):
        session = emulated.make_session(config, weights, compute=compute, mesh=mesh, launch=launch, **options)
        call = jitted(session, mesh, room=limit, top=3, logits=True)
        outputs.append(
            jax.block_until_ready(
                call(small.make_inputs(ids, limit, **DRAWN), small.make_state(config, 64, compute, mesh))[0]
            )
        )
        assert session.failure is None
    assert outputs[0].status.tolist() == [limit, ENDS.index("length"), prompt + limit]
    assert same(*outputs)


@pytest.mark.parametrize(("layout", "lanes"), some(LAYOUTS, ()))
def test_layouts_have_the_same_bits(layout, lanes):
    config = small.make_config(layout=layout, lanes=lanes)
    both(config, small.make_weights(config))


@pytest.mark.parametrize("name", some(CONFIGS | MODELS | EXPERTS, ()))
def test_configs_have_the_same_bits(name):
    config = small.make_config(**(CONFIGS | MODELS | EXPERTS)[name])
    both(config, small.make_weights(config))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_bytes_have_the_same_bits(dtype):
    config = small.make_config(layout="dtp(1)", hidden_size=32, head_dim=16, ff=12, heads=4, kv_heads=2)
    both(config, small.make_weights(config, dtype), compute=dtype)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_amd_has_the_same_bits():
    config = small.make_config(layout="dtp(1)", hidden_size=40)
    both(config, small.make_weights(config), machine=AMD)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_two_devices_have_the_same_bits():
    config = small.make_config(lanes=4, layout="dtp(2)", num_hidden_layers=4)
    mesh = jax.make_mesh(
        (1, 2), ("data", "lane"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:2]
    )
    both(config, small.make_weights(config), mesh=mesh, chaos_us=20)


@emulated.only_emulated
@pytest.mark.parametrize("launch", ["persistent", "graph"])
def test_driver_loads_nothing_while_a_kernel_waits_for_another_device(launch):
    """All programs are loaded, and graphs made, before any device launches: a real driver could wait for the kernel."""
    config = small.make_config(lanes=2)
    mesh = jax.make_mesh(
        (1, 2), ("data", "lane"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:2]
    )
    session = emulated.make_session(config, small.make_weights(config), mesh=mesh, launch=launch)
    call = jitted(session, mesh, room=8)
    before = emulated.delayed()
    for _ in range(3):
        call(small.make_inputs([3], 2), small.make_state(config, 64, mesh=mesh))
    assert session.failure is None and emulated.delayed() == before


@pytest.fixture(scope="module")
def session(model):
    return emulated.make_session(*model, launch="graph")


@pytest.fixture(scope="module")
def persistent(model):
    return jitted(emulated.make_session(*model), room=ROOM, top=3, logits=True)


@pytest.mark.parametrize(
    ("prompt", "limit", "sampling"),
    [
        pytest.param(1, 1, {}, id="one token"),
        pytest.param(
            7, 12, {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02, "penalty": 1.3}, id="prompt, filters and penalty"
        ),
        pytest.param(1, 110, {}, id="keys in several splits and beyond the window", marks=pytest.mark.exhaustive),
    ],
)
def test_repeated_calls_have_the_same_bits(prompt, limit, sampling, model, call, persistent):
    config, _ = model
    inputs = small.make_inputs(small.prompt_of(config, prompt), limit, room=ROOM, **sampling)
    expected, state = persistent(inputs, small.make_state(config, 160))
    for _ in range(2):
        outputs, after = call(inputs, small.make_state(config, 160))
        assert same(outputs, expected) and small.same(after, state)


def test_nothing_is_launched_after_a_stop_token(model, session, call, persistent):
    config, _ = model
    tokens = persistent(small.make_inputs([3], 20, room=ROOM), small.make_state(config, 160))[0].tokens[:20].tolist()
    stop = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    before = 0 if emulated.REAL else emulated.launches()
    outputs, _ = call(small.make_inputs([3], 20, room=ROOM, stops=(tokens[stop],)), small.make_state(config, 160))
    assert outputs.status.tolist() == [stop + 1, ENDS.index("stop"), stop + 2]
    assert outputs.tokens[: stop + 1].tolist() == tokens[: stop + 1] and not outputs.tokens[stop + 1 :].any()
    if not emulated.REAL:  # emulated launches end before they return
        assert emulated.launches() - before == 1 + (stop + 1) * session.launches_per_token
    assert session.launches_per_token == 2 + 5 * config.num_hidden_layers + 1


def test_cancelled_call_leaves_the_next_one_right(model, session, call):
    config, _ = model
    inputs = small.make_inputs([3], 150, room=ROOM)
    session.begin()
    results = []
    thread = threading.Thread(target=lambda: results.append(call(inputs, small.make_state(config, 160))[0]))
    thread.start()
    while session.wait(4) < 5:
        assert thread.is_alive()
    session.cancel()
    thread.join()
    count = int(results[0].status[0])
    assert session.finished and 5 <= count < 150 and results[0].status[1] == ENDS.index("cancelled")
    outputs, _ = call(small.make_inputs([3], count, room=ROOM), small.make_state(config, 160))
    assert same(results[0]._replace(status=outputs.status), outputs)


def test_device_refuses_an_impossible_call(model, session, call):
    config, _ = model
    outputs, _ = call(REFUSED["a token beyond the vocabulary"], small.make_state(config, 160))
    assert outputs.status.tolist()[:2] == [0, len(ENDS)] and "do not fit the cache" in session.failure
    session.begin()
    outputs, _ = call(small.make_inputs([3], 4), small.make_state(config, 160))
    assert session.failure is None and outputs.status[0] == 4


@pytest.mark.slow
@emulated.only_emulated
def test_timeout_ends_the_call_before_a_wrong_token(model, monkeypatch):
    config, weights = model
    fail_often(emulated.make_session(config, weights, launch="graph", timeout_ms=50), config, monkeypatch)


def test_spans_cover_every_op(model, session, call):
    config, _ = model
    session.trace(1000)
    call(small.make_inputs([3, 4], 3), small.make_state(config, 160))
    spans = dict(session.spans())
    session.trace(0)
    assert len(spans) == config.num_lanes * session.layout.ctas
    for own in spans.values():
        assert len(own) == 4 * (2 + 6 * config.num_hidden_layers) + 3 * 2
        assert (own["begin_ns"][1:] >= own["end_ns"][:-1]).all()


@emulated.only_emulated
def test_closing_frees_the_memory(model):
    before = emulated.allocations()
    session = emulated.make_session(*model, launch="graph")
    jitted(session, room=8)(small.make_inputs([3], 4), small.make_state(model[0], 160))
    session.close()
    assert emulated.allocations() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": "twice"}, "choose persistent, graph, overlapping graph"),
        ({"launch": "graph", "peer_ctas": 2}, "needs launch 'persistent', got 'graph'"),
    ],
)
def test_invalid_options_are_refused(options, message, model):
    with pytest.raises(NativeError, match=message):
        emulated.make_session(*model, **options)


def test_overlapping_launches_have_the_same_bits(model, persistent):
    """The emulator runs the launches one after the other, so this only tests that the driver accepts them."""
    config, weights = model
    session = emulated.make_session(config, weights, launch="overlapping graph")
    inputs = small.make_inputs(np.array([3, 4]), 5, room=ROOM)
    outputs = [
        one(inputs, small.make_state(config, 160))[0]
        for one in (jitted(session, room=ROOM, top=3, logits=True), persistent)
    ]
    assert same(*outputs)
