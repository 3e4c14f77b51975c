"""python -m infer generate: stream a completion of a prompt, then print the speed with its conditions."""

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import tyro

from laneformer.errors import ConfigError, InputError, printable
from laneformer.infer.bench.latency import weight_bytes
from laneformer.infer.engine.defaults import GENERATION, GivenSampling, named, over, recommended
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.generation import Generation, Result
from laneformer.infer.engine.job import is_first_process, open_engine, show_log, take_devices
from laneformer.infer.engine.options import JobEngineOptions
from laneformer.weights import kv_bytes_per_token

log = logging.getLogger("laneformer")

DRAWN = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "seed")  # settings that greedy decoding does not read
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Stream a completion of a prompt to standard output; everything else goes to standard error."""

    engine: tyro.conf.OmitArgPrefixes[JobEngineOptions]
    """The engine that generates."""
    prompt: str = ""
    """Text to continue; - reads it from standard input."""
    prompt_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with the text to continue, UTF-8."""
    prompt_ids: str = ""
    """Token ids to continue, for example 1,2,3, for a checkpoint without tokenizer.json."""
    max_new_tokens: int = 256
    """Maximum number of tokens to generate; the context also ends the text."""
    sampling: tyro.conf.OmitArgPrefixes[GivenSampling] = GivenSampling()  # noqa: RUF009  frozen
    """How tokens are chosen (infer/sampling.py has the definition). By default as the checkpoint's
    generation_config.json recommends, otherwise greedy.
    """
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End the text before this string; may be repeated."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text token."""
    token_healing: bool = False
    """Let the model choose the tokens at the end of the prompt (backends cpu and xla)."""
    top_logprobs: int = 0
    """With --json, report this many of the most likely tokens at each position, up to 20."""
    json: bool = False
    """Print one JSON object at the end instead of streaming the text."""


def run(options: Options) -> int:
    show_log()
    if options.top_logprobs and not options.json:
        raise ConfigError("--top-logprobs needs --json")
    prompt = read_prompt(options)
    defaults = recommended(options.engine.checkpoint)
    used = {name: value for name, value in defaults.items() if getattr(options.sampling, name) is None}
    options = dataclasses.replace(options, sampling=over(options.sampling, defaults))
    take_devices(options.engine)
    if used:
        log.info("sampling by default: %s (%s)", named(used), GENERATION)
    engine = open_engine(options.engine, **options.engine.drafts())
    compiled = engine.warmup(len(engine.encode(prompt)), options.max_new_tokens, options.top_logprobs)
    generation = engine.generate(
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        stop_tokens=() if options.ignore_eos else None,
        stop_strings=options.stop,
        top_logprobs=options.top_logprobs,
        token_healing=options.token_healing,
    )
    try:
        if not options.json:
            stream(generation, prompt, engine.tokenizer is not None)
        result = generation.result
    except KeyboardInterrupt:
        generation.cancel()
        result = generation.result
    if options.json:
        print(json.dumps(report(engine, options, result, compiled), ensure_ascii=False))
    else:
        print(file=sys.stdout, flush=True)
        if is_first_process():
            print(summary(engine, options, result), file=sys.stderr)
    return 130 if result.finish_reason == "cancelled" else 0


def read_prompt(options: Options) -> str | list[int]:
    """The prompt as text or token ids. Raises InputError unless exactly one prompt was given."""
    if sum(map(bool, (options.prompt, options.prompt_file, options.prompt_ids))) != 1:
        raise InputError("give one of --prompt, --prompt-file and --prompt-ids")
    if options.prompt_ids:
        try:
            return [int(word) for word in options.prompt_ids.split(",")]
        except ValueError:
            raise InputError(
                f"--prompt-ids must be whole numbers separated by commas, as in 1,2,3, got {options.prompt_ids}"
            ) from None
    if options.prompt not in ("", "-"):
        return options.prompt
    try:
        return (sys.stdin.buffer.read() if options.prompt_file is None else options.prompt_file.read_bytes()).decode()
    except UnicodeDecodeError:
        name = options.prompt_file or "standard input"
        raise InputError(f"{name} is not UTF-8 text: convert it, or give ids with --prompt-ids") from None


