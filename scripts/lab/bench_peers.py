"""python -m scripts.bench_peers: compares the CPU decode kernel with llama.cpp, PyTorch and OpenVINO.

    python -m scripts.bench_peers --setup peers
    python -m scripts.bench_peers peers --json bench/peers.json
    python -m scripts.bench_peers peers --peers llama.cpp --weights int4

All engines run one model shape with random weights at batch 1, greedily, with the same number of threads: ours with its
lanes, the others as a dense Llama. llama.cpp also runs shapes like gpt-oss, Qwen3-Next and DeepSeek-V3. The engines are
measured alternately, and the machine's speed in between: the memory bandwidth around samples of decoding, the
arithmetic peak around first tokens of prompts. Each engine is a separate process (scripts/lab/peers), which is stopped
while another one is measured.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro

from laneformer import custom_calls
from laneformer.commands.lab.peers import gguf_model, prompts
from laneformer.commands.lab.peers.environments import OURS, PEERS, Engine, set_up
from laneformer.commands.lab.peers.load import QUIET, beside, quiet
from laneformer.commands.lab.peers.ours import full_attention, shape_model
from laneformer.commands.lab.peers.process import EngineError, Process
from laneformer.commands.lab.peers.protocol import Shape, Task
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, run_command
from laneformer.infer.bench.latency import packed_weight_bytes
from laneformer.infer.bench.machine import hardware, software, utc_now
from laneformer.quantized.rounding import USUAL as QUANTIZED
from laneformer.quantized.rounding import Kind
from laneformer.recipes.models import PackedModel
from laneformer.weights import kv_bytes_per_token

USUAL = "llama.cpp,torch,openvino"
READ_BYTES = 1 << 30  # far larger than any cache, and small compared with the memory of an engine
READS = 5  # passes before and after a sample; the median counts
SEPARATE = 0.75  # share of a perfect speedup of reading with all threads that implies separate memory links


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure tokens per second of several engines, and the ratio of ours to each."""

    folder: tyro.conf.Positional[Path]
    """Folder for the engines' environments (--setup), models and logs."""
    setup: bool = False
    """Install the environments, and measure nothing."""
    peers: str = USUAL
    """Comma-separated engines to compare with: llama.cpp, torch, openvino, torch-cpp (inductor's C++ wrapper), xla (our
    model compiled by XLA), bf12 (our kernel with weights in 12 bits).
    """
    weights: Literal["bfloat16", "bf12"] | Kind = "bfloat16"
    """Format of our engine's weights; engine bf12 of --peers measures both formats alternately. For int8, int4, mxfp4
    and nvfp4 llama.cpp uses Q8_0, Q4_0, MXFP4 and NVFP4, and no other engine is measured.
    """
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of our engine's products and cache; sums are float32. llama.cpp rounds activations to bfloat16, or for
    quantized weights to 8 bits, where ours have 23 (float32) or 16 (bfloat16).
    """
    shape: str = "laneformer_2b"
    """Recipe, HF folder or training run with the sizes that all engines use."""
    context: int = 512
    """Tokens in the cache before the first measured one."""
    tokens: int = 12
    """Tokens per sample; few, so that disturbances of seconds affect both engines."""
    rounds: int = 16
    """Rounds, each with a sample of ours and one of the other engine; 0 skips decoding."""
    prompts: str = "64,512,4096"
    """Comma-separated lengths of prompts whose first token is timed; lengths beyond the model's context are skipped."""
    prompt_rounds: int = 3
    """Rounds for each of these lengths; 0 skips prompts."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Threads of every engine (default: one per available core)."""
    seconds: float = 900
    """Time limit in seconds for loading, compilation included, and for each sample."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write all samples and conditions to."""


