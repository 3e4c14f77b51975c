"""The protocol between the driver and the engines' programs. Standard library only: every environment imports it.

A program gets its task as JSON on the command line. It reports {"ready": conditions} when its model is loaded, and then
answers every line on standard input, until that ends. To `decode PROMPT TOKENS` the answer is {"gaps": [...],
"cpu_seconds": ..., "peak_bytes": ...}: seconds from each token to the next, processor time of the request, and peak
resident memory so far. To `first PROMPT` it has "seconds", until the first token, in place of the gaps. A program that
serves requests answers `together`, `copied` and `turn` as well, with the fields of `Served`. Output of libraries goes
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

XLA, CPP_WRAPPER, BF12 = "xla", "cpp_wrapper", "bf12"  # options
PR_SET_PDEATHSIG = 1
LONGEST = 131_072  # context length in the files of models, for any request


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense Llama, which decide its speed with random weights, or the same of another architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Of the feed-forward module, or of one expert."""
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    experts: int = 0
    """Of each layer that has them; 0: there are none."""
    experts_used: int = 0
    """By one token."""
    window: int = 0
    """Of every second layer, from the first on; 0: all layers are full."""
    architecture: str = "llama"
    """Its name in llama.cpp."""

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
    """How the matrices are held, a word of --weights."""
    compute: str = "float32"
    """Dtype of our kernel's products; the other engines choose theirs."""
    longest_prompt: int = 0
    """Tokens of the longest prompt whose first token is measured."""
    model: dict = field(default_factory=dict)
    """The fields of its ModelConfig."""
    formats: dict = field(default_factory=dict)
    """Formats of its packed matrices, by path."""
    slots: int = 1
    """Sequences at a time; several for a program that serves requests."""
    most_slowdown: float = 1.5
    """Of our engine: see infer/engine/cpu.py."""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Decoder(Protocol):
    """A loaded model."""

    conditions: dict
    """versions, weights, compute and kv (dtypes), threads, and other conditions of its speed; for quantized weights
    quantized_formats, quantized_weights, quantized_bytes and activations (what they are rounded to).
    """

    def decode(self, prompt: int, tokens: int) -> list[float]:
        """Draws `tokens` greedily after `prompt` tokens; returns the time.perf_counter time of each.

        May reuse the cache of an earlier request of the same size and compute only the prompt's last token.
        """

    def first(self, prompt: int) -> float:
        """Seconds from a request of `prompt` tokens to its first token; nothing of earlier requests is reused."""


class Served(NamedTuple):
    """What serving requests took."""

    seconds: float
    tokens: int
    """That were drawn in these seconds; of a turn, those of the prompt that were not computed."""
    passes: int
    """In which they were drawn."""


class Server(Decoder, Protocol):
    """A loaded model that serves requests."""

    def together(self, prompt: int, tokens: int, clients: int) -> Served:
        """That many clients at once, each with its prompt, from the start of the first to the end of the last."""

    def copied(self, file: str, drafts: int) -> Served:
        """A forced answer, after its first token. file: JSON with token ids of "prompt" and "answer". drafts: most of
        a pass, copied from the text so far; -1 for as many as pay.
        """

    def turn(self, prompt: int, answer: int, new: int) -> Served:
        """The first token of a second turn: its prompt is that of the first one, its answer and `new` tokens."""


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
