"""Measures the latency of decoding: whole requests at batch 1, several engines in turn, the memory's speed between
them.

Every figure says where its clock stood. At the engine's host a token has a time when it has arrived there, alone or in
a group; backend cpu also writes down when its kernel drew each one.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import custom_calls
from infer.engine.engine import Engine
from infer.engine.generation import Result
from infer.sampling import Sampling
from laneformer.errors import ConfigError
from laneformer.weights import kv_bytes_per_token, weight_bytes_per_token

WINDOW = 256  # tokens over which the fastest stretch is looked for
MANY = 10_000  # samples from which p99.9 is told
READS = 5  # passes over the memory on each side of a run, of which the median counts
LARGEST_READ = 4 << 30  # bytes: far more than any cache holds, and room is left for the model


@dataclass(frozen=True)
class Case:
    """What is measured: one size of request, so often."""

    prompt_tokens: int
    output_tokens: int
    runs: int
    warmup_runs: int
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    tokens_per_dispatch: int | None = None
    """None: the engine's choice."""

    def check(self, context: int) -> None:
        """Raises ConfigError unless it can be measured on a model of that context."""
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("runs", 1), ("warmup_runs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: give at least {least}")
        if self.tokens_per_dispatch is not None and self.tokens_per_dispatch < 1:
            raise ConfigError(f"tokens_per_dispatch = {self.tokens_per_dispatch}: give at least 1")
        if self.prompt_tokens + self.output_tokens > context:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} and {self.output_tokens} output tokens are more than the model's"
                f" context of {context}: choose a smaller --context or --output-tokens"
            )

    def prompt(self, number: int, vocabulary: int) -> np.ndarray:
        """Random ids, of the sampling's seed and the run's number."""
        return np.random.default_rng([self.sampling.seed, number]).integers(0, vocabulary, self.prompt_tokens, np.int32)


@dataclass(frozen=True)
class Run:
    """One request. Times in seconds from its acceptance, at the engine's host."""

    tokens: tuple[int, ...]
    arrivals: np.ndarray
    """Of each dispatch, float64 [dispatches]."""
    counts: np.ndarray
    """Tokens in each dispatch; the first one is alone."""
    drawn: np.ndarray | None
    """When the kernel drew each token, float64 [tokens], from the first of them; None where nobody knows."""
    bandwidth: float | None
    """Bytes per second that the machine's memory gave, mean of before and after; None where it cannot be measured."""
    read_pass: float | None
    """Seconds in which the backend's workers read a token's weights alone, mean of before and after; None for backends
    that cannot.
    """

    @classmethod
    def of(cls, result: Result, drawn: np.ndarray | None, bandwidth: float | None, read_pass: float | None) -> "Run":
        counts = np.array(result.tokens_per_dispatch)
        arrivals = np.array(result.token_times)[np.cumsum(counts) - 1]
        return cls(result.tokens, arrivals, counts, None if drawn is None else drawn - drawn[0], bandwidth, read_pass)

    @property
    def seconds(self) -> float:
        """Of the whole request."""
        return float(self.arrivals[-1])

    @property
    def rate(self) -> float:
        """Tokens per second, sustained: after the first, until the last, (N - 1) / (t_N - t_1)."""
        return float((len(self.tokens) - self.counts[0]) / (self.arrivals[-1] - self.arrivals[0]))

    @property
    def gaps(self) -> np.ndarray | None:
        """Seconds from each token to the next, where each has a time of its own."""
        if self.drawn is not None:
            return np.diff(self.drawn)
        return np.diff(self.arrivals) if (self.counts == 1).all() else None


@dataclass
class Measured:
    """An engine and its runs of one case."""

    engine: Engine
    case: Case
    memory: "Memory"
    first_request: float
    """Seconds of the first short request of this size, compilation included."""
    second_request: float
    """The same again."""
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)
    load_after: tuple[float, ...] = ()
    runs: list[Run] = field(default_factory=list)


def measure(engines: Sequence[Engine], case: Case, say: Callable[[str], None]) -> list[Measured]:
    """Runs the case on each engine, in turn, with the same prompts. say: is told of the progress. Raises
    ConfigError.
    """
    for engine in engines:
        case.check(engine.config.max_position_embeddings)
    measured = []
    for engine in engines:
        say(f"prompt {case.prompt_tokens}, {engine.backend}: first request")
        memory = Memory(engine, bytes_per_token(engine, case))
        measured.append(
            Measured(engine, case, memory, *(engine.warmup(case.prompt_tokens, case.output_tokens) for _ in range(2)))
        )
    for number in range(case.warmup_runs + case.runs):
        warm = number < case.warmup_runs
        which = (
            f"warm-up {number + 1} of {case.warmup_runs}"
            if warm
            else f"run {number + 1 - case.warmup_runs} of {case.runs}"
        )
        for one in measured:
            run = _run(one.engine, case, number, None if warm else one.memory)
            say(f"prompt {case.prompt_tokens}, {one.engine.backend}: {which}, {run.rate:,.1f} tokens/s")
            if not warm:
                one.runs.append(run)
    for one in measured:
        one.load_after = os.getloadavg()
    return measured


