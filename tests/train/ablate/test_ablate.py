"""Ablations: grids expand to cells, finished cells are not repeated, interrupted cells resume, and a failed cell stops
no other.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from laneformer import LAYOUTS, ConfigError
from laneformer.errors import InputError
from laneformer.layout import make_schedule
from laneformer.recipes.ablations import RECIPES
from laneformer.train.ablate import plots as ablate_plots
from laneformer.train.ablate.__main__ import main, read
from laneformer.train.ablate.grid import Grid, cross, every_layout, variant
from laneformer.train.ablate.listing import listing
from laneformer.train.ablate.probe import exchanged_late
from laneformer.train.ablate.report import write_report
from laneformer.train.ablate.results import collect, delay_of, summarize
from laneformer.train.ablate.run import Runner, duration, finished, progress
from laneformer.train.recipes import find_recipe
from tests.support.paths import ROOT, TESTS
from tests.support.tiny_recipe import changed, environment, finish, wait_until
from tests.support.training.tiny_grid import at, final_loss, grid, pretend, twice

GRID = f"{TESTS / 'support/training/tiny_grid.py'}:grid"


@pytest.fixture(autouse=True)
def new_layout(monkeypatch):
    monkeypatch.setitem(LAYOUTS, "twice", twice)


# Grids.


def test_grid_is_variants_times_seeds_on_the_same_tokens():
    made = grid(variants=cross(("tp", "dtp(1)"), num_lanes=(2, 4)), seeds=(3, 5), probe={}, reference="tp, 4 lanes")
    assert [cell.name for cell in made.cells] == [
        f"{layout}, {lanes} lanes #{seed}" for seed in (3, 5) for layout in ("tp", "dtp(1)") for lanes in (2, 4)
    ]
    for cell in made.cells:
        assert (
            cell.config.data == made.base.data
            and cell.config.steps == made.base.steps
            and cell.config.seed == cell.seed
        )
        assert (cell.config.model.layout, cell.config.model.num_lanes) == (
            cell.variant.model["layout"],
            cell.variant.model["num_lanes"],
        )
    assert len({cell.folder for cell in made.cells}) == len(made.cells)
    assert all(
        cell.folder == cell.config.run_folder and cell.folder.parent == made.folder / "cells" for cell in made.cells
    )


def test_every_layout_has_every_row_of_the_table():
    model = grid().base.model
    named = {v.model["layout"].split("(")[0] for v in every_layout(model)}
    assert named == set(LAYOUTS) and "twice" in named
    assert len(every_layout(model, num_lanes=(2, 4))) == 2 * len(LAYOUTS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variants": (variant("tp"), variant("tp"))}, "two variants 'tp'"),
        (
            {"variants": (variant("tp", "a b"), variant("tp", "a,b")), "reference": "a b", "probe": {}},
            "two folders 'a_b'",
        ),
        ({"seeds": (1, 1)}, "two seeds 1"),
        ({"seeds": ()}, "no seeds"),
        ({"reference": "dtp(1)"}, "'dtp(1)'; choose tp, twice"),
        ({"probe": {"nope": (1,)}}, "'nope'"),
        ({"variants": (variant("tp"), variant("tp", "x", num_lanes=3))}, "variant 'x': num_lanes"),
        ({"variants": (variant("tp"), variant("tp", "x", lanes=3))}, "variant 'x' sets lanes"),
        ({"variants": (variant("tp"), variant("dpt(1)"))}, "variant 'dpt(1)': "),
    ],
)
def test_bad_grids_raise(changes, expected):
    with pytest.raises(ConfigError) as error:
        grid(**changes)
    assert expected in str(error.value)


def test_cell_folder_depends_only_on_settings(tmp_path):
    before = {cell.name: cell.folder for cell in at(tmp_path).cells}
    variants = (variant("none"), variant("twice"), variant("tp"))
    more = {cell.name: cell.folder for cell in at(tmp_path, variants=variants, seeds=(1, 0)).cells}
    assert before.items() <= more.items()
    base = at(tmp_path).base
    for option, value, same in (
        ("save_every", 9, True),
        ("keep", 7, True),
        ("steps", 13, False),
        ("optimizer__learning_rate", 1e-5, False),
        ("data__seed", 1, False),
        ("data__validation_batches", 1, False),
    ):
        other = dataclasses.replace(at(tmp_path), base=changed(base, **{option: value}))
        assert ({cell.folder for cell in other.cells} == set(before.values())) == same, option


@pytest.mark.parametrize("name", RECIPES)
def test_our_grids_are_complete_and_documented(name):
    made = find_recipe(name, "laneformer.recipes.ablations", Grid)
    assert made.name == name
    assert {v.name for v in made.variants} >= {"tp", "dtp(2)", "none"}
    for v in made.variants:
        schedule = made.projected_model(v).schedule
        assert schedule.num_modules == 2 * made.projected.num_hidden_layers


def test_options_reach_the_base_and_choose_variants(tmp_path):
    options, made = read(
        [GRID, "--run", str(tmp_path), "--base.steps", "7", "--base.data.path", "a", "--seeds", "4", "5", "--jobs", "2"]
    )
    assert (made.folder, made.base.steps, made.base.data.path, made.seeds, options.jobs) == (
        tmp_path,
        7,
        (Path("a"),),
        (4, 5),
        2,
    )
    assert [v.name for v in read([GRID, "--only", "tw*"])[1].variants] == ["tp", "twice"], (
        "the reference is always kept"
    )
    assert read([GRID, "--only", "tp"])[1].probe == {"tp": (0, 2)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([GRID, "--base.steps", "0"], "steps must be at least 1, got 0"),
        ([GRID, "--only", "x*"], "--only x* "),
        ([GRID, "--jobs", "0"], "--jobs must be at least 1, got 0"),
        ([GRID, "--jobs", "2", "--devices", "0", "1"], "--devices"),
        ([GRID, "--cell", "nope"], "--cell nope"),
        ([GRID, "--nope"], "--nope"),
        ([GRID, "--measured", "nope.json"], "--measured nope.json"),
        (["nope"], "'nope'; choose tiny"),
        ([GRID.replace(":grid", ":at")], "tiny_grid.py:at"),
        (["--jobs", "2"], "--jobs precedes the recipe"),
    ],
)
def test_bad_options_are_one_line(capsys, arguments, expected):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


# Reports.


def test_report_has_known_numbers(tmp_path):
    variants = (variant("tp"), variant("dtp(1)"), variant("dtp(1)", num_lanes=2), variant("twice"))
    made = at(tmp_path, variants=variants, seeds=(0, 1, 2), probe={})
    known = {"tp": (3.0, 3.1, 3.2), "dtp(1)": (3.5, 3.6, 3.7), "dtp(1), 2 lanes": (3.2, 3.0, 3.4)}
    lanes = {"similarity": [1.0, 0.5, 0.25, 0.125, 0.0625], "landed_over_own": [None, 2.0, 2.0, 2.0, None]}
    experts = {"fullest": [1.5, 2.5], "dead": [0.0, 1.0], "entropy": [1.0, 0.5]}
    probe = {"loss": 3.0, "tokens": 10.0, "by_layer": {"2": [3.5, 3.001]}}
    for cell in made.cells:
        if cell.variant.name in known:
            end = known[cell.variant.name][cell.seed]
            shared = lanes | ({"experts_in_common": [0.5, 1.0]} if cell.variant.name == "tp" else {})
            own = experts if cell.variant.name == "tp" else None
            pretend(cell, [5.0, end], lanes=shared, probe=probe if cell.name == "tp #0" else None, experts=own)
    expected = write_report(made)
    rows = {}
    for line in expected.splitlines():
        name, *parts = (part.strip() for part in line.strip("|").split("|"))
        rows[name] = [name, *parts]
    # 2 layers are 4 modules: tp waits for each of 4 exchanges; dtp(1) sends 3 and waits for none.
    assert rows["tp"][1:8] == ["4", "0", "3.1000 ± 0.1000", "", "3", "4", "4"]
    assert rows["dtp(1)"][1:8] == ["4", "1", "3.6000 ± 0.1000", "**+0.5000 ± 0.0000**", "3", "3", "0"]
    assert rows["dtp(1), 2 lanes"][1:8] == ["2", "1", "3.2000 ± 0.2000", "+0.1000 ± 0.4303", "3", "3", "0"]
    assert rows["twice"][1:-1] == [""] * 9 and rows["twice"][-1].endswith("not trained yet")
    speeds = [float(rows[name][8].split()[0].replace(",", "")) for name in ("tp", "dtp(1)")]
    assert speeds[0] < speeds[1] and "(4 devices)" in rows["tp"][8] and "(2 devices)" in rows["dtp(1), 2 lanes"][8]
    written = (tmp_path / "report.md").read_text()
    assert "9 of 12 cells are finished; **3 are missing**" in written and "projected" in written
    assert "| tp | 0.500 | 0.250 | 0.062 | 2.00 |" in written
    assert "| tp | 2 | +500.0 | +1.0 |" in written
    assert "| tp | 2.00 | 0.50 | 0.75 | 0.75 |\n\n## Sensitivity" in written, "only models with experts have a row"
    raw = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(r["variant"], r["seed"], r["loss"], r["bits_per_byte"], r["seconds"]) for r in raw[:2]] == [
        ("tp", 0, 3.0, 6.0, 60.0),
        ("dtp(1)", 0, 3.5, 7.0, 60.0),
    ]
    assert raw[0]["curve"] == [[600, 5.0], [1200, 3.0]]
    for name in ("curves", "loss", "frontier", "exposed", "lanes", "probe"):
        assert f"({name}.png)" in written and (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_hybrid_grid_has_every_share_with_every_layout():
    made = find_recipe("hybrid", "laneformer.recipes.ablations", Grid)
    shares = {v.name: made.model(v).delta_layers for v in made.variants}
    assert {len(layers) for layers in shares.values()} == {0, 4, 6} and len(shares) == 12
    assert shares["dtp(4), 6 of 8 DeltaNet"] == (0, 1, 2, 4, 5, 6), "attention is in the last layer of every four"
    assert shares["none, 4 of 8 DeltaNet"] == (0, 2, 4, 6)
    for v in made.variants:
        blocks = [layer.attention for layer in made.projected_model(v).layers]
        assert sum(type(options).__name__ == "DeltaNetOptions" for options in blocks) == len(shares[v.name])


def test_report_compares_layouts_within_models(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_plots, "draw", lambda *_: {})
    names = ("tp", "dtp(2)", "tp, 4 of 8 DeltaNet", "dtp(2), 4 of 8 DeltaNet")
    recipe = find_recipe("hybrid", "laneformer.recipes.ablations", Grid)
    made = dataclasses.replace(
        recipe,
        base=dataclasses.replace(recipe.base, run=tmp_path),
        variants=tuple(v for v in recipe.variants if v.name in names),
    )
    known = dict(zip(names, (3.0, 3.125, 3.5, 3.75), strict=True))
    for cell in made.cells:
        pretend(cell, [known[cell.variant.name] + cell.seed / 8])
    table = write_report(made)
    assert "| dtp(2), 4 of 8 DeltaNet | 4 | 2 | 3.8750 ± 0.1250 | **+0.7500 ± 0.0000** |" in table
    written = (tmp_path / "report.md").read_text()
    assert "| dtp(2), 4 of 8 DeltaNet | tp, 4 of 8 DeltaNet | **+0.2500 ± 0.0000** | 3 |" in written
    assert written.count("| tp, 4 of 8 DeltaNet | ") == 2, "a layout is not compared with itself"
    assert "| dtp(2) | tp |" not in written, "the first table has this comparison"


def test_report_has_measured_and_projected_speeds(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_plots, "draw", lambda *_: {})
    made = at(tmp_path, seeds=(0,), probe={})
    for cell in made.cells:
        pretend(cell, [3.0])
    file = tmp_path / "measured.json"
    file.write_text('{"twice": 1234.4}')
    assert "| 1,234 |" in write_report(made, file)
    # The format of infer bench --layouts.
    record = {"conditions": {"model": {"layout": "tp"}}, "metrics": {"decode_tps": {"sustained_median": 777.3}}}
    file.write_text(json.dumps([record]))
    assert "| 777 |" in write_report(made, file)
    for wrong, expected in (
        ('{"nope": 1}', "nope; choose tp"),
        ("[1]", "give a JSON file"),
        ('{"tp": "fast"}', "could not convert"),
        (json.dumps([record, record]), "several records of one layout"),
    ):
        file.write_text(wrong)
        with pytest.raises(InputError, match=expected):
            write_report(made, file)


def test_difference_is_clear_only_if_seeds_agree(tmp_path):
    made = at(tmp_path, seeds=(0, 1, 2), probe={})
    # The differences have the same sign, but t = 0.117 / 0.044 = 2.6, below the required 4.3.
    noise = {"tp": (3.0, 3.0, 3.0), "twice": (3.05, 3.1, 3.2)}
    for cell in made.cells:
        pretend(cell, [noise[cell.variant.name][cell.seed]])
    other = summarize(made, collect(made))[1]
    assert np.isclose(other.difference, 0.35 / 3) and not other.clear
    again = dataclasses.replace(other, losses={"0": 3.09, "1": 3.1, "2": 3.11})
    assert np.isclose(again.difference, 0.1) and again.clear, "t = 17"
    assert not dataclasses.replace(other, losses={"0": 3.1, "1": 3.1}).clear, "two seeds are too few"


@pytest.mark.parametrize("n", [3, 4, 9, 10, 11, 30, 200])
def test_interval_is_that_of_scipy(tmp_path, n):
    """A difference that is a little more or less than the quantile times its standard error."""
    made = at(tmp_path, seeds=(0,), probe={})
    for cell in made.cells:
        pretend(cell, [3.0])
    summary = summarize(made, collect(made))[1]
    noise = np.random.default_rng(n).standard_normal(n)
    reference = {str(run): 3.0 for run in range(n)}
    low, high = stats.t.interval(0.95, n - 1, loc=noise.mean(), scale=stats.sem(noise))
    for shift, clear in ((1.001, True), (0.999, False)):
        losses = {str(run): 3 + x - noise.mean() + shift * (high - low) / 2 for run, x in enumerate(noise.tolist())}
        found = dataclasses.replace(summary, losses=losses, reference=reference)
        assert np.isclose(found.margin, (high - low) / 2) and found.clear == clear


def test_runs_that_do_not_count_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_plots, "draw", lambda *_: {})
    made = at(tmp_path, variants=tuple(variant("tp", name) for name in ("tp", "b", "c")), seeds=(0, 1, 2), probe={})
    for cell in made.cells:
        if cell.name not in ("b #1", "b #2", "c #0", "c #1"):
            pretend(cell, [float("nan") if cell.name == "c #2" else 3.0 + cell.seed])
    broken = next(cell for cell in made.cells if cell.name == "b #1")
    broken.folder.mkdir(parents=True)
    (broken.folder / "failed.txt").write_text("10 steps in a row were skipped | see log\n")
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in write_report(made).splitlines()]
    counted = {row[0]: (row[3], row[5], row[-1]) for row in rows if row[0] in ("tp", "b", "c")}
    assert counted["tp"] == ("4.0000 ± 1.0000", "3", "")
    failed = "seed 1: failed, 10 steps in a row were skipped / see log"
    assert counted["b"] == ("3.0000", "1", f"{failed}; seed 2: not trained yet")
    assert counted["c"] == ("", "", "seed 0, 1: not trained yet; seed 2: diverged, validation loss nan")


def test_orders_of_the_data_are_a_second_kind_of_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_plots, "draw", lambda *_: {})
    made = at(tmp_path, seeds=(0, 1), orders=(7, 8), probe={"twice": (2,)})
    assert [cell.name for cell in made.cells][:4] == ["tp #0/7", "twice #0/7", "tp #0/8", "twice #0/8"]
    assert [(cell.config.seed, cell.config.data.seed) for cell in made.cells[::2]] == [(0, 7), (0, 8), (1, 7), (1, 8)]
    assert len({cell.folder for cell in made.cells}) == 8 and [bool(cell.probe) for cell in made.cells] == [
        cell.name == "twice #0/7" for cell in made.cells
    ]
    for n, cell in enumerate(made.cells):
        pretend(cell, [3.0 + n], probe={"loss": 3.0, "by_layer": {"2": [3.0, 3.0]}} if cell.probe else None)
    table = write_report(made)
    assert "| +1.0000 ± 0.0000" in table.replace("**", "")
    assert "in 2 orders for every seed" in (tmp_path / "report.md").read_text()
    assert "x 2 seeds x 2 orders = 8 cells" in listing(made, [{}])
    with pytest.raises(ConfigError, match="two orders 7"):
        at(tmp_path, orders=(7, 7))


def test_report_without_finished_cells_raises(tmp_path, capsys):
    assert main([GRID, "--run", str(tmp_path), "--report-only"]) == 2
    assert "no cell of grid tiny is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "delay"),
    [
        ("tp", 0),
        ("parallel", 1),
        ("ladder", 1),
        ("desync(1)", 0),
        ("desync(3)", 2),
        ("kraken", 2),
        ("track(2)", 3),
        ("dtp(5)", 5),
        ("dtp(2.5)", 3),
        ("laneformer", 4),
        ("none", None),
        ("spd(1)", 1),
    ],
)
def test_delay_of_each_layout_is_known(layout, delay):
    model = find_recipe("tiny", "laneformer.recipes.ablations", Grid).base.model
    assert delay_of(make_schedule(model.replace(layout=layout))) == delay


# The probe.


def test_exchanges_of_one_layer_move():
    model = grid().base.model
    schedule = model.replace(layout="tp").schedule
    assert exchanged_late(schedule, 0, 0) == schedule
    assert [(x.at, x.payload.complete_at) for x in exchanged_late(schedule, 0, 2).landings] == [
        (2, 0),
        (2, 2),
        (3, 1),
        (3, 3),
    ]
    assert [x.at for x in exchanged_late(schedule, 1, 9).landings] == [0, 1, 4, 4], (
        "exchanges land before the final norm at the latest"
    )
    delayed = model.replace(layout="dtp(2)").schedule
    assert [x.at for x in exchanged_late(delayed, 0, 0).landings] == [0, 1]
    with pytest.raises(ConfigError, match="desync"):
        exchanged_late(model.replace(layout="desync(2)").schedule, 0, 1)


# Running cells. Except in the last tests, cells are fake programs of a few lines.

DONE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "checkpoints" / "12").mkdir(parents=True)
record = {"step": 12, "loss": 1.0, "tokens": 1, "validation": {"x": {"loss": 2.5}}}
(folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
"""


