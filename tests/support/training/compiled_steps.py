"""Figures of training steps compiled by XLA:GPU, to which tests compare the counted figures.

python -m tests.support.training.compiled_steps     # records them in minutes; needs pip install 'jax[cuda12]'
"""

import dataclasses
import json
import subprocess
import sys
from typing import NamedTuple

from laneformer.train.config import TrainConfig
from laneformer.train.recipes import find_recipe
from tests.support.paths import ROOT

FILE = ROOT / "tests" / "train" / "planning" / "compiled_steps.json"


class Case(NamedTuple):
    """Changes of a recipe's first phase, and the size of its mesh."""

    recipe: str
    data: int
    lane: int
    sequences: int
    """Sequences per device and accumulated part."""
    parts: int
    remat: str
    layers: int
    layout: str = "laneformer"
    dtype: str = "float32"
    """Dtype of activations and exchanges."""


CASES = (
    Case("laneformer_120m", 8, 1, 1, 1, "none", 4),
    Case("laneformer_120m", 8, 1, 1, 16, "block", 12),
    Case("laneformer_120m", 1, 8, 8, 16, "block", 12),
    Case("laneformer_120m", 64, 1, 2, 1, "none", 12),
    Case("laneformer_350m", 16, 1, 4, 2, "none", 24),
    Case("laneformer_2b", 4, 8, 8, 1, "none", 4, "ladder"),
    Case("laneformer_2b", 8, 4, 4, 1, "dots", 4),
    Case("laneformer_2b", 4, 8, 8, 2, "dots", 4, "dtp(4)", "bfloat16"),
    Case("laneformer_2b", 8, 1, 4, 1, "none", 15),
    Case("laneformer_2b", 32, 8, 8, 4, "dots", 15),
    Case("laneformer_8b", 32, 1, 1, 2, "none", 8),
    Case("laneformer_70b", 16, 4, 1, 2, "dots", 6),
)


def recipe_of(case: Case) -> TrainConfig:
    """The recipe of a case, with one phase."""
    config = find_recipe(case.recipe)
    sliding = min(config.model.sliding_window_n_layers or 0, case.layers)
    model = config.model.replace(num_hidden_layers=case.layers, layout=case.layout, sliding_window_n_layers=sliding)
    return dataclasses.replace(
        config,
        model=model,
        then={},
        accumulate=case.parts,
        remat=case.remat,
        activation_dtype=case.dtype,
        exchange_dtype=case.dtype,
        data=dataclasses.replace(config.data, batch_size=case.sequences * case.parts * case.data),
        mesh=dataclasses.replace(config.mesh, data=case.data, lane=case.lane),
    )


def record(case: Case) -> dict:
    """Figures of one device. Each case needs its own process, because a process cannot change JAX's devices."""
    from laneformer.train.planning.plan import ClusterConfig, plan

    phase = plan(recipe_of(case), ClusterConfig(device="h200", compiler="cuda")).phases[0]
    sent = {axis: phase.program.sent(axis) for axis in ("lane", "data")}
    return {
        "case": case._asdict(),
        "state": phase.parameters + phase.moments,
        "memory": phase.program.memory.total,
        "flops": phase.program.matmul_flops,
        "device_seconds": phase.times.device,
        "sent": sent,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(record(CASES[int(sys.argv[1])])))
    else:
        command = [sys.executable, "-m", "tests.support.training.compiled_steps"]
        runs = (
            subprocess.run([*command, str(n)], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for n in range(len(CASES))
        )
        lines = [run.stdout.splitlines()[-1] for run in runs]
        FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
