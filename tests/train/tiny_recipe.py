"""A recipe small enough to train in a second, its corpus, and what tests do with a run: start, stop, read."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from laneformer import ModelConfig
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.shards import StoreWriter

ROOT = Path(__file__).parents[2]
RECIPE = f"{Path(__file__).resolve()}:tiny"
TOKENIZER = b'{"any": "bytes"}'


def tiny() -> TrainConfig:
    """Two layers in eight lanes, delay 1, on eight host devices; the store's path comes from --data.path."""
    return TrainConfig(
        name="tiny",
        steps=60,
        model=ModelConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
            max_position_embeddings=32, num_lanes=8, layout="laneformer", broadcast_delay=1,
        ),
        data=DataConfig(path=(Path("no/store"),), sequence_length=16, batch_size=8, validation_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        mesh=MeshConfig(host_devices=8),
        validate_every=20,
        save_every=10,
        keep=3,
    )  # fmt: skip


def changed(config: TrainConfig, **changes) -> TrainConfig:
    """`config` with other values; section__option reaches into a section."""
    for name, value in changes.items():
        section, _, option = name.rpartition("__")
        config = dataclasses.replace(
            config, **({section: dataclasses.replace(getattr(config, section), **{option: value})} if section else {name: value})
        )
    return config


def write_store(path: Path, *, seed: int = 0, tokenizer: bytes = TOKENIZER, vocab_size: int = 64, **options) -> Path:
    """Documents that count up in steps of 1 to 4: soon learned. Several shards, so that one can be damaged."""
    random = np.random.default_rng(seed)
    with StoreWriter(path, tokenizer=tokenizer, vocab_size=vocab_size, eos_id=0, **{"shard_tokens": 600, **options}) as writer:
        for split, documents in (("train", 60), ("validation", 8)):
            for _ in range(documents):
                writer.add(split, (np.arange(60) * random.integers(1, 5) + random.integers(63)) % 63 + 1, 120)
        writer.finish({})
    return path


def start(run: Path, store: Path, *options: str, compiled: Path | None = None, limit: str = "") -> subprocess.Popen:
    """`python -m train` of the tiny recipe in a process of its own.

    compiled: where to find and keep compiled programs. limit: for the shell's ulimit.
    """
    command = [sys.executable, "-m", "train", RECIPE, "--run", str(run), "--data.path", str(store), *options]
    if limit:
        command = ["bash", "-c", f'ulimit {limit} && exec "$0" "$@"', *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PJRT_", "JAX_"))}
    if compiled:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a process that ends by itself."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def records(run: Path) -> list[dict]:
    """What metrics.jsonl says, without the times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if not k.endswith(("_seconds", "_per_second"))} for record in records if "time" not in record
    ]


def losses(run: Path) -> list[float]:
    """The loss of every step; asserts that no step is missing or there twice."""
    steps = [line for line in records(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]
