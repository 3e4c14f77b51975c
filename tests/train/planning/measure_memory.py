"""python measure_memory.py DATA LANE LAYERS REMAT prints the bytes that a training step uses and those of the plan."""

import ctypes
import sys
from pathlib import Path

import jax
import numpy as np

import laneformer as lf
from laneformer.train.config import DataConfig, MeshConfig, TrainConfig
from laneformer.train.planning.plan import ClusterConfig, plan
from laneformer.train.step import Trainer


def recipe(data: int, lane: int, layers: int, remat: str) -> TrainConfig:
    """A recipe with more than half a gigabyte of state and activations, whose steps take about a second."""
    return TrainConfig(
        name="measured",
        steps=1000,
        model=lf.ModelConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=512,
            num_lanes=8,
            layout="laneformer",
            broadcast_delay=1,
        ),
        data=DataConfig(path=(Path("no/store"),), sequence_length=512, batch_size=4),
        mesh=MeshConfig(data=data, lane=lane, host_devices=data * lane),
        remat=remat,
    )


def status(name: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(config: TrainConfig) -> tuple[int, int]:
    """Returns used and planned bytes.

    Used bytes are the peak of resident memory during two steps, minus resident memory before the state was created.
    """
    planned = plan(config, ClusterConfig(device="cpu")).phases[0].program.memory.total * config.mesh.host_devices
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane)
    trainer = Trainer(config, config.phases[0], mesh)
    step = trainer.lower_step().compile()
    ids = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (config.data.batch_size, config.data.sequence_length + 1), np.int32
    )
    batch, asked = trainer.put_batch(lambda rows: {"ids": ids[rows]}), trainer.put_asked(False)
    ctypes.CDLL(None).malloc_trim(0)  # returns memory that compiling freed, so that the step cannot reuse it
    before = status("VmRSS")
    state = jax.block_until_ready(trainer.init())
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to the current resident memory
    for _ in range(2):
        state, values = step(state, batch, asked)
        jax.block_until_ready((state, values))
    return status("VmHWM") - before, planned


if __name__ == "__main__":
    data, lane, layers, remat = sys.argv[1:]
    print(*measure(recipe(int(data), int(lane), int(layers), remat)))
