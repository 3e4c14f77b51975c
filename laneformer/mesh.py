"""The device mesh (data, lane), and where arrays lie on it."""

import math
import os

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.errors import ConfigError

LANE, DATA = "lane", "data"


def use_host_devices(count: int) -> None:
    """Splits this machine's CPU into `count` JAX devices. Call before the first JAX operation; raises ConfigError after it.

    XLA's CPU client runs each device's program on a pool of as many threads, and blocks pool threads while too many programs are
    queued; with a collective inside that is a deadlock. A pool twice as large has room for both (PJRT_NPROC).
    """
    os.environ.setdefault("PJRT_NPROC", str(2 * max(count, os.cpu_count() or 1)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.local_device_count("cpu") != count:
            raise ConfigError(
                f"cannot make {count} CPU devices: JAX already runs with {jax.local_device_count('cpu')}; ask before the first operation"
            ) from None


def make_mesh(num_lanes: int, *, data: int = 1, lane: int | None = None, devices=None) -> Mesh:
    """A (data, lane) mesh for a model of `num_lanes` lanes.

    lane: devices on the lane axis, a divisor of num_lanes; by default the largest that the devices allow. data: copies of the lane
    axis, over which batches and (FSDP) weights are split. Raises ConfigError when the devices do not suffice.
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
        raise ConfigError(f"a mesh of data = {data} x lane = {lane} needs {data * lane} devices, {len(devices)} are visible")
    return jax.make_mesh((data, lane), (DATA, LANE), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[: data * lane])


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
