"""Times per token of all stages beside the floor that memory sets, and what the profiler saw. Needs only Python.

A floor is the bytes of a token over the rate of a copy that this machine's microbenchmark measured, never of a data
sheet. A copy counts the bytes that it reads and those that it writes.
"""

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from laneformer.commands.lab.gpu_check.stage import text_of

# Metrics of Nsight Compute's page "raw" that are shown, if a section collected them.
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes.sum.per_second",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "launch__registers_per_thread",
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!.*not_issued)(\w+?)_per_issue_active\.ratio")
MEANINGS = {
    "long_scoreboard": "loads: of an edge's words in read_words, of a full ring's barrier in try_wait",
    "no_instruction": "instruction cache",
    "no_instructions": "instruction cache",
    "membar": "fences",
    "barrier": "barriers of a CTA",
    "sleeping": "waits that sleep",
}
MOST_STALLS, MOST_LINES = 6, 8


class Figure(NamedTuple):
    """A measured time per token."""

    name: str
    context: int
    us: float
    bytes: float
    """Bytes that a token reads."""
    device: str


def read_list(path: Path) -> list[dict]:
    """The records in a file; [] if it is missing, truncated, or something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def measurements(out: Path) -> list[dict]:
    """The records of the microbenchmarks, without truncated lines, each with the fields that identify its device."""
    found = []
    for path in sorted(out.glob("micro*.log")):
        machine: dict[str, Any] = {}
        for line in path.read_text(errors="replace").splitlines():
            try:
                one = json.loads(line) if line.startswith("{") else None
            except ValueError:
                continue
            if not isinstance(one, dict):
                continue
            if one.get("test") == "machine":
                machine = {"device": one["device"], "memory_bytes": one.get("memory_bytes")}
                machine["clocks"] = f"SM {one.get('sm_mhz_seen')} of {one.get('sm_mhz_most')} MHz"
                found.append(one)
            else:
                found.append(one | machine)
    return found


def copy_rate(lines: Iterable[dict]) -> float | None:
    """Bytes per second of the fastest measured copy; None if none was."""
    return max(
        (1e9 * line["gb_per_s"] for line in lines if line["test"] == "copy" and "gb_per_s" in line), default=None
    )


def figures(out: Path) -> list[Figure]:
    """All measured times per token, by the name of their file."""
    found = []
    for path in sorted(out.glob("*.json")):
        for record in read_list(path):
            try:
                found.append(_figure(path.stem, record))
            except (KeyError, TypeError):
                continue  # another kind of record
    return found


def _figure(stem: str, record: dict) -> Figure:
    if "conditions" in record:
        conditions, metrics = record["conditions"], record["metrics"]
        engine, hardware = conditions["engine"], conditions["hardware"]
        us = 1e6 / metrics["decode_tps"]["sustained_median"]
        name = f"{stem}: {conditions['model']['name']}, {engine['backend']}"
        return Figure(name, conditions["prompt_tokens"], us, metrics["mbu"]["bytes_per_token"], _device(hardware))
    labels = [record.get(name) for name in ("way", "variant", "layout")]
    labels.append(f"delay {record['delay_us']} us" if "delay_us" in record else None)
    labels.append(record["weights"].removeprefix("random ") if record.get("test") == "decode" else None)
    if record.get("same_bits") is False:
        labels.append("OTHER BITS")
    name = f"{stem}: {', '.join(one for one in labels if one)}"
    return Figure(name, record["context"], record["us_per_token"]["median"], record["bytes_per_token"], _device(record))


def _device(record: dict) -> str:
    memory = f", {record['memory_bytes'] / 1e9:.0f} GB" if record.get("memory_bytes") else ""
    clocks = f", {record['clocks']}" if record.get("clocks") else ""
    return f"{record['device']}{memory}{clocks}"


def figures_table(found: list[Figure], rate: float | None) -> list[str]:
    """Lines of a Markdown table, and of the conditions below it."""
    if not found:
        return []
    rows = [
        "| figure | context | us/token | tokens/s | GB/token | floor us | of the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        floor = one.bytes / rate * 1e6 if rate else None
        shares = (f"{floor:,.0f}", f"{floor / one.us:.1%}") if floor else ("", "")
        cells = (one.name, one.context, f"{one.us:,.1f}", f"{1e6 / one.us:,.0f}", f"{one.bytes / 1e9:.3f}", *shares)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    floors = (
        f"Floor: bytes of a token at {rate / 1e9:,.0f} GB/s, the measured rate of a copy (bytes read and written)."
        if rate
        else "No floors: no copy was measured (stage micro)."
    )
    devices = dict.fromkeys(one.device for one in found)
    return [*rows, "", floors, *(f"Device: {device}" for device in list(devices)[:2])]


def micro_rows(lines: Iterable[dict]) -> list[str]:
    """The four numbers that decide everything, a line each: reading, copying, an edge, the exchange of two lanes."""
    kept: dict[str, dict] = {}
    for line in lines:
        best = kept.get(line["test"])
        if "median" in line and (best is None or _rank(line) > _rank(best)):
            kept[line["test"]] = line
    shown = []
    for name in ("ring", "copy", "edge", "lanes"):
        if line := kept.get(name):
            rate = f"{line['gb_per_s']:,.0f} GB/s" if "gb_per_s" in line else f"{line['median']:.2f} us"
            shown.append(f"{name} {rate} ({line.get('form', 'the best')}, {line.get('ctas')} CTAs)")
    return ["; ".join(shown) + "."] if shown else []


def _rank(line: dict) -> float:
    return (
        line["gb_per_s"] if line["test"] in ("ring", "copy") else -line["median"] - 1e9 * (line.get("form") == "none")
    )


def profile_table(out: Path) -> list[str]:
    """Lines about the profiled launch: metrics by their names in Nsight Compute, the reasons of waits, and the
    instructions at which warps were found waiting; [] if nothing was profiled.
    """
    rows = _csv(out / "ncu-1.log", "Kernel Name")
    if len(rows) < 2:
        return []
    units, values = rows[0], rows[-1]  # the row below the names has units
    lines = ["| metric | value | unit | |", "|---|---|---|---|"]
    lines += [f"| {name} | {values[name]} | {units[name]} | |" for name in METRICS if values.get(name)]
    stalls = [(_number(values[name]), name, match[1]) for name in values if (match := STALL.fullmatch(name))]
    for value, name, reason in sorted(stalls, reverse=True)[:MOST_STALLS]:
        lines.append(f"| {name} | {value:.2f} | {units[name]} | {MEANINGS.get(reason, '')} |")
    return [*lines, *_waits(_csv(out / "ncu-2.log", "Source"))]


def _waits(rows: list[dict[str, str]]) -> list[str]:
    """Lines about the instructions with the most samples of page "source"."""
    counted = next((name for name in (rows[0] if rows else {}) if "Samples" in name), None)
    if counted is None:
        return []
    rows = [row for row in rows if _number(row[counted])]
    total = sum(_number(row[counted]) for row in rows)
    most = sorted(rows, key=lambda row: -_number(row[counted]))[:MOST_LINES]
    lines = ["", f"| {counted} | instruction | waits for |", "|---|---|---|"]
    for row in most:
        reasons = sorted(((_number(row[name]), name) for name in row if name.startswith("stall_")), reverse=True)[:2]
        waits = ", ".join(f"{name.removeprefix('stall_')} {value:.0f}" for value, name in reasons if value)
        lines.append(f"| {_number(row[counted]) / total:.1%} | `{row['Source'][:60]}` | {waits} |")
    return lines


def _csv(path: Path, column: str) -> list[dict[str, str]]:
    """The rows of the table in a log of ncu --csv, whose lines before the table are messages. column: one of its
    columns.
    """
    lines = text_of(path).splitlines()
    start = next((n for n, line in enumerate(lines) if f'"{column}"' in line), len(lines))
    return [row for row in csv.DictReader(lines[start:]) if None not in row.values()]


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def tests(out: Path) -> list[str]:
    """One line about the tests that finished, by name if they failed."""
    text = text_of(out / "correctness.log", 8 << 20)
    if not (named := re.findall(r"(PASSED|FAILED|ERROR) (?:\[ *\d+%\] )?(\S+::\S+)", text)):
        return []
    outcomes = {name: state for state, name in named}
    bad = [name for name, state in outcomes.items() if state != "PASSED"]
    return [f"Tests: {len(outcomes) - len(bad)} passed, {len(bad)} failed{': ' if bad else '.'}{', '.join(bad[:8])}"]
