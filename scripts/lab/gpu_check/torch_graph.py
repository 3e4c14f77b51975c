"""python -m scripts.gpu_check.torch_graph: time per token of PyTorch on one GPU, eager and as a CUDA graph.

A baseline for the decode kernel: a plain Llama that reads as many bytes of weights per token as a recipe's model, with
a cache of random numbers. It needs torch, and no network.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.machine import TELLING, nvidia
from laneformer.infer.engine.sources import recipe_config
from laneformer.weights import weight_bytes_per_token

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

NORM_EPS, ROPE_THETA = 1e-5, 1e4


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the time per token of a plain Llama in PyTorch with the bytes of a recipe's model."""

    recipe: tyro.conf.Positional[str] = "laneformer_2b"
    """Model whose bytes are read, named as for `python -m train`."""
    context: int = 64
    """Filled positions of the cache at the start."""
    tokens: int = 256
    """Tokens to generate in each run."""
    runs: int = 3
    """Measured runs, after one that is not measured."""
    device: str = "cuda"
    """Device of PyTorch; only cuda has graphs."""
    compiled: bool = False
    """Measure also torch.compile under a CUDA graph, which compiles for about a minute."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the figures to."""


class Sizes(NamedTuple):
    """Sizes of the Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Sizes":
        """The sizes of a dense model. Its lanes become one: each has an equal share of every matrix. Raises ConfigError
        for other models.
        """
        sizes = cls(
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
            config.intermediate_size or 0,
            config.vocab_size,
        )
        if abs(2 * sizes.weights / weight_bytes_per_token(config) - 1) > 0.01:
            raise ConfigError(
                f"a plain Llama of the model's sizes reads {2 * sizes.weights:,} bytes per token, the model"
                f" {weight_bytes_per_token(config):,.0f}; choose the recipe of a dense model"
            )
        return sizes

    @property
    def weights(self) -> int:
        """Weights that a token reads."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ff) + self.hidden * self.vocab


class Llama:
    """The model with its cache. A step reads and writes only arrays with fixed addresses, as a CUDA graph requires."""

    def __init__(self, sizes: Sizes, options: Options):
        self.sizes, self.device, s = sizes, options.device, sizes
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.layers = [
            tuple(
                self._normal(*shape)
                for shape in ((q + 2 * kv, s.hidden), (s.hidden, q), (2 * s.ff, s.hidden), (s.hidden, s.ff))
            )
            for _ in range(s.layers)
        ]
        self.embedding, self.head = self._normal(s.vocab, s.hidden), self._normal(s.vocab, s.hidden)
        self.gain = torch.ones(s.hidden, device=self.device, dtype=torch.bfloat16)
        room = options.context + options.tokens + 1
        self.caches = [[self._normal(1, s.kv_heads, room, s.head_dim) for _ in "kv"] for _ in range(s.layers)]
        self.places = torch.arange(room, device=self.device)
        frequencies = ROPE_THETA ** (-torch.arange(0, s.head_dim, 2, device=self.device) / s.head_dim)
        angles = torch.outer(self.places.float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        self.token = torch.ones(1, dtype=torch.long, device=self.device)
        self.position = torch.full((1,), options.context, dtype=torch.long, device=self.device)

    def _normal(self, *shape: int) -> Any:
        return 0.02 * torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def step(self) -> None:
        """One token: reads `token` at `position`, and writes the next one."""
        s = self.sizes
        x, cos, sin = F.embedding(self.token, self.embedding), self.cos[self.position], self.sin[self.position]
        mask = (self.places <= self.position).view(1, 1, 1, -1)
        for (qkv, out, gate_up, down), (keys, values) in zip(self.layers, self.caches, strict=True):
            heads = F.linear(self._norm(x), qkv).view(-1, s.head_dim)
            q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads])
            keys.index_copy_(2, self.position, _rotate(k, cos, sin).view(1, s.kv_heads, 1, s.head_dim))
            values.index_copy_(2, self.position, v.reshape(1, s.kv_heads, 1, s.head_dim))
            # Query heads that share keys are passed as query positions, so that no key is repeated.
            grouped = _rotate(q, cos, sin).view(1, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = x + F.linear(attended.reshape(1, -1), out)
            gate, up = F.linear(self._norm(x), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        self.token.copy_(F.linear(self._norm(x), self.head).argmax(-1))
        self.position.add_(1)

    def _norm(self, x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], self.gain, NORM_EPS)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, after three that compile and choose kernels."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(model: Llama, step: Callable[[], None], options: Options) -> list[float]:
    """Seconds per token of each run, by the host's clock."""
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    found = []
    for _ in range(options.runs + 1):
        model.position.fill_(options.context)
        wait()
        start = time.perf_counter()
        for _ in range(options.tokens):
            step()
        wait()
        found.append((time.perf_counter() - start) / options.tokens)
    return found[1:]


def run(options: Options) -> str:
    """Measures every way to run the model; returns a line for each. Raises ConfigError without torch or the device."""
    if torch is None:
        raise ConfigError("torch is not installed; install it to measure this baseline")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("PyTorch found no GPU; run this on a machine with a GPU")
    records = []
    with torch.no_grad():
        model = Llama(Sizes.of(recipe_config(options.recipe)), options)
        ways = {"eager": lambda: model.step}
        if options.device == "cuda":
            ways["CUDA graph"] = lambda: captured(model.step)
            if options.compiled:
                compiled = torch.compile(model.step, mode="max-autotune-no-cudagraphs")
                ways["compiled, CUDA graph"] = lambda: captured(compiled)
        for name, make in ways.items():
            records.append(record(name, model, measure(model, make(), options), options))
            if options.json:  # after each way, because a later one may be interrupted
                options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return "\n".join(f"{r['way']}: {r['us_per_token']['median']:.1f} us per token, {r['device']}" for r in records)


def record(way: str, model: Llama, seconds: list[float], options: Options) -> dict:
    times, known = [1e6 * each for each in seconds], nvidia() if options.device == "cuda" else {}
    return {
        "test": "torch",
        "way": way,
        "us_per_token": {"median": statistics.median(times), "min": min(times), "max": max(times)},
        "bytes_per_token": 2 * model.sizes.weights,
        "context": options.context,
        "tokens": options.tokens,
        "runs": options.runs,
        "recipe": options.recipe,
        "weights": "random bfloat16",
        "batch": 1,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        **{name: known.get(name) for name in TELLING},
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_check.torch_graph", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
