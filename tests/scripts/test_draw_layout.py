"""scripts.draw_layout: pictures of every layout contain the figures of its schedule."""

import re

import pytest

from laneformer.commands.draw_layout import Options, draw, main, schedule_of
from laneformer.layout import LAYOUTS

ARGUMENTS = {"desync": "(2)", "spd": "(0, 2)", "caat": "(0.5)", "track": "(2)", "dtp": "(1.5)"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_drawn(tmp_path, name):
    options = Options(layout=name + ARGUMENTS.get(name, ""), layers=3, lanes=2, out=tmp_path / "x.svg")
    picture = draw(options).read_text()
    schedule = schedule_of(options)
    reported = re.search(r"(\d+) modules, (\d+) lanes, (\d+) reductions, (\d+) of (\d+) landings exposed", picture)
    assert tuple(map(int, reported.groups())) == (
        6,
        2,
        schedule.num_reductions,
        len(schedule.exposed),
        len(schedule.landings),
    )
    assert picture.count(">attn 2<") == 2  # one box per lane


def test_picture_is_reproducible(tmp_path):
    first, second = (
        draw(Options(layout="kraken", layers=2, out=tmp_path / name)).read_bytes() for name in ("a.svg", "b.svg")
    )
    assert first == second


@pytest.mark.parametrize(
    "arguments", [("nosuch",), ("dtp",), ("tp", "--layers", "0"), ("tp", "--out", "picture.nosuch")]
)
def test_bad_options_are_one_line(capsys, arguments):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