def program(code: str, cell) -> list[str]:
    return [sys.executable, "-S", "-c", code, str(cell.folder)]


def test_failed_cell_stops_no_other_and_is_retried(tmp_path, capsys):
    made = at(tmp_path, variants=tuple(variant("tp", name) for name in ("tp", "b", "c", "d")), probe={})
    wrong = "import sys; print('error: no such thing', file=sys.stderr); sys.exit(2)"
    codes = {"tp": DONE, "b": wrong, "c": "import os; print('hm', flush=True); os.abort()", "d": DONE}
    runner = Runner(made.cells, [{}], lambda cell: program(codes[cell.variant.name], cell))
    assert runner.run() is None
    assert [cell.name for cell in runner.done] == ["tp #0", "d #0"]
    assert {cell.name: reason for cell, reason in runner.failed.items()} == {
        "b #0": "no such thing",
        "c #0": "killed by SIGABRT: hm",
    }
    out = capsys.readouterr().out
    assert "b #0: FAILED, no such thing (see " in out and "tp #0: done in " in out and "validation loss 2.5000" in out
    again = Runner(made.cells, [{}, {}], lambda cell: program(DONE, cell))
    assert [cell.name for cell in again.waiting] == ["b #0", "c #0"], "finished cells are never repeated"
    again.run()
    assert len(again.done) == 4 and not again.failed


