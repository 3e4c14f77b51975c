"""Our engine in the same harness, with random weights: the decode kernel with bfloat16 weights, the same weights in
12 bits (option "bf12") or quantized ones; with option "xla", XLA in float32. Experts of a mixture keep the format in
which they are published.
"""

import dataclasses
import os
import time
from collections.abc import Iterable

import jax
import jaxlib
import numpy as np

from laneformer.commands.lab.peers.protocol import BF12, XLA, Task, serve
from laneformer.config import ModelConfig
from laneformer.infer.engine.backend import Request
from laneformer.infer.engine.cpu import CpuBackend
from laneformer.infer.engine.sources import RandomSource, is_recipe, model_config, recipe_model
from laneformer.infer.engine.xla import XlaBackend
from laneformer.infer.sampling import Sampling
from laneformer.precision import Precision
from laneformer.recipes.models import PackedModel

FACTS = ("bf12_weights", "bf12_exceptions", "quantized_formats", "quantized_weights", "quantized_bytes")
BY_DIGITS = ("int8", "int4", "mxfp4", "nvfp4")  # formats whose products are of integers, docs/decode_kernel.md
DIGITS = {"float32": "23 bits (3 digits)", "bfloat16": "16 bits (2 digits)"}


def full_attention(config: ModelConfig) -> ModelConfig:
    """The model with full attention in every layer, because the other engines lack sliding windows. A mixture of
    experts keeps its windows, because llama.cpp supports them there.
    """
    if config.num_experts:
        return config
    return config.replace(sliding_window=None, sliding_window_n_layers=0, unclamped_layers=(), swa_layers=None)


class Ours:
    def __init__(self, task: Task):
        packed = shape_model(task.checkpoint)
        config = full_attention(packed.config)
        if task.option == XLA:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task.threads])  # XLA uses a thread per core
            self._backend = XlaBackend(RandomSource(config, "float32"))
        else:
            weights = BF12 if task.option == BF12 else task.weights
            precision = dataclasses.replace(Precision.default("bfloat16"), compute=task.compute)
            source = RandomSource(config, "bfloat16", precision=precision, formats=packed.formats)
            serves = {"parallel": task.slots, "speculation": None if task.slots > 1 else 0}
            slowdown = task.most_slowdown
            self._backend = CpuBackend(source, threads=task.threads, weights=weights, most_slowdown=slowdown, **serves)
        self._vocab, self._prompts, c = config.vocab_size, 0, self._backend.conditions
        self.conditions = {
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
            "weights": c["weights_dtype"],
            **{name: c[name] for name in FACTS if name in c},
            "compute": c["compute_dtype"],
            "activations": _activations(task, packed.formats.values()),
            "kv": c["kv_dtype"],
            "threads": c.get("threads", task.threads),
            "load": f"layout {config.layout}, {config.num_lanes} lanes",
            "system": c.get("instructions", c["device"]),
        }

    def decode(self, prompt: int, tokens: int) -> list[float]:
        ids = np.random.default_rng(0).integers(0, self._vocab, prompt, np.int32)  # the same, so computed only once
        times = []
        for chunk in self._backend.start(Request(ids, tokens, Sampling(), stop_tokens=())):
            times += [time.perf_counter()] * len(chunk.tokens)
        return times

    def first(self, prompt: int) -> float:
        self._prompts += 1  # other ids each time
        ids = np.random.default_rng(self._prompts).integers(0, self._vocab, prompt, np.int32)
        start = time.perf_counter()
        next(self._backend.start(Request(ids, 1, Sampling(), stop_tokens=(), cache_prompt=False)))
        return time.perf_counter() - start


def shape_model(shape: str) -> PackedModel:
    """The model of a --shape. Raises ConfigError or CheckpointError."""
    return recipe_model(shape) if is_recipe(shape) else PackedModel(model_config(shape))


def _activations(task: Task, formats: Iterable[str]) -> str:
    """Text about how activations are rounded before products."""
    by_digits = DIGITS[task.compute]
    if named := sorted(set(BY_DIGITS).intersection(formats)):
        return f"{task.compute}; {by_digits} for {', '.join(named)}"
    return by_digits if task.weights in BY_DIGITS else task.compute


if __name__ == "__main__":
    serve(Ours)
