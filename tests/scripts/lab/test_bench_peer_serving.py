"""scripts.bench_peer_serving with fake engines, which speak only the protocol; our engine with a small model."""

import dataclasses
import json
import os

import pytest

from laneformer import custom_calls
from laneformer.commands.lab import bench_peer_serving as serving
from laneformer.commands.lab.peers.ours_serving import OursServing
from laneformer.commands.lab.peers.protocol import Shape, Task
from laneformer.infer.engine.options import MOST_DRAFTS

RECIPE = """
from laneformer.config import ModelConfig
def small():
    return ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, num_lanes=2, max_position_embeddings=512, layout="laneformer")
"""
# An engine that returns invented times. Clients share every pass. Up to 4 drafts are all correct; with more, a token
# takes twice the time of a pass.
FAKE = """
import sys
from laneformer.commands.lab.peers.protocol import Served, serve

class Fake:
    def __init__(self, task):
        self.scale = 1.0 if "ours" in task.option else 2.0
        assert task.slots == 3 and task.most_slowdown == 2.0
        self.conditions = {"versions": {"fake": "1"}, "weights": "bfloat16", "compute": "float32", "kv": "float32",
                           "activations": "float32", "threads": task.threads, "load": "none", "system": "none"}

    def together(self, prompt, tokens, clients):
        return Served(self.scale * tokens, clients * tokens, tokens)

    def copied(self, file, drafts):
        import json
        text = json.load(open(file))
        assert len(text["answer"]) == 20 and len(text["prompt"]) > 100 and max(text["prompt"]) < 96
        most = 4 if drafts < 0 else drafts
        return Served(self.scale * 19 / (1 + most if most <= 4 else 0.5), 19, 19 // (1 + most))

    def turn(self, prompt, answer, new):
        return Served(self.scale * new, prompt + answer - 1, 1)

serve(Fake)
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipes.py").write_text(RECIPE)
    return f"{tmp_path / 'recipes.py'}:small"


def command(folder, recipe, *more):
    text = folder / "text.py"
    text.write_text("def area(width, height):\n    return width * height\n" * 10)
    sizes = {"clients": 3, "prompt": 4, "tokens": 10, "turn": "20,6,5", "copied-tokens": 20, "rounds": 2, "threads": 2}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    texts = ["--text", str(text), "--other", str(text), "--edit", "width=depth", "--drafts", "2,8"]
    return serving.main(
        [
            str(folder),
            "--shape",
            recipe,
            *options,
            *texts,
            "--most-slowdown",
            "2",
            "--json",
            str(folder / "r.json"),
            *more,
        ]
    )


def test_peer_counts_with_its_best_drafts(tmp_path, recipe, monkeypatch, capsys):
    (tmp_path / "fake_serving.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(serving, "SERVING", dict.fromkeys(serving.SERVING, "fake_serving"))
    monkeypatch.setattr(serving, "OURS", dataclasses.replace(serving.OURS, option="ours"))
    peer = dataclasses.replace(serving.PEERS[serving.PEER], environment=None)
    monkeypatch.setitem(serving.PEERS, serving.PEER, peer)
    assert command(tmp_path, recipe) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())["cases"]
    figures = [
        (case["question"], *(case["rounds"][1][who]["figure"] for who in ("ours", "peer")), case["rounds"][1]["ratio"])
        for case in found
    ]
    drafts = [("drafts", 1, 0.5, 2), ("drafts", 5, 1.5, pytest.approx(10 / 3))]
    assert figures == [
        ("several clients", 1, 0.5, 2),
        ("several clients", 3, 1.5, 2),
        *drafts * 2,
        ("first token", 5000, 10000, 2),
    ]
    assert [case["best"][2] for case in found[2:6]] == [0, 2, 0, 2] and all(len(case["rounds"]) == 2 for case in found)
    assert "| 2.00 (2.00 to 2.00) | 3.0 tokens/s | 1.5 tokens/s |" in out and "with 2 drafts" in out
    assert command(tmp_path, recipe, "--questions", "turn") == 0
    assert [case["question"] for case in json.loads((tmp_path / "r.json").read_text())["cases"]] == ["first token"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clients", "0"), "--clients must be at least 1, got 0"),
        (("--turn", "512,64"), "--turn must be 3 numbers"),
        (("--drafts", "2,x"), "--drafts must be some numbers"),
        (("--edit", "width"), "--edit must be OLD=NEW"),
        (("--edit", "nosuch=word"), "has no word 'nosuch'"),
        (("--turn", "600,6,5"), "but the context of"),
        (("--shape", "qwen3_next_12"), "--shape qwen3_next_12 has recurrent layers"),
        (("--questions", "turn,turns"), "--questions turns: choose among clients, drafts, turn"),
        ((), "llama.cpp is not installed; run python -m scripts.bench_peers --setup"),
    ],
)
def test_bad_options_are_one_line(tmp_path, recipe, options, words, capsys, monkeypatch):
    if options:
        peer = dataclasses.replace(serving.PEERS[serving.PEER], environment=None)
        monkeypatch.setitem(serving.PEERS, serving.PEER, peer)
    assert command(tmp_path, recipe, *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert words in line


@pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
def test_our_engine_serves(tmp_path, recipe):
    shape = Shape(*[0] * 7, False, 1e-5, 1e4)
    threads = len(os.sched_getaffinity(0))
    ours = OursServing(Task(recipe, shape, 512, threads, str(tmp_path), slots=3, most_slowdown=100))
    assert ours.conditions["threads"] == threads and ours._backend.parallel == 3
    assert ours.together(4, 10, 3).tokens == 30
    text = {"prompt": [*range(60)], "answer": [*range(5, 45)]}
    file = tmp_path / "text.json"
    file.write_text(json.dumps(text))
    plain = ours.copied(str(file), 0)
    assert (plain.tokens, plain.passes) == (39, 39)
    ours._backend.session.speculate(MOST_DRAFTS, [1.0] * 16)
    assert ours.copied(str(file), -1).passes < 10
    assert ours.turn(50, 6, 5).tokens == 55
