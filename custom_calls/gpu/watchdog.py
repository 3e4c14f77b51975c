"""What the CTAs waited for when a call failed: the records of the kernel's watchdog (gpu/kernel/params.h), as text."""

from collections.abc import Sequence

import numpy as np

STUCK = np.dtype(
    [
        ("call", np.uint32),
        ("where", np.int32),
        ("lane", np.int32),
        ("cta", np.int32),
        ("layer", np.int32),
        ("op", np.int32),
        ("waited_for", np.int32),
        ("tag", np.uint32),
        ("seen", np.uint32),
        ("time_ns", np.int64),
    ],
    align=True,
)
"""A record, as `Stuck` in gpu/kernel/params.h: the first wait in which a thread of a CTA gave up."""
WAITS = (
    "",
    "check-in of lane",
    "channel",
    "attention's word",
    "part of lane",
    "packet word",
    "logit of token",
    "",
    "",
    "spare CTA of device",
)
"""The waits of gpu/kernel/params.h whose `waited_for` is a number that says what was missing."""
WEIGHTS = 8
"""`where` of a copy of weights that did not complete; `waited_for` is then a slot among those of all warps' rings."""
PLACE = ["where", "lane", "layer", "op"]
MOST_GROUPS = 6


def describe(records: np.ndarray, ops: Sequence[str], slots: int) -> str:
    """The records as one line: the groups of CTAs that waited in the same place, the first one first; at most
    MOST_GROUPS.

    records: array of STUCK in the order of their times. ops: names of the ops (GpuSession.ops). slots: slots of a
    warp's ring.
    """
    groups: dict[tuple, list[np.void]] = {}
    for record in records:
        groups.setdefault(tuple(record[PLACE].tolist()), []).append(record)
    listed = [_group(own, ops, slots, int(records["time_ns"][0])) for own in list(groups.values())[:MOST_GROUPS]]
    more = len(groups) - len(listed)
    return "; ".join(listed) + (f"; and {more} more groups" if more else "")


def _group(own: list[np.void], ops: Sequence[str], slots: int, began: int) -> str:
    first = own[0]
    layer = f", layer {first['layer']}" if first["layer"] >= 0 else ""
    op = f", {ops[first['op']]}" if 0 <= first["op"] < len(ops) else ""
    after = f", {(first['time_ns'] - began) / 1e6:.1f} ms later" if first["time_ns"] > began else ""
    return f"{_ctas(own)} of lane {first['lane']}{layer}{op}: {_missing(first, slots)}{after}"


def _missing(first: np.void, slots: int) -> str:
    if first["where"] == WEIGHTS:
        return f"weights for slot {first['waited_for'] % slots} of warp {first['waited_for'] // slots} did not arrive"
    seen = "has arrived since" if first["seen"] == first["tag"] else f"has {first['seen']}"
    return f"{WAITS[first['where']]} {first['waited_for']}, waits for tag {first['tag']}, {seen}"


def _ctas(own: list[np.void]) -> str:
    """The CTAs as ranges: CTA 3, CTAs 0-4 and 7."""
    numbers = sorted({int(record["cta"]) for record in own})
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges]
    listed = ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else texts[0]
    return f"CTA{'s' if len(numbers) > 1 else ''} {listed}"
