"""The options of `infer roofline`, and the check of their combinations. This file must not import JAX."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from laneformer.errors import ConfigError
from laneformer.infer.roofline.agent import AgentTask
from laneformer.infer.roofline.devices import LAUNCH
from laneformer.infer.roofline.hf_config import ConfigFile
from laneformer.infer.roofline.table import MEASURED

Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
GBs = Annotated[float | None, tyro.conf.arg(metavar="GB/S")]
Microseconds = Annotated[float | None, tyro.conf.arg(metavar="US")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
PUBLISHED = "published"
Sweep = Literal["layout", "lanes", "delay", "context", "precision"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Project the speed of a model on a node at batch 1: bytes per token, the ceiling, and the time of waits."""

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG.json")]] = ""
    """config.json of a published model, or its folder: a mixture of experts (Mixtral, Qwen3-MoE, Qwen3-Next, gpt-oss,
    DeepSeek V3 and V4, Kimi K2), or a model that this package runs.
    """
    checkpoint: str = ""
    """Instead of CONFIG.json: HF folder or its config.json, training run, or recipe of `python -m train`. No weights
    are read.
    """
    moe: str = ""
    """Instead of CONFIG.json, a mixture of experts: qwen3-coder-next, gpt-oss-120b, deepseek-v4-flash, kimi-k2.6, or
    all.
    """
    gigabytes: Number = None
    """Instead of a model, the number of bytes that one token reads, 10^9 bytes."""
    layers: Integer = None
    """With --gigabytes, the number of layers, to count the waits."""
    lanes: Integer = None
    """Cut a dense checkpoint, or a recipe of one lane, into this many lanes; those of a Laneformer are fixed."""
    layout: str = ""
    """Replace the model's layout, for example by tp or "dtp(4)"."""
    device: str = "h200"
    """h100, h200, b200, rubin, mi300x, mi355x or mi450; or custom, with your own figures."""
    devices: Integer = None
    """Number of devices of the node; by default one per lane, at most as many as the fast links connect, and 8 for
    other models.
    """
    bandwidth: GBs = None
    """Measured memory bandwidth of one device, 10^9 bytes/s, instead of the table's; reads reach all of it."""
    bandwidth_share: Number = None
    """Share of the bandwidth that reads reach; by default 0.8 of the table's, and 1 of --bandwidth."""
    link: GBs = None
    """Bandwidth from one device to the others, one direction, 10^9 bytes/s, instead of the table's."""
    exchange_us: Microseconds = None
    """Latency of one exchange between devices, without the transfer time of its bytes, us, instead of the table's."""
    sync_us: Microseconds = None
    """Time from the end of one operation to the start of a dependent one, us, instead of the table's."""
    launches: float = 0
    """Number of kernel launches per token; a persistent kernel has none."""
    launch_us: float = 1e6 * LAUNCH
    """Time of one launch, us."""
    precision: str = PUBLISHED
    """Precision of the weights. published: quantized matrices of a folder, a recipe or a config.json keep their
    formats, the others are bfloat16. For all weights: float32, bfloat16, float16, bf12, fp8, int8, int4 (4.5 bits),
    mxfp4 (4.25 bits), nvfp4 (4.5 bits). --moe models always have their published mixture.
    """
    kv_precision: str = "bfloat16"
    """Precision of keys and values."""
    context: Integer = None
    """Number of positions before the token; by default 1536, or the model's longest context if that is shorter."""
    kv_megabytes: Number = None
    """With --moe NAME, the cache and state that one token reads and writes, 10^6 bytes, instead of the table's."""
    rate: Number = None
    """Known speed, tokens per second, to report its share of the bandwidth and the --sync-us that explains it."""
    rate_status: Literal["measured", "simulated"] = MEASURED
    """Origin of --rate."""
    sweep: tuple[Sweep, ...] = ()
    """Add a table of the speed against each of these, for example layout lanes."""
    agent: bool = False
    """Report how the time of an agent's task splits at several speeds."""
    task: tyro.conf.OmitArgPrefixes[AgentTask] = AgentTask()  # noqa: RUF009  frozen
    """Task of --agent."""
    references: bool = False
    """Compare public figures of other projects with the same arithmetic here."""
    json: File = None
    """Write all tables to this file."""
    png: File = None
    """Draw the speed against context, lanes and layouts, or the bytes and speeds of MoE models; with --agent also the
    split of its time.
    """


def check(options: Options, described: ConfigFile | None) -> None:
    """Raises ConfigError for values outside their range, and for options that exclude each other. Makes the folders of
    the output files. described: the parsed CONFIG.json, if given.
    """
    is_moe = bool(options.moe) or (described is not None and described.is_moe)
    is_model = bool(options.checkpoint) or (described is not None and not is_moe)
    given = {
        "CONFIG.json": options.config,
        "--checkpoint": options.checkpoint,
        "--moe": options.moe,
        "--gigabytes": options.gigabytes is not None,
    }
    models = [name for name, value in given.items() if value]
    if len(models) > 1:
        raise ConfigError(f"{' and '.join(models)} exclude each other: give one model")
    if not models and not options.agent and not options.references:
        raise ConfigError("give CONFIG.json, --checkpoint, --moe or --gigabytes, or --agent or --references alone")
    if options.gigabytes is not None and not 0 < options.gigabytes < math.inf:
        raise ConfigError(f"--gigabytes must be above 0, got {options.gigabytes:g}")
    if options.rate is not None and not 0 < options.rate < math.inf:
        raise ConfigError(f"--rate must be above 0, got {options.rate:g}")
    if options.rate is not None and (not models or options.moe == "all"):
        raise ConfigError("--rate needs one model: give CONFIG.json, --checkpoint, --moe NAME or --gigabytes")
    if options.precision != PUBLISHED and not is_model:
        raise ConfigError(
            "--precision needs --checkpoint; for MoE models, which have their own mixture, use --sweep precision"
        )
    if options.gigabytes is not None and (options.context is not None or options.kv_precision != "bfloat16"):
        raise ConfigError("--context and --kv-precision need a model; --gigabytes already counts the cache")
    if options.kv_megabytes is not None and (
        not is_moe or options.moe == "all" or not 0 <= options.kv_megabytes < math.inf
    ):
        raise ConfigError(f"--kv-megabytes needs --moe NAME and must be at least 0, got {options.kv_megabytes:g}")
    if options.layers is not None and (options.gigabytes is None or options.layers < 1):
        raise ConfigError(
            f"--layers needs --gigabytes and must be at least 1, got {options.layers}; other models have their own"
        )
    for name in ("lanes", "layout"):
        if getattr(options, name) and not is_model:
            raise ConfigError(f"--{name} needs --checkpoint; other models are known only by their bytes")
    allowed = ("precision",) if is_moe else options.sweep if is_model else ()
    refused = [name for name in options.sweep if name not in allowed]
    if refused:
        raise ConfigError(
            f"--sweep {' '.join(refused)} needs --checkpoint" + ("; with --moe use --sweep precision" if is_moe else "")
        )
    if options.png and options.png.suffix != ".png":
        raise ConfigError(f"--png must end in .png, got {options.png}")
    if options.png and not (is_moe or is_model or options.agent):
        raise ConfigError("--png needs a model (--checkpoint or --moe) or --agent")
    for file in filter(None, (options.json, options.png)):
        file.parent.mkdir(parents=True, exist_ok=True)
