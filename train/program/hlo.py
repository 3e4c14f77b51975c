"""Reads the text of a compiled XLA program: kernels and exchanges of one device, counted in every loop iteration."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from laneformer.blocks.attention import keys_seen

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ENTERED = ("while", "conditional", "call", "async-start")  # computations that these call are launched separately
_NO_WORK = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
)
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|branch_computations|called_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BITS = {"pred": 8, "token": 0, "opaque": 0}


def found_in(pattern: str, text: str) -> re.Match[str]:
    """The first match of a pattern that every program's text has. Raises ValueError if it is missing."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in the compiled text {text[:200]!r}")
    return match


@dataclass(frozen=True)
class Instruction:
    """%name = type op(operands), attributes: one line of the text. The operand of a parameter is its number."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str

    @cached_property
    def arrays(self) -> list[tuple[float, tuple[int, ...]]]:
        """Bytes per element and shape of each array of the result."""
        found = []
        for name, dims in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", self.type):
            bits = _BITS[name] if name in _BITS else int(found_in(r"\d+", name)[0])
            found.append((bits / 8, tuple(map(int, dims.split(","))) if dims else ()))
        return found

    @cached_property
    def bytes(self) -> float:
        """Bytes of the result."""
        return sum(size * math.prod(shape) for size, shape in self.arrays)

    @cached_property
    def called(self) -> list[str]:
        return [name for names in _CALLED.findall(self.attributes) for name in names.split(", ")]


@dataclass(frozen=True)
class Kernel:
    """One kernel: FLOPs of its matrix products, bytes read and written, and launches per call of the program."""

    op: str
    flops: int
    bytes: float
    times: int


@dataclass(frozen=True)
class Collective:
    """All exchanges of one kind, axis and group size by one device, per call of the program."""

    kind: str
    axis: str
    """Mesh axes along which a group's devices differ, such as data or lane; "?" for groups in an unknown form."""
    group: int
    """Devices in one exchange."""
    count: int
    bytes: int
    """Bytes of the whole arrays, summed or gathered."""
    sent: int
    """Bytes that the device sends, and receives, in a ring: (g - 1)/g of `bytes`, twice that for an all-reduce."""


class Exchange(NamedTuple):
    """One exchange of one device."""

    kind: str
    axis: str
    """See `Collective.axis`."""
    group: int
    bytes: float
    sent: float
    """Bytes that the device sends in this exchange; see `Collective.sent`."""
    scope: str
    """Place in the model that issues the exchange (`op_name` in the text); empty if the compiler merged several."""


class Start(NamedTuple):
    """Start of an exchange; the following kernels do not wait for it."""

    name: str
    exchange: Exchange
    apart: bool
    """Whether a separate instruction waits for the exchange, as in XLA:GPU's programs but not in XLA:CPU's."""


class Done(NamedTuple):
    """Point from which kernels wait for the exchange that instruction `name` started."""

    name: str


class Loop(NamedTuple):
    """Steps that run `times` times."""

    times: int
    steps: "tuple[Step, ...]"


Step = Kernel | Start | Done | Loop


def kernels_of(steps: Iterable[Step], times: int = 1) -> Iterator[Kernel]:
    """The kernels of the steps, with their launches in all loops."""
    for step in steps:
        if isinstance(step, Loop):
            yield from kernels_of(step.steps, times * step.times)
        elif isinstance(step, Kernel):
            yield replace(step, times=times * step.times)


