"""The GPU backends: the persistent decode kernel of custom_calls on NVIDIA and AMD GPUs, one launch per answer."""

from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from laneformer import custom_calls
from laneformer.custom_calls.build import BuildError
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.compile import compiler
from laneformer.custom_calls.gpu.formats import AnyWeight, Bf12Choice
from laneformer.custom_calls.gpu.layout import MOST_ROWS
from laneformer.custom_calls.gpu.session import ARCHITECTURES, CAPABILITIES, LAUNCHES, GpuSession
from laneformer.custom_calls.gpu.session import SAMPLING_OPTIONS as SAMPLING_OPTIONS_OF_GPUS
from laneformer.custom_calls.gpu.tiling import Machine
from laneformer.decoder import decoder_ops
from laneformer.errors import ConfigError
from laneformer.infer.engine.backend import Source, device_name, power_of_two
from laneformer.infer.engine.native import (
    NativeBackend,
    RoundedSource,
    bf12_conditions,
    check_rounding,
    check_weights,
    pack,
    plan_of,
    report_left,
    rounded_kind,
)
from laneformer.infer.engine.prefix import Caches, Lease
from laneformer.infer.engine.scheduler import Scheduler
from laneformer.infer.engine.states import for_kernel, for_model
from laneformer.ops import GpuOp, without_kernel
from laneformer.processes import Group
from laneformer.quantized.rounding import USUAL
from laneformer.state import Cache

# Prompt tokens per XLA block. A remainder shorter than the smallest block goes through the kernel, token by token.
BLOCK, SMALLEST_BLOCK = 512, 64

ROWS = 4  # limit on the rows of a pass with drafts
MOST_PARALLEL = MOST_ROWS
JOIN_SECONDS = 300  # time limit for the other processes of the job to open their sessions


class GpuBackend(NativeBackend):
    """Decodes with weights packed for the kernel, and reads prompts in blocks through XLA with a second copy of the
    weights.

    If the devices belong to several processes, each process must create the engine and make the same requests, and
    receives all tokens.
    """

    sampling_options = SAMPLING_OPTIONS_OF_GPUS
    session: GpuSession
    platform: str
    launch = "persistent"

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        device = jax.devices()[0] if source.mesh is None else source.mesh.devices.flat[0]
        kind = getattr(device.client, "platform_version", "")
        here = "hip" if "rocm" in kind.lower() else "cuda" if device.platform == "gpu" else None
        if here != cls.platform:
            return (
                f"it needs {'AMD' if cls.platform == 'hip' else 'NVIDIA'} GPUs, but JAX's devices are {device.platform}"
            )
        if jax.process_count() > 1 and (
            source.mesh is None
            or jax.process_index() not in {device.process_index for device in source.mesh.devices.flat}
        ):
            return (
                "the job has several processes: pass a mesh with devices of every process (devices=...), or use"
                " backend xla"
            )
        capability, (wanted, which) = str(device.compute_capability), CAPABILITIES[cls.platform]
        if not capability.startswith(wanted):
            return (
                f"{device.device_kind} has compute capability {capability}, but the kernel is written for {wanted}"
                f" ({which})"
            )
        if (source.precision.stream, source.precision.accumulate) != ("float32", "float32"):
            return (
                f"it adds in float32, but the model in {source.precision.accumulate} and {source.precision.stream}: use"
                " backend xla"
            )
        try:
            compiler(ARCHITECTURES[cls.platform])
        except BuildError as error:
            return str(error)
        return without_kernel(decoder_ops(source.config), GpuOp) or custom_calls.unavailable()

    def __init__(
        self,
        source: Source,
        *,
        absorb: bool = True,
        weights: str | None = None,
        speculation: int | None = 0,
        parallel: int = 1,
        machine: Machine | None = None,
        chaos_us: int = 0,
        compile_with: Callable | None = None,
        driver: Path | None = None,
    ):
        """absorb: whether XLA reads long prompts. Otherwise the kernel does, and only one copy of the weights is kept.
        weights: bf12 packs bfloat16 weights for the kernel in 12 bits, without loss. int8 and the other formats of
            laneformer/quantized/rounding.py round the matrices of all products; the head is not rounded if it is the
            embedding table. Quantized matrices keep their format.
        speculation: limit on the drafts of a pass. Drafts are copied from the text and do not change the answer. 1
            compiles the kernel for passes of two rows, more for ROWS. Prompts that the kernel reads go through it that
            many tokens at a time. 0 and None compile it for one row, because the gain has not been measured yet.
        parallel: number of requests that may run together, each with a row of a pass, at most MOST_PARALLEL. Each
            answer is the same as if its request ran alone. With drafts, a pass has one row more than requests if the
            kernel supports that many. 0 means 1, for the same reason.
        machine, chaos_us, compile_with, driver: for tests and measurements; see custom_calls.gpu.session.

        Raises ConfigError if the library or the device cannot be used, or for bf12 with weights of another dtype.
        """
        self.source, plan = source, plan_of(source)
        self.speculation, parallel = min(speculation or 0, ROWS - 1), parallel or 1
        if not 1 <= parallel <= MOST_PARALLEL:
            raise ConfigError(f"parallel must be 1 to {MOST_PARALLEL} on backend {self.name}, got {parallel}")
        check_weights(weights, plan, tuple(USUAL))
        check_rounding(weights, source)
        source = RoundedSource(source, plan, kind) if (kind := rounded_kind(weights)) else source
        self._model = source.model() if absorb else None

        def all_weights() -> Iterable[tuple[str, AnyWeight]]:
            """Yields each weight by its path in the plan."""
            for path, weight in source.weights() if self._model is None else self._model.weights().items():
                yield from plan.parts(path, weight).items()

        try:
            session = GpuSession(
                plan,
                bf12=Bf12Choice.of(plan, all_weights()) if weights == "bf12" else None,
                codes=CodesChoice.of(plan, all_weights()) if source.quantized else None,
                rows=rows_for(parallel, self.speculation),
                slots=parallel,
                drafts=self.speculation > 0,
                group=Group(source.mesh, JOIN_SECONDS, "open its part of the decode session"),
                mesh=source.mesh,
                platform=self.platform,
                launch=self.launch,
                machine=machine,
                chaos_us=chaos_us,
                compile_with=compile_with,
                driver=driver,
            )
            if self._model is None:
                pack(session, source)
            else:
                for path, weight in all_weights():
                    session.pack(path, weight)
            _ = session.operands
            if self.speculation:
                session.speculate(self.speculation)
            report_left(session.bf12_weights)
        except (custom_calls.NativeError, BuildError) as error:
            raise ConfigError(str(error)) from None
        self._extend = jax.jit(_extend, donate_argnums=1)
        self._use(session)
        context = self.source.config.max_position_embeddings
        self._scheduler = Scheduler(session, context, self.source.mesh, self._reading) if parallel > 1 else None

    @property
    def forces(self) -> bool:
        return self.speculation > 0

    @property
    def conditions(self) -> dict:
        plan, mesh = self.session.plan, self.source.mesh
        return {
            "weights_dtype": plan.weight_dtype.name,
            **bf12_conditions(self.session.bf12_weights),
            **self.session.quantized_weights,
            "compute_dtype": self.source.precision.compute,
            "kv_dtype": plan.cache_dtype.name,
            "variants": list(self.session.layout.variants),
            "speculation": self.speculation,
            "parallel": self.parallel,
            "prefix_cache": 0,  # XLA's order of summation for a position depends on the block of the prompt
            "device": device_name(jax.devices()[0] if mesh is None else mesh.devices.flat[0]),
            "devices": 1 if mesh is None else mesh.size,
            "ctas": self.session.layout.grid,
            "threads_per_cta": self.session.layout.threads,
            "launch": LAUNCHES[self.launch],
        }

    def _answer(self, lease: Lease, slot: int) -> None:
        if self._scheduler is None:
            return super()._answer(lease, slot)
        try:
            self._scheduler.run(lease.request, slot)
        finally:
            self._prefixes.drop(lease)

    def _absorb(self, prompt: np.ndarray, start: int, caches: Caches) -> tuple[int, Caches]:
        reading = self._reading(prompt, lambda: caches, start)
        if reading is None:
            return start, caches
        while reading.block():
            pass
        return reading.done, reading.caches

    def _reading(self, prompt: np.ndarray, make_caches: Callable[[], Caches], start: int = 0) -> "PromptReading | None":
        """The reading of a prompt through XLA; None if the rest of the prompt is shorter than a block."""
        if self._model is None or len(prompt) - 1 - start < SMALLEST_BLOCK:
            return None
        return PromptReading(self, prompt, start, make_caches())


