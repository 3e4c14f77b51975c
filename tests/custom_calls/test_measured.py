"""Measurements that are made once on a machine."""

import pytest

from custom_calls import build, measured
from custom_calls.library import instruction_sets
from tests.support import small


@small.needs_library
def test_ways_to_multiply_are_measured():
    best = instruction_sets()[0]
    assert 0.05 < measured.speedup((best, True), (best, False), 1) < 20
    assert measured.speedup((best, True), ("avx9000", False), 1) == 0


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"a": "b"}'])
def test_a_measurement_is_kept(monkeypatch, tmp_path, content):
    """In a file that is made, or replaced where it is something else."""
    speeds = iter([1.25, 1.5, 0.5])
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


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(measured, "speedup", lambda way, over, threads: 1.25)
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    assert measured.bf12_gain("avx2", 2) == 1.25
