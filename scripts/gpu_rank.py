"""python -m scripts.gpu_rank: time per token of one lane on one GPU, with emulated peers, by layout and delay.

The GPU runs one lane of a recipe's model, with random weights, as it would on a machine with a GPU per lane. Spare CTAs
emulate the other lanes, which answer after a delay (custom_calls/gpu/kernel/peers.h). The result shows from which delay
on a layout waits for its exchanges. It is not a measurement of several GPUs.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import custom_calls
from custom_calls.gpu.codes import CodesChoice
from custom_calls.gpu.formats import Bf12Choice
from custom_calls.gpu.session import GpuSession
from custom_calls.plan import Plan
from infer.engine.backend import device_name
from infer.engine.native import check_weights, plan_of
from infer.engine.sources import RandomSource, recipe_config
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, run_command
from laneformer.precision import Precision
from laneformer.processes import Group
from laneformer.quantized.rounding import USUAL, Kind, round_to

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
    context: int = 512
    """Positions in the cache at the start, filled with zeros."""
    tokens: int = 200
    """Tokens to generate in each run."""
    runs: int = 5
    """Measured runs per layout and delay."""
    dtype: str = "bfloat16"
    """Dtype of weights and cache: bfloat16 or float16."""
    weights: Literal["bfloat16", "bf12", "int8", "fp8", "int4", "mxfp4", "nvfp4"] | None = None
    """Format of the weights: that of --dtype (the default), bfloat16 in 12 bits without loss (bf12), or random codes of
    8 or 4 bits.
    """
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the figures to."""


def run(options: Options) -> str:
    """Measures everything and returns the table. Raises ConfigError without a GPU."""
    if jax.default_backend() != "gpu":
        raise ConfigError(f"JAX found no GPU, only {jax.default_backend()}; run this on a machine with a GPU")
    records = [record for layout in options.layouts for record in measure(options, layout)]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return table(records)


def measure(options: Options, layout: str, **session_options) -> list[dict]:
    """Measures one layout; returns a record per delay. session_options: options of GpuSession, for tests.

    Raises ConfigError if context and tokens do not fit the model.
    """
    config = recipe_config(options.recipe).replace(layout=layout)
    if options.context + options.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"--context {options.context} plus --tokens {options.tokens} must be at most the context of"
            f" {options.recipe}, {config.max_position_embeddings}"
        )
    records = []
    for delay in options.delays:
        session = open_session(config, options, delay, **session_options)
        per_token = [time_per_token(session, config, options, seed) for seed in range(options.runs + 1)][1:]
        records.append(
            {
                "status": LABEL.format(lanes=config.num_lanes),
                "layout": layout,
                "delay_us": delay,
                "us_per_token": {
                    "median": 1e6 * statistics.median(per_token),
                    "min": 1e6 * min(per_token),
                    "max": 1e6 * max(per_token),
                },
                "read_pass_us": 1e6 * session.read_pass(),
                "context": options.context,
                "tokens": options.tokens,
                "runs": options.runs,
                "recipe": options.recipe,
                "weights": f"random {held_as(session, options)}",
                "batch": 1,
                "device": device_name(jax.devices()[0]),
                "jax": jax.__version__,
            }
        )
        session.close()
        print(
            f"{layout}, delay {delay} us: {records[-1]['us_per_token']['median']:.1f} us per token",
            file=sys.stderr,
            flush=True,
        )
    return records


def held_as(session: GpuSession, options: Options) -> str:
    names = session.quantized_weights.get("quantized_formats", [])
    return " and ".join(names) or ("bf12" if session.bf12_weights.weights else options.dtype)


def open_session(config: ModelConfig, chosen: Options, delay: int, **options) -> GpuSession:
    dtype = chosen.dtype
    plan = plan_of(RandomSource(config, dtype, precision=Precision(param=dtype, compute=dtype)))
    check_weights(chosen.weights, plan, tuple(USUAL))
    normal = 0.02 * jax.random.normal(jax.random.key(0), (1 << 20,))  # distributed as by `fill`
    session = GpuSession(
        plan,
        bf12=Bf12Choice.of_sample(plan, normal.astype(dtype)) if chosen.weights == "bf12" else None,
        codes=quantized(plan, chosen.weights) if chosen.weights in USUAL else None,
        group=Group(None, 0, "open a decode session"),
        peer_ctas=PEER_CTAS,
        peer_delay_us=delay,
        **options,
    )
    session.fill()
    return session


def quantized(plan: Plan, kind: Kind) -> CodesChoice:
    """The choice of one format for all matrices. A row of ones suffices to determine groups and dtypes."""
    rows = ((path, np.ones((1, plan.shape_of(path)[-1]), np.float32)) for path in sorted(plan.matrices))
    return CodesChoice.of(plan, ((path, round_to(row, kind, search=False)) for path, row in rows))


def time_per_token(session: GpuSession, config: ModelConfig, options: Options, seed: int) -> float:
    """Mean seconds between tokens in a run, by the device's clock. Raises ConfigError if the session failed."""
    plan, positions = session.plan, options.context + options.tokens
    shapes = [(1, 1, positions, attend.kv_heads, attend.head_dim) for attend in plan.attends]
    keys, values = ([jnp.zeros(shape, plan.cache_dtype.name) for shape in shapes] for _ in "kv")
    inputs = custom_calls.Inputs(
        np.array([seed], np.int32),
        np.array([1, options.context, options.tokens, 0, 0], np.int32),
        np.array([0, 1, 0, 1], np.float32),
        np.array([seed, 0], np.uint32),
        np.array([-1], np.int32),
    )
    decode = jax.jit(partial(custom_calls.decode, session, room=options.tokens), donate_argnums=1)
    session.begin()
    state = custom_calls.State(jnp.zeros(plan.ops.vocab_size, jnp.uint8), keys, values)
    jax.block_until_ready(decode(inputs, state, session.operands))
    if session.failure is not None:
        raise ConfigError(session.failure)
    times = session.drawn(0, options.tokens).times
    return float(times[-1] - times[0]) / (options.tokens - 1)


def table(records: list[dict]) -> str:
    """Markdown table with the conditions below it."""
    lines = ["| layout | delay us | us per token median (min to max) | of a pure read |", "|---|---|---|---|"]
    for r in records:
        time = r["us_per_token"]
        share = f"{r['read_pass_us'] / time['median']:.1%}"
        lines.append(
            f"| {r['layout']} | {r['delay_us']} | {time['median']:.1f} ({time['min']:.1f} to {time['max']:.1f}) |"
            f" {share} |"
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
