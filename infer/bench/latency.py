"""Measures the latency of decoding: whole requests at batch 1, on several engines in turn. Between the requests it
measures how fast the machine reads and multiplies.

Each figure names its measurement point. The engine's host records when tokens arrive, alone or in a group. Native
backends also record when the kernel drew each token.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer import custom_calls
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.generation import Result
from laneformer.infer.sampling import Sampling
from laneformer.weights import kv_bytes_per_token, weight_bytes_per_token

WINDOW = 256  # tokens of the fastest stretch
MANY = 10_000  # samples required for p99.9
PASSES = 5  # measurements of the machine before and after each run; the median is used
LARGEST_READ = 4 << 30  # bytes; far larger than any cache, and leaves room for the model
MULTIPLY_ADDS = 1 << 28  # per thread in a pass, which takes some milliseconds


class Text(NamedTuple):
    """A known text to measure: the answer is forced to it, regardless of what the model would draw."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    answer: tuple[int, ...]
    """Token ids of the answer."""
    source: str
    """Description of the origin of the text, for records."""


@dataclass(frozen=True)
class Case:
    """A measurement: a size of request and a number of runs."""

    prompt_tokens: int
    output_tokens: int
    runs: int
    warmup_runs: int
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    tokens_per_dispatch: int | None = None
    """Number of tokens per dispatch; None for the engine's choice."""
    text: Text | None = None
    """Text to measure instead of random prompts and drawn answers."""

    def check(self, context: int) -> None:
        """Raises ConfigError for a value outside its range, and if the request exceeds the model's context."""
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("runs", 1), ("warmup_runs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.tokens_per_dispatch is not None and self.tokens_per_dispatch < 1:
            raise ConfigError(f"tokens_per_dispatch must be at least 1, got {self.tokens_per_dispatch}")
        if self.prompt_tokens + self.output_tokens > context:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} and {self.output_tokens} output tokens exceed the model's context of"
                f" {context}: choose a smaller --context or --output-tokens"
            )

    @property
    def prompts(self) -> str:
        """Description of the prompts, for records."""
        return f"random token ids, seed {self.sampling.seed}" if self.text is None else self.text.source

    def prompt(self, number: int, vocabulary: int) -> np.ndarray:
        """Token ids of the prompt of a run, int32 [prompt_tokens]: those of the text, or random ids that depend only on
        the seed and the number of the run.
        """
        if self.text is not None:
            return np.array(self.text.prompt, np.int32)
        return np.random.default_rng([self.sampling.seed, number]).integers(0, vocabulary, self.prompt_tokens, np.int32)


class Speeds(NamedTuple):
    """Speeds of the machine, averaged over measurements before and after a run; None for a speed that cannot be
    measured.
    """

    bandwidth: float | None = None
    """Bytes/s that the engine's threads read."""
    multiply_adds: float | None = None
    """Float32 multiply-adds/s that the engine's threads do in registers."""
    read_pass: float | None = None
    """Seconds that the backend's workers take to read the weights of a token without computing; None for backends
    without workers.
    """

    @classmethod
    def mean(cls, before: "Speeds", after: "Speeds") -> "Speeds":
        """The mean of two measurements."""
        return cls(*(None if b is None or a is None else (b + a) / 2 for b, a in zip(before, after, strict=True)))


