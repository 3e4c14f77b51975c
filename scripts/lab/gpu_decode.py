"""python -m scripts.gpu_decode: time per token of the decode kernel alone, by format of weights and variant of the
kernel, with random weights made on the GPU.

Unlike `infer bench` it needs no engine: no prompt program, no second copy of the weights and no weights from the host,
so the first figure appears after seconds. Every variant must have the bits of the first one.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from laneformer import custom_calls
from laneformer.config import ModelConfig
from laneformer.custom_calls.build import BuildError
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.compile import PERSISTENT, STEPS, image
from laneformer.custom_calls.gpu.formats import Bf12Choice
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.session import ARCHITECTURES, LAUNCHES, MACHINES, GpuSession
from laneformer.custom_calls.gpu.variants import VARIABLE, from_environment
from laneformer.custom_calls.plan import Plan
from laneformer.custom_calls.request import SamplingOptions
from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.machine import accelerator
from laneformer.infer.engine.native import check_weights, plan_of
from laneformer.infer.engine.sources import RandomSource, recipe_config
from laneformer.precision import Precision
from laneformer.processes import Group
from laneformer.quantized.rounding import USUAL, Kind, round_to

Weights = Literal["bfloat16", "bf12", "int8", "fp8", "int4", "mxfp4", "nvfp4"]
PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the time per token of the decode kernel alone, with random weights."""

    recipe: tyro.conf.Positional[str] = "laneformer_2b"
    """Model to run, named as for `python -m train`."""
    weights: tuple[Weights, ...] = ()
    """Formats of the weights, in turn: bfloat16 in 12 bits without loss (bf12), or random codes of 8 or 4 bits; that of
    --dtype by default.
    """
    variants: tuple[str, ...] = (PLAIN,)
    """Variants of the kernel (custom_calls/gpu/variants.py), several ones joined by commas; `none` is the kernel as it
    is.
    """
    context: int = 64
    """Positions in the cache at the start, filled with zeros."""
    tokens: int = 256
    """Tokens to generate in each run."""
    runs: int = 3
    """Measured runs, after one that is not measured."""
    dtype: str = "bfloat16"
    """Dtype of weights and cache: bfloat16 or float16."""
    compile_only: bool = False
    """Only compile the kernels and keep them in the cache, which needs no GPU."""
    launch: Literal["persistent", "graph"] = "persistent"
    """One kernel for a whole answer, or one per op under a CUDA graph."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the figures to."""


def run(options: Options) -> str:
    """Measures everything and returns the table. Raises ConfigError without a GPU, or if a variant changes a bit."""
    if options.compile_only:
        return "\n".join(compiled(options))
    require_gpu()
    records = []
    for weights in options.weights or (None,):
        records += measure(options, weights)
        if options.json:  # after each format, because a later one may be interrupted
            options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    if not all(record["same_bits"] for record in records):
        raise ConfigError(f"a variant changed an answer:\n{table(records)}")
    return table(records)


def require_gpu() -> None:
    """Raises ConfigError if JAX's default device is not a GPU."""
    if jax.default_backend() != "gpu":
        raise ConfigError(f"JAX found no GPU, only {jax.default_backend()}; run this on a machine with a GPU")