def stream(generation: Generation, prompt: str | list[int], text: bool) -> None:
    """Streams the answer to standard output; on a terminal after the dimmed prompt. text: whether to stream text, or
    token ids.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print ? for characters that the terminal cannot encode
    if sys.stdout.isatty():
        print(
            f"{DIM}{prompt if isinstance(prompt, str) else ','.join(map(str, prompt)) + ','}{PLAIN}", end="", flush=True
        )
    shown = printable if sys.stdout.isatty() else str  # a terminal would obey control sequences
    for piece in generation.texts() if text else _ids(generation):
        print(shown(piece), end="", flush=True)


def _ids(generation: Generation) -> Iterator[str]:
    """Yields the token ids, each after the first with a comma before it."""
    for n, token in enumerate(generation):
        yield f"{',' if n else ''}{int(token)}"


def summary(engine: Engine, options: Options, result: Result) -> str:
    """One line: tokens, speed, and the conditions of the speed."""
    c = engine.conditions
    ended = f"{result.finish_reason}{'' if result.stop_reason is None else f' {result.stop_reason!r}'}"
    speed = (
        "too few tokens for a rate"
        if result.time_per_token is None
        else f"{1 / result.time_per_token:,.1f} tokens/s sustained"
    )
    first = (
        "no token"
        if result.time_to_first_token is None
        else f"first token after {1000 * result.time_to_first_token:.1f} ms"
    )
    weights = ", ".join([*c.get("quantized_formats", ()), c["weights_dtype"]]) + (
        f" (stored as {c['stored_dtype']})" if c["stored_dtype"] != c["weights_dtype"] else ""
    )
    weights += f", products in {c['compute_dtype']}" if c["compute_dtype"] != c["weights_dtype"] else ""
    threads = f", {c['threads']} thread{'s' * (c['threads'] > 1)} ({c['instructions']})" if "threads" in c else ""
    s = options.sampling
    changed = [f.name for f in dataclasses.fields(s) if getattr(s, f.name) != f.default]
    chosen = ", ".join(f"{name} {getattr(s, name)}" for name in changed if s.temperature or name not in DRAWN)
    sampling = chosen if s.temperature else " with ".join(["greedy", *([chosen] if chosen else [])])
    return (
        f"{len(result.tokens)} tokens ({ended}), {speed}{_reading(engine, result)}, {first} | {c['model']}:"
        f" {c['parameters']:,} parameters, weights {weights}; backend {c['backend']}{threads}, {c['devices']} x"
        f" {c['device']}; batch 1, prompt {result.prompt_tokens} tokens, context {c['context']};"
        f" {drafts(engine, result)}; {sampling}"
    )


def reading(engine: Engine, result: Result) -> tuple[float, float | None] | None:
    """Bytes read per pass at the answer's mean context, and the time of reading them as a share of the time per pass.
    Without correct drafts a pass is a token. None if there are too few tokens for a rate.

    On native backends the time of reading is measured now. A share below 1 means that part of the time is not spent
    streaming. On other backends the share is None.
    """
    if result.time_per_token is None:
        return None
    weights = weight_bytes(engine)
    context = result.prompt_tokens + len(result.tokens) // 2
    total = weights + kv_bytes_per_token(engine.config, context, jnp.dtype(engine.conditions["kv_dtype"]).itemsize)
    if engine.session is None:
        return total, None
    passes = [engine.session.read_pass()]
    while len(passes) < 3 or sum(passes) < 0.1:  # more passes if they are short
        passes.append(engine.session.read_pass())
    return total, total / weights * min(passes) / (result.time_per_token * result.tokens_per_pass)


def _reading(engine: Engine, result: Result) -> str:
    """The result of `reading` as part of the summary; "" without a rate."""
    if (read := reading(engine, result)) is None or result.time_per_token is None:
        return ""
    num_bytes, share = read
    bound = "" if share is None else f", {share:.0%} of what its threads can read"
    unit, seconds = "token", result.time_per_token
    if result.tokens_per_pass > 1:
        unit, seconds = "pass", result.time_per_token * result.tokens_per_pass
    return f" ({num_bytes / 1e6:,.1f} MB per {unit}, {num_bytes / seconds / 1e9:.1f} GB/s{bound})"


def drafts(engine: Engine, result: Result) -> str:
    """The gain from drafts, as part of the summary."""
    counts = result.drafting
    if counts is None or not engine.conditions.get("speculation"):
        return "no speculative decoding"
    return f"{result.tokens_per_pass:.2f} tokens per pass, {sum(counts.accepted)} of {counts.drafted} drafts accepted"


def report(engine: Engine, options: Options, result: Result, compiled: float) -> dict:
    """The object that --json prints. Times are in seconds."""
    num_bytes, share = reading(engine, result) or (None, None)
    return {
        **dataclasses.asdict(result),
        "drafting": None
        if (counts := result.drafting) is None
        else {**counts._asdict(), "passes": counts.passes, "drafted": counts.drafted},
        "tokens_per_pass": result.tokens_per_pass,
        "bytes_per_token": num_bytes,
        "share_of_read_speed": share,
        "conditions": {**engine.conditions, "sampling": options.sampling.record(), "ignore_eos": options.ignore_eos},
        "warmup_seconds": compiled,
    }
