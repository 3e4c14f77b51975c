"""Writes what the stages measured to report.md and report.json. Needs only Python."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from laneformer.commands.lab.gpu_check import figures
from laneformer.commands.lab.gpu_check.stage import PYTHON, ROOT, Outcome, text_of
from laneformer.commands.lab.gpu_check.training_report import pretraining_page, training_table

DESCRIPTION = "machine-3.log"  # of the command of stage machine that prints versions and tools


def micro_table(lines: Iterable[dict]) -> list[str]:
    """Rows of a Markdown table: measurement, conditions, figures."""
    rows = ["| measurement | conditions | median | min | p95 | unit | GB/s |", "|---|---|---|---|---|---|---|"]
    known = ("test", "unit", "median", "min", "p95", "gb_per_s", "device", "memory_bytes", "clocks")
    for line in lines:
        shown = line if line["test"] == "machine" else {n: value for n, value in line.items() if n not in known}
        conditions = ", ".join(f"{name} {value}" for name, value in shown.items() if name != "test")
        numbers = [f"{line[name]:,.2f}" if name in line else "" for name in ("median", "min", "p95")]
        rate = f"{line['gb_per_s']:,.0f}" if "gb_per_s" in line else ""
        rows.append(f"| {line['test']} | {conditions} | {' | '.join(numbers)} | {line.get('unit', '')} | {rate} |")
    return rows


def records(out: Path) -> dict[Path, list]:
    """Records of the decode benchmark by file, without truncated files."""
    found = {path: figures.read_list(path) for path in sorted(out.glob("*.json"))}
    return {path: content for path, content in found.items() if content and "schema" in content[0]}


def ratios(bench: dict[Path, list]) -> list[str]:
    """The benchmark's notes on the ratio of two backends in the same run."""
    notes = (note for found in bench.values() for record in found for note in record.get("notes", ()))
    return list(dict.fromkeys(note for note in notes if "ratio of the medians" in note))


def bench_table(paths: Iterable[Path], environment: dict[str, str]) -> str:
    """The table of `infer bench --table`, with all conditions."""
    command = [PYTHON, "-m", "infer", "bench", "--table", *map(str, paths)]
    environment = environment | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    return done.stdout.strip() or done.stderr.strip()


def write(path: Path, text: str) -> None:
    """Writes a file that a reader sees either as it was or complete, also if this process is killed."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def report(out: Path, outcomes: Sequence[Outcome], decoding: str = "") -> str:
    """Writes report.json and report.md; returns the text of report.md after the stages and without details.

    decoding: table of the decode benchmark.
    """
    lines, bench = figures.measurements(out), records(out)
    data = {
        "stages": [vars(outcome) for outcome in outcomes],
        "copy_gb_per_s": (rate := figures.copy_rate(lines)) and rate / 1e9,
        "micro": lines,
        "records": {path.stem: found for path in sorted(out.glob("*.json")) if (found := figures.read_list(path))},
    }
    write(out / "report.json", json.dumps(data, indent=1) + "\n")
    stages = ["# GPU check", "", "| stage | result | seconds | |", "|---|---|---|---|"]
    stages += [f"| {o.stage} | {o.status} | {o.seconds:.0f} | {o.detail} |" for o in outcomes]
    text = text_of(out / DESCRIPTION).strip().splitlines()[-2:]
    if measured := figures.figures_table(figures.figures(out), rate):
        text += ["", "## Times per token", "", *measured]
    text += ["", *shown] if (shown := [*figures.micro_rows(lines), *figures.tests(out)]) else []
    if decoding:
        text += ["", "## Decoding", "", decoding]
    if compared := ratios(bench):
        text += ["", "## Backends compared", "", *(f"- {note}" for note in compared)]
    if profile := figures.profile_table(out):
        text += ["", "## One launch, profiled", "", *profile]
    if (spent := text_of(out / "trace.log")).startswith("| op |"):
        text += ["", "## Where the time of a token goes", "", spent.strip()]
    if (rank := text_of(out / "rank.log")).count("| delay us |"):
        text += ["", "## One rank of several, with emulated peers", "", rank[rank.index("| layout |") :].strip()]
    if rows := training_table(out):
        text += ["", "## Training", "", *rows]
    text += pretraining_page(out)
    more = ["", "## Microbenchmarks", "", *micro_table(lines)] if lines else []
    write(out / "report.md", "\n".join([*stages, *text, *more]) + "\n")
    return "\n".join(text).strip()