def _run(engine: Engine, case: Case, number: int, memory: "Memory | None") -> Run:
    prompt = case.prompt(number, engine.config.vocab_size)
    before = memory.read() if memory else (None, None)
    result = engine.generate(
        prompt,
        max_new_tokens=case.output_tokens,
        sampling=case.sampling,
        stop_tokens=(),
        tokens_per_dispatch=case.tokens_per_dispatch,
    ).result
    after = memory.read() if memory else (None, None)
    drawn = None if engine.session is None else engine.session.drawn(0, len(result.tokens)).times
    return Run.of(result, drawn, *(None if b is None else (b + a) / 2 for b, a in zip(before, after, strict=True)))


class Memory:
    """How fast this machine reads as many bytes as an engine reads for one token."""

    def __init__(self, engine: Engine, num_bytes: float):
        self._session = engine.session
        self.num_bytes = min(int(num_bytes), LARGEST_READ)
        self.unavailable = (
            "not measured on this kind of device" if jax.default_backend() != "cpu" else custom_calls.unavailable()
        )
        try:
            self.threads = 0 if self.unavailable else engine.conditions.get("threads") or custom_calls.default_threads()
        except custom_calls.NativeError as error:  # the library is compiled on first use, if it was not before
            self.unavailable, self.threads = str(error), 0

    @property
    def source(self) -> str:
        """How the bandwidth was measured."""
        return (
            f"custom_calls.read_bandwidth: {self.threads} threads over {self.num_bytes:,} bytes, before and after"
            " each run"
        )

    def read(self) -> tuple[float | None, float | None]:
        """Bytes per second over a buffer, and seconds over the backend's packed weights; None for what cannot
        be read.
        """
        buffer = (
            None if self.unavailable else _median(lambda: custom_calls.read_bandwidth(self.num_bytes, self.threads))
        )
        return buffer, None if self._session is None else _median(self._session.read_pass)


def _median(read: Callable[[], float]) -> float:
    return float(np.median([read() for _ in range(READS)]))


def bytes_per_token(engine: Engine, case: Case) -> float:
    """Weights, and keys and values at the mean context of the case, each in the dtype that the backend holds it in."""
    return weight_bytes(engine) + kv_bytes(engine, case)


def weight_bytes(engine: Engine) -> float:
    """Of weights that decoding one token reads."""
    return weight_bytes_per_token(engine.config, jnp.dtype(engine.conditions["weights_dtype"]).itemsize)


def kv_bytes(engine: Engine, case: Case) -> float:
    """Of keys and values that decoding one token reads and writes, the mean over the case's tokens."""
    size = jnp.dtype(engine.conditions["kv_dtype"]).itemsize
    contexts = range(
        case.prompt_tokens, case.prompt_tokens + case.output_tokens - 1
    )  # the first token is the prefill's
    return float(np.mean([kv_bytes_per_token(engine.config, context, size) for context in contexts]))


def mean_context(case: Case) -> float:
    """Earlier positions that a decoded token sees in a full layer, on the average."""
    return case.prompt_tokens + (case.output_tokens - 2) / 2


def summary(samples) -> dict[str, float | None]:
    """Percentiles (linear between samples), mean, standard deviation and how many there are; p99.9 from MANY on."""
    samples = np.asarray(samples, np.float64)
    told = {f"p{p}": float(np.percentile(samples, p)) for p in (50, 90, 95, 99)}
    told["p99.9"] = float(np.percentile(samples, 99.9)) if samples.size >= MANY else None
    return told | {
        "min": float(samples.min()),
        "max": float(samples.max()),
        "mean": float(samples.mean()),
        "std": float(samples.std()),
        "n": samples.size,
    }


def peak(arrivals: np.ndarray, counts: np.ndarray, window: int = WINDOW) -> tuple[float, int] | None:
    """Tokens per second of the fastest stretch from one arrival to another with at least `window` tokens between, and
    how many those are.

    None where there are too few tokens.
    """
    so_far = np.cumsum(counts)
    begins = np.arange(len(so_far))
    ends = np.searchsorted(so_far, so_far + window)
    begins, ends = begins[ends < len(so_far)], ends[ends < len(so_far)]
    if not len(begins):
        return None
    tokens = so_far[ends] - so_far[begins]
    rates = tokens / (arrivals[ends] - arrivals[begins])
    best = int(np.argmax(rates))
    return float(rates[best]), int(tokens[best])


def share(samples: Sequence[float]) -> dict | None:
    """A part of a bound that each run reached."""
    return {"median": float(np.median(samples)), "min": min(samples), "samples": list(samples)} if samples else None


def first_difference(a: Sequence[Run], b: Sequence[Run]) -> int | None:
    """The smallest index of a token in which runs of the same prompts differ; None if none does."""
    firsts = [
        n for x, y in zip(a, b, strict=True) for n, (s, t) in enumerate(zip(x.tokens, y.tokens, strict=True)) if s != t
    ]
    return min(firsts, default=None)