def test_ctrl_c_saves_and_ends_the_cells(tmp_path, capsys):
    made = at(tmp_path, probe={})
    patient = (
        "import pathlib, signal, sys, time\n"
        "def save(*_): pathlib.Path(sys.argv[1], 'saved').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save); pathlib.Path(sys.argv[1], 'up').touch(); time.sleep(60)"
    )
    runner = Runner(made.cells, [{}, {}], lambda cell: program(patient, cell))

    def interrupt():
        while not all((cell.folder / "up").exists() for cell in made.cells):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert runner.run() == signal.SIGINT
    thread.join()
    assert all((cell.folder / "saved").exists() for cell in made.cells)
    assert all(job.process.poll() == 143 for job in runner.jobs)
    assert "stopping: 2 cells save first" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_process_gets_its_devices(tmp_path):
    made = at(tmp_path, probe={})
    code = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'devices').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        + DONE
    )
    Runner(
        made.cells, [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}], lambda cell: program(code, cell)
    ).run()
    assert [(cell.folder / "devices").read_text() for cell in made.cells] == ["0,1", "2,3"]


def test_listing_shows_cells_tokens_and_time(tmp_path):
    made = at(tmp_path, seeds=(0, 1), probe={}, minutes=None)
    text = listing(made, [{}, {}])
    assert "2 variants x 2 seeds = 4 cells of 1,536 tokens (12 steps)" in text
    assert "0 cells are finished, 0 to resume, 4 new" in text and "time: unknown" in text
    pretend(made.cells[0], [3.0])
    text = listing(made, [{}, {}])
    assert "1 cells are finished, 0 to resume, 3 new" in text
    assert "about 60 s per cell" in text and "90 s with 2 at a time" in text
    states = [line.split()[2] for line in text.splitlines() if line.startswith("  t")]
    assert states == ["done", "new", "new", "new"]
    other = dataclasses.replace(made, base=changed(made.base, steps=24))
    assert "4 new; 1 folders with other settings" in listing(other, [{}])


