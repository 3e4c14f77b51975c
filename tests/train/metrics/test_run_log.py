"""The log of a run: text samples are shown on the terminal and written to their file."""

import dataclasses
import json

import laneformer as lf
from laneformer.recipes.tiny import tiny
from laneformer.train.config import WatchConfig
from laneformer.train.metrics.run_log import SAMPLES, RunLog


def test_samples_are_shown_and_written(tmp_path, capsys):
    config = dataclasses.replace(tiny(), run=tmp_path, watch=WatchConfig(samples_every=5))
    record = {"sample": 0, "prompt": "def f():", "text": "\n    return '\x1b[31m'", "tokens": [1]}
    with RunLog(config, lf.make_mesh(1), 0, []) as log:
        log.sample(5, [record])
    assert capsys.readouterr().out == "step 5: samples/0\n  | def f():\n  |     return '\\x1b[31m'\n"
    (line,) = (json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines())
    assert record.items() <= line.items() and line["step"] == 5
