"""Checks and measures everything that one GPU allows, in stages with a budget of seconds each; a failed stage is
reported and the others continue.

scripts/gpu_check.sh runs this. It needs Python alone: `--wheels` supplies packages on a machine without a network.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "custom_calls" / "gpu" / "bench"
RESERVE = 15  # seconds for the report
# Warps, lines of 512 bytes per slot, slots per warp (and no fences); the first ring is the decode kernel's.
RINGS = {
    "micro": (8, 8, 6),
    "ring_unfenced": (8, 8, 6, 1),
    "ring_2k": (8, 4, 12),
    "ring_4k_128": (8, 8, 4),
    "ring_4k_64": (8, 8, 2),
    "ring_8k": (8, 16, 3),
    "ring_8k_4_warps": (4, 16, 6),
    "ring_16k_4_warps": (4, 32, 3),
}
MODEL, MIXTURE = "laneformer_2b", "gpt_oss_20b"
PYTHON = sys.executable
SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
# Stages share compiled programs. Tests do not: reading a half-written program warns, and warnings are errors there.
CACHE = {"JAX_COMPILATION_CACHE_DIR": "{out}/xla", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
# The reference must not be rounded to TF32, and several processes share the memory.
TESTS = {
    "LANEFORMER_TEST_GPU": "cuda",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
TEST_FILES = (
    "tests/custom_calls/gpu/test_session.py",
    "tests/custom_calls/gpu/test_steps.py",
    "tests/custom_calls/gpu/test_bf12.py",
    "tests/custom_calls/gpu/test_codes.py",
    "tests/custom_calls/gpu/test_experts.py",
    "tests/infer/engine/test_gpu.py",
)
# -vv names each finished test, since a stage may run out of time. pytest-benchmark warns about xdist, an error here.
PYTEST = (PYTHON, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "no:benchmark")
SMALLEST = (*PYTEST, TEST_FILES[0], "-k", "test_layouts and dtp")
# Packages that commands need and that a machine may lack.
NEEDED = {"infer": "tyro", "scripts.gpu_rank": "tyro", "pytest": "xdist"}


@dataclass(frozen=True)
class Stage:
    """Commands to run in turn, or together. `{out}` in a word is the folder of the results."""

    name: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=lambda: CACHE)
    together: bool = False
    may_time_out: bool = False
    """Running out of time is no verdict rather than a failure: a checker that found nothing so far."""
    if_failed: tuple[str, ...] = ()
    """Stages to run next if this one failed, to diagnose it."""


def stages() -> list[Stage]:
    """All stages, the most important first; the last ones are skipped if time is up."""

    def nvcc(name: str, ring: tuple[int, int, int]) -> tuple[str, ...]:
        options = (
            f"-DLF_{option}={value}"
            for option, value in zip(("WARPS", "SLOT_LINES", "SLOTS", "UNFENCED"), ring, strict=False)
        )
        return (
            "nvcc",
            "-std=c++17",
            "-O3",
            "--cudart",
            "static",
            "-gencode=arch=compute_90a,code=sm_90a",
            "--diag-suppress=186",
            *options,
            f"-I{BENCH}",
            f"-I{BENCH.parent / 'kernel'}",
            str(BENCH / "micro.cu"),
            "-o",
            f"{{out}}/{name}",
        )

    def bench(name: str, *options: str, model: str = MODEL) -> tuple[str, ...]:
        return (PYTHON, "-m", "infer", "bench", "--checkpoint", model, *options, "--json", f"{{out}}/{name}.json")

    def checker(name: str) -> Stage:
        # Checks the project's kernels alone, not the driver calls with which XLA probes for features.
        only = (
            "--kernel-name",
            "kns=laneformer",
            "--report-api-errors",
            "no",
            "--launch-timeout",
            "0",
            "--error-exitcode",
            "9",
        )
        return Stage(name, 90, (("compute-sanitizer", "--tool", name, *only, *SMALLEST),), TESTS, may_time_out=True)

    # XLA reads a prompt in blocks of powers of two and compiles a program per block and cache size: these need few.
    long, sustained = ("--context", "1025"), ("--output-tokens", "1023", "--runs", "5", "--warmup-runs", "1")
    drawn = ("--backend", "cuda", "--dtype", "float16", *long, *sustained, "--temperature", "0.8")
    short = (
        "--dtype",
        "float16",
        "--context",
        "64,3073",
        "--output-tokens",
        "128",
        "--runs",
        "3",
        "--warmup-runs",
        "1",
    )
    return [
        Stage(
            "machine",
            30,
            (
                ("nvidia-smi",),
                ("nvcc", "--version"),
                (PYTHON, "-c", "import jax; print(jax.__version__, jax.devices())"),
            ),
        ),
        Stage("build", 100, ((PYTHON, "-m", "custom_calls"), *(nvcc(*ring) for ring in RINGS.items())), together=True),
        Stage(
            "smoke",
            60,
            (("{out}/micro", "--quick", "ring", "edge"), SMALLEST),
            TESTS,
            if_failed=("memcheck", "racecheck"),
        ),
        Stage("micro", 50, (("{out}/micro",), *((f"{{out}}/{name}", "ring") for name in RINGS if name != "micro"))),
        Stage(
            "decode",
            120,
            (
                bench(
                    "decode-float16",
                    "--backend",
                    "cuda",
                    "--dtype",
                    "float16",
                    "--context",
                    "1025,3073,64",
                    *sustained,
                    "--trace",
                    "{out}/trace.json.gz",
                ),
            ),
        ),
        Stage("trace", 30, ((PYTHON, "-m", "scripts.plot_trace", "{out}/trace.json.gz", "--no-picture"),)),
        Stage("correctness", 130, ((*PYTEST, "-n", "4", *TEST_FILES),), TESTS),
        Stage("compare", 140, (bench("compare-float16", "--compare", "cuda,cuda-graph,xla", *short),)),
        Stage("sampled", 80, (bench("sampled-float16", *drawn), bench("filtered-float16", *drawn, "--top-p", "0.95"))),
        Stage(
            "rank",
            90,
            (
                (
                    PYTHON,
                    "-m",
                    "scripts.gpu_rank",
                    MODEL,
                    "--delays",
                    "0",
                    "2",
                    "5",
                    "10",
                    "20",
                    "--runs",
                    "3",
                    "--json",
                    "{out}/rank.json",
                ),
            ),
        ),
        Stage(
            "experts",
            240,
            (bench("decode-experts", "--backend", "cuda", "--dtype", "bfloat16", *long, *sustained, model=MIXTURE),),
        ),
        Stage(
            "formats",
            420,
            tuple(
                bench(
                    f"decode-{name}", "--backend", "cuda", "--dtype", "bfloat16", "--weights", name, *long, *sustained
                )
                for name in ("bfloat16", "bf12", "int8", "int4", "fp8", "mxfp4", "nvfp4")
            ),
        ),
        Stage("overlap", 70, (bench("overlap-float16", "--compare", "cuda,cuda-graph-overlap", *short),)),
        checker("memcheck"),
        checker("racecheck"),
    ]


@dataclass(frozen=True)
class Outcome:
    stage: str
    status: str
    """passed, failed, out of time, no verdict, or left out"""
    seconds: float
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.status in ("failed", "out of time")


def missing(stage: Stage) -> list[str]:
    """Programs and packages that a stage needs and this machine lacks, except those that an earlier stage builds."""
    programs = {command[0] for command in stage.commands} - {f"{{out}}/{name}" for name in RINGS}
    packages = {package for program, package in NEEDED.items() if any(program in command for command in stage.commands)}
    lacking = [program for program in programs if not shutil.which(program, path=SEARCH)]
    return sorted(
        lacking
        + [f"{package} (pip install it, or --wheels)" for package in packages if not importlib.util.find_spec(package)]
    )


def filled(command: Iterable[str], out: Path) -> list[str]:
    return [word.replace("{out}", str(out)) for word in command]


def run(stage: Stage, out: Path, seconds: float, environment: dict[str, str]) -> Outcome:
    """Runs a stage's commands in turn, or together; their output goes to FOLDER/<stage>[-number].log."""
    if lacking := missing(stage):
        return Outcome(stage.name, "failed", 0, f"not found: {', '.join(lacking)}")
    start, running, states = time.monotonic(), [], []
    single = len(stage.commands) == 1
    set_here = dict(zip(stage.environment, filled(stage.environment.values(), out), strict=True))

    def finish(number: int, process: subprocess.Popen) -> None:
        try:
            states.append((number, process.wait(max(0.1, start + seconds - time.monotonic()))))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                process.wait(10)
            states.append((number, None))

    for number, command in enumerate(stage.commands):
        with (out / f"{stage.name}{'' if single else f'-{number}'}.log").open("wb") as log:
            process = subprocess.Popen(
                filled(command, out),
                cwd=ROOT,
                env=environment | set_here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append(process)
        if not stage.together:
            finish(number, process)
            if states[-1][1] is None:
                break
    if stage.together:
        for number, process in enumerate(running):
            finish(number, process)
    failed = [f"command {number}: status {code}" for number, code in states if code]
    late = any(code is None for _, code in states)
    status = "failed" if failed else "passed" if not late else "no verdict" if stage.may_time_out else "out of time"
    return Outcome(
        stage.name, status, time.monotonic() - start, "; ".join(failed) or (f"over {seconds:.0f} s" if late else "")
    )


def measurements(out: Path) -> list[dict]:
    """The lines of the microbenchmarks, without truncated ones."""
    found = []
    for path in sorted(out.glob("micro*.log")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line) if line.startswith("{") else None)
            except ValueError:
                continue
    return [one for one in found if one]