def run(options: Options) -> str:
    """Installs or measures, and returns what was installed or the table. Raises ConfigError, after printing the table,
    if an engine failed.
    """
    engines = chosen(options.peers)
    if options.setup:
        return set_up(
            options.folder, list(dict.fromkeys(engine.environment for engine in engines if engine.environment))
        )
    config, task = prepare(options)
    record = {
        "date_utc": utc_now(),
        "shape": options.shape,
        "sizes": asdict(task.shape),
        "mixers": mixers(config),
        "prompt_tokens": options.context,
        "output_tokens": options.tokens,
        "threads": task.threads,
        "weights": "random",
        "batch": 1,
        "hardware": hardware(),
        "software": software(),
        "load_before": os.getloadavg(),
        "prompt_lengths": lengths(options, config),
        "pairs": [],
        "not_measured": {},
    }
    for engine in engines:
        if why := refusal(engine, options, task.shape):
            record["not_measured"][engine.name] = why
            progress(f"{engine.name}: skipped, {why}")
    if len(record["not_measured"]) == len(engines):
        reasons = dict.fromkeys(record["not_measured"].values())
        raise ConfigError(f"none of {options.peers} can be measured: {'; '.join(reasons)}")
    failed = []
    with start(OURS, sys.executable, task, options) as ours:
        record["ours"] = ours.conditions
        for engine in engines:
            if engine.name in record["not_measured"]:
                continue
            try:
                python = engine.python(options.folder)
                with start(engine, python, task, options) as peer:
                    record["pairs"].append(pair(ours, peer, config, options, task.threads))
            except EngineError as error:
                if error.engine == ours.name:
                    raise
                record["not_measured"][engine.name] = str(error)
                failed.append(str(error))
            record["load_after"] = os.getloadavg()
            if options.json:  # after each engine, since a later one may be interrupted
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(record)
    if failed:
        print(text)
        raise ConfigError("; ".join(failed))
    return text


def chosen(names: str) -> list[Engine]:
    """Engines by name. Raises ConfigError for an unknown one."""
    if unknown := [name for name in names.split(",") if name not in PEERS]:
        raise ConfigError(f"--peers {names}: unknown engine {unknown[0]}; choose from {', '.join(PEERS)}")
    return list(dict.fromkeys(PEERS[name] for name in names.split(",")))


def refusal(engine: Engine, options: Options, shape: Shape) -> str | None:
    """Reason why the engine is not measured; None if it is."""
    if shape.architecture != "llama" and not engine.beyond_llama:
        return f"models like {options.shape} are not supported; choose llama.cpp"
    if options.weights in QUANTIZED and options.weights not in engine.quantized:
        having = ", ".join(engine.quantized)
        return f"{options.weights} weights are not supported" + (f"; choose {having}" if having else "")
    if engine.python(options.folder) is None:
        return f"not installed; run python -m scripts.bench_peers --setup {options.folder}"
    return None


