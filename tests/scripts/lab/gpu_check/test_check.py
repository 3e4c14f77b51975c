"""scripts.gpu_check without a GPU: commands of the stages exist, stages keep their time limits, a failed stage does not
stop the others, and the report contains the measurements.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from laneformer.commands.lab import gpu_decode, gpu_rank, gpu_rows
from laneformer.commands.lab.gpu_check import __main__ as gpu_check
from laneformer.commands.lab.gpu_check import figures, ladder, report, stage, torch_graph
from laneformer.commands.lab.gpu_check.stage import PYTHON, ROOT, Stage, filled
from laneformer.commands.lab.gpu_check.stages import CALLS, GPU, RINGS, RUNGS, TESTS, TOOLS, VARIANTS, stages
from laneformer.custom_calls.gpu import variants
from laneformer.infer.commands import bench
from laneformer.train import bench as train_bench
from laneformer.train.planning.plan import DryRun
from laneformer.train.recipes import parse

MACHINE = {"test": "machine", "device": "a device", "memory_bytes": 80, "sm_mhz_seen": 1700, "sm_mhz_most": 1980}
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
    """Lets the check have only these stages, in call 1."""
    monkeypatch.setattr(gpu_check, "stages", lambda: [replace(s, call=1) for s in listed])


def python(name, seconds, *codes, **options):
    return Stage(name, seconds, tuple((PYTHON, "-c", code) for code in codes), **options)


def of(name):
    return next(s for s in stages() if s.name == name)


def test_dry_run_prints_both_calls_and_writes_nothing(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "results"), "--dry-run"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    named = [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith("  ")]
    diagnosis = [f"if ladder fails, {name}" for name in of("ladder").if_failed]
    first, second = ([s.name for s in stages() if s.call == call] for call in CALLS)
    after_ladder = first.index("ladder") + 1
    first[after_ladder:after_ladder] = diagnosis
    assert named == ["call 1", *first, "call 2", *second]
    assert f"{tmp_path}/results/micro ring" not in done.stdout and f"{tmp_path}/results/ring_2k ring" in done.stdout
    assert "call 1: ends within 420 s" in done.stdout and "call 2: ends within 300 s" in done.stdout
    assert not (tmp_path / "results").exists()


def test_calls_have_the_planned_order_and_time():
    first, second = ([s.name for s in stages() if s.call == call] for call in CALLS)
    asked = [
        "machine",
        "build",
        "micro",
        "ladder",
        "decode",
        "baseline",
        "rank",
        "compare-cuda-graph",
        "compare-xla",
        "ncu",
    ]
    assert [name for name in first if name in asked] == asked and {*first} - {*asked} == {"trace", "variants"}
    assert second == ["build-rest", "micro-all", "formats", "experts", "sampled", "rows", "racecheck", "correctness"]
    for call, seconds in CALLS.items():
        planned = [s for s in stages() if s.call == call]
        assert sum(s.expected for s in planned) <= seconds - gpu_check.RESERVE
        assert all(0 < s.expected <= s.seconds for s in planned)
    assert of("ladder").each == 20 and of("ladder").if_failed == ("memcheck", "synccheck") and of("ladder").ends
    decode = tyro.cli(bench.Options, args=commands_of("infer", "bench")[0])
    assert decode.context == "64,1025,3073" and decode.runs == 3
    assert "--xla_gpu_autotune_level=0" in of("decode").environment["XLA_FLAGS"]


@pytest.mark.slow
def test_every_command_of_pytest_collects_tests():
    """Without a GPU, as its tests are collected on one: the marks that pyproject.toml leaves out would select none."""
    found = [(s, command) for s in stages() for command in s.commands if "pytest" in command]
    assert found
    for s, command in found:
        environment = os.environ | s.environment
        collect = [*command, "--collect-only", "-q", "-n", "0"]
        done = subprocess.run(collect, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        assert done.returncode == 0, f"{s.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.stdout.count("<Function") > 20, s.name


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


def test_stages_of_the_kernel_have_valid_options():
    known = {
        "scripts.gpu_decode": gpu_decode.Options,
        "scripts.gpu_rows": gpu_rows.Options,
        "scripts.gpu_check.ladder": ladder.Options,
        "scripts.gpu_check.torch_graph": torch_graph.Options,
    }
    for module, kind in known.items():
        commands = [c[c.index(module) + 1 :] for s in stages() for c in s.commands if module in c]
        assert commands, module
        for command in commands:
            options = tyro.cli(kind, args=command)
            if "--json" in command:
                assert str(options.json).startswith("{out}/")
    assert {*RUNGS} == {*ladder.RUNGS}, "each rung of the ladder is a command"
    built = [c[3] for c in of("build").commands if "scripts.gpu_check.ladder" in c]
    assert built == [c[3] for c in of("ladder").commands] == [*RUNGS], "what the ladder runs is compiled before"


def test_rank_stage_has_valid_options_and_is_reported(tmp_path):
    (command,) = of("rank").commands
    beside = tyro.cli(gpu_rank.Options, args=of("variants").commands[1][3:])
    assert beside.layouts == ("laneformer",) and {*beside.variants} < {*VARIANTS}
    assert ("none", *variants.VARIANTS) == VARIANTS, "all variants are measured"
    options = tyro.cli(gpu_rank.Options, args=command[3:])
    assert options.recipe == GPU.dense and str(options.json) == "{out}/rank.json" and options.delays == (0, 5, 20)
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
    (tmp_path / "compare-float16.json").write_text(
        json.dumps([{"schema": "", "notes": ["random weights", note]}, {"notes": [note]}])
    )
    text = report.report(tmp_path, [])
    assert text.count(f"\n- {note}") == 1 and "- random weights" not in text


def test_named_files_and_tests_exist():
    words = [word for stage in stages() for command in stage.commands for word in command]
    files = [word for word in words if word.startswith("-I") or (word.endswith((".py", ".cu")) and "*" not in word)]
    assert files and all((ROOT / word.removeprefix("-I")).exists() for word in files)


def test_machine_is_described(tmp_path):
    """Also on a machine without a GPU: the versions, and the tools that are missing."""
    words = [word for s in stages() for command in s.commands for word in command]
    (code,) = (word for before, word in itertools.pairwise(words) if before == "-c")
    environment = {"PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True, env=environment)
    versions, tools = done.stdout.splitlines()
    assert "CpuDevice" in versions and tools == f"Tools not found: {' '.join(TOOLS)}"


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
    assert data["stages"][0]["detail"] == "command 0: status 3: words of it"
    assert "not found: no-such-program" in data["stages"][3]["detail"]
    assert (tmp_path / "made").exists(), "commands after a failed one run too"
    assert (tmp_path / "out" / "breaks-0.log").read_text() == "words of it\n"
    shown = capsys.readouterr().out
    assert "late: out of time, 1 s over 1 s" in shown and "--- end of breaks-0.log\nwords of it\n---" in shown


def test_failed_ladder_is_diagnosed_and_ends_the_check(tmp_path, monkeypatch):
    others = [python(name, 20, "pass") for name in ("measures", "measures more")]
    checkers = [python(name, 20, "pass") for name in ("checks", "checks more")]
    begins = python("begins", 20, "raise SystemExit(1)", if_failed=("checks", "checks more"), ends=True)
    listed = [replace(s, call=1) for s in (begins, *others)] + checkers + [replace(others[0], name="later", call=2)]
    monkeypatch.setattr(gpu_check, "stages", lambda: listed)
    assert gpu_check.main([str(tmp_path)]) == 1
    ran = [(each["stage"], each["status"]) for each in json.loads((tmp_path / "report.json").read_text())["stages"]]
    expected = dict.fromkeys(("begins", "measures", "measures more", "checks", "checks more"), "passed")
    expected |= {"begins": "failed", "measures": "left out", "measures more": "left out"}
    assert dict(ran) == expected and [name for name, status in ran if status == "passed"] == ["checks", "checks more"]
    listed[0] = python("begins", 20, "pass", if_failed=("checks",), ends=True, call=1)
    assert gpu_check.main([str(tmp_path)]) == 0
    ran = [each["stage"] for each in json.loads((tmp_path / "report.json").read_text())["stages"]]
    assert ran == ["begins", "measures", "measures more", "later"], "checkers run only after a failure"
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
    assert gpu_check.main([str(tmp_path), "--seconds", "19"]) == 0
    assert "| works | left out | 0 | no time: 9 s left of 20 s |" in (tmp_path / "report.md").read_text()
    assert gpu_check.main([str(tmp_path), "--seconds", "21"]) == 0
    assert "| works | passed |" in (tmp_path / "report.md").read_text(), "half of its limit is left"


def test_together_commands_run_at_the_same_time(tmp_path, monkeypatch):
    wait = "import pathlib, time\nopen({own!r}, 'w')\nwhile not pathlib.Path({other!r}).exists(): time.sleep(0.01)"
    only(
        monkeypatch, python("pair", 20, wait.format(own="a", other="b"), wait.format(own="b", other="a"), together=True)
    )
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    assert gpu_check.main([str(tmp_path / "out")]) == 0


def test_measurements_become_rows_without_broken_lines(tmp_path):
    (tmp_path / "micro-0.log").write_text("\n".join(map(json.dumps, (MACHINE, RING))) + '\n{"test": "ed')
    lines = figures.measurements(tmp_path)
    told = {"device": "a device", "memory_bytes": 80, "clocks": "SM 1700 of 1980 MHz"}
    assert lines == [MACHINE, RING | told], "each record tells its device from others"
    assert report.micro_table(lines)[2:] == [
        "| machine | device a device, memory_bytes 80, sm_mhz_seen 1700, sm_mhz_most 1980 |  |  |  |  |  |",
        "| ring | ctas 128, slot_bytes 4096 | 1,234.50 | 1,200.00 | 1,300.00 | us | 3,457 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "nosuch"], "unknown stage nosuch"),
        (["--wheels", "nowhere"], "--wheels nowhere"),
        (["--budget", "900"], "--budget must be above 900"),
        (["--budget", "2400", "--stages", "build"], "one of --call, --stages and --budget"),
        (["--call", "1", "--stages", "build"], "one of --call, --stages and --budget"),
        (["--call", "3"], "invalid choice"),
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
    command = filled(of("build-rest").commands[1 + number], {"out": tmp_path})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    without = subprocess.run(
        [command[-1]], capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert without.returncode == 1 and json.loads(without.stdout)["test"] == "error"
    assert Path(command[-1]).stat().st_size > 0
