"""`python -m train RECIPE --dry-run`: projects memory and time of a recipe on a cluster that you need not have."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import tyro

import laneformer as lf
from laneformer.errors import ConfigError, writing
from laneformer.mesh import LANE
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.data.packing import row_keys
from laneformer.train.flops import train_flops_per_token
from laneformer.train.planning.cluster import EFFICIENCY, Device, find_device, speeds_of
from laneformer.train.planning.compile_only import OPTIONS, Compiler, compile_only_devices
from laneformer.train.program.overlap import PURPOSES, Overlap, overlaps
from laneformer.train.program.program import UNSCHEDULED, Program, gigabytes, read_program
from laneformer.train.recipes import parse
from laneformer.train.step import Trainer
from laneformer.weights import attention_flops_per_token

USABLE = 0.92  # share of a device's memory; the driver, NCCL, cuBLAS and fragments take the rest (an assumption)
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Hardware to plan a dry run for."""

    device: str = "h200"
    """Accelerator: h100, h200, b200, mi300x, mi355x, or cpu (without times)."""
    nodes: int | None = None
    """Nodes of 8 devices; sets mesh.data to fill them (default: as many as the recipe's mesh needs)."""
    network: float | None = None
    """Bandwidth to other nodes, Gb/s per device and direction (default: of the device's usual node)."""
    efficiency: float = EFFICIENCY
    """Share of the peak that matrix products are assumed to reach."""
    compiler: Compiler = "auto"
    """cuda: XLA's compiler for NVIDIA GPUs, needs no GPU (pip install 'jax[cuda12]'); cpu: XLA:CPU, which overestimates
    memory and traffic of a GPU; auto: cuda if it is installed and supports the device.
    """

    def __post_init__(self):
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"cluster.nodes must be at least 1, got {self.nodes}")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"cluster.efficiency must be a share of the peak, above 0 and at most 1, got {self.efficiency}"
            )
        if self.network is not None and not 0 < self.network < math.inf:
            raise ConfigError(f"cluster.network must be a positive number, got {self.network}")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Projected seconds per step by a roofline: each resource alone at full speed, products at `efficiency`."""

    device: float
    """Kernels: for each the longer of its products at efficiency x peak and its bytes at the memory's bandwidth."""
    products: float
    """Part of `device` for the model's FLOPs alone."""
    links: float
    """Exchanges within nodes."""
    network: float
    """Exchanges between nodes."""
    overlaps: tuple[Overlap, ...] | None
    """Overlap of exchanges and kernels in the program's order; None if every exchange is one instruction (XLA:CPU)."""

    @property
    def scheduled(self) -> float | None:
        """Seconds if kernels wait for exchanges where the program does."""
        return None if self.overlaps is None else self.device + sum(o.exposed for o in self.overlaps)

    @property
    def overlapped(self) -> float:
        """Seconds if computing and both kinds of exchange overlap completely."""
        return max(self.device, self.links, self.network)

    @property
    def in_turn(self) -> float:
        """Seconds if computing and exchanges never overlap."""
        return self.device + self.links + self.network

    @property
    def bound(self) -> str:
        """Name of the resource that limits the step if everything overlaps."""
        name = max(("device", "links", "network"), key=lambda name: getattr(self, name))
        if name == "device":
            return "matrix products" if self.products > self.device / 2 else "device memory"
        return {"links": "links in the node", "network": "network"}[name]


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Projection of one phase, per device and step unless stated otherwise."""

    name: str
    steps: int
    tokens_per_step: int
    model_flops: float
    """FLOPs of a step on all devices (train/flops.py)."""
    parameters: int
    """Bytes of the master weights."""
    moments: int
    """Bytes of the optimizer's state."""
    gradients: int
    """Bytes of one set of float32 gradients, a lower bound of `program.memory.temporary`."""
    program: Program
    fits: bool
    advice: tuple[str, ...]
    times: Times | None
    """None if the cluster has no speeds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Projection of a run on a cluster."""

    recipe: str
    parameters: int
    cluster: ClusterConfig
    device: Device
    devices: int
    mesh: dict[str, int]
    compiler: str
    compute_dtype: str
    phases: tuple[PhasePlan, ...] = ()

    def as_json(self) -> dict:
        """All figures, derived ones included, as JSON values."""
        phases = []
        for phase in self.phases:
            program = dataclasses.replace(phase.program, steps=())
            derived = {
                "memory_total": phase.program.memory.total,
                "matmul_flops": phase.program.matmul_flops,
                "memory_traffic": phase.program.memory_traffic,
                **speeds(self, phase),
            }
            phases.append({**dataclasses.asdict(dataclasses.replace(phase, program=program)), **derived})
        return {"projected": True, **dataclasses.asdict(dataclasses.replace(self, phases=())), "phases": phases}