def test_progress_reads_the_end_of_a_long_file(tmp_path):
    made = at(tmp_path, probe={})
    cell = made.cells[0]
    assert progress(cell).step == 0
    cell.folder.mkdir(parents=True)
    lines = [json.dumps({"step": n, "loss": 1 / n, "step_seconds": 0.25, "filler": "x" * 50}) for n in range(1, 1001)]
    (cell.folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1001, "lo')
    found = progress(cell)
    assert (found.step, found.loss, found.step_seconds) == (1000, 0.001, 0.25)
    assert not finished(cell)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(5, "5 s"), (119, "119 s"), (600, "10 min"), (7200, "2.0 h"), (200_000, "2.3 days")]
)
def test_durations_are_written_with_units(seconds, expected):
    assert duration(seconds) == expected


def test_table_fits_the_terminal(tmp_path):
    made = at(tmp_path, variants=tuple(variant("tp", f"v{n}") for n in range(30)), reference="v0", probe={})
    pretend(made.cells[0], [2.75])
    runner = Runner(made.cells, [{}], lambda cell: program("import sys; sys.exit(3)", cell))
    runner.failed[runner.waiting.pop()] = "exit status 3"
    lines = runner.board.table(os.terminal_size((60, 12)))
    assert len(lines) <= 12 and all(len(line) < 60 for line in lines)
    assert (
        lines[0].split() == ["cell", "state", "step", "loss", "left"]
        and lines[-1] == "1 done, 1 failed, 28 waiting of 30 cells"
    )
    assert any(line.startswith("v29 #0") and "failed" in line for line in lines) and any(
        "2.7500 held out" in line for line in lines
    )


