"""The baseline in PyTorch: it reads the bytes of the recipe's model, and its steps are those of a plain Llama."""

import json

import numpy as np
import pytest

from laneformer import ConfigError
from laneformer.commands.lab.gpu_check import torch_graph
from laneformer.commands.lab.gpu_check.torch_graph import Llama, Options, Sizes, main
from laneformer.infer.engine.sources import recipe_config
from laneformer.weights import weight_bytes_per_token


@pytest.mark.parametrize("recipe", ["laneformer_2b", "laneformer_120m"])
def test_bytes_are_those_of_the_recipe(recipe):
    config = recipe_config(recipe)
    assert 2 * Sizes.of(config).weights == pytest.approx(weight_bytes_per_token(config), rel=1e-3)


def test_mixture_of_experts_and_missing_torch_are_one_line(monkeypatch, capsys):
    with pytest.raises(ConfigError, match="choose the recipe of a dense model"):
        Sizes.of(recipe_config("gpt_oss_20b"))
    monkeypatch.setattr(torch_graph, "torch", None)
    assert main([]) == 2 and "torch is not installed" in capsys.readouterr().err


def test_steps_are_those_of_a_plain_llama(tmp_path):
    """Tokens after the filled cache equal those of attention over all positions, computed in float64 NumPy."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    options = Options(recipe="stdlib", device="cpu", context=3, tokens=2, runs=1, json=tmp_path / "a.json")
    sizes = Sizes(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ff=24, vocab=32)
    with torch.no_grad():
        model = Llama(sizes, options)
        for array in (
            *(matrix for layer in model.layers for matrix in layer),
            *(c for pair in model.caches for c in pair),
        ):
            array.mul_(20)  # so that every part of a step decides over the token
        for first in range(8):
            caches = [[c.double().numpy().copy() for c in pair] for pair in model.caches]
            model.token.fill_(first), model.position.fill_(3)
            model.step()
            assert int(model.position) == 4
            scores = expected_scores(model, caches, first, 3)
            assert scores[int(model.token)] >= scores.max() - 2e-2 * np.abs(scores).max()
    torch_graph.run(options)
    (record,) = json.loads((tmp_path / "a.json").read_text())
    assert record["way"] == "eager" and record["us_per_token"]["median"] > 0 and record["memory_bytes"] is None


def expected_scores(model, caches, token, position):
    """Logits float64 of the token at the position."""
    s = model.sizes

    def norm(x):
        return x / np.sqrt(np.mean(x * x) + torch_graph.NORM_EPS)

    def rotate(x):
        angles = position * torch_graph.ROPE_THETA ** (-np.arange(0, s.head_dim, 2) / s.head_dim)
        a, b = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = model.embedding.double().numpy()[token]
    for layer, (keys, values) in zip(model.layers, caches, strict=True):
        qkv, out, gate_up, down = (matrix.double().numpy() for matrix in layer)
        q, k, v = np.split((qkv @ norm(x)).reshape(-1, s.head_dim), [s.heads, s.heads + s.kv_heads])
        keys[0, :, position], values[0, :, position] = rotate(k), v
        attended = []
        for head, query in enumerate(rotate(q)):
            own = head // (s.heads // s.kv_heads)
            scores = keys[0, own, : position + 1] @ query / np.sqrt(s.head_dim)
            share = np.exp(scores - scores.max())
            attended.append(share / share.sum() @ values[0, own, : position + 1])
        x = x + out @ np.concatenate(attended)
        gate, up = np.split(gate_up @ norm(x), 2)
        x = x + down @ (gate / (1 + np.exp(-gate)) * up)
    return model.head.double().numpy() @ norm(x)
