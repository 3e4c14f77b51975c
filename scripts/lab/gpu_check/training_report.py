"""The sections of the report about training on this machine. Needs only Python."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

ROWS = 10  # rows of the table of losses


def read(path: Path) -> dict:
    """The JSON object in a file; {} if the file is missing or truncated."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def training_table(out: Path) -> list[str]:
    """Lines with a Markdown table: timed steps by layout, and what the dry run projects for the first one."""
    rows = []
    for path in sorted(out.glob("train-*.json")):
        planned = read(out / path.name.replace("train-", "plan-", 1))
        phase = (planned.get("phases") or [{}])[0]
        for entry in read(path).get("entries", []):
            low, high = (1e3 * seconds for seconds in entry["step_seconds"]["quartiles"])
            cells = (
                entry["layout"],
                f"{entry['batch']} x {entry['sequence']}",
                f"{1e3 * entry['step_seconds']['median']:,.1f} ({low:,.1f}-{high:,.1f})",
                f"{entry['tokens_per_second']:,.0f}",
                _share(entry["mfu"]),
                ", ".join(map(_share, sorted(phase.get("mfu", [])[:2]))),
                _gigabytes(entry["peak_bytes"]),
                _gigabytes(phase.get("memory_total")),
            )
            rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    conditions = next(iter(read(path) for path in sorted(out.glob("train-*.json")))).get("conditions", {})
    return [
        f"{', '.join(f'{name} {value}' for name, value in conditions.items())}. Projected: without and with complete"
        " overlap of exchanges and kernels.",
        "",
        "| layout | batch | ms per step (quartiles) | tokens/s | MFU | projected | peak memory | of the dry run |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def pretraining_page(out: Path) -> list[str]:
    """Lines of the report about a model that was trained here; empty if none was."""
    lines = list(metrics(out / "run" / "metrics.jsonl"))
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return []
    entry = (read(out / "pace.json").get("entries") or [{}])[0]
    rates = [line["tokens_per_second"] for line in steps if line.get("tokens_per_second")]
    text = ["", "## A model trained on this machine", "", *_facts(out, entry, steps, rates), "", *loss_table(lines)]
    if (out / "run" / "loss.png").exists():
        text += ["", "![Loss](run/loss.png)"]
    if score := read(out / "humaneval.json"):
        low, high = (100 * share for share in score["pass@1_interval_95"])
        sandbox = score.get("sandbox", {}).get("level", "unknown")
        text += [
            "",
            f"{score['data'].get('name', 'HumanEval')}: {score['passed']} of {score['total']} samples pass, pass@1"
            f" {100 * score['pass@1']:.1f} % (95 % interval {low:.1f} to {high:.1f}); sandbox {sandbox}.",
        ]
    if (log := out / "sample.log").exists():
        text += ["", "Its greedy continuation of `def fibonacci(n):`:", "", "```", log.read_text().rstrip(), "```"]
    return text


def _facts(out: Path, entry: dict, steps: list[dict], rates: list[float]) -> Iterable[str]:
    """Lines about the model, its training speed and its corpus."""
    asked = read(out / "plan.json").get("words", {}).get("steps", steps[-1]["step"])
    yield (
        f"{entry.get('name', 'model')}: {entry.get('parameters', 0):,} parameters, layout {entry.get('layout', '')}, "
        f"{steps[-1]['step']:,} of {asked:,} steps, {steps[-1]['tokens']:,} tokens."
    )
    if rates:
        shares = [line["mfu"] for line in steps if line.get("mfu")]
        mfu = f", MFU {_share(statistics.median(shares))}" if shares else ""
        yield f"Speed: {statistics.median(rates):,.0f} tokens/s{mfu} (medians over the steps)."
    if (log := out / "corpus.log").exists() and (said := log.read_text().strip()):
        yield f"Corpus: {said.splitlines()[-1]}."


def loss_table(lines: list[dict]) -> list[str]:
    """Lines of a Markdown table: training loss as means over equal parts of the run, each with its last validation."""
    steps = [line for line in lines if "loss" in line]
    size = max(1, -(-len(steps) // ROWS))
    rows = ["| step | tokens | training loss | validation loss | bits per byte |", "|---|---|---|---|---|"]
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        measured = [line for line in lines if "validation" in line and line["step"] <= part[-1]["step"]]
        found = next(iter(measured[-1]["validation"].values())) if measured else {}
        held_out = (f"{found[name]:.4f}" if name in found else "" for name in ("loss", "bits_per_byte"))
        loss = statistics.mean(line["loss"] for line in part)
        rows.append(f"| {part[-1]['step']:,} | {part[-1]['tokens']:,} | {loss:.4f} | {' | '.join(held_out)} |")
    return rows


def metrics(path: Path) -> Iterable[dict]:
    """The records of a run, without truncated lines."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _gigabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"