def plan(config: TrainConfig, cluster: ClusterConfig) -> Plan:
    """Compiles every phase for the cluster, without allocating anything of the model's size. Call before the first JAX
    operation.

    Raises ConfigError for a recipe or mesh that does not fit the cluster.
    """
    config, nodes, count = _fill(config, cluster)
    device = device_of(cluster, count, nodes)
    if config.compute_dtype == "auto" and cluster.device != "cpu":
        config = dataclasses.replace(config, compute_dtype="bfloat16")
    devices, compiler = compile_only_devices(cluster.device, device, nodes, cluster.compiler)
    mesh = lf.make_mesh(config.model.num_lanes, data=config.mesh.data, lane=config.mesh.lane, devices=devices)
    result = Plan(
        recipe=config.name,
        parameters=lf.parameter_count(config.model),
        cluster=cluster,
        device=device,
        devices=count,
        mesh=dict(mesh.shape),
        compiler=compiler,
        compute_dtype=Trainer(config, config.phases[0], mesh).precision.compute,
    )
    compiled: dict[tuple, tuple[Trainer, Program]] = {}
    for phase in config.phases:
        keys = row_keys(phase.data, (), "train")  # a store with loss masks would add "weights"
        what = (
            phase.model,
            phase.data.batch_size,
            phase.data.sequence_length,
            keys,
            phase.accumulate,
            phase.optimizer.kind,
        )
        if what not in compiled:
            trainer = Trainer(config, phase, mesh, keys)
            lowered = trainer.lower_step()
            compiled[what] = trainer, read_program(lowered, lowered.compile(OPTIONS[compiler]), mesh)
        result = dataclasses.replace(result, phases=(*result.phases, _phase(result, config, phase, *compiled[what])))
    return result


def device_of(cluster: ClusterConfig, count: int, nodes: int) -> Device:
    """The device of a cluster of `count` devices in `nodes` nodes.

    Raises ConfigError if several nodes are connected by a network of unknown speed.
    """
    device = find_device(cluster.device, count)
    if cluster.network is not None:
        device = dataclasses.replace(device, network=cluster.network * 1e9 / 8)
    if device.network is None and nodes > 1:
        raise ConfigError(f"no known network for {cluster.device}; give --cluster.network, in Gb/s per device")
    return device


