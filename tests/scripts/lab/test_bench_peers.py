"""scripts.bench_peers with fake engines, which speak only the protocol, in processes; our engine with small models."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from laneformer.commands.lab import bench_peers
from laneformer.commands.lab.peers import environments, gguf_file, gguf_model
from laneformer.commands.lab.peers.environments import Engine
from laneformer.commands.lab.peers.load import quiet
from laneformer.commands.lab.peers.ours import Ours, full_attention, shape_model
from laneformer.commands.lab.peers.process import EngineError, Process
from laneformer.commands.lab.peers.protocol import XLA, Shape, Task
from laneformer.errors import ConfigError
from laneformer.infer.engine.backend import Request
from laneformer.infer.engine.cpu import CpuBackend
from laneformer.infer.sampling import Sampling
from laneformer.recipes.models import PackedModel
from laneformer.recipes.stdlib import stdlib
from tests.support.paths import MOE

SHAPE = Shape(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ff=96,
    vocab=50,
    tied=False,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
RECIPE = """
import dataclasses
from laneformer.recipes.tiny import tiny
def small():
    config = tiny()
    model = config.model.replace(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    return dataclasses.replace(config, model=model, then={})
def mixture():
    from laneformer.recipes.models import EXPERTS, GPT_OSS_20B, packed
    model = GPT_OSS_20B.replace(
        vocab_size=50, hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2, swa_layers=(0,), num_experts=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, sliding_window=4,
        eos_token_id=(), max_position_embeddings=64,
    )
    return packed(model, mxfp4=EXPERTS)
def narrow():
    from laneformer.recipes.models import packed
    return packed(mixture().config, fp8=("attention.wq",))
"""
MIXTURE = dataclasses.replace(
    SHAPE, norm_eps=1e-5, rope_theta=150_000.0, experts=8, experts_used=2, window=4, architecture="gpt-oss"
)
# An engine that returns invented times: `option` seconds per token.
FAKE = """
import os, time
from laneformer.commands.lab.peers.protocol import serve

class Fake:
    def __init__(self, task):
        print("noise on standard output")
        self.conditions = {"versions": {"fake": "1"}, "weights": "bfloat16", "compute": "bfloat16", "kv": "float16",
                           "threads": task.threads, "load": task.shape.name, "system": "none"}
        if task.weights == "int4":
            self.conditions |= {"quantized_formats": ["int4 of " + task.option], "quantized_weights": 1000,
                                "quantized_bytes": 562, "activations": "so many bits"}
        self.option, self.requests = task.option, 0
        if task.option == "refuses":
            raise SystemExit("no room for it")

    def decode(self, prompt, tokens):
        self.requests += 1
        if self.option == "dies":
            if self.requests == 1:
                return [1.0 * n for n in range(tokens)]
            print("out of breath", flush=True)
            os._exit(7)
        if self.option == "hangs":
            time.sleep(60)
        return [float(self.option) * n for n in range(tokens)]

    def first(self, prompt):
        return float(self.option) * prompt

serve(Fake)
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """The folder with fake engines: ours with 100 tokens per second, and the peers slow (25), dies, refuses, absent."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    (tmp_path / "recipes.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench_peers, "OURS", fake("laneformer", "0.01"))
    peers = [
        fake("slow", "0.04"),
        fake("dies", "dies"),
        fake("refuses", "refuses"),
        Engine("absent", "fake_peer", "torch"),
    ]
    for engine in peers:
        monkeypatch.setitem(environments.PEERS, engine.name, engine)
    monkeypatch.setattr(bench_peers, "READ_BYTES", 1 << 22)
    return tmp_path


def fake(name, option):
    return Engine(name, "fake_peer", option=option, quantized=("int4",))


def command(fakes, peers, *more):
    return bench_peers.main(
        [
            str(fakes / "home"),
            "--peers",
            peers,
            "--shape",
            f"{fakes / 'recipes.py'}:small",
            "--context",
            "8",
            "--tokens",
            "5",
            "--rounds",
            "3",
            "--prompts",
            "16,4,999999",
            "--prompt-rounds",
            "2",
            "--threads",
            "2",
            "--json",
            str(fakes / "peers.json"),
            *more,
        ]
    )


def task(folder, shape=SHAPE, **changes):
    return Task(
        **{"checkpoint": "none", "shape": shape, "positions": 16, "threads": 2, "folder": str(folder)} | changes
    )


def state(pid):
    return (
        Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] if Path(f"/proc/{pid}").exists() else "gone"
    )


def wait_for(pid, states):
    until = time.monotonic() + 20
    while state(pid) not in states and time.monotonic() < until:
        time.sleep(0.01)
    return state(pid)


def test_table_has_the_ratio_of_rates(fakes, capsys):
    assert command(fakes, "slow,absent") == 0
    out, err = capsys.readouterr()
    assert "| slow |" in out and "| 4.000 (4.000 to 4.000) | 100.00 | 25.00 |" in out
    assert (
        "- absent: not measured, not installed; run python -m scripts.bench_peers --setup" in out
        and "absent: skipped" in err
    )
    assert "fake 1; weights bfloat16, products bfloat16, cache float16; 2 threads" in out
    record = json.loads((fakes / "peers.json").read_text())
    (pair,) = record["pairs"]
    assert [r["ratio"] for r in pair["rounds"]] == pytest.approx([4.0] * 3) and list(record["not_measured"]) == [
        "absent"
    ]
    assert (record["sizes"]["hidden"], record["sizes"]["layers"], record["prompt_tokens"]) == (32, 2, 8)
    one = pair["rounds"][0]["peer"]
    # 2 layers with q, o (32 x 32 each), k, v, gate, up and down; 5 norms; the head and a row of the embedding. A token
    # reads 10 positions of the cache and writes 1.
    weights = 2 * (7 * 32 * 32) + 5 * 32 + 64 * 32 + 32
    assert one["share"] == pytest.approx(25 * 2 * (weights + 2 * 32 * 2 * 11) / one["bandwidth"])
    assert one["gaps"] == pytest.approx([0.04] * 4) and one["bandwidth_1_thread"] > 0
    # Only prompts that fit the context are measured. A prompt of 4 tokens computes the head once and reads 2.5 keys per
    # token on average.
    assert "| slow | 4 | 2 | 4.000 (4.000 to 4.000) | 100.00 | 25.00 |" in out and "| slow | 16 | 2 |" in out
    assert record["prompt_lengths"] == [first["prompt_tokens"] for first in pair["prompts"]] == [4, 16]
    two = pair["prompts"][0]["rounds"][1]["peer"]
    work = 4 * 2 * (7 * 32 * 32 + 2 * 32 * 2.5) + 64 * 32
    assert two["seconds"] == pytest.approx(0.16) and two["multiply_adds_per_s"] > 1e8
    assert two["share"] == pytest.approx(work / 0.16 / two["multiply_adds_per_s"])


def test_engines_without_quantized_weights_are_skipped(fakes, capsys):
    options = ["--weights", "int4", "--rounds", "1", "--prompt-rounds", "0"]
    assert command(fakes, "slow,bf12", *options) == 0
    out, err = capsys.readouterr()
    assert "| slow | int4 of 0.01 / int4 of 0.04 | so many bits / so many bits | " in out
    assert "weights bfloat16 (1,000 as int4 of 0.04, 562 bytes), products bfloat16, activations so many bits" in out
    assert "- bf12: not measured, int4 weights" in out and "bf12: skipped, int4 weights" in err
    (pair,) = json.loads((fakes / "peers.json").read_text())["pairs"]
    weights = 2 * (7 * 32 * 32) + 5 * 32 + 64 * 32 + 32
    kv = 2 * 2 * 32 * 2 * 11
    assert pair["bytes_per_token"] == {who: 2 * weights - 2000 + 562 + kv for who in ("ours", "peer")}


def test_dead_engine_is_reported_and_others_are_measured(fakes, capsys):
    assert command(fakes, "dies,refuses,slow") == 2
    out, err = capsys.readouterr()
    assert "| slow |" in out and "- dies: not measured" in out
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "dies ended while decoding 5 tokens: status 7; out of breath (" in line
    assert "refuses ended while loading: status 1; no room" in line
    assert "Traceback" not in err


def test_death_of_our_engine_ends_everything(fakes, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "OURS", fake("laneformer", "dies"))
    assert command(fakes, "slow") == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: laneformer ended while decoding 5 tokens: status 7; out of breath")
    )


def test_engine_is_stopped_between_requests(fakes):
    with Process(fake("one", "0.5"), sys.executable, task(fakes), 60) as process:
        pid = process._process.pid
        assert wait_for(pid, "T") == "T"
        for _ in range(2):
            assert process.decode(1, 3)["gaps"] == [0.5, 0.5]
            assert wait_for(pid, "T") == "T"
    assert process._process.returncode == 0, "the engine ends at the end of its input"


def test_engine_ends_with_its_driver(fakes):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from laneformer.commands.lab.peers.environments import Engine\n"
        "from laneformer.commands.lab.peers.process import Process\n"
        "from laneformer.commands.lab.peers.protocol import Task\n"
        "process = Process(Engine('one', 'fake_peer', option='1'), sys.executable, Task.read(sys.argv[1]), 60)\n"
        "print(process._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, task(fakes).text()], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert wait_for(int(done.stdout), ("gone", "Z")) in ("gone", "Z")


def test_engine_that_does_not_answer_is_killed(fakes):
    with Process(fake("one", "hangs"), sys.executable, task(fakes), 60) as process:
        process.seconds = 0.2
        with pytest.raises(EngineError, match=r"one did not answer in 0 s while decoding 3 tokens"):
            process.decode(1, 3)
    assert process._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "vllm"], "vllm; choose from llama.cpp, torch"),
        (["--peers", "absent"], "none of absent can be measured: not installed; run python -m scripts.bench_peers"),
        (["--weights", "int8"], "none of slow can be measured: int8 weights are not supported; choose int4"),
        (["--peers", "torch,xla", "--weights", "int8"], "none of torch,xla can be measured: int8 weights"),
        (["--peers", "llama.cpp", "--weights", "fp8"], "fp8 weights are not supported; choose int8, int4, mxfp4"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--prompts", "8,x"], "--prompts must be lengths"),
        (["--rounds", "0", "--prompt-rounds", "0"], "leave nothing to measure"),
        (["--context", "5000"], "--context 5000"),
        (["--shape", "nosuch"], "nosuch"),
        (["--shape", "{recipes}:mixture"], "none of slow can be measured: models like"),
        (["--shape", "{recipes}:mixture", "--weights", "int4"], "leave --weights out"),
        (["--shape", "{recipes}:narrow"], "has matrices in fp8, which llama.cpp lacks: choose a shape in bfloat16"),
        (["--shape", "moe_tiny"], "--shape moe_tiny is a mixture of experts that is not compared: choose gpt_oss_20b"),
        (["--shape", "v4_tiny"], "--shape v4_tiny has compressed attention or residual streams"),
        (["--shape", "delta_tiny"], "--shape delta_tiny differs from qwen3next in llama.cpp, which has experts in"),
    ],
)
def test_bad_options_are_one_line(fakes, arguments, words, capsys):
    assert command(fakes, "slow", *(word.format(recipes=fakes / "recipes.py") for word in arguments)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert words in line


def test_head_per_lane_raises():
    model = PackedModel(stdlib().model)
    options = bench_peers.Options(folder=Path("peers"), shape="stdlib")
    with pytest.raises(ConfigError, match=r"--shape stdlib .*lm_head_type lane"):
        bench_peers.shape_of(model, model.config.replace(lm_head_type="lane"), options)
    assert bench_peers.shape_of(model, model.config, options).heads == 8


def test_links_are_separate_if_threads_read_faster_together():
    def read(both, one):
        return {"bandwidth": both, "bandwidth_1_thread": one}

    assert bench_peers.links(read(82, 41), read(81, 41), 2) == "separate"
    assert bench_peers.links(read(48, 41), read(50, 42), 2) == "shared"
    assert bench_peers.links(read(82, 41), read(50, 42), 2) == "mixed"


def test_noisy_rounds_are_reported():
    def one(*foreign):
        return dict(zip(("ours", "peer"), ({"foreign_cores": cores} for cores in foreign), strict=True))

    assert quiet(one(0.05, -0.01)) and not quiet(one(0.0, 0.4))


@pytest.fixture
def small(tmp_path):
    """A task with the small recipe on all cores: with fewer, backend xla would limit this process to those for good."""
    (tmp_path / "recipes.py").write_text(RECIPE)
    return task(tmp_path, checkpoint=f"{tmp_path / 'recipes.py'}:small", threads=len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    "option, compute, weights",
    [
        ("", "float32", "bfloat16"),
        ("", "bfloat16", "int4"),
        pytest.param(XLA, "float32", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_our_engine_decodes_with_all_layers_full(small, option, compute, weights):
    ours = Ours(dataclasses.replace(small, option=option, compute=compute, weights=weights))
    assert (
        ours.conditions["weights"] == ("float32" if option else "bfloat16")
        and (ours.conditions["compute"], ours.conditions["kv"]) == (compute, compute)
        and ours.conditions["threads"] == small.threads
        and ours.conditions["activations"] == ("16 bits (2 digits)" if weights == "int4" else compute)
        and ours.conditions.get("quantized_formats") == (["int4 row"] if weights == "int4" else None)
    )
    assert set(ours._backend.source.config.layer_windows) == {None}
    times = ours.decode(8, 5)
    assert len(times) == 5 and times == sorted(times) and times[0] < times[-1]
    assert ours.first(8) > 0


def test_our_engine_keeps_the_published_format_of_experts(tmp_path):
    """The engine also keeps the windows. A token reads two of eight experts, with 4.25 bits per weight."""
    (tmp_path / "recipes.py").write_text(RECIPE)
    name = f"{tmp_path / 'recipes.py'}:mixture"
    options = bench_peers.Options(folder=tmp_path, shape=name, prompt_rounds=0)
    assert bench_peers.shape_of(shape_model(name), full_attention(shape_model(name).config), options) == MIXTURE
    ours = Ours(task(tmp_path, MIXTURE, checkpoint=name))
    assert ours._backend.source.config.layer_windows == (4, None)
    assert ours.conditions["activations"] == "float32; 23 bits (3 digits) for mxfp4"
    config = shape_model(name).config
    theirs = gguf_model.facts(config, gguf_model.tensors(config, formats=shape_model(name).formats))
    assert (theirs["quantized_formats"], theirs["quantized_weights"]) == (
        ["MXFP4"],
        ours.conditions["quantized_weights"],
    )
    assert theirs["quantized_bytes"] == 2 * 2 * 3 * 64 * 96 * 4.25 / 8
    assert len(ours.decode(8, 5)) == 5


@pytest.mark.parametrize("name", ["qwen3_next_1", "deepseek_v3_1"])
def test_both_engines_quantize_the_same_matrices(tmp_path, name):
    """Models with DeltaNets and gated attention, and with latent attention. Sizes are the folder's; weights random."""
    config = shape_model(str(MOE / name)).config
    ours = Ours(task(tmp_path, checkpoint=str(MOE / name), weights="int4"))
    theirs = gguf_model.facts(config, gguf_model.tensors(config, gguf_file.QUANTIZED["int4"]))
    assert ours.conditions["quantized_weights"] == theirs["quantized_weights"]
    assert len(ours.decode(8, 5)) == 5


def test_prompt_is_computed_once(small):
    ours = Ours(small)._backend
    request = Request(np.arange(40, dtype=np.int32), 6, Sampling(), ())

    def drawn(backend):
        chunks = list(backend.start(request))
        return chunks[0].cached, [pair for c in chunks for pair in zip(c.tokens, c.logprobs, strict=True)]

    (cached, wanted), first, again = drawn(CpuBackend(ours.source, threads=small.threads)), drawn(ours), drawn(ours)
    assert (cached, *first) == (0, 0, wanted) and again == (39, wanted)


def test_environments_are_reinstalled_when_versions_change(tmp_path, monkeypatch, capsys):
    def create(place, **options):
        (place / "bin").mkdir(parents=True, exist_ok=True)
        python = place / "bin" / "python"
        python.write_text('#!/bin/sh\necho "$@" "$CMAKE_ARGS"\ncase "$*" in *broken*) exit 1;; esac\n')
        python.chmod(0o755)

    monkeypatch.setattr(environments.venv, "create", create)
    command = [str(tmp_path), "--setup", "--peers", "torch,llama.cpp,torch-cpp,xla"]
    assert bench_peers.main(command) == 0
    assert capsys.readouterr().out.splitlines() == ["torch: installed", "llama.cpp: installed"]
    assert "-m pip install --no-binary llama-cpp-python llama-cpp-python==" in (
        reported := (tmp_path / "llama.cpp.log").read_text()
    )
    assert "-DGGML_NATIVE=ON" in reported
    monkeypatch.setitem(environments.ENVIRONMENTS, "llama.cpp", (("broken",), ("never",)))
    assert environments.installed(tmp_path, "llama.cpp") is None
    assert bench_peers.main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert line == f"error: llama.cpp: pip failed, see {tmp_path}/llama.cpp.log; torch: already installed"
    assert "never" not in (tmp_path / "llama.cpp.log").read_text()
