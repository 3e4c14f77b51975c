"""The options of `infer roofline`, and which of them exclude each other. Does not import JAX."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from infer.roofline.agent import AgentTask
from infer.roofline.devices import LAUNCH
from infer.roofline.hf_config import ConfigFile
from infer.roofline.table import MEASURED
from laneformer.errors import ConfigError

Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
GBs = Annotated[float | None, tyro.conf.arg(metavar="GB/S")]
Microseconds = Annotated[float | None, tyro.conf.arg(metavar="US")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
Sweep = Literal["layout", "lanes", "delay", "context", "precision"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Project the speed at batch 1 of one model on one node: bytes per token by part, the ceiling, and what waiting
    adds.
    """

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG.json")]] = ""
    """config.json of a published model, or its folder: a mixture of experts (Mixtral, Qwen3-MoE, Qwen3-Next, gpt-oss,
    DeepSeek V3 and V4, Kimi K2), or a model that this package runs.
    """
    checkpoint: str = ""
    """Or: HF folder or its config.json, training run, or a recipe as `python -m train` takes it. No weights are read.
    """
    moe: str = ""
    """Or a mixture-of-experts model by name, or all: qwen3-coder-next, gpt-oss-120b, deepseek-v4-flash, kimi-k2.6."""
    gigabytes: Number = None
    """Or only the bytes that one token reads, 10^9 bytes."""
    layers: Integer = None
    """With --gigabytes: layers, so that waits are counted."""
    lanes: Integer = None
    """Cut a dense checkpoint into so many lanes. A Laneformer has its own number."""
    layout: str = ""
    """Another layout than the model's, as in tp or "dtp(4)"."""
    device: str = "h200"
    """h100, h200, b200, rubin, mi300x, mi355x or mi450; or custom, with figures of your own."""
    devices: Integer = None
    """Devices of the node; by default one per lane, as many as its fast links join, and 8 for the other models."""
    bandwidth: GBs = None
    """Memory bandwidth of one device, 10^9 bytes per second, in place of the table's: a measured one, of which all
    counts.
    """
    bandwidth_share: Number = None
    """Share of the bandwidth that reads reach; by default 0.8 of the table's, 1 of --bandwidth."""
    link: GBs = None
    """Bandwidth from one device to the others, one direction, in place of the table's."""
    exchange_us: Microseconds = None
    """Latency of one exchange between devices, without the time of its bytes, in place of the table's."""
    sync_us: Microseconds = None
    """From the end of one operation to the start of one that needs its result, in place of the table's."""
    launches: float = 0
    """Kernel launches per token; a persistent kernel has none."""
    launch_us: float = 1e6 * LAUNCH
    """Time of one launch."""
    precision: str = "bfloat16"
    """Of the weights: float32, bfloat16, float16, fp8, int8, int4 (4.5 bits), mxfp4 (4.25 bits). MoE models have their
    own mixture.
    """
    kv_precision: str = "bfloat16"
    """Of keys and values."""
    context: Integer = None
    """Positions before the token; by default 1536, or the model's longest context if that is shorter."""
    kv_megabytes: Number = None
    """With --moe NAME: what one token reads and writes of cache and state, 10^6 bytes, in place of the table's or where
    it is unknown.
    """
    rate: Number = None
    """Tokens per second that are known: for the share of the bandwidth, and the time of a dependent operation that
    explains them.
    """
    rate_status: Literal["measured", "simulated"] = MEASURED
    """Where --rate is from."""
    sweep: tuple[Sweep, ...] = ()
    """Tables of the speed against these, as in layout lanes."""
    agent: bool = False
    """Where the time of an agent's task goes at several speeds."""
    task: tyro.conf.OmitArgPrefixes[AgentTask] = AgentTask()  # noqa: RUF009  frozen
    """The task of --agent."""
    references: bool = False
    """Public figures of others beside what the same arithmetic gives here."""
    json: File = None
    """Write all tables to this file."""
    png: File = None
    """Draw the speed against context, lanes and layouts, or of the MoE models; with --agent the split of its time."""


def check(options: Options, described: ConfigFile | None) -> None:
    """Raises ConfigError for what cannot be meant together."""
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
        raise ConfigError(f"{' and '.join(models)}: give one model")
    if not models and not options.agent and not options.references:
        raise ConfigError("give CONFIG.json, --checkpoint, --moe or --gigabytes, or --agent or --references alone")
    if options.gigabytes is not None and not 0 < options.gigabytes < math.inf:
        raise ConfigError(f"--gigabytes {options.gigabytes:g}: it must be above 0")
    if options.rate is not None and not 0 < options.rate < math.inf:
        raise ConfigError(f"--rate {options.rate:g}: it must be above 0")
    if options.rate is not None and (not models or options.moe == "all"):
        raise ConfigError("--rate belongs to one model: give CONFIG.json, --checkpoint, --moe NAME or --gigabytes")
    if options.precision != "bfloat16" and not is_model:
        raise ConfigError(
            "--precision is for --checkpoint: MoE models have their own mixture, beside which --sweep precision sets"
            " others"
        )
    if options.gigabytes is not None and (options.context is not None or options.kv_precision != "bfloat16"):
        raise ConfigError("--context and --kv-precision need a model: --gigabytes counts all that a token reads")
    if options.kv_megabytes is not None and (
        not is_moe or options.moe == "all" or not 0 <= options.kv_megabytes < math.inf
    ):
        raise ConfigError(f"--kv-megabytes {options.kv_megabytes:g}: 0 or above, and only with --moe NAME")
    if options.layers is not None and (options.gigabytes is None or options.layers < 1):
        raise ConfigError(
            f"--layers {options.layers}: at least 1, and only with --gigabytes; the other models have their own"
        )
    for name in ("lanes", "layout"):
        if getattr(options, name) and not is_model:
            raise ConfigError(f"--{name} is for --checkpoint: other models are known by their bytes alone")
    allowed = ("precision",) if is_moe else options.sweep if is_model else ()
    refused = [name for name in options.sweep if name not in allowed]
    if refused:
        raise ConfigError(
            f"--sweep {' '.join(refused)} needs a model of --checkpoint" + ("; of --moe: precision" if is_moe else "")
        )
    if options.png and options.png.suffix != ".png":
        raise ConfigError(f"--png {options.png}: give a name that ends in .png")
    if options.png and not (is_moe or is_model or options.agent):
        raise ConfigError("--png draws a model of --checkpoint or --moe, or the task of --agent")
    for file in filter(None, (options.json, options.png)):
        file.parent.mkdir(parents=True, exist_ok=True)
