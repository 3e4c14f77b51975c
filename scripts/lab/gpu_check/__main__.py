"""`python -m scripts.gpu_check`: checks and measures the decode kernel on a GPU, in two calls of at most 420 and 300 s.
With --budget it pretrains a model there instead.

A failed stage is reported and the others continue; if the ladder of small models fails, its diagnosis ends the check.
All results are written after every stage, so a kill leaves those of the stages before. scripts/gpu_check.sh runs this.
It needs only Python: `--wheels` supplies packages on a machine without a network.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from laneformer.commands.lab.gpu_check import cores, pretraining
from laneformer.commands.lab.gpu_check.pack import pack
from laneformer.commands.lab.gpu_check.pretraining import Progress, corpus_folders, follow, plan
from laneformer.commands.lab.gpu_check.report import bench_table, records, report
from laneformer.commands.lab.gpu_check.screen import Screen
from laneformer.commands.lab.gpu_check.stage import PYTHON, SEARCH, Outcome, Stage, filled, missing, run
from laneformer.commands.lab.gpu_check.stages import CALLS, rehearsed, stages
from laneformer.errors import ConfigError, LaneformerError

RESERVE = 10  # seconds of a call for ending commands and for the last report
USUAL_SECONDS = 530  # of a command with --budget or --stages
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
    parser.add_argument(
        "--call", type=int, choices=tuple(CALLS), help="run only this call (default: both, one after the other)"
    )
    parser.add_argument("--stages", help="comma-separated stages to run instead of a call")
    limits = " and ".join(f"{seconds} for call {call}" for call, seconds in CALLS.items())
    parser.add_argument(
        "--seconds",
        type=int,
        help=f"time limit in seconds (default: {limits}, otherwise {USUAL_SECONDS}); stages without time are left out,"
        " or with --budget left to the next command",
    )
    parser.add_argument(
        "--pack", type=Path, metavar="FILE.tgz", help="write what matters, below 16 MiB, to this file too"
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
    if sum(bool(given) for given in (options.budget is not None, options.stages, options.call)) > 1:
        parser.error("give one of --call, --stages and --budget")
    if options.seconds is not None and options.seconds < 1:
        parser.error(f"--seconds must be at least 1, got {options.seconds}")
    try:
        options.plan = _plan(options)
    except LaneformerError as error:
        parser.error(str(error))
    return options


def _plan(options: argparse.Namespace) -> dict[int, list[Stage]]:
    """The stages that the options select, by the number of their call; 0 for stages without one. Raises ConfigError for
    an unknown stage, or a budget that is too small.
    """
    if options.budget is not None:
        what = pretraining.REHEARSAL if options.rehearse else pretraining.GPU
        folders = [str(path.resolve()) for path in options.corpus] if options.corpus else corpus_folders()
        problems = options.humaneval and options.humaneval.resolve()
        return {0: plan(what, options.budget, folders, problems, options.sandbox)}
    options.known = known = {stage.name: stage for stage in (rehearsed() if options.rehearse else stages())}
    if options.stages is None:
        numbers = [options.call] if options.call else sorted({stage.call for stage in known.values()} - {0})
        return {number: [stage for stage in known.values() if stage.call == number] for number in numbers}
    names = options.stages.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--stages {options.stages}: unknown stage {unknown[0]}; choose from {', '.join(known)}")
    return {0: [known[name] for name in names]}


def check(
    listed: list[Stage],
    known: dict[str, Stage],
    words: dict[str, object],
    deadline: float,
    environment: dict[str, str],
    after: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Runs the stages until `deadline`, a time of time.monotonic(). A stage starts only if half of its limit is left.

    After a failed stage those of `known` that diagnose it are next. words: values of the `{name}` in commands. after:
    called with all outcomes when a stage starts or ends.
    """
    outcomes, waiting = [], list(listed)
    while waiting:
        stage = waiting.pop(0)
        left = deadline - RESERVE - time.monotonic() - (cores.SECONDS if stage.dumps else 0)
        if left < stage.seconds / 2:
            outcome = Outcome(stage.name, "left out", 0, f"no time: {max(0, left):.0f} s left of {stage.seconds} s")
        else:
            after([*outcomes, Outcome(stage.name, "running", 0)])
            start = time.monotonic()
            try:
                seconds = left if stage.takes_rest else min(left, stage.seconds)
                outcome = run(stage, words, seconds, environment)
            except BaseException:  # this process is stopped
                after([*outcomes, Outcome(stage.name, "stopped", time.monotonic() - start)])
                raise
        outcomes.append(outcome)
        if outcome.bad:
            diagnosing = [known[name] for name in stage.if_failed]
            rest = [other for other in waiting if other.name not in stage.if_failed]
            if stage.ends:
                outcomes += (Outcome(other.name, "left out", 0, f"{stage.name} failed") for other in rest)
                rest = []
            waiting = diagnosing + rest
        after(outcomes)
    return outcomes


