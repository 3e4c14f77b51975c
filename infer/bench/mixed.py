"""The report of `bench --mixed`: the gain of several concurrent requests, the parts of the time to the first token, how
a long prompt and running requests slow each other down, the cost of prompt length, and peak against sustained speed.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.generation import Generation

SHORT, LONG = 16, 512  # tokens of prompts
LENGTHS = (64, 512, 4096)
WINDOW = 32  # tokens of the fastest stretch
SETTLED = 8  # tokens that each running request has drawn before a new request arrives
ENOUGH = 4096  # tokens of a request that runs longer than a new request's prompt


class Row(NamedTuple):
    """One line of the report."""

    question: str
    case: str
    figures: str


@dataclass
class _Client:
    """A request whose tokens are read on a separate thread. Times are on the clock of time.perf_counter."""

    generation: Generation
    began: float
    times: list[float] = field(default_factory=list)

    def __post_init__(self):
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        for _ in self.generation:
            self.times.append(time.perf_counter())

    def wait(self, count: int) -> None:
        """Waits until `count` tokens have arrived, or the request has ended."""
        while len(self.times) < count and self._thread.is_alive():
            time.sleep(0.001)

    def end(self) -> None:
        """Waits until the request has ended."""
        self._thread.join()

    @property
    def first_token(self) -> tuple[float, float]:
        """Seconds to the first token, and the backend's part of them, after the end of the request."""
        result = self.generation.result
        if result.time_to_first_token is None or result.prefill_time is None:
            raise RuntimeError("the request ended without a token")
        return result.time_to_first_token, result.prefill_time

    def rate(self, first: float, last: float) -> float:
        """Tokens per second from time `first` to time `last`."""
        return sum(first < each <= last for each in self.times) / (last - first)


@dataclass(frozen=True)
class Load:
    """The size of the measurement."""

    output_tokens: int = 64
    runs: int = 3
    seed: int = 0
    """Seed of the random prompts."""


