"""scripts.plot: reading of metrics files, contents of the pictures, and errors if records are missing."""

import json
import warnings

import numpy as np
import pytest

import laneformer.commands.plot
from laneformer.commands.plot import Options, Run, draw, main
from laneformer.errors import InputError

PANELS = ["loss", "optimizer", "speed", "lanes"]


def lines(steps=40, skipped=(), shift=0.0):
    """Records of a run with two phases; the first has the validation set code, the second also prose."""
    for n in range(1, steps + 1):
        record = {
            "step": n,
            "phase": "main" if n <= 30 else "decay",
            "loss": 8.0 - n / 10 + shift,
            "grad_norm": 1 / n,
            "tokens": 100 * n,
            "learning_rate": 1e-3,
            "tokens_per_second": 5000.0 + n,
            "mfu": 0.4,
        }
        yield record | ({"loss": None, "grad_norm": None, "skipped": True} if n in skipped else {})
        if n % 10 == 0:
            sets = ["code"] if n <= 30 else ["code", "prose"]
            yield {"step": n, "validation": {tag: {"loss": 7.5 - n / 10, "bits_per_byte": 2.0} for tag in sets}}
            yield {"step": n, "lanes": {"similarity": [1.0, 0.9, None], "landed_over_own": [None, 0.5, n / 10]}}