@dataclass(frozen=True)
class Run:
    """One measured request. Times are in seconds from the acceptance of the request, at the engine's host."""

    tokens: tuple[int, ...]
    arrivals: np.ndarray
    """Arrival time of each dispatch, float64 [dispatches]."""
    counts: np.ndarray
    """Number of tokens in each dispatch, int [dispatches]; the first token is a dispatch alone."""
    drawn: np.ndarray | None
    """Seconds from the first token until the kernel drew each token, float64 [tokens]; None if unknown."""
    speeds: Speeds = Speeds()  # noqa: RUF009  a tuple
    """Speeds of the machine around the run."""
    drafting: custom_calls.Drafting | None = None
    """Counts of passes and drafts; None on backends without drafts."""

    @classmethod
    def of(cls, result: Result, drawn: np.ndarray | None, speeds: Speeds) -> "Run":
        """The run of a result. drawn: time at which the kernel drew each token, on any clock, float64 [tokens]."""
        counts = np.array(result.tokens_per_dispatch)
        arrivals = np.array(result.token_times)[np.cumsum(counts) - 1]
        since_first = None if drawn is None else drawn - drawn[0]
        return cls(result.tokens, arrivals, counts, since_first, speeds, result.drafting)

    @property
    def seconds(self) -> float:
        """Time of the whole request."""
        return float(self.arrivals[-1])

    @property
    def rate(self) -> float:
        """Sustained tokens per second, from the first token to the last: (N - 1) / (t_N - t_1)."""
        return float((len(self.tokens) - self.counts[0]) / (self.arrivals[-1] - self.arrivals[0]))

    @property
    def gaps(self) -> np.ndarray | None:
        """Seconds from each token to the next; None if tokens share arrival times."""
        if self.drawn is not None:
            return np.diff(self.drawn)
        return np.diff(self.arrivals) if (self.counts == 1).all() else None


@dataclass
class Measured:
    """An engine and its runs of one case."""

    engine: Engine
    case: Case
    machine: "Machine"
    first_request: float
    """Seconds that the first short request of this size took, including compilation."""
    second_request: float
    """Seconds that the same request took again."""
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)
    load_after: tuple[float, ...] = ()
    runs: list[Run] = field(default_factory=list)


def measure(engines: Sequence[Engine], case: Case, progress: Callable[[str], None]) -> list[Measured]:
    """Runs the case on the engines in turn, with the same prompts. progress: called with each line of progress. Raises
    ConfigError for a case that does not fit an engine.
    """
    for engine in engines:
        case.check(engine.config.max_position_embeddings)
    measured = []
    for engine in engines:
        progress(f"prompt {case.prompt_tokens}, {engine.backend}: first request")
        machine = Machine(engine, bytes_per_token(engine, case))
        first, second = (engine.warmup(case.prompt_tokens, case.output_tokens) for _ in range(2))
        measured.append(Measured(engine, case, machine, first, second))
    for number in range(case.warmup_runs + case.runs):
        warm = number < case.warmup_runs
        which = (
            f"warm-up {number + 1} of {case.warmup_runs}"
            if warm
            else f"run {number + 1 - case.warmup_runs} of {case.runs}"
        )
        for one in measured:
            run = _run(one.engine, case, number, None if warm else one.machine)
            progress(f"prompt {case.prompt_tokens}, {one.engine.backend}: {which}, {run.rate:,.1f} tokens/s")
            if not warm:
                one.runs.append(run)
    for one in measured:
        one.load_after = os.getloadavg()
    return measured


def _run(engine: Engine, case: Case, number: int, machine: "Machine | None") -> Run:
    """Runs one request. machine: measures the speeds around it; None for warm-up runs."""
    prompt = case.prompt(number, engine.config.vocab_size)
    before = machine.speeds() if machine else Speeds()
    result = engine.generate(
        prompt,
        max_new_tokens=case.output_tokens,
        sampling=case.sampling,
        stop_tokens=(),
        tokens_per_dispatch=case.tokens_per_dispatch,
        forced=() if case.text is None else case.text.answer,
    ).result
    after = machine.speeds() if machine else Speeds()
    drawn = None if engine.session is None else engine.session.drawn(0, len(result.tokens)).times
    return Run.of(result, drawn, Speeds.mean(before, after))


class Machine:
    """Measures the bounds of an engine's speed: how fast this machine reads the number of bytes that the engine reads
    per token, and how fast it multiplies.
    """

    def __init__(self, engine: Engine, num_bytes: float):
        """num_bytes: bytes that the engine reads per token."""
        self._session = engine.session
        self.num_bytes = min(int(num_bytes), LARGEST_READ)
        self.unavailable = (
            "not measured on this kind of device" if jax.default_backend() != "cpu" else custom_calls.unavailable()
        )
        try:
            self.threads = 0 if self.unavailable else engine.conditions.get("threads") or custom_calls.default_threads()
        except custom_calls.NativeError as error:  # the library may be compiled on first use
            self.unavailable, self.threads = str(error), 0

    @property
    def sources(self) -> tuple[str, str]:
        """Descriptions of how the bandwidth and the multiply-adds were measured."""
        return (
            f"custom_calls.read_bandwidth: {self.threads} threads over {self.num_bytes:,} bytes, before and after"
            " each run",
            f"custom_calls.arithmetic_peak: {self.threads} threads, float32 in registers, before and after each run",
        )

    def speeds(self) -> Speeds:
        """Measures each speed as the median of PASSES passes: over a buffer, in registers, and over the backend's
        packed weights.
        """
        read_pass = None if self._session is None else _median(self._session.read_pass)
        if self.unavailable:
            return Speeds(read_pass=read_pass)
        return Speeds(
            _median(lambda: custom_calls.read_bandwidth(self.num_bytes, self.threads)),
            _median(lambda: custom_calls.arithmetic_peak(MULTIPLY_ADDS, self.threads)),
            read_pass,
        )


