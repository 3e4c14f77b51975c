"""scripts.plot_trace: times per op of known spans and of a trace of the CPU kernel, and errors for other files."""

import gzip
import json

import numpy as np
import pytest

import laneformer
from laneformer import custom_calls, infer
from laneformer.commands import plot_trace
from laneformer.commands.plot_trace import BETWEEN, Trace, draw, main, table
from laneformer.custom_calls.trace import spans_needed, write_perfetto
from laneformer.errors import InputError

NAMES = [
    {"name": "thread_name", "ph": "M", "pid": 1, "tid": worker, "args": {"name": f"CTA {worker}"}} for worker in (0, 1)
]


def event(worker, op, begin, us, layer=None):
    return {"name": op, "ph": "X", "tid": worker, "ts": begin, "dur": us} | (
        {} if layer is None else {"args": {"layer": layer}}
    )


def token(worker, at, us):
    """Spans of a token from time `at`: 10 us embed, two layers of `us` each, a gap of 5 us, and 20 us head."""
    return [
        event(worker, "embed", at, 10),
        event(worker, "qkv", at + 10, us, 0),
        event(worker, "qkv", at + 10 + us, us, 1),
        event(worker, "head", at + 15 + 2 * us, 20),
    ]


def write(path, events):
    text = json.dumps({"traceEvents": NAMES + events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def known(tmp_path):
    """A trace of two passes of a prompt, only the second with a head, and three tokens.

    The second token takes longer on worker 1.
    """
    events = []
    for worker in (0, 1):
        events += [event(worker, "embed", 0, 500), event(worker, "qkv", 500, 400, 0)]
        events += token(worker, 1000, 300)
        for n, us in enumerate((40, 60 if worker else 40, 40)):
            events += token(worker, 2000 + 1000 * n, us)
    return write(tmp_path / "known.json.gz", events)


def test_times_match_known_spans(known):
    trace = Trace.read(known)
    assert (trace.kind, trace.ops, len(trace.passes)) == ("CTA", ["embed", "qkv", "head"], 3)
    assert trace.lengths.tolist() == [115, 155, 115]
    times = trace.times()
    assert times["qkv"].tolist() == [[80, 80], [80, 120], [80, 80]]
    np.testing.assert_allclose(times[BETWEEN], np.full((3, 2), 5))
    rows = table(trace).splitlines()
    assert "| qkv | 80.0 | 80.0 | 69.6% |" in rows and rows[-1] == "| a token, 3 of them, 2 CTAs | 115.0 | | |"


def test_picture_has_every_worker(known, capsys):
    figure = draw(Trace.read(known), 1)
    widths = [patch.get_width() for patch in figure.axes[1].patches]
    assert widths == [40, 40] and figure.axes[1].get_xlabel() == "us, layer 1 of the median token"
    assert main([str(known)]) == 0
    assert (
        capsys.readouterr().out.endswith(f"{known.with_name('known.png')}\n")
        and known.with_name("known.png").stat().st_size > 5000
    )


def test_table_needs_no_matplotlib(known, monkeypatch, capsys):
    monkeypatch.setattr(plot_trace, "pyplot", lambda: pytest.fail("not needed"))
    assert main([str(known), "--no-picture"]) == 0 and capsys.readouterr().out.startswith("| op |")


@pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
def test_cpu_kernel_trace_is_read(tmp_path):
    config = laneformer.ModelConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_lanes=2,
        max_position_embeddings=64,
    )
    model = laneformer.Laneformer.init(config, 1)
    engine = infer.Engine(model, "cpu", threads=2)
    engine.session.trace(spans_needed(2, 20, 6))
    list(engine.generate(np.arange(20), max_new_tokens=6, stop_tokens=()))
    write_perfetto(tmp_path / "own.json", engine.session)
    trace = Trace.read(tmp_path / "own.json")
    assert (
        len(trace.passes) == 5
        and set(trace.ops) <= set(engine.session.ops)
        and {"gate_up", "head", "sample"} <= set(trace.ops)
    )
    assert all((us >= -1e-6).all() and us.shape == (5, 2) for us in trace.times().values())


@pytest.mark.parametrize(
    "content, message",
    [
        (b"not json", "infer bench --trace"),
        (b'{"traceEvents": []}', "infer bench --trace"),
        (
            json.dumps({"traceEvents": [*NAMES, *token(0, 0, 1), *token(1, 0, 1)]}).encode(),
            "has no token after the first",
        ),
    ],
)
def test_bad_traces_are_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    assert main([str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}") and message in err and err.count("\n") == 1


def test_bad_layer_raises(known, tmp_path, capsys):
    with pytest.raises(InputError, match="--layer must be between 0 and 1, got 7"):
        draw(Trace.read(known), 7)
    (tmp_path / "cut.json.gz").write_bytes(known.read_bytes()[:60])
    assert main([str(tmp_path / "cut.json.gz")]) == 2 and "infer bench --trace" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2 and "No such file" in capsys.readouterr().err
