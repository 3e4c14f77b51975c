"""The configuration of a training run: one frozen dataclass of sections, shown by `python -m train RECIPE --help`."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from laneformer.config import ModelConfig, RopeScaling, recorded_fields
from laneformer.errors import ConfigError
from laneformer.layout import parse_layout
from laneformer.ops import LATER
from laneformer.quantized.rounding import Kind, Shared
from laneformer.train.rounding import check_groups

ComputeDtype = Literal["auto", "float32", "bfloat16"]
Narrow = Literal["float32", "bfloat16"]
FIRST = "pretrain"  # name of the first phase


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data: its folders, and how they become batches."""

    path: tuple[Path, ...]
    """Folders written by `python -m scripts.tokenize`; several make a mixture."""
    weights: tuple[float, ...] = ()
    """Share of each folder in the rows, in the order of `path` (default: in proportion to their tokens)."""
    sequence_length: int
    """Tokens per sequence (s)."""
    batch_size: int
    """Sequences per step, summed over hosts, devices and accumulated parts."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents end to end, cut into rows; best_fit: rows of whole documents, padded (arXiv 2404.10830)."""
    attend_across_documents: bool = True
    """Let a token attend to earlier documents of its row."""
    seed: int = 0
    """Seed of the order of the sequences."""
    validation_path: tuple[Path, ...] = ()
    """Further folders to measure held-out loss on, each reported under its folder name."""
    validation_batches: int = 8
    """Batches of held-out text per folder in each validation, always the same ones; 0: no validation."""

    def __post_init__(self):
        for name in ("path", "validation_path"):
            if not isinstance(getattr(self, name), tuple):
                raise ConfigError(f"data.{name} must be a tuple of folders, got {getattr(self, name)!r}")
        if not self.path:
            raise ConfigError("data.path is empty: name at least one folder that python -m scripts.tokenize wrote")
        if self.weights and len(self.weights) != len(self.path):
            raise ConfigError(
                f"data.weights must have one number per folder of data.path ({len(self.path)}), got {len(self.weights)}"
            )
        if any(not 0 < weight < math.inf for weight in self.weights):
            raise ConfigError(
                f"data.weights must be positive numbers, got {self.weights}; leave out folders of weight 0"
            )
        if self.validation_batches < 0:
            raise ConfigError(f"data.validation_batches must be at least 0, got {self.validation_batches}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, and its learning rate over the steps of a phase."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101), or muon (arXiv 2502.16982) for each lane's matrices with adamw for the rest."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Rate after the warm-up: wsd (constant, then a linear decay, arXiv 2404.06395), cosine, or constant."""
    warmup_steps: int = 100
    """Steps in which the rate rises linearly from 0."""
    decay_fraction: float = 0.2
    """wsd: share of the phase's steps, at its end, in which the rate decays."""
    decay: Literal["linear", "1-sqrt"] = field(default="linear", metadata=LATER)
    """wsd: form of the decay: linear, or 1-sqrt, 1 minus the root of the share of the decay that is over (arXiv
    2405.18392).
    """
    final_fraction: float = 0.0
    """wsd and cosine: final rate, as a share of the peak."""
    beta1: float = 0.9
    """Decay per step of the running mean of gradients."""
    beta2: float = 0.95
    """Decay per step of the running mean of squared gradients."""
    eps: float = 1e-8
    """Constant added to the root of the mean square."""
    momentum: float = 0.95
    """muon: decay per step of the momentum, which is then orthogonalised."""
    weight_decay: float = 0.1
    """Decay per step of matrices, embeddings and head, as a multiple of the learning rate; norms and biases do not
    decay.
    """
    decay_embeddings: bool = field(default=True, metadata=LATER)
    """Whether embeddings and head decay like matrices."""
    embedding_rate: float = field(default=1.0, metadata=LATER)
    """Learning rate of the embeddings, which a tied head shares, as a multiple of learning_rate."""
    head_rate: float = field(default=1.0, metadata=LATER)
    """Learning rate of the head as a multiple of learning_rate."""
    clip_norm: float = 1.0
    """Largest gradient norm over all weights; gradients above it are scaled down to it."""

    def __post_init__(self):
        for name in ("learning_rate", "eps", "clip_norm", "embedding_rate", "head_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name} must be a positive number, got {getattr(self, name)}")
        for name, top in (("beta1", 1), ("beta2", 1), ("momentum", 1), ("weight_decay", math.inf)):
            if not 0 <= getattr(self, name) < top:
                raise ConfigError(f"optimizer.{name} must be at least 0 and below {top}, got {getattr(self, name)}")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimizer.{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ConfigError(f"optimizer.warmup_steps must be at least 0, got {self.warmup_steps}")

    def decay_steps(self, steps: int) -> int:
        """Number of steps of the decay at the end of a phase of `steps` steps, 0 unless the schedule is wsd."""
        return math.ceil(self.decay_fraction * steps) if self.schedule == "wsd" else 0

    def steady_steps(self, steps: int) -> int:
        """Number of steps before the rate falls in a phase of `steps` steps. Their rates depend only on the peak and
        the warm-up.
        """
        return self.warmup_steps if self.schedule == "cosine" else steps - self.decay_steps(steps)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices of the run. A resumed run may change them: its losses then agree to rounding."""

    data: int = 1
    """Devices on the data axis, which splits batches, weights and optimizer state."""
    lane: int | None = None
    """Devices on the lane axis, a divisor of model.num_lanes (default: as many as are available)."""
    host_devices: int | None = None
    """CPU only: split the CPU into this many devices per process, to run real lanes and exchanges without a GPU."""
    distributed: bool = False
    """Join the other processes of the job first, found through SLURM, Open MPI or Kubernetes, or given by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What a run logs besides its losses, and when it gives up."""

    max_skipped: int = 10
    """Stop after this many consecutive skipped steps: steps whose loss or gradient is not finite."""
    max_rise: float = 3.0
    """Stop when the median loss of 20 steps is this many nats above the lowest such median of the phase."""
    lanes: bool = True
    """At each validation, record by depth how similar the lanes' streams are, and how much other lanes add to a stream
    relative to its own lane.
    """
    tensorboard: bool = False
    """Also write RUN/tensorboard (pip install -e '.[tensorboard]')."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install -e '.[wandb]')."""
    samples_every: int = 0
    """Steps between text samples, written to samples.jsonl; 0: no samples."""
    prompts: tuple[str, ...] = ("",)
    """Prompts that the samples continue."""
    sample_tokens: int = 64
    """Tokens per sample."""
    humaneval_every: int = 0
    """Steps between greedy evaluations on programming problems; 0: no evaluations."""
    humaneval: Path | None = None
    """File of problems: HumanEval, HumanEval+, MBPP or MBPP+, as .jsonl or .jsonl.gz."""
    humaneval_problems: int = 0
    """Number of problems to use, counted from the first; 0: all."""
    humaneval_tokens: int = 512
    """Tokens per answer, at most."""
    profile_at: int | None = None
    """Step at which to start a jax.profiler trace, written to RUN/profile."""
    profile_steps: int = 5
    """Steps in the trace."""

    def __post_init__(self):
        for name in ("samples_every", "humaneval_every", "humaneval_problems"):
            if getattr(self, name) < 0:
                raise ConfigError(f"watch.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_skipped", "sample_tokens", "humaneval_tokens", "profile_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"watch.{name} must be at least 1, got {getattr(self, name)}")
        if not self.max_rise > 0:
            raise ConfigError(f"watch.max_rise must be positive, got {self.max_rise}")
        if self.humaneval_every:
            _ = self.humaneval_file

    @property
    def humaneval_file(self) -> Path:
        """The file of problems. Raises ConfigError if none is named."""
        if self.humaneval is None:
            raise ConfigError("watch.humaneval_every needs a file of problems; name it with watch.humaneval")
        return self.humaneval


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation of a dense model into the one that scripts.convert_dense cut from it: see train/distill.py."""

    teacher: Path | None = None
    """Checkpoint whose distribution the model learns: a Hugging Face folder or a training run (default: none)."""
    kl_weight: float = 1.0
    """Weight of the KL divergence from the teacher, relative to the cross-entropy."""
    temperature: float = 1.0
    """Temperature of both distributions in the divergence (arXiv 1503.02531)."""
    anneal_steps: int = 0
    """Steps in which the delay of a layout dtp(delta) grows from 0 to delta; 0: delta from the first step on."""
    anneal_stages: int = 8
    """Number of equal stages in which the delay grows; each one is compiled."""

    def __post_init__(self):
        if not 0 <= self.kl_weight < math.inf or not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"distill.kl_weight must be at least 0 and distill.temperature above 0, got {self.kl_weight} and"
                f" {self.temperature}"
            )
        if self.anneal_steps < 0 or self.anneal_stages < 1:
            raise ConfigError(
                f"distill.anneal_steps must be at least 0 and distill.anneal_stages at least 1, got {self.anneal_steps}"
                f" and {self.anneal_stages}"
            )


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase of a run: its steps, data and optimizer."""

    steps: int
    """Optimizer steps."""
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    accumulate: int = 1
    """Parts of a step's batch, computed one after another to save memory."""
    weights: Literal["float32", Kind] = field(default="float32", metadata=LATER)
    """Format of the matrices in the forward pass of this phase. A format other than float32 rounds them at each step,
    so that the model learns to work with rounded weights (docs/quantized.md).
    """
    group: Annotated[Shared | None, tyro.conf.arg(metavar="{INT,row,block,tensor}")] = field(
        default=None, metadata=LATER
    )
    """Part of a matrix that shares a scale in that format, as --group of python -m scripts.quantize."""


@dataclass(frozen=True, kw_only=True)
class LaterPhase(PhaseConfig):
    """A phase after the first, and its changes to the model. The context grows with data.sequence_length."""

    sliding_window: int | None = None
    """Keys that a sliding layer attends to from this phase on (default: unchanged)."""
    rope_theta: float | None = None
    """Base of the rotary frequencies from this phase on (default: unchanged)."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies from this phase on (default: unchanged)."""


@dataclass(frozen=True)
class Phase:
    """A phase with its place in the run and its own model config; made by `TrainConfig.phases`."""

    name: str
    index: int
    first_step: int
    """Steps of the run before this phase."""
    tokens_before: int
    """Tokens of the run before this phase."""
    steps: int
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    accumulate: int
    weights: Literal["float32", Kind] = "float32"
    group: Shared | None = None
    skip: tuple[tuple[int, int], ...] = ()
    """TrainConfig.skip_steps in this phase: the first step of each span, counted from 0, and the number of steps."""

    @property
    def last_step(self) -> int:
        """Steps of the run at the end of this phase."""
        return self.first_step + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.sequence_length

    def tokens_at(self, step: int) -> int:
        """Tokens read by the run in its first `step` steps, padding included."""
        return self.tokens_before + (step - self.first_step) * self.tokens_per_step

    def batch_of(self, step: int) -> int:
        """Number in the data order of the batch that the phase's step `step` reads, both counted from 0."""
        for first, count in reversed(self.skip):
            step += count if step >= first else 0
        return step


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PhaseConfig):
    """A pretraining run. Its own fields describe the first phase; `then` describes the later ones."""

    name: str
    """Name of the run, and of its folder unless `run` is given."""
    model: ModelConfig
    then: dict[str, LaterPhase] = field(default_factory=dict)
    """Phases after the first, by name, in order."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    seed: int = 0
    """Seed of the initial weights."""
    initial: Path | None = field(default=None, metadata=LATER)
    """Checkpoint to start from, a Hugging Face folder or a training run: its weights, its model (options of model.*
    change it), and the moments of a run that had the same kind of optimizer (default: random weights).
    """
    skip_steps: tuple[str, ...] = field(default=(), metadata=LATER)
    """Steps whose batches are left out, such as 1200:1210 (both included) after a spike: these and later steps read the
    batches that follow. A further span counts steps as the earlier spans leave them.
    """
    z_loss: float = 0.0
    """Weight, in the loss, of the mean squared log-sum-exp of the logits (arXiv 2204.02311). It keeps the logits from
    drifting.
    """
    load_balance_loss: float = field(default=0.01, metadata=LATER)
    """Weight of the routers' load-balancing loss (arXiv 2101.03961), which spreads tokens evenly over the experts. No
    effect without experts.
    """
    router_z_loss: float = field(default=0.001, metadata=LATER)
    """Weight, in the loss, of the mean squared log-sum-exp of the routers' logits (arXiv 2202.08906). No effect without
    experts.
    """
    loss_chunk: int = 4096
    """Tokens per device whose logits are in memory at once."""
    compute_dtype: ComputeDtype = "auto"
    """Dtype of matrix products; auto: float32 on a CPU, else bfloat16. Master weights and sums are float32."""
    exchange_dtype: Narrow = field(default="float32", metadata=LATER)
    """Dtype in which devices exchange sums over lanes and their gradients; streams add them in stream_dtype."""
    activation_dtype: Narrow = field(default="float32", metadata=LATER)
    """Dtype of the results of matrix products in attention and MLP, which are kept for the backward pass."""
    stream_dtype: Narrow = field(default="float32", metadata=LATER)
    """Dtype of the residual streams and of the sums in them; bfloat16 excludes lanes on several CPU devices."""
    remat: Literal["none", "block", "dots"] = "none"
    """What the backward pass recomputes: nothing (none), whole modules (block), or all but matrix products (dots)."""
    run: Path | None = None
    """Folder for checkpoints and metrics (default: runs/NAME). Run the same command again to resume a run in it."""
    log_every: int = 10
    """Steps between metric lines on the terminal; metrics.jsonl has every step."""
    validate_every: int = 100
    """Steps between validations; the last step of a phase is always validated."""
    save_every: int = 100
    """Steps between checkpoints; the last step of a phase is always saved."""
    keep: int = 2
    """Number of newest checkpoints to keep, in addition to the last one of every phase."""
    keep_every: int = 0
    """Also keep checkpoints at multiples of this many steps; 0: none."""

    def __post_init__(self):
        positive = {
            name: getattr(self, name) for name in ("log_every", "validate_every", "save_every", "keep", "loss_chunk")
        }
        positive["mesh.data"] = self.mesh.data
        optional = {"mesh.lane": self.mesh.lane, "mesh.host_devices": self.mesh.host_devices}
        _require_positive({**positive, **{name: value for name, value in optional.items() if value is not None}})
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be between 0 and {2**32 - 1}, got {self.seed}")
        for name in ("keep_every", "z_loss", "load_balance_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        _check_choices(self)
        if self.model.hash_layers:
            raise ConfigError("model.hash_layers: only generation is supported; leave it out to train")
        for name in ("compressed_attention", "residual_streams"):
            if getattr(self.model, name) and self.distill.teacher:
                raise ConfigError(f"model.{name} with distill is not supported; leave one of them out")
        if self.model.num_experts is not None and self.distill.teacher is not None:
            raise ConfigError(
                f"distill.teacher with model.num_experts = {self.model.num_experts} is not supported: distillation does"
                " not balance experts; leave one of them out"
            )
        if self.model.num_experts is not None and self.activation_dtype != "float32":
            raise ConfigError(
                f"activation_dtype = {self.activation_dtype} with model.num_experts = {self.model.num_experts} is not"
                " supported: results of experts are float32; leave activation_dtype out"
            )
        if FIRST in self.then:
            raise ConfigError(f"then.{FIRST} has the name of the first phase; choose another name")
        for text, (first, last) in zip(self.skip_steps, self.skipped, strict=True):
            if not 1 <= first <= last or first > self.total_steps:
                raise ConfigError(
                    f"skip_steps = {text} must have a first step of at least 1, and no later than its last and steps ="
                    f" {self.total_steps}"
                )
        for phase in self.phases:
            _check_phase(phase, self)
        if self.distill.anneal_steps and parse_layout(self.model.layout)[0] != "dtp":
            raise ConfigError(
                "distill.anneal_steps needs a delay that can grow in fractions; set model.layout to dtp(delta), not"
                f" {self.model.layout}"
            )
        if self.distill.anneal_steps > self.steps:
            raise ConfigError(
                f"distill.anneal_steps = {self.distill.anneal_steps} must be at most steps = {self.steps}"
            )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases in order, each with its own model config. Raises ConfigError if one of these is invalid."""
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
            spans = [(max(first - 1, steps), min(last, steps + phase.steps)) for first, last in self.skipped]
            skip = tuple((first - steps, last - first) for first, last in spans if first < last)
            made = Phase(
                name,
                index,
                first_step=steps,
                tokens_before=tokens,
                steps=phase.steps,
                model=model,
                data=phase.data,
                optimizer=phase.optimizer,
                accumulate=phase.accumulate,
                weights=phase.weights,
                group=phase.group,
                skip=skip,
            )
            phases.append(made)
            steps, tokens = steps + phase.steps, tokens + made.steps * made.tokens_per_step
        return tuple(phases)

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """First and last step of each span of skip_steps. Raises ConfigError for another form."""
        spans = []
        for text in self.skip_steps:
            first, *last = text.split(":")
            if not all(word.isdecimal() for word in (first, *last)) or len(last) > 1:
                raise ConfigError(f"skip_steps = {text!r} must be a step or FIRST:LAST, such as 1200:1210")
            spans.append((int(first), int((last or [first])[0])))
        return tuple(spans)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return self.phases[-1].last_step

    def phase_at(self, step: int) -> Phase:
        """The phase that follows `step` finished steps of the run; the last phase once all steps are done."""
        return next((phase for phase in self.phases if step < phase.last_step), self.phases[-1])

    @property
    def initial_path(self) -> Path:
        """The checkpoint to start from. Raises ConfigError if none is named."""
        if self.initial is None:
            raise ConfigError("the run starts with random weights; name a checkpoint with --initial")
        return self.initial

    @property
    def run_folder(self) -> Path:
        """Folder of the run."""
        return self.run or Path("runs") / self.name


def _require_positive(values: dict[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def _check_choices(value, prefix: str = "") -> None:
    """Raises ConfigError for a value outside its field's Literal choices, in any section."""
    for name, kind in get_type_hints(type(value)).items():
        inner = getattr(value, name)
        if get_args(kind) and getattr(kind, "__origin__", None) is Literal and inner not in get_args(kind):
            raise ConfigError(f"unknown {prefix}{name} {inner!r}; choose {', '.join(get_args(kind))}")
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
    warmup, decay = phase.optimizer.warmup_steps, phase.optimizer.decay_steps(phase.steps)
    if warmup + decay > phase.steps:
        after = f" and the {decay} steps of the decay (decay_fraction = {phase.optimizer.decay_fraction})"
        raise ConfigError(
            f"{where}optimizer.warmup_steps = {warmup}{after if decay else ''} exceed {where}steps = {phase.steps}; set"
            f" {where}optimizer.warmup_steps to at most {phase.steps - decay}"
            + (f", or lower {where}optimizer.decay_fraction" if decay else "")
        )
    shares = phase.accumulate * config.mesh.data
    if data.batch_size % shares:
        raise ConfigError(
            f"{where}data.batch_size must be a multiple of accumulate x mesh.data = {shares}, got {data.batch_size}"
        )
    if attention := phase.model.compressed_attention:
        if not data.attend_across_documents:
            raise ConfigError(
                f"{where}data.attend_across_documents = False with model.compressed_attention is not supported: an"
                " entry may combine positions of two documents; leave it out"
            )
        entries = data.sequence_length // attention.overlap_ratio
        if attention.overlap_ratio in attention.ratios and entries > attention.index_topk:
            raise ConfigError(
                f"model.compressed_attention.index_topk = {attention.index_topk} must be at least {entries}, the"
                f" entries of {where}data.sequence_length = {data.sequence_length}: no loss trains a choice among"
                " entries"
            )
    if phase.weights != "float32" and phase.model.num_experts is not None:
        raise ConfigError(
            f"{where}weights = {phase.weights} with model.num_experts = {phase.model.num_experts} is not supported:"
            f" experts are trained in float32; leave {where}weights out"
        )
    if phase.weights != "float32":
        try:
            check_groups(phase.model, phase.weights, phase.group)
        except ConfigError as error:
            raise ConfigError(f"{where}weights = {phase.weights}: {error}; choose another {where}group") from None
    elif phase.group is not None:
        raise ConfigError(f"{where}group = {phase.group} needs {where}weights in a format of 8 or 4 bits")
    if data.sequence_length > phase.model.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length must be at most model.max_position_embeddings ="
            f" {phase.model.max_position_embeddings}, got {data.sequence_length}"
        )


def recorded(config: TrainConfig) -> dict[str, Any]:
    """All fields of the config: "section.option" -> JSON value."""

    def flatten(value: Any, prefix: str):
        if dataclasses.is_dataclass(value):
            value = recorded_fields(value)
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from flatten(inner, f"{prefix}.{name}" if prefix else name)
        else:
            yield prefix, value

    return json.loads(json.dumps(dict(flatten(config, "")), default=str))
