"""Accelerators with the figures of their data sheets, for MFU and for planning runs on hardware you do not have."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from laneformer.errors import ConfigError
from laneformer.infer.roofline import devices

RINGS = ("all-gather", "reduce-scatter", "all-reduce")
EFFICIENCY = 0.6  # share of the peak that matrix products are assumed to reach


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator in a node. Bandwidths in bytes/s, one direction; None if unknown."""

    kind: str
    """`device_kind` of the JAX device."""
    peak_flops: float | None
    """Dense bfloat16 products, FLOP/s."""
    memory: float
    """Memory in bytes."""
    memory_bandwidth: float | None
    link: float | None
    """Bandwidth to the other devices of the node, all links together."""
    network: float | None
    """Bandwidth to other nodes."""
    per_node: int

    @property
    def peak(self) -> float:
        """`peak_flops`. Raises ConfigError if it is unknown."""
        if self.peak_flops is None:
            raise ConfigError(f"the speed of a {self.kind} is unknown; choose a GPU with --cluster.device")
        return self.peak_flops


# The devices of infer/roofline/devices.py that are on sale.
DEVICES: dict[str, Device] = {
    name: Device(
        kind=known.kind,
        peak_flops=known.peak_flops,
        memory=known.memory,
        memory_bandwidth=known.bandwidth,
        link=known.link,
        network=known.network,
        per_node=known.per_node,
    )
    for name, known in devices.DEVICES.items()
    if known.kind is not None
}


def find_device(name: str, count: int) -> Device:
    """The device called `name`; "cpu" is one of `count` equal parts of this machine. Raises ConfigError if unknown."""
    if name == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count
        return Device(
            kind="cpu", peak_flops=None, memory=memory, memory_bandwidth=None, link=None, network=None, per_node=count
        )
    if name not in DEVICES:
        raise ConfigError(f"unknown cluster.device {name!r}; choose {', '.join(DEVICES)}, cpu")
    return DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds that one device of a mesh is assumed to reach."""

    products: float
    """FLOP/s of matrix products."""
    memory: float
    """Bytes/s of device memory."""
    link: float
    """Bytes/s, in one direction, to the other devices of the node; 0 if unknown, which is allowed on one device."""
    network: float
    """Bytes/s, in one direction, to other nodes; 0 if unknown, which is allowed in a single node."""
    inside: frozenset[str]
    """Axes of the mesh whose exchanges stay within a node."""
    members: Mapping[str, int]
    """Axis -> devices of one node that are in the same group of the axis; an axis that is not listed has 1."""

    def kernel_seconds(self, flops: float, count: float) -> float:
        """Seconds of a kernel whose products have `flops` FLOPs and which reads and writes `count` bytes of memory."""
        return max(flops / self.products, count / self.memory)

    def exchange_seconds(self, kind: str, axis: str, sent: float) -> tuple[str, float]:
        """(link, seconds) of an exchange along a mesh axis in which each device sends `sent` bytes.

        kind: XLA's name of the exchange. The link is "links" (inside a node) or "network". Rings of an all-gather,
        reduce-scatter or all-reduce leave a node over the network of every member of the group in that node. Bytes of
        an all-to-all leave it over the network of their sender.
        """
        if axis in self.inside:
            return "links", sent / self.link
        rings = self.members.get(axis, 1) if kind in RINGS else 1
        return "network", sent / min(rings * self.network, max(self.link, self.network))


def speeds_of(device: Device, mesh: Mapping[str, int], efficiency: float = EFFICIENCY) -> Speeds | None:
    """Speeds on a mesh [data, lane] that numbers its devices in this order, lane fastest; None if one is unknown."""
    from laneformer.mesh import DATA, LANE  # imports JAX, which the roofline does not need

    devices = mesh[DATA] * mesh[LANE]
    peak, memory = device.peak_flops, device.memory_bandwidth
    if peak is None or memory is None or (device.network is None and devices > device.per_node):
        return None
    spread = {DATA: mesh[LANE] * (mesh[DATA] - 1), LANE: mesh[LANE] - 1}
    both = {f"{DATA} x {LANE}", "none", "?"} if devices <= device.per_node else {"none"}
    return Speeds(
        products=peak * efficiency,
        memory=memory,
        link=device.link or 0.0,
        network=device.network or 0.0,
        members={DATA: max(1, device.per_node // mesh[LANE]), f"{DATA} x {LANE}": min(devices, device.per_node)},
        inside=frozenset({axis for axis, distance in spread.items() if distance < device.per_node} | both),
    )


def find_kind(device_kind: str) -> Device | None:
    """The device with that `device_kind` in JAX; None for an unknown kind such as a CPU."""
    return next((device for device in DEVICES.values() if device.kind == device_kind), None)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a JAX device by its `device_kind`; None for an unknown kind such as a CPU."""
    device = find_kind(device_kind)
    return None if device is None else device.peak_flops
