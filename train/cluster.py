"""What accelerators can do, from their data sheets: for MFU and for planning runs on hardware that is not there."""

import os
from dataclasses import dataclass

from laneformer.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator as it stands in a node. Bandwidths in bytes/s and one direction; None: not known."""

    kind: str
    """`device_kind` of the JAX device."""
    peak_flops: float | None
    """Dense bfloat16 products, FLOP/s."""
    memory: int
    """Bytes."""
    memory_bandwidth: float | None
    link: float | None
    """To the other devices of the node, all links of the device together."""
    network: float | None
    """To other nodes."""
    per_node: int


# Data sheets of NVIDIA give bfloat16 with 2:4 sparsity, twice the dense peak, and NVLink as the sum of both directions. Memory of the
# NVIDIA devices, and the B200's bandwidth, are what the driver reports (target_config/specs of github.com/openxla/xla).
DEVICES: dict[str, Device] = {
    # SXM. nvidia.com/en-us/data-center/h100: 1,979 TFLOPS sparse, 3.35 TB/s, NVLink 900 GB/s. DGX H100: 8 x 400 Gb/s InfiniBand.
    "h100": Device(
        kind="NVIDIA H100 80GB HBM3", peak_flops=1979e12 / 2, memory=84_929_347_584, memory_bandwidth=3.35e12, link=450e9,
        network=50e9, per_node=8,
    ),
    # SXM. nvidia.com/en-us/data-center/h200: 1,979 TFLOPS sparse, 4.8 TB/s, NVLink 900 GB/s. DGX H200: 8 x 400 Gb/s InfiniBand.
    "h200": Device(
        kind="NVIDIA H200", peak_flops=1979e12 / 2, memory=151_397_597_184, memory_bandwidth=4.8e12, link=450e9,
        network=50e9, per_node=8,
    ),
    # HGX. NVIDIA Blackwell data sheet (nvdam.widen.net/s/wwnsxrhm2w): 4.5 PFLOPS sparse, NVLink 1.8 TB/s. DGX B200: 8 x 400 Gb/s.
    "b200": Device(
        kind="NVIDIA B200", peak_flops=2.25e15, memory=191_514_411_008, memory_bandwidth=7.67e12, link=900e9,
        network=50e9, per_node=8,
    ),
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html: 1,307.4 TFLOPS, 192 GB, 5.3 TB/s; 128 GB/s both ways to each of the
    # 7 others. The network is the node builder's choice: give --cluster.network.
    "mi300x": Device(
        kind="AMD Instinct MI300X", peak_flops=1307.4e12, memory=192 * GIB, memory_bandwidth=5.3e12, link=7 * 64e9,
        network=None, per_node=8,
    ),
    # AMD at Hot Chips 2025 and ISSCC 2026: 256 CUs at 2.4 GHz, each 4,096 FLOPs per clock (8,192 in FP8), 288 GB, 8 TB/s, 153.6 GB/s
    # both ways to each of the 7 others. Network: 8 x 400 Gb/s (rocm.docs.amd.com, "SGLang distributed inference with MoRI").
    "mi355x": Device(
        kind="AMD Instinct MI355X", peak_flops=256 * 4096 * 2.4e9, memory=288 * GIB, memory_bandwidth=8e12, link=7 * 76.8e9,
        network=50e9, per_node=8,
    ),
}  # fmt: skip


def find_device(name: str, count: int) -> Device:
    """The device of that name; "cpu": one of `count` parts of this machine. Raises ConfigError for a name that the table lacks."""
    if name == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count
        return Device(kind="cpu", peak_flops=None, memory=memory, memory_bandwidth=None, link=None, network=None, per_node=count)
    if name not in DEVICES:
        raise ConfigError(f"cluster.device = {name!r}: known are {', '.join(DEVICES)}, cpu")
    return DEVICES[name]


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a JAX device by its `device_kind`; None for a kind without an entry, a CPU among them."""
    return next((device.peak_flops for device in DEVICES.values() if device.kind == device_kind), None)
