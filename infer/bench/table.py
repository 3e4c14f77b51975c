"""Tables of records for the terminal and for documents, with the conditions below each row of figures."""

from collections.abc import Sequence

from laneformer.infer.bench.record import SUSTAINED
from laneformer.infer.bench.schema import RANDOM, check

RANDOM_MARK, SHORT_MARK, STATUS_MARK = "†", "‡", "§"
HEADER = (
    "model, backend",
    "prompt + output",
    "tokens/s median (min)",
    "fastest stretch",
    "first token ms p50 (max)",
    "prompt tokens/s median (min)",
    "of multiply-adds (min)",
    "token us p50 / p90 / p99 / max",
    "group us p50 / p99",
    "of bandwidth (min)",
    "of read pass (min)",
)


def markdown(records: Sequence[dict]) -> str:
    """A Markdown table for a document. Raises InputError for an incomplete record."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for record in records:
        check(record)
        lines += [cells(record), (f"<sub>{condition_line(record)}</sub>", *[""] * (len(HEADER) - 1))]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *legend(records)])


def terminal(records: Sequence[dict]) -> str:
    """A table in columns for the terminal."""
    rows = [cells(record) for record in records]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    lines = [line(HEADER)]
    for record, row in zip(records, rows, strict=True):
        lines += [line(row), f"    {condition_line(record)}"]
    return "\n".join([*lines, *legend(records)])


def layouts(records: Sequence[dict]) -> list[str]:
    """The lines of a Markdown table of the cost of each layout's exchanges. records: of the same sizes, from one run of
    the benchmark.
    """
    heads = (
        "layout, backend",
        "prompt",
        "tokens/s median",
        "us per token",
        "minus layout none",
        "exchanges per token",
        "of them exposed",
    )
    rows = [heads, ("---",) * len(heads)]

    def place(record: dict) -> tuple:
        return record["conditions"]["engine"]["backend"], record["conditions"]["prompt_tokens"]

    def microseconds(record: dict) -> float:
        return 1e6 / record["metrics"]["decode_tps"]["sustained_median"]

    floors = {place(r): microseconds(r) for r in records if r["conditions"]["parallelism"]["kind"] == "none"}
    for record in records:
        kind, (backend, prompt) = record["conditions"]["parallelism"], place(record)
        floor = floors.get((backend, prompt))
        rows.append(
            (
                f"{kind['kind']}, {backend}",
                str(prompt),
                f"{record['metrics']['decode_tps']['sustained_median']:,.1f}",
                f"{microseconds(record):,.1f}",
                "" if floor is None else f"{microseconds(record) - floor:+,.1f}",
                str(kind["exchanges"]),
                str(kind["exposed"]),
            )
        )
    return [
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        (
            "Exchanges: sums over the lanes, without those of the head and of the choice of the token. Exposed: those"
            " that every lane waits for at once. Minus layout none: the cost of all waiting and adding, in the same"
            " run."
        ),
    ]


def cells(record: dict) -> tuple[str, ...]:
    """The cells of a record's row. Cells with a figure end in the marks that `legend` explains."""
    c, m = record["conditions"], record["metrics"]
    marks = "".join(_marks(record))
    rate, itl, group, ttft, prompt = (m[name] for name in ("decode_tps", "itl_us", "group_us", "ttft_ms", "prompt_tps"))
    figures = (
        f"{rate['sustained_median']:,.1f} ({rate['sustained_min']:,.1f})",
        "" if rate["peak"] is None else f"{rate['peak']:,.1f} over {rate['peak_window_tokens']} tokens",
        f"{ttft['p50']:,.2f} ({ttft['max']:,.2f})",
        f"{prompt['median']:,.1f} ({prompt['min']:,.1f})",
        _share(m["arithmetic"]["effective"]),
        "" if itl is None else " / ".join(f"{itl[name]:,.0f}" for name in ("p50", "p90", "p99", "max")),
        "" if group is None else f"{group['p50']:,.0f} / {group['p99']:,.0f}",
        *(_share(m["mbu"][name]) for name in ("effective", "read_pass")),
    )
    return (
        f"{c['model']['name']}, {c['engine']['backend']}",
        f"{c['prompt_tokens']} + {c['output_tokens']}",
        *(f"{figure} {marks}" if figure and marks else figure for figure in figures),
    )


def _share(share: dict | None) -> str:
    return f"{100 * share['median']:.1f}% ({100 * share['min']:.1f}%)" if share else ""


