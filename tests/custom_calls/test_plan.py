"""The schedule table as words: read back and run on toy modules, it does what the layout's row says."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from custom_calls import encode_schedule
from laneformer import LAYOUTS
from laneformer.layout import Landing, Own, Payload, Schedule

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
