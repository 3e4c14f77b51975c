"""Measurements that are made once on a machine."""

import pytest

from custom_calls import build, measured
from custom_calls.library import instruction_sets
from tests.support import small


@small.needs_library
def test_weights_in_both_formats_are_measured():
    assert 0.05 < measured.bf12_speedup(instruction_sets()[0], 1) < 20
    assert measured.bf12_speedup("avx9000", 1) == 0


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"a": "b"}'])
def test_a_measurement_is_kept(monkeypatch, tmp_path, content):
    """In a file that is made, or replaced where it is something else."""
    speeds = iter([1.25, 1.5])
    monkeypatch.setattr(measured, "bf12_speedup", lambda instructions, threads: next(speeds))
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    if content is not None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / measured.NAME).write_text(content)
    assert [measured.bf12_gain("avx2", 2) for _ in range(2)] == [1.25, 1.25]
    assert measured.bf12_gain("avx2", 1) == 1.5
    assert len(measured._read(tmp_path / "cache" / measured.NAME)) == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [measured.NAME]


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(measured, "bf12_speedup", lambda instructions, threads: 1.25)
    monkeypatch.setattr(build, "cache", lambda: tmp_path / "cache")
    assert measured.bf12_gain("avx2", 2) == 1.25
