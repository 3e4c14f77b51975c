"""Schema laneformer.bench/1: the fields of a record of a measurement. A record contains no figure without its
conditions.
"""

from dataclasses import dataclass
from typing import Any

from laneformer.errors import InputError

SCHEMA = "laneformer.bench/1"
STATUSES = ("measured", "simulated", "projected")
RANDOM = "random"  # origin of the weights, in place of a checkpoint


@dataclass(frozen=True)
class Null:
    """The type of a field that may be null."""

    kind: Any


NUMBER = (int, float)
STATISTICS = {
    **dict.fromkeys(("p50", "p90", "p95", "p99"), NUMBER),
    "p99.9": Null(NUMBER),
    **dict.fromkeys(("min", "max", "mean", "std"), NUMBER),
    "n": int,
}
SHARE = Null({"median": NUMBER, "min": NUMBER, "samples": list})
# A record has exactly these keys. Values: a type, a tuple of types, a dict of further keys, or Null of one of these.
FIELDS = {
    "schema": str,
    "kind": str,
    "status": str,
    "conditions": {
        "model": {
            "name": str,
            "config_sha256": str,
            "weights": str,
            "params_total": int,
            "params_streamed": int,
            "weight_bytes_per_token": NUMBER,
            "layout": str,
            "lanes": int,
        },
        "precision": {
            "stored": str,
            "weights": str,
            "activations": str,
            "kv_cache": str,
            "accumulate": str,
            "matmul_flag": Null(str),
        },
        "batch_size": int,
        "concurrency": int,
        "speculative": bool,
        "quantized": bool,
        "pruned": bool,
        "prompt_tokens": int,
        "output_tokens": int,
        "context_mean": NUMBER,
        "sliding_window": Null(int),
        "prompts": str,
        "sampling": dict,
        "ignore_eos": bool,
        "parallelism": {"kind": str, "devices": int, "delay": Null(int), "exchanges": int, "exposed": int},
        "engine": dict,
        "tokens_per_dispatch": {"asked": Null(int), "median": NUMBER, "max": int},
        "measurement_point": str,
        "hardware": {
            "device": str,
            "count": int,
            "memory_bw_spec_Bps": Null(NUMBER),
            "memory_bw_effective_Bps": Null(NUMBER),
            "effective_source": Null(str),
            "multiply_adds_per_s": Null(NUMBER),
            "multiply_adds_source": Null(str),
            "interconnect": Null(str),
            "memory_bytes": Null(int),
            "host_cpu": str,
            "host_cores": int,
            "driver": Null(str),
            "power_cap_w": Null(NUMBER),
            "clocks": Null(str),
        },
        "software": {
            "git_sha": Null(str),
            "dirty": Null(bool),
            "jax": str,
            "jaxlib": str,
            "numpy": str,
            "xla_flags": str,
            "python": str,
            "os": str,
        },
        "warmup_runs": int,
        "measured_runs": int,
        "compile_s": {"cold": NUMBER, "cached": NUMBER},
        "other_load": {"loadavg_before": list, "loadavg_after": list},
        "date_utc": str,
    },
    "metrics": {
        "ttft_ms": STATISTICS,
        "prompt_tps": {"median": NUMBER, "min": NUMBER, "samples": list},
        "arithmetic": {"effective": SHARE, "multiply_adds_per_prompt": NUMBER},
        "itl_us": Null({"point": str, **STATISTICS}),
        "group_us": Null({"point": str, "per_token_p50": NUMBER, **STATISTICS}),
        "ici_us": Null(STATISTICS),
        "queue_ms": Null(STATISTICS),
        "e2e_ms": STATISTICS,
        "e2e_tps": {"median": NUMBER, "min": NUMBER},
        "decode_tps": {
            "sustained_median": NUMBER,
            "sustained_min": NUMBER,
            "window_tokens": int,
            "samples": list,
            "peak": Null(NUMBER),
            "peak_window_tokens": Null(int),
        },
        "mbu": {"peak_spec": SHARE, "effective": SHARE, "read_pass": SHARE, "bytes_per_token": NUMBER},
    },
    "correctness": {"matches_reference": Null(bool), "method": str},
    "raw": Null({"path": str, "sha256": str, "prefix": str}),
    "notes": list,
}


def check(record: Any, where: str = "record") -> None:
    """Raises InputError with the name of the field unless the record is complete. where: name of the record in
    messages.
    """
    _check(record, FIELDS, where, "")
    if record["schema"] != SCHEMA:
        raise InputError(f"{where}: schema must be {SCHEMA}, got {record['schema']!r}")
    if record["status"] not in STATUSES:
        raise InputError(f"{where}: unknown status {record['status']!r}: choose {', '.join(STATUSES)}")


def _check(value: Any, kind: Any, where: str, path: str) -> None:
    if isinstance(kind, Null):
        if value is None:
            return
        kind = kind.kind
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            raise InputError(f"{where}: {path or 'the record'} must be an object with {', '.join(kind)}")
        for name in [*kind, *value]:
            inner = f"{path}.{name}" if path else str(name)
            if name not in value:
                raise InputError(f"{where}: {inner} is missing: measure again, since figures need all their conditions")
            if name not in kind:
                raise InputError(f"{where}: {inner} is not a field of {SCHEMA}: remove it")
            _check(value[name], kind[name], where, inner)
    elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise InputError(f"{where}: {path} must be {names}, got {value!r}")