def _median(measure: Callable[[], float]) -> float:
    return float(np.median([measure() for _ in range(PASSES)]))


def bytes_per_token(engine: Engine, case: Case) -> float:
    """Bytes read per token: weights, keys and values, in the backend's dtypes, averaged over the tokens of the case."""
    return weight_bytes(engine) + kv_bytes(engine, case)


def weight_bytes(engine: Engine) -> float:
    """Bytes of weights that decoding one token reads."""
    return packed_weight_bytes(engine.config, engine.conditions["weights_dtype"], engine.conditions)


def packed_weight_bytes(config: ModelConfig, dtype: str, facts: Mapping[str, Any]) -> float:
    """Bytes of weights read per token. dtype: dtype of weights in no other format. facts: the conditions of a backend.
    They count the weights in 12 bits, their exceptions (each takes another 4 bytes in a list), and the quantized
    weights with their bytes.
    """
    size = jnp.dtype(dtype).itemsize
    quantized = facts.get("quantized_bytes", 0) - size * facts.get("quantized_weights", 0)
    saved = facts.get("bf12_weights", 0) * (size - FORMATS["bf12"].bytes) - 4 * facts.get("bf12_exceptions", 0)
    return weight_bytes_per_token(config, size) - saved + quantized


def kv_bytes(engine: Engine, case: Case) -> float:
    """Bytes of keys and values that decoding one token reads and writes, averaged over the tokens of the case."""
    size = jnp.dtype(engine.conditions["kv_dtype"]).itemsize
    # The prefill draws the first token, so it does not count.
    contexts = range(case.prompt_tokens, case.prompt_tokens + case.output_tokens - 1)
    return float(np.mean([kv_bytes_per_token(engine.config, context, size) for context in contexts]))


def mean_context(case: Case) -> float:
    """Mean number of earlier positions that a decoded token attends to in a full layer."""
    return case.prompt_tokens + (case.output_tokens - 2) / 2


def summary(samples) -> dict[str, float | None]:
    """Percentiles (linear between samples), extremes, mean, standard deviation and number of samples. p99.9 is None for
    fewer than MANY samples.
    """
    samples = np.asarray(samples, np.float64)
    percentiles: dict[str, float | None] = {f"p{p}": float(np.percentile(samples, p)) for p in (50, 90, 95, 99)}
    percentiles["p99.9"] = float(np.percentile(samples, 99.9)) if samples.size >= MANY else None
    return percentiles | {
        "min": float(samples.min()),
        "max": float(samples.max()),
        "mean": float(samples.mean()),
        "std": float(samples.std()),
        "n": samples.size,
    }


def peak(arrivals: np.ndarray, counts: np.ndarray, window: int = WINDOW) -> tuple[float, int] | None:
    """Tokens per second of the fastest stretch of at least `window` tokens between two arrivals, and the number of
    tokens in it. None if there are too few tokens.
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
    """Statistics of the share of a bound that each run reached; None without samples."""
    return {"median": float(np.median(samples)), "min": min(samples), "samples": list(samples)} if samples else None


def first_difference(a: Sequence[Run], b: Sequence[Run]) -> int | None:
    """The smallest index of a token in which runs with the same prompts differ; None if no token differs."""
    firsts = [
        n for x, y in zip(a, b, strict=True) for n, (s, t) in enumerate(zip(x.tokens, y.tokens, strict=True)) if s != t
    ]
    return min(firsts, default=None)
