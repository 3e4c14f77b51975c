"""python -m scripts.gpu_rows: time of a pass on one GPU by its number of rows, and whether rows change any bit.

For each number of rows the kernel is compiled and run with a recipe's model and random weights. It reads a prompt of 63
tokens, a pass of all rows at a time. It computes an answer in passes of one row, then the same answer with itself as
drafts, so that every pass has all rows. All answers must have the bits of the kernel for one row.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from laneformer import custom_calls
from laneformer.commands.lab.gpu_decode import require_gpu, wait_for
from laneformer.custom_calls.gpu.session import GpuSession
from laneformer.custom_calls.plan import Plan
from laneformer.custom_calls.request import SamplingOptions
from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.machine import accelerator
from laneformer.infer.engine.native import plan_of
from laneformer.infer.engine.sources import RandomSource, recipe_config
from laneformer.precision import Precision
from laneformer.processes import Group

PROMPT = 63  # tokens; the longest prompt that the kernel reads without a block of XLA


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the time of passes of several rows, and compare the bits of their answers."""

    recipe: tyro.conf.Positional[str] = "laneformer_2b"
    """Model to run, named as for `python -m train`."""
    rows: tuple[int, ...] = (1, 2, 4)
    """Numbers of rows to compile kernels for; the first must be 1."""
    context: int = 512
    """Positions in the cache at the start, filled with zeros."""
    tokens: int = 129
    """Tokens to generate in each run."""
    runs: int = 5
    """Measured runs per kernel."""
    dtype: str = "bfloat16"
    """Dtype of weights and cache: bfloat16 or float16."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the figures to."""


def run(options: Options) -> str:
    """Measures everything and returns the table. Raises ConfigError without a GPU, or if rows change an answer."""
    require_gpu()
    records = measure(options)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    if not all(record["same_bits"] for record in records):
        raise ConfigError(f"passes of several rows changed an answer:\n{table(records)}")
    return table(records)


def measure(options: Options, **session_options) -> list[dict]:
    """Measures the model; returns a record per number of rows. session_options: options of GpuSession, for tests.

    Raises ConfigError for other rows than 1 at first, or a model with too short a context.
    """
    if options.rows[:1] != (1,):
        raise ConfigError(f"--rows must begin with 1, with which the others are compared, got {options.rows}")
    config = recipe_config(options.recipe)
    if (needed := options.context + PROMPT + options.tokens) > config.max_position_embeddings:
        raise ConfigError(
            f"--context {options.context}, a prompt of {PROMPT} and --tokens {options.tokens} take {needed} positions,"
            f" but the context of {options.recipe} is {config.max_position_embeddings}; lower one of them"
        )
    plan = plan_of(RandomSource(config, options.dtype, precision=Precision(options.dtype, options.dtype)))
    records: list[dict] = []
    expected = None
    for rows in options.rows:
        session = GpuSession(plan, group=Group(None, 0, "open a decode session"), rows=rows, **session_options)
        session.fill()
        measured = Measured(session, plan, options)
        answers = measured.answers()
        expected = answers[0] if expected is None else expected
        same = all(answer.tobytes() == expected.tobytes() for answer in answers)
        records.append(
            {
                "rows": rows,
                "same_bits": same,
                **{name: _figures(values) for name, values in measured.times.items()},
                "tokens_per_pass": measured.tokens_per_pass,
                "context": options.context,
                "tokens": options.tokens,
                "runs": options.runs,
                "recipe": options.recipe,
                "weights": f"random {options.dtype}",
                "batch": 1,
                **accelerator(),
                "jax": jax.__version__,
            }
        )
        session.close()
    return records


class Measured:
    """Answers of a session, and their times in seconds."""

    def __init__(self, session: GpuSession, plan: Plan, options: Options):
        self.times: dict[str, list[float]] = {"one_row_us": [], "all_rows_us": [], "prompt_us": []}
        self.tokens_per_pass = 1.0
        self._session, self._plan, self._options = session, plan, options
        self._decode = jax.jit(partial(custom_calls.decode, session, room=options.tokens), donate_argnums=1)

    def answers(self) -> list[np.ndarray]:
        """Runs all ways; returns the tokens and the bits of the log-probabilities of each answer, uint32 [2, tokens].

        Times are recorded for the runs after the first.
        """
        rows, found = self._session.layout.rows, []
        for number in range(self._options.runs + 1):
            answer, one = self._answer("one_row_us", number, 0, ())
            found.append(answer)
            if rows > 1:
                found.append(self._answer("all_rows_us", number, rows - 1, one)[0])
        return found

    def _answer(self, name: str, number: int, most: int, drafts: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        options, session, plan = self._options, self._session, self._plan
        if session.layout.rows > 1:
            session.speculate(most)
        prompt = np.resize(np.arange(1, 17, dtype=np.int32), PROMPT) % plan.ops.vocab_size
        asked = custom_calls.Request(
            prompt=prompt,
            start=options.context,
            limit=options.tokens,
            sampling=SamplingOptions(temperature=1.0, seed=1),
            given=tuple(drafts) if session.layout.rows > 1 else (),
        )
        inputs = session.inputs(asked)
        positions = options.context + PROMPT + options.tokens
        layers = custom_calls.empty_layers(plan, positions)
        state = custom_calls.State(jnp.zeros(plan.ops.vocab_size, jnp.uint8), layers)
        jax.block_until_ready(state)
        session.begin()
        began = time.perf_counter()
        outputs, _ = wait_for(session, lambda: self._decode(inputs, state, session.operands))
        times, passes = session.drawn(0, options.tokens).times, options.tokens - 1
        if most:
            passes, self.tokens_per_pass = session.drafting.passes, session.drafting.tokens_per_pass
        if number > 0:  # the first run compiles
            self.times[name].append(float(times[-1] - times[0]) / passes)
            if not most:
                self.times["prompt_us"].append(float(times[0]) - began)
        tokens = np.asarray(outputs.tokens)
        return np.stack([tokens.view(np.uint32), np.asarray(outputs.logprobs).view(np.uint32)]), tokens.tolist()


def _figures(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {name: 1e6 * of(seconds) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def table(records: list[dict]) -> str:
    """Markdown table with the conditions below it."""
    lines = [
        "| rows of the kernel | us of a pass of one row | us of a pass of all rows | price | tokens per pass"
        f" | us to the first token of a prompt of {PROMPT} | same bits |",
        "|---|---|---|---|---|---|---|",
    ]
    first = records[0]["one_row_us"]["median"]
    for r in records:
        whole = r["all_rows_us"] or r["one_row_us"]
        lines.append(
            f"| {r['rows']} | {r['one_row_us']['median']:.1f} | {whole['median']:.1f} | {whole['median'] / first:.3f} |"
            f" {r['tokens_per_pass']:.2f} | {r['prompt_us']['median']:.0f} | {'yes' if r['same_bits'] else 'NO'} |"
        )
    r = records[0]
    conditions = (
        f"{r['recipe']}, {r['weights']} weights, batch 1, temperature 1, context {r['context']}, {r['tokens']} tokens,"
        f" medians of {r['runs']} runs after one warm-up run, {r['device']}, jax {r['jax']}."
    )
    return "\n".join([*lines, "", conditions])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_rows", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
