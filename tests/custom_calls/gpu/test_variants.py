"""Variants of the GPU kernel on emulated GPUs: each gives the bits of the kernel without variants."""

import dataclasses

import numpy as np
import pytest

from laneformer.custom_calls import NativeError
from laneformer.custom_calls.gpu.variants import VARIABLE, VARIANTS
from laneformer.mesh import make_mesh
from tests.support import emulated, small
from tests.support.decode_cases import CONFIGS, LAYOUTS, MODELS
from tests.support.gpu_cases import AMD, fail_often, jitted, mixed_plan, of_config, some, state_of, weights_of
from tests.support.several_rows import Model

pytestmark = [small.needs_library, emulated.needs_gpu]
ALL = tuple(VARIANTS)
OF_STEPS = tuple(name for name in VARIANTS if name != "spare-writer")


def answer(plan, weights, variants, mesh=None, **options):
    """All results of a call of 12 tokens with filters and a penalty, and the session."""
    session = emulated.open_session(plan, weights, variants=variants, mesh=mesh, **options)
    call = jitted(session, mesh, room=12, top=2, logits=True)
    inputs = small.make_inputs([3, 1, 4, 1, 5], 12, temperature=0.8, top_k=8, top_p=0.9, penalty=1.2)
    outputs, state = call(inputs, state_of(plan, 64))
    assert session.failure is None and outputs.status[0] == 12
    return [np.asarray(part) for part in outputs], state, session


def check(plan, weights, variants=ALL, **options):
    """Asserts that the variants change no bit, and returns the layout that has them."""
    *expected, _ = answer(plan, weights, (), **options)
    *found, session = answer(plan, weights, variants, **options)
    assert small.same(found, expected)
    return session.layout


@pytest.fixture(scope="module")
def model():
    return of_config(small.windowed_model()[0])


def test_all_variants_together_have_the_same_bits(model):
    layout = check(*model)
    assert layout.spares == 1 and layout.triples == {"kStreamBoard": 10, "kOtherStreamBoard": 10, "kHiddenBoard": 5}


@pytest.mark.slow
def test_passes_of_several_rows_have_the_same_bits(model):
    """With right and wrong drafts; the session with one row has the variants too."""
    Model(*model, variants=ALL).check([5, 8, 13, 5, 8], 12, temperature=1.0, penalty=1.3)


@emulated.only_emulated
@pytest.mark.slow
def test_two_devices_have_the_bits_of_one(monkeypatch):
    """Each device has a spare CTA, whose words all devices await."""
    config = small.make_config(lanes=4, layout="dtp(2)", num_hidden_layers=4)
    weights, machine = small.make_weights(config), dataclasses.replace(emulated.SMALL, ctas=4)
    results = []
    for devices, variants in ((1, ()), (2, ALL)):
        mesh = make_mesh(devices, lane=devices) if devices > 1 else None
        options = {"mesh": mesh, "machine": machine, "chaos_us": 20} if mesh else {}
        session = emulated.make_session(config, weights, variants=variants, **options)
        call = jitted(session, mesh, room=8, logits=True)
        outputs, _ = call(small.make_inputs([2, 7, 1], 8), small.make_state(config, 64, "float32", mesh))
        assert session.failure is None and session.layout.spares == devices * bool(variants)
        results.append([np.asarray(part) for part in outputs])
    assert small.same(*results)


@emulated.only_emulated
@pytest.mark.slow
@pytest.mark.parametrize("variants", [ALL, *(pytest.param((name,), marks=pytest.mark.exhaustive) for name in ALL)])
def test_timeout_ends_the_call_before_a_wrong_token(variants, monkeypatch):
    config, weights = small.windowed_model()
    fail_often(emulated.make_session(config, weights, timeout_ms=200, variants=variants), config, monkeypatch)


@emulated.only_emulated
@pytest.mark.slow
def test_lost_spare_cta_is_named(monkeypatch):
    config, weights = small.windowed_model()
    session = emulated.make_session(config, weights, timeout_ms=200, variants=("spare-writer",))
    monkeypatch.setenv("EMULATOR_LOST", f"{session.layout.grid - 1},4,word")
    outputs, _ = jitted(session, room=8)(small.make_inputs([3], 8), small.make_state(config, 64))
    assert outputs.status[0] < 8 and "timed out waiting for the spare CTA of device 0" in session.failure


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS)
def test_layouts_have_the_same_bits(layout, lanes, variant):
    check(*of_config(small.make_config(layout=layout, lanes=lanes)), (variant,))


@pytest.mark.parametrize("name", some(CONFIGS | MODELS, ()))
def test_configs_have_the_same_bits(name):
    check(*of_config(small.make_config(**(CONFIGS | MODELS)[name])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", ["lane", "replicate", "vocab_parallel"])
@pytest.mark.parametrize("hidden", [16, 21, 22, 24, 100])
def test_numbers_of_channels_that_three_does_not_divide_have_the_same_bits(hidden, head):
    layout = check(*of_config(small.make_config(hidden_size=hidden, lanes=2, layout="dtp(1)", lm_head_type=head)))
    assert layout.triples["kStreamBoard"] == layout.stream_rows


@pytest.mark.exhaustive
def test_layers_of_several_kinds_have_the_same_bits():
    plan = mixed_plan()
    check(plan, weights_of(plan))


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", ["graph", "overlapping graph"])
def test_launches_per_op_have_the_same_bits(launch, model):
    check(*model, OF_STEPS, launch=launch)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"variants": ("fast",)}, "unknown variant 'fast' of the GPU kernel; choose out-of-line, triples"),
        ({"variants": ("triples",), "machine": AMD}, "needs an NVIDIA GPU"),
        ({"variants": ("spare-writer",), "launch": "graph"}, "needs launch 'persistent'"),
        (
            {"variants": ("spare-writer",), "machine": dataclasses.replace(emulated.SMALL, multiprocessors=6, ctas=6)},
            "needs 7 multiprocessors, the device has 6",
        ),
    ],
)
def test_impossible_variants_are_refused(options, problem, model):
    with pytest.raises(NativeError, match=problem):
        emulated.open_session(*model, **options)


def test_experts_refuse_triples():
    with pytest.raises(NativeError, match="variant 'triples' of the GPU kernel does not support experts"):
        emulated.open_session(*of_config(small.make_config(num_experts=5, layout="tp")), variants=("triples",))


def test_environment_names_variants(model, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triples,nothing")
    with pytest.raises(NativeError, match="unknown variant 'nothing'"):
        emulated.open_session(*model)
