"""The records of the watchdog: where each CTA of a failed call waited, on emulated GPUs that lose a word or a copy."""

import re

import jax
import numpy as np
import pytest

from laneformer.custom_calls import ENDS
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu import watchdog
from tests.support import emulated, small
from tests.support.gpu_cases import jitted

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated]


@pytest.fixture(scope="module")
def session():
    config, weights = small.windowed_model()
    return emulated.make_session(config, weights, timeout_ms=400)


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=8)


@pytest.fixture
def lose(session, call, monkeypatch):
    """Runs a call in which the first thread of a CTA loses its n-th word or copy, and returns its outputs."""

    def run(cta, n, what):
        monkeypatch.setenv("EMULATOR_LOST", f"{cta},{n},{what}")
        config, _ = small.windowed_model()
        session.begin()
        try:
            return call(small.make_inputs([3, 1, 4], 8), small.make_state(config, 64))[0]
        finally:
            monkeypatch.delenv("EMULATOR_LOST")

    return run


def test_lost_word_is_named_by_every_cta_that_waits(session, lose):
    """The first word of a CTA's first thread is the check-in, the second its first channel of the embedding."""
    ctas = session.layout.ctas
    lane, c = 1, 1
    outputs = lose(lane * ctas + c, 2, "word")
    assert outputs.status.tolist()[:2] == [0, len(ENDS)]
    records = session.stuck()
    assert (np.diff(records["time_ns"]) >= 0).all() and len(np.unique(records[["lane", "cta"]])) == len(records)
    of_lane = records[records["lane"] == lane]
    assert sorted(of_lane["cta"]) == list(range(ctas))
    for record in of_lane:
        assert session.ops[record["op"]] == "qkv" and record["layer"] == 0
        assert record["where"] == watchdog.WAITS.index("channel")
        assert record["waited_for"] == c * session.layout.stream_rows
        assert record["seen"] != record["tag"]
    assert len(np.unique(of_lane["tag"])) == len(np.unique(of_lane["seen"])) == 1
    others = records[records["lane"] != lane]
    of_landings = others[others["where"] == watchdog.WAITS.index("part of lane")]
    # On a busy machine one of them may wait for another lane, which waits for this one.
    assert len(others) > 0 and (len(of_landings) == 0 or lane in of_landings["waited_for"])
    named = f"CTAs 0-{ctas - 1} of lane {lane}, layer 0, qkv: channel {c * session.layout.stream_rows}"
    assert "timed out waiting for" in session.failure and named in session.failure and "\n" not in session.failure
    session.begin()
    assert session.failure is None and len(session.stuck()) == 0


def test_lost_copy_of_weights_is_named_and_ends_the_launch(session, lose, capfd):
    """The driver reports an error, and the records outlast the launch."""
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(lose(2, session.layout.memory.slots + 3, "copy"))
    assert "has trapped" in capfd.readouterr().err
    records = session.stuck()
    own = records[records["where"] == watchdog.WEIGHTS]
    assert len(own) == 1 and (own["lane"], own["cta"]) == divmod(2, session.layout.ctas)
    assert "a copy of weights" in session.failure
    assert re.search(r"CTA 0 of lane 1.*: weights for slot \d+ of warp 0 did not arrive", session.failure)
    assert len(records) > 1, "others waited for this CTA"


def test_records_have_the_fields_of_the_header():
    params = (gpu_build.SOURCES / "params.h").read_text()
    struct = re.search(r"struct Stuck {(.*?)};", params, re.DOTALL)[1]
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", struct))
    assert tuple(names) == watchdog.STUCK.names
    waits = re.search(r"enum Waits {(.*?)}", params, re.DOTALL)[1].replace(" ", "").replace("\n", "").split(",")
    assert waits.index("kAtWeights") == watchdog.WEIGHTS and len(watchdog.WAITS) == len(waits)


def records(*rows):
    """Records of (where, lane, CTA, layer, op, waited_for, tag, seen, time)."""
    return np.array([(64, *row) for row in rows], watchdog.STUCK)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [(2, 0, c, 3, 5, 24, 71, 7, 10) for c in (0, 1, 2, 4)] + [(4, 1, 0, 3, 7, 0, 9, 9, 2_000_010)],
            "CTAs 0-2 and 4 of lane 0, layer 3, f: channel 24, waits for tag 71, has 7; CTA 0 of lane 1, layer 3, h:"
            " part of lane 0, waits for tag 9, has arrived since, 2.0 ms later",
        ),
        ([(1, 2, 3, -1, -1, 5, 64, 0, 1)], "CTA 3 of lane 2: check-in of lane 5, waits for tag 64, has 0"),
        ([(8, 0, 7, 1, 1, 15, 0, 0, 1)], "CTA 7 of lane 0, layer 1, b: weights for slot 3 of warp 2 did not arrive"),
        ([], ""),
    ],
)
def test_records_read_as_groups(rows, expected):
    assert watchdog.describe(records(*rows), "abcdefgh", slots=6) == expected


def test_only_the_first_groups_are_listed():
    text = watchdog.describe(records(*((2, lane, 0, 0, 0, 0, 1, 0, lane) for lane in range(8))), "a", slots=4)
    assert text.count("CTA 0") == watchdog.MOST_GROUPS and text.endswith("and 2 more groups")