def condition_line(record: dict) -> str:
    """The conditions of a record in one line."""
    c, m = record["conditions"], record["metrics"]
    model, precision, hardware, software, sampling = (
        c[name] for name in ("model", "precision", "hardware", "software", "sampling")
    )
    weights = "random weights" if model["weights"] == RANDOM else model["weights"]
    stored = "" if precision["stored"] == precision["weights"] else f" (stored as {precision['stored']})"
    packed, listed = (c["engine"].get(f"bf12_{name}") for name in ("weights", "exceptions"))
    exceptions = f" with {listed:,} exceptions in {packed:,}" if packed else ""
    dispatch, itl = c["tokens_per_dispatch"], m["itl_us"]
    bandwidth, multiply_adds = hardware["memory_bw_effective_Bps"], hardware["multiply_adds_per_s"]
    spec, specified = m["mbu"]["peak_spec"], hardware["memory_bw_spec_Bps"]
    parts = [
        *([] if record["status"] == "measured" else [record["status"].upper()]),
        f"{weights}, {model['params_total']:,} parameters, layout {model['layout']}, {model['lanes']} lanes",
        f"weights {precision['weights']}{stored}{exceptions}, products {precision['activations']}, cache"
        f" {precision['kv_cache']}",
        f"batch {c['batch_size']}, mean context {c['context_mean']:,.0f}",
        "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']}",
        *(["speculative decoding, a forced text"] if c["speculative"] else []),
        f"{hardware['count']} x {hardware['device']}"
        + (f", {threads} threads" if (threads := c["engine"].get("threads")) else ""),
        (
            f"rate at the {c['measurement_point'].replace('_', ' ')} over {m['decode_tps']['window_tokens']:,} tokens, "
            f"{c['warmup_runs']} warm-up and {c['measured_runs']} measured runs"
        ),
        f"tokens per dispatch {dispatch['asked'] or 'as the engine chose'} (median {dispatch['median']:g})",
        *([] if itl is None else [f"{itl['n']:,} token gaps at the {itl['point'].replace('_', ' ')}"]),
        f"{m['mbu']['bytes_per_token'] / 1e6:,.3f} MB per token"
        + ("" if bandwidth is None else f" of {bandwidth / 1e9:,.2f} GB/s ({hardware['effective_source']})"),
        f"{m['arithmetic']['multiply_adds_per_prompt'] / 1e9:,.3f} G multiply-adds per prompt"
        + ("" if multiply_adds is None else f" of {multiply_adds / 1e9:,.1f} G/s ({hardware['multiply_adds_source']})"),
        *(
            []
            if spec is None
            else [f"{100 * spec['median']:.1f}% of the specified {specified / 1e9:,.0f} GB/s per device"]
        ),
        f"first request {c['compile_s']['cold']:.2f} s cold, {c['compile_s']['cached']:.2f} s again",
        "load " + " -> ".join(f"{c['other_load'][name][0]:.1f}" for name in ("loadavg_before", "loadavg_after")),
        f"jax {software['jax']}, Python {software['python']}",
        (
            f"commit {(software['git_sha'] or 'unknown')[:12]}{' with changes' if software['dirty'] else ''},"
            f" {c['date_utc']}"
        ),
    ]
    return "; ".join(parts)


def legend(records: Sequence[dict]) -> list[str]:
    """Lines that explain the columns, and the marks that occur in the table."""
    texts = {
        RANDOM_MARK: "random weights: the speed of the architecture, not of a trained model",
        SHORT_MARK: f"fewer than {SUSTAINED:,} output tokens: not a sustained rate",
        STATUS_MARK: "simulated or projected, not measured",
    }
    used = {mark for record in records for mark in _marks(record)}
    return [
        (
            "First token: from the acceptance of the request. Token: from one to the next, if each has its own time."
            " Group: between arrivals of tokens that arrived together. Of bandwidth: bytes per token times the rate,"
            " over the memory's bandwidth around the run. Of multiply-adds: those of the prompt over the time to the"
            " first token, over the float32 multiply-adds per second around the run."
        ),
        *(f"{mark} {text}." for mark, text in texts.items() if mark in used),
    ]


def _marks(record: dict) -> list[str]:
    c = record["conditions"]
    found = {
        RANDOM_MARK: c["model"]["weights"] == RANDOM,
        SHORT_MARK: c["output_tokens"] < SUSTAINED,
        STATUS_MARK: record["status"] != "measured",
    }
    return [mark for mark, is_so in found.items() if is_so]
