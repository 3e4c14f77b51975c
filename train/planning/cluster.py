"""Accelerators with the figures of their data sheets, for MFU and for planning runs on hardware you do not have."""

import os
from dataclasses import dataclass

from infer.roofline import devices
from laneformer.errors import ConfigError


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


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a JAX device by its `device_kind`; None for an unknown kind such as a CPU."""
    return next((device.peak_flops for device in DEVICES.values() if device.kind == device_kind), None)
