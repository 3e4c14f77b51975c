"""python -m infer bench from its options to its files, on a small model with random weights."""

import contextlib
import hashlib
import io
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.infer.__main__ import main
from tests.support.checkpoints import save_checkpoint

RECIPE = """
from pathlib import Path
from laneformer import ModelConfig
from laneformer.train.config import DataConfig, TrainConfig

def small():
    data = DataConfig(path=(Path("none"),), sequence_length=64, batch_size=1)
    return TrainConfig(name="small", steps=1000, data=data, model=ModelConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_lanes=4, max_position_embeddings=64, eos_token_id=tuple(range(48))))
"""
NATIVE = custom_calls.unavailable() is None
OUTPUT, RUNS = 9, 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    file = tmp_path_factory.mktemp("recipes") / "mine.py"
    file.write_text(RECIPE)
    return f"{file}:small"


@pytest.fixture(scope="module")
def done(recipe, tmp_path_factory):
    """The output and the folder of a run over both backends."""
    folder = tmp_path_factory.mktemp("bench")
    backends = (
        ("--compare", "cpu,xla", "--trace", str(folder / "trace.json"), "--threads", "2")
        if NATIVE
        else ("--backend", "xla")
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(
            [
                "bench",
                "--checkpoint",
                recipe,
                *backends,
                "--context",
                "5,12",
                "--output-tokens",
                str(OUTPUT),
                "--runs",
                str(RUNS),
                "--warmup-runs",
                "1",
                "--temperature",
                "1",
                "--seed",
                "3",
                "--json",
                str(folder / "sub" / "out.json"),
            ]
        )
    assert code == 0, err.getvalue()
    return out.getvalue(), err.getvalue(), folder


def test_each_context_and_backend_has_a_record(done):
    _, _, folder = done
    records = json.loads((folder / "sub/out.json").read_text())
    backends = ["cpu", "xla"] if NATIVE else ["xla"]
    assert [(r["conditions"]["prompt_tokens"], r["conditions"]["engine"]["backend"]) for r in records] == [
        (prompt, backend) for prompt in (5, 12) for backend in backends
    ]
    raw = folder / "sub/out.npz"
    arrays = np.load(raw)
    for record in records:
        c, m, prefix = record["conditions"], record["metrics"], record["raw"]["prefix"]
        assert (
            c["model"]["weights"] == "random"
            and c["model"]["name"] == "small"
            and c["precision"]["stored"] == "bfloat16"
        )
        assert c["output_tokens"] == OUTPUT and c["measured_runs"] == RUNS and c["warmup_runs"] == 1 and c["ignore_eos"]
        assert c["sampling"]["temperature"] == 1.0 and c["sampling"]["seed"] == 3
        assert record["raw"]["sha256"] == hashlib.sha256(raw.read_bytes()).hexdigest()
        runs = [(arrays[f"{prefix}run{i}.arrivals_s"], arrays[f"{prefix}run{i}.tokens"]) for i in range(RUNS)]
        for (arrivals, counts), rate in zip(runs, m["decode_tps"]["samples"], strict=True):
            assert counts[0] == 1 and counts.sum() == OUTPUT  # although every token ends a text
            assert rate == pytest.approx((OUTPUT - 1) / (arrivals[-1] - arrivals[0]))
        assert m["decode_tps"]["peak"] is None  # too few tokens for a window
        assert m["ttft_ms"]["max"] == pytest.approx(1e3 * max(arrivals[0] for arrivals, _ in runs))
        if NATIVE:
            work, peaks = m["arithmetic"], [arrays[f"{prefix}run{i}.multiply_adds_per_s"] for i in range(RUNS)]
            assert min(peaks) > 1e8 and c["hardware"]["multiply_adds_per_s"] == pytest.approx(np.median(peaks))
            assert work["effective"]["samples"] == pytest.approx(
                [
                    work["multiply_adds_per_prompt"] * rate / c["prompt_tokens"] / peak
                    for rate, peak in zip(m["prompt_tps"]["samples"], peaks, strict=True)
                ]
            )
            share = m["mbu"]["effective"]["samples"]
            assert share == pytest.approx(
                [
                    m["mbu"]["bytes_per_token"] * rate / arrays[f"{prefix}run{i}.bandwidth_Bps"]
                    for i, rate in enumerate(m["decode_tps"]["samples"])
                ]
            )


def test_runs_take_turns_and_table_has_conditions(done):
    out, err, _ = done
    steps = [
        re.sub(r", [\d,.]+ tokens/s$", "", line)
        for line in err.splitlines()
        if line.startswith("prompt 5") and "tokens/s" in line
    ]
    backends = ["cpu", "xla"] if NATIVE else ["xla"]
    assert steps == [
        f"prompt 5, {b}: {step}" for step in ("warm-up 1 of 1", "run 1 of 2", "run 2 of 2") for b in backends
    ]
    lines = out.splitlines()
    for backend in backends:
        row = next(n for n, line in enumerate(lines) if line.startswith(f"small, {backend}"))
        assert (
            "†" in lines[row]
            and "‡" in lines[row]
            and "random weights" in lines[row + 1]
            and "temperature 1.0" in lines[row + 1]
        )
    assert "fewer than 1,000 output tokens" in out


@pytest.mark.skipif(not NATIVE, reason="needs the native library, or a compiler")
def test_backend_cpu_reports_kernel_times(done):
    out, _, folder = done
    cpu, xla = json.loads((folder / "sub/out.json").read_text())[:2]
    assert cpu["metrics"]["itl_us"]["point"] == "kernel" and cpu["metrics"]["itl_us"]["n"] == RUNS * (OUTPUT - 1)
    assert len(cpu["metrics"]["mbu"]["read_pass"]["samples"]) == RUNS and xla["metrics"]["mbu"]["read_pass"] is None
    assert cpu["conditions"]["engine"]["threads"] == 2
    assert cpu["correctness"]["matches_reference"] is not None and xla["correctness"]["method"] == "not compared"
    ratio = cpu["metrics"]["decode_tps"]["sustained_median"] / xla["metrics"]["decode_tps"]["sustained_median"]
    assert f"cpu / xla = {ratio:.3f}" in out and "took turns in one process" in cpu["notes"][-1]


@pytest.mark.skipif(not NATIVE, reason="needs the native library, or a compiler")
def test_trace_has_every_op(done):
    _, err, folder = done
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert f"{len(spans):,} spans of a prompt of 5 and {OUTPUT} tokens" in err
    for worker in (0, 1):
        mine = sorted((e for e in spans if e["tid"] == worker), key=lambda e: e["ts"])
        counted = Counter(e["name"] for e in mine)
        steps = OUTPUT  # the block of the prompt, and all tokens except the last
        assert counted["sample"] == counted["head"] == OUTPUT and counted["embed"] == steps
        for name in ("qkv", "attend", "out", "gate_up", "down"):
            assert counted[name] == 2 * steps
            assert {e["args"]["layer"] for e in mine if e["name"] == name} == {0, 1}
        assert all(e["dur"] >= 0 for e in mine)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in itertools.pairwise(mine))


