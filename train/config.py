"""What a training run is: one frozen dataclass of sections, shown by `python -m train RECIPE --help`."""

import dataclasses
import fnmatch
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from laneformer.config import ModelConfig, RopeScaling
from laneformer.errors import ConfigError
from laneformer.layout import parse_layout

ComputeDtype = Literal["auto", "float32", "bfloat16"]
FIRST = "pretrain"  # name of the first phase


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, in which portions."""

    path: tuple[Path, ...]
    """Folder that `python -m scripts.tokenize` wrote, or several of them: a mixture."""
    weights: tuple[float, ...] = ()
    """Share of each folder in the rows, in the order of `path`; by default by their number of tokens."""
    sequence_length: int
    """Tokens per sequence (s)."""
    batch_size: int
    """Sequences per step, over all hosts, devices and accumulated parts."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents end to end, cut into rows; best_fit: rows of whole documents, padded (arXiv 2404.10830)."""
    attend_across_documents: bool = True
    """Whether a token sees the earlier documents of its row."""
    seed: int = 0
    """Decides the order of the sequences."""
    validation_path: tuple[Path, ...] = ()
    """Further folders whose held-out text is measured, each under its own name."""
    validation_batches: int = 8
    """Batches of held-out text per folder and validation, always the same ones; 0: none."""

    def __post_init__(self):
        for name in ("path", "validation_path"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"data.{name} = {getattr(self, name)!r}: write a tuple of folders")
        if not self.path:
            raise ConfigError("data.path is empty: name at least one folder that python -m scripts.tokenize wrote")
        if self.weights and len(self.weights) != len(self.path):
            raise ConfigError(
                f"data.weights has {len(self.weights)} numbers for the {len(self.path)} folders of data.path: give one"
                " each"
            )
        if any(not 0 < weight < math.inf for weight in self.weights):
            raise ConfigError(
                f"data.weights = {self.weights}: every weight is a positive number; leave out a folder that is not"
                " wanted"
            )
        if self.validation_batches < 0:
            raise ConfigError(f"data.validation_batches = {self.validation_batches}: it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate over the steps of a phase."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101), or muon for each lane's matrices and adamw for the rest (arXiv 2502.16982)."""
    learning_rate: float = 3e-3
    """Highest learning rate, after the warm-up."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """After the warm-up: constant, then a linear decay (wsd, arXiv 2404.06395); half a cosine; or constant to the end.
    """
    warmup_steps: int = 100
    """Steps over which the rate rises linearly from 0."""
    decay_fraction: float = 0.2
    """wsd: share of the phase's steps, at its end, over which the rate falls."""
    final_fraction: float = 0.0
    """wsd and cosine: the rate at the end, as a share of the highest."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    momentum: float = 0.95
    """muon: decay of the momentum that is orthogonalised."""
    weight_decay: float = 0.1
    """Decay of matrices per step, times the learning rate; norms and biases do not decay."""
    clip_norm: float = 1.0
    """Gradients with a greater norm over all weights are scaled down to it."""

    def __post_init__(self):
        for name in ("learning_rate", "eps", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it must be a positive number")
        for name, top in (("beta1", 1), ("beta2", 1), ("momentum", 1), ("weight_decay", math.inf)):
            if not 0 <= getattr(self, name) < top:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it must be at least 0 and below {top}")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}: it lies in 0..1")
        if self.warmup_steps < 0:
            raise ConfigError(f"optimizer.warmup_steps = {self.warmup_steps}: it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Which devices hold what. A run may go on with other values: the losses then agree to rounding."""

    data: int = 1
    """Devices on the data axis: batches, weights and optimizer state are split over it."""
    lane: int | None = None
    """Devices on the lane axis, a divisor of model.num_lanes; by default as many as there are."""
    host_devices: int | None = None
    """On a CPU: make this many devices of it, per process (real lanes and exchanges, without a GPU)."""
    distributed: bool = False
    """Join the other processes of this job first: found through SLURM, Open MPI or Kubernetes, or named by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What a run shows of itself, and when it gives up."""

    max_skipped: int = 10
    """Stop after this many steps in a row whose loss or gradient was not finite (each is skipped)."""
    max_rise: float = 3.0
    """Stop when the median loss of 20 steps lies this many nats above the lowest such median of the phase."""
    lanes: bool = True
    """At each validation: how alike the lanes' streams are by depth, and how large what lands is against what they add
    themselves.
    """
    tensorboard: bool = False
    """Also write RUN/tensorboard (pip install -e '.[tensorboard]')."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install -e '.[wandb]')."""
    samples_every: int = 0
    """Steps between samples of text, written to samples.jsonl; 0: none."""
    prompts: tuple[str, ...] = ("",)
    """What the samples continue."""
    sample_tokens: int = 64
    """Tokens per sample."""
    humaneval_every: int = 0
    """Steps between evaluations on programming problems, greedy; 0: none."""
    humaneval: Path | None = None
    """File of the problems: HumanEval, HumanEval+, MBPP or MBPP+ as .jsonl or .jsonl.gz."""
    humaneval_problems: int = 0
    """Only the first so many of them; 0: all."""
    humaneval_tokens: int = 512
    """Longest answer."""
    profile_at: int | None = None
    """Record a jax.profiler trace from this step on, in RUN/profile."""
    profile_steps: int = 5
    """Steps in the trace."""

    def __post_init__(self):
        for name in ("samples_every", "humaneval_every", "humaneval_problems"):
            if getattr(self, name) < 0:
                raise ConfigError(f"watch.{name} = {getattr(self, name)}: it must be at least 0")
        for name in ("max_skipped", "sample_tokens", "humaneval_tokens", "profile_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"watch.{name} = {getattr(self, name)}: it must be at least 1")
        if not self.max_rise > 0:
            raise ConfigError(f"watch.max_rise = {self.max_rise}: it must be positive")
        if self.humaneval_every and self.humaneval is None:
            raise ConfigError("watch.humaneval_every needs watch.humaneval: name the file of problems")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """A model cut from a dense one (python -m scripts.convert_dense) learns to be it again: see train/distill.py."""

    teacher: Path | None = None
    """Checkpoint whose distribution is learned, a Hugging Face folder or a training run; none: the data alone."""
    student: Path | None = None
    """Checkpoint with the first weights; none: fresh ones."""
    kl_weight: float = 1.0
    """Weight of the divergence from the teacher beside the cross-entropy."""
    temperature: float = 1.0
    """Softens both distributions in it (arXiv 1503.02531)."""
    anneal_steps: int = 0
    """Steps over which the delay of a layout dtp(delta) grows from 0 to delta; 0: delta from the first step on."""
    anneal_stages: int = 8
    """Equal steps in which it grows, each of which is compiled."""

    def __post_init__(self):
        if not 0 <= self.kl_weight < math.inf or not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"distill.kl_weight = {self.kl_weight} and distill.temperature = {self.temperature}: at least 0, and"
                " above 0"
            )
        if self.anneal_steps < 0 or self.anneal_stages < 1:
            raise ConfigError(
                f"distill.anneal_steps = {self.anneal_steps} and distill.anneal_stages = {self.anneal_stages}: at least"
                " 0 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase of a run: so many steps on such data with such a learning rate."""

    steps: int
    """Optimizer steps."""
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    accumulate: int = 1
    """Parts into which a step's batch is cut, one after the other, to save memory."""


@dataclass(frozen=True, kw_only=True)
class LaterPhase(PhaseConfig):
    """A phase after the first, and what it changes in the model. The context grows with data.sequence_length."""

    sliding_window: int | None = None
    """Keys that a sliding layer sees from now on; by default as before."""
    rope_theta: float | None = None
    """Base of the rotary frequencies from now on; by default as before."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies from now on; by default as before."""


@dataclass(frozen=True)
class Phase:
    """A phase with everything settled; made by `TrainConfig.phases`."""

    name: str
    index: int
    first_step: int
    """Steps of the run before it."""
    tokens_before: int
    """Tokens of the run before it."""
    steps: int
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    accumulate: int

    @property
    def last_step(self) -> int:
        """Steps of the run when it is done."""
        return self.first_step + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.sequence_length

    def tokens_at(self, step: int) -> int:
        """Tokens that the run has seen after `step` steps, in the rows that were read; padding counts."""
        return self.tokens_before + (step - self.first_step) * self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PhaseConfig):
    """A pretraining run. Its first phase stands in its own fields, the others in `then`."""

    name: str
    """Names the run, and its folder unless `run` says otherwise."""
    model: ModelConfig
    then: dict[str, LaterPhase] = field(default_factory=dict)
    """The phases after the first, by name, in order."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    seed: int = 0
    """Decides the first weights."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum of the logits in the loss (arXiv 2204.02311), which keeps them from drifting.
    """
    loss_chunk: int = 4096
    """Tokens per device whose logits exist at once."""
    compute_dtype: ComputeDtype = "auto"
    """Of matrix products; auto: bfloat16, but float32 on a CPU. Master weights, streams and sums are float32."""
    remat: Literal["none", "block", "dots"] = "none"
    """What the backward pass computes again: nothing; all of a module (block); all but its matrix products (dots)."""
    run: Path | None = None
    """Folder for checkpoints and metrics; by default runs/NAME. The same command goes on where a run in it stopped."""
    log_every: int = 10
    """Steps between lines of metrics on the terminal; metrics.jsonl has every step."""
    validate_every: int = 100
    """Steps between validations; the last step of a phase is always validated."""
    save_every: int = 100
    """Steps between checkpoints; the last step of a phase is always saved."""
    keep: int = 2
    """Newest checkpoints that are kept, beside the last one of every phase."""
    keep_every: int = 0
    """Also keep every checkpoint of a step that is a multiple of this; 0: none."""

    def __post_init__(self):
        positive = {
            name: getattr(self, name) for name in ("log_every", "validate_every", "save_every", "keep", "loss_chunk")
        }
        positive["mesh.data"] = self.mesh.data
        optional = {"mesh.lane": self.mesh.lane, "mesh.host_devices": self.mesh.host_devices}
        _require_positive({**positive, **{name: value for name, value in optional.items() if value is not None}})
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed = {self.seed}: it lies in 0..{2**32 - 1}")
        if self.keep_every < 0 or not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"keep_every = {self.keep_every} and z_loss = {self.z_loss}: both must be at least 0")
        _check_choices(self)
        if FIRST in self.then:
            raise ConfigError(f"then.{FIRST}: the first phase has that name, choose another for the later one")
        for phase in self.phases:
            _check_phase(phase, self)
        if self.distill.anneal_steps and parse_layout(self.model.layout)[0] != "dtp":
            raise ConfigError(
                f"distill.anneal_steps needs a layout dtp(delta), not {self.model.layout}: that delay can grow in"
                " fractions"
            )
        if self.distill.anneal_steps > self.steps:
            raise ConfigError(f"distill.anneal_steps = {self.distill.anneal_steps} is more than steps = {self.steps}")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases in order, each with its own model config. Raises ConfigError if the model cannot work in one of
        them.
        """
        phases, model, steps, tokens = [], self.model, 0, 0
        for index, (name, phase) in enumerate([(FIRST, self), *self.then.items()]):
            if index:
                changes = {
                    n: getattr(phase, n)
                    for n in ("sliding_window", "rope_theta", "rope_scaling")
                    if getattr(phase, n) is not None
                }
                longest = max(model.max_position_embeddings, phase.data.sequence_length)
                model = model.replace(max_position_embeddings=longest, **changes)
            phases.append(
                Phase(name, index, steps, tokens, phase.steps, model, phase.data, phase.optimizer, phase.accumulate)
            )
            steps, tokens = steps + phase.steps, tokens + phase.steps * phases[-1].tokens_per_step
        return tuple(phases)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return self.phases[-1].last_step

    def phase_at(self, step: int) -> Phase:
        """The phase that takes the run from `step` steps to `step` + 1; the last one when all are done."""
        return next((phase for phase in self.phases if step < phase.last_step), self.phases[-1])

    @property
    def run_folder(self) -> Path:
        """Where the run lies."""
        return self.run or Path("runs") / self.name


