"""Measurements that a session makes once on each machine."""

import pytest

from laneformer.custom_calls import build, fastest_way, measured
from laneformer.custom_calls.cpu import session
from laneformer.custom_calls.library import instruction_sets
from tests.support import small


@small.needs_library
def test_speedup_of_two_ways_is_measured():
    best = instruction_sets()[0]
    assert 0.05 < measured.speedup((best, True), (best, False), 1)[0] < 20
    assert measured.speedup((best, True), ("avx9000", False), 1) == (0, False)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"a": "b"}'])
def test_measurements_are_kept_in_a_file(monkeypatch, tmp_path, content):
    """The file is created, or replaced if its content is invalid."""
    speeds = iter([(1.25, True), (1.5, True), (0.5, True)])
    monkeypatch.setattr(measured, "speedup", lambda way, over, threads: next(speeds))
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    if content is not None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / measured.NAME).write_text(content)
    assert [measured.bf12_gain("avx2", 2) for _ in range(2)] == [1.25, 1.25]
    assert [measured.amx_gain("avx2", 2) for _ in range(2)] == [1.5, 1.5]
    assert measured.bf12_gain("avx2", 1) == 0.5
    assert len(measured._read(tmp_path / "cache" / measured.NAME)) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [measured.NAME]


def test_disturbed_measurement_is_not_kept(monkeypatch, tmp_path):
    speeds = iter([(4.0, False), (1.25, True)])
    monkeypatch.setattr(measured, "speedup", lambda way, over, threads: next(speeds))
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    assert [measured.bf12_gain("avx2", 2) for _ in range(3)] == [4.0, 1.25, 1.25]


def test_prices_are_kept_if_more_rows_are_not_faster(monkeypatch, tmp_path):
    seconds = iter([[2.0, 4.0, 3.0], [2.0, 1.99, 5.0]])
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    found = [measured.pass_prices("a model", lambda: next(seconds)) for _ in range(3)]
    assert found == [[1, 2, 2], [1, 1, 2.5], [1, 1, 2.5]]


def test_unwritable_folder_causes_no_error(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(measured, "speedup", lambda way, over, threads: (1.25, True))
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    assert measured.bf12_gain("avx2", 2) == 1.25


@pytest.mark.parametrize(
    ("gains", "given", "wanted"),
    [
        # gains: of AMX over the other set, of 12 bits with AMX, of 12 bits with the other set
        ((0.99, 0.8, 1.0), {}, ("amx", False)),
        ((0.97, 0.8, 1.0), {}, ("avx512", False)),
        ((1.05, 0.8, 1.3), {}, ("avx512", True)),
        ((1.05, 0.8, 1.3), {"bf12": False}, ("amx", False)),
        ((1.05, 0.8, 1.3), {"bf12": True}, ("avx512", True)),
        ((1.05, 1.3, 1.2), {}, ("amx", True)),
        ((1.05, 0.8, 1.3), {"instructions": "amx"}, ("amx", False)),
        ((1.05, 0.8, 1.3), {"instructions": "avx512", "bf12": False}, ("avx512", False)),
    ],
)
def test_fastest_way_is_chosen(monkeypatch, gains, given, wanted):
    of_amx, narrow_amx, narrow = gains
    monkeypatch.setattr(session, "instruction_sets", lambda: ["avx512", "avx2", "amx"])
    monkeypatch.setattr(session, "amx_gain", lambda over, threads: of_amx)
    monkeypatch.setattr(session, "bf12_gain", lambda name, threads: narrow_amx if name == "amx" else narrow)
    assert fastest_way(1, **given) == wanted


def test_small_gain_of_12_bits_is_not_used_without_amx(monkeypatch):
    monkeypatch.setattr(session, "instruction_sets", lambda: ["avx2"])
    monkeypatch.setattr(session, "bf12_gain", lambda name, threads: 1.02)
    assert fastest_way(1) == ("avx2", False)
