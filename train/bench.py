"""`python -m train.bench [RECIPE ...]`: times training steps of recipes and of a plain dense model of the same size."""

import json
import multiprocessing
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import flax
import jax
import numpy as np
import optax
import tyro

import laneformer as lf
from laneformer.errors import ConfigError, LaneformerError, run_command, writing
from laneformer.interrupts import end
from laneformer.mesh import keep_freed_memory
from laneformer.train.config import TrainConfig
from laneformer.train.dense import dense_step
from laneformer.train.flops import train_flops_per_token
from laneformer.train.planning.cluster import peak_flops
from laneformer.train.recipes import parse
from laneformer.train.step import Trainer

WARMUP = 3  # untimed steps after the first one, which compiles


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time optimizer steps of recipes. Each round runs every entry once, in a separate process."""

    recipes: tyro.conf.Positional[tuple[str, ...]] = ("stdlib",)
    """Recipes; quote one to add its options: stdlib "stdlib --mesh.host-devices 1 --mesh.lane 1"."""
    layouts: tuple[str, ...] = ()
    """Layouts to run every recipe with, instead of its own: --layouts "dtp(4)" tp none."""
    dense: bool = True
    """Also time a dense Flax model with the sizes and batch of the first recipe, on one device (train/dense.py)."""
    steps: int = 10
    """Timed steps per process."""
    rounds: int = 3
    """Processes per entry."""
    json: Path | None = None
    """File to write all figures and conditions to."""

    def __post_init__(self):
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not self.recipes:
            raise ConfigError("no recipe given; name at least one")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One recipe, layout or dense model to time."""

    name: str
    recipe: tuple[str, ...]
    layout: str | None = None
    dense: bool = False

    @property
    def config(self) -> TrainConfig:
        config = parse(self.recipe, "python -m train.bench")
        return config if self.layout is None else replace(config, model=config.model.replace(layout=self.layout))


def entries(bench: Bench) -> list[Entry]:
    """Everything to time, in order. Raises ConfigError for an invalid recipe, option or layout."""
    found = []
    for recipe in bench.recipes:
        words = tuple(shlex.split(recipe))
        found += [
            Entry(name=f"{recipe}, layout {layout}", recipe=words, layout=layout) for layout in bench.layouts
        ] or [Entry(name=recipe, recipe=words)]
    if bench.dense:
        found.append(
            Entry(name=f"dense model of the sizes of {found[0].recipe[0]}", recipe=found[0].recipe, dense=True)
        )
    for entry in found:
        _ = entry.config
    return found


def run(bench: Bench) -> dict:
    """Times every entry and returns all figures: {"conditions": ..., "entries": [...]}."""
    listed = entries(bench)
    measured: dict[str, list[dict]] = {entry.name: [] for entry in listed}
    with tempfile.TemporaryDirectory() as cache:  # compiled programs, for the later rounds
        for turn in range(bench.rounds):
            for entry in listed:
                print(f"round {turn + 1} of {bench.rounds}: {entry.name}", file=sys.stderr, flush=True)
                measured[entry.name].append(_in_a_process(entry, bench.steps, cache))
    return {
        "conditions": _conditions(bench, measured),
        "entries": [_summary(entry, measured[entry.name]) for entry in listed],
    }


