"""Writes what the stages measured to report.md and report.json. Needs only Python."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.gpu_check.stage import PYTHON, ROOT, Outcome
from scripts.gpu_check.training_report import pretraining_page, training_table


def measurements(out: Path) -> list[dict]:
    """The records of the microbenchmarks, without truncated lines."""
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
    """Records of the decode benchmark by file, without truncated files."""
    found = {}
    for path in sorted(out.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(content, list) and path.name != "rank.json":  # other files have an object
            found[path] = content
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
    """Writes report.json and report.md; returns the text of report.md without the microbenchmarks.

    decoding: table of the decode benchmark.
    """
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
    if rows := training_table(out):
        text += ["", "## Training", "", *rows]
    text += pretraining_page(out)
    more = ["", "## Microbenchmarks", "", *micro_table(lines)] if lines else []
    (out / "report.md").write_text("\n".join([*text, *more]) + "\n")
    return "\n".join(text) + "\n"
