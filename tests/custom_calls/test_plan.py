"""The schedule table as words: read back and run on toy modules, it does what the layout's row says."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from custom_calls import encode_schedule
from custom_calls.plan import ALIGNED, Dtype, decode_plan, make_plan
from laneformer import LAYOUTS
from laneformer.layout import Landing, Own, Payload, Schedule
from laneformer.ops import Weight, decoder_ops
from tests.support import small
from tests.support.decode_cases import CONFIGS, MODELS

HIDDEN = 10


def layouts_of(n: int):
    """Strategy: the name of a layout and arguments that fit n layers."""
    flag, count = st.booleans(), st.integers(1, 2 * n + 2)
    arguments = {
        "desync": st.tuples(count),
        "spd": st.sets(st.integers(0, n - 1)).map(tuple),
        "caat": st.tuples(st.floats(0.05, 1)),
        "track": st.tuples(count),
        "dtp": st.tuples(st.one_of(st.integers(0, 2 * n + 2), st.floats(0, 2 * n + 2))),
        "laneformer": st.tuples(st.integers(0, n + 1), flag, flag, flag, flag),
    }
    return st.sampled_from(sorted(LAYOUTS)).flatmap(
        lambda name: st.tuples(st.just(name), arguments.get(name, st.just(())))
    )


cases = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, 5), layouts_of(n)))


class Words:
    """Reads a table from its start, as Decoder::read_events does."""

    def __init__(self, words, weights):
        assert words.dtype == np.int32 and weights.dtype == np.float32
        self.words, self.weights = iter(words.tolist()), weights

    def next(self) -> int:
        return next(self.words)

    def many(self, read) -> list:
        return [read() for _ in range(self.next())]

    def part(self):
        return self.next(), self.weights[self.next()]

    def event(self):
        return ("own", *self.part()) if self.next() == 0 else ("landing", self.next(), self.many(self.part))

    def payload(self):
        return self.next(), self.next(), self.next(), self.many(self.part)


def decoded(schedule):
    """-> events by time, payloads."""
    words = Words(*encode_schedule(schedule, HIDDEN))
    events = [words.many(words.event) for _ in range(schedule.num_modules + 1)]
    payloads = words.many(words.payload)
    assert next(words.words, None) is None, "words are left over"
    return events, payloads


def toy_module(matrices, m, X):
    return np.tanh(np.einsum("lde,le->ld", matrices[m], X))


def run_words(schedule, matrices, x):
    """What the kernel does with the table: streams [lanes, HIDDEN] before the final norm."""
    events, payloads = decoded(schedule)
    lanes = len(x)
    X, outputs, kept = x.copy(), {}, {}
    for t, happening in enumerate(events):
        for i, (_, complete_at, mean, _) in enumerate(payloads):
            if mean and complete_at == t:
                kept[i] = X.copy()
        if t < schedule.num_modules:
            outputs[t] = toy_module(matrices, t, X)
        for kind, which, rest in happening:
            if kind == "own":
                X = X + rest * outputs[which]
                continue
            width, complete_at, mean, parts = payloads[which]
            assert complete_at <= t and complete_at == max(m for m, _ in parts), "it lands before it is complete"
            total = sum(w * outputs[m][:, :width] for m, w in parts)
            total = (total + (kept[which] / lanes if mean else 0)).sum(0)
            if mean:
                X = np.broadcast_to(total, X.shape).copy()
            else:
                X[:, :width] += total - sum(w * outputs[m][:, :width] for m, w in rest)
    return X


def run_definition(schedule, matrices, x):
    """What the row of the table says: own parts are added when they are due, the other lanes' parts when they land."""
    X, outputs = x.copy(), {}
    for t in range(schedule.num_modules + 1):
        before = X.copy()
        if t < schedule.num_modules:
            outputs[t] = toy_module(matrices, t, X)
        for m, own in enumerate(schedule.own):
            if own.at == t:
                X = X + own.scale * outputs[m]
        for at, payload in schedule.landings:
            if at != t:
                continue
            width = round(payload.channels * HIDDEN)
            share = sum(w * outputs[m] for m, w in payload.parts)
            if payload.stream_mean_at is not None:
                assert payload.stream_mean_at == t, "no layout averages streams of another time"
                X = np.broadcast_to((share + before / len(x)).sum(0), X.shape).copy()
            else:
                X[:, :width] += (share.sum(0) - share)[:, :width]
    return X


def check(schedule, lanes, seed=0):
    rng = np.random.default_rng(seed)
    matrices = rng.normal(size=(schedule.num_modules, lanes, HIDDEN, HIDDEN))
    x = np.broadcast_to(rng.normal(size=HIDDEN), (lanes, HIDDEN))
    np.testing.assert_allclose(
        run_words(schedule, matrices, x), run_definition(schedule, matrices, x), rtol=0, atol=1e-4
    )


@given(case=cases)
@example(case=(3, 4, ("laneformer", (1, True, True, True, True))))
@example(case=(3, 4, ("laneformer", (1, True, False, True, False))))
@example(case=(3, 4, ("dtp", (1.25,))))
@example(case=(3, 4, ("kraken", ())))
@example(case=(2, 3, ("desync", (3,))))
def test_the_words_do_what_the_row_says(case):
    n, lanes, (name, arguments) = case
    check(LAYOUTS[name](n, lanes, *arguments), lanes)


