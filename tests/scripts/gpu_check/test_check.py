"""scripts.gpu_check without a GPU: commands of the stages exist, stages keep their time limits, a failed stage does not
stop the others, and the report contains the measurements.
"""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from infer.commands import bench
from scripts import gpu_rank
from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import report, stage
from scripts.gpu_check.stage import PYTHON, ROOT, Stage, filled
from scripts.gpu_check.stages import GPU, RINGS, SMALLEST, TEST_FILES, TESTS, stages
from train import bench as train_bench
from train.planning.plan import DryRun
from train.recipes import parse

MACHINE = {"test": "machine", "device": "a device"}
RING = {
    "test": "ring",
    "unit": "us",
    "ctas": 128,
    "slot_bytes": 4096,
    "median": 1234.5,
    "min": 1200.0,
    "p95": 1300.0,
    "gb_per_s": 3456.7,
}


def only(monkeypatch, *listed):
    monkeypatch.setattr(gpu_check, "stages", lambda: list(listed))


def python(name, seconds, *codes, **options):
    return Stage(name, seconds, tuple((PYTHON, "-c", code) for code in codes), **options)


def of(name):
    return next(s for s in stages() if s.name == name)


def test_dry_run_prints_every_stage_and_writes_nothing(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "results"), "--dry-run"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith("  ")] == [
        s.name for s in stages() if s.usual
    ]
    assert f"{tmp_path}/results/micro ring" not in done.stdout and f"{tmp_path}/results/ring_2k ring" in done.stdout
    assert not (tmp_path / "results").exists()


def commands_of(*module):
    found = [
        command for each in stages() for command in each.commands if command[1 : 2 + len(module)] == ("-m", *module)
    ]
    return [command[2 + len(module) :] for command in found]


def test_benchmark_stages_have_valid_options():
    for command in commands_of("infer", "bench"):
        options = tyro.cli(bench.Options, args=command)
        bench.backends(options)
        assert all(int(n) + options.output_tokens <= 4096 for n in options.context.split(","))
        assert str(options.json).startswith("{out}/")


