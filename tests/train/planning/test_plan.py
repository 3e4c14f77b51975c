"""Dry runs: programs compiled for absent hardware, figures derived from them, and the memory of a real step."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from laneformer.errors import ConfigError, LaneformerError
from laneformer.train.config import LaterPhase
from laneformer.train.flops import train_flops_per_token
from laneformer.train.planning import plan as planning
from laneformer.train.planning.plan import ClusterConfig, describe, dry_run, plan, speeds
from laneformer.train.program.overlap import FORWARD, HEAD, Overlap
from laneformer.train.program.program import UNSCHEDULED
from tests.support.paths import ROOT
from tests.support.tiny_recipe import RECIPE, changed, tiny

ONE_NODE = ClusterConfig(device="h200", nodes=1, compiler="cpu")


@pytest.fixture(scope="module")
def planned():
    """The tiny recipe in two phases with the same program on one node, 2 x 4, compiled for the CPU."""
    config = changed(tiny(), mesh__lane=4)
    return plan(
        dataclasses.replace(
            config, then={"second": LaterPhase(steps=40, data=config.data, optimizer=config.optimizer)}
        ),
        ONE_NODE,
    )


@pytest.fixture
def compiled_before(planned, monkeypatch):
    """Every phase has the program of `planned`, which is not compiled again."""
    lowered = SimpleNamespace(compile=lambda options: None)
    monkeypatch.setattr(planning.Trainer, "lower_step", lambda trainer: lowered)
    monkeypatch.setattr(planning, "read_program", lambda *_: planned.phases[0].program)


def test_plan_fills_the_cluster(planned):
    assert (planned.devices, planned.mesh, planned.compute_dtype) == (8, {"data": 2, "lane": 4}, "bfloat16")
    assert [(phase.name, phase.steps) for phase in planned.phases] == [(tiny().phases[0].name, 60), ("second", 40)]


def test_state_is_split_over_the_mesh(planned):
    """A device has its share of float32 weights and two moments, but whole norms and weights that no axis divides."""
    whole = 4 * planned.parameters
    phase = planned.phases[0]
    assert whole / 8 <= phase.parameters < 1.3 * whole / 8
    assert phase.moments == pytest.approx(2 * phase.parameters, abs=64)
    assert phase.parameters + phase.moments <= phase.program.memory.arguments < phase.parameters + phase.moments + 4000


def test_times_follow_from_the_cluster(planned):
    phase, device = planned.phases[0], planned.device
    flops = train_flops_per_token(tiny().model, 16) * 8 * 16
    assert phase.model_flops == flops
    times = phase.times
    assert times.products == pytest.approx(flops / 8 / (0.6 * device.peak_flops))
    assert times.device >= times.products and times.network == 0, "one node"
    sent = sum(phase.program.sent(axis) for axis in phase.program.axes)
    assert times.links == pytest.approx(sent / 450e9)
    s = speeds(planned, phase)
    assert s["step_seconds"] == [times.device + times.links, max(times.device, times.links)]
    assert s["days"][0] == pytest.approx(60 * s["step_seconds"][0] / 86_400)
    assert s["mfu"][0] == pytest.approx(flops * s["tokens_per_second"][0] / (8 * 16) / (8 * device.peak_flops))


def test_scheduled_figures_include_waits(planned):
    """Programs of XLA:CPU have no scheduled figures, which the text says. With overlaps, a step takes the time of the
    device and the waits.
    """
    assert planned.phases[0].times.scheduled is None and len(speeds(planned, planned.phases[0])["mfu"]) == 2
    assert UNSCHEDULED in describe(planned) and "% as scheduled" not in describe(planned)
    first = planned.phases[0]
    waiting = (Overlap(FORWARD, 5, 3, 1, 0.4, 0.25), Overlap(HEAD, 1, 0, 0, 0.01, 0.01))
    first = dataclasses.replace(first, times=dataclasses.replace(first.times, overlaps=waiting))
    found = dataclasses.replace(planned, phases=(first,))
    assert speeds(found, first)["step_seconds"][2] == pytest.approx(first.times.device + 0.26)
    text = describe(found)
    assert "5: 3 hidden, 1 in part, 1 not; wait 0.25 of 0.4" in text and UNSCHEDULED not in text
    for row in ("seconds per step", "tokens/s", "MFU", "days", "days of the whole run:"):
        assert any(line.startswith(row) and line.endswith(" as scheduled") for line in text.splitlines()), row
    assert found.as_json()["phases"][0]["times"]["overlaps"][0]["exposed"] == 0.25


def test_exchanges_across_nodes_use_the_network(compiled_before, monkeypatch):
    """With nodes of 4 devices, the lane axis is within a node and the data axis is not. A ring over all devices leaves
    a node over four networks.
    """
    find = planning.find_device
    monkeypatch.setattr(planning, "find_device", lambda name, count: dataclasses.replace(find(name, count), per_node=4))
    cluster = ClusterConfig(device="h200", nodes=2, compiler="cpu", network=80)
    found = plan(changed(tiny(), mesh__lane=4), cluster)
    program, times = found.phases[0].program, found.phases[0].times
    assert found.mesh == {"data": 2, "lane": 4}
    assert times.links == pytest.approx(program.sent("lane") / 450e9)
    assert (
        times.network == pytest.approx((program.sent("data") + program.sent("data x lane") / 4) / 10e9)
        and times.network > 0
    )


@pytest.mark.slow
def test_too_little_memory_lists_options_that_reduce_it(monkeypatch):
    find = planning.find_device
    monkeypatch.setattr(
        planning, "find_device", lambda name, count: dataclasses.replace(find(name, count), memory=100_000)
    )
    # Activations are larger than gradients.
    config = changed(tiny(), model__num_hidden_layers=1, mesh__lane=4, data__batch_size=64)
    found = plan(config, ONE_NODE)
    [phase] = found.phases
    assert not phase.fits
    text = describe(found)
    assert "TOO MUCH" in text and "does not fit in 92% of 100 kB" in text
    for option in ("--accumulate 2", "--remat dots", "--mesh.lane 8"):
        assert option in text
    for option, value in (("accumulate", 4), ("remat", "block")):
        smaller = plan(changed(config, **{option: value}), ONE_NODE).phases[0]
        assert smaller.program.memory.temporary < phase.program.memory.temporary, option


def test_dry_run_prints_and_writes_the_plan(compiled_before, tmp_path):
    file = tmp_path / "plan.json"
    text = dry_run(
        [
            RECIPE,
            "--dry-run",
            "--cluster.device",
            "h200",
            "--cluster.compiler",
            "cpu",
            "--cluster.efficiency",
            "0.5",
            "--json",
            str(file),
            "--steps",
            "7",
            "--mesh.lane",
            "8",
        ]
    )
    assert "8 x NVIDIA H200" in text and "projected" in text and "days" in text and "50% of the peak" in text
    written = json.loads(file.read_text())
    assert (
        written["projected"] is True and written["phases"][0]["steps"] == 7 and written["cluster"]["efficiency"] == 0.5
    )
    assert written["phases"][0]["memory_total"] > written["phases"][0]["parameters"] > 0
    assert len(written["phases"][0]["days"]) == 2


def test_unwritable_json_fails_before_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "plan", lambda *_: pytest.fail("planned"))
    with pytest.raises(LaneformerError, match=r"cannot write .*nodir/x\.json: No such file or directory; .*--json"):
        dry_run([RECIPE, "--dry-run", "--json", str(tmp_path / "nodir" / "x.json")])


@pytest.mark.slow
def test_cpu_plan_has_no_times():
    found = plan(tiny(), ClusterConfig(device="cpu"))
    assert found.compute_dtype == "float32" and found.phases[0].times is None and found.devices == 8
    assert "days" not in describe(found) and json.dumps(found.as_json())


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"device": "abacus"}, "'abacus'.*h100"),
        ({"nodes": 0}, r"cluster\.nodes .* 0"),
        ({"efficiency": 1.5}, r"cluster\.efficiency .* 1\.5"),
        ({"network": -1.0}, r"cluster\.network .* -1\.0"),
        ({"device": "mi300x", "nodes": 2, "compiler": "cpu"}, "--cluster.network"),
        ({"device": "mi300x", "nodes": 1, "compiler": "cuda"}, "h100, h200, b200, not mi300x"),
        ({"nodes": 3}, "batch_size .* 8"),
    ],
)
def test_bad_clusters_raise(cluster, message):
    with pytest.raises(ConfigError, match=message):
        plan(changed(tiny(), mesh__lane=8), ClusterConfig(**cluster))


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins"), reason="needs jax's CUDA plugin: pip install 'jax[cuda12]'"
)
def test_cuda_compiler_needs_no_gpu():
    """A separate process plans 32 devices: 4 nodes, each with the 8 lanes of the recipe."""
    code = (
        f"from laneformer.train.planning.plan import dry_run; print(dry_run([{RECIPE!r}, '--cluster.nodes', '4',"
        " '--cluster.compiler', 'cuda']))"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_clean(), timeout=300
    ).stdout
    assert "mesh data 4 x lane 8" in text and "compiled with XLA:GPU" in text and "sent along lane" in text
    assert "exchanges: lanes, forward" in text and "% as scheduled" in text


@pytest.mark.exhaustive  # each case takes half a minute and gigabytes of memory
@pytest.mark.parametrize("arguments", ["1 1 6 none", "1 8 6 none", "2 4 6 none", "1 1 6 block"])
def test_real_step_needs_the_planned_memory(arguments):
    """Steps increase the resident memory of a process by the planned bytes, within 10 %.

    The C library's allocator gets one arena, because fragments in several arenas would count as memory of the steps.
    """
    script = Path(__file__).with_name("measure_memory.py")
    command = [sys.executable, str(script), *arguments.split()]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**_clean(), "MALLOC_ARENA_MAX": "1"}, timeout=600
    )
    used, planned = map(int, run.stdout.split())
    assert used > 0.5e9, "large enough to compare"
    assert planned == pytest.approx(used, rel=0.1)


def _clean() -> dict[str, str]:
    """The environment without variables that configure JAX and XLA, and with the project in PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PJRT_", "JAX_"))}
    return {**kept, "PYTHONPATH": str(ROOT)}