def _fill(config: TrainConfig, cluster: ClusterConfig) -> tuple[TrainConfig, int, int]:
    """The recipe with a mesh that fills the cluster, the number of nodes, and that of devices."""
    mesh = config.mesh
    if cluster.device == "cpu":
        lane = mesh.lane or math.gcd(config.model.num_lanes, max(1, (mesh.host_devices or 1) // mesh.data))
        nodes = 1
    else:
        per_node = find_device(cluster.device, 1).per_node
        lane = mesh.lane or math.gcd(config.model.num_lanes, per_node)
        nodes = cluster.nodes or math.ceil(mesh.data * lane / per_node)
        if cluster.nodes and nodes * per_node % lane:
            raise ConfigError(
                f"lanes on {lane} devices do not fill {nodes} nodes of {per_node} devices; choose another mesh.lane"
            )
        mesh = dataclasses.replace(mesh, data=nodes * per_node // lane if cluster.nodes else mesh.data)
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, lane=lane)), nodes, mesh.data * lane


def _phase(plan: Plan, config: TrainConfig, phase: Phase, trainer: Trainer, program: Program) -> PhasePlan:
    state = trainer.abstract_state()

    def held(tree) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    parameters = held(state.params)
    flops = train_flops_per_token(phase.model, phase.data.sequence_length) * phase.tokens_per_step
    fits = program.memory.total <= USABLE * plan.device.memory
    return PhasePlan(
        name=phase.name,
        steps=phase.steps,
        tokens_per_step=phase.tokens_per_step,
        model_flops=flops,
        parameters=parameters,
        moments=held(state.optimizer),
        gradients=parameters,
        program=program,
        fits=fits,
        advice=() if fits else _advice(config, phase, parameters, program, plan.mesh[LANE]),
        times=_times(plan, phase, flops, program),
    )


def _times(plan: Plan, phase: Phase, model_flops: float, program: Program) -> Times | None:
    speeds = speeds_of(plan.device, plan.mesh, plan.cluster.efficiency)
    if speeds is None:
        return None
    products = model_flops / plan.devices / speeds.products
    kernels = sum(k.times * speeds.kernel_seconds(k.flops, k.bytes) for k in program.kernels)
    if program.unknown_loops:  # the program's figures miss most of attention's tiles
        attention = 3 * attention_flops_per_token(phase.model, phase.data.sequence_length) * phase.tokens_per_step
        kernels += attention / plan.devices / speeds.products
    exchanges = {"links": 0.0, "network": 0.0}
    for c in program.collectives:
        link, seconds = speeds.exchange_seconds(c.kind, c.axis, c.sent)
        exchanges[link] += seconds
    return Times(
        device=max(products, kernels), products=products, **exchanges, overlaps=overlaps(program.steps, speeds)
    )


def _advice(config: TrainConfig, phase: Phase, parameters: int, program: Program, lane: int) -> tuple[str, ...]:
    """Options that reduce the memory of the phase, the cheapest first. lane: devices on the lane axis."""
    found, memory = [], program.memory
    option = f"--then.{phase.name}." if phase.index else "--"
    rows = phase.data.batch_size // (phase.accumulate * config.mesh.data)
    if rows > 1:
        found.append(
            f"{option}accumulate {phase.accumulate * 2} halves the activations ({rows} sequences per device at a time)"
        )
    if config.remat != "block":
        found.append(
            f"--remat {'dots' if config.remat == 'none' else 'block'} keeps fewer activations and recomputes them"
        )
    if memory.arguments + parameters > memory.total / 3:
        found.append(f"--mesh.data {2 * config.mesh.data} (more devices) halves state and gradients")
    if lane < config.model.num_lanes:
        found.append(f"--mesh.lane {config.model.num_lanes} spreads the lanes over more devices")
    return tuple(found or [f"shorter sequences ({option}data.sequence-length), or devices with more memory"])


def speeds(plan: Plan, phase: PhasePlan) -> dict[str, list[float]]:
    """step_seconds, tokens_per_second, mfu and days, each [no overlap, full overlap], and a third value as scheduled if
    the program overlaps exchanges. Empty if the cluster has no speeds.
    """
    peak = plan.device.peak_flops
    if phase.times is None or peak is None:
        return {}
    steps = [phase.times.in_turn, phase.times.overlapped]
    steps += [] if phase.times.scheduled is None else [phase.times.scheduled]
    return {
        "step_seconds": steps,
        "tokens_per_second": [phase.tokens_per_step / s for s in steps],
        "mfu": [phase.model_flops / (s * plan.devices * peak) for s in steps],
        "days": [phase.steps * s / DAY for s in steps],
    }


def describe(plan: Plan) -> str:
    """The plan as a table, one column per phase."""
    axes = sorted({axis for phase in plan.phases for axis in phase.program.axes})
    times = [phase.times for phase in plan.phases if phase.times is not None]
    names = [
        "projected",
        "steps",
        "tokens",
        "state per device",
        "  weights, moments",
        "temporary per device",
        "  gradients, at least",
        "memory per device",
        "  share of the device",
        "model FLOPs per device",
        "  products in the program",
        "memory read and written",
        *(f"sent along {axis}" for axis in axes),
    ]
    if times:
        names += ["seconds: device", "  model's products alone", "seconds: links", "seconds: network", "bound by"]
        present = {overlap.purpose for t in times for overlap in t.overlaps or ()}
        purposes = [purpose for purpose in PURPOSES if purpose in present]
        names += [*(f"exchanges: {purpose}" for purpose in purposes), "seconds: kernels wait"]
        names += ["seconds per step", "tokens/s", "MFU", "days"]
    rows = [[name] for name in names]
    for phase in plan.phases:
        m, share = phase.program.memory, phase.program.memory.total / plan.device.memory
        column = [
            phase.name,
            f"{phase.steps:,}",
            f"{phase.steps * phase.tokens_per_step:.4g}",
            gigabytes(phase.parameters + phase.moments),
            f"{gigabytes(phase.parameters)}, {gigabytes(phase.moments)}",
            gigabytes(m.temporary),
            gigabytes(phase.gradients),
            gigabytes(m.total),
            f"{share:.0%}{'' if phase.fits else ', TOO MUCH'}",
            f"{phase.model_flops / plan.devices / 1e12:.4g} TFLOP",
            f"{phase.program.matmul_flops / 1e12:.4g} TFLOP",
            gigabytes(phase.program.memory_traffic),
            *(gigabytes(phase.program.sent(axis)) for axis in axes),
        ]
        if (t := phase.times) is not None:
            s = speeds(plan, phase)
            column += [f"{t.device:.3g}", f"{t.products:.3g}", f"{t.links:.3g}", f"{t.network:.3g}", t.bound]
            found = {o.purpose: _overlap(o) for o in t.overlaps or ()}
            column += [found.get(purpose, "") for purpose in purposes]
            column += ["unknown" if t.scheduled is None else f"{t.scheduled - t.device:.3g}"]
            column += [_range(s["step_seconds"], ".3g"), _range(s["tokens_per_second"], ",.0f")]
            column += [_range(s["mfu"], ".1%"), _range(s["days"], ",.3g")]
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*_heading(plan), "", *table, "", *_notes(plan)])


