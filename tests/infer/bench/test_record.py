"""Records of measurements, which are refused unless complete, and their tables."""

import copy
import hashlib
import json

import numpy as np
import pytest

from laneformer import InputError, ModelConfig
from laneformer.infer.bench import machine, table
from laneformer.infer.bench.latency import Case, Machine, Measured, Run, Speeds, bytes_per_token
from laneformer.infer.bench.record import make_record, read, write
from laneformer.infer.bench.schema import FIELDS, Null, check
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.sources import RandomSource

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_lanes=2,
    max_position_embeddings=4096,
)
NULLABLE = {
    "conditions.precision.matmul_flag",
    "conditions.sliding_window",
    "conditions.parallelism.delay",
    "conditions.tokens_per_dispatch.asked",
    *(
        f"conditions.hardware.{name}"
        for name in (
            "memory_bw_spec_Bps",
            "memory_bw_effective_Bps",
            "effective_source",
            "multiply_adds_per_s",
            "multiply_adds_source",
            "memory_bytes",
            "interconnect",
            "driver",
            "power_cap_w",
            "clocks",
        )
    ),
    "conditions.software.git_sha",
    "conditions.software.dirty",
    *(f"metrics.{name}" for name in ("itl_us", "group_us", "ici_us", "queue_ms")),
    *(f"metrics.{name}.p99.9" for name in ("ttft_ms", "itl_us", "group_us", "e2e_ms")),
    "metrics.decode_tps.peak",
    "metrics.decode_tps.peak_window_tokens",
    *(f"metrics.mbu.{name}" for name in ("peak_spec", "effective", "read_pass")),
    "metrics.arithmetic.effective",
    "correctness.matches_reference",
    "raw",
}


@pytest.fixture(scope="module")
def measured():
    """Two runs with known times: 1,001 tokens each, one per millisecond and one per two milliseconds."""
    engine = Engine(RandomSource(CONFIG), "xla", name="known")
    case = Case(prompt_tokens=100, output_tokens=1001, runs=2, warmup_runs=3)
    made = Measured(engine, case, Machine(engine, bytes_per_token(engine, case)), 2.0, 0.5, load_after=(1.0, 1.0, 1.0))
    for seconds in (1e-3, 2e-3):
        arrivals = 0.25 + seconds * np.arange(1001)
        made.runs.append(Run((7,) * 1001, arrivals, np.ones(1001, int), None, Speeds(1e9, 1e8)))
    return made


@pytest.fixture(scope="module")
def complete(measured, tmp_path_factory):
    """A record with as few nulls as possible."""
    file = tmp_path_factory.mktemp("records") / "one.json"
    record = make_record(measured, random_weights=True, bandwidth_spec=4e9, beside=measured)
    write(file, [record], [measured])
    return read(file)[0]


def paths(fields, prefix=()):
    """Yields (path, required type) of every key."""
    for name, kind in fields.items():
        yield (*prefix, name), kind
        inner = kind.kind if isinstance(kind, Null) else kind
        if isinstance(inner, dict):
            yield from paths(inner, (*prefix, name))


def inside(record, path):
    """The object that contains the last key of a path; None if a value on the way is null."""
    for name in path[:-1]:
        record = record[name]
        if record is None:
            return None
    return record


def test_every_key_is_mandatory(complete):
    tried = 0
    for path, _ in paths(FIELDS):
        changed = copy.deepcopy(complete)
        if (holder := inside(changed, path)) is None:
            continue
        del holder[path[-1]]
        with pytest.raises(InputError, match=f"{'.'.join(path)} is missing"):
            check(changed)
        tried += 1
    assert tried > 100


