"""The CPU backend: the persistent decode kernel of custom_calls, which reads the prompt and generates the whole answer
in one call.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from laneformer import custom_calls
from laneformer.custom_calls import Plan, Session, fastest_way
from laneformer.custom_calls.cpu.session import MOST_ROWS
from laneformer.decoder import decoder_ops
from laneformer.errors import ConfigError
from laneformer.formats import Bf12Product
from laneformer.infer.engine.backend import CheckpointSource, Chunks, Request, Source, device_name
from laneformer.infer.engine.native import (
    NativeBackend,
    bf12_conditions,
    check_rounding,
    check_weights,
    pack,
    plan_of,
    report_left,
    rounded_kind,
)
from laneformer.infer.engine.options import MOST_DRAFTS
from laneformer.infer.engine.prefix import Lease
from laneformer.infer.sampling import SAMPLING_OPTIONS
from laneformer.ops import without_kernel
from laneformer.quantized.rounding import USUAL
from laneformer.weights import weight_bytes_per_token

log = logging.getLogger("laneformer")
MOST_PARALLEL = 4  # by default
# Bytes of bfloat16 weights per token from which on they are read from memory. Below, they are read from a cache, where
# bf12 and AMX are slower.
LARGE = 256 << 20


class CpuBackend(NativeBackend):
    """Decodes on worker threads. Each has its share of the weights, packed in the order in which it reads them."""

    name = "cpu"
    session: Session
    masks = forces = True
    sampling_options = SAMPLING_OPTIONS
    patience = 0.05  # each read of the stream takes a core from a worker, with the host's code evicted from the caches

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        platform = jax.default_backend() if source.mesh is None else source.mesh.devices.flat[0].platform
        precision = source.precision
        if platform != "cpu":
            return f"JAX's devices here are {platform}: use backend xla, or set JAX_PLATFORMS=cpu"
        if jax.process_count() > 1:
            return "it supports only jobs of one process: use backend xla"
        if (precision.stream, precision.accumulate) != ("float32", "float32"):
            return f"it adds in float32, the model in {precision.accumulate} and {precision.stream}: use backend xla"
        return without_kernel(decoder_ops(source.config)) or custom_calls.unavailable()

    def __init__(
        self,
        source: Source,
        *,
        threads: int | None = None,
        one_thread_per_lane: bool = False,
        chaos_us: int = 0,
        instructions: str | None = None,
        weights: str | None = None,
        prefix_cache: int | None = None,
        speculation: int | None = 0,
        parallel: int = 1,
        most_slowdown: float = 1.5,
    ):
        """weights: format of the weights in memory.
            bf12: bfloat16 weights in 12 bits, without loss.
            bfloat16: weights in the dtype that they have.
            int8 and the other formats of laneformer/quantized/rounding.py: round the matrices of all products. The head
                is not rounded if it is the embedding table.
            None: bf12 if the checkpoint is stored in bf12, or if the model exceeds all caches and bf12 was measured to
                be faster.
            Quantized matrices keep their format.
        prefix_cache: number of sequences to keep, each with its caches, for later prompts that begin with the same
            tokens; by default `parallel`. 0 computes every prompt from its first token.
        speculation: limit on the drafts of a pass; 0 for none, None for as many as fit. Drafts are copied from the text
            and do not change the answer. A pass makes as many as its measured time makes worthwhile.
        parallel: number of requests that may run together; 0 for as many as fit a quarter of the free memory, at most
            MOST_PARALLEL. Each answer is the same as if its request ran alone.
        most_slowdown: limit on the time of a pass, relative to a pass of one row, up to which rows of other requests
            join it.
        threads, one_thread_per_lane, chaos_us, instructions: for tests and measurements; see custom_calls.Session.

        Raises ConfigError if the library cannot be used, or for bf12 with weights of another dtype.
        """
        if most_slowdown < 1:
            raise ConfigError(f"most_slowdown must be at least 1, got {most_slowdown}")
        self.source, plan = source, plan_of(source)
        parallel = _parallel(source, plan, parallel)
        check_weights(weights, plan, tuple(USUAL))
        check_rounding(weights, source)
        self.speculation = MOST_DRAFTS if speculation is None else speculation
        packed: list[Bf12Product] = []
        self._check_files: Callable[[], None] = lambda: None
        if weights in (None, "bf12") and plan.weight_dtype.name == "bfloat16" and isinstance(source, CheckpointSource):
            packed = list(source.packed())
            if packed:
                self._check_files = source.check_files
        large = weight_bytes_per_token(source.config) >= LARGE and plan.weight_dtype.name == "bfloat16"
        try:
            if weights is None and (packed or source.quantized or not large):
                weights = "bf12" if packed else "bfloat16"
            if large:
                decided = None if weights is None else weights == "bf12"
                instructions, narrow = fastest_way(threads, instructions, decided)
                weights = weights or ("bf12" if narrow else "bfloat16")
            session = Session(
                plan,
                threads=threads,
                one_thread_per_lane=one_thread_per_lane,
                chaos_us=chaos_us,
                instructions=instructions,
                bf12=weights == "bf12",
                slots=parallel,
                most_slowdown=most_slowdown,
            )
            if threads is not None and threads > (cores := custom_calls.default_threads()):
                log.warning(
                    "%d threads on %d core%s: use at most one per core; 8, 32 and 128 on a core had 0.9, 0.4 and 0.2 of"
                    " the speed of one",
                    *(threads, cores, "s" * (cores > 1)),
                )
            mapped = [path for product in packed if session.map(product) for path in product.paths]
            pack(session, source, mapped, rounded_kind(weights))
            report_left(session.bf12_weights)
            session.speculate(self.speculation)
        except custom_calls.NativeError as error:
            raise ConfigError(str(error)) from None
        self._use(session, parallel if prefix_cache is None else prefix_cache)

    def start(self, request: Request) -> Chunks:
        self._check_files()
        return super().start(request)

    def _fields(self, lease: Lease, start: int) -> dict[str, Any]:
        found = {**super()._fields(lease, start), "masked": lease.request.constraint is not None}
        if not self.speculation:
            found["before"] = ()
        if lease.source is not None:
            found["source"] = custom_calls.request.Source(*lease.source.call, lease.source.count)
        return found

    @property
    def conditions(self) -> dict:
        plan = self.session.plan
        return {
            "weights_dtype": plan.weight_dtype.name,
            **bf12_conditions(self.session.bf12_weights),
            **self.session.quantized_weights,
            "compute_dtype": self.source.precision.compute,
            "kv_dtype": plan.cache_dtype.name,
            "prefix_cache": self._prefixes.slots,
            "speculation": self.speculation,
            "parallel": self.parallel,
            "device": device_name(jax.devices("cpu")[0]),
            "devices": 1 if self.source.mesh is None else self.source.mesh.size,
            "threads": self.session.threads,
            "instructions": self.session.instructions,
        }


def _parallel(source: Source, plan: Plan, parallel: int) -> int:
    """Number of requests that may run together. parallel: the option, 0 to choose by memory. Raises ConfigError for
    more than the kernel or the devices allow.
    """
    if source.mesh is not None:  # each device of a call waits for the others
        if parallel > 1:
            raise ConfigError(f"parallel must be 1 on {source.mesh.size} devices, got {parallel}")
        return 1
    if not 0 <= parallel <= MOST_ROWS:
        raise ConfigError(f"parallel must be 1 to {MOST_ROWS}, or 0 to choose by memory, got {parallel}")
    if parallel:
        return parallel
    free = available_memory() - weight_bytes_per_token(source.config)
    cache = plan.kept_bytes(source.config.max_position_embeddings)
    return max(1, min(MOST_PARALLEL, int(free / 4 / cache)))


def available_memory() -> int:
    """Bytes of memory that processes can use without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return 1024 * int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0])
