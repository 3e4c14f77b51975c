"""Splits the wall time of a run into a few buckets that add up to it."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

BUCKETS = ("compile", "data", "step", "eval", "save", "other")


class Clock:
    """Charges every nanosecond since its construction to one bucket, so that the buckets add up to the wall time.

        with clock("eval"): ...

    Of nested buckets only the innermost is charged; time outside every bucket goes to "other". Not thread-safe.
    """

    def __init__(self, before: Iterable[dict] = (), *, now: Callable[[], int] = time.perf_counter_ns):
        """before: records of earlier processes of the run, whose "time" (from `interval`) counts in `total`."""
        self._now, self._last, self._open = now, now(), ["other"]
        self._total, self._interval = dict.fromkeys(BUCKETS, 0), dict.fromkeys(BUCKETS, 0)
        for record in before:
            for bucket, seconds in record.get("time", {}).items():
                self._total[bucket] += round(seconds * 1e9)

    @contextmanager
    def __call__(self, bucket: str) -> Iterator[None]:
        """Charges the time inside to `bucket`, one of BUCKETS."""
        self._charge()
        self._open.append(bucket)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def interval(self) -> dict[str, float]:
        """Seconds by bucket since the last call; they add up to the wall time between the two calls."""
        self._charge()
        seconds = _seconds(self._interval)
        self._interval = dict.fromkeys(BUCKETS, 0)
        return seconds

    def total(self) -> dict[str, float]:
        """Seconds by bucket of the whole run until now, including the earlier processes in `before`."""
        self._charge()
        return _seconds(self._total)

    def _charge(self) -> None:
        now = self._now()
        for times in (self._total, self._interval):
            times[self._open[-1]] += now - self._last
        self._last = now


def _seconds(nanoseconds: dict[str, int]) -> dict[str, float]:
    return {bucket: n / 1e9 for bucket, n in nanoseconds.items()}