def test_null_is_refused_unless_allowed(complete):
    for path, _ in paths(FIELDS):
        changed = copy.deepcopy(complete)
        if (holder := inside(changed, path)) is None:
            continue
        holder[path[-1]] = None
        if ".".join(path) in NULLABLE:
            check(changed)
        else:
            with pytest.raises(InputError, match=".".join(path)):
                check(changed)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("schema",), "laneformer.bench/2", "schema must be laneformer.bench/1"),
        (("status",), "guessed", "measured, simulated, projected"),
        (("conditions", "colour"), "red", "conditions.colour is not a field"),
        (("conditions", "batch_size"), True, "conditions.batch_size must be int, got True"),
        (("conditions", "pruned"), 0, "conditions.pruned must be bool, got 0"),
        (("metrics", "ttft_ms"), 3.0, "metrics.ttft_ms must be an object"),
        (("metrics", "ttft_ms", "p50"), "3", "metrics.ttft_ms.p50 must be int or float"),
    ],
)
def test_wrong_values_are_refused(complete, path, value, message):
    changed = copy.deepcopy(complete)
    inside(changed, path)[path[-1]] = value
    with pytest.raises(InputError, match=message):
        check(changed)
    with pytest.raises(InputError, match=message):
        table.markdown([complete, changed])


def test_figures_of_known_times(complete):
    m, c = complete["metrics"], complete["conditions"]
    assert m["decode_tps"]["samples"] == pytest.approx([1000, 500])
    assert m["decode_tps"]["sustained_median"] == pytest.approx(750) and m["decode_tps"][
        "sustained_min"
    ] == pytest.approx(500)
    assert m["decode_tps"]["window_tokens"] == 1000
    assert m["decode_tps"]["peak"] == pytest.approx(1000) and m["decode_tps"]["peak_window_tokens"] == 256
    assert m["ttft_ms"]["p50"] == pytest.approx(250) and m["ttft_ms"]["n"] == 2
    assert (
        m["itl_us"]["n"] == 2000
        and m["itl_us"]["mean"] == pytest.approx(1500)
        and m["itl_us"]["max"] == pytest.approx(2000)
    )
    assert m["itl_us"]["point"] == "engine_host" and m["group_us"] is None
    assert m["e2e_ms"]["max"] == pytest.approx(2250)
    assert m["e2e_tps"]["min"] == pytest.approx(1001 / 2.25)
    # Per layer q, out, k, v and three of the feed-forward; the head for the last of the 100 tokens; 50.5 keys on
    # average, twice.
    work = 100 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32 * 50.5) + 64 * 32
    assert m["arithmetic"]["multiply_adds_per_prompt"] == work
    assert m["prompt_tps"]["samples"] == pytest.approx([400, 400])
    assert m["arithmetic"]["effective"]["median"] == pytest.approx(work / 0.25 / 1e8)
    assert c["hardware"]["multiply_adds_per_s"] == 1e8
    size = m["mbu"]["bytes_per_token"]
    assert size == c["model"]["weight_bytes_per_token"] + 2 * 2 * 16 * 4 * (c["context_mean"] + 1)
    assert m["mbu"]["effective"]["samples"] == pytest.approx([size / 1e6, size / 2e6])
    assert m["mbu"]["effective"]["min"] == pytest.approx(size / 2e6)
    assert m["mbu"]["peak_spec"]["median"] == pytest.approx(
        750 * size / 4e9
    )  # eight devices on one processor share one memory
    assert m["mbu"]["read_pass"] is None and c["hardware"]["memory_bw_effective_Bps"] == 1e9
    assert complete["correctness"]["matches_reference"] and c["compile_s"] == {"cold": 2.0, "cached": 0.5}
    assert c["model"]["weights"] == "random" and any("random weights" in note for note in complete["notes"])


def test_groups_have_no_figure_per_token(measured):
    machine = Machine(measured.engine, 1)
    machine.unavailable = "no compiler here"
    grouped = Measured(measured.engine, measured.case, machine, 2.0, 0.5, load_after=(1.0, 1.0, 1.0))
    counts = np.array([1] + [100] * 10)
    grouped.runs.append(Run((7,) * 1001, np.arange(1.0, 12.0), counts, None))
    record = make_record(grouped, random_weights=False)
    m = record["metrics"]
    assert (
        m["itl_us"] is None
        and m["group_us"]["p99"] == pytest.approx(1e6)
        and m["group_us"]["per_token_p50"] == pytest.approx(1e4)
    )
    assert m["decode_tps"]["sustained_median"] == pytest.approx(100) and m["decode_tps"]["peak_window_tokens"] == 300
    assert record["conditions"]["tokens_per_dispatch"] == {"asked": None, "median": 100.0, "max": 100}
    assert m["mbu"]["effective"] is None and record["conditions"]["hardware"]["effective_source"] is None
    assert "no effective bandwidth and arithmetic peak: no compiler here" in record["notes"]


