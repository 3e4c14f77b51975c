"""python -m scripts.gpu_rank: one rank of several on one GPU, whose other lanes answer after a delay: time per token by
layout and delay.

The GPU runs one lane of a recipe's model, with random weights, as it would on a machine with a GPU for each lane; spare
CTAs play the others (custom_calls/gpu/kernel/peers.h). What this shows is from which delay on a layout waits for its
exchanges. It is no measurement of several GPUs.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import custom_calls
from custom_calls.gpu.session import GpuSession
from infer.engine.backend import device_name
from infer.engine.native import plan_of
from infer.engine.sources import RandomSource, recipe_config
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, run_command
from laneformer.precision import Precision
from laneformer.processes import Group

PEER_CTAS = 4  # an H100 or H200 has 132 multiprocessors, the lane takes 128
LABEL = "emulated 1 of {lanes}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time per token of one lane alone, its peers played."""

    recipe: tyro.conf.Positional[str] = "laneformer_2b"
    """As for `python -m train`."""
    layouts: tuple[str, ...] = ("laneformer", "tp")
    """Each with the recipe's other settings."""
    delays: tuple[int, ...] = (0, 1, 2, 5, 10, 20)
    """Microseconds from a push to the answers of the others."""
    context: int = 512
    """Positions in the cache at the start; what stands in it is zeros."""
    tokens: int = 200
    """Generated in each run."""
    runs: int = 5
    dtype: str = "bfloat16"
    """Of weights and cache: bfloat16 or float16."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures there."""


def run(options: Options) -> str:
    """The table."""
    if jax.default_backend() != "gpu":
        raise ConfigError(f"this measures a GPU, JAX's devices here are {jax.default_backend()}")
    records = [record for layout in options.layouts for record in measure(options, layout)]
    if options.json:
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return table(records)


def measure(options: Options, layout: str, **session_options) -> list[dict]:
    """A record for each delay. session_options: of GpuSession, for tests."""
    config = recipe_config(options.recipe).replace(layout=layout)
    if options.context + options.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"--context {options.context} and --tokens {options.tokens} are more than the context of {options.recipe}"
        )
    records = []
    for delay in options.delays:
        session = open_session(config, options.dtype, delay, **session_options)
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
                "weights": f"random {options.dtype}",
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


def open_session(config: ModelConfig, dtype: str, delay: int, **options) -> GpuSession:
    source = RandomSource(config, dtype, precision=Precision(param=dtype, compute=dtype))
    session = GpuSession(
        plan_of(source),
        group=Group(None, 0, "open a decode session"),
        peer_ctas=PEER_CTAS,
        peer_delay_us=delay,
        **options,
    )
    session.fill()
    return session


def time_per_token(session: GpuSession, config: ModelConfig, options: Options, seed: int) -> float:
    """Seconds from one token to the next, mean over a run, by the clock of the device."""
    plan, positions = session.plan, options.context + options.tokens
    shapes = [(1, 1, positions, attend.kv_heads, attend.head_dim) for attend in plan.attends]
    keys, values = ([jnp.zeros(shape, plan.cache_dtype.name) for shape in shapes] for _ in "kv")
    inputs = custom_calls.Inputs(
        np.array([seed], np.int32),
        np.array([1, options.context, options.tokens, 0], np.int32),
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
    """Markdown, with the conditions below."""
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
        f" greedy, context {r['context']}, {r['tokens']} tokens, {r['runs']} runs after one to warm up, {r['device']},"
        f" jax {r['jax']}."
    )
    return "\n".join([*lines, "", conditions])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_rank", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