def _require_positive(values: dict[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} = {value}: it must be at least 1")


def _check_choices(value, prefix: str = "") -> None:
    """Raises ConfigError for a text that is none of its field's Literal choices, in every section."""
    for name, kind in get_type_hints(type(value)).items():
        inner = getattr(value, name)
        if get_args(kind) and getattr(kind, "__origin__", None) is Literal and inner not in get_args(kind):
            raise ConfigError(f"{prefix}{name} = {inner!r}: known are {', '.join(get_args(kind))}")
        if isinstance(inner, DataConfig | OptimizerConfig):
            _check_choices(inner, f"{prefix}{name}.")
        if isinstance(inner, dict):
            for key, phase in inner.items():
                _check_choices(phase, f"{prefix}{name}.{key}.")


def _check_phase(phase: Phase, config: TrainConfig) -> None:
    where = f"then.{phase.name}." if phase.index else ""
    data = phase.data
    _require_positive(
        {
            f"{where}steps": phase.steps,
            f"{where}accumulate": phase.accumulate,
            f"{where}data.batch_size": data.batch_size,
            f"{where}data.sequence_length": data.sequence_length,
        }
    )
    shares = phase.accumulate * config.mesh.data
    if data.batch_size % shares:
        raise ConfigError(
            f"{where}data.batch_size = {data.batch_size} must be a multiple of accumulate x mesh.data = {shares}"
        )
    if data.sequence_length > phase.model.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length = {data.sequence_length} is longer than the model's context "
            f"(model.max_position_embeddings = {phase.model.max_position_embeddings})"
        )


