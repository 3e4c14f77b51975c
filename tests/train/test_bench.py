"""The training benchmark: its entries, and figures that follow from the measured times."""

import json

import pytest

from laneformer.errors import ConfigError
from laneformer.train.bench import Bench, Entry, _summary, entries, main
from laneformer.train.flops import train_flops_per_token
from tests.support.tiny_recipe import RECIPE, tiny


def test_entries_combine_recipes_and_layouts():
    found = entries(Bench(recipes=(RECIPE, f"{RECIPE} --mesh.lane 2"), layouts=("tp", "dtp(2)")))
    assert [(entry.layout, entry.dense) for entry in found] == [("tp", False), ("dtp(2)", False)] * 2 + [(None, True)]
    assert [entry.config.model.layout for entry in found[:2]] == ["tp", "dtp(2)"]
    assert [entry.config.mesh.lane for entry in found] == [None, None, 2, 2, None]
    assert len({entry.name for entry in found}) == 5
    assert [entry.config for entry in entries(Bench(recipes=(RECIPE,), dense=False))] == [tiny()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipes": ("no_such",)}, "no_such"),
        ({"recipes": (RECIPE,), "layouts": ("tq",)}, "'tq'"),
        ({"recipes": (RECIPE,), "rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"recipes": ()}, "recipe"),
    ],
)
def test_bad_options_raise_before_anything_runs(options, message):
    with pytest.raises(ConfigError, match=message):
        entries(Bench(**options))


def test_figures_are_derived_from_the_times():
    """Eight devices with a known peak take 128 tokens per step. The median is over all steps of both rounds."""
    result = {
        "mesh": {"data": 1, "lane": 8},
        "precision": "bfloat16",
        "device": "NVIDIA H200",
        "compile_seconds": 1.0,
        "peak_bytes": None,
    }
    rounds = [{**result, "seconds": s, "processor_seconds": s} for s in ([0.5, 0.1, 0.2], [0.4, 0.3])]
    found = _summary(Entry(name="x", recipe=(RECIPE,)), rounds)
    assert found["step_seconds"]["median"] == 0.3 and found["step_seconds"]["quartiles"] == [0.2, 0.4]
    assert found["tokens_per_second"] == pytest.approx(128 / 0.3)
    flops = train_flops_per_token(tiny().model, 16) * 128 / 0.3
    assert found["mfu"] == pytest.approx(flops / (8 * 989.5e12)) and found["model_flops_per_second"] == pytest.approx(
        flops
    )


@pytest.mark.exhaustive
def test_bench_runs_on_this_machine(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main([RECIPE, "--steps", "2", "--rounds", "1", "--json", str(file)]) == 0
    out, written = capsys.readouterr().out, json.loads(file.read_text())
    ours, dense = written["entries"]
    assert (ours["mesh"], dense["mesh"]) == ({"data": 1, "lane": 8}, {})
    assert ours["mfu"] is None and len(ours["step_seconds"]["all"][0]) == 2 and dense["steps_per_second"] > 0
    assert (
        written["conditions"]["device"] == "cpu"
        and written["conditions"]["jax"] in out
        and out.count("| 8 x 16 |") == 2
    )


def test_failure_in_a_process_is_one_line(capsys):
    """The mesh needs four times as many devices as the process has."""
    assert main([f"{RECIPE} --mesh.host-devices 2 --mesh.lane 8", "--rounds", "1", "--no-dense"]) == 2
    assert "needs 8 devices" in capsys.readouterr().err