def test_training_stages_have_valid_options():
    timed = [tyro.cli(train_bench.Bench, args=command) for command in commands_of("train.bench")]
    assert [entry.layout for each in timed for entry in train_bench.entries(each)] == list(GPU.layouts)
    (planned,) = commands_of("train")
    options, rest = tyro.cli(
        DryRun, args=[word for word in planned if word != "--dry-run"], return_unknown_args=True, add_help=False
    )
    assert options.cluster.device == "{device}" and str(options.json) == "{out}/plan-0.json"
    config = parse(rest)
    whole = parse(["laneformer_120m"])
    part = [each.data.batch_size // each.accumulate for each in (config, whole)]
    assert part[0] == part[1], "each part of the batch has as many rows as in the recipe"


def test_rank_stage_has_valid_options_and_is_reported(tmp_path):
    (command,) = of("rank").commands
    options = tyro.cli(gpu_rank.Options, args=command[3:])
    assert options.recipe == GPU.dense and str(options.json) == "{out}/rank.json"
    (tmp_path / "rank.log").write_text(
        "tp, delay 0 us: 1.0 us per token\n| layout | delay us | ...\n| tp | 0 | ...\n\nemulated\n"
    )
    (tmp_path / "rank.json").write_text("[]")
    text = report.report(tmp_path, [])
    assert "## One rank" in text and "| tp | 0 | ..." in text and "us per token" not in text
    assert report.records(tmp_path) == {}


def test_report_has_each_ratio_once(tmp_path):
    note = (
        "prompt of 128: ratio of the medians of tokens/s, cuda / cuda-graph = 1.500; their runs took turns in one"
        " process"
    )
    (tmp_path / "compare-float16.json").write_text(json.dumps([{"notes": ["random weights", note]}, {"notes": [note]}]))
    text = report.report(tmp_path, [])
    assert text.count(f"\n- {note}\n") == 1 and "- random weights" not in text
    (command,) = of("compare").commands
    assert "cuda,cuda-graph,xla" in command, "the run also measures the fastest other way to launch the kernel"


def test_named_files_and_tests_exist():
    words = [word for stage in stages() for command in stage.commands for word in command]
    files = [word for word in words if word.startswith("-I") or (word.endswith((".py", ".cu")) and "*" not in word)]
    assert files and all((ROOT / word.removeprefix("-I")).exists() for word in files)
    tests = [
        node.name
        for node in ast.walk(ast.parse((ROOT / TEST_FILES[0]).read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert SMALLEST[-1].split()[0] in tests


def test_important_stages_fit_the_time():
    budgets = [stage.seconds for stage in stages()]
    assert all(budget >= 30 for budget in budgets)
    until = [stage.name for stage in stages()].index("train")
    assert sum(budgets[:until]) < 530


@pytest.mark.parametrize("name", RINGS)
def test_rings_fit_shared_memory(name):
    warps, lines, slots = RINGS[name][:3]
    assert warps * slots * (512 * lines + 8) < 232_448 - 1024
    assert slots * lines >= 4 + lines - 1, "the 4 lines of a step fit the ring from any line of a slot"
    assert 16384 // warps % lines == 0, "a pass ends at the end of a slot"


def test_failed_and_late_stages_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    only(
        monkeypatch,
        python("breaks", 20, "print('words of it'); raise SystemExit(3)", "open('made', 'w')"),
        python("late", 1, "import time; time.sleep(60)"),
        python("slow checker", 1, "import time; time.sleep(60)", may_time_out=True),
        Stage("not here", 20, (("no-such-program",),)),
        python("works", 20, f"print({json.dumps(json.dumps(RING))})"),
    )
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    assert gpu_check.main([str(tmp_path / "out")]) == 1
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(s["stage"], s["status"]) for s in data["stages"]] == [
        ("breaks", "failed"),
        ("late", "out of time"),
        ("slow checker", "no verdict"),
        ("not here", "failed"),
        ("works", "passed"),
    ]
    assert data["stages"][0]["detail"] == "command 0: status 3" and "no-such-program" in data["stages"][3]["detail"]
    assert (tmp_path / "made").exists(), "commands after a failed one run too"
    assert (tmp_path / "out" / "breaks-0.log").read_text() == "words of it\n"
    assert "| late | out of time |" in capsys.readouterr().out


def test_diagnosing_stages_run_next(tmp_path, monkeypatch):
    others = [python(name, 20, "pass") for name in ("measures", "checks", "measures more", "checks more")]
    only(monkeypatch, python("begins", 20, "raise SystemExit(1)", if_failed=("checks", "checks more")), *others)
    assert gpu_check.main([str(tmp_path)]) == 1
    ran = [each["stage"] for each in json.loads((tmp_path / "report.json").read_text())["stages"]]
    assert ran == ["begins", "checks", "checks more", "measures", "measures more"]
    known = [stage.name for stage in stages()]
    assert all(name in known for stage in stages() for name in stage.if_failed)


def test_stages_share_compiled_programs_and_tests_do_not(tmp_path, monkeypatch):
    code = "import os; print(os.environ.get('JAX_COMPILATION_CACHE_DIR'))"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    only(monkeypatch, python("measures", 20, code), python("tests", 20, code, environment=TESTS))
    gpu_check.main([str(tmp_path)])
    assert [(tmp_path / f"{name}.log").read_text() for name in ("measures", "tests")] == [f"{tmp_path}/xla\n", "None\n"]


def test_all_passed_is_status_0(tmp_path, monkeypatch):
    only(
        monkeypatch, python("works", 20, "pass"), python("checker", 1, "import time; time.sleep(9)", may_time_out=True)
    )
    assert gpu_check.main([str(tmp_path)]) == 0


def test_stages_without_time_are_left_out(tmp_path, monkeypatch):
    only(monkeypatch, python("works", 20, "pass"))
    assert gpu_check.main([str(tmp_path), "--seconds", "20"]) == 0
    assert "| works | left out |" in (tmp_path / "report.md").read_text()


def test_together_commands_run_at_the_same_time(tmp_path, monkeypatch):
    wait = "import pathlib, time\nopen({own!r}, 'w')\nwhile not pathlib.Path({other!r}).exists(): time.sleep(0.01)"
    only(
        monkeypatch, python("pair", 20, wait.format(own="a", other="b"), wait.format(own="b", other="a"), together=True)
    )
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    assert gpu_check.main([str(tmp_path / "out")]) == 0


def test_measurements_become_rows_without_broken_lines(tmp_path):
    (tmp_path / "micro-0.log").write_text("\n".join(map(json.dumps, (MACHINE, RING))) + '\n{"test": "ed')
    lines = report.measurements(tmp_path)
    assert lines == [MACHINE, RING]
    assert report.micro_table(lines)[2:] == [
        "| machine | device a device |  |  |  |  |  |",
        "| ring | ctas 128, slot_bytes 4096 | 1,234.50 | 1,200.00 | 1,300.00 | us | 3,457 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "nosuch"], "unknown stage nosuch"),
        (["--wheels", "nowhere"], "--wheels nowhere"),
        (["--budget", "900"], "--budget must be above 900"),
        (["--budget", "2400", "--stages", "build"], "either --stages or --budget"),
        (["--budget", "2400", "--corpus", "nowhere"], "nowhere does not exist"),
        (["--humaneval", __file__], "need --budget"),
        (["--seconds", "0"], "--seconds must be at least 1, got 0"),
    ],
)
def test_bad_options_are_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        gpu_check.main(arguments)
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.exhaustive if n else pytest.mark.slow) for n in range(len(RINGS))]
)
def test_microbenchmarks_compile(number, tmp_path):
    command = filled(of("build").commands[1 + number], {"out": tmp_path})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    without = subprocess.run(
        [command[-1]], capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert without.returncode == 1 and json.loads(without.stdout)["test"] == "error"
    assert Path(command[-1]).stat().st_size > 0