@dataclass(frozen=True)
class Module:
    """The text of a compiled program. Loops with a trip count unknown to XLA count once, and are in `unknown_loops`."""

    text: str

    @cached_property
    def computations(self) -> dict[str, dict[str, Instruction]]:
        """Name of a computation -> its instructions by name, the result last."""
        found: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] | None = None
        for line in self.text.splitlines():
            if header := re.match(r"(?:ENTRY )?(%[\w.\-]+) \(.*\{$", line):
                current = found[header[1]] = {}
            elif current is not None and (instruction := _instruction(line)):
                current[instruction.name] = instruction
        return found

    @cached_property
    def launched(self) -> list[tuple[str, Instruction, int]]:
        """(computation, instruction, times) of everything that a call runs; both branches of a condition count."""
        found = []

        def visit(computation: str, count: int) -> None:
            for instruction in self.computations[computation].values():
                if instruction.op not in _ENTERED:
                    found.append((computation, instruction, count))
                else:
                    for inner in instruction.called:
                        visit(inner, count * _trips(instruction))

        visit(self.entry, 1)
        return found

    @cached_property
    def entry(self) -> str:
        """Name of the computation that a call runs."""
        return found_in(r"(?m)^ENTRY (%[\w.\-]+)", self.text)[1]

    def steps(self, mesh: Mesh) -> tuple[Step, ...]:
        """The steps of a call in the order of the text, which in a scheduled program is the order of launches. An
        exchange without a separate end is awaited where it starts.
        """

        def visit(computation: str) -> Iterator[Step]:
            for i in self.computations[computation].values():
                exchanged = self._exchanged(i)
                if exchanged is not None:
                    apart = i.op.endswith("-start")
                    yield Start(i.name, exchange_of(exchanged, mesh), apart)
                    if not apart:
                        yield Done(i.name)
                elif i.op.endswith("-done"):
                    yield Done(i.operands[0])
                elif i.op in _ENTERED:
                    inner = tuple(step for name in i.called for step in visit(name))
                    yield Loop(_trips(i), inner)
                elif i.op not in _NO_WORK:
                    yield self._kernel(computation, i, 1)

        return tuple(visit(self.entry))

    def _exchanged(self, i: Instruction) -> Instruction | None:
        """The exchange that instruction `i` is or starts; None for other instructions."""
        if i.op == "async-start":
            inner = [x for name in i.called for x in self.computations[name].values() if x.op in COLLECTIVES]
            return inner[0] if inner else None
        return i if i.op.removesuffix("-start") in COLLECTIVES else None

    @cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        instructions = (i for computation in self.computations.values() for i in computation.values())
        return tuple(i.name for i in instructions if i.op == "while" and not _TRIPS.search(i.attributes))

    @cached_property
    def libraries(self) -> dict[str, int]:
        """Launches of library code, by name."""
        found: dict[str, int] = {}
        for _, i, times in self.launched:
            if i.op == "custom-call":
                name = found_in(r'custom_call_target="([^"]*)"', i.attributes)[1]
                found[name] = found.get(name, 0) + times
        return found

    @cached_property
    def kernels(self) -> list[Kernel]:
        """All kernels except exchanges. The text lacks products inside libraries other than cuBLAS and cuDNN."""
        return [
            self._kernel(computation, i, times)
            for computation, i, times in self.launched
            if i.op not in _NO_WORK and not i.op.endswith("-done") and i.op.removesuffix("-start") not in COLLECTIVES
        ]

    def _kernel(self, computation: str, i: Instruction, times: int) -> Kernel:
        return Kernel(i.op, self._flops(computation, i), self._bytes(computation, i), times)

    def collectives(self, mesh: Mesh) -> list[Collective]:
        """One row per kind, axis and size of group, the one with the most bytes sent first."""
        rows: dict[tuple[str, str, int], list[float]] = {}
        for _, i, times in self.launched:
            if i.op.removesuffix("-start") not in COLLECTIVES:
                continue
            found = exchange_of(i, mesh)
            row = rows.setdefault((found.kind, found.axis, found.group), [0, 0, 0])
            for n, value in enumerate((times, found.bytes * times, found.sent * times)):
                row[n] += value
        return sorted(
            (
                Collective(kind, axis, group, int(n), int(full), int(sent))
                for (kind, axis, group), (n, full, sent) in rows.items()
            ),
            key=lambda c: -c.sent,
        )

    def _flops(self, computation: str, i: Instruction) -> int:
        """FLOPs of a product or of the products in a fusion: 2 x elements of the result x contracted elements."""
        if i.op == "custom-call" and _CUDNN in i.attributes:
            return _flops_of_attention(i, self.computations[computation][i.operands[0]].arrays[0][1][-1])
        if i.op == "dot":
            contracted = found_in(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
        elif i.op == "custom-call" and 'custom_call_target="__cublas' in i.attributes:
            contracted = found_in(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        else:
            return sum(self._flops(name, inner) for name in i.called for inner in self.computations[name].values())
        lhs = self.computations[computation][i.operands[0]].arrays[0][1]
        return 2 * math.prod(i.arrays[0][1]) * math.prod(lhs[int(n)] for n in re.findall(r"\d+", contracted[1]))

    def _bytes(self, computation: str, i: Instruction) -> float:
        """Bytes of operands and results. If an array is sliced or updated in place, only the slice counts."""
        inside = self.computations[computation]
        if i.op != "fusion":
            return _written(i, inside) + sum(_read(name, inside[name].bytes, (i,), inside) for name in set(i.operands))
        fused = self.computations[i.called[0]]
        root = list(fused.values())[-1]
        total = (
            sum(_written(fused[name], fused) for name in root.operands) if root.op == "tuple" else _written(root, fused)
        )
        for parameter in (p for p in fused.values() if p.op == "parameter"):
            users = [user for user in fused.values() if parameter.name in user.operands]
            total += _read(parameter.name, parameter.bytes, users, fused)
        return total


_CUDNN = 'custom_call_target="__cudnn$fmha'


def _flops_of_attention(i: Instruction, head_dim: int) -> int:
    """FLOPs of cuDNN's attention over the visible keys: two products forward; five backward, because the scores are
    computed again.
    """
    config = i.attributes.replace(" ", "")
    scores = found_in(r'"intermediate_tensor_shape":.*?"dimensions":\[([^\]]*)\]', config)
    b, h, s, t = map(int, re.findall(r"\d+", scores[1]))
    window = re.search(r'"sliding_window_length":"?([1-9]\d*)', config)
    keys = keys_seen(s, int(window[1]) if window else None) if '"mask_type":"CAUSAL"' in config else t
    return round((10 if "Backward" in i.attributes else 4) * b * h * s * keys * head_dim)


UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Ops that change their first operand in place -> index of the operand with the new values."""


def _written(i: Instruction, inside: dict[str, Instruction]) -> float:
    return inside[i.operands[UPDATES[i.op]]].bytes if i.op in UPDATES else i.bytes


def _read(name: str, size: float, users, inside: dict[str, Instruction]) -> float:
    """Bytes of array `name` that its users read."""
    total = 0.0
    for user in users:
        first = user.operands[0] == name
        if first and user.op in ("dynamic-slice", "gather"):
            total += user.bytes
        elif first and user.op == "scatter":  # reads the values that it adds to
            total += _written(user, inside)
        elif not first or user.op not in UPDATES:
            return size
    return min(total, size)


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = ", line)
    if not match:
        return None
    rest = re.sub(r"/\*index=\d+\*/", "", line[match.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    op = found_in(r"^ ([\w\-]+)\(", rest[end:])
    opened = end + op.end() - 1
    closed = _closing(rest, opened)
    operands = re.findall(r"%[\w.\-]+|^\d+$", rest[opened + 1 : closed])
    return Instruction(match[1], rest[:end], op[1], tuple(operands), rest[closed + 1 :])


def _closing(text: str, start: int) -> int:
    """Position at which the parenthesis at `start` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError(f"no closing parenthesis: {text[:200]}")


def _trips(i: Instruction) -> int:
    """Iterations of a loop whose length XLA knows; 1 for other instructions."""
    trips = _TRIPS.search(i.attributes) if i.op == "while" else None
    return int(trips[1]) if trips else 1


def exchange_of(i: Instruction, mesh: Mesh) -> Exchange:
    """The exchange of a collective instruction, or of the instruction that starts one."""
    kind = i.op.removesuffix("-start")
    axis, size = _axis(i.attributes, mesh)
    full = _full_bytes(i, kind, size)
    sent = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(kind, (size - 1) / size) * full
    scope = re.search(r'op_name="([^"]*)"', i.attributes)
    return Exchange(kind, axis, size, full, sent, scope[1] if scope else "")


def _full_bytes(instruction: Instruction, kind: str, group: int) -> float:
    """Bytes of the operand for an all-reduce or reduce-scatter, of the result for other kinds.

    The type of a -start instruction is (operands, results).
    """
    total, started = instruction.bytes, instruction.op.endswith("-start")
    if kind in ("all-gather", "reduce-scatter"):
        if started:
            return total * group / (group + 1)
        return total * (group if kind == "reduce-scatter" else 1)
    return total / 2 if started and kind != "all-reduce" else total


def _axis(attributes: str, mesh: Mesh) -> tuple[str, int]:
    """Mesh axes along which the devices of a group differ, and the size of a group."""
    groups = _groups(attributes, mesh.size)
    if groups is None:
        return "?", mesh.size
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh.shape.values())))  # [axis, group, member]
    varies = (coordinates != coordinates[..., :1]).any((1, 2))
    return " x ".join(name for name, v in zip(mesh.axis_names, varies, strict=True) if v) or "none", groups.shape[1]