def test_kernel_times_are_used_for_grouped_tokens(measured):
    grouped = Measured(measured.engine, measured.case, measured.machine, 2.0, 0.5, load_after=(1.0, 1.0, 1.0))
    counts = np.array([1] + [100] * 10)
    grouped.runs.append(Run((7,) * 1001, np.arange(1.0, 12.0), counts, 5e-3 * np.arange(1001), Speeds(read_pass=1e-3)))
    m = make_record(grouped, random_weights=False)["metrics"]
    assert m["itl_us"]["p99"] == pytest.approx(5000) and m["group_us"]["p50"] == pytest.approx(1e6)
    assert m["decode_tps"]["sustained_median"] == pytest.approx(100)  # times at the host
    assert m["mbu"]["read_pass"]["samples"] == pytest.approx([0.1])


def test_raw_times_are_written_with_their_hash(complete, measured, tmp_path):
    file = tmp_path / "two.json"
    records = [copy.deepcopy(complete), copy.deepcopy(complete)]
    write(file, records, [measured, measured])
    again = read(file)
    assert again == records and len({record["raw"]["prefix"] for record in again}) == 2
    raw = tmp_path / again[1]["raw"]["path"]
    assert hashlib.sha256(raw.read_bytes()).hexdigest() == again[1]["raw"]["sha256"]
    arrays = np.load(raw)
    gaps = np.concatenate([arrays[f"{again[1]['raw']['prefix']}run{i}.gaps_us"] for i in range(2)])
    assert np.quantile(gaps, 0.95) == pytest.approx(again[1]["metrics"]["itl_us"]["p95"])
    assert arrays[f"{again[1]['raw']['prefix']}run1.bandwidth_Bps"] == 1e9


def test_invalid_files_are_refused(complete, tmp_path):
    file = tmp_path / "bad.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "contains no record"),
        ("[{}]", "schema is missing"),
        ("3", "the record must be an object"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read(file)
    incomplete = copy.deepcopy(complete)
    del incomplete["conditions"]["date_utc"]
    file.write_text(json.dumps([incomplete, complete]))
    with pytest.raises(InputError, match=r"bad.json, record 1: conditions.date_utc is missing"):
        read(file)


def test_tables_have_marks_and_conditions(measured):
    record = make_record(measured, random_weights=True)
    for text in (table.markdown([record, record]), table.terminal([record, record])):
        rows = [n for n, line in enumerate(text.splitlines()) if "known, xla" in line]
        assert len(rows) == 2
        for n in rows:
            below = text.splitlines()[n + 1]
            assert text.splitlines()[n].count("†") == 7  # every cell with a figure
            for part in (
                "random weights",
                "layout laneformer, 2 lanes",
                "float32 (stored as bfloat16)",
                "batch 1",
                "greedy",
                "engine host over 1,000 tokens",
                "3 warm-up and 2 measured runs",
                "as the engine chose (median 1)",
                "jax ",
                "commit ",
            ):
                assert part in below
        assert "† random weights" in text.splitlines()[-1]
    trained = make_record(measured, random_weights=False)
    assert "†" not in table.markdown([trained]) and "checkpoint:known" in table.markdown([trained])
    simulated = trained | {"status": "simulated"}
    assert table.terminal([simulated]).count("§") == 8 and "SIMULATED" in table.terminal([simulated])


def test_commit_is_that_of_the_source_tree():
    assert (machine.ROOT / "pyproject.toml").is_file()


def test_gpu_is_described_by_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, 700.00, 143771, 1980, 1980, 3201'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "on_host", lambda: False)
    found = machine.hardware()
    assert found["driver"] == "580.1" and found["power_cap_w"] == 700.0 and "SM 1980 of 1980 MHz" in found["clocks"]
    assert found["memory_bytes"] == 143771 * 2**20
    told = machine.accelerator()
    assert told == {name: found[name] for name in machine.TELLING} | {"device": told["device"]}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.hardware()["driver"] is None
