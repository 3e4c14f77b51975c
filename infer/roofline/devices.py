"""Accelerators and nodes of accelerators for the roofline. Every figure has a source or is marked as an assumption."""

import math
from dataclasses import dataclass

from laneformer.errors import ConfigError

# Share of the specified bandwidth that long reads reach. An assumption: a copy on an H200 reaches 4.3 of 4.8 TB/s.
SHARE = 0.80
LAUNCH = 4.5e-6  # seconds for launch and cleanup of one kernel, measured on MI300X (Kog, "Laneformer 2B")
CUSTOM = "custom"
GIB = 2**30

_SYNC_H100 = "0.65 us: a flag from one SM to another, measured by others on an H100"
_SYNC_MI300X = "0.87 us: waiting for a data flag took 0.80 to 0.93 us, measured by Kog on an MI300X"
_PUSH = "2.0 us: a store from inside a kernel until the other device can read it, 1.5 to 2.5 us estimated"
_KCCL = "3.0 us: Kog says below 3 us for its own exchange on MI300X"


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator. Bandwidths in bytes/s, one direction; times in seconds."""

    name: str
    kind: str | None = None
    """`device_kind` of the JAX device; None for a device that is not sold yet, which the planning of training leaves
    out.
    """
    peak_flops: float | None = None
    """Peak of dense bfloat16 products, FLOP/s."""
    memory: float
    """Size of the memory, bytes."""
    bandwidth: float
    """Memory bandwidth as specified, bytes/s."""
    link: float
    """Bandwidth to the other devices of the node, all links together, bytes/s."""
    per_node: int
    """Number of devices that the fast links connect."""
    network: float | None = None
    """Bandwidth to other nodes, bytes/s; None if it depends on how the node is built."""
    exchange: float
    """Latency of one exchange between devices, without the transfer time of its bytes, s. Assumed."""
    sync: float
    """Time from the end of one operation to the start of a dependent one, inside a kernel, s. Assumed unless measured
    on this device.
    """
    source: str
    """Source of bandwidth and link, with the date."""
    exchange_source: str
    sync_source: str


# The only table of accelerators. train/planning/cluster.py also reads it, to plan training and for the peaks of MFU.
# Makers specify NVLink, Infinity Fabric and UALink as the sum of both directions; the table has half of that. NVIDIA
# specifies bfloat16 with 2:4 sparsity, twice the dense peak. For devices on sale, GB of a maker's specification are GiB
# here; NVIDIA's memory sizes are those that the driver reports (target_config/specs of github.com/openxla/xla).
DEVICES: dict[str, Device] = {
    # 1,979 TFLOPS sparse, NVLink 900 GB/s. DGX H100: 8 x 400 Gb/s InfiniBand.
    "h100": Device(
        name="NVIDIA H100 SXM",
        kind="NVIDIA H100 80GB HBM3",
        peak_flops=1979e12 / 2,
        memory=84_929_347_584,
        bandwidth=3.35e12,
        link=450e9,
        per_node=8,
        network=50e9,
        exchange=2.0e-6,
        sync=0.65e-6,
        source="nvidia.com/en-us/data-center/h100, 2026-11",
        exchange_source=_PUSH,
        sync_source=_SYNC_H100,
    ),
    # 1,979 TFLOPS sparse, NVLink 900 GB/s. DGX H200: 8 x 400 Gb/s InfiniBand.
    "h200": Device(
        name="NVIDIA H200 SXM",
        kind="NVIDIA H200",
        peak_flops=1979e12 / 2,
        memory=151_397_597_184,
        bandwidth=4.8e12,
        link=450e9,
        per_node=8,
        network=50e9,
        exchange=2.0e-6,
        sync=0.65e-6,
        source="nvidia.com/en-us/data-center/h200, 2026-11",
        exchange_source=_PUSH,
        sync_source=_SYNC_H100,
    ),
    # HGX. NVIDIA Blackwell data sheet (nvdam.widen.net/s/wwnsxrhm2w): 4.5 PFLOPS sparse, NVLink 1.8 TB/s. DGX B200: 8 x
    # 400 Gb/s.
    "b200": Device(
        name="NVIDIA B200",
        kind="NVIDIA B200",
        peak_flops=2.25e15,
        memory=191_514_411_008,
        bandwidth=7.67e12,
        link=900e9,
        per_node=8,
        network=50e9,
        exchange=2.0e-6,
        sync=0.65e-6,
        source=(
            "target_config/specs of github.com/openxla/xla (as the driver reports), Blackwell data sheet for NVLink,"
            " 2026-11"
        ),
        exchange_source=_PUSH,
        sync_source=_SYNC_H100,
    ),
    "rubin": Device(
        name="NVIDIA Rubin",
        memory=288e9,
        bandwidth=22e12,
        link=1.8e12,
        per_node=72,
        exchange=2.0e-6,
        sync=0.65e-6,
        source=(
            "announced, NVIDIA at CES 2026, read second-hand (voice.lapaas.com 2026-03, early parts may"
            " reach 20 TB/s; NVLink 6: jp.imgtag.co.kr)"
        ),
        exchange_source=_PUSH,
        sync_source=_SYNC_H100,
    ),
    # 1,307.4 TFLOPS, 192 GB; 128 GB/s both ways to each of the 7 others.
    "mi300x": Device(
        name="AMD Instinct MI300X",
        kind="AMD Instinct MI300X",
        peak_flops=1307.4e12,
        memory=192 * GIB,
        bandwidth=5.3e12,
        link=7 * 64e9,
        per_node=8,
        exchange=3.0e-6,
        sync=0.87e-6,
        source="amd.com/en/products/accelerators/instinct/mi300/mi300x.html, 2026-11",
        exchange_source=_KCCL,
        sync_source=_SYNC_MI300X,
    ),
    # 256 CUs at 2.4 GHz, each 4,096 FLOPs per clock (8,192 in FP8), 288 GB; 153.6 GB/s both ways to each of the 7
    # others. Network: 8 x 400 Gb/s (rocm.docs.amd.com, "SGLang distributed inference with MoRI").
    "mi355x": Device(
        name="AMD Instinct MI355X",
        kind="AMD Instinct MI355X",
        peak_flops=256 * 4096 * 2.4e9,
        memory=288 * GIB,
        bandwidth=8e12,
        link=7 * 76.8e9,
        per_node=8,
        network=50e9,
        exchange=3.0e-6,
        sync=0.87e-6,
        source="AMD at Hot Chips 2025 and ISSCC 2026",
        exchange_source=_KCCL,
        sync_source=_SYNC_MI300X,
    ),
    "mi450": Device(
        name="AMD Instinct MI455X, of the MI450 series",
        memory=432e9,
        bandwidth=23.3e12,
        link=1.8e12,
        per_node=72,
        exchange=3.0e-6,
        sync=0.87e-6,
        source=(
            "huggingface.co/blog/badaoui/transformers-on-amd-mi455, 2026-07-23 (announced with 19.6 TB/s in January); "
            "links: pcmasters.de on AMD at CES 2026"
        ),
        exchange_source=_KCCL,
        sync_source=_SYNC_MI300X,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of equal devices. Bandwidths in bytes/s per device, times in seconds."""

    name: str
    devices: int
    bandwidth: float
    """Bandwidth that reads of weights reach, bytes/s per device."""
    spec: float | None
    """Bandwidth as the maker specifies it, bytes/s per device; None if unknown."""
    memory: float | None
    link: float | None
    """Bandwidth to the other devices, bytes/s. If it is None (unknown), the bytes of an exchange are not counted."""
    per_node: int | None
    exchange: float
    sync: float
    launches: float
    """Kernel launches per token."""
    launch: float
    assumptions: tuple[str, ...]
    """Description of the origin of each figure."""

    @property
    def total_bandwidth(self) -> float:
        """Bandwidth of all devices together, bytes/s."""
        return self.devices * self.bandwidth

    def exchange_seconds(self, sent_values: float = 0) -> float:
        """Seconds of one exchange in which every device pushes `sent_values` float32 values to every other device; 0 on
        one device.
        """
        if self.devices == 1:
            return 0.0
        return self.exchange + (4 * sent_values * (self.devices - 1) / self.link if self.link else 0.0)


