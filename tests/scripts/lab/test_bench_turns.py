"""scripts.bench_turns: table and record with a tiny model, and wrong options."""

import json

import pytest

from laneformer import custom_calls
from laneformer.commands.lab.bench_turns import main

SMALL = ("--checkpoint", "tiny", "--prompt-tokens", 40, "--answer-tokens", 6, "--new-tokens", 10, "--rounds", 2)


@pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
def test_turns_are_measured_with_kept_prefixes_and_without(tmp_path, capsys):
    assert main([*map(str, SMALL), "--backend", "cpu", "--turns", "3", "--json", str(tmp_path / "out/turns.json")]) == 0
    out = capsys.readouterr().out
    assert "time to the first token of each turn" in out and "random parameters" in out
    record = json.loads((tmp_path / "out/turns.json").read_text())
    assert [turn["prompt_tokens"] for turn in record["turns"]] == [40, 56, 72]
    assert [turn["cached_tokens"] for turn in record["turns"]] == [0, 45, 61]
    assert all(len(turn[way]) == 2 and min(turn[way]) > 0 for turn in record["turns"] for way in ("kept", "computed"))
    assert record["conditions"]["prefix_cache"] == 1 and record["options"]["turns"] == 3


@pytest.mark.parametrize(("more", "words"), [
    (("--turns", 1), "--turns must be at least 2, got 1"),
    (("--turns", 1000), "give fewer --turns"),
    (("--backend", "xla"), "backend xla keeps no prefixes: choose cpu"),
])  # fmt: skip
def test_wrong_options_are_one_line(capsys, more, words):
    assert main([str(word) for word in (*SMALL, *more)]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
