"""Summary of a compiled step: exchanges, matrix products and memory of one device.

A run writes it to program/PHASE.{hlo.txt.gz, json, md}.
"""

import dataclasses
import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
from jax.sharding import Mesh

from laneformer.train.planning.cluster import Speeds, find_kind, speeds_of
from laneformer.train.program.hlo import Collective, Kernel, Module, Step, kernels_of
from laneformer.train.program.overlap import Overlap, is_scheduled, overlaps

UNSCHEDULED = (
    "this program starts and awaits each exchange in one instruction (XLA:CPU), so what its schedule hides is unknown"
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the program runs, by XLA's buffer assignment."""

    arguments: int
    """Inputs of the program: the state and the batch."""
    outputs: int
    aliased: int
    """Part of the outputs that reuses donated arguments."""
    temporary: int
    """Gradients, activations and scratch at their peak."""

    @property
    def total(self) -> int:
        """All bytes in use at once, without memory of libraries and drivers."""
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclass(frozen=True, kw_only=True)
class Program:
    """A summary of one compiled program, per device and call."""

    mesh: dict[str, int]
    memory: Memory
    steps: tuple[Step, ...]
    """Kernels and exchanges in the order of their launches."""
    collectives: tuple[Collective, ...]
    """Exchanges after compilation. XLA merges small ones, and delayed ones of the lane axis, into fewer larger ones."""
    issued: dict[str, int]
    """Exchanges by kind before the compiler adds those of the data axis and merges some; in a loop, each counts once.
    """
    libraries: dict[str, int]
    """Launches of kernels that are not XLA's own."""
    unknown_loops: tuple[str, ...]
    """Loops with a trip count unknown to XLA; their contents are counted once."""

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels except exchanges."""
        return tuple(kernels_of(self.steps))

    @property
    def matmul_flops(self) -> int:
        """FLOPs of the matrix products in the compiled text, including cuDNN's attention."""
        return sum(kernel.flops * kernel.times for kernel in self.kernels)

    @property
    def memory_traffic(self) -> int:
        """Bytes that kernels read and write in device memory, if no cache keeps data between two kernels."""
        return int(sum(kernel.bytes * kernel.times for kernel in self.kernels))

    def sent(self, axis: str) -> int:
        """Bytes that a device sends along a mesh axis."""
        return sum(c.sent for c in self.collectives if c.axis == axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes with exchanges, the one with the most bytes first."""
        return tuple(sorted({c.axis for c in self.collectives}, key=lambda axis: -self.sent(axis)))


def read_program(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, mesh: Mesh) -> Program:
    """Summarises a program lowered and compiled for `mesh`."""
    module, memory = Module(text_of(compiled)), compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend of JAX does not report the memory of a program; use the CPU, CUDA or ROCm")
    issued = Counter(
        re.findall(
            r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)\b", lowered.as_text()
        )
    )
    return Program(
        mesh=dict(mesh.shape),
        memory=Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        ),
        steps=module.steps(mesh),
        collectives=tuple(module.collectives(mesh)),
        issued=dict(issued),
        libraries=module.libraries,
        unknown_loops=module.unknown_loops,
    )


def text_of(compiled: jax.stages.Compiled) -> str:
    """The compiled text. Raises RuntimeError if JAX does not have it."""
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("this backend of JAX does not show compiled programs; use the CPU, CUDA or ROCm")
    return text


def save_program(
    lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, folder: Path, name: str, mesh: Mesh
) -> Program:
    """Writes folder/NAME.hlo.txt.gz (the compiled text), NAME.json (its summary) and NAME.md (the same as Markdown);
    returns the summary.
    """
    program = read_program(lowered, compiled, mesh)
    device = find_kind(mesh.devices.flat[0].device_kind)
    speeds = None if device is None else speeds_of(device, program.mesh)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hlo.txt.gz").write_bytes(gzip.compress(text_of(compiled).encode(), mtime=0))
    summary = dataclasses.asdict(dataclasses.replace(program, steps=()))
    summary |= {"kernels": sum(kernel.times for kernel in program.kernels), "matmul_flops": program.matmul_flops}
    summary |= {"memory_traffic": program.memory_traffic, "memory_total": program.memory.total}
    summary |= {"overlaps": None}
    if speeds is not None and (found := overlaps(program.steps, speeds)) is not None:
        summary["overlaps"] = [dataclasses.asdict(overlap) for overlap in found]
    (folder / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(
        f"# {name}: the compiled step, per device\n\n{describe(program, speeds)}\n", encoding="utf-8"
    )
    return program


def describe(program: Program, speeds: Speeds | None = None) -> str:
    """The summary as Markdown. speeds: speeds of the device; with them it has the overlap of exchanges and kernels."""
    m = program.memory
    lines = [
        (
            f"Mesh {' x '.join(f'{axis} {size}' for axis, size in program.mesh.items())}; matrix products"
            f" {program.matmul_flops / 1e12:.3g} TFLOP, memory read and written {gigabytes(program.memory_traffic)},"
            f" {sum(kernel.times for kernel in program.kernels):,} kernels."
        ),
        "",
        (
            f"Memory {gigabytes(m.total)}: arguments {gigabytes(m.arguments)}, outputs outside reused arguments "
            f"{gigabytes(m.outputs - m.aliased)}, temporary {gigabytes(m.temporary)}."
        ),
        "",
        "| exchange | axis | devices | count | arrays | sent by a device |",
        "|---|---|---|---|---|---|",
        *(
            f"| {c.kind} | {c.axis} | {c.group} | {c.count} | {gigabytes(c.bytes)} | {gigabytes(c.sent)} |"
            for c in program.collectives
        ),
        "",
        (
            "Before compilation, once per loop:"
            f" {', '.join(f'{n} {kind}' for kind, n in program.issued.items()) or 'nothing'}."
        ),
    ]
    if not is_scheduled(program.steps):
        lines += ["", f"{UNSCHEDULED[0].upper()}{UNSCHEDULED[1:]}."]
    elif speeds is not None and (found := overlaps(program.steps, speeds)) is not None:
        lines += ["", *_describe_overlaps(found)]
    if program.libraries:
        lines += ["", f"Kernels of libraries: {', '.join(f'{n} {name}' for name, n in program.libraries.items())}."]
    if program.unknown_loops:
        lines += ["", f"Loops of unknown length, whose contents are counted once: {', '.join(program.unknown_loops)}."]
    return "\n".join(lines)


def _describe_overlaps(found: tuple[Overlap, ...]) -> list[str]:
    return [
        "Exchanges beside kernels in the order of the program; times are projected for links at full speed.",
        "",
        "| exchanges | count | hidden | in part | not | seconds | kernels wait |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {o.purpose} | {o.count} | {o.hidden} | {o.partly} | {o.alone} | {o.seconds:.3g} | {o.exposed:.3g} |"
            for o in found
        ),
    ]


def gigabytes(count: float) -> str:
    """Bytes as text with decimal units: 1.23 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"
