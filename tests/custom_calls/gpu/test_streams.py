"""Several residual streams in the GPU kernel, on emulated GPUs: logits match the plan interpreter. Several devices, one
launch per op, delays and passes of several rows give the same bits.
"""

import dataclasses

import jax
import numpy as np
import pytest

from laneformer.config import ResidualStreams
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, Machine
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.decoder import decoder_ops
from tests.support import emulated, small
from tests.support.decode_cases import COMPRESSED, STREAMS
from tests.support.gpu_cases import AMD, check, logits_of, same, some, weights_of
from tests.support.several_rows import Model

pytestmark = [small.needs_library, emulated.needs_gpu]

ROOTS = STREAMS["several streams, roots and a table"]
CASES = {  # changes of the config, and the machine; LAUNCHED has more
    "one": ({"residual_streams": ResidualStreams(count=1)}, emulated.SMALL),
    "six": (
        {"residual_streams": ResidualStreams(count=6, iterations=2), "lanes": 1, "hidden_size": 33},
        emulated.SMALL,
    ),
    "vocab head": ({"residual_streams": ResidualStreams(count=2), "lm_head_type": "vocab_parallel"}, emulated.SMALL),
    "norm of the sum": ({"pre_norm_lane_agg": True, "lanes": 3}, emulated.SMALL),
    "biases and whole vectors": ({"hidden_size": 64, "ff": 32, "head_dim": 16, "qkv_bias": True}, emulated.SMALL),
    "warps of 64": (ROOTS, AMD),
    "a warp, many channels": (
        {"hidden_size": 160, "lanes": 1},
        Machine(warp_size=32, ctas=3, warps=1, shared_bytes=232_448, bulk_copies=True),
    ),
}


def plan_of(weight_dtype: str = "float32", **changes) -> Plan:
    config = small.make_config(**STREAMS["several streams"] | {"num_hidden_layers": 2} | changes)
    return make_plan(decoder_ops(config), config.schedule, weight_dtype=weight_dtype)


@emulated.only_emulated
@pytest.mark.parametrize("name", some(CASES, (), {"warps of 64"}))
def test_logits_match_the_interpreter(name):
    changes, machine = CASES[name]
    plan = plan_of(**changes)
    check(plan, weights_of(plan), machine=machine)


LAUNCHED = {
    "three": {},
    "roots and a table": ROOTS,
    "compressed attention": COMPRESSED["compressed attention, several streams"] | {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("name", some(LAUNCHED, {"three"}, {"roots and a table"}))
def test_one_launch_per_op_has_the_same_bits(name):
    """Both match the interpreter."""
    plan = plan_of(**LAUNCHED[name])
    weights, ids = weights_of(plan), small.prompt_of(small.make_config(), 21)
    one, other = (check(plan, weights, launch=launch, ids=ids) for launch in ("persistent", "graph"))
    assert same(one, other)


@emulated.only_emulated
@pytest.mark.slow
def test_two_devices_and_delays_change_no_bit():
    plan = plan_of(**ROOTS)
    weights, ids = weights_of(plan), [3, 1, 4, 1, 5]
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    whole, half = check(plan, weights, ids=ids), dataclasses.replace(emulated.SMALL, ctas=4)
    options = {"machine": half, "mesh": mesh}
    for launch in ("persistent", "graph"):
        session = emulated.open_session(plan, weights, chaos_us=20, launch=launch, **options)
        assert same(whole, logits_of(session, ids, mesh=mesh))


ROWS = {
    "three": ({}, {"rows": 3, "chaos_us": 20}),
    "roots and a table": (ROOTS, {"rows": 2}),
    "warps of 64": ({"hidden_size": 33}, {"rows": 4, "machine": AMD}),
}


@emulated.only_emulated
@pytest.mark.parametrize("name", some(ROWS, (), {"three"}))
def test_passes_of_several_rows_have_the_bits_of_one(name):
    changes, options = ROWS[name]
    plan = plan_of(**changes)
    Model(plan, weights_of(plan), **options).check([3, 1, 4, 1, 5, 9, 2], 12, temperature=0.8)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_extreme_mixtures_match_the_interpreter():
    """Logits of the mixture are so large that one stream has nearly all of the share, and others nearly none."""
    plan = plan_of(residual_streams=ResidualStreams(count=4, iterations=20))
    weights = weights_of(plan)
    for path in weights:
        if path.endswith("streams.factors"):
            weights[path] *= 12
        if path.endswith("streams.offsets"):
            weights[path] *= -4
    check(plan, weights)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_random_weights_give_finite_logits():
    session = emulated.open_session(plan_of(**ROOTS), {})
    session.fill()
    logits = logits_of(session, [3, 1]).logits
    assert np.isfinite(logits).all() and logits.std() > 0


def test_too_many_streams_are_refused():
    plan = plan_of(residual_streams=ResidualStreams(count=7))
    with pytest.raises(ValueError, match="cannot run layer 0: it has 7 residual streams, more than 6; use backend xla"):
        Layout(plan, H200, 2)


def test_mixtures_are_part_of_the_weight_stream():
    """A CTA reads all rows of a mixture, and the columns of its own channels of each stream."""
    plan = plan_of(hidden_size=512, residual_streams=ResidualStreams(count=4), lanes=1)
    layout = Layout(plan, H200, 1)
    kinds = layout.kinds
    of_streams = [
        tiling for kind in kinds for op, tiling in zip(kind.ops, kind.tilings, strict=True) if hasattr(op, "mix")
    ]
    assert [(tiling.rows, tiling.columns) for tiling in of_streams] == [(24, 4 * layout.stream_rows)] * 2
    assert (
        layout.head_mixture.rows == 4
        and layout.head_offset == (layout.layer_lines + layout.head_mixture.lines) * layout.line_words
    )
    assert np.prod(layout.packed_shape[:3]) * layout.line_words * of_streams[0].lines >= 24 * 4 * 512