def dry_run(options: argparse.Namespace, words: dict[str, object]) -> None:
    """Prints what would run, and what this machine lacks."""
    for call, listed in options.plan.items():
        if call:
            print(f"call {call}: ends within {options.seconds or CALLS[call]} s")
        for stage in listed:
            _print_stage(stage, words, "")
            for name in stage.if_failed:
                _print_stage(options.known[name], words, f"if {stage.name} fails, ")


def _print_stage(stage: Stage, words: dict[str, object], when: str) -> None:
    planned = f"about {stage.expected} s, " if stage.expected else ""
    limit = "all seconds that are left" if stage.takes_rest else f"at most {stage.seconds} s"
    each = f", each command at most {stage.each} s" if stage.each else ""
    lacks = "".join(f"; not found: {program}" for program in missing(stage))
    print(f"{when}{stage.name}: {planned}{limit}{each}{lacks}")
    for command in stage.commands:
        print("  " + " ".join(filled(command, words)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a stage failed, 2 for a user's mistake, 75 if --budget has stages left."""
    start, options = time.monotonic(), options_of(arguments)
    out = options.out.resolve()
    device_name = "cpu" if options.rehearse else device()
    words = {"out": out, "device": device_name, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    if options.dry_run:
        dry_run(options, words)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    platforms = "cpu" if options.rehearse else "cuda,cpu"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PATH": SEARCH, "JAX_PLATFORMS": platforms}
    # Line numbers for the profiler and for core dumps; the machine code is the same.
    environment["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -lineinfo".strip()
    screen = Screen()
    try:
        if options.budget is not None:
            return pretrain(options, out, words, start, environment, screen)
        if options.wheels:
            with_wheels(options.wheels, out, environment)
        outcomes: list[Outcome] = []
        for call, listed in options.plan.items():
            outcomes += _call(options, call, listed, words, start, environment, screen, list(outcomes))
            start = time.monotonic()
            if any(outcome.bad and options.known[outcome.stage].ends for outcome in outcomes):
                break
    except LaneformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; with --budget the same command resumes", file=sys.stderr)
        return 130
    screen.say(report(out, outcomes))
    screen.last(f"Full report: {out / 'report.md'}" + (f", packed in {options.pack}" if options.pack else ""))
    return 1 if any(outcome.bad for outcome in outcomes) else 0


def _call(
    options: argparse.Namespace,
    call: int,
    listed: list[Stage],
    words: dict[str, object],
    start: float,
    environment: dict[str, str],
    screen: Screen,
    earlier: list[Outcome],
) -> list[Outcome]:
    """Runs the stages of a call that began at `start`, and writes all results when one starts or ends."""
    out, shown = Path(str(words["out"])), 0
    seconds = options.seconds or CALLS.get(call, USUAL_SECONDS)

    def after(outcomes: list[Outcome]) -> None:
        nonlocal shown
        report(out, [*earlier, *outcomes])
        if options.pack:
            pack(out, options.pack)
        for outcome in outcomes[shown:]:
            if outcome.status != "running":
                screen.outcome(out, outcome)
                shown += 1

    return check(listed, options.known, words, start + seconds, environment, after)


def pretrain(
    options: argparse.Namespace,
    out: Path,
    words: dict[str, object],
    start: float,
    environment: dict[str, str],
    screen: Screen,
) -> int:
    """Runs the plan of --budget, as far as this command's time allows; returns the exit status."""
    asked = {"budget": options.budget, "humaneval": str(options.humaneval), "rehearse": options.rehearse}
    progress = Progress.open(out, asked)
    if options.wheels:
        with_wheels(options.wheels, out, environment)

    def after(outcome: Outcome) -> None:
        screen.outcome(out, outcome)
        report(out, progress.all)
        if options.pack:
            pack(out, options.pack)

    left = (options.seconds or USUAL_SECONDS) - (time.monotonic() - start)
    done = follow(options.plan[0], progress, words, left, environment, after)
    benches, outcomes = records(out), progress.all
    screen.say(report(out, outcomes, bench_table(benches, environment) if benches else ""))
    screen.last(f"Full report: {out / 'report.md'}")
    if any(outcome.bad for outcome in outcomes):
        return 1
    if not done:
        screen.last(f"stages are left; run the same command again (exit status {UNFINISHED})")
    return 0 if done else UNFINISHED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # running commands end first
    sys.exit(main())
