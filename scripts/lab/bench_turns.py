"""python -m scripts.bench_turns: time to first token of a conversation's turns, with kept prefixes and without.

    python -m scripts.bench_turns --checkpoint laneformer_350m --prompt-tokens 512

Each prompt consists of the previous prompt, its answer and new random tokens. Each round runs the conversation twice in
one process, with the same tokens: once every prompt reuses what the previous turn left in the cache, once every prompt
is computed from its first token. The order of the two alternates. Their answers must be equal.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.machine import hardware, software, utc_now
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.job import open_engine, show_log, take_devices
from laneformer.infer.engine.options import JobEngineOptions
from laneformer.infer.engine.sources import is_recipe
from laneformer.infer.roofline.table import MEASURED, Column, Table


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the time to the first token of each turn of a conversation, with kept prefixes and without."""

    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions]
    """The engine to measure; its backend must keep prefixes."""
    prompt_tokens: int = 512
    """Tokens of the first prompt, random."""
    answer_tokens: int = 64
    """Tokens of each answer."""
    new_tokens: int = 64
    """Random tokens that each later prompt adds after the previous answer."""
    turns: int = 4
    """Number of turns."""
    rounds: int = 5
    """Number of measured rounds; a round before them is not measured."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write a record with all times to."""

    def check(self, context: int) -> None:
        """Raises ConfigError for a value outside its range, or a conversation that exceeds the context."""
        for name, least in (("prompt_tokens", 1), ("answer_tokens", 1), ("new_tokens", 1), ("turns", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        longest = self.prompt_tokens + self.turns * self.answer_tokens + (self.turns - 1) * self.new_tokens
        if longest > context:
            raise ConfigError(
                f"the last turn ends at {longest} tokens, but the context is {context}; give fewer --turns"
            )


@dataclass
class Turn:
    """A turn of the conversation, with the times of all rounds in seconds."""

    prompt_tokens: int
    cached_tokens: int = 0
    kept: list[float] = field(default_factory=list)
    """Times to the first token if the prompt reuses the cache of the previous turn."""
    computed: list[float] = field(default_factory=list)
    """Times to the first token if the whole prompt is computed."""


def measure(engine: Engine, options: Options) -> list[Turn]:
    """Runs all rounds. Raises ConfigError if the backend keeps no prefixes, RuntimeError if they change an answer."""
    if not engine.conditions["prefix_cache"]:
        raise ConfigError(f"backend {engine.backend} keeps no prefixes: choose cpu")
    turns: list[Turn] = []
    for number in range(-1, options.rounds):
        order = (True, False) if number % 2 else (False, True)
        answers = []
        for keeps in order:
            rng = np.random.default_rng([1, number + 1])
            prompt, answer = rng.integers(0, engine.config.vocab_size, options.prompt_tokens, np.int32), []
            for turn in range(options.turns):
                result = engine.generate(
                    prompt, max_new_tokens=options.answer_tokens, stop_tokens=(), cache_prompt=keeps
                ).result
                if len(turns) <= turn:
                    turns.append(Turn(len(prompt)))
                if keeps:
                    turns[turn].cached_tokens = result.cached_tokens
                if number >= 0:
                    (turns[turn].kept if keeps else turns[turn].computed).append(result.time_to_first_token)
                answer.append((result.tokens, result.logprobs))
                new = rng.integers(0, engine.config.vocab_size, options.new_tokens, np.int32)
                prompt = np.concatenate([prompt, np.array(result.tokens, np.int32), new])
            answers.append(answer)
            print(f"round {number + 1} of {options.rounds}, {'kept' if keeps else 'computed'}", file=sys.stderr)
        if answers[0] != answers[1]:
            raise RuntimeError(f"round {number + 1}: an answer depends on kept prefixes")
    return turns


def table(turns: Sequence[Turn], engine: Engine, options: Options) -> Table:
    """Medians of the rounds, and the median, least and largest of their ratios."""
    rows = []
    for number, turn in enumerate(turns, 1):
        ratios = [kept / computed for kept, computed in zip(turn.kept, turn.computed, strict=True)]
        times = [1000 * statistics.median(times) for times in (turn.computed, turn.kept)]
        spread = statistics.median(ratios), min(ratios), max(ratios)
        rows.append((number, turn.prompt_tokens, turn.cached_tokens, *times, *spread))
    facts = engine.conditions
    return Table(
        "turns",
        f"{engine.name}: time to the first token of each turn",
        (
            *(Column(name, ",d") for name in ("turn", "prompt", "kept")),
            *(Column(name, ",.1f", MEASURED) for name in ("computed ms", "with kept ms")),
            *(Column(name, ".3f", MEASURED) for name in ("ratio", "least", "largest")),
        ),
        rows,
        f"{facts['parameters']:,}{' random' if is_recipe(options.engine.checkpoint) else ''} parameters, layout"
        f" {facts['layout']}, {facts['lanes']} lanes, weights {facts['weights_dtype']}, products"
        f" {facts['compute_dtype']}, cache {facts['kv_dtype']}; {facts['device']}, {facts.get('threads', '?')} threads,"
        f" {facts.get('instructions', '')}; batch 1, greedy; medians of {options.rounds} alternating rounds in one"
        " process; ratios of the same round; both gave the same answers in every bit",
    )


def run(options: Options) -> int:
    show_log()
    take_devices(options.engine)
    engine = open_engine(options.engine)
    options.check(engine.config.max_position_embeddings)
    load = os.getloadavg()
    turns = measure(engine, options)
    found = table(turns, engine, options)
    print(found.text())
    if options.json:
        record = {
            "schema": "laneformer.turns/1",
            "conditions": engine.conditions,
            "options": {name: value for name, value in asdict(options).items() if name not in ("engine", "json")},
            "turns": [asdict(turn) for turn in turns],
            "load": {"before": load, "after": os.getloadavg()},
            "hardware": hardware(),
            "software": software(),
            "date_utc": utc_now(),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.bench_turns", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