def test_a_schedule_that_no_layout_has():
    """Sums of several weighted parts on a share of the channels, own parts at other times than their landings."""
    first, second = Payload(((0, 0.5), (1, 2.0)), channels=0.55), Payload(((2, 1.0), (0, 0.25), (3, 1.5)))
    own = (Own(0, 0.5), Own(3, 2.0), Own(2), Own(4, 1.5))
    check(Schedule("strange", own, (Landing(1, first), Landing(3, first), Landing(4, second))), 3)


@given(case=cases)
def test_payloads_are_listed_once_in_the_order_in_which_they_are_issued(case):
    n, lanes, (name, arguments) = case
    schedule = LAYOUTS[name](n, lanes, *arguments)
    _, payloads = decoded(schedule)
    times = [complete_at for _, complete_at, _, _ in payloads]
    assert times == sorted(times) and len(times) == schedule.num_reductions
    assert all(0 < width <= HIDDEN or name == "caat" for width, *_ in payloads)


@pytest.mark.parametrize("layout", ["tp", "none"])
def test_one_layer_word_for_word(layout):
    words, weights = encode_schedule(LAYOUTS[layout](1, 4), HIDDEN)
    if layout == "none":
        assert words.tolist() == [1, 0, 0, 0, 1, 0, 1, 1, 0, 0] and weights.tolist() == [2, 2]
    else:
        landings = [1, 1, 0, 0, 1, 1, 1, 0, 0]
        assert words.tolist() == [*landings, 2, 10, 0, 0, 1, 0, 0, 10, 1, 0, 1, 1, 1] and weights.tolist() == [1, 1]


CASES = CONFIGS | MODELS


def plan_of(name, **options):
    config = small.make_config(**CASES[name])
    return make_plan(decoder_ops(config), config.schedule, **options)


def renamed(plan, value):
    """The tree as its words give it back: numbers for paths, floats rounded to float32."""
    if isinstance(value, Weight):
        return dataclasses.replace(value, path=str(plan.index_of[value.path]))
    if isinstance(value, tuple):
        return tuple(renamed(plan, item) for item in value)
    if isinstance(value, float):
        return float(np.float32(value))
    if dataclasses.is_dataclass(value):
        changes = {field.name: renamed(plan, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


@pytest.mark.parametrize("name", CASES)
def test_decoded_words_are_the_plan(name):
    plan = plan_of(name, weight_dtype="bfloat16", cache_dtype="float16", rounded_activations=True)
    decoded = decode_plan(plan.words, plan.floats)
    assert decoded.plan == renamed(plan, plan)
    assert (decoded.plan.weight_dtype, decoded.plan.cache_dtype) == (Dtype.bfloat16, Dtype.float16)
    assert dict(zip(plan.weights, decoded.places, strict=True)) == {
        path: plan.places.get(path) for path in plan.weights
    }
    assert decoded.small_size == plan.small_size


@pytest.mark.parametrize("name", CASES)
def test_small_weights_have_places_of_their_own(name):
    plan = plan_of(name)
    small_weights = {path: weight for path, weight in plan.weights.items() if not weight.is_matrix}
    owners = np.full(plan.small_size, -1)
    for index, (path, weight) in enumerate(small_weights.items()):
        mine = np.full(plan.small_size, -1.0)
        values = 1 + np.arange(np.prod(plan.shape_of(path))).reshape(plan.shape_of(path))
        plan.place(mine, path, values)
        assert (mine > 0).sum() == values.size and (owners[mine > 0] == -1).all()
        owners[mine > 0] = index
        offset, stride = plan.places[path]
        for lane in range(plan.ops.lanes):
            own = values[lane] if weight.lane_sharded else values
            np.testing.assert_array_equal(mine[offset + lane * stride :][: len(own)], own)


def test_biases_of_a_product_are_one_vector_per_lane():
    plan = plan_of("biases")
    offsets = [plan.places[f"layers.1.attention.{name}_bias"] for name in ("wq", "wk", "wv")]
    rows = [plan.weights[f"layers.1.attention.{name}_bias"].shape[0] for name in ("wq", "wk", "wv")]
    assert offsets[0].offset % ALIGNED == 0
    assert [place.offset - offsets[0].offset for place in offsets] == [0, rows[0], rows[0] + rows[1]]
    assert {place.stride for place in offsets} == {sum(rows)}


def test_damaged_words_are_refused():
    plan = plan_of("dense")
    words, floats = plan.words, plan.floats
    for damaged, message in [
        (words[:-1], "must begin with"),
        (np.r_[words, 0].astype(np.int32), "must begin with"),
        (np.r_[words[:1], words[1] + 1, words[2:], 0].astype(np.int32), "1 words follow the end"),
        (np.r_[words[:1], words[1] - 1, words[2:-1]].astype(np.int32), "truncated"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode_plan(damaged, floats)
    with pytest.raises(ValueError, match="must begin with"):
        decode_plan(words, floats[:-1])


def test_a_size_beyond_32_bits_is_refused():
    config = small.make_config(max_position_embeddings=2**31)
    with pytest.raises(ValueError, match=r"2147483648, which does not fit 32 bits"):
        _ = make_plan(decoder_ops(config), config.schedule).words
