"""The protocol between the driver and the engines' programs. Standard library only: every environment imports it.

A program gets its task as JSON on the command line. It reports {"ready": conditions} when its model is loaded, and then
answers every line on standard input until the input ends. The answer to `decode PROMPT TOKENS` is {"gaps": [...],
"cpu_seconds": ..., "peak_bytes": ...}: seconds from each token to the next, processor time of the request, and peak
resident memory so far. The answer to `first PROMPT` has "seconds", until the first token, instead of "gaps". A program
that serves requests also answers `together`, `copied` and `turn`, with the fields of `Served`. Output of libraries goes
to standard error.
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
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

XLA, CPP_WRAPPER, BF12 = "xla", "cpp_wrapper", "bf12"  # values of Task.option
PR_SET_PDEATHSIG = 1
LONGEST = 131_072  # context length that files of models state, enough for any request


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense Llama or another architecture; with random weights they determine its speed."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Columns of the feed-forward module, or of one expert."""
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    experts: int = 0
    """Experts of each layer that has experts; 0: none."""
    experts_used: int = 0
    """Experts that one token uses."""
    window: int = 0
    """Sliding window of every second layer, starting with the first; 0: full attention in all layers."""
    architecture: str = "llama"
    """Name of the architecture in llama.cpp."""

    @property
    def name(self) -> str:
        """Name for files of this shape."""
        given = dataclasses.asdict(self).items()
        sizes = "-".join(f"{name}{value}" for name, value in given if type(value) is int and value)
        return f"{sizes}{'-tied' if self.tied else ''}"


@dataclass(frozen=True)
class Task:
    """The model that a program loads, and its settings."""

    checkpoint: str
    """Recipe or folder with this shape."""
    shape: Shape
    positions: int
    """Positions in the cache while decoding."""
    threads: int
    folder: str
    """Folder for files that later runs reuse."""
    option: str = ""
    """Option of the program, one word."""
    weights: str = "bfloat16"
    """Format of the matrices, a value of --weights."""
    compute: str = "float32"
    """Dtype of our kernel's products; the other engines choose theirs."""
    longest_prompt: int = 0
    """Tokens of the longest prompt whose first token is measured."""
    model: dict = field(default_factory=dict)
    """Fields of the model's ModelConfig."""
    formats: dict = field(default_factory=dict)
    """Formats of the model's packed matrices, by path."""
    slots: int = 1
    """Concurrent sequences; more than 1 for a program that serves requests."""
    most_slowdown: float = 1.5
    """Option of our engine, see infer/engine/cpu.py."""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Decoder(Protocol):
    """A loaded model."""

    conditions: dict
    """versions, weights, compute and kv (dtypes), threads, and other conditions of its speed; with quantized weights
    also quantized_formats, quantized_weights, quantized_bytes and activations (how activations are rounded).
    """

    def decode(self, prompt: int, tokens: int) -> list[float]:
        """Draws `tokens` greedily after `prompt` tokens; returns the time.perf_counter time of each.

        May reuse the cache of an earlier request of the same size and compute only the prompt's last token.
        """

    def first(self, prompt: int) -> float:
        """Seconds from a request of `prompt` tokens to its first token; nothing of earlier requests is reused."""


class Served(NamedTuple):
    """Time and work of serving requests."""

    seconds: float
    tokens: int
    """Tokens drawn in these seconds; for `turn`, tokens of the prompt that were reused from the cache."""
    passes: int
    """Passes in which the tokens were drawn."""


class Server(Decoder, Protocol):
    """A loaded model that serves requests."""

    def together(self, prompt: int, tokens: int, clients: int) -> Served:
        """Serves `clients` requests at once, each with its own prompt. The time is from first start to last end."""

    def copied(self, file: str, drafts: int) -> Served:
        """Draws a forced answer. Time runs from its first token on.

        file: JSON with token ids of "prompt" and "answer". drafts: most drafts per pass, copied from the text so far;
        -1: as many as save time.
        """

    def turn(self, prompt: int, answer: int, new: int) -> Served:
        """Draws the first token of a second turn, whose prompt is the first prompt, its answer and `new` tokens."""


def serve(load: Callable[[Task], Decoder]) -> None:
    """Loads the model of the task on the command line and answers requests until standard input ends."""
    # A stopped process cannot notice that its driver was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    start = time.perf_counter()
    model = load(Task.read(sys.argv[1]))
    load_seconds = time.perf_counter() - start
    send({"ready": model.conditions | {"load_seconds": load_seconds, "python": platform.python_version()}})
    for line in sys.stdin:
        verb, *sizes = line.split()
        cpu = time.process_time()
        if verb == "first":
            found = {"seconds": model.first(int(sizes[0]))}
        elif verb == "copied":
            found = model.copied(sizes[0], int(sizes[1]))._asdict()
        elif verb != "decode":
            found = getattr(model, verb)(*map(int, sizes))._asdict()
        else:
            times = model.decode(*map(int, sizes))
            found = {"gaps": [b - a for a, b in itertools.pairwise(times)]}
        send(
            found
            | {
                "cpu_seconds": time.process_time() - cpu,
                "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        )
