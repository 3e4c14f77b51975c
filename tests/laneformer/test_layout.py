"""The layouts as tables: the additions, landings and reductions of each, and the names that select them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneformer import LAYOUTS, ConfigError
from laneformer.layout import Landing, Own, Payload, make_schedule, parse_layout
from tests.support import tiny
from tests.support.reference import layouts as reference


def schedule(layout: str, n: int, lanes: int = 4, **changes):
    """The schedule of a layout for n layers."""
    return tiny.config(layout=layout, num_hidden_layers=n, num_lanes=lanes, **changes).schedule


def test_layouts_are_complete():
    """Every layout has a case and a float64 wiring; the cases are run in test_executor.py and golden/test_golden.py."""
    assert [parse_layout(case)[0] for case in reference.CASES] == list(LAYOUTS)
    assert {*reference.LAYOUTS, "laneformer"} == set(LAYOUTS)


@given(n=st.integers(1, 9), k=st.integers(1, 20), data=st.data())
def test_number_of_reductions_equals_the_formula(n, k, data):
    assert schedule("tp", n).num_reductions == 2 * n
    assert schedule("parallel", n).num_reductions == n
    assert schedule("ladder", n).num_reductions == 2 * n
    assert schedule(f"desync({k})", n).num_reductions == 2 * n // k
    drops = data.draw(st.sets(st.integers(0, n - 1)))
    assert schedule(f"spd({', '.join(map(str, drops))})", n).num_reductions == 2 * n - len(drops)
    assert schedule("caat(0.3)", n).num_reductions == 2 * n
    assert schedule("kraken", n).num_reductions == n
    assert schedule(f"track({k})", n).num_reductions == math.ceil(n / k)
    assert schedule(f"dtp({k})", n).num_reductions == max(2 * n - k, 0)
    assert schedule(f"dtp({k}.25)", n).num_reductions == max(2 * n - k, 0)
    assert schedule("none", n).num_reductions == 0


@given(n=st.integers(1, 9), d=st.integers(0, 11), early=st.booleans())
def test_laneformer_reductions_equal_the_formula(n, d, early):
    """There are 2N - 2d late sums. An early sum that lands again later is issued once, so that the 2d early sums add
    none if N >= 2d.
    """
    s = schedule("laneformer", n, broadcast_delay=d, use_early_comm=early)
    late = max(2 * n - 2 * d, 0)
    assert s.num_reductions == (max(2 * min(d, n), late) if early else late)
    landings = late + (2 * min(d, n) if early and d > 0 else 0)
    assert len(s.landings) == landings  # the early outputs land twice, as in the published code
    corrected = schedule("laneformer", n, broadcast_delay=d, use_early_comm=early, early_lands_twice=False)
    assert len(corrected.landings) == (landings if not early or d == 0 else max(2 * n - 4 * d, 0) + 2 * min(d, n))


@given(n=st.integers(1, 9), d=st.integers(0, 11), early=st.booleans(), attention=st.booleans(), mlp=st.booleans())
def test_laneformer_sends_no_unused_outputs(n, d, early, attention, mlp):
    """Other lanes do not use the late outputs of the last d layers, or of a kind of module that is not exchanged."""
    s = schedule(
        "laneformer",
        n,
        model_type="laneformer",
        broadcast_delay=d,
        use_early_comm=early,
        use_attention_comm=attention,
        use_mlp_comm=mlp,
    )
    exchanged = (attention, mlp)
    expected = [m for m in range(2 * n) if not ((early and m < 2 * d) or (exchanged[m % 2] and m + 2 * d < 2 * n))]
    assert list(s.unsent) == expected


@pytest.mark.parametrize(
    ("layout", "unsent"),
    [
        ("tp", []),
        ("ladder", []),
        ("kraken", []),
        ("dtp(2)", [4, 5]),
        ("dtp(7)", [0, 1, 2, 3, 4, 5]),
        ("none", [0, 1, 2, 3, 4, 5]),
        ("desync(2)", [0, 2, 4]),
        ("desync(4)", [0, 1, 2, 4, 5]),
        ("track(2)", []),
        ("dtp(1.5)", [5]),
    ],
)
def test_unused_outputs_are_not_sent(layout, unsent):
    assert list(schedule(layout, 3).unsent) == unsent


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        ("none", 0),
        ("tp", 1),
        ("parallel", 1),
        ("ladder", 2),
        ("kraken", 1),
        ("dtp(1)", 2),
        ("dtp(4)", 5),
        ("dtp(2.5)", 3),
    ],
)
def test_in_flight_counts_concurrent_sums(layout, count):
    """A sum is in flight from its module to its landing, inclusive, so that delay k has k + 1 sums in flight."""
    assert schedule(layout, 6).in_flight == count


def test_landings_right_after_their_module_are_exposed():
    assert len(schedule("tp", 3).exposed) == 6
    assert len(schedule("parallel", 3).exposed) == 3
    assert len(schedule("spd(1)", 3).exposed) == 5
    for layout in ("dtp(1)", "none"):
        assert schedule(layout, 3).exposed == ()
    for layout in ("ladder", "kraken"):  # no module is left to overlap with the last landing, just before the head
        assert [landing.at for landing in schedule(layout, 3).exposed] == [6]
    assert len(schedule("laneformer", 5, broadcast_delay=2, use_early_comm=True).exposed) == 4
    assert schedule("laneformer", 5, broadcast_delay=2, use_early_comm=False).exposed == ()


def test_schedules_equal_handwritten_ones():
    """A few schedules in full, written by hand."""
    one = [Payload(((m, 1.0),)) for m in range(4)]
    assert schedule("ladder", 2).own == (Own(1), Own(2), Own(3), Own(4))
    assert schedule("ladder", 2).landings == tuple(Landing(m + 1, one[m]) for m in range(4))
    assert schedule("parallel", 2).own == (Own(1), Own(1), Own(3), Own(3))
    assert schedule("kraken", 2).landings == (
        Landing(2, Payload(((0, 1.0), (1, 1.0)))),
        Landing(4, Payload(((2, 1.0), (3, 1.0)))),
    )
    assert schedule("dtp(1)", 2).own == (Own(0, 2.0), Own(1), Own(2), Own(3))  # sqrt(4), as no other part lands
    assert schedule("dtp(1)", 2).landings == tuple(Landing(m + 1, one[m]) for m in range(3))
    assert schedule("none", 2).own == tuple(Own(m, 2.0) for m in range(4))
    alone = schedule("laneformer", 2, broadcast_delay=1, use_early_comm=False)
    assert alone.own == (Own(0, 2.0), Own(1, 2.0), Own(2), Own(3))
    early = schedule("laneformer", 2, broadcast_delay=1, use_early_comm=True)
    assert early.landings == (Landing(0, one[0]), Landing(1, one[1]), Landing(2, one[0]), Landing(3, one[1]))
    assert early.payloads == (one[0], one[1])


@given(
    layout=st.sampled_from(
        ["tp", "parallel", "ladder", "desync(3)", "spd(0)", "caat(0.5)", "kraken", "track(2)", "dtp(2)", "none"]
    )
)
def test_every_schedule_is_causal_and_in_order(layout):
    for n in (1, 2, 5):
        s = schedule(layout, n)
        assert s.num_modules == 2 * n
        assert all(m <= own.at <= 2 * n for m, own in enumerate(s.own))
        assert all(landing.payload.complete_at <= landing.at <= 2 * n for landing in s.landings)
        assert [landing.at for landing in s.landings] == sorted(landing.at for landing in s.landings)
        assert [p.complete_at for p in s.payloads] == sorted(p.complete_at for p in s.payloads)


def same(a, b) -> bool:
    """Whether two schedules are equal except for their names."""
    return (a.own, a.landings) == (b.own, b.landings)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_special_cases_equal_other_layouts(n):
    tp = schedule("tp", n)
    assert same(schedule("dtp(0)", n), tp)
    assert same(schedule("desync(1)", n), tp)
    assert same(schedule("caat(1)", n), tp)
    assert same(schedule("spd()", n), tp)
    assert same(schedule("laneformer", n, broadcast_delay=n, use_early_comm=True), tp)
    assert same(schedule("laneformer", n, broadcast_delay=0), tp)
    assert same(schedule(f"dtp({2 * n})", n), schedule("none", n))
    assert same(schedule("laneformer", n, broadcast_delay=n, use_early_comm=False), schedule("none", n))
    assert same(schedule("laneformer", n, broadcast_delay=1, use_early_comm=False), schedule("dtp(2)", n))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_fractional_delay_is_between_whole_delays(k):
    """Delay k + 0.0 is exactly dtp(k). Delays close to k or k + 1 have almost the schedules of k and k + 1."""
    n = 3
    assert same(schedule(f"dtp({k}.0)", n), schedule(f"dtp({k})", n))
    for a, whole in ((1e-6, k), (1 - 1e-6, k + 1)):
        s, limit = schedule(f"dtp({k + a})", n), schedule(f"dtp({whole})", n)
        assert [own.at for own in s.own] == [own.at for own in limit.own]
        assert [own.scale for own in s.own] == pytest.approx([own.scale for own in limit.own], abs=1e-5)
        weights = {(landing.at, m): w for landing in s.landings for m, w in landing.payload.parts}
        kept = {key for key, w in weights.items() if w > 0.5}
        assert kept == {(landing.at, m) for landing in limit.landings for m, _ in landing.payload.parts}
        assert all(min(abs(w), abs(1 - w)) < 1e-5 for w in weights.values())


def test_parse_layout_returns_name_and_arguments():
    assert parse_layout("tp") == ("tp", ())
    assert parse_layout("spd(0, 2)") == ("spd", (0, 2))
    assert parse_layout("caat(0.5)") == ("caat", (0.5,))


WRONG = {
    "megatron": "unknown layout 'megatron'; choose tp, parallel",
    "": "unknown layout",
    "tp(": "unknown layout",
    "tp.x": "unknown layout",
    "tp; none": "unknown layout",
    "dtp(delta=4)": "unknown layout",
    "dtp('4')": "unknown layout",
    "dtp(True)": "unknown layout",
    "dtp(__import__('os'))": "unknown layout",
    "dtp": r"write dtp\(delta\)$",
    "dtp(1, 2)": r"write dtp\(delta\)$",
    "tp(1)": "write tp$",
    "laneformer(2)": "set broadcast_delay",
    "dtp(-1)": "delta = -1 of layout dtp must be a number at least 0",
    "dtp(1e999)": "delta = inf",
    "desync(0)": "every = 0 of layout desync must be a whole number at least 1",
    "desync(1.5)": "every = 1.5 .* whole number",
    "spd(3)": "drop = 3 .* whole number at least 0 and below 3",
    "spd(-1)": "drop = -1",
    "caat(0)": "share = 0 .* above 0 and at most 1",
    "caat(1.5)": "share = 1.5",
    "track(0)": "block = 0",
}


@pytest.mark.parametrize("layout", WRONG)
def test_wrong_layouts_are_refused(layout):
    with pytest.raises(ConfigError, match=WRONG[layout]) as caught:
        tiny.config(layout=layout)
    assert "layout" in str(caught.value)


@pytest.mark.parametrize("layout", [None, 3, ["tp"], {"tp": 1}, b"tp"])
def test_layouts_other_than_strings_are_refused(layout):
    with pytest.raises(ConfigError, match=r"layout = .*choose tp"):
        tiny.config().replace(layout=layout)


def test_huge_whole_arguments_are_valid():
    assert schedule("desync(" + "9" * 400 + ")", 2).num_reductions == 0


def test_schedule_is_made_once():
    assert make_schedule(tiny.config()) is make_schedule(tiny.config())