def rows_for(parallel: int, speculation: int) -> int:
    """Number of rows that the kernel is compiled for: one for each request, and with drafts at least one more."""
    drafting = 0 if speculation == 0 else 2 if speculation == 1 else ROWS
    return min(MOST_ROWS, max(parallel + (drafting > 0), drafting))


class PromptReading:
    """Reads a prompt through XLA in blocks. Their sizes are powers of two, so that few programs are compiled."""

    def __init__(self, backend: GpuBackend, prompt: np.ndarray, start: int, caches: Caches):
        """start: number of positions that are filled; must be 0 for a model with a recurrent state."""
        self._backend, self._prompt, self._given, self.done = backend, prompt, caches.layers, start
        plan, source = backend.session.plan, backend.source
        self._layers = for_model(plan, source.config, caches.layers, source.mesh)

    def block(self) -> bool:
        """Reads one block; False if no block is left."""
        left = len(self._prompt) - 1 - self.done
        if left < SMALLEST_BLOCK:
            return False
        ids = self._prompt[None, self.done : self.done + min(BLOCK, power_of_two(left + 1) // 2)]
        self._layers = self._backend._extend(self._backend._model, self._layers, jnp.int32(self.done), ids)
        self.done += ids.shape[1]
        return True

    @property
    def caches(self) -> Caches:
        """The caches of the positions read so far, in the form of the kernel."""
        return Caches(for_kernel(self._backend.session.plan, self._layers, self._given, self.done))


def _extend(model, layers: list[dict[str, jax.Array]], length: jax.Array, ids_bs: jax.Array):
    return model.extend(ids_bs, Cache(layers, length), last_only=True)[1].layers


class CudaBackend(GpuBackend):
    """The persistent kernel on NVIDIA GPUs."""

    name = platform = "cuda"


class CudaGraphBackend(CudaBackend):
    """The same kernel code, launched op by op for each token from a CUDA graph, for comparison with the persistent
    kernel.
    """

    name, launch = "cuda-graph", "graph"

    @property
    def conditions(self) -> dict:
        return super().conditions | {"launches_per_token": self.session.launches_per_token}


class CudaOverlapBackend(CudaGraphBackend):
    """A CUDA graph whose launches overlap (programmatic dependent launch): each op fetches its weights while the
    previous op ends.
    """

    name, launch = "cuda-graph-overlap", "overlapping graph"


class HipBackend(GpuBackend):
    """The persistent kernel on AMD GPUs. It compiles for them, but has not been run on one."""

    name = platform = "hip"
