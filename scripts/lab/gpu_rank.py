"""python -m scripts.gpu_rank: time per token of one lane on one GPU, with emulated peers, by layout and delay.

The GPU runs one lane of a recipe's model, with random weights, as it would on a machine with a GPU per lane. Spare CTAs
emulate the other lanes, which answer after a delay (custom_calls/gpu/kernel/peers.h). The result shows from which delay
on a layout waits for its exchanges. It is not a measurement of several GPUs.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from laneformer.commands.lab.gpu_decode import (
    PLAIN,
    Calls,
    Weights,
    compile_kernel,
    fitting,
    held_as,
    model_options,
    open_session,
    require_gpu,
    variants,
)
from laneformer.config import ModelConfig
from laneformer.custom_calls.gpu.session import GpuSession
from laneformer.errors import run_command
from laneformer.infer.bench.machine import accelerator
from laneformer.infer.engine.sources import recipe_config

PEER_CTAS = 4  # an H100 or H200 has 132 multiprocessors; the lane uses 128 of them
LABEL = "emulated 1 of {lanes}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the time per token of one lane, with emulated peers."""

    recipe: tyro.conf.Positional[str] = "laneformer_2b"
    """Model to run, named as for `python -m train`."""
    layouts: tuple[str, ...] = ("laneformer", "tp")
    """Layouts to run, each with the recipe's other settings."""
    delays: tuple[int, ...] = (0, 1, 2, 5, 10, 20)
    """Delays in microseconds from a push to the peers' answers."""
    variants: tuple[str, ...] = (PLAIN,)
    """Variants of the kernel, as for gpu_decode."""
    context: int = 512
    """Positions in the cache at the start, filled with zeros."""
    tokens: int = 200
    """Tokens to generate in each run."""
    runs: int = 5
    """Measured runs per layout and delay."""
    dtype: str = "bfloat16"
    """Dtype of weights and cache: bfloat16 or float16."""
    weights: Weights | None = None
    """Format of the weights: that of --dtype (the default), bfloat16 in 12 bits without loss (bf12), or random codes of
    8 or 4 bits.
    """
    compile_only: bool = False
    """Only compile the kernels and keep them in the cache, which needs no GPU."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the figures to."""


def run(options: Options) -> str:
    """Measures everything and returns the table. Raises ConfigError without a GPU."""
    if options.compile_only:
        return "\n".join(line for layout in options.layouts for line in compiled(options, layout))
    require_gpu()
    records = []
    for layout in options.layouts:
        records += measure(options, layout)
        if options.json:  # after each layout, because a later one may be interrupted
            options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return table(records)


def compiled(options: Options, layout: str) -> Iterator[str]:
    """Compiles the kernels of a layout; returns a line for each."""
    config = recipe_config(options.recipe).replace(layout=layout)
    made = model_options(config, options.dtype, options.weights)
    for variant in options.variants:
        with variants(variant):
            yield f"{layout}, {variant}, {compile_kernel(made, peer_ctas=PEER_CTAS)}"


def measure(options: Options, layout: str, **session_options) -> list[dict]:
    """Measures one layout; returns a record per variant and delay. session_options: options of GpuSession, for tests.

    Raises ConfigError if context and tokens do not fit the model.
    """
    config = fitting(options.recipe, options.context, options.tokens).replace(layout=layout)
    records = []
    for variant, delay in itertools.product(options.variants, options.delays):
        with variants(variant):
            session = open_lane(config, options, delay, **session_options)
        calls = Calls(session, options.context, options.tokens)
        per_token = [calls.answer(seed).seconds for seed in range(options.runs + 1)][1:]
        records.append(
            {
                "status": LABEL.format(lanes=config.num_lanes),
                "layout": layout,
                "variant": variant,
                "delay_us": delay,
                "us_per_token": {
                    "median": 1e6 * statistics.median(per_token),
                    "min": 1e6 * min(per_token),
                    "max": 1e6 * max(per_token),
                },
                "read_pass_us": 1e6 * session.read_pass(),
                "bytes_per_token": session.packed_bytes,
                "context": options.context,
                "tokens": options.tokens,
                "runs": options.runs,
                "recipe": options.recipe,
                "weights": f"random {held_as(session, options.dtype)}",
                "batch": 1,
                **accelerator(),
                "jax": jax.__version__,
            }
        )
        session.close()
        print(
            f"{layout}, {variant}, delay {delay} us: {records[-1]['us_per_token']['median']:.1f} us per token",
            file=sys.stderr,
            flush=True,
        )
    return records


def open_lane(config: ModelConfig, chosen: Options, delay: int, **options) -> GpuSession:
    """A session of one lane, beside emulated ones. options: those of GpuSession."""
    peers = {"peer_ctas": PEER_CTAS, "peer_delay_us": delay}
    return open_session(config, chosen.dtype, chosen.weights, **peers, **options)


def table(records: list[dict]) -> str:
    """Markdown table with the conditions below it."""
    lines = ["| layout | delay us | us per token median (min to max) | of a pure read |", "|---|---|---|---|"]
    for r in records:
        time = r["us_per_token"]
        share = f"{r['read_pass_us'] / time['median']:.1%}"
        name = r["layout"] if r["variant"] == PLAIN else f"{r['layout']}, {r['variant']}"
        lines.append(
            f"| {name} | {r['delay_us']} | {time['median']:.1f} ({time['min']:.1f} to {time['max']:.1f}) | {share} |"
        )
    r = records[0]
    conditions = (
        f"{r['status']}, not {r['status'].rsplit(' ', 1)[-1]} GPUs: {r['recipe']}, {r['weights']} weights, batch 1,"
        f" greedy, context {r['context']}, {r['tokens']} tokens, {r['runs']} runs after one warm-up run, {r['device']},"
        f" jax {r['jax']}."
    )
    return "\n".join([*lines, "", conditions])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_rank", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
