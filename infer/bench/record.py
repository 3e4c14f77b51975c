"""Records of measurements: made from runs, written to files, with the raw times in a file beside, and read back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.config import recorded_fields
from laneformer.errors import InputError
from laneformer.infer.bench import latency
from laneformer.infer.bench.latency import Measured
from laneformer.infer.bench.machine import hardware, software, utc_now
from laneformer.infer.bench.schema import RANDOM, SCHEMA, check
from laneformer.infer.engine.backend import on_host
from laneformer.weights import parameter_count, parameters_per_token, prompt_multiply_adds

SUSTAINED = 1000  # output tokens from which on a rate counts as sustained
HOST, KERNEL = "engine_host", "kernel"  # measurement points


def make_record(
    measured: Measured,
    *,
    random_weights: bool,
    bandwidth_spec: float | None = None,
    beside: Measured | None = None,
    notes: Sequence[str] = (),
) -> dict:
    """A complete record. bandwidth_spec: memory bandwidth of one device as its maker specifies it, bytes/s. beside:
    runs with the same prompts on another engine, to compare the tokens with. notes: further notes.
    """
    record = {
        "schema": SCHEMA,
        "kind": "decode_latency",
        "status": "measured",
        "conditions": conditions(measured, random_weights, bandwidth_spec),
        "metrics": metrics(measured, bandwidth_spec),
        "correctness": _correctness(measured, beside),
        "raw": None,
        "notes": [*_notes(measured, random_weights), *notes],
    }
    check(record)
    return record


def weights_of(facts: Mapping[str, Any]) -> str:
    """Description of the format of the weights. facts: the conditions of a backend."""
    if formats := facts.get("quantized_formats"):
        return ", ".join([*formats, facts["weights_dtype"]])
    return "bf12" if "bf12_weights" in facts else facts["weights_dtype"]


def conditions(measured: Measured, random_weights: bool, bandwidth_spec: float | None) -> dict:
    """The conditions of a record: everything that its figures depend on."""
    engine, case = measured.engine, measured.case
    config, facts = engine.config, engine.conditions
    bandwidth, multiply_adds = (
        [speed for run in measured.runs if (speed := getattr(run.speeds, name)) is not None]
        for name in ("bandwidth", "multiply_adds")
    )
    of_bandwidth, of_multiply_adds = measured.machine.sources
    groups = np.concatenate([run.counts[1:] for run in measured.runs])
    settings = {name: value for name, value in asdict(config).items() if name in recorded_fields(config)}
    return {
        "model": {
            "name": engine.name,
            "config_sha256": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
            "weights": RANDOM if random_weights else f"checkpoint:{engine.name}",
            "params_total": parameter_count(config),
            "params_streamed": parameters_per_token(config),
            "weight_bytes_per_token": latency.weight_bytes(engine),
            "layout": config.layout,
            "lanes": config.num_lanes,
        },
        "precision": {
            "stored": facts["stored_dtype"],
            "weights": weights_of(facts),
            "activations": facts["compute_dtype"],
            "kv_cache": facts["kv_dtype"],
            "accumulate": engine.precision.accumulate,
            "matmul_flag": (
                None if engine.backend != "xla" else "highest" if facts["compute_dtype"] == "float32" else "default"
            ),
        },
        "batch_size": 1,
        "concurrency": 1,
        "speculative": bool(facts.get("speculation")),
        "quantized": "quantized_formats" in facts,
        "pruned": False,
        "prompt_tokens": case.prompt_tokens,
        "output_tokens": case.output_tokens,
        "context_mean": latency.mean_context(case),
        "sliding_window": config.sliding_window if any(config.layer_windows) else None,
        "prompts": case.prompts,
        "sampling": case.sampling.record(),
        "ignore_eos": True,
        "parallelism": {
            "kind": config.layout,
            "devices": facts["devices"],
            "delay": config.broadcast_delay if config.layout == "laneformer" else None,
            "exchanges": config.schedule.num_reductions,
            "exposed": len(config.schedule.exposed),
        },
        "engine": facts,
        "tokens_per_dispatch": {
            "asked": case.tokens_per_dispatch,
            "median": float(np.median(groups)),
            "max": int(groups.max()),
        },
        "measurement_point": HOST,
        "hardware": {
            "device": facts["device"],
            "count": facts["devices"],
            "memory_bw_spec_Bps": bandwidth_spec,
            "memory_bw_effective_Bps": float(np.median(bandwidth)) if bandwidth else None,
            "effective_source": of_bandwidth if bandwidth else None,
            "multiply_adds_per_s": float(np.median(multiply_adds)) if multiply_adds else None,
            "multiply_adds_source": of_multiply_adds if multiply_adds else None,
            **hardware(),
        },
        "software": software(),
        "warmup_runs": case.warmup_runs,
        "measured_runs": len(measured.runs),
        "compile_s": {"cold": measured.first_request, "cached": measured.second_request},
        "other_load": {"loadavg_before": list(measured.load_before), "loadavg_after": list(measured.load_after)},
        "date_utc": utc_now(),
    }


def metrics(measured: Measured, bandwidth_spec: float | None) -> dict:
    """The metrics of a record."""
    engine, case, runs = measured.engine, measured.case, measured.runs
    num_bytes, multiply_adds = (
        latency.bytes_per_token(engine, case),
        prompt_multiply_adds(engine.config, case.prompt_tokens),
    )
    prompt_rates = [case.prompt_tokens / run.arrivals[0] for run in runs]
    rates, totals = [run.rate for run in runs], [run.seconds for run in runs]
    reading = [] if engine.conditions.get("speculation") else runs  # runs that read `num_bytes` for each token
    gaps = [gaps for run in runs if (gaps := run.gaps) is not None]
    peaks = [found for run in runs if (found := latency.peak(run.arrivals, run.counts)) is not None]
    peak, peak_tokens = max(peaks, default=(None, None))
    devices = 1 if on_host() else engine.conditions["devices"]
    return {
        "ttft_ms": latency.summary([1e3 * run.arrivals[0] for run in runs]),
        "prompt_tps": {"median": float(np.median(prompt_rates)), "min": min(prompt_rates), "samples": prompt_rates},
        "arithmetic": {
            "effective": latency.share(
                [
                    multiply_adds / run.arrivals[0] / run.speeds.multiply_adds
                    for run in runs
                    if run.speeds.multiply_adds is not None
                ]
            ),
            "multiply_adds_per_prompt": multiply_adds,
        },
        "itl_us": (
            {"point": HOST if engine.session is None else KERNEL, **latency.summary(1e6 * np.concatenate(gaps))}
            if gaps
            else None
        ),
        "group_us": _groups(runs),
        "ici_us": None,
        "queue_ms": None,
        "e2e_ms": latency.summary([1e3 * total for total in totals]),
        "e2e_tps": {
            "median": float(np.median([case.output_tokens / total for total in totals])),
            "min": case.output_tokens / max(totals),
        },
        "decode_tps": {
            "sustained_median": float(np.median(rates)),
            "sustained_min": min(rates),
            "window_tokens": case.output_tokens - 1,
            "samples": rates,
            "peak": peak,
            "peak_window_tokens": peak_tokens,
        },
        "mbu": {
            "peak_spec": (
                None
                if bandwidth_spec is None
                else latency.share([num_bytes * run.rate / (devices * bandwidth_spec) for run in reading])
            ),
            "effective": latency.share(
                [num_bytes * run.rate / run.speeds.bandwidth for run in reading if run.speeds.bandwidth is not None]
            ),
            "read_pass": latency.share(
                [run.speeds.read_pass * run.rate for run in reading if run.speeds.read_pass is not None]
            ),
            "bytes_per_token": num_bytes,
        },
    }


def _groups(runs: Sequence[latency.Run]) -> dict | None:
    """Statistics of the times between arrivals of groups of tokens; None if each token arrived alone."""
    if all((run.counts == 1).all() for run in runs):
        return None
    gaps = 1e6 * np.concatenate([np.diff(run.arrivals) for run in runs])
    counts = np.concatenate([run.counts[1:] for run in runs])
    return {"point": HOST, "per_token_p50": float(np.median(gaps / counts)), **latency.summary(gaps)}


def _correctness(measured: Measured, beside: Measured | None) -> dict:
    if beside is None:
        return {"matches_reference": None, "method": "not compared"}
    first = latency.first_difference(measured.runs, beside.runs)
    found = "all equal" if first is None else f"the first {first} of each equal, not all"
    method = f"tokens of {len(beside.runs)} runs beside those of backend {beside.engine.backend}: {found}"
    return {"matches_reference": first is None, "method": method}


def _notes(measured: Measured, random_weights: bool) -> list[str]:
    case, session = measured.case, measured.engine.session
    notes = []
    if random_weights:
        notes.append("random weights: the speeds are those of the architecture, and the text is meaningless")
    if most := measured.engine.conditions.get("speculation"):
        counts = [run.drafting for run in measured.runs if run.drafting is not None]
        passes, drafted = sum(count.passes for count in counts), sum(count.drafted for count in counts)
        notes.append(
            f"speculative decoding, up to {most} drafts a pass: {len(counts) * (case.output_tokens - 1) / passes:.2f}"
            f" tokens per pass, {sum(sum(count.accepted) for count in counts)} of {drafted} drafts accepted;"
            f" prompt {case.prompts}"
        )
    if case.output_tokens < SUSTAINED:
        notes.append(
            f"{case.output_tokens} output tokens: fewer than the {SUSTAINED:,} from which a rate counts as sustained"
        )
    if measured.machine.unavailable:
        notes.append(f"no effective bandwidth and arithmetic peak: {measured.machine.unavailable}")
    if session is not None and not most:
        notes.append(
            "mbu.read_pass: time in which the workers only read one token's weights, over the time of a token; without"
            " keys and values"
        )
    if on_host() and measured.engine.conditions["devices"] > 1:
        notes.append(f"the {measured.engine.conditions['devices']} devices are parts of one processor")
    return notes


def write(path: Path, records: Sequence[dict], measured: Sequence[Measured]) -> None:
    """Writes the records as a JSON list, and the times of their runs to an .npz beside it. Each record contains the
    hash of the .npz.
    """
    raw = path.with_suffix(".npz")
    arrays: dict[str, np.ndarray] = {}
    prefixes = []
    for n, one in enumerate(measured):
        prefixes.append(f"{n}.{one.engine.backend}.{one.case.prompt_tokens}.")
        for i, run in enumerate(one.runs):
            name = f"{prefixes[-1]}run{i}."
            arrays |= {f"{name}arrivals_s": run.arrivals, f"{name}tokens": run.counts}
            known = {
                "gaps_us": None if run.gaps is None else 1e6 * run.gaps,
                "bandwidth_Bps": run.speeds.bandwidth,
                "multiply_adds_per_s": run.speeds.multiply_adds,
                "read_pass_s": run.speeds.read_pass,
            }
            arrays |= {f"{name}{key}": np.asarray(value) for key, value in known.items() if value is not None}
    np.savez(raw, **arrays)  # type: ignore[arg-type]  # mypy: an array may be called allow_pickle
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    for record, prefix in zip(records, prefixes, strict=True):
        record["raw"] = {"path": raw.name, "sha256": digest, "prefix": prefix}
        check(record)
    path.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict]:
    """The records of a JSON file, which contains one record or a list. Raises InputError for an incomplete record."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    records = content if isinstance(content, list) else [content]
    if not records:
        raise InputError(f"{path} contains no record: name a file of infer bench --json")
    for n, record in enumerate(records):
        check(record, f"{path}, record {n + 1}" if len(records) > 1 else str(path))
    return records
