"""A recipe that trains in a second, its corpus, and helpers that start, stop and read runs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import laneformer
from laneformer import ModelConfig
from laneformer.train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig
from laneformer.train.data.store import StoreWriter
from tests.support.paths import ROOT

RECIPE = f"{Path(__file__).resolve()}:tiny"
TOKENIZER = b'{"any": "bytes"}'


def tiny() -> TrainConfig:
    """Two layers in eight lanes, delay 1, on eight host devices; --data.path gives the store."""
    return TrainConfig(
        name="tiny",
        steps=60,
        model=ModelConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=32,
            num_lanes=8,
            layout="laneformer",
            broadcast_delay=1,
        ),
        data=DataConfig(path=(Path("no/store"),), sequence_length=16, batch_size=8, validation_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        mesh=MeshConfig(host_devices=8),
        validate_every=20,
        save_every=10,
        keep=3,
    )


def phased() -> TrainConfig:
    """A recipe with three phases: `tiny`, then longer rows of whole documents with Muon and another window, then a
    mixture with a masked store.
    """
    config = changed(tiny(), steps=20, validate_every=15, save_every=5)
    long = DataConfig(
        path=config.data.path,
        sequence_length=32,
        batch_size=4,
        packing="best_fit",
        attend_across_documents=False,
        validation_batches=1,
    )
    mixed = dataclasses.replace(
        config.data, path=(Path("no/store"), Path("no/masked")), weights=(1.0, 3.0), validation_batches=1
    )
    return dataclasses.replace(
        config,
        name="phased",
        then={
            "long": LaterPhase(
                steps=15,
                data=long,
                optimizer=OptimizerConfig(kind="muon", warmup_steps=2, schedule="cosine"),
                sliding_window=12,
                rope_theta=500.0,
            ),
            "instruct": LaterPhase(
                steps=15, data=mixed, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2), accumulate=2
            ),
        },
    )


def changed(config: TrainConfig, **changes) -> TrainConfig:
    """`config` with changed options. The name of an option in a section is section__option."""
    for name, value in changes.items():
        section, _, option = name.rpartition("__")
        config = dataclasses.replace(
            config,
            **(
                {section: dataclasses.replace(getattr(config, section), **{option: value})}
                if section
                else {name: value}
            ),
        )
    return config


def write_store(
    path: Path, *, seed: int = 0, tokenizer: bytes = TOKENIZER, vocab_size: int = 64, masked: bool = False, **options
) -> Path:
    """Writes a store of documents that count up in steps of 1 to 4, which a model learns fast. It has several shards,
    so that tests can damage one. Returns its path.

    masked: only the last 40 of a document's 60 tokens count in the loss.
    """
    random = np.random.default_rng(seed)
    with StoreWriter(
        path, tokenizer=tokenizer, vocab_size=vocab_size, eos_id=0, **{"shard_tokens": 600, **options}
    ) as writer:
        for split, documents in (("train", 60), ("validation", 8)):
            for _ in range(documents):
                ids = (np.arange(60) * random.integers(1, 5) + random.integers(63)) % 63 + 1
                writer.add(split, ids, 120, loss=np.arange(60) >= 20 if masked else None)
        writer.finish({})
    return path


def environment() -> dict[str, str]:
    """Environment of a command. It has no settings of JAX's devices, but the tests' compilation cache and other XLA
    flags, so that both share compiled programs.
    """
    kept = (
        "JAX_PLATFORMS",
        "JAX_DISABLE_MOST_OPTIMIZATIONS",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(("XLA_", "PJRT_", "JAX_"))
    } | {"XLA_FLAGS": " ".join(flags)}


def start(run: Path, store: Path, *options: str, limit: str = "", recipe: str = RECIPE) -> subprocess.Popen:
    """Starts `python -m train` of a recipe in a separate process. limit: arguments of the shell's ulimit."""
    command = [sys.executable, "-m", "train", recipe, "--run", str(run), "--data.path", str(store), *options]
    if limit:
        command = ["bash", "-c", f'ulimit {limit} && exec "$0" "$@"', *command]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Waits until a process has ended. Returns its exit status, stdout and stderr."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_until(process, condition, seconds=90):
    """Waits until the condition holds. Returns False if the process ends before that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    raise AssertionError("timed out")


def lines(run: Path, text: str = "") -> int:
    """Number of records in metrics.jsonl so far that contain `text`."""
    file = run / "metrics.jsonl"
    written = file.read_text().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith("\n") and text in line for line in written)


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((run / "checkpoints").glob("*.orbax-checkpoint-tmp*")) if (run / "checkpoints").exists() else False


def kill_when(process, condition, number=signal.SIGKILL):
    """Sends the process a signal once the condition holds. Returns its exit status, stdout and stderr."""
    try:
        wait_until(process, condition)
        process.send_signal(number)
        return finish(process)
    finally:
        process.kill()


def records(run: Path) -> list[dict]:
    """Records of metrics.jsonl, without durations and rates, which differ between runs."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if not k.endswith(("_seconds", "_per_second"))}
        for record in records
        if "time" not in record
    ]


def losses(run: Path) -> list[float]:
    """Losses of all steps. Asserts that metrics.jsonl contains each step exactly once."""
    steps = [line for line in records(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return {path: np.asarray(weight) for path, weight in laneformer.load(run).weights().items()}