def write(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return folder


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", lines(skipped=(5, 33)))


@pytest.fixture
def figures(monkeypatch):
    """List of the figures drawn so far, which are not written."""
    saved = []
    monkeypatch.setattr(laneformer.commands.plot, "save", lambda figure, path: saved.append(figure) or path)
    return saved


def test_every_kind_of_record_is_read(run):
    read = Run(run, "C0")
    tokens, losses = read.curve("loss")
    steps = np.array([n for n in range(1, 41) if n not in (5, 33)])
    np.testing.assert_array_equal(tokens, 100 * steps)
    np.testing.assert_allclose(losses, 8.0 - steps / 10)
    assert [column.tolist() for column in read.validation("prose")] == [[4000], [3.5]]
    assert [column.tolist() for column in read.validation("code")] == [[1000, 2000, 3000, 4000], [6.5, 5.5, 4.5, 3.5]]
    assert (read.skipped, read.borders, read.name) == ([500, 3300], [(3000, "decay")], "run")
    assert len(read.curve("nothing")[0]) == 0


def drawn(axes):
    """Lines of an axes by label."""
    return {line.get_label(): line for line in axes.lines}


def test_loss_panel_shows_means_validations_and_skips(run, figures):
    draw(Options(runs=(run,)))
    [axes] = figures[0].axes
    mean = drawn(axes)["run (last: code 3.500, prose 3.500)"]
    losses = np.array([8.0 - n / 10 for n in range(1, 41) if n not in (5, 33)])
    np.testing.assert_allclose(mean.get_ydata(), [losses[i : i + 20].mean() for i in range(19)])
    tokens = np.array([100 * n for n in range(1, 41) if n not in (5, 33)])
    np.testing.assert_allclose(mean.get_xdata(), [tokens[i : i + 20].mean() for i in range(19)])
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["run (last: code 3.500, prose 3.500)", "validation, code", "validation, prose", "skipped step"]
    [border] = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(border.get_xdata()) == [3000, 3000] and [text.get_text().strip() for text in axes.texts] == ["decay"]
    assert any(list(line.get_xdata()) == [500, 3300] and line.get_marker() == "x" for line in axes.lines)


def test_all_panels_show_the_records(run, figures):
    assert draw(Options(runs=(run,), panels=tuple(PANELS))) == run / "loss-optimizer-speed-lanes.png"
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles == [
        "Loss: training, mean of 20 steps, and validation",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Model FLOPs utilization",
        "Mean cosine between lanes",
        "Parts of other lanes / own part",
    ]
    *_, speed, mfu, similarity, landed = figures[0].axes
    assert "run: median 5,020" in drawn(speed) and "run: median 40 %" in drawn(mfu)
    np.testing.assert_allclose(drawn(mfu)["run: median 40 %"].get_ydata(), 40)
    np.testing.assert_array_equal(drawn(similarity)["0.004 million tokens"].get_ydata(), [1.0, 0.9, np.nan])
    assert [line.get_ydata()[2] for line in landed.lines] == [1, 2, 3, 4]


def test_experts_are_means_over_layers(run, tmp_path, figures):
    experts = {"fullest": [1.5, 2.5], "dead": [0.0, 1.0], "entropy": [1.0, 0.5]}
    records = [line | ({"experts": experts} if "loss" in line else {}) for line in lines()]
    draw(Options(runs=(run, write(tmp_path / "experts", records)), panels=("experts",)))
    fullest, entropy = (drawn(axes)["experts"].get_ydata() for axes in figures[0].axes)
    np.testing.assert_allclose(fullest, 2.0)
    np.testing.assert_allclose(entropy, 0.75)


def test_several_runs_share_a_picture(run, tmp_path, figures):
    other = write(tmp_path / "other", (line for line in lines(shift=1.0) if "validation" not in line))
    draw(Options(runs=(run, other), panels=tuple(PANELS)))
    assert {line.get_label() for line in figures[0].axes[0].lines if line.get_label()[0] != "_"} == {
        "run (last: code 3.500, prose 3.500)",
        "other",
        "validation, code",
        "validation, prose",
        "skipped step",
    }
    assert [line.get_label() for line in figures[0].axes[-1].lines] == ["run", "other"]
    borders = [line.get_color() for line in figures[0].axes[0].lines if line.get_linestyle() == "--"]
    assert borders == ["0.4"], "both runs share one border line"


def test_spike_does_not_flatten_the_rest(tmp_path, figures):
    records = [line | ({"loss": 1e6} if line["step"] == 20 and "loss" in line else {}) for line in lines(60)]
    draw(Options(runs=(write(tmp_path / "spike", records),)))
    assert figures[0].axes[0].get_ylim()[1] < 9


@pytest.mark.parametrize(
    ("name", "panels"),
    [("first step", PANELS), ("all skipped", ["loss", "optimizer"]), ("no mfu", ["speed"]), ("one lane", ["lanes"])],
)
def test_short_and_odd_runs_draw_without_a_warning(tmp_path, name, panels):
    records = {
        "first step": list(lines(1)),
        "all skipped": list(lines(20, skipped=range(1, 21))),
        "no mfu": [{k: v for k, v in line.items() if k != "mfu"} for line in lines()],
        "one lane": [
            line | ({"lanes": {"similarity": [None], "landed_over_own": [None]}} if "lanes" in line else {})
            for line in lines()
        ],
    }[name]
    if name == "first step":
        records.append({"step": 1, "lanes": {"similarity": [1.0], "landed_over_own": [None]}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(Options(runs=(write(tmp_path / "run", records),), panels=tuple(panels))).exists()


def test_png_and_svg_are_drawn(run, tmp_path, capsys):
    assert main([str(run)]) == 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(run), str(run / "metrics.jsonl"), "--panels", *PANELS, "--out", str(tmp_path / "two.svg")]) == 0
    assert "<svg" in (tmp_path / "two.svg").read_text()
    assert capsys.readouterr().out.split() == [str(run / "loss.png"), str(tmp_path / "two.svg")]


def test_runs_without_records_raise(run, tmp_path, capsys):
    with pytest.raises(InputError, match="training steps"):
        Run(tmp_path, "C0")
    bare = write(tmp_path / "bare", (line for line in lines() if "lanes" not in line))
    assert main([str(write(tmp_path / "slow", [{"step": 1, "loss": 1.0, "tokens": 8}])), "--panels", "speed"]) == 2
    for arguments in (
        [str(tmp_path)],
        [],
        [str(bare), "--panels", "lanes"],
        [str(run), "--panels", "experts"],
        [str(run), "--window", "0"],
        [str(run), "--out", "a.pdf"],
    ):
        assert main(arguments) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
