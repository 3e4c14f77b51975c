"""The options of an engine, the same in every command. This file must not import JAX, because the server's web process
uses it too.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
)  # with the formats of laneformer/quantized/rounding.py, which would import NumPy
MOST_DRAFTS = 15  # drafts of a pass: MOST_ROWS of custom_calls/cpu/session.py, minus the row of the last token
WeightFormat = Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(WEIGHTS)}}}")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A model and the backend that runs it. `infer.engine.job.open_engine` opens them."""

    checkpoint: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """HF folder, training run, or one step of a run; or a recipe of `python -m train`, with random weights."""
    backend: str = "auto"
    """cuda, hip, cpu, xla, or auto for the first available; cuda-graph(-overlap): one launch per op, to compare."""
    devices: int = 1
    """Number of devices to spread the lanes over; without a GPU the CPU is split into this many."""
    threads: Integer = None
    """Worker threads of backend cpu; by default one per core that this process may use."""
    lanes: Integer = None
    """Cut a dense checkpoint, or a recipe of one lane, into this many lanes; those of a Laneformer are fixed."""
    dtype: Dtype = None
    """Convert the weights to this dtype; by default they stay as stored, and those of a recipe are bfloat16."""
    weights: WeightFormat = None
    """Format of the matrices on native backends: bfloat16 keeps them as stored, bf12 packs bfloat16 in 12 bits without
    loss, the others round them when they are packed. By default backend cpu takes the faster of the first two.
    Quantized weights stay quantized unless this is bfloat16.
    """
    draft_max: Integer = None
    """Limit on the tokens that a pass drafts from the text and checks, 0 to 15 on backend cpu, 0 to 3 on cuda. Drafts
    speed up answers that repeat text, and do not change a bit of them. By default backend cpu drafts as many as the
    times of its passes make worthwhile, but none where drafts would change the measurement (bench without --text,
    humaneval).
    """
    no_speculation: bool = False
    """Draft nothing, to measure plain decoding and compare it with that of other engines."""
    compute: Dtype = None
    """Dtype of the products; their sums are float32. By default the dtype of the weights, on a CPU float32."""

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

    def drafts(self) -> dict[str, Any]:
        """The backend option `speculation`, for a command that drafts by default."""
        return {"speculation": 0 if self.no_speculation else self.draft_max}


@dataclass(frozen=True, kw_only=True)
class JobEngineOptions(EngineOptions):
    """Engine options of a command that several processes may run together."""

    distributed: bool = False
    """Join the other processes of the job, one per GPU, which run the same command; --devices counts all GPUs."""
