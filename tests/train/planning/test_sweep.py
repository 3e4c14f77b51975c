"""python -m train --dry-run --sweep mesh: figures of every mesh, the fastest choice, and the printed table."""

import dataclasses
import json

import pytest

from laneformer.train.__main__ import main
from laneformer.train.flops import train_flops_per_token
from laneformer.train.planning.cluster import find_device
from laneformer.train.planning.plan import USABLE
from laneformer.train.planning.sweep import SweepConfig, fastest, mesh_sweep, meshes, points, sweep
from tests.support.tiny_recipe import RECIPE, changed, tiny


@pytest.mark.parametrize(
    ("lanes", "devices", "expected"),
    [(8, 16, [(16, 1), (8, 2), (4, 4), (2, 8)]), (8, 2, [(2, 1), (1, 2)]), (6, 8, [(8, 1), (4, 2)]), (1, 3, [(3, 1)])],
)
def test_meshes_use_all_devices(lanes, devices, expected):
    assert list(meshes(lanes, devices)) == expected


def test_fastest_choice_fits_and_no_other_is_faster():
    device = find_device("h200", 8)
    memory = sorted(p.figures.memory for p in points(tiny(), device, 0.6, 2, 4))
    device = dataclasses.replace(device, memory=memory[len(memory) // 2] / USABLE)
    found = points(tiny(), device, 0.6, 2, 4)
    assert {(p.phase.accumulate, p.remat) for p in found} == {
        (n, remat) for n in (1, 2, 4) for remat in ("none", "dots", "block")
    }
    fitting = [p for p in found if p.figures.memory <= USABLE * device.memory]
    assert 0 < len(fitting) < len(found), "some points fit and some do not"
    best = fastest(found)
    assert best in fitting and best.times.in_turn == pytest.approx(min(p.times.in_turn for p in fitting), rel=0.01)
    assert fastest([p for p in found if p not in fitting]) is None


def test_row_figures_match_hand_computation():
    """Days and cost of a trillion tokens, and MFU."""
    config = changed(tiny(), data__batch_size=64)
    records, _ = sweep(config, SweepConfig(gpus=(8,), price=3.0))
    assert [(r["data"], r["lane"], r["lanes_per_device"]) for r in records] == [
        (8, 1, 8),
        (4, 2, 4),
        (2, 4, 2),
        (1, 8, 1),
    ]
    assert sum(r["best"] for r in records) == 1
    tokens = 64 * 16
    for r in records:
        for n, seconds in enumerate(r["step_seconds"]):
            days = 1e12 / tokens * seconds / 86_400
            assert r["days_per_trillion_tokens"][n] == pytest.approx(days)
            assert r["cost_per_trillion_tokens"][n] == pytest.approx(days * 24 * 8 * 3.0)
            flops = train_flops_per_token(config.model, 16) * tokens
            assert r["mfu"][n] == pytest.approx(flops / seconds / 8 / 989.5e12)


def test_meshes_that_do_not_fit_give_the_reason():
    config = changed(tiny(), data__batch_size=8)
    records, text = sweep(config, SweepConfig(gpus=(8, 16)))
    assert [r["fits"] for r in records] == [True] * 4 + [False] + [True] * 3
    assert records[4]["why"] == "a batch of 8 sequences does not divide into 16 shares"
    assert "does not fit: a batch of 8 sequences" in text
    model = config.model.replace(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=48)
    records, text = sweep(dataclasses.replace(config, model=model), SweepConfig(gpus=(8,), best=True))
    assert not any(r["fits"] for r in records) and text.count("does not fit: state ") == 1
    assert "exceed 92% of 151 GB" in text


def test_command_prints_a_table_and_writes_all_figures(capsys, tmp_path):
    file = tmp_path / "meshes.json"
    options = ["--gpus", "8", "16", "--price", "2", "--json", str(file), "--data.batch-size", "64"]
    assert main([RECIPE, "--dry-run", "--sweep", "mesh", *options]) == 0
    out = capsys.readouterr().out
    assert "64 x 16 tokens per step" in out and "cost per 1T tokens" in out and out.count(" *") >= 2
    assert "projected" in out and "not measured" in out
    written = json.loads(file.read_text())
    assert written["projected"] and len(written["meshes"]) == 8
    assert "cost" not in mesh_sweep([RECIPE, "--sweep", "mesh", "--gpus", "8"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--sweep", "lanes"], "--sweep"),
        (["--sweep", "mesh", "--gpus", "0"], "--gpus"),
        (["--sweep", "mesh", "--gpus"], "--gpus"),
        (["--sweep", "mesh", "--price", "-1"], "--price"),
        (["--sweep", "mesh", "--cluster.nodes", "2"], "--gpus"),
        (["--sweep", "mesh", "--cluster.device", "cpu"], "'cpu'"),
        (["--sweep", "mesh", "--cluster.device", "mi300x"], "--cluster.network"),
        (["--sweep", "mesh", "--nope", "1"], "--nope"),
    ],
)
def test_bad_options_are_one_line(capsys, options, named):
    assert main([RECIPE, "--dry-run", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_unwritable_file_is_one_line(capsys, tmp_path):
    options = ["--sweep", "mesh", "--gpus", "8", "--json", str(tmp_path / "no" / "file.json")]
    assert main([RECIPE, "--dry-run", *options]) == 2
    assert "--json" in capsys.readouterr().err
