"""The device mesh with axes (data, lane), and the sharding of arrays on it."""

import ctypes
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.errors import ConfigError
from laneformer.quantized import WHOLE, Quantized

LANE, DATA = "lane", "data"


def use_host_devices(count: int) -> None:
    """Splits this machine's CPU into `count` JAX devices. Raises ConfigError if JAX already runs with another count."""
    _prepare(count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.local_device_count("cpu") != count:
            raise ConfigError(
                f"cannot make {count} CPU devices: JAX already runs with {jax.local_device_count('cpu')}; call"
                " use_host_devices before the first operation"
            ) from None


def _prepare(count: int) -> None:
    """Prevents two deadlocks of collectives on `count` CPU devices in one process.

    XLA's CPU client runs each device's program on a pool of `count` threads. It also blocks threads of that pool while
    too many programs are queued. A pool twice as large has room for both. JAX creates the pool on first use.

    A program that XLA reads from JAX's compilation cache has lost the order of its collectives: each gets its own
    resource, while the compiler gives them a common one (CreateResourceFromProto in XLA's thunk_proto_serdes.cc).
    Devices may then wait in different ones until no thread is left.
    """
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(2 * max(count, os.cpu_count() or 1)))
        jax.config.update("jax_enable_compilation_cache", False)


# Programs may also split the CPU through the environment.
for _count in re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")):
    _prepare(int(_count))
if (_count := os.environ.get("JAX_NUM_CPU_DEVICES", "")).isdecimal():
    _prepare(int(_count))


def keep_freed_memory() -> None:
    """Makes glibc keep memory that XLA frees after each program, instead of returning it to the kernel.

    This halves the system time of small training steps on virtual machines, where page faults are slow. Do not use it
    for large models, because the process never shrinks. It has no effect with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 2**28)


def make_mesh(
    num_lanes: int, *, data: int = 1, lane: int | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A (data, lane) mesh for a model of `num_lanes` lanes.

    lane: devices on the lane axis, a divisor of num_lanes; by default the largest that fits the devices. data: size of
    the data axis, over which batches and weights (FSDP) are split. Raises ConfigError for too few devices or a `lane`
    that does not divide the lanes.
    """
    devices = [*(jax.devices() if devices is None else devices)]
    if data < 1 or data > len(devices):
        raise ConfigError(f"data = {data} must be 1 to {len(devices)}, the number of devices")
    if lane is None:
        lane = max(n for n in range(1, len(devices) // data + 1) if num_lanes % n == 0)
    if lane < 1 or num_lanes % lane:
        fitting = ", ".join(str(n) for n in range(1, num_lanes + 1) if num_lanes % n == 0)
        raise ConfigError(f"lane = {lane} must divide {num_lanes} lanes; choose {fitting}")
    if data * lane > len(devices):
        raise ConfigError(
            f"a mesh of data = {data} x lane = {lane} needs {data * lane} devices, but only {len(devices)} are visible;"
            " choose a smaller mesh"
        )
    return jax.make_mesh(
        (data, lane), (DATA, LANE), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[: data * lane]
    )


def check_mesh(num_lanes: int, mesh: Mesh | None, stream: str = "float32") -> None:
    """Raises ConfigError unless `mesh` is a (data, lane) mesh that fits the lanes and the dtype `stream`.

    None means one device and always fits. A bfloat16 stream does not fit several CPU devices: XLA:CPU (jaxlib 0.10
    and 0.11) aborts the process when it compiles a bfloat16 all-reduce.
    """
    if mesh is None:
        return
    if set(mesh.shape) != {DATA, LANE}:
        raise ConfigError(
            f"the mesh has the axes {', '.join(map(str, mesh.shape))}; make it with laneformer.make_mesh({num_lanes})"
        )
    if num_lanes % mesh.shape[LANE]:
        raise ConfigError(
            f"a lane axis of {mesh.shape[LANE]} devices does not divide {num_lanes} lanes; use make_mesh({num_lanes})"
        )
    if stream == "bfloat16" and mesh.shape[LANE] > 1 and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError("precision.stream = 'bfloat16' cannot be summed over CPU devices; use float32, or one device")


def fit_spec(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """The spec without the mesh axes that do not divide their dimension. These dimensions are whole on every device."""

    def keep(axes: Any, size: int) -> Any:
        count = math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes or []))
        return axes if size % count == 0 else None

    return P(*(keep(axes, size) for axes, size in zip(spec, shape, strict=False)))


def lane_spec(spec: P) -> P:
    """The spec with only the lane axis, which shard_map handles manually. The compiler handles the other axes."""
    return P(*(LANE if axes == LANE else None for axes in spec))


def sharding(spec: P, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of an array with this spec and shape on the mesh."""
    return NamedSharding(mesh, fit_spec(spec, shape, mesh))


def put_weight(weight: np.ndarray | Quantized, spec: P, mesh: Mesh | None) -> jax.Array | Quantized[jax.Array]:
    """Puts a weight on the devices of the mesh; None: on one device. A quantized weight is not split by columns."""

    def put(array: np.ndarray, spec: P) -> jax.Array:
        where = None if mesh is None else sharding(spec, array.shape, mesh)
        placed: jax.Array = jax.device_put(array, where)
        return placed.block_until_ready()

    if not isinstance(weight, Quantized):
        return put(weight, spec)
    if weight.ndim == 2 and mesh is not None:  # devices have shares of its rows
        weight = weight.regrouped(1, weight.group[1])
    arrays = weight.arrays.items()
    return weight.with_arrays({name: put(array, P() if name in WHOLE else lane_spec(spec)) for name, array in arrays})
