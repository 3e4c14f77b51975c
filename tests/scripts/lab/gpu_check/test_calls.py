"""Both calls of the check with substitutes for all programs: what passes, hangs, fails, lacks a tool, or is killed."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from laneformer.commands.lab.gpu_check import __main__ as gpu_check
from laneformer.commands.lab.gpu_check import cores, pack, screen, stage
from laneformer.commands.lab.gpu_check.stage import PYTHON, Stage
from laneformer.commands.lab.gpu_check.stages import CALLS, stages

TOOLS = ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "cuda-gdb")
SOURCE = Path(__file__).parent / "fake_programs.py"


# The check in a process that finds only the programs of a folder.
CHECK = """
import dataclasses, runpy, sys
sys.path.insert(0, {root!r})
from laneformer.commands.lab.gpu_check import stage, stages
stage.SEARCH, real = {programs!r}, stages.stages

def replaced(one):
    python = {programs!r} + "/python"
    commands = (tuple(python if word == stage.PYTHON else word for word in command) for command in one.commands)
    return dataclasses.replace(one, commands=tuple(commands))

stages.stages = lambda: [replaced(one) for one in real()]
sys.argv = ["gpu_check", *{arguments!r}]
runpy.run_module("laneformer.commands.lab.gpu_check", run_name="__main__")
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Folder with the programs of a machine with a GPU, the only ones that the check finds."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in (*TOOLS, "python"):
        (programs / name).write_text(f"#!{sys.executable} -S\n{SOURCE.read_text()}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    for module in (stage, gpu_check):
        monkeypatch.setattr(module, "SEARCH", str(programs))
    monkeypatch.setitem(stage.NEEDED, "scripts.gpu_check.torch_graph", "json")  # a package that is installed
    python = str(programs / "python")

    def replaced(one: Stage) -> Stage:
        commands = tuple(tuple(python if word == PYTHON else word for word in command) for command in one.commands)
        return replace(one, commands=commands, each=min(one.each, 2))

    monkeypatch.setattr(gpu_check, "stages", lambda: [replaced(one) for one in stages()])
    return programs


def outcomes(out) -> dict[str, str]:
    return {one["stage"]: one["status"] for one in json.loads((out / "report.json").read_text())["stages"]}


def packed(path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_both_calls_run_and_are_packed(machine, tmp_path, capsys):
    out, target = tmp_path / "out", tmp_path / "results.tgz"
    assert gpu_check.main([str(out), "--pack", str(target)]) == 0 or outcomes(out)["correctness"] == "failed"
    found = outcomes(out)
    assert [*found] == [s.name for call in CALLS for s in stages() if s.call == call]
    assert {name for name, status in found.items() if status != "passed"} == {"correctness"}
    shown = capsys.readouterr().out
    assert len(shown) < screen.MOST
    row = "| decode-float16: laneformer_2b, cuda | 64 | 2,000.0 | 500 | 4.000 | 1,000 | 50.0% |"
    assert row in shown, "4 GB at the measured 4,000 GB/s are 1,000 us"
    for expected in (
        "| variants: triples, float16 | 64 | 2,000.0 |",
        "| rank: tp, delay 5 us | 64 |",
        "| torch: CUDA graph | 64 |",
        "| smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio | 3.25 | inst | loads",
        "| 90.0% | `LDG.E.128 R4, [R2.64]` | long_sb 80, membar 10 |",
        "Device: NVIDIA H200, 151 GB, SM 1980 of 1980 MHz",
        "ring 4,100 GB/s",
        "JAX 0.0 [CudaDevice(id=0)]",
        "Tests: 1 passed, 1 failed: tests/a.py::test_two[1]",
        "| qkv | 1.0 |",
    ):
        assert expected in shown
    files = packed(target)
    assert {"report.json", "report.md", "decode-float16.json", "ncu.ncu-rep", "build-0.log", "CONTENTS"} <= {*files}
    assert json.loads(files["report.json"])["copy_gb_per_s"] == 4000
    micro = json.loads(files["report.json"])["micro"]
    assert all(one["memory_bytes"] == 150_754_820_096 for one in micro)


@pytest.mark.parametrize("debugger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hang_of_the_ladder_is_dumped_and_ends_the_check(machine, tmp_path, monkeypatch, capsys, debugger):
    monkeypatch.setenv("FAKE", "hang")
    if not debugger:
        (machine / "cuda-gdb").unlink()
    start = time.monotonic()
    assert gpu_check.main([str(tmp_path), "--pack", str(tmp_path / "a.tgz")]) == 1
    assert time.monotonic() - start < 25
    found, shown = outcomes(tmp_path), capsys.readouterr().out
    assert found["ladder"] == "failed" and found["memcheck"] == found["synccheck"] == "passed"
    assert found["decode"] == found["ncu"] == "left out" and "formats" not in found
    assert "ladder: failed" in shown and "command 1: over 2 s: 4 CTAs of 64 threads" in shown
    assert ("kernel.cu:123 in read_words -batch -ex target cudacore" in shown) == debugger
    assert ("not found: cuda-gdb" in shown) == (not debugger)
    assert any(name.endswith(".cudacore") for name in packed(tmp_path / "a.tgz"))
    assert not list(tmp_path.glob("*" + cores.PIPE)) and not (tmp_path / "ladder-2.log").exists()


def test_failure_of_the_ladder_shows_the_record_of_the_watchdog(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "fail")
    assert gpu_check.main([str(tmp_path), "--call", "1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("stuck: CTAs 0-3 of lane 0: part of lane 1, waits for tag 7") == 2, "in line and log"
    assert outcomes(tmp_path)["memcheck"] == "passed" and outcomes(tmp_path)["decode"] == "left out"


def test_profiler_without_permission_is_left_out_with_the_reason(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "no permission")
    assert gpu_check.main([str(tmp_path), "--stages", "build,ncu"]) == 0
    assert outcomes(tmp_path) == {"build": "passed", "ncu": "left out"}
    assert "ncu: left out" in (shown := capsys.readouterr().out) and "ERR_NVGPUCTRPERM" in shown


@pytest.mark.parametrize(
    "tool", [pytest.param(tool, marks=() if tool == "ncu" else pytest.mark.slow) for tool in TOOLS]
)
def test_machine_without_a_tool_runs_the_rest(machine, tmp_path, capsys, tool):
    (machine / tool).unlink()
    gpu_check.main([str(tmp_path), "--stages", "machine,build,micro,ladder,memcheck,ncu,decode"])
    found, shown = outcomes(tmp_path), capsys.readouterr().out
    affected = {
        "nvidia-smi": {"machine": "failed"},
        "nvcc": {"machine": "failed", "build": "failed", "micro": "failed"},
        "ncu": {"ncu": "left out"},
        "compute-sanitizer": {"memcheck": "left out"},
        "cuda-gdb": {},
    }[tool]
    assert found == dict.fromkeys(found, "passed") | affected
    assert not affected or f"not found: {tool}" in shown
    assert (tmp_path / "build-0.log").exists() and "tiny: 4 tokens" in (tmp_path / "ladder-0.log").read_text()


def test_build_without_nvcc_compiles_the_rest(machine, tmp_path):
    (machine / "nvcc").unlink()
    gpu_check.main([str(tmp_path), "--stages", "build"])
    detail = json.loads((tmp_path / "report.json").read_text())["stages"][0]["detail"]
    assert detail == "command 1: status 127: not found: nvcc", "other commands run"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_results_survive_a_kill(machine, tmp_path, how):
    """The check runs in a process of its own, is stopped while a stage runs, and leaves complete files."""
    out, target = tmp_path / "out", tmp_path / "a.tgz"
    code = CHECK.format(
        root=str(stage.ROOT), programs=str(machine), arguments=[str(out), "--call", "1", "--pack", str(target)]
    )
    environment = os.environ | {"FAKE": "stall"}
    process = subprocess.Popen([PYTHON, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not ((out / "started").exists() and (out / "started").read_text()):
        time.sleep(0.02)
    process.send_signal(how)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how), text
    for found in (json.loads((out / "report.json").read_text()), json.loads(packed(target)["report.json"])):
        states = {one["stage"]: one["status"] for one in found["stages"]}
        assert states["ladder"] == "passed" and states["micro"] == "passed"
        assert states["decode"] == ("running" if how == signal.SIGKILL else "stopped")
    assert "| decode | running |" in (out / "report.md").read_text() or how == signal.SIGTERM
    if how == signal.SIGTERM:
        assert packed(target)["decode.log"] == b"it started\n"
    else:  # its command is left, as after any kill -9
        os.kill(int((out / "started").read_text()), signal.SIGKILL)


def test_output_of_many_failures_fits(machine, tmp_path, monkeypatch, capsys):
    long = "print('words ' * 2000); raise SystemExit(1)"
    listed = [Stage(f"s{n}", 20, ((PYTHON, "-S", "-c", long),), call=1) for n in range(15)]
    monkeypatch.setattr(gpu_check, "stages", lambda: listed)
    assert gpu_check.main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert len(shown) <= screen.MOST and shown.rstrip().endswith("report.md")
    assert shown.count("--- end of s0.log") == 1 and all(f"\ns{n}: failed" in f"\n{shown}" for n in range(15))
    assert len(shown.split("--- end of s0.log\n")[1].split("\n---")[0]) == screen.TAIL


def test_pack_leaves_out_what_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "MOST", 10_000)
    monkeypatch.setattr(pack, "MOST_LOG", 4_000)
    folder, target = tmp_path / "out", tmp_path / "made" / "a.tgz"
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    (folder / "a.log").write_text("begin" + "x" * 8_000 + "end")
    (folder / "raw.npz").write_bytes(os.urandom(9_000))
    (folder / "small.npz").write_bytes(os.urandom(900))
    (folder / "xla").mkdir()
    (folder / "xla" / "program").write_text("not packed")
    assert pack.pack(folder, target) == ["raw.npz: 9,000 bytes"]
    files = packed(target)
    assert {*files} == {"report.json", "a.log", "small.npz", "CONTENTS"}
    assert len(files["a.log"]) == 4_000 and files["a.log"].endswith(b"end") and b"raw.npz" in files["CONTENTS"]
    assert target.stat().st_size < 10_000 and not list(target.parent.glob("*.part"))
