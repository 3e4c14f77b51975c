"""The report about several concurrent requests, on a small model and with known clocks."""

import itertools
import json
import re
import types

import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.infer import Engine
from laneformer.infer.__main__ import main
from laneformer.infer.bench import mixed
from laneformer.infer.bench.mixed import Load, report, table
from tests.support.checkpoints import save_checkpoint
from tests.support.engine_cases import model

needs_library = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
QUESTIONS = ["several requests", "first token", "mixed load", "prompt length", "peak and sustained"]


@needs_library
def test_every_question_has_its_rows():
    engine = Engine(model(), "cpu", parallel=4, prefix_cache=0, chaos_us=50)
    engine.session.speculate(0, [1.0] * 16)
    lines = []
    rows = report(engine, Load(8, 1), lines.append)
    assert list(dict.fromkeys(row.question for row in rows)) == QUESTIONS and len(lines) == len(rows)
    assert [row.case for row in rows[:3]] == [f"{n} at once, prompts of 16" for n in (1, 2, 4)]
    assert [row.case for row in rows if row.question == "prompt length"] == ["64, alone", "512, alone"]
    assert all(float(number) > 0 for row in rows for number in re.findall(r"(\d[\d.]*) tokens/s", row.figures))
    assert table(rows).count("\n") == len(rows) + 1
    assert not engine._generations()


@needs_library
def test_single_request_engine_has_no_mixed_load():
    rows = report(Engine(model(), "cpu", prefix_cache=0), Load(8, 1))
    assert [row.question for row in rows if row.question in QUESTIONS[::2]] == [
        "several requests",
        "peak and sustained",
    ]


def test_rates_count_the_tokens_of_a_stretch():
    client = mixed._Client(iter(()), 0.0)
    client.end()
    client.times = [0.5, 1.0, 1.5, 2.0, 4.0]
    assert client.rate(0.5, 2.0) == 2.0 and client.rate(2.0, 4.0) == 0.5


def test_gain_is_that_of_the_summed_rates(monkeypatch):
    """Two concurrent requests at 0.8 of the speed of one have 1.6 times its speed together."""
    rates = {1: [[10.0]], 2: [[8.0, 8.5], [8.0, 7.0], [8.0, 8.0]]}
    rounds = {count: itertools.cycle(each) for count, each in rates.items()}
    monkeypatch.setattr(mixed, "_together", lambda engine, load, count: next(rounds[count]))
    rows = mixed._several(types.SimpleNamespace(parallel=3), Load(runs=3))
    assert [row.figures for row in rows] == [
        "10.0 tokens/s",
        "16.0 tokens/s, 1.60 times one; the slowest request 0.80 of its speed alone",
    ]


def test_requests_that_wait_for_each_other_have_no_rate(monkeypatch):
    times = {1: [[0.0, 1.0, 2.0]], 2: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}

    def start(engine, load, number, *_):
        client = mixed._Client(iter(()), 0.0)
        client.end()
        client.times = times[engine.parallel][number]
        return client

    monkeypatch.setattr(mixed, "_start", start)
    assert mixed._together(types.SimpleNamespace(parallel=2), Load(), 1) == [1.0]
    assert mixed._together(types.SimpleNamespace(parallel=2), Load(), 2) == []
    [_, row] = mixed._several(types.SimpleNamespace(parallel=2), Load(runs=1))
    assert "some waited" in row.figures and "tokens/s" not in row.figures


@needs_library
def test_command_prints_the_table_with_its_conditions(tmp_path, capsys):
    folder, file = save_checkpoint(tmp_path / "small"), tmp_path / "out" / "mixed.json"
    ask = ("--parallel", "2", "--output-tokens", "8", "--runs", "1", "--json", str(file), "--backend", "cpu")
    assert main(["bench", "--checkpoint", str(folder), "--mixed", *ask]) == 0
    out = capsys.readouterr().out
    assert "| several requests | 2 at once, prompts of 16 |" in out and "parallel 2" in out
    written = json.loads(file.read_text())
    assert written["conditions"]["runs"] == 1 and written["conditions"]["random_weights"] is False
    assert np.all([set(row) == {"question", "case", "figures"} for row in written["rows"]])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--parallel", "2"), "--parallel 2 needs --mixed"),
        (("--mixed", "--parallel", "0"), "--parallel must be at least 1, got 0"),
        (("--mixed", "--compare", "cpu,xla"), "give either --mixed or --compare"),
        (("--mixed", "--weights", "int8,int4"), "--mixed measures one format of weights, got --weights int8,int4"),
        (("--mixed", "--output-tokens", "100000"), "--mixed with 100000 output tokens needs a context of 400016"),
    ],
)
def test_wrong_options_are_one_line(args, message, tmp_path, capsys):
    assert main(["bench", "--checkpoint", str(save_checkpoint(tmp_path / "small")), *args]) == 2
    assert message in capsys.readouterr().err
