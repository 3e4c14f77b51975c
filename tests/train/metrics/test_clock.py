"""The clock charges every nanosecond to exactly one bucket."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer.train.metrics.clock import BUCKETS, Clock

# Events of a run: nanoseconds pass (an integer), a bucket is entered (its name), the innermost bucket is left (None),
# or an interval ends ("interval").
EVENTS = st.lists(
    st.one_of(st.integers(0, 10**12), st.sampled_from(BUCKETS), st.none(), st.just("interval")), max_size=60
)


class Now:
    def __init__(self, at=0):
        self.at = at

    def __call__(self):
        return self.at


def nanoseconds(seconds):
    return {bucket: round(value * 1e9) for bucket, value in seconds.items()}


@given(events=EVENTS, start=st.integers(0, 10**15))
def test_every_nanosecond_is_charged_to_the_innermost_bucket(events, start):
    now = Now(start)
    clock, entered, intervals = Clock(now=now), [], []
    expected = dict.fromkeys(BUCKETS, 0)
    for event in events:
        if isinstance(event, int):
            now.at += event
            expected[entered[-1][0] if entered else "other"] += event
        elif event == "interval":
            intervals.append(nanoseconds(clock.interval()))
        elif event is not None:
            context = clock(event)
            context.__enter__()
            entered.append((event, context))
        elif entered:
            entered.pop()[1].__exit__(None, None, None)
    assert nanoseconds(clock.total()) == expected
    intervals.append(nanoseconds(clock.interval()))
    assert {bucket: sum(interval[bucket] for interval in intervals) for bucket in BUCKETS} == expected
    assert sum(expected.values()) == now.at - start


def test_records_of_earlier_processes_count_in_the_total():
    now = Now()
    first = Clock(now=now)
    with first("compile"):
        now.at += 7_000_000_001
    records = [{"step": 1, "loss": 2.0}, json.loads(json.dumps({"step": 1, "time": first.interval()}))]
    with first("step"):
        now.at += 5
    records.append({"step": 2, "time": first.interval()})
    second = Clock(records, now=now)
    with second("compile"):
        now.at += 4
    assert nanoseconds(second.total()) == dict.fromkeys(BUCKETS, 0) | {"compile": 7_000_000_005, "step": 5}
    assert nanoseconds(second.interval()) == dict.fromkeys(BUCKETS, 0) | {"compile": 4}


def test_error_leaves_the_bucket():
    now = Now()
    clock = Clock(now=now)
    with pytest.raises(OSError, match="gone"), clock("data"):
        now.at += 3
        raise OSError("gone")
    now.at += 2
    assert nanoseconds(clock.total()) == dict.fromkeys(BUCKETS, 0) | {"data": 3, "other": 2}


def test_buckets_add_up_to_the_wall_time():
    before = time.perf_counter()
    clock = Clock()
    inside = time.perf_counter()
    for bucket in BUCKETS:
        with clock(bucket):
            math.factorial(2000)
    least = time.perf_counter() - inside
    total = sum(clock.total().values())
    assert least <= total <= time.perf_counter() - before


def test_unknown_bucket_raises():
    with pytest.raises(KeyError), Clock()("lunch"):
        pass
