"""The device mesh (data, lane), and where arrays lie on it."""

import ctypes
import math
import os
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.errors import ConfigError

LANE, DATA = "lane", "data"


def use_host_devices(count: int) -> None:
    """Splits this machine's CPU into `count` JAX devices. Call before the first JAX operation; raises ConfigError after
    it.
    """
    _make_room_for_queues(count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.local_device_count("cpu") != count:
            raise ConfigError(
                f"cannot make {count} CPU devices: JAX already runs with {jax.local_device_count('cpu')}; ask before"
                " the first operation"
            ) from None


def _make_room_for_queues(count: int) -> None:
    """Prevents a deadlock of queued programs with collectives on `count` CPU devices.

    XLA's CPU client runs each device's program on a pool of as many threads, and blocks pool threads while too many
    programs are queued. A pool twice as large has room for both; it is made when JAX first runs.
    """
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(2 * max(count, os.cpu_count() or 1)))


for _count in re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
    _make_room_for_queues(int(_count))  # for whoever splits the CPU without us


def keep_freed_memory() -> None:
    """Makes glibc keep what XLA frees after each program, instead of asking the kernel for fresh, zeroed pages in the
    next one.

    Halves the system time of small training steps on virtual machines, where page faults are dear. Memory is not given
    back, so it is not for large models. No effect with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 2**28)


def make_mesh(num_lanes: int, *, data: int = 1, lane: int | None = None, devices=None) -> Mesh:
    """A (data, lane) mesh for a model of `num_lanes` lanes.

    lane: devices on the lane axis, a divisor of num_lanes; by default the largest that the devices allow. data: copies
    of the lane axis, over which batches and (FSDP) weights are split. Raises ConfigError when the devices do not
    suffice.
    """
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or data > len(devices):
        raise ConfigError(f"data = {data}: there are {len(devices)} devices; choose 1 to {len(devices)}")
    if lane is None:
        lane = max(n for n in range(1, len(devices) // data + 1) if num_lanes % n == 0)
    if lane < 1 or num_lanes % lane:
        fitting = ", ".join(str(n) for n in range(1, num_lanes + 1) if num_lanes % n == 0)
        raise ConfigError(f"lane = {lane}: {num_lanes} lanes spread over {fitting} devices only")
    if data * lane > len(devices):
        raise ConfigError(
            f"a mesh of data = {data} x lane = {lane} needs {data * lane} devices, {len(devices)} are visible"
        )
    return jax.make_mesh(
        (data, lane), (DATA, LANE), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[: data * lane]
    )


def check_mesh(num_lanes: int, mesh: Mesh | None, stream: str = "float32") -> None:
    """Raises ConfigError unless `mesh` is a (data, lane) mesh over which the lanes and a stream of that dtype can be
    spread.

    None is one device and always fits. XLA:CPU (jaxlib 0.10 and 0.11) ends the process when it compiles a bfloat16
    all-reduce.
    """
    if mesh is None:
        return
    if set(mesh.shape) != {DATA, LANE}:
        raise ConfigError(
            f"a mesh with the axes {', '.join(map(str, mesh.shape))}: make it with laneformer.make_mesh({num_lanes})"
        )
    if num_lanes % mesh.shape[LANE]:
        raise ConfigError(
            f"a mesh of {mesh.shape[LANE]} devices for {num_lanes} lanes: each device holds equally many; use"
            f" make_mesh({num_lanes})"
        )
    if stream == "bfloat16" and mesh.shape[LANE] > 1 and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError(
            "precision.stream = 'bfloat16': CPU devices cannot sum it over lanes; use float32, or one device"
        )


def fit_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that do not divide their dimension: such dimensions are kept whole on every device."""

    def keep(axes, size: int):
        count = math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes or []))
        return axes if size % count == 0 else None

    return P(*(keep(axes, size) for axes, size in zip(spec, shape, strict=False)))


def lane_spec(spec: P) -> P:
    """The part of a spec that shard_map handles by hand: the lane axis. The compiler handles the rest."""
    return P(*(LANE if axes == LANE else None for axes in spec))


def sharding(spec: P, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where an array of that shape lies on the mesh."""
    return NamedSharding(mesh, fit_spec(spec, shape, mesh))