def _heading(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    peak = f"{plan.device.peak_flops / 1e12:,.0f} TFLOP/s, " if plan.device.peak_flops else ""
    return [
        (
            f"{plan.recipe}: {plan.parameters:,} parameters on {plan.devices} x {plan.device.kind}"
            f" ({peak}{gigabytes(plan.device.memory)}), mesh {mesh}, products in {plan.compute_dtype}"
        ),
        f"compiled with XLA:{'GPU' if plan.compiler == 'cuda' else 'CPU'}; nothing ran, every figure is projected",
    ]


def _notes(plan: Plan) -> list[str]:
    lines = []
    for phase in plan.phases:
        if not phase.fits:
            lines.append(
                f"{phase.name} does not fit in {USABLE:.0%} of {gigabytes(plan.device.memory)}; try:"
                f" {'; '.join(phase.advice)}"
            )
    largest = max(phase.program.memory.total for phase in plan.phases) / plan.device.memory
    if 0.75 < largest <= USABLE and plan.cluster.device != "cpu":
        lines.append(f"set XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}; by default JAX takes 0.75 of a GPU's memory")
    if plan.compiler == "cpu" and plan.cluster.device != "cpu":
        lines.append(
            "compiled for XLA:CPU instead of the device: temporary memory and traffic are upper estimates (bfloat16"
            " computed in float32)"
        )
    if any(phase.program.unknown_loops for phase in plan.phases):
        lines.append(
            "loops of unknown length (attention's tiles) count once in the program's figures; times use a"
            " formula for attention"
        )
    times = [phase.times for phase in plan.phases if phase.times is not None]
    if any(t.scheduled is None for t in times):
        lines.append(UNSCHEDULED)
    if times:
        device = plan.device
        memory, link, network = (speed or 0 for speed in (device.memory_bandwidth, device.link, device.network))
        days = [sum(column) for column in zip(*(speeds(plan, phase)["days"] for phase in plan.phases), strict=False)]
        lines.append(f"days of the whole run: {_range(days, ',.3g')}")
        lines.append(
            "ranges: computing and exchanges overlap completely, or never; as scheduled: in the order of the compiled"
            " program, the exchanges on a link one after another; products at"
            f" {plan.cluster.efficiency:.0%} of the peak; memory ({memory / 1e12:.3g} TB/s), "
            f"links ({link / 1e9:,.0f} GB/s) and network ({network / 1e9:,.0f} GB/s) at"
            " full speed; without saving and validating"
        )
    return lines


def _range(values: Sequence[float], form: str) -> str:
    """Text of [no overlap, full overlap], or of these and as scheduled."""
    low, high = (format(value, form) for value in sorted(values[:2]))
    text = low if low == high else f"{low} to {high}"
    return text if len(values) < 3 else f"{text}, {format(values[2], form)} as scheduled"


def _overlap(overlap: Overlap) -> str:
    counts = f"{overlap.count}: {overlap.hidden} hidden, {overlap.partly} in part, {overlap.alone} not"
    return f"{counts}; wait {overlap.exposed:.2g} of {overlap.seconds:.2g}"


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Options of --dry-run in addition to the recipe's."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    json: Path | None = None
    """File to write all figures to."""


def dry_run(arguments: Sequence[str]) -> str:
    """The text of the plan for RECIPE --dry-run [--cluster.option value] [--json FILE] [--section.option value]."""
    rest = [argument for argument in arguments if argument != "--dry-run"]
    options, rest = tyro.cli(DryRun, args=rest, return_unknown_args=True, add_help=False)
    config = parse(rest)
    if options.json is not None:  # fail before compiling for minutes if the file cannot be written
        with writing(options.json, "name another file with --json"), open(options.json, "a"):
            pass
    result = plan(config, options.cluster)
    if options.json is not None:
        options.json.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    return describe(result)
