"""python -m scripts.gpu_check.ladder RUNG: one short answer of a small model, compared with the model on the host.

The rungs are the first things to run on a GPU that has never run the kernel, from one launch of one layer to all lanes
of a layout. Each runs in its own process, because an error of a kernel ends its CUDA context. What fails is printed in
one line: the kernel's watchdog with the CTAs that waited, the first wrong token, or the error of CUDA.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from laneformer import custom_calls
from laneformer.commands.lab.gpu_decode import compile_kernel, native_errors, require_gpu, wait_for
from laneformer.config import ModelConfig
from laneformer.custom_calls.gpu.session import GpuSession
from laneformer.errors import ConfigError, run_command
from laneformer.infer.engine.native import pack, plan_of
from laneformer.infer.engine.sources import RandomSource
from laneformer.precision import Precision
from laneformer.processes import Group

TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_lanes=1,
    layout="tp",
)
LANES = TINY.replace(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, num_lanes=4)
RUNGS = MappingProxyType(
    {
        "tiny": TINY,
        "laneformer": LANES.replace(layout="laneformer", broadcast_delay=2),
        "tp": LANES,
        "dtp": LANES.replace(layout="dtp(1)"),
    }
)
PRECISION = Precision(param="bfloat16", compute="float32")
TOLERANCE = 1e-3  # of the largest logit; emulated devices stay below 1e-4


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run one short answer of a small model on the GPU, and compare its logits with the model on the host."""

    rung: tyro.conf.Positional[str] = "tiny"
    """tiny (one layer, one lane), laneformer, tp or dtp (three layers, four lanes)."""
    prompt: int = 5
    """Tokens of the prompt."""
    tokens: int = 4
    """Tokens of the answer."""
    timeout_ms: int = 4000
    """Longest wait inside the kernel, milliseconds."""
    compile_only: bool = False
    """Only compile the kernel and keep it in the cache, which needs no GPU."""


def run(options: Options) -> str:
    """Returns what was compared. Raises ConfigError for an unknown rung, without a GPU, or for a wrong answer."""
    if options.rung not in RUNGS:
        raise ConfigError(f"unknown rung {options.rung!r}; choose {', '.join(RUNGS)}")
    if options.compile_only:
        made = {"plan": plan_of(source_of(options.rung)), "bf12": None, "codes": None}
        return f"{options.rung}: {compile_kernel(made)}"
    require_gpu()
    return check(options)


def source_of(rung: str) -> RandomSource:
    return RandomSource(RUNGS[rung], PRECISION.param, precision=PRECISION)


def check(options: Options, **session_options) -> str:
    """Runs the rung and compares every logit. session_options: options of GpuSession, for tests."""
    source = source_of(options.rung)
    with native_errors():
        session = GpuSession(
            plan_of(source),
            group=Group(None, 0, "open a decode session"),
            timeout_ms=options.timeout_ms,
            **session_options,
        )
        pack(session, source)
    print(f"{options.rung}: {session.layout.grid} CTAs of {session.layout.threads} threads", flush=True)
    prompt = np.arange(1, options.prompt + 1, dtype=np.int32) * 37 % source.config.vocab_size
    tokens, logits = answer(session, prompt, options.tokens)
    expected = reference(source, np.concatenate([prompt, tokens[:-1]]))[options.prompt - 1 :]
    error = np.abs(logits - expected).max(-1) / np.abs(expected).max()
    if wrong := [n for n, one in enumerate(error) if not one < TOLERANCE]:
        raise ConfigError(
            f"{options.rung}: logits of token {wrong[0]} differ by {error[wrong[0]]:.2g} of the largest one, more than"
            f" {TOLERANCE:g}; {len(wrong)} of {len(error)} tokens are wrong"
        )
    again = answer(session, prompt, options.tokens)
    if any(one.tobytes() != other.tobytes() for one, other in zip((tokens, logits), again, strict=True)):
        raise ConfigError(f"{options.rung}: a second call of the same prompt has other bits, although both are correct")
    session.close()
    return f"{options.rung}: {len(tokens)} tokens, logits within {error.max():.1e} of the largest one, the same twice"


def answer(session: GpuSession, prompt: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens int32 [tokens], and their logits float32 [tokens, vocabulary]."""
    plan, positions = session.plan, len(prompt) + tokens
    inputs = session.inputs(custom_calls.Request(prompt=prompt, limit=tokens))
    decode = jax.jit(partial(custom_calls.decode, session, room=tokens, logits=True), donate_argnums=1)
    session.begin()
    layers = custom_calls.empty_layers(plan, positions)
    state = custom_calls.State(jnp.zeros(plan.ops.vocab_size, jnp.uint8), layers)
    outputs, _ = wait_for(session, lambda: decode(inputs, state, session.operands))
    return np.asarray(outputs.tokens), np.asarray(outputs.logits)


def reference(source: RandomSource, ids: np.ndarray) -> np.ndarray:
    """Logits of the model on the host, float32 [length, vocabulary]."""
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        model = source.model()
        return np.asarray(model(ids[None])[0])


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.gpu_check.ladder", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
