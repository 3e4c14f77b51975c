"""Devices to compile for without owning them: NVIDIA GPUs described to XLA's CUDA compiler, or parts of the CPU."""

import importlib.util
from typing import Literal

import jax
from jax.experimental import topologies

import laneformer as lf
from laneformer.errors import ConfigError
from laneformer.train.planning.cluster import Device

Compiler = Literal["auto", "cuda", "cpu"]

# Compiler options. XLA chooses tiles of Triton kernels by timing them; without a GPU its first guess may fail.
OPTIONS: dict[str, dict[str, bool | str]] = {"cuda": {"xla_gpu_enable_triton_gemm": False}, "cpu": {}}

# Chips for XLA's CUDA compiler, from target_config/specs of github.com/openxla/xla: multiprocessors, compute
# capability, bytes of L2 cache, GHz.
_CHIPS = {"h100": (132, 9, 52_428_800, 1.98), "h200": (132, 9, 52_428_800, 1.98), "b200": (148, 10, 132_644_864, 1.965)}


def compile_only_devices(name: str, device: Device, nodes: int, compiler: Compiler) -> tuple[list, str]:
    """The devices of `nodes` nodes of device `name`, for a mesh, and their compiler, cuda or cpu.

    cuda is XLA:GPU without a GPU and needs jax's CUDA plugin. cpu emulates any device: exchanges, products and state
    are those of the real program, but XLA:CPU computes bfloat16 in float32 and fuses less, so that temporary memory and
    traffic are overestimated. Call before the first JAX operation. Raises ConfigError if the compiler is unavailable.
    """
    has_cuda = any(
        importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{v}")
        for v in (12, 13)
    )
    if compiler == "auto":
        compiler = "cuda" if name in _CHIPS and has_cuda else "cpu"
    jax.config.update("jax_platforms", "cpu")  # does not use GPUs of this machine
    count = nodes * device.per_node
    if compiler == "cuda":
        if name not in _CHIPS:
            raise ConfigError(f"cluster.compiler = 'cuda' supports {', '.join(_CHIPS)}, not {name}; use cpu")
        if not has_cuda:
            raise ConfigError(
                "cluster.compiler = 'cuda' needs jax's CUDA plugin, not a GPU; pip install 'jax[cuda12]', or use cpu"
            )
        shape = f"1x{nodes}x{device.per_node}"
        topology = topologies.get_topology_desc(platform="cuda", target_config=_target(name, device), topology=shape)
        return list(topology.devices), compiler
    try:
        lf.use_host_devices(count)
    except ConfigError:
        if jax.local_device_count("cpu") < count:
            raise
    return jax.devices("cpu")[:count], compiler


def _target(name: str, device: Device) -> str:
    """A stream_executor.GpuTargetConfigProto as text, with the values common to all Hopper and Blackwell chips."""
    cores, capability, cache, clock = _CHIPS[name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
          core_count: {cores} clock_rate_ghz: {clock} l2_cache_size: {cache}
          cuda_compute_capability {{ major: {capability} }}
          memory_bandwidth: {int(device.memory_bandwidth or 0)} device_memory_size: {device.memory}
        }}
        platform_name: "CUDA" device_description_str: "{device.kind}"
        dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
    """