def micro_table(lines: Iterable[dict]) -> list[str]:
    """Rows of a Markdown table: measurement, conditions, figures."""
    rows = ["| measurement | conditions | median | min | p95 | unit | GB/s |", "|---|---|---|---|---|---|---|"]
    figures = ("test", "unit", "median", "min", "p95", "gb_per_s")
    for line in lines:
        conditions = ", ".join(f"{name} {value}" for name, value in line.items() if name not in figures)
        numbers = [f"{line[name]:,.2f}" if name in line else "" for name in ("median", "min", "p95")]
        rate = f"{line['gb_per_s']:,.0f}" if "gb_per_s" in line else ""
        rows.append(f"| {line['test']} | {conditions} | {' | '.join(numbers)} | {line.get('unit', '')} | {rate} |")
    return rows


def records(out: Path) -> dict[Path, list]:
    """Records of the decode benchmark, by file, without truncated files."""
    found = {}
    for path in sorted(out.glob("*.json")):
        try:
            found |= {} if path.name in ("report.json", "rank.json") else {path: json.loads(path.read_text())}
        except ValueError:
            continue
    return found


def ratios(bench: dict[Path, list]) -> list[str]:
    """The benchmark's notes on the ratio of two backends in the same run."""
    notes = (note for found in bench.values() for record in found for note in record["notes"])
    return list(dict.fromkeys(note for note in notes if "ratio of the medians" in note))