# Fields that may change when a run goes on: they do not enter the result but by rounding.
_FREE = (
    "run",
    "name",
    "log_every",
    "validate_every",
    "save_every",
    "keep",
    "keep_every",
    "remat",
    "loss_chunk",
    "mesh.*",
    "watch.*",
    "distill.teacher",
    "distill.student",
    "*data.path",
    "*data.validation_path",
    "*data.validation_batches",
)


def recorded(config: TrainConfig) -> dict[str, object]:
    """Every field as "section.option" -> JSON value."""

    def flatten(value: Any, prefix: str):
        if dataclasses.is_dataclass(value):
            value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from flatten(inner, f"{prefix}.{name}" if prefix else name)
        else:
            yield prefix, value

    return json.loads(json.dumps(dict(flatten(config, "")), default=str))


def check_same_run(before: dict[str, object], config: TrainConfig, run: Path) -> None:
    """Raises ConfigError if `config` would not continue the run that `before` records, naming the options that
    differ.
    """
    now, distils_nothing = recorded(config), dataclasses.asdict(DistillConfig())
    before = {
        f"distill.{name}": value for name, value in distils_nothing.items()
    } | before  # a run from before there was this section

    def free(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in _FREE)

    changed = [
        name for name in sorted(now.keys() | before.keys()) if not free(name) and before.get(name) != now.get(name)
    ]
    if changed:
        listed = ", ".join(f"{name} ({before.get(name)!r} before, {now.get(name)!r} now)" for name in changed[:6])
        raise ConfigError(
            f"{run} holds a run with other settings: {listed}; give the same, or another folder with --run"
        )