@pytest.mark.slow
def test_cell_is_an_ordinary_run_and_is_probed(tmp_path, store, monkeypatch, capsys):
    monkeypatch.setattr("laneformer.train.ablate.__main__._die_with_parent", lambda: None)
    options = [
        GRID,
        "--run",
        str(tmp_path),
        "--base.data.path",
        str(store),
        "--base.steps",
        "3",
        "--base.optimizer.warmup-steps",
        "1",
        "--base.mesh.lane",
        "1",
    ]
    cell = read(options)[1].cells[0]
    assert main([*options, "--cell", cell.folder.name]) == 0
    assert "tp #0: " in capsys.readouterr().out and finished(cell)
    probe = json.loads((cell.folder / "probe.json").read_text())
    assert probe["by_layer"]["0"] == [probe["loss"]] * 2, "a delay of 0 in one layer changes nothing"
    assert 1e-6 < abs(probe["by_layer"]["2"][0] - probe["loss"]) < 1
    assert np.isclose(probe["loss"], final_loss(cell), rtol=1e-6), "the probe reads the validation rows of the run"
    assert main([*options, "--cell", cell.folder.name]) == 0
    assert "nothing to do" in capsys.readouterr().out


def start(run: Path, store: Path, *options: str) -> subprocess.Popen:
    recipe = GRID.replace(":grid", ":registered")
    command = [
        sys.executable,
        "-m",
        "laneformer.train.ablate",
        recipe,
        "--run",
        str(run),
        "--base.data.path",
        str(store),
        *options,
    ]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.exhaustive
