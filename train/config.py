"""What a training run is: one frozen dataclass of sections, shown by `python -m train RECIPE --help`."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError

ComputeDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, in which portions."""

    path: Path
    """Folder that `python -m scripts.tokenize` wrote."""
    sequence_length: int
    """Tokens per sequence (s)."""
    batch_size: int
    """Sequences per step, over all devices and accumulated parts."""
    seed: int = 0
    """Decides the order of the sequences."""
    validation_batches: int = 8
    """Batches of held-out text per validation, always the same ones; 0: none."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with a warmup-stable-decay schedule (Hu et al., arXiv 2404.06395)."""

    learning_rate: float = 3e-3
    """Highest learning rate, after the warm-up."""
    warmup_steps: int = 100
    """Steps over which the rate rises linearly from 0."""
    decay_fraction: float = 0.2
    """Share of the steps, at the end, over which the rate falls linearly to 0."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decay of matrices per step, times the learning rate; norms and biases do not decay."""
    clip_norm: float = 1.0
    """Gradients with a greater norm over all weights are scaled down to it."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Which devices hold what. A run may go on with other values: the losses then agree to rounding."""

    data: int = 1
    """Devices on the data axis: batches, weights and optimizer state are split over it."""
    lane: int | None = None
    """Devices on the lane axis, a divisor of model.num_lanes; by default as many as there are."""
    host_devices: int | None = None
    """On a CPU: make this many devices of it (real lanes and exchanges, without a GPU)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A pretraining run."""

    name: str
    """Names the run, and its folder unless `run` says otherwise."""
    steps: int
    """Optimizer steps of the whole run."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    """Decides the first weights."""
    accumulate: int = 1
    """Parts into which a step's batch is cut, one after the other, to save memory."""
    compute_dtype: ComputeDtype = "auto"
    """Of matrix products; auto: bfloat16, but float32 on a CPU. Master weights, streams and sums are float32."""
    remat: bool = False
    """Recompute each module in the backward pass instead of keeping its activations."""
    run: Path | None = None
    """Folder for checkpoints and metrics; by default runs/NAME. The same command goes on where a run in it stopped."""
    log_every: int = 10
    """Steps between lines of metrics on the terminal; metrics.jsonl has every step."""
    validate_every: int = 100
    """Steps between validations; the last step is always validated."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self):
        positive = {
            "steps": self.steps, "accumulate": self.accumulate, "log_every": self.log_every, "validate_every": self.validate_every,
            "save_every": self.save_every, "keep": self.keep, "mesh.data": self.mesh.data, "data.batch_size": self.data.batch_size,
            "data.sequence_length": self.data.sequence_length,
        }  # fmt: skip
        optional = {"mesh.lane": self.mesh.lane, "mesh.host_devices": self.mesh.host_devices}
        for name, value in {**positive, **{name: value for name, value in optional.items() if value is not None}}.items():
            if value < 1:
                raise ConfigError(f"{name} = {value}: it must be at least 1")
        if self.data.validation_batches < 0:
            raise ConfigError(f"data.validation_batches = {self.data.validation_batches}: it must be at least 0")
        if self.compute_dtype not in get_args(ComputeDtype):
            raise ConfigError(f"compute_dtype = {self.compute_dtype!r}: known are {', '.join(get_args(ComputeDtype))}")
        shares = self.accumulate * self.mesh.data
        if self.data.batch_size % shares:
            raise ConfigError(f"data.batch_size = {self.data.batch_size} must be a multiple of accumulate x mesh.data = {shares}")
        if self.data.sequence_length > self.model.max_position_embeddings:
            raise ConfigError(
                f"data.sequence_length = {self.data.sequence_length} is longer than the model's context "
                f"(model.max_position_embeddings = {self.model.max_position_embeddings})"
            )
        optimizer = self.optimizer
        for name in ("learning_rate", "eps", "clip_norm"):
            if not 0 < getattr(optimizer, name) < float("inf"):
                raise ConfigError(f"optimizer.{name} = {getattr(optimizer, name)}: it must be a positive number")
        for name, top in (("beta1", 1), ("beta2", 1), ("weight_decay", float("inf"))):
            if not 0 <= getattr(optimizer, name) < top:
                raise ConfigError(f"optimizer.{name} = {getattr(optimizer, name)}: it must be at least 0 and below {top}")
        if not 0 <= optimizer.decay_fraction <= 1 or optimizer.warmup_steps < 0:
            raise ConfigError("optimizer: decay_fraction lies in 0..1 and warmup_steps is at least 0")

    @property
    def run_folder(self) -> Path:
        """Where the run lies."""
        return self.run or Path("runs") / self.name


# Fields that may change when a run goes on: they do not enter the result but by rounding.
_FREE = {"run", "log_every", "validate_every", "save_every", "keep", "mesh", "remat", "name", "data.path", "data.validation_batches"}


def recorded(config: TrainConfig) -> dict[str, object]:
    """Every field as "section.option" -> JSON value."""

    def flatten(value, prefix: str):
        if dataclasses.is_dataclass(value):
            for f in dataclasses.fields(value):
                yield from flatten(getattr(value, f.name), f"{prefix}.{f.name}" if prefix else f.name)
        else:
            yield prefix, str(value) if isinstance(value, Path) else value

    return json.loads(json.dumps(dict(flatten(config, ""))))


def check_same_run(before: dict[str, object], config: TrainConfig, run: Path) -> None:
    """Raises ConfigError if `config` would not continue the run that `before` records, naming the options that differ."""
    now = recorded(config)

    def free(name: str) -> bool:
        return name in _FREE or name.split(".", maxsplit=1)[0] in _FREE

    changed = [name for name in sorted(now.keys() | before.keys()) if not free(name) and before.get(name) != now.get(name)]
    if changed:
        listed = ", ".join(f"{name} ({before.get(name)!r} before, {now.get(name)!r} now)" for name in changed[:6])
        raise ConfigError(f"{run} holds a run with other settings: {listed}; give the same, or another folder with --run")