def report(engine: Engine, load: Load, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measures all rows. Figures are medians of `load.runs` rounds; in each round the cases of a question take turns.
    progress: called with each row as a line.
    """
    rows: list[Row] = []
    for question in (_several, _first_token, _mixed, _lengths, _sustained):
        found = question(engine, load)
        for row in found:
            progress(" | ".join(row))
        rows += found
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| question | case | measured |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _start(engine: Engine, load: Load, number: int, prompt: int, output: int) -> _Client:
    """Starts a request with a random prompt. prompt, output: numbers of tokens. number: selects the prompt."""
    ids = np.random.default_rng([load.seed, number]).integers(0, engine.config.vocab_size, prompt, np.int32)
    began = time.perf_counter()
    answer = engine.generate(ids, max_new_tokens=output, stop_tokens=(), tokens_per_dispatch=1, cache_prompt=False)
    return _Client(answer, began)


def _together(engine: Engine, load: Load, count: int) -> list[float]:
    """Tokens/s of each of `count` concurrent requests, while all of them decode; [] if at no time all of them do."""
    clients = [_start(engine, load, number, SHORT, load.output_tokens) for number in range(count)]
    for client in clients:
        client.end()
    first, last = max(client.times[0] for client in clients), min(client.times[-1] for client in clients)
    return [client.rate(first, last) for client in clients] if first < last else []


def _several(engine: Engine, load: Load) -> list[Row]:
    """The speed of several concurrent requests."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= engine.parallel]
    rates: dict[int, list[list[float]]] = {count: [] for count in counts}
    for run in range(load.runs + 1):
        for count in counts:
            found = _together(engine, load, count)
            if run:  # the first round compiles
                rates[count].append(found)
    alone = statistics.median(sum(each) for each in rates[1])
    rows = []
    for count in counts:
        case = f"{count} at once, prompts of {SHORT}"
        if not all(rates[count]):
            apart = "some waited until others had ended: a pass of all would take too long (serve: --most-slowdown)"
            rows.append(Row("several requests", case, apart))
            continue
        total = statistics.median(sum(each) for each in rates[count])
        least = statistics.median(min(each) for each in rates[count])
        figures = f"{total:.1f} tokens/s"
        if count > 1:
            figures += f", {total / alone:.2f} times one; the slowest request {least / alone:.2f} of its speed alone"
        rows.append(Row("several requests", case, figures))
    return rows


def _first(engine: Engine, load: Load, number: int, prompt: int) -> tuple[float, float]:
    """Seconds to the first token, and the backend's part of them. prompt: number of tokens."""
    client = _start(engine, load, number, prompt, 2)
    client.end()
    return client.first_token


def _first_token(engine: Engine, load: Load) -> list[Row]:
    """The parts of the time to the first token."""
    prompt = min(LONG, engine.config.max_position_embeddings // 2)
    found = {length: [_first(engine, load, run, length) for run in range(load.runs + 1)][1:] for length in (1, prompt)}
    whole, backend, least = (
        1000 * statistics.median(times[part] for times in found[length])
        for length, part in ((prompt, 0), (prompt, 1), (1, 0))
    )
    figures = f"{whole:.1f} ms: {whole - backend:.1f} before the backend, {least:.1f} as with a prompt of 1"
    figures += f", {(whole - least) / (prompt - 1):.3f} for each further token"
    return [Row("first token", f"prompt of {prompt}, alone", figures)]


def _mixed(engine: Engine, load: Load) -> list[Row]:
    """The effects of a long prompt that arrives while two requests decode; [] if three requests cannot run together."""
    if engine.parallel < 3:
        return []
    context = engine.config.max_position_embeddings
    prompt = min(LONG, context // 2)
    alone, company, before, meanwhile = [], [], [], []
    for run in range(load.runs):
        alone.append(_first(engine, load, run, prompt)[0])
        running = [_start(engine, load, number, SHORT, min(context, ENOUGH) - SHORT) for number in range(2)]
        for client in running:
            client.wait(SETTLED)
        began = time.perf_counter()
        for client in running:
            client.wait(len(client.times) + SETTLED)
        arrived = time.perf_counter()
        newcomer = _start(engine, load, run, prompt, 2)
        newcomer.wait(1)
        answered = newcomer.times[0]
        company.append(answered - newcomer.began)
        before.append(min(client.rate(began, arrived) for client in running))
        meanwhile.append(min(client.rate(arrived, answered) for client in running))
        for client in (*running, newcomer):
            client.generation.cancel()
            client.end()
    first, first_alone = 1000 * statistics.median(company), 1000 * statistics.median(alone)
    slower = statistics.median(after / rate for after, rate in zip(meanwhile, before, strict=True))
    figures = f"first token after {first:.0f} ms, {first / first_alone:.2f} times alone"
    figures += f"; the slower of those that decode at {slower:.2f} of its speed before"
    return [Row("mixed load", f"a prompt of {prompt} while two decode", figures)]


def _lengths(engine: Engine, load: Load) -> list[Row]:
    """The speed for several lengths of the prompt."""
    rows = []
    for prompt in LENGTHS:
        if prompt + load.output_tokens > engine.config.max_position_embeddings:
            continue
        rates, firsts = [], []
        for run in range(load.runs + 1):
            client = _start(engine, load, run, prompt, load.output_tokens)
            client.end()
            rates.append(client.rate(client.times[0], client.times[-1]))
            firsts.append(client.first_token[0])
        rate, first = statistics.median(rates[1:]), statistics.median(firsts[1:])
        figures = f"{prompt / first:,.1f} prompt tokens/s, then {rate:.1f} tokens/s"
        rows.append(Row("prompt length", f"{prompt}, alone", figures))
    return rows


def _sustained(engine: Engine, load: Load) -> list[Row]:
    """The sustained speed, and that of the fastest stretch."""
    output = min(4 * load.output_tokens, engine.config.max_position_embeddings - SHORT)
    window = min(WINDOW, output - 1)
    whole, peaks = [], []
    for run in range(load.runs):
        client = _start(engine, load, run, SHORT, output)
        client.end()
        times = np.array(client.times)
        whole.append((len(times) - 1) / (times[-1] - times[0]))
        peaks.append(window / (times[window:] - times[:-window]).min())
    peak, rate = statistics.median(peaks), statistics.median(whole)
    figures = f"{rate:.1f} tokens/s over {output} tokens; fastest {window} in a row {peak:.1f}, {peak / rate:.2f} times"
    return [Row("peak and sustained", f"prompt of {SHORT}, alone", figures)]
