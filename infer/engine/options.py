"""The options of an engine, the same in every command. Imports no JAX: the server's web process uses them too."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from laneformer.errors import ConfigError

Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, tyro.conf.arg(metavar="{float32,bfloat16,float16}")]
WEIGHTS = (
    "bfloat16",
    "bf12",
    "int8",
    "int4",
    "mxfp4",
    "nvfp4",
    "fp8",
)  # those of laneformer/quantized/rounding.py, without NumPy
MOST_DRAFTS = 15  # of a pass: custom_calls/cpu/session.py has MOST_ROWS, one more
WeightFormat = Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(WEIGHTS)}}}")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A model and what runs it; opened by `infer.engine.job.open_engine`."""

    checkpoint: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """HF folder, training run or one step of a run; or a recipe of `python -m train`, for random weights."""
    backend: str = "auto"
    """cuda, hip, cpu, xla, or auto for the first available; cuda-graph(-overlap): one launch per op, to compare."""
    devices: int = 1
    """Devices to spread the lanes over; without a GPU the CPU is split into as many."""
    threads: Integer = None
    """Worker threads of backend cpu; by default one per core that this process may use."""
    lanes: Integer = None
    """Cut a dense checkpoint, or a recipe of one lane, into this many; the number is fixed for a Laneformer."""
    dtype: Dtype = None
    """Convert the weights; by default they stay as stored, and those of a recipe are bfloat16."""
    weights: WeightFormat = None
    """How native backends hold the matrices: as they are (bfloat16), bfloat16 in 12 bits without loss (bf12), or by
    default the faster on backend cpu; int8 and the others round them when they are packed. Quantized weights stay so
    unless this is bfloat16.
    """
    draft_max: Integer = None
    """Most tokens that a pass of backend cpu drafts from the text itself and checks, 0 to 15 (cuda: 3): faster where an
    answer repeats text, and the same in every bit. By default on backend cpu as many as pay by what passes take; none
    where drafts would change what is measured (bench without --text, humaneval).
    """
    no_speculation: bool = False
    """Draft nothing: the plain speed, which others' plain decoding is compared with."""
    compute: Dtype = None
    """Dtype of the products, whose sums are float32; by default that of the weights, on a CPU float32."""

    def check(self) -> None:
        """Raises ConfigError for a value that no engine accepts."""
        if self.devices < 1:
            raise ConfigError(f"--devices must be at least 1, got {self.devices}")
        if self.draft_max is not None and not 0 <= self.draft_max <= MOST_DRAFTS:
            raise ConfigError(f"--draft-max must be 0 to {MOST_DRAFTS}, got {self.draft_max}")
        if self.no_speculation and self.draft_max:
            raise ConfigError(f"give either --no-speculation or --draft-max {self.draft_max}")
        for word in (self.weights or WEIGHTS[0]).split(","):  # several in bench
            if word not in WEIGHTS:
                raise ConfigError(f"--weights must be one of {', '.join(WEIGHTS)}, got {word}")

    def drafts(self) -> dict[str, int | None]:
        """The backend's option for a command that drafts unless it is asked not to."""
        return {"speculation": 0 if self.no_speculation else self.draft_max}


@dataclass(frozen=True, kw_only=True)
class JobEngineOptions(EngineOptions):
    """The same for a command that several processes may run together."""

    distributed: bool = False
    """Join the job's other processes, one per GPU, with the same command; --devices counts the GPUs of all."""