def prepare(options: Options) -> tuple[ModelConfig, Task]:
    """The model, and the task of every engine. Raises ConfigError for options that no engine can run."""
    if sys.platform != "linux":
        raise ConfigError(f"this needs Linux to stop processes and count their time, not {sys.platform}")
    try:
        threads = custom_calls.default_threads() if options.threads is None else options.threads
    except custom_calls.NativeError as error:
        raise ConfigError(f"backend cpu is not available: {error}") from None
    for name, value, least in (
        ("context", options.context, 1),
        ("tokens", options.tokens, 2),
        ("rounds", options.rounds, 0),
        ("prompt-rounds", options.prompt_rounds, 0),
        ("threads", threads, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    packed = shape_model(options.shape)
    config = full_attention(packed.config)
    positions = options.context + options.tokens
    if positions > config.max_position_embeddings:
        raise ConfigError(
            f"--context {options.context} plus --tokens {options.tokens} must be at most the context of"
            f" {options.shape}, {config.max_position_embeddings}"
        )
    if options.rounds == options.prompt_rounds == 0:
        raise ConfigError("--rounds 0 and --prompt-rounds 0 leave nothing to measure; raise one of them")
    longest = max(lengths(options, config), default=0)
    folder = options.folder.absolute() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    task = Task(
        options.shape,
        shape_of(packed, config, options),
        positions,
        threads,
        str(folder),
        weights=options.weights,
        compute=options.compute,
        longest_prompt=longest,
        model=asdict(config),
        formats=dict(packed.formats),
    )
    return config, task


def lengths(options: Options, config: ModelConfig) -> list[int]:
    """Lengths of --prompts that fit into the model's context, ascending; empty without prompt rounds.

    Raises ConfigError for a value that is not a list of lengths.
    """
    try:
        wanted = sorted({int(word) for word in options.prompts.split(",")})
    except ValueError:
        wanted = []
    if not wanted or wanted[0] < 1:
        raise ConfigError(f"--prompts must be lengths separated by commas, as in 64,512, got {options.prompts!r}")
    return [length for length in wanted if length <= config.max_position_embeddings] if options.prompt_rounds else []


def shape_of(packed: PackedModel, config: ModelConfig, options: Options) -> Shape:
    """The dense Llama, or the mixture of experts, that reads equally many bytes per token. Raises ConfigError if there
    is none.
    """
    if config.lm_head_type == "lane" and config.num_lanes > 1:
        raise ConfigError(
            f"--shape {options.shape} has a head per lane (lm_head_type lane), unlike a dense model; choose another"
        )
    try:
        architecture = gguf_model.architecture(config)
    except ConfigError as error:
        raise ConfigError(f"--shape {options.shape} {error}") from None
    formats = set(packed.formats.values())
    if formats - {"mxfp4"}:
        raise ConfigError(
            f"--shape {options.shape} has matrices in {', '.join(sorted(formats - {'mxfp4'}))}, which llama.cpp lacks:"
            " choose a shape in bfloat16, such as qwen3_next_12 or scripts.peers.shapes:deepseek_v3_bfloat16"
        )
    if formats and options.weights != "bfloat16":
        raise ConfigError(
            f"--shape {options.shape} has experts in mxfp4 beside bfloat16 in all engines: leave --weights out"
        )
    experts = {}
    if config.num_experts:
        experts = {
            "experts": config.num_experts,
            "experts_used": config.num_experts_per_tok,
            "window": config.sliding_window or 0,
        }
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        ff=config.moe_intermediate_size if config.num_experts else config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        architecture=architecture,
        **experts,
    )


def mixers(config: ModelConfig) -> str:
    """Text about the attention, or what replaces it, in the layers."""
    if sizes := config.latent_attention:
        return f"latents of {sizes.kv_lora_rank} + {sizes.qk_rope_head_dim} values for a position"
    if config.delta_layers:
        return f"gated DeltaNet in {len(config.delta_layers)} layers, gated attention in the others"
    return (
        f"every second layer with a window of {config.sliding_window}" if config.sliding_window else "all layers full"
    )


def start(engine: Engine, python: str, task: Task, options: Options) -> Process:
    """Starts the engine and loads its model."""
    progress(f"{engine.name}: loading")
    process = Process(engine, python, task, options.seconds)
    progress(f"{engine.name}: loaded in {process.conditions['load_seconds']:.0f} s")
    return process


def pair(ours: Process, peer: Process, config: ModelConfig, options: Options, threads: int) -> dict:
    """Measures both engines alternately, after a request of each that computes the prompt and does not count; then
    measures first tokens of prompts.
    """
    for process in (ours, peer) if options.rounds else ():
        progress(f"{process.name}: first request, with its prompt")
        process.decode(options.context, options.tokens)
    rounds = []
    for number in range(options.rounds):
        a, b = (sample(process, config, options, threads) for process in (ours, peer))
        rounds.append(
            {"ours": a, "peer": b, "ratio": a["tokens_per_s"] / b["tokens_per_s"], "links": links(a, b, threads)}
        )
        progress(
            f"{peer.name}, round {number + 1} of {options.rounds}: ours {a['tokens_per_s']:.2f}, {peer.name}"
            f" {b['tokens_per_s']:.2f} tokens/s, ratio {rounds[-1]['ratio']:.3f}, links {rounds[-1]['links']}"
        )
    first = prompts.measure(ours, peer, config, lengths(options, config), options.prompt_rounds, threads, progress)
    sizes = {who: bytes_per_token(p.conditions, config, options) for who, p in (("ours", ours), ("peer", peer))}
    return {
        "peer": peer.name,
        "conditions": peer.conditions,
        "bytes_per_token": sizes,
        "rounds": rounds,
        "prompts": first,
    }


def sample(process: Process, config: ModelConfig, options: Options, threads: int) -> dict:
    """One request, with the memory bandwidth before and after it. Rates are over the tokens after the first."""
    before = read(threads)
    answer, foreign = beside(lambda: process.decode(options.context, options.tokens))
    after = read(threads)
    rate = len(answer["gaps"]) / sum(answer["gaps"])
    bandwidth, one = ((before[n] + after[n]) / 2 for n in range(2))
    return {
        "tokens_per_s": rate,
        "bandwidth": bandwidth,
        "bandwidth_1_thread": one,
        "foreign_cores": foreign,
        "gaps": answer["gaps"],
        "peak_bytes": answer["peak_bytes"],
        "share": rate * bytes_per_token(process.conditions, config, options) / bandwidth,
    }


def read(threads: int) -> tuple[float, float]:
    """Read bandwidth in bytes/s of all threads, and of one thread."""
    return tuple(
        statistics.median(custom_calls.read_bandwidth(READ_BYTES, n) for _ in range(READS)) for n in (threads, 1)
    )


def bytes_per_token(conditions: dict, config: ModelConfig, options: Options) -> float:
    """Bytes read per token: weights, and keys and values at the mean context, in the engine's dtypes."""
    kv = kv_bytes_per_token(config, options.context + options.tokens // 2, jnp.dtype(conditions["kv"]).itemsize)
    return packed_weight_bytes(config, conditions["weights"], conditions) + kv


def links(a: dict, b: dict, threads: int) -> str:
    """Whether the threads' cores had separate memory links around both samples: separate, shared, or mixed if it
    changed.
    """
    found = {s["bandwidth"] >= SEPARATE * threads * s["bandwidth_1_thread"] for s in (a, b)}
    return "mixed" if len(found) > 1 else "separate" if found.pop() else "shared"


def table(record: dict) -> str:
    """Markdown tables: a row per engine and state of the memory links, and one per engine and length of a prompt; with
    the conditions below them.
    """
    heads = (
        "ours over",
        "weights, ours / its",
        "activations, ours / its",
        "MB per token, ours / its",
        "links",
        "rounds",
        "ratio, median (range)",
        "ours, tokens/s",
        "tokens/s",
        "ours of read bandwidth",
        "of read bandwidth",
        "GB/s, all threads / 1",
        "foreign cores, most",
    )
    decoding = [
        _row(record["ours"], one, state, [r for r in one["rounds"] if r["links"] == state])
        for one in record["pairs"]
        for state in dict.fromkeys(r["links"] for r in one["rounds"])
    ]
    size = record["sizes"]
    h, s = record["hardware"], record["software"]
    text = []
    for head, rows in ((heads, decoding), (prompts.HEADS, prompts.rows(record["pairs"]))):
        if rows:
            text += ["| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *rows)] + [""]
    text += [
        (
            f"{record['shape']}: width {size['hidden']}, {size['layers']} layers, {size['heads']} heads,"
            f" {size['kv_heads']} key/value heads of {size['head_dim']}, {_feed_forward(size)}, vocabulary"
            f" {size['vocab']}, {record['mixers']}; random weights, batch 1, greedy, prompt {record['prompt_tokens']},"
            f" {record['output_tokens']} tokens a sample, rate over those after the first."
        ),
        (
            f"{h['host_cpu']}, {record['threads']} threads; load {record['load_before'][0]:.1f} ->"
            f" {record['load_after'][0]:.1f}; Python {s['python']}, commit"
            f" {(s['git_sha'] or 'unknown')[:12]}{' with changes' if s['dirty'] else ''}, {record['date_utc']}."
        ),
        (
            f"Links: separate if all threads together read memory at {SEPARATE:.0%} or more of a perfect speedup over"
            f" one thread. Read bandwidth: all threads over {READ_BYTES >> 30} GiB, medians of {READS} passes before"
            " and after each sample."
        ),
        (
            "Prompts: random ids, nothing reused; tokens over the time to the first drawn one. Multiply-adds: those of"
            f" the prompt over that time, relative to all threads' float32 peak in registers, medians of"
            f" {prompts.PASSES} passes before and after each sample."
        ),
    ]
    if record["pairs"]:
        text.append(f"- {OURS.name}: {_conditions(record['ours'], 'ours', record['pairs'][-1])}")
    text += [f"- {one['peer']}: {_conditions(one['conditions'], 'peer', one)}" for one in record["pairs"]]
    rounds = [r for one in record["pairs"] for r in _all_rounds(one)]
    if loud := sum(not quiet(r) for r in rounds):
        text.append(
            f"- Not quiet: in {loud} of {len(rounds)} rounds others used over {QUIET} cores; do not quote these."
        )
    text += [f"- {name}: not measured, {reason}" for name, reason in record["not_measured"].items()]
    return "\n".join(text).strip()


def _row(ours: dict, pair: dict, state: str, rounds: list[dict]) -> tuple[str, ...]:
    both, sizes = (ours, pair["conditions"]), pair["bytes_per_token"]

    def median(who: str, name: str) -> float:
        return statistics.median(r[who][name] for r in rounds)

    samples = [r[who] for r in rounds for who in ("ours", "peer")]
    ratios = [r["ratio"] for r in rounds]
    return (
        pair["peer"],
        " / ".join(_weights(c) for c in both),
        " / ".join(c.get("activations", c["compute"]) for c in both),
        " / ".join(f"{sizes[who] / 1e6:.1f}" for who in ("ours", "peer")),
        state,
        str(len(rounds)),
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        *(f"{median(who, 'tokens_per_s'):.2f}" for who in ("ours", "peer")),
        *(f"{median(who, 'share'):.1%}" for who in ("ours", "peer")),
        " / ".join(
            f"{statistics.median(s[name] for s in samples) / 1e9:.1f}" for name in ("bandwidth", "bandwidth_1_thread")
        ),
        f"{max(s['foreign_cores'] for s in samples):.2f}",
    )


def _weights(c: dict) -> str:
    """The format of an engine's matrices, by its conditions."""
    return "bf12" if "bf12_weights" in c else ", ".join(c.get("quantized_formats", [c["weights"]]))


def _feed_forward(size: dict) -> str:
    if not size["experts"]:
        return f"feed-forward {size['ff']}"
    return f"{size['experts']} experts of {size['ff']}, {size['experts_used']} used per token (random routing)"


def _all_rounds(pair: dict) -> list[dict]:
    return [*pair["rounds"], *(r for one in pair["prompts"] for r in one["rounds"])]


def _conditions(c: dict, who: str, pair: dict) -> str:
    peak = max(r[who]["peak_bytes"] for r in _all_rounds(pair))
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    packed = f" ({c['bf12_weights']:,} in 12 bits, {c['bf12_exceptions']:,} exceptions)" if "bf12_weights" in c else ""
    if "quantized_weights" in c:
        packed = f" ({c['quantized_weights']:,} as {_weights(c)}, {c['quantized_bytes']:,} bytes)"
    activations = f", activations {c['activations']}" if "activations" in c else ""
    return (
        f"{versions}; weights {c['weights']}{packed}, products {c['compute']}{activations}, cache {c['kv']};"
        f" {c['threads']} threads; {c['load']}; {c['system']};"
        f" loaded in {c['load_seconds']:.0f} s, resident {peak / 1e9:.1f} GB at most"
    )


def progress(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, Options, "python -m scripts.bench_peers", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