def _in_a_process(entry: Entry, steps: int, cache: str) -> dict:
    """Runs `_time` in a process that has the hardware to itself. Raises LaneformerError if it fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(entry, steps, cache, theirs))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        result = f"its process ended with exit code {process.exitcode}"
    process.join()
    if isinstance(result, str):
        raise LaneformerError(f"{entry.name}: {result}")
    return result


def _worker(entry: Entry, steps: int, cache: str, results) -> None:
    try:
        jax.config.update("jax_compilation_cache_dir", cache)
        results.send(_time(entry, steps))
    except (LaneformerError, jax.errors.JaxRuntimeError) as error:
        results.send(" ".join(str(error).split())[:2000])


def _time(entry: Entry, steps: int) -> dict:
    """Times `steps` warm steps of the entry's first phase on random tokens, and waits for each step.

    Returns wall and processor seconds per step, seconds of the first step, and the hardware used.
    """
    config = entry.config
    if config.mesh.host_devices:
        if not entry.dense:
            lf.use_host_devices(config.mesh.host_devices)
        keep_freed_memory()  # as the training loop does
    data = config.phases[0].data
    ids = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (data.batch_size, data.sequence_length + 1), np.int32
    )
    step, mesh, precision = (_dense if entry.dense else _ours)(config, ids)
    started = time.perf_counter()
    step()
    compiled = time.perf_counter() - started
    for _ in range(WARMUP):
        step()
    seconds, processor_seconds = [], []
    for _ in range(steps):
        started, used = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - started)
        processor_seconds.append(time.process_time() - used)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "compile_seconds": compiled,
        "mesh": mesh,
        "precision": precision,
        "device": jax.devices()[0].device_kind,
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


def _ours(config: TrainConfig, ids: np.ndarray) -> tuple[Callable, dict[str, int], str]:
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane)
    trainer = Trainer(config, config.phases[0], mesh)
    batch, asked = trainer.put_batch(lambda rows: {"ids": ids[rows]}), trainer.put_asked(False)
    state = trainer.init()

    def step():
        nonlocal state
        state, values = trainer.step(state, batch, asked)
        jax.block_until_ready((state, values))

    return step, dict(mesh.shape), trainer.precision.compute


def _dense(config: TrainConfig, ids: np.ndarray) -> tuple[Callable, dict[str, int], str]:
    dtype = config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    phase = config.phases[0]
    train = dense_step(phase.model, dtype, phase.optimizer.learning_rate, phase.optimizer.clip_norm)
    batch = jax.device_put(ids)
    return lambda: float(train(batch)), {}, dtype


def _summary(entry: Entry, rounds: list[dict]) -> dict:
    """Median and quartiles over the steps of all rounds, and the rates that follow from the median."""
    config, first = entry.config, rounds[0]
    phase = config.phases[0]
    seconds = sorted(s for result in rounds for s in result["seconds"])
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    flops = train_flops_per_token(phase.model, phase.data.sequence_length) * phase.tokens_per_step / quartiles[1]
    devices, peak = max(1, int(np.prod(list(first["mesh"].values()) or 1))), peak_flops(first["device"])
    return {
        "name": entry.name,
        "layout": "dense" if entry.dense else config.model.layout,
        "parameters": lf.parameter_count(config.model),
        "mesh": first["mesh"],
        "precision": first["precision"],
        "batch": phase.data.batch_size,
        "sequence": phase.data.sequence_length,
        "accumulate": 1 if entry.dense else phase.accumulate,
        "remat": "none" if entry.dense else config.remat,
        "step_seconds": {
            "median": quartiles[1],
            "quartiles": quartiles[::2],
            "all": [result["seconds"] for result in rounds],
        },
        "processor_seconds": statistics.median(s for result in rounds for s in result["processor_seconds"]),
        "steps_per_second": 1 / quartiles[1],
        "tokens_per_second": phase.tokens_per_step / quartiles[1],
        "model_flops_per_second": flops,
        "mfu": None if peak is None else flops / (devices * peak),
        "compile_seconds": first["compile_seconds"],
        "peak_bytes": first["peak_bytes"],
    }


def _conditions(bench: Bench, measured: dict[str, list[dict]]) -> dict:
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    first = next(iter(measured.values()))[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": first["device"],
        "processor": _processor(),
        "python": platform.python_version(),
        **{package.__name__: package.__version__ for package in (jax, flax, optax)},
        "commit": (
            git("rev-parse", "--short", "HEAD")
            + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
        ),
        "steps": bench.steps,
        "rounds": bench.rounds,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def table(result: dict) -> str:
    """The figures as Markdown."""
    c = result["conditions"]
    lines = [
        (
            f"{c['date']}, {c['device']} ({c['processor']}), jax {c['jax']}, flax {c['flax']}, Python {c['python']},"
            f" commit {c['commit']}; {c['rounds']} processes per row, in turn, {c['steps']} warm steps each; medians"
            " (quartiles). Processor: time of all its cores per step, which other work on the machine changes less."
        ),
        "",
        "| | mesh | products | batch | ms per step | processor ms | tokens/s | model GFLOP/s | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for e in result["entries"]:
        mesh = " x ".join(f"{axis} {size}" for axis, size in e["mesh"].items()) or "1 device"
        low, high = (1000 * s for s in e["step_seconds"]["quartiles"])
        lines.append(
            f"| {e['name']} | {mesh} | {e['precision']} | {e['batch']} x {e['sequence']} |"
            f" {1000 * e['step_seconds']['median']:,.0f} ({low:,.0f}-{high:,.0f}) |"
            f" {1000 * e['processor_seconds']:,.0f} | {e['tokens_per_second']:,.0f} |"
            f" {e['model_flops_per_second'] / 1e9:,.0f} | {'' if e['mfu'] is None else format(e['mfu'], '.1%')} |"
        )
    return "\n".join(lines)


def report(bench: Bench) -> str:
    """Measures, writes --json, and returns the table."""
    if bench.json is not None:  # fail before measuring if the file cannot be written
        with writing(bench.json, "name another file with --json"), open(bench.json, "a"):
            pass
    result = run(bench)
    if bench.json is not None:
        record = {**result, "asked": asdict(bench)}
        bench.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return table(result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake."""
    return run_command(report, Bench, "python -m train.bench", arguments)


if __name__ == "__main__":
    end(main())
