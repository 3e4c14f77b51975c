"""Measures the time to the first token of a prompt, alternately with our engine and another one; makes the table."""

import statistics
from collections.abc import Callable, Sequence

from laneformer import custom_calls
from laneformer.commands.lab.peers.load import beside
from laneformer.commands.lab.peers.process import Process
from laneformer.config import ModelConfig
from laneformer.weights import prompt_multiply_adds

PASSES = 5  # measurements of the arithmetic peak before and after a sample; the median counts
MULTIPLY_ADDS = 1 << 28  # per thread in one measurement of the peak
HEADS = (
    "ours over",
    "prompt",
    "rounds",
    "ratio, median (range)",
    "ours, prompt tokens/s",
    "prompt tokens/s",
    "ours of multiply-adds",
    "of multiply-adds",
    "G multiply-adds/s",
    "foreign cores, most",
)


def measure(
    ours: Process,
    peer: Process,
    config: ModelConfig,
    lengths: Sequence[int],
    rounds: int,
    threads: int,
    progress: Callable[[str], None],
) -> list[dict]:
    """Measures both engines in `rounds` rounds for each length, after a request of each that does not count."""
    measured = []
    for length in lengths if rounds else ():
        for process in (ours, peer):
            progress(f"{process.name}: prompt of {length}, uncounted")
            process.first(length)
        found = []
        for number in range(rounds):
            a, b = (sample(process, config, length, threads) for process in (ours, peer))
            found.append({"ours": a, "peer": b, "ratio": a["tokens_per_s"] / b["tokens_per_s"]})
            progress(
                f"{peer.name}, prompt of {length}, round {number + 1} of {rounds}: ours {a['tokens_per_s']:.2f},"
                f" {peer.name} {b['tokens_per_s']:.2f} tokens/s, ratio {found[-1]['ratio']:.3f}"
            )
        measured.append({"prompt_tokens": length, "rounds": found})
    return measured


def sample(process: Process, config: ModelConfig, length: int, threads: int) -> dict:
    """Measures one prompt, and the arithmetic peak before and after it."""
    before = peak(threads)
    answer, foreign = beside(lambda: process.first(length))
    speed = (before + peak(threads)) / 2
    return {
        "seconds": answer["seconds"],
        "tokens_per_s": length / answer["seconds"],
        "multiply_adds_per_s": speed,
        "share": prompt_multiply_adds(config, length) / answer["seconds"] / speed,
        "foreign_cores": foreign,
        "peak_bytes": answer["peak_bytes"],
    }


def peak(threads: int) -> float:
    """Float32 multiply-adds per second of `threads` threads together."""
    return statistics.median(custom_calls.arithmetic_peak(MULTIPLY_ADDS, threads) for _ in range(PASSES))


def rows(pairs: Sequence[dict]) -> list[tuple[str, ...]]:
    """A row for each engine and length, with the columns of HEADS."""
    return [_row(pair["peer"], one["prompt_tokens"], one["rounds"]) for pair in pairs for one in pair["prompts"]]


def _row(peer: str, length: int, rounds: Sequence[dict]) -> tuple[str, ...]:
    samples = [r[who] for r in rounds for who in ("ours", "peer")]
    ratios = [r["ratio"] for r in rounds]

    def median(who: str, name: str) -> float:
        return statistics.median(r[who][name] for r in rounds)

    return (
        peer,
        str(length),
        str(len(rounds)),
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        *(f"{median(who, 'tokens_per_s'):.2f}" for who in ("ours", "peer")),
        *(f"{median(who, 'share'):.1%}" for who in ("ours", "peer")),
        f"{statistics.median(s['multiply_adds_per_s'] for s in samples) / 1e9:.1f}",
        f"{max(s['foreign_cores'] for s in samples):.2f}",
    )
