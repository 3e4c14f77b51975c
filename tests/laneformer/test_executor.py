"""The executor with every layout, against literal per-device transcriptions, and the all-reduces that it issues."""

import math
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laneformer import ConfigError
from laneformer.blocks.layer import after_sum
from laneformer.executor import run_schedule
from tests.support import reference, tiny
from tests.support.reference.layouts import CASES

D = 8  # channels of the toy streams


def toy_run(schedule, x0, weights):
    """Runs toy modules tanh(weights[m, lane] x). Returns the final streams and the log of modules and reductions."""
    log = []

    def module(m, x):
        log.append(("module", m))
        return jnp.tanh(jnp.einsum("lbsd,led->lbse", x, weights[m]))

    def sum_lanes(x):
        log.append(("reduce", x.shape[-1]))
        return x.sum(0, keepdims=True)

    lanes = weights.shape[1]
    streams = jnp.broadcast_to(jnp.asarray(x0), (lanes, *x0.shape))
    return np.asarray(run_schedule(schedule, streams, module, sum_lanes, lanes)), log


def toy_transcription(run, x0, weights):
    """The streams of `run(X)`, a layout of the reference, with the toy modules instead of attention and MLP."""

    def module(config, _, m, X):
        return [np.tanh(x @ weights[m, l].T) for l, x in enumerate(X)]

    streams = [x0.astype(np.float64) for _ in range(weights.shape[1])]
    with mock.patch.object(reference.model, "module", module):
        return np.stack(run(streams))


def expected_log(schedule, width=D):
    """The log of a schedule: every module, and each reduction as soon as its last part exists."""
    log = []
    for m in range(schedule.num_modules):
        log.append(("module", m))
        log += [("reduce", width)] * sum(payload.complete_at == m for payload in schedule.payloads)
    return log