def test_killed_grid_resumes_to_its_end(tmp_path, store):
    """A grid of two cells is killed in the middle, resumes to its end, and then has nothing to do.

    Only the file of the recipe registers the layout of the second cell.
    """
    run = tmp_path / "grid"
    first = start(run, store)
    try:
        assert wait_until(first, lambda: any(run.glob("cells/tp-*/checkpoints/3")))
        started = next(run.glob("cells/tp-*"))
    finally:
        first.kill()
        first.communicate()
    assert not (started / "checkpoints" / "12").exists()
    status, out, err = finish(start(run, store))
    assert (status, err) == (0, "")
    assert (
        "0 cells are finished, 1 to resume, 1 new" in out
        and "tp #0: resumes after step" in out
        and "twice #0: starts" in out
    )
    _, made = read([GRID, "--run", str(run), "--base.data.path", str(store)])
    assert all(finished(cell) for cell in made.cells)
    assert f"| twice | 4 | 0 | {final_loss(made.cells[1]):.4f} |" in out and (run / "report.md").exists()
    before = {path: path.stat().st_mtime_ns for path in run.glob("cells/*/metrics.jsonl")}
    status, out, err = finish(start(run, store))
    assert (status, err) == (0, "") and "2 cells are finished, 0 to resume, 0 new" in out and "starts" not in out
    assert before == {path: path.stat().st_mtime_ns for path in run.glob("cells/*/metrics.jsonl")}