def measure(options: Options, weights: str | None, **session_options) -> list[dict]:
    """Measures one format of weights; returns a record per variant. session_options: options of GpuSession, for tests.

    Raises ConfigError if context and tokens do not fit the model, or if the kernel failed.
    """
    config = fitting(options.recipe, options.context, options.tokens)
    records, first = [], None
    for variant in options.variants:
        with variants(variant):
            session = open_session(config, options.dtype, weights, launch=options.launch, **session_options)
        calls = Calls(session, options.context, options.tokens)
        answers = [calls.answer(seed) for seed in (0, *range(options.runs))]
        bits = [answer.bits.tobytes() for answer in answers]
        first = first or bits
        times = [1e6 * answer.seconds for answer in answers[1:]]
        records.append(
            {
                "test": "decode",
                "variant": variant,
                "launch": LAUNCHES[options.launch],
                "us_per_token": {"median": statistics.median(times), "min": min(times), "max": max(times)},
                "read_pass_us": 1e6 * session.read_pass(),
                "bytes_per_token": session.packed_bytes,
                "same_bits": bits == first and bits[0] == bits[1],
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
        print(f"{variant}, {records[-1]['weights']}: {statistics.median(times):.1f} us per token", file=sys.stderr)
    return records


def fitting(recipe: str, context: int, tokens: int) -> ModelConfig:
    """The config of a recipe. Raises ConfigError if context and tokens do not fit it."""
    config = recipe_config(recipe)
    if context + tokens > config.max_position_embeddings:
        raise ConfigError(
            f"--context {context} plus --tokens {tokens} must be at most the context of {recipe},"
            f" {config.max_position_embeddings}"
        )
    return config


@contextmanager
def variants(names: str) -> Iterator[None]:
    """Sessions that open inside have these variants."""
    before = os.environ.pop(VARIABLE, None)
    try:
        if names != PLAIN:
            os.environ[VARIABLE] = names
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def model_options(config: ModelConfig, dtype: str, weights: str | None) -> dict[str, Any]:
    """Plan and formats of a model with random weights, as GpuSession takes them. Raises ConfigError for a format that
    the model cannot have.
    """
    plan = plan_of(RandomSource(config, dtype, precision=Precision(param=dtype, compute=dtype)))
    check_weights(weights, plan, tuple(USUAL))
    normal = 0.02 * jax.random.normal(jax.random.key(0), (1 << 20,))  # distributed as by `fill`
    return {
        "plan": plan,
        "bf12": Bf12Choice.of_sample(plan, normal.astype(dtype)) if weights == "bf12" else None,
        "codes": quantized(plan, weights) if weights in USUAL else None,
    }


def open_session(config: ModelConfig, dtype: str, weights: str | None, **options) -> GpuSession:
    """A session of the model with random weights made on the device. options: those of GpuSession.

    Raises ConfigError if it cannot be opened.
    """
    made = model_options(config, dtype, weights)
    with native_errors():
        session = GpuSession(**made, group=Group(None, 0, "open a decode session"), **options)
    session.fill()
    return session


@contextmanager
def native_errors() -> Iterator[None]:
    """Raises errors of the native library, of layouts and of the compilers as ConfigError."""
    try:
        yield
    except (custom_calls.NativeError, BuildError, ValueError) as error:
        raise ConfigError(str(error)) from None


def quantized(plan: Plan, kind: Kind) -> CodesChoice:
    """The choice of one format for all matrices. A row of ones suffices to determine groups and dtypes."""
    rows = ((path, np.ones((1, plan.shape_of(path)[-1]), np.float32)) for path in sorted(plan.matrices))
    return CodesChoice.of(plan, ((path, round_to(row, kind, search=False)) for path, row in rows))


def held_as(session: GpuSession, dtype: str) -> str:
    """Formats of the weights of a session."""
    names = session.quantized_weights.get("quantized_formats", [])
    return " and ".join(names) or ("bf12" if session.bf12_weights.weights else dtype)


class Answer(NamedTuple):
    seconds: float
    """Mean seconds between tokens, by the device's clock."""
    bits: np.ndarray
    """Tokens and bits of the log-probabilities, uint32 [2, tokens]."""


class Calls:
    """Greedy answers of a session after a context of zeros."""

    def __init__(self, session: GpuSession, context: int, tokens: int):
        """context: filled positions. tokens: tokens of an answer."""
        self._session, self._context, self._tokens = session, context, tokens
        self._decode = jax.jit(partial(custom_calls.decode, session, room=tokens), donate_argnums=1)

    def answer(self, seed: int) -> Answer:
        """One answer. seed: of the draws, and the first token. Raises ConfigError if the kernel failed."""
        session, plan, tokens = self._session, self._session.plan, self._tokens
        positions = self._context + tokens
        asked = custom_calls.Request(
            prompt=(seed,), start=self._context, limit=tokens, sampling=SamplingOptions(seed=seed)
        )
        inputs = session.inputs(asked)
        session.begin()
        layers = custom_calls.empty_layers(plan, positions, lanes=session.layout.lanes_here)
        state = custom_calls.State(jnp.zeros(plan.ops.vocab_size, jnp.uint8), layers)
        outputs, _ = wait_for(session, lambda: self._decode(inputs, state, session.operands))
        times = session.drawn(0, tokens).times
        bits = np.stack([np.asarray(array).view(np.uint32) for array in (outputs.tokens, outputs.logprobs)])
        return Answer(float(times[-1] - times[0]) / (tokens - 1), bits)


def wait_for(session: GpuSession, call: Callable[[], Any]) -> Any:
    """The arrays of a call, when it has ended. Raises ConfigError with what the kernel's watchdog recorded, if it
    failed.
    """
    try:
        made = jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(session.failure or str(error).splitlines()[0]) from None
    if session.failure is not None:
        raise ConfigError(session.failure)
    return made


def compile_kernel(made: dict[str, Any], launch: str = "persistent", peer_ctas: int = 0) -> str:
    """Compiles the kernel that a session with these options runs on an H100 or H200, into the cache. Returns its name
    and size. Raises ConfigError with the compiler's message.
    """
    plan, platform = made["plan"], "cuda"
    formats = frozenset((made["bf12"] or Bf12Choice()).tables), (made["codes"] or CodesChoice()).formats
    lanes = 1 if peer_ctas else plan.ops.lanes
    kernel = PERSISTENT if launch == "persistent" else STEPS
    with native_errors():
        layout = Layout(plan, MACHINES[platform], lanes, peer_ctas, *formats, variants=from_environment())
        size = len(image(model_header(layout), ARCHITECTURES[platform], None, kernel))
    return f"{kernel}: {size:,} bytes"


def compiled(options: Options) -> Iterator[str]:
    """Compiles the kernels of the options; returns a line for each."""
    config = recipe_config(options.recipe)
    for weights in options.weights or (None,):
        made = model_options(config, options.dtype, weights)
        for variant in options.variants:
            with variants(variant):
                yield f"{options.recipe}, {weights or options.dtype}, {variant}, {compile_kernel(made, options.launch)}"


def table(records: list[dict]) -> str:
    """Markdown table with the conditions below it."""
    lines = [
        "| weights | variant | us per token median (min to max) | of the first | of a pure read | same bits |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        time = r["us_per_token"]
        beside = next(other for other in records if other["weights"] == r["weights"])["us_per_token"]["median"]
        lines.append(
            f"| {r['weights']} | {r['variant']} | {time['median']:.1f} ({time['min']:.1f} to {time['max']:.1f}) |"
            f" {time['median'] / beside:.3f} | {r['read_pass_us'] / time['median']:.1%} |"
            f" {'yes' if r['same_bits'] else 'NO'} |"
        )
    r = records[0]
    conditions = (
        f"{r['recipe']}, batch 1, greedy, context {r['context']}, {r['tokens']} tokens, {r['runs']} runs after one"
        f" warm-up run, {r['device']}, jax {r['jax']}."
    )
    return "\n".join([*lines, "", conditions])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_decode", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
