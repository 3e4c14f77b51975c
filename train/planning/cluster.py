"""Accelerators with the figures of their data sheets, for MFU and for planning runs on hardware you do not have."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from infer.roofline import devices
from laneformer.errors import ConfigError

RINGS = ("all-gather", "reduce-scatter", "all-reduce")
EFFICIENCY = 0.6  # share of the peak that matrix products are assumed to reach


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator in a node. Bandwidths in bytes/s, one direction; None if unknown."""

    kind: str
    """`device_kind` of the JAX device."""
    peak_flops: float | None
    """Dense bfloat16 products, FLOP/s."""
    memory: int
    """Memory in bytes."""
    memory_bandwidth: float | None
    link: float | None
    """Bandwidth to the other devices of the node, all links together."""
    network: float | None
    """Bandwidth to other nodes."""
    per_node: int


# The devices on sale in infer/roofline/devices.py.
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
    """The device of that name; "cpu" is one of `count` parts of this machine. Raises ConfigError."""
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
    """What a device of a mesh is assumed to reach, for the times of its kernels and exchanges."""

    products: float
    """Matrix products, FLOP/s."""
    memory: float
    """Device memory, bytes/s."""
    link: float
    """To the other devices of the node, bytes/s in one direction."""
    network: float
    """To other nodes, likewise; 0 in a single node."""
    inside: frozenset[str]
    """Axes of the mesh whose exchanges stay within a node."""
    members: Mapping[str, int]
    """Devices of one node in a group of an axis, where they are more than one."""

    def kernel_seconds(self, flops: float, count: float) -> float:
        """Seconds of a kernel with that many FLOPs of products and `count` bytes of memory."""
        return max(flops / self.products, count / self.memory)

    def exchange_seconds(self, kind: str, axis: str, sent: float) -> tuple[str, float]:
        """The link that an exchange along a mesh axis takes, and its seconds there, for bytes that a device sends.

        kind: as XLA names it. Rings of an all-gather, reduce-scatter or all-reduce leave a node once for each of its
        members, over the network of each; what an all-to-all sends leaves it over the sender's alone.
        """
        if axis in self.inside:
            return "links", sent / self.link
        rings = self.members.get(axis, 1) if kind in RINGS else 1
        return "network", sent / min(rings * self.network, max(self.link, self.network))


def speeds_of(device: Device, mesh: Mapping[str, int], efficiency: float = EFFICIENCY) -> Speeds | None:
    """Speeds on a mesh whose devices are ordered lane by lane; None if some are unknown."""
    from laneformer.mesh import DATA, LANE  # imports JAX, which the roofline does not need

    devices = mesh[DATA] * mesh[LANE]
    if device.peak_flops is None or (device.network is None and devices > device.per_node):
        return None
    spread = {DATA: mesh[LANE] * (mesh[DATA] - 1), LANE: mesh[LANE] - 1}
    both = {f"{DATA} x {LANE}", "none", "?"} if devices <= device.per_node else {"none"}
    return Speeds(
        products=device.peak_flops * efficiency,
        memory=device.memory_bandwidth,
        link=device.link,
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
