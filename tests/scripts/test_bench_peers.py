"""scripts.bench_peers with engines that only speak the protocol, as real processes; the GGUF file as an independent
reader sees it.
"""

import dataclasses
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from configs.models import PackedModel
from configs.stdlib import stdlib
from infer.engine.backend import Request
from infer.engine.cpu import CpuBackend
from infer.sampling import Sampling
from laneformer.errors import ConfigError
from laneformer.quantized.rounding import relative_error, round_to
from scripts import bench_peers
from scripts.peers import environments, gguf_file
from scripts.peers.environments import Engine
from scripts.peers.load import quiet
from scripts.peers.ours import Ours, full_attention, shape_model
from scripts.peers.process import EngineError, Process
from scripts.peers.protocol import XLA, Shape, Task

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
from configs.tiny import tiny
def small():
    config = tiny()
    model = config.model.replace(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    return dataclasses.replace(config, model=model, then={})
def mixture():
    from configs.models import EXPERTS, GPT_OSS_20B, packed
    model = GPT_OSS_20B.replace(
        vocab_size=50, hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2, swa_layers=(0,), num_experts=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, sliding_window=4,
        eos_token_id=(), max_position_embeddings=64,
    )
    return packed(model, mxfp4=EXPERTS)
def unpacked():
    return mixture().config
"""
MIXTURE = dataclasses.replace(SHAPE, norm_eps=1e-5, rope_theta=150_000.0, experts=8, experts_used=2, window=4)
# Draws a token every `option` seconds, by its own clock.
FAKE = """
import os, time
from scripts.peers.protocol import serve

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
    """Engines of ours at 100 tokens per second and of others: slow at 25, dies, refuses, absent."""
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


def test_engines_take_turns_and_the_ratio_is_of_their_rates(fakes, capsys):
    assert command(fakes, "slow,absent") == 0
    out, err = capsys.readouterr()
    assert "| slow |" in out and "| 4.000 (4.000 to 4.000) | 100.00 | 25.00 |" in out
    assert (
        "- absent: not measured, not installed: python -m scripts.bench_peers --setup" in out
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
    # 2 layers of q, o (32 x 32 each), k, v, gate, up and down, 5 norms, the head and a row of the embedding; 10
    # positions read, 1 written.
    weights = 2 * (7 * 32 * 32) + 5 * 32 + 64 * 32 + 32
    assert one["share"] == pytest.approx(25 * 2 * (weights + 2 * 32 * 2 * 11) / one["bandwidth"])
    assert one["gaps"] == pytest.approx([0.04] * 4) and one["bandwidth_1_thread"] > 0
    # First tokens of the prompts that the context has room for; the head once, and 2.5 keys for a token on average.
    assert "| slow | 4 | 2 | 4.000 (4.000 to 4.000) | 100.00 | 25.00 |" in out and "| slow | 16 | 2 |" in out
    assert record["prompt_lengths"] == [first["prompt_tokens"] for first in pair["prompts"]] == [4, 16]
    two = pair["prompts"][0]["rounds"][1]["peer"]
    work = 4 * 2 * (7 * 32 * 32 + 2 * 32 * 2.5) + 64 * 32
    assert two["seconds"] == pytest.approx(0.16) and two["multiply_adds_per_s"] > 1e8
    assert two["share"] == pytest.approx(work / 0.16 / two["multiply_adds_per_s"])


def test_quantized_weights_are_of_the_engines_that_have_them(fakes, capsys):
    options = ["--weights", "int4", "--rounds", "1", "--prompt-rounds", "0"]
    assert command(fakes, "slow,bf12", *options) == 0
    out, err = capsys.readouterr()
    assert "| slow | int4 of 0.01 / int4 of 0.04 | so many bits / so many bits | " in out
    assert "weights bfloat16 (1,000 as int4 of 0.04, 562 bytes), products bfloat16, activations so many bits" in out
    assert "- bf12: not measured, no int4 weights" in out and "bf12: skipped, no int4 weights" in err
    (pair,) = json.loads((fakes / "peers.json").read_text())["pairs"]
    weights = 2 * (7 * 32 * 32) + 5 * 32 + 64 * 32 + 32
    kv = 2 * 2 * 32 * 2 * 11
    assert pair["bytes_per_token"] == {who: 2 * weights - 2000 + 562 + kv for who in ("ours", "peer")}


def test_dead_engine_is_one_line_and_the_others_are_measured(fakes, capsys):
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
    assert process._process.returncode == 0, "it reads the end of its input, and ends"


def test_engine_ends_with_its_driver(fakes):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from scripts.peers.environments import Engine; from scripts.peers.process import Process\n"
        "from scripts.peers.protocol import Task\n"
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
        (["--peers", "absent"], "none of absent can be measured: not installed: python -m scripts.bench_peers --setup"),
        (["--weights", "int8"], "none of slow can be measured: no int8 weights there; choose int4"),
        (["--peers", "torch,xla", "--weights", "int8"], "none of torch,xla can be measured: no int8 weights"),
        (["--peers", "llama.cpp", "--weights", "fp8"], "no fp8 weights there; choose int8, int4, mxfp4, nvfp4"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--prompts", "8,x"], "--prompts must be lengths"),
        (["--rounds", "0", "--prompt-rounds", "0"], "leave nothing to measure"),
        (["--context", "5000"], "--context 5000"),
        (["--shape", "nosuch"], "nosuch"),
        (["--shape", "{recipes}:mixture"], "none of slow can be measured: no mixtures of experts there"),
        (["--shape", "{recipes}:mixture", "--weights", "int4"], "leave --weights out"),
        (["--shape", "{recipes}:unpacked"], "choose gpt_oss_20b"),
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
    """The task of the recipe, with all cores: backend xla would leave the others for good."""
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


def test_our_engine_holds_a_mixture_as_published(tmp_path):
    """Windows and all; a token reads two of eight experts, in 4.25 bits."""
    (tmp_path / "recipes.py").write_text(RECIPE)
    name = f"{tmp_path / 'recipes.py'}:mixture"
    options = bench_peers.Options(folder=tmp_path, shape=name, prompt_rounds=0)
    assert bench_peers.shape_of(shape_model(name), full_attention(shape_model(name).config), options) == MIXTURE
    ours = Ours(task(tmp_path, MIXTURE, checkpoint=name))
    assert ours._backend.source.config.layer_windows == (4, None)
    assert ours.conditions["activations"] == "float32; 23 bits (3 digits) for mxfp4"
    theirs = gguf_file.facts(MIXTURE, gguf_file.BF16)
    assert (theirs["quantized_formats"], theirs["quantized_weights"]) == (
        ["MXFP4"],
        ours.conditions["quantized_weights"],
    )
    assert theirs["quantized_bytes"] == 2 * 2 * 3 * 64 * 96 * 4.25 / 8
    assert len(ours.decode(8, 5)) == 5


def test_prompt_is_computed_once(small):
    ours = Ours(small)._backend
    request = Request(np.arange(40, dtype=np.int32), 6, Sampling(), ())

    def drawn(backend):
        chunks = list(backend.start(request))
        return chunks[0].cached, [pair for c in chunks for pair in zip(c.tokens, c.logprobs, strict=True)]

    (anew, wanted), first, again = drawn(CpuBackend(ours.source, threads=small.threads)), drawn(ours), drawn(ours)
    assert (anew, *first) == (0, 0, wanted) and again == (39, wanted)


# Of the types of tensors: a block and its weights, after ggml-common.h.
BITS = {"int8": 8.5, "int4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}
HALVES = ("codes", np.uint8, 16)
BLOCKS = {
    0: (np.dtype([("of", "<f4", 1)]), lambda b: b["of"]),
    30: (np.dtype([("of", "<u2", 1)]), lambda b: (b["of"].astype(np.uint32) << 16).view(np.float32)),
    8: (np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), lambda b: b["scale"][:, None] * b["codes"].astype("f4")),
    2: (np.dtype([("scale", "<f2"), HALVES]), lambda b: b["scale"][:, None] * (in_order(b["codes"]).astype("f4") - 8)),
    39: (
        np.dtype([("exponent", "u1"), HALVES]),
        lambda b: np.ldexp(e2m1(b["codes"]), b["exponent"].astype(int)[:, None] - 127),
    ),
    40: (
        np.dtype([("scales", ml_dtypes.float8_e4m3fn, (4, 1)), ("codes", "u1", (4, 8))]),
        lambda b: (b["scales"].astype("f4") * e2m1(b["codes"])).reshape(-1, 64),
    ),
}


def in_order(halves):
    return np.concatenate([halves & 15, halves >> 4], -1)


def e2m1(halves):
    return in_order(halves).view(ml_dtypes.float4_e2m1fn).astype("f4")


class Reader:
    """Just enough of GGUF version 3, after its specification."""

    def __init__(self, path):
        self.data, self.at, self.bytes = path.read_bytes(), 0, Counter()
        assert self.take("<4sI") == (b"GGUF", 3)
        tensors, fields = self.take("<QQ")
        self.fields = {self.text(): self.value() for _ in range(fields)}
        infos = [(self.text(), self.take(f"<{self.take('<I')[0]}Q"), *self.take("<IQ")) for _ in range(tensors)]
        begin = -(-self.at // self.fields["general.alignment"]) * self.fields["general.alignment"]
        self.tensors = {}
        for name, sizes, kind, offset in infos:
            assert offset % self.fields["general.alignment"] == 0
            block, decode = BLOCKS[kind]
            count = math.prod(sizes) // decode(np.zeros(1, block)).size
            stored = np.frombuffer(self.data, block, count, begin + offset)
            self.tensors[name] = decode(stored).reshape(sizes[::-1])
            self.bytes[kind] += stored.nbytes
            self.end = begin + offset + stored.nbytes

    def take(self, form):
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self):
        (size,) = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self):
        (kind,) = self.take("<I")
        return self.text() if kind == 8 else self.take({4: "<I", 6: "<f"}[kind])[0]


@pytest.mark.parametrize("tied, kind", [(False, ""), (True, "int4"), *((False, kind) for kind in gguf_file.QUANTIZED)])
def test_the_gguf_file_has_the_model(tmp_path, tied, kind):
    stored = gguf_file.QUANTIZED.get(kind, gguf_file.BF16)
    shape = dataclasses.replace(SHAPE, hidden=64 if kind else 40, ff=128, tied=tied)
    gguf_file.write(tmp_path / "m.gguf", shape, stored)
    read = Reader(tmp_path / "m.gguf")
    matrices = 2 * shape.hidden * (2 * 64 + 2 * 32 + 3 * 128) + (0 if tied else 50 * shape.hidden)
    assert read.bytes[stored.number] == (matrices * BITS[kind] // 8 if kind else 2 * (matrices + 50 * shape.hidden))
    assert gguf_file.facts(shape, stored).get("quantized_bytes", 0) == (read.bytes[stored.number] if kind else 0)
    assert {
        name: read.fields[f"llama.{name}"] for name in ("embedding_length", "block_count", "attention.head_count_kv")
    } == {"embedding_length": shape.hidden, "block_count": 2, "attention.head_count_kv": 2}
    assert read.fields["general.architecture"] == "llama" and read.fields["llama.vocab_size"] == 50
    assert read.fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert ("output.weight" in read.tensors) != tied and len(read.tensors) == 2 * 9 + (2 if tied else 3)
    assert read.tensors["blk.1.ffn_down.weight"].shape == (shape.hidden, 128)
    assert read.tensors["blk.0.attn_k.weight"].shape == (32, shape.hidden)
    assert (read.tensors["blk.0.attn_norm.weight"] == 1).all()
    matrices = [t for t in read.tensors.values() if t.ndim == 2]
    assert all(0.015 < m.std() < 0.025 and len(np.unique(m[:, :8], axis=0)) == len(m) for m in matrices)
    starts = {m.tobytes()[:64] for m in matrices}
    assert len(starts) == len(matrices), "no two are equal"
    assert read.end <= len(read.data) < read.end + 32


def test_the_gguf_file_has_the_experts(tmp_path):
    gguf_file.write(tmp_path / "m.gguf", MIXTURE)
    read = Reader(tmp_path / "m.gguf")
    named = {name.removeprefix("blk.1."): t.shape for name, t in read.tensors.items() if name.startswith("blk.1.")}
    hidden, columns, experts = 64, 96, 8
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": hidden}
    assert named == {
        **{f"{name}.weight": (count, 64) for name, count in rows.items()},
        **{f"{name}.bias": (count,) for name, count in rows.items()},
        **{f"{name}.weight": (hidden,) for name in ("attn_norm", "post_attention_norm")},
        **{"attn_sinks.weight": (4,), "ffn_gate_inp.weight": (experts, hidden), "ffn_gate_inp.bias": (experts,)},
        **{f"ffn_{name}_exps.weight": (experts, columns, hidden) for name in ("gate", "up")},
        **{f"ffn_{name}_exps.bias": (experts, columns) for name in ("gate", "up")},
        **{"ffn_down_exps.weight": (experts, hidden, columns), "ffn_down_exps.bias": (experts, hidden)},
    }
    assert read.bytes[39] == 2 * 3 * experts * hidden * columns * 4.25 / 8
    assert read.bytes[30] == 2 * (2 * hidden * (2 * 64 + 2 * 32) + 2 * 50 * hidden)
    found = {name: read.fields[f"gpt-oss.{name}"] for name in ("expert_count", "expert_used_count")}
    assert found == {"expert_count": 8, "expert_used_count": 2}
    assert read.fields["gpt-oss.attention.sliding_window"] == 4
    assert read.fields["gpt-oss.expert_feed_forward_length"] == columns
    assert 0.015 < read.tensors["blk.0.ffn_up_exps.weight"].std() < 0.025


@pytest.mark.parametrize("kind", gguf_file.QUANTIZED)
def test_blocks_have_the_weights(kind):
    stored, weights = gguf_file.QUANTIZED[kind], np.random.default_rng(3).normal(0, 0.02, (500, 64)).astype(np.float32)
    block, decode = BLOCKS[stored.number]
    found = decode(stored.pack(weights.reshape(-1, stored.weights)).view(block)[:, 0]).reshape(weights.shape)
    error = np.linalg.norm(found - weights) / np.linalg.norm(weights)  # round_to chooses better scales for some kinds
    assert error < 1.3 * relative_error(weights, round_to(weights, kind, 32 if kind == "int8" else None))


def test_rows_of_a_gguf_file_are_whole_blocks(tmp_path):
    with pytest.raises(
        ValueError, match=r"attn_q.weight has rows of 40 weights, Q4_0 has blocks of 32: choose another"
    ):
        gguf_file.write(
            tmp_path / "m.gguf", dataclasses.replace(SHAPE, hidden=40, tied=True), gguf_file.QUANTIZED["int4"]
        )


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