def make_node(
    device: str,
    devices: int,
    *,
    bandwidth: float | None = None,
    share: float | None = None,
    link: float | None = None,
    exchange: float | None = None,
    sync: float | None = None,
    launches: float = 0,
    launch: float = LAUNCH,
) -> Node:
    """A node of devices of the table, or of "custom" devices. Other arguments (bytes/s, seconds) replace figures of the
    table.

    Raises ConfigError for an unknown device, for a number outside its range, and for a missing figure of a custom
    device.
    """
    if device != CUSTOM and device not in DEVICES:
        raise ConfigError(f"unknown --device {device}: choose {', '.join(DEVICES)}, or {CUSTOM} for your own figures")
    known = DEVICES.get(device)
    _check(devices, bandwidth, share, link, exchange, sync, launches, launch)
    base = known.bandwidth if known is not None and bandwidth is None else bandwidth
    if base is None:
        raise ConfigError("--device custom needs --bandwidth, the GB/s at which one device reads its memory")
    if known is None and devices > 1 and exchange is None:
        raise ConfigError(
            "--device custom with several devices needs --exchange-us, the time of one exchange between them"
        )
    wait = known.sync if known is not None and sync is None else sync
    if wait is None:
        raise ConfigError("--device custom needs --sync-us, the time from one operation to a dependent one; 0 for none")
    if known is not None and devices > known.per_node:
        raise ConfigError(
            f"--devices must be at most {known.per_node}, the number that the links of {known.name} connect, got"
            f" {devices}"
        )
    used = (1.0 if bandwidth is not None else SHARE) if share is None else share
    origin = (
        f"of {base / 1e12:g} TB/s ({known.source})"
        if known is not None and bandwidth is None
        else f"of {base / 1e9:,.5g} GB/s given on the command line"
    )
    assumptions = [f"bandwidth {100 * used:.3g}% {origin}"]
    for what, given, of_table in (("exchange", exchange, "exchange_source"), ("sync", sync, "sync_source")):
        if given is not None:
            assumptions.append(f"{what} {1e6 * given:g} us given")
        elif known is not None and (what == "sync" or devices > 1):
            assumptions.append(f"{what} {getattr(known, of_table)} (assumed here)")
    through = link if link is not None else known.link if known else None
    if devices > 1 and through is not None:
        assumptions.append(f"links {through / 1e9:g} GB/s a direction" + ("" if link is None else " given"))
    if launches:
        assumptions.append(
            f"{launches:g} launches a token of {1e6 * launch:g} us"
            + (" (Kog, measured on MI300X)" if launch == LAUNCH else "")
        )
    return Node(
        name=f"{devices} x {known.name if known else CUSTOM}",
        devices=devices,
        bandwidth=base * used,
        spec=known.bandwidth if known else None,
        memory=known.memory if known else None,
        link=through,
        per_node=known.per_node if known else None,
        exchange=exchange if exchange is not None else known.exchange if known else 0.0,
        sync=wait,
        launches=launches,
        launch=launch,
        assumptions=tuple(assumptions),
    )


def _check(devices, bandwidth, share, link, exchange, sync, launches, launch) -> None:
    """Raises ConfigError for a number outside its range."""
    if devices < 1:
        raise ConfigError(f"--devices must be at least 1, got {devices}")
    for name, value, scale in (("--bandwidth", bandwidth, 1e9), ("--bandwidth-share", share, 1), ("--link", link, 1e9)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, got {value / scale:g}")
    if share is not None and share > 1:
        raise ConfigError(f"--bandwidth-share must be at most 1, as in 0.8, got {share:g}")
    times = (
        ("--exchange-us", exchange, 1e6),
        ("--sync-us", sync, 1e6),
        ("--launches", launches, 1),
        ("--launch-us", launch, 1e6),
    )
    for name, value, scale in times:
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be at least 0, got {value * scale:g}")
