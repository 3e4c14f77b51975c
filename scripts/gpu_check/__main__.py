"""`python -m scripts.gpu_check`: checks and measures everything that one GPU allows, in stages with a budget of seconds
each; a failed stage is reported and the others continue. With --budget it pretrains a model there instead.

scripts/gpu_check.sh runs this. It needs only Python: `--wheels` supplies packages on a machine without a network.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laneformer.errors import ConfigError, LaneformerError
from scripts.gpu_check import pretraining
from scripts.gpu_check.pretraining import RESERVE, Progress, corpus_folders, follow, plan
from scripts.gpu_check.report import bench_table, records, report
from scripts.gpu_check.stage import PYTHON, SEARCH, Outcome, Stage, filled, missing, run
from scripts.gpu_check.stages import rehearsed, stages

UNFINISHED = 75  # exit status EX_TEMPFAIL of sysexits.h: try again


def with_wheels(folder: Path, out: Path, environment: dict[str, str]) -> None:
    """Installs the wheels of `folder` into `out`/site, for this process and the stages."""
    site = out / "site"
    wheels = sorted(map(str, folder.glob("*.whl")))
    quiet = ("-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site))
    command = [PYTHON, "-m", "pip", "install", *quiet, *wheels]
    subprocess.run(command, check=True)
    sys.path.append(str(site))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), environment.get("PYTHONPATH"))))


def device() -> str:
    """The name of this machine's GPU for dry runs; h200 if nvidia-smi lists none that dry runs support."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.lower()
    except OSError:
        listed = ""
    return next((name for name in ("h100", "h200", "b200") if name in listed), "h200")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Ends the process with one line for a mistake."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu_results"), help="folder for the results")
    parser.add_argument("--stages", help="comma-separated stages to run (default: all usual ones)")
    parser.add_argument(
        "--seconds",
        type=int,
        default=530,
        help="time limit of this command in seconds; stages without time are left out, or with --budget left to the"
        " next command",
    )
    parser.add_argument(
        "--budget",
        type=int,
        help="seconds in which to pretrain a model, score it and measure its speed instead; repeat the command while"
        f" its exit status is {UNFINISHED}",
    )
    parser.add_argument("--humaneval", type=Path, help="with --budget: HumanEval.jsonl.gz (default: no scores)")
    parser.add_argument(
        "--sandbox", default="auto", help="with --budget: how `infer humaneval` isolates programs (default: auto)"
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        type=Path,
        help="with --budget: folders of Python code (default: the standard library and installed packages)",
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install, for a machine without a network")
    parser.add_argument("--dry-run", action="store_true", help="print the stages and the programs that are missing")
    parser.add_argument(
        "--rehearse", action="store_true", help="run the stages that need no GPU, on a CPU in tiny sizes"
    )
    options = parser.parse_args(arguments)
    if options.wheels and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels} has no wheels; give a folder of *.whl files")
    for path in (options.humaneval, *(options.corpus or ())):
        if path and not path.exists():
            parser.error(f"{path} does not exist; name another file or folder")
    if options.budget is None and (options.humaneval or options.corpus):
        parser.error("--humaneval and --corpus need --budget")
    if options.budget is not None and options.stages:
        parser.error("give either --stages or --budget")
    if options.seconds < 1:
        parser.error(f"--seconds must be at least 1, got {options.seconds}")
    try:
        options.plan = _plan(options)
    except LaneformerError as error:
        parser.error(str(error))
    return options


def _plan(options: argparse.Namespace) -> list[Stage]:
    """The stages that the options select. Raises ConfigError for an unknown stage, or a budget that is too small."""
    if options.budget is not None:
        what = pretraining.REHEARSAL if options.rehearse else pretraining.GPU
        folders = [str(path.resolve()) for path in options.corpus] if options.corpus else corpus_folders()
        problems = options.humaneval and options.humaneval.resolve()
        return plan(what, options.budget, folders, problems, options.sandbox)
    known = {stage.name: stage for stage in (rehearsed() if options.rehearse else stages())}
    if options.stages is None:
        return [stage for stage in known.values() if stage.usual]
    names = options.stages.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--stages {options.stages}: unknown stage {unknown[0]}; choose from {', '.join(known)}")
    return [known[name] for name in names]


def check(listed: list[Stage], words: dict[str, object], deadline: float, environment: dict[str, str]) -> list[Outcome]:
    """Runs the stages until `deadline`, a time of time.monotonic(), and writes the report after each.

    After a failed stage the stages that diagnose it are next. words: values of the `{name}` in commands.
    """
    out, outcomes, waiting = Path(str(words["out"])), [], list(listed)
    while waiting:
        stage = waiting.pop(0)
        left = deadline - RESERVE - time.monotonic()
        late = left < min(10, stage.seconds)
        seconds = min(left, stage.seconds)
        outcome = Outcome(stage.name, "left out", 0, "no time") if late else run(stage, words, seconds, environment)
        outcomes.append(outcome)
        if outcome.bad:
            waiting.sort(key=lambda other: other.name not in stage.if_failed)
        print(f"{stage.name}: {outcome.status}, {outcome.seconds:.0f} s {outcome.detail}", flush=True)
        report(out, outcomes)  # after each stage, since a later one may be interrupted
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a stage failed, 2 for a user's mistake, 75 if --budget has stages left."""
    options = options_of(arguments)
    out = options.out.resolve()
    words = {"out": out, "device": "cpu" if options.rehearse else device()}
    if options.dry_run:
        for stage in options.plan:
            lacks = "".join(f"; not found: {program}" for program in missing(stage))
            print(f"{stage.name}: at most {stage.seconds} s{lacks}")
            for command in stage.commands:
                print("  " + " ".join(filled(command, words)))
        return 0
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    platforms = "cpu" if options.rehearse else "cuda,cpu"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PATH": SEARCH, "JAX_PLATFORMS": platforms}
    try:
        progress = None
        if options.budget is not None:
            asked = {"budget": options.budget, "humaneval": str(options.humaneval), "rehearse": options.rehearse}
            progress = Progress.open(out, asked)
        if options.wheels:
            with_wheels(options.wheels, out, environment)
        left, done = options.seconds - (time.monotonic() - start), True
        if progress is None:
            outcomes = check(options.plan, words, start + options.seconds, environment)
        else:
            done = follow(options.plan, progress, words, left, environment, lambda: report(out, progress.all))
            outcomes = progress.all
    except LaneformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; with --budget the same command resumes", file=sys.stderr)
        return 130
    benches = records(out)
    print(report(out, outcomes, bench_table(benches, environment) if benches else ""))
    print(f"Full report: {out / 'report.md'}")
    if any(outcome.bad for outcome in outcomes):
        return 1
    if not done:
        print(f"stages are left; run the same command again (exit status {UNFINISHED})")
    return 0 if done else UNFINISHED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # running commands end first
    sys.exit(main())