def _groups(attributes: str, devices: int) -> np.ndarray | None:
    """Device numbers [group, member] from replica_groups in any known form or a permutation's pairs; None otherwise."""
    if pairs := re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes):
        return np.array([list(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])])
    if listed := re.search(r"replica_groups=(\{\{.*?\}\})", attributes):
        rows = [list(map(int, row.split(","))) for row in re.findall(r"\{(\d[\d,]*)\}", listed[1])]
        return np.array(rows) if len({len(row) for row in rows}) == 1 else None
    if "replica_groups={}" in attributes:
        return np.arange(devices)[None]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _iota(iota[2]).reshape([int(n) for n in iota[1].split(",")])
    form = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}:]*)\}"
    if named := re.search(form, attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        members = re.findall(r"'(\w+)'", named[3])
        ids = (_iota(named[2]) if named[2] else np.arange(devices)).reshape(list(sizes.values()))
        last = [list(sizes).index(name) for name in members]
        first = [n for n in range(len(sizes)) if n not in last]
        return ids.transpose(first + last).reshape(-1, math.prod(sizes[name] for name in members))
    return None


def _iota(text: str) -> np.ndarray:
    """Reads [a,b]T(1,0): arange(a b) as [a, b], transposed."""
    dims = [int(n) for n in found_in(r"^\[([\d,]+)\]", text)[1].split(",")]
    order = re.search(r"T\(([\d,]+)\)", text)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(n) for n in order[1].split(",")]) if order else ids
