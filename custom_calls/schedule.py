"""The schedule table as the kernels read it: whole numbers, and the weights that they point to."""

import numpy as np


def encode_schedule(schedule, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Words int32 [n] and weights float32 [m] of a laneformer.layout.Schedule; hidden: channels of a stream.

    The format stands at `Decoder::read_events` (cpu/decoder.cc). What happens at a time happens in the order of laneformer/executor.py:
    own outputs are added, then sums land; a sum that has the lane's own part adds it as part of the whole.
    """
    weights: list[float] = []
    payloads = schedule.payloads

    def weight(value: float) -> int:
        weights.append(value)
        return len(weights) - 1

    def parts(pairs) -> list[int]:
        return [len(pairs), *(word for m, w in pairs for word in (m, weight(w)))]

    words: list[int] = []
    for time in range(schedule.num_modules + 1):
        landings = [landing for landing in schedule.landings if landing.at == time]
        events = []
        for m, own in enumerate(schedule.own):
            if own.at == time and not any(schedule.own_lands_with(m, landing) for landing in landings):
                events.append([0, m, weight(own.scale)])
        for landing in landings:
            apart = [part for part in landing.payload.parts if not schedule.own_lands_with(part[0], landing)]
            events.append([1, payloads.index(landing.payload), *parts(apart)])
        words += [len(events), *(word for event in events for word in event)]
    words.append(len(payloads))
    for payload in payloads:
        mean = payload.stream_mean_at is not None
        words += [round(payload.channels * hidden), payload.complete_at, int(mean), *parts(payload.parts)]
    return np.array(words, np.int32), np.array(weights or [0.0], np.float32)
