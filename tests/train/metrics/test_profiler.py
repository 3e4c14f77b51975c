"""The profile covers exactly the requested steps, also if the run starts or ends among them, and names the modules."""

import jax
import numpy as np
import pytest

import laneformer
from laneformer.train.metrics.profiler import Profile

CONFIG = laneformer.ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=8,
    num_lanes=2,
    layout="laneformer",
    broadcast_delay=1,
)


@pytest.fixture
def calls(monkeypatch):
    """Calls of jax.profiler, which are recorded instead of executed."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: seen.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def steps_in(calls, folder, first, last, *window):
    """Runs steps first..last and returns those that were traced."""
    traced = []
    with Profile(folder, *window) as profile:
        for step in range(first, last + 1):
            profile.on_step(step, ())
            if calls and calls[-1] != "stop":
                traced.append(step)
    assert calls in ([], [("start", folder), "stop"])
    return traced


@pytest.mark.parametrize(
    "first, last, traced",
    [(1, 20, [5, 6, 7]), (1, 6, [5, 6]), (1, 5, [5]), (1, 7, [5, 6, 7]), (6, 20, [6, 7]), (8, 20, []), (1, 4, [])],
    ids=["inside", "ends inside", "ends at once", "ends with it", "starts inside", "starts after", "ends before"],
)
def test_trace_covers_the_window(tmp_path, calls, first, last, traced):
    assert steps_in(calls, tmp_path, first, last, 5, 3) == traced


def test_error_inside_the_window_ends_the_trace(tmp_path, calls):
    with pytest.raises(OSError, match="gone"), Profile(tmp_path, 1, 9) as profile:
        profile.on_step(1, ())
        raise OSError("gone")
    assert calls == [("start", tmp_path), "stop"]


def test_both_ends_wait_for_the_device(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(jax, "block_until_ready", calls.append)
    with Profile(tmp_path, 2, 2) as profile:
        for step in range(1, 6):
            profile.on_step(step, f"before {step}")
    assert calls == ["before 2", ("start", tmp_path), "before 4", "stop"]


@pytest.mark.slow
def test_trace_names_the_modules(tmp_path):
    model = laneformer.Laneformer.init(CONFIG)
    program = jax.jit(lambda model, ids: model(ids).sum())
    total = program(model, np.zeros((1, 4), np.int32))
    with Profile(tmp_path / "profile", 2, 2) as profile:
        for step in range(1, 5):
            profile.on_step(step, total)
            total = program(model, np.zeros((1, 4), np.int32))
    [trace] = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    content = trace.read_bytes()
    for scope in (b"embed", b"layer_0_attention", b"layer_0_mlp", b"head"):
        assert scope in content
