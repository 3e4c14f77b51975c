"""What a recipe will need and how long it will take on a cluster that need not exist: `python -m train RECIPE
--dry-run`.
"""

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
from laneformer.mesh import DATA, LANE
from train.config import Phase, TrainConfig
from train.data.packing import row_keys
from train.flops import attention_flops_per_token, train_flops_per_token
from train.planning.cluster import Device, find_device
from train.planning.compile_only import OPTIONS, Compiler, compile_only_devices
from train.program.program import Program, gigabytes, read_program
from train.recipes import parse
from train.step import Trainer

USABLE = 0.92  # of a device's memory; the rest is for the driver, NCCL, cuBLAS and fragments. An assumption.
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The hardware that a dry run plans for."""

    device: str = "h200"
    """h100, h200, b200, mi300x, mi355x, or cpu (no times)."""
    nodes: int | None = None
    """Nodes of 8 devices; mesh.data becomes what fills them. By default as many as the recipe's mesh needs."""
    network: float | None = None
    """Bandwidth to other nodes, Gb/s per device and direction; by default that of the device's usual node."""
    efficiency: float = 0.6
    """Share of the peak that matrix products reach; an assumption."""
    compiler: Compiler = "auto"
    """cuda: XLA's compiler for NVIDIA GPUs, without a GPU (pip install 'jax[cuda12]'); cpu: XLA:CPU, whose memory and
    traffic are too large for a GPU; auto: cuda where it is installed and knows the device.
    """

    def __post_init__(self):
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"cluster.nodes = {self.nodes}: it must be at least 1")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"cluster.efficiency = {self.efficiency}: it is a share of the peak, above 0 and at most 1"
            )
        if self.network is not None and not 0 < self.network < math.inf:
            raise ConfigError(f"cluster.network = {self.network}: it must be a positive number")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per step, projected. A roofline: each resource by itself at full speed, its share of the peak stated in
    the cluster.
    """

    device: float
    """Sum over kernels of the longer of products at efficiency x peak and bytes at the memory's bandwidth."""
    products: float
    """Of `device`: the model's FLOPs alone."""
    links: float
    """Exchanges within nodes."""
    network: float
    """Exchanges between nodes."""

    @property
    def overlapped(self) -> float:
        """If computing and both kinds of exchange run wholly at the same time."""
        return max(self.device, self.links, self.network)

    @property
    def in_turn(self) -> float:
        """If they never do."""
        return self.device + self.links + self.network

    @property
    def bound(self) -> str:
        """Which resource the step waits for when all overlap."""
        name = max(("device", "links", "network"), key=lambda name: getattr(self, name))
        if name == "device":
            return "matrix products" if self.products > self.device / 2 else "device memory"
        return {"links": "links in the node", "network": "network"}[name]


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase, per device and step where nothing else is said. All of it is projected."""

    name: str
    steps: int
    tokens_per_step: int
    model_flops: float
    """Of a step on all devices, train/flops.py."""
    parameters: int
    """Bytes of the state: master weights,"""
    moments: int
    """and what the optimizer keeps."""
    gradients: int
    """Bytes of one set of float32 gradients, the least of `program.memory.temporary`."""
    program: Program
    fits: bool
    advice: tuple[str, ...]
    times: Times | None
    """None where the cluster has no speeds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a cluster, projected."""

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
        """All figures, with what follows from them."""
        phases = []
        for phase in self.phases:
            program = dataclasses.replace(phase.program, kernels=())
            derived = {
                "memory_total": phase.program.memory.total,
                "matmul_flops": phase.program.matmul_flops,
                "memory_traffic": phase.program.memory_traffic,
                **speeds(self, phase),
            }
            phases.append({**dataclasses.asdict(dataclasses.replace(phase, program=program)), **derived})
        return {"projected": True, **dataclasses.asdict(dataclasses.replace(self, phases=())), "phases": phases}


def plan(config: TrainConfig, cluster: ClusterConfig) -> Plan:
    """Compiles every phase for the cluster; nothing of the model's size is made. Call before the first JAX operation.

    Raises ConfigError for a recipe or a mesh that cannot work there.
    """
    config, nodes = _fill(config, cluster)
    count = config.mesh.data * config.mesh.lane
    device = find_device(cluster.device, count)
    if cluster.network is not None:
        device = dataclasses.replace(device, network=cluster.network * 1e9 / 8)
    if device.network is None and nodes > 1:
        raise ConfigError(f"the table has no network for {cluster.device}: give --cluster.network, in Gb/s per device")
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
        keys = row_keys(phase.data, (), "train")  # a store with loss masks would add weights
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


def _fill(config: TrainConfig, cluster: ClusterConfig) -> tuple[TrainConfig, int]:
    """The recipe with a mesh that fills the cluster, and its nodes."""
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
                f"{nodes} nodes of {per_node} devices cannot be filled by lanes on {lane} devices: choose another"
                " mesh.lane"
            )
        mesh = dataclasses.replace(mesh, data=nodes * per_node // lane if cluster.nodes else mesh.data)
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, lane=lane)), nodes


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
        advice=() if fits else _advice(config, phase, parameters, program),
        times=_times(plan, phase, flops, program),
    )


def _times(plan: Plan, phase: Phase, model_flops: float, program: Program) -> Times | None:
    device = plan.device
    if device.peak_flops is None:
        return None
    speed = device.peak_flops * plan.cluster.efficiency
    products = model_flops / plan.devices / speed
    kernels = sum(k.times * max(k.flops / speed, k.bytes / device.memory_bandwidth) for k in program.kernels)
    if program.unknown_loops or any(
        "fmha" in name for name in program.libraries
    ):  # attention's products do not show in the program
        attention = 3 * attention_flops_per_token(phase.model, phase.data.sequence_length) * phase.tokens_per_step
        kernels += attention / plan.devices / speed
    spread = {DATA: plan.mesh[LANE] * (plan.mesh[DATA] - 1), LANE: plan.mesh[LANE] - 1}  # devices lie lane by lane
    inside = [axis for axis in program.axes if spread.get(axis, plan.devices - 1) < device.per_node]
    return Times(
        device=max(products, kernels),
        products=products,
        links=sum(program.sent(axis) for axis in inside) / device.link,
        network=sum(program.sent(axis) / device.network for axis in program.axes if axis not in inside),
    )


def _advice(config: TrainConfig, phase: Phase, parameters: int, program: Program) -> tuple[str, ...]:
    """What makes the phase smaller, the cheapest first."""
    said, memory = [], program.memory
    option = f"--then.{phase.name}." if phase.index else "--"
    rows = phase.data.batch_size // (phase.accumulate * config.mesh.data)
    if rows > 1:
        said.append(
            f"{option}accumulate {phase.accumulate * 2} halves the activations ({rows} sequences per device at a time)"
        )
    if config.remat != "block":
        said.append(
            f"--remat {'dots' if config.remat == 'none' else 'block'} keeps fewer activations and computes them again"
        )
    if memory.arguments + parameters > memory.total / 3:
        said.append(f"more devices on the data axis (--mesh.data {2 * config.mesh.data}) halve state and gradients")
    if config.mesh.lane < config.model.num_lanes:
        said.append(f"--mesh.lane {config.model.num_lanes} spreads the lanes over more devices")
    return tuple(said or [f"shorter sequences ({option}data.sequence-length), or devices with more memory"])


def speeds(plan: Plan, phase: PhasePlan) -> dict[str, list[float]]:
    """[if nothing overlaps, if everything does]: step_seconds, tokens_per_second, mfu, days. Empty where the cluster
    has no speeds.
    """
    if phase.times is None:
        return {}
    steps = [phase.times.in_turn, phase.times.overlapped]
    return {
        "step_seconds": steps,
        "tokens_per_second": [phase.tokens_per_step / s for s in steps],
        "mfu": [phase.model_flops / (s * plan.devices * plan.device.peak_flops) for s in steps],
        "days": [phase.steps * s / DAY for s in steps],
    }


def describe(plan: Plan) -> str:
    """The plan as a table, one column per phase."""
    axes = sorted({axis for phase in plan.phases for axis in phase.program.axes})
    timed = plan.phases[0].times is not None
    names = [
        "projected",
        "steps",
        "tokens",
        "state per device",
        "  weights, moments",
        "temporary per device",
        "  of it gradients at least",
        "memory per device",
        "  of the device's",
        "model FLOPs per device",
        "  products in the program",
        "memory read and written",
        *(f"sent along {axis}" for axis in axes),
    ]
    if timed:
        names += ["seconds: device", "  model's products alone", "seconds: links", "seconds: network", "bound by"]
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
        if timed:
            t, s = phase.times, speeds(plan, phase)
            column += [f"{t.device:.3g}", f"{t.products:.3g}", f"{t.links:.3g}", f"{t.network:.3g}", t.bound]
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
        f"compiled with XLA:{'GPU' if plan.compiler == 'cuda' else 'CPU'}; nothing was run: every figure is projected",
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
        lines.append(f"set XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}: JAX takes 0.75 of a GPU's memory otherwise")
    if plan.compiler == "cpu" and plan.cluster.device != "cpu":
        lines.append(
            "XLA:CPU stood in for the device: temporary memory and traffic are upper estimates (bfloat16 computed in"
            " float32)"
        )
    if any(phase.program.unknown_loops for phase in plan.phases):
        lines.append(
            "loops of unknown length (attention's tiles) count once in the program's figures; times have attention by"
            " formula"
        )
    if plan.phases[0].times:
        days = [sum(speeds(plan, phase)["days"][n] for phase in plan.phases) for n in (0, 1)]
        lines.append(f"the whole run: {_range(days, ',.3g')} days")
        lines.append(
            f"ranges: computing and exchanges overlap wholly, or never; products at {plan.cluster.efficiency:.0%} of"
            f" the peak; memory ({plan.device.memory_bandwidth / 1e12:.3g} TB/s), links ({plan.device.link / 1e9:,.0f}"
            f" GB/s) and network ({(plan.device.network or 0) / 1e9:,.0f} GB/s) at full speed; saving and validating"
            " are not in it"
        )
    return lines


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in sorted(values))
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What --dry-run takes beside the recipe's options."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    json: Path | None = None
    """Also write all figures to this file."""


def dry_run(arguments: Sequence[str]) -> str:
    """`RECIPE --dry-run [--cluster.option value] [--json FILE] [--section.option value]`: the plan to print."""
    rest = [argument for argument in arguments if argument != "--dry-run"]
    options, rest = tyro.cli(DryRun, args=rest, return_unknown_args=True, add_help=False)
    config = parse(rest)
    if options.json is not None:  # what could not be written is told before the minutes of compiling
        with writing(options.json, "name another file with --json"), open(options.json, "a"):
            pass
    result = plan(config, options.cluster)
    if options.json is not None:
        options.json.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    return describe(result)