def bench_table(paths: Iterable[Path], environment: dict[str, str]) -> str:
    command = [PYTHON, "-m", "infer", "bench", "--table", *map(str, paths)]
    environment = environment | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    return done.stdout.strip() or done.stderr.strip()


def report(out: Path, outcomes: Sequence[Outcome], decoding: str = "") -> str:
    """Writes report.json and report.md; returns the text of the latter without the microbenchmarks."""
    lines, bench = measurements(out), records(out)
    data = {
        "stages": [vars(outcome) for outcome in outcomes],
        "micro": lines,
        "bench": {path.stem: content for path, content in bench.items()},
    }
    (out / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    text = ["# GPU check", "", "| stage | result | seconds | |", "|---|---|---|---|"]
    text += [f"| {o.stage} | {o.status} | {o.seconds:.0f} | {o.detail} |" for o in outcomes]
    if decoding:
        text += ["", "## Decoding", "", decoding]
    if compared := ratios(bench):
        text += ["", "## Backends compared", "", *(f"- {note}" for note in compared)]
    if (log := out / "trace.log").exists() and (spent := log.read_text(errors="replace")).startswith("| op |"):
        text += ["", "## Where the time of a token goes", "", spent.strip()]
    if (log := out / "rank.log").exists() and (rank := log.read_text(errors="replace")).count("| delay us |"):
        text += ["", "## One rank of several, with emulated peers", "", rank[rank.index("| layout |") :].strip()]
    more = ["", "## Microbenchmarks", "", *micro_table(lines)] if lines else []
    (out / "report.md").write_text("\n".join([*text, *more]) + "\n")
    return "\n".join(text) + "\n"


def with_wheels(folder: Path, out: Path, environment: dict[str, str]) -> None:
    """Installs the wheels of a folder for the stages' Python."""
    site = out / "site"
    wheels = sorted(map(str, folder.glob("*.whl")))
    command = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--upgrade",
        "--target",
        str(site),
        *wheels,
    ]
    subprocess.run(command, check=True)
    sys.path.append(str(site))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), environment.get("PYTHONPATH"))))


def main(arguments: Sequence[str] | None = None) -> int:
    known = {stage.name: stage for stage in stages()}
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu_results"), help="folder for the results")
    parser.add_argument("--stages", default=",".join(known), help="comma-separated stages to run (default: all)")
    parser.add_argument(
        "--seconds", type=int, default=530, help="seconds for everything; stages without time are left out"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install, for a machine without a network")
    parser.add_argument("--dry-run", action="store_true", help="print the stages and the programs they lack")
    options = parser.parse_args(arguments)
    names = options.stages.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--stages {options.stages}: unknown stage {unknown[0]}; choose from {', '.join(known)}")
    if options.wheels and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels} has no wheels; give a folder of *.whl files")
    out = options.out.resolve()
    if options.dry_run:
        for name in names:
            print(
                f"{name}: at most {known[name].seconds} s"
                + "".join(f"; not found: {program}" for program in missing(known[name]))
            )
            for command in known[name].commands:
                print("  " + " ".join(filled(command, out)))
        return 0
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PATH": SEARCH, "JAX_PLATFORMS": "cuda,cpu"}
    if options.wheels:
        with_wheels(options.wheels, out, environment)
    outcomes, waiting = [], list(names)
    while waiting:
        name = waiting.pop(0)
        left = options.seconds - RESERVE - (time.monotonic() - start)
        seconds = min(left, known[name].seconds)
        outcome = Outcome(name, "left out", 0, "no time") if left < 10 else run(known[name], out, seconds, environment)
        outcomes.append(outcome)
        if outcome.bad:
            waiting.sort(key=lambda other: other not in known[name].if_failed)
        print(f"{name}: {outcome.status}, {outcome.seconds:.0f} s {outcome.detail}", flush=True)
        report(out, outcomes)  # after each stage, since a later one may be interrupted
    benches = records(out)
    print(report(out, outcomes, bench_table(benches, environment) if benches else ""))
    print(f"Full report with microbenchmarks: {out / 'report.md'}")
    return int(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