def toy(lanes, n, seed):
    """Random toy weights [m, l, d, d] and a stream [1, 2, d]."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2 * n, lanes, D, D)) / 2).astype(np.float32), rng.standard_normal((1, 2, D)).astype(
        np.float32
    )


# Layouts: the package's spelling, and the reference's arguments.
rows = st.one_of(
    # The test below has laneformer, and spd names layers that a model may lack.
    st.sampled_from([(layout, args) for layout, args in CASES.items() if layout not in ("laneformer", "spd(1)")]),
    st.integers(1, 9).map(lambda k: (f"desync({k})", {"n": k})),
    st.integers(1, 5).map(lambda k: (f"track({k})", {"D": k})),
    st.integers(0, 9).map(lambda k: (f"dtp({k})", {"delta": k})),
    st.sampled_from([0.04, 0.3, 0.5, 0.8, 1.0]).map(lambda p: (f"caat({p})", {"p": p})),
    st.sets(st.integers(0, 3)).map(lambda drop: ("spd", {"drop": drop})),
)


@settings(max_examples=60)
@given(row=rows, lanes=st.sampled_from([1, 2, 4]), n=st.integers(1, 4), seed=st.integers(0, 99))
@example(row=("desync(4)", {"n": 4}), lanes=4, n=3, seed=0)
@example(row=("kraken", {}), lanes=4, n=3, seed=0)
def test_layouts_equal_their_literal_transcriptions(row, lanes, n, seed):
    layout, args = row
    if layout == "spd":
        args = {"drop": {layer for layer in args["drop"] if layer < n}}
        layout = f"spd({', '.join(map(str, sorted(args['drop'])))})"
    schedule = tiny.config(layout=layout, num_hidden_layers=n, num_lanes=lanes).schedule
    weights, x0 = toy(lanes, n, seed)
    name = layout.split("(")[0]
    values = {"hidden_size": D, "num_hidden_layers": n}
    expected = toy_transcription(lambda X: reference.LAYOUTS[name](values, None, X, **args), x0, weights)
    found, log = toy_run(schedule, x0, weights)
    assert tiny.difference(found, expected) < 1e-4
    assert log == expected_log(schedule, round(args["p"] * D) if name == "caat" else D)


def laneformer_literally(X, n, d, early, twice, exchanged):
    """The published model's exchange, optionally with the corrected form of the early layers."""
    sent = []
    for m in range(2 * n):
        o = reference.model.module(None, None, m, X)
        sent.append(o)
        for l in range(len(X)):
            if m // 2 < d:
                X[l] = X[l] + (sum(o) if early else math.sqrt(len(X)) * o[l])
            elif exchanged[m % 2]:
                late = sum(p for j, p in enumerate(sent[m - 2 * d]) if j != l)
                X[l] = X[l] + o[l] + (late if twice or not (early and m // 2 < 2 * d) else 0)
            else:
                X[l] = X[l] + math.sqrt(len(X)) * o[l]
    return X


@settings(max_examples=40)
@given(
    lanes=st.sampled_from([1, 2, 4]),
    n=st.integers(1, 5),
    d=st.integers(0, 6),
    early=st.booleans(),
    twice=st.booleans(),
    exchanged=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
@example(lanes=4, n=5, d=2, early=True, twice=True, exchanged=(True, True), seed=0)
@example(lanes=4, n=5, d=2, early=True, twice=False, exchanged=(True, True), seed=0)
@example(lanes=4, n=4, d=1, early=False, twice=True, exchanged=(False, True), seed=0)
def test_laneformer_equals_its_literal_transcription(lanes, n, d, early, twice, exchanged, seed):
    """The examples include a sum that lands early and late."""
    schedule = tiny.config(
        model_type="laneformer",
        num_hidden_layers=n,
        num_lanes=lanes,
        broadcast_delay=d,
        use_early_comm=early,
        early_lands_twice=twice,
        use_attention_comm=exchanged[0],
        use_mlp_comm=exchanged[1],
    ).schedule
    weights, x0 = toy(lanes, n, seed)
    expected = toy_transcription(lambda X: laneformer_literally(X, n, d, early, twice, exchanged), x0, weights)
    found, log = toy_run(schedule, x0, weights)
    assert tiny.difference(found, expected) < 1e-4
    assert log == expected_log(schedule)


@settings(max_examples=20)
@given(
    lanes=st.sampled_from([2, 4]),
    n=st.integers(1, 4),
    k=st.integers(0, 4),
    a=st.sampled_from([0.25, 0.5, 0.75]),
    seed=st.integers(0, 9),
)
def test_fractional_delay_equals_its_literal_transcription(lanes, n, k, a, seed):
    """The other lanes' parts land with weight 1 - a after k modules and with weight a after k + 1. While none of them
    has landed, the lane's own part is scaled by sqrt(L).
    """

    def literally(X):
        sent = []
        for m in range(2 * n):
            o = reference.model.module(None, None, m, X)
            sent.append(o)
            joined = [(1 - a, m - k), (a, m - k - 1)]
            alone = sum(w for w, source in joined if source < 0)
            X = reference.add(X, reference.scaled(1 + (math.sqrt(lanes) - 1) * alone, o))
            for w, source in joined:
                if source >= 0:
                    X = reference.add(X, reference.scaled(w, reference.others(sent[source])))
        return X

    weights, x0 = toy(lanes, n, seed)
    schedule = tiny.config(layout=f"dtp({k + a})", num_hidden_layers=n, num_lanes=lanes).schedule
    found, log = toy_run(schedule, x0, weights)
    assert tiny.difference(found, toy_transcription(literally, x0, weights)) < 1e-4
    assert log == expected_log(schedule)


@pytest.mark.parametrize("k", [0, 2])
def test_fractional_delay_tends_to_whole_delays(k):
    weights, x0 = toy(4, 3, 0)
    for a, whole in ((1e-7, k), (1 - 1e-7, k + 1)):
        near, limit = (
            toy_run(tiny.config(layout=f"dtp({delta})").schedule, x0, weights)[0] for delta in (k + a, whole)
        )
        assert tiny.difference(near, limit) < 1e-4


def test_lanes_stay_equal_if_every_output_is_summed():
    weights, x0 = toy(4, 3, 1)
    for layout in ("tp", "parallel", "ladder"):
        streams, _ = toy_run(tiny.config(layout=layout).schedule, x0, weights)
        assert tiny.difference(streams, np.broadcast_to(streams[:1], streams.shape)) < 1e-5
    streams, _ = toy_run(tiny.config(layout="dtp(1)").schedule, x0, weights)
    assert tiny.difference(streams, np.broadcast_to(streams[:1], streams.shape)) > 0.1


# -------------------------------------------------------------------------------------------------- in the whole model

LAYOUTS = {layout: args for layout, args in CASES.items() if layout != "laneformer"}
LANE_NORMS = {"replicated_rmsn_scale": False, "sliding_window": 5, "sliding_window_n_layers": 1}


@pytest.mark.parametrize(
    ("layout", "devices"), [*((layout, 4) for layout in LAYOUTS), ("desync(2)", None), ("caat(0.5)", None)]
)
def test_model_with_every_layout_equals_the_reference(layout, devices):
    """Norm scales differ between lanes, so that confusing two lanes changes the logits. The model issues the schedule's
    all-reduces, and one for the head.
    """
    values = tiny.values(layout=layout, num_hidden_layers=3 if layout in ("track(2)", "dtp(3)") else 2, **LANE_NORMS)
    ids, model = tiny.token_ids(40), tiny.random_model(values, lane_devices=devices)
    expected = reference.layout_logits(layout.split("(")[0], LAYOUTS[layout], values, tiny.random_weights(values), ids)
    assert tiny.difference(model(ids), expected) < 1e-4
    reductions = 0 if devices is None else model.config.schedule.num_reductions + 1
    assert tiny.all_reduces(tiny.lowered(model, ids)) == reductions


@pytest.mark.parametrize("layout", ["desync(2)", pytest.param("dtp(1.5)", marks=pytest.mark.slow)])
def test_pieces_on_two_devices_equal_the_uncached_model(layout):
    """A cached prefill and cached steps on two devices, against the uncached logits of one device."""
    values = tiny.values(layout=layout, num_hidden_layers=2, **LANE_NORMS)
    ids, two = tiny.token_ids(40), tiny.random_model(values, lane_devices=2)
    expected = tiny.random_model(values)(ids)
    assert tiny.difference(tiny.in_pieces(two, ids, (10, 1, 1)), expected) < 1e-4


AFTER = {  # layout -> norms
    "tp": {"norm_before": False, "norm_after": "sum"},
    "ladder": {"norm_after": "sum"},
    "laneformer": {"norm_after": "lane"},
}


@pytest.mark.parametrize("layout", ["tp", pytest.param("ladder", marks=pytest.mark.slow), "laneformer"])
def test_norms_after_modules_equal_the_reference(layout):
    """8 lanes: layout laneformer on 8 devices, the others on 4 devices with a cache. The tests of gradients run tp with
    norms of sums on one device.
    """
    sizes = {"num_lanes": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
    values = tiny.values(layout=layout, **sizes, **AFTER[layout], **LANE_NORMS)
    ids, weights = tiny.token_ids(40), tiny.random_weights(values)
    if layout == "laneformer":
        model = tiny.random_model(values, lane_devices=8)
        expected, found = reference.reference_logits(values, weights, ids), model(ids)
    else:
        model = tiny.random_model(values, lane_devices=4)
        expected = reference.layout_logits(layout, {}, values, weights, ids)
        found = tiny.in_pieces(model, ids, (11, 1))
    assert tiny.difference(found, expected) < 1e-4
    assert tiny.all_reduces(tiny.lowered(model, ids)) == model.config.schedule.num_reductions + 1


def test_norms_of_sums_require_whole_sums():
    whole = ("tp", "ladder", "dtp(0)", "desync(1)", "caat(1)", "spd")
    parts = ("parallel", "desync(2)", "spd(1)", "caat(0.5)", "kraken", "track(1)", "dtp(1)", "laneformer", "none")
    for layout in whole:
        assert after_sum(tiny.config(layout=layout, norm_after="sum").norms)
    for layout in parts:
        with pytest.raises(ConfigError, match="norm_after = 'lane'"):
            tiny.config(layout=layout, norm_after="sum")
        assert not after_sum(tiny.config(layout=layout, norm_after="sum", num_lanes=1).norms)


IN_ORDER = ("tp", "desync(3)", "spd(1)", "caat(0.4)", "kraken", "track(2)", "dtp(2)", "laneformer", "none")


@pytest.mark.parametrize("layout", IN_ORDER)
def test_one_lane_runs_its_modules_in_order(layout):
    """All layouts except parallel and ladder, whose modules read an earlier stream by design."""
    weights, x0 = toy(1, 3, 0)
    expected = toy_transcription(lambda X: reference.LAYOUTS["tp"]({"num_hidden_layers": 3}, None, X), x0, weights)
    schedule = tiny.config(layout=layout, num_lanes=1, broadcast_delay=2).schedule
    assert tiny.difference(toy_run(schedule, x0, weights)[0], expected) < 1e-5


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize(("layout", "wiring"), [("tp", "sequential"), ("parallel", "parallel"), ("ladder", "ladder")])
def test_references_without_drift_equal_dense_models(layout, wiring, lanes):
    """The references of the layouts, to which the models above are compared, and of dense models."""
    values = tiny.values(layout=layout, num_lanes=lanes)
    ids, weights = tiny.token_ids(40), tiny.random_weights(values)
    expected = reference.dense_logits(values, weights, ids, wiring)
    assert tiny.difference(reference.layout_logits(layout, {}, values, weights, ids), expected) < 1e-9


COUNTED = [  # beyond the models that the tests above run
    ("dtp(9)", {}),
    ("dtp(1.5)", {}),
    ("laneformer", {"broadcast_delay": 0}),
    ("laneformer", {"broadcast_delay": 1, "early_lands_twice": False}),
]
HEADS = {"replicate": 1, "lane": 1, "vocab_parallel": 0}


def _counted_with_heads():
    """COUNTED with the head that lanes share. Head `lane`, also of LAYOUTS, is slow, and another one exhaustive."""
    for layout, changes in [*COUNTED, *((layout, {}) for layout in LAYOUTS)]:
        for head in HEADS:
            if head != "replicate" or layout not in LAYOUTS:
                marks = {"replicate": (), "lane": pytest.mark.slow}.get(head, pytest.mark.exhaustive)
                yield pytest.param(layout, changes, head, id=f"{layout}-{changes}-{head}", marks=marks)


@pytest.mark.parametrize(("layout", "changes", "head"), list(_counted_with_heads()))
def test_all_reduces_equal_those_of_the_schedule(layout, changes, head):
    values = tiny.values(
        layout=layout, lm_head_type=head, num_hidden_layers=3 if layout == "track(2)" else 2, **changes
    )
    model = tiny.random_model(values, lane_devices=2)
    assert tiny.all_reduces(tiny.lowered(model)) == model.config.schedule.num_reductions + HEADS[head]


def test_all_reduces_send_only_their_channels():
    """caat sends only its share of the channels."""
    model = tiny.random_model(tiny.values(layout="caat(0.25)", num_hidden_layers=1), lane_devices=4)
    text = tiny.lowered(model, np.ones((1, 6), np.int32))
    assert text.count("}) : (tensor<1x1x6x8xf32>) -> tensor<1x1x6x8xf32>") == 2