def test_table_prints_the_records(done, capsys, tmp_path):
    file = done[2] / "sub/out.json"
    assert main(["bench", "--table", str(file), str(file)]) == 0
    table = capsys.readouterr().out
    count = len(json.loads(file.read_text()))
    assert table.startswith("| model, backend |")
    assert table.count("| small, ") == table.count("<sub>random weights") == 2 * count
    records = json.loads(file.read_text())
    del records[1]["conditions"]["other_load"]
    incomplete = tmp_path / "incomplete.json"
    incomplete.write_text(json.dumps(records))
    assert main(["bench", "--table", str(file), str(incomplete)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "incomplete.json, record 2: conditions.other_load is missing" in err


@pytest.mark.skipif(not NATIVE, reason=str(custom_calls.unavailable()))
def test_weight_formats_take_turns(recipe, capsys, tmp_path):
    """Each format has a record, and the ratio names both formats."""
    file = tmp_path / "formats.json"
    options = ["--backend", "cpu", "--weights", "bfloat16,int8", "--context", "5", "--output-tokens", "4"]
    options += ["--runs", "1", "--warmup-runs", "0", "--json", str(file)]
    assert main(["bench", "--checkpoint", recipe, *options]) == 0
    records = json.loads(file.read_text())
    precisions = [record["conditions"]["precision"] for record in records]
    assert [one["weights"] for one in precisions] == ["bfloat16", "int8 row, bfloat16"]
    assert [record["conditions"]["quantized"] for record in records] == [False, True]
    assert any("cpu bfloat16 / cpu int8 row, bfloat16 = " in note for note in records[1]["notes"])
    capsys.readouterr()


@pytest.mark.skipif(not NATIVE, reason=str(custom_calls.unavailable()))
def test_text_is_measured_with_drafts(capsys, tmp_path):
    """Answers are forced to the text, so random weights copy a file as well as a trained model."""
    checkpoint = save_checkpoint(tmp_path / "small", bos_token_id=0, layers=1, lanes=1)
    code = "def double(x):\n    return 2 * x\n"
    (tmp_path / "old.py").write_text(code + "print(double(4))\n")
    (tmp_path / "new.py").write_text(code + "print(double(5))\n")
    text = ["--text", str(tmp_path / "new.py"), "--prompt-file", str(tmp_path / "old.py")]
    for most in (0, 3):
        file = tmp_path / "out.json"
        options = [
            "--backend",
            "cpu",
            "--runs",
            "1",
            "--warmup-runs",
            "0",
            "--json",
            str(file),
            "--draft-max",
            str(most),
        ]
        assert main(["bench", "--checkpoint", str(checkpoint), *text, *options]) == 0
        (record,) = json.loads(file.read_text())
        c = record["conditions"]
        assert c["speculative"] is (most > 0) and c["engine"]["speculation"] == most
        assert (c["prompt_tokens"], c["output_tokens"]) == (len(code) + 17, len(code) + 17)
        assert c["prompts"] == f"{text[3]}, answers forced to {text[1]}"
        note = f"speculative decoding, up to {most} drafts a pass: "
        assert any(note in line for line in record["notes"]) == (most > 0)
        assert (record["metrics"]["mbu"]["read_pass"] is None) == (most > 0)
    capsys.readouterr()
    assert main(["bench", "--checkpoint", str(checkpoint), *text, "--backend", "xla"]) == 2
    assert "backend xla cannot force an answer: use backend cpu" in capsys.readouterr().err


def test_one_token_per_dispatch_times_each_token(recipe, capsys, tmp_path):
    args = ["--backend", "xla", "--context", "5", "--tokens-per-dispatch", "1", "--runs", "1", "--warmup-runs", "0"]
    more = ["--compute", "bfloat16", "--bandwidth-spec", "100", "--json", str(tmp_path / "a.json")]
    assert main(["bench", "--checkpoint", recipe, *args, *more]) == 0
    (record,) = json.loads((tmp_path / "a.json").read_text())
    m, c = record["metrics"], record["conditions"]
    assert m["itl_us"]["point"] == "engine_host" and m["itl_us"]["n"] == 58 and m["group_us"] is None
    assert c["output_tokens"] == 59  # the room in the context of 64
    assert c["precision"]["activations"] == c["precision"]["kv_cache"] == "bfloat16"
    assert m["mbu"]["peak_spec"]["samples"] == pytest.approx(
        [m["mbu"]["bytes_per_token"] * m["decode_tps"]["samples"][0] / 1e11]
    )
    assert "of the specified 100 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, message",
    [
        (("--context", "60", "--output-tokens", "10"), "a prompt of 60 and 10 output tokens exceed"),
        (("--context", "64"), "context of 64"),
        (("--context", "8,x"), "got 8,x"),
        (("--output-tokens", "1", "--context", "4"), "output_tokens must be at least 2, got 1"),
        (("--runs", "0", "--context", "4"), "runs must be at least 1, got 0"),
        (("--tokens-per-dispatch", "0", "--context", "4"), "tokens_per_dispatch must be at least 1, got 0"),
        (("--backend", "cuda", "--context", "4"), "backend cuda is not available"),
        (("--backend", "magic", "--context", "4"), "backend = 'magic'"),
        (("--backend", "xla", "--compare", "cpu,xla"), "--compare"),
        (("--compare", "xla,xla"), "name each backend once"),
        (("--backend", "xla", "--threads", "2", "--context", "4"), "threads = 2: backend xla has no such option"),
        (("--backend", "xla", "--trace", "t.json"), "backend xla records no spans"),
        (("--json", "out.txt"), ".json, got out.txt"),
        (("--bandwidth-spec", "0"), "got 0.0"),
        (("--layouts", "tp", "tp"), "name each layout once"),
        (("--layouts", "magic"), "magic"),
        (("--lanes", "2"), "has 4 lanes, which are fixed"),
        (("--devices", "0"), "--devices must be at least 1, got 0"),
        (("--table", "a.json"), "give either --checkpoint"),
        (("--draft-max", "3"), "--draft-max needs --text and --prompt-file"),
        (("--draft-max", "16", "--text", "a", "--prompt-file", "b", "--tokenizer", "c"), "must be 0 to 15, got 16"),
        (("--no-speculation", "--draft-max", "3"), "--draft-max needs --text"),
        (("--text", "a.py"), "give --text and --prompt-file together"),
        (("--text", "a.py", "--prompt-file", "b.py"), "--text needs --tokenizer with a recipe"),
        (("--text", "no.py", "--prompt-file", "no.py", "--tokenizer", "no.json"), "no.json"),
    ],
)
def test_errors_are_one_line(recipe, capsys, args, message):
    assert main(["bench", "--checkpoint", recipe, *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "give either --checkpoint"),
        (("--checkpoint", "unheard_of"), "--checkpoint unheard_of"),
        (("--checkpoint", "no/such/run"), "no/such/run is not a folder"),
        (("--checkpoint", "no/file.py:mine"), "recipe file no/file.py does not exist"),
        (("--table", "no/such.json"), "No such file"),
    ],
)
def test_missing_inputs_are_named(capsys, args, message):
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_layouts_are_compared(recipe, capsys, tmp_path):
    layouts = ("tp", "dtp(1)", "none")
    assert (
        main(
            [
                "bench",
                "--checkpoint",
                recipe,
                "--backend",
                "cpu" if NATIVE else "xla",
                "--layouts",
                *layouts,
                "--context",
                "5",
                "--output-tokens",
                "9",
                "--runs",
                "2",
                "--warmup-runs",
                "0",
                "--json",
                str(tmp_path / "out.json"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    records = json.loads((tmp_path / "out.json").read_text())
    assert [r["conditions"]["model"]["layout"] for r in records] == list(layouts)
    counted = [r["conditions"]["parallelism"] for r in records]
    assert [(c["exchanges"], c["exposed"]) for c in counted] == [(4, 4), (3, 0), (0, 0)]
    rows = [
        line.split(" | ") for line in out.splitlines() if line.startswith(tuple(f"| {layout}," for layout in layouts))
    ]
    microseconds = [1e6 / r["metrics"]["decode_tps"]["sustained_median"] for r in records]
    for row, time, record in zip(rows, microseconds, records, strict=True):
        assert float(row[3].replace(",", "")) == pytest.approx(time, abs=0.06)
        assert float(row[4].replace(",", "")) == pytest.approx(time - microseconds[2], abs=0.06)
        assert row[5] == str(record["conditions"]["parallelism"]["exchanges"])


def test_help_shows_the_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "bench" in shown
    for option in (
        "--checkpoint DIR",
        "--backend STR",
        "--compare STR",
        "--layouts LAYOUT",
        "--context STR",
        "--output-tokens INT",
        "--runs INT",
        "--warmup-runs INT",
        "--temperature FLOAT",
        "--tokens-per-dispatch INT",
        "--dtype",
        "--compute",
        "--threads INT",
        "--devices INT",
        "--bandwidth-spec GB/S",
        "--json FILE",
        "--trace FILE",
        "--table FILE",
    ):
        assert option in shown
