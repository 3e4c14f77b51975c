"""What the driver and the engines' programs say to each other. Standard library only: every environment imports it.

A program gets its task as JSON on the command line. When its model is loaded it says {"ready": conditions}, and then
answers every line `decode PROMPT TOKENS` on its standard input with {"gaps": [...], "cpu_seconds": ..., "peak_bytes":
...}, until that ends: seconds from each token to the next, and of the process its processor time for it and its
resident memory at the peak so far. What libraries print goes to standard error.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

XLA, CPP_WRAPPER = "xla", "cpp_wrapper"  # options
PR_SET_PDEATHSIG = 1
LONGEST = 131_072  # context that files of models say, whatever is asked of them


@dataclass(frozen=True)
class Shape:
    """A dense Llama: with random weights nothing else of a model matters to its speed."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float

    @property
    def name(self) -> str:
        """For files made of it."""
        sizes = "-".join(f"{name}{value}" for name, value in dataclasses.asdict(self).items() if type(value) is int)
        return f"{sizes}{'-tied' if self.tied else ''}"


@dataclass(frozen=True)
class Task:
    """What a program loads."""

    checkpoint: str
    """The recipe or folder that the shape is of."""
    shape: Shape
    positions: int
    """Room in the cache."""
    threads: int
    folder: str
    """Files made for this and later runs go there."""
    option: str = ""
    """One word that the program knows."""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Decoder(Protocol):
    """A loaded model."""

    conditions: dict
    """versions, weights, compute and kv (dtypes), threads, and what else its speed depends on."""

    def decode(self, prompt: int, tokens: int) -> list[float]:
        """Times of time.perf_counter at which each of `tokens` was drawn, greedily, one after another, after `prompt`
        tokens.

        What stands in the cache from an earlier request of the same size may stay there, so that only the prompt's last
        token is computed.
        """


def serve(load: Callable[[Task], Decoder]) -> None:
    """Loads the model of the task on the command line and answers requests until standard input ends."""
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # a stopped process would not see that its driver was killed
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(message: dict) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    began = time.perf_counter()
    model = load(Task.read(sys.argv[1]))
    tell(
        {"ready": model.conditions | {"load_seconds": time.perf_counter() - began, "python": platform.python_version()}}
    )
    for line in sys.stdin:
        prompt, tokens = (int(word) for word in line.split()[1:])
        cpu = time.process_time()
        times = model.decode(prompt, tokens)
        tell(
            {
                "gaps": [b - a for a, b in itertools.pairwise(times)],
                "cpu_seconds": time.process_time() - cpu,
                "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        )
