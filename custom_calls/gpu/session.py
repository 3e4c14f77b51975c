"""A model on GPUs: the kernel compiled for it, its memory on all devices, and the running call."""

import ctypes
import hashlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from laneformer.custom_calls.gpu import edges, watchdog
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.compile import PERSISTENT, STEPS, image
from laneformer.custom_calls.gpu.formats import AnyWeight, Bf12Choice
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.slot import GpuSlot, SlotStream, drafting_of
from laneformer.custom_calls.gpu.tiling import H200, MI300X, Machine
from laneformer.custom_calls.gpu.variants import from_environment
from laneformer.custom_calls.gpu.weights import GpuWeights
from laneformer.custom_calls.library import EMULATED, SPAN, TARGET, NativeError, call
from laneformer.custom_calls.plan import Plan
from laneformer.custom_calls.request import Request
from laneformer.custom_calls.session import Bf12Weights, DecodeSession, Drafting
from laneformer.ops import TRACE_NAMES, GpuOp, without_kernel
from laneformer.quantized import Quantized

MOST_DEVICES, MOST_LAYERS = 8, 128  # as in gpu/kernel/params.h
MOST_KEPT = 6 * MOST_LAYERS  # arrays that layers keep
HANDLE_BYTES = 64  # as in gpu/host/driver.h
MACHINES = {"cuda": H200, "hip": MI300X}
ARCHITECTURES = {"cuda": "sm_90a", "hip": "gfx942"}
CAPABILITIES = {
    "cuda": ("9.0", "H100 and H200"),
    "hip": ("gfx942", "MI300X"),
}  # of a device as JAX reports it, and the devices that have it
# Times of passes of 1, 2, ... rows in units of a pass of one row, which decide how many drafts are checked. They are
# assumed: nothing has been measured on a GPU.
PRICES = (1.0, 1.03, 1.06, 1.1, 1.2, 1.3, 1.4, 1.5)
LEAST_TOKENS, LEAST_STOPS = 16, 4  # prompt and stop tokens for which a call always has room
SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty")  # in the order of Params::settings
SAMPLING_OPTIONS = frozenset((*SETTINGS, "top_k", "seed"))  # that the kernel computes
LAUNCHES = {
    "persistent": "one kernel for a whole answer",
    "graph": "one kernel per op, under a CUDA graph",
    "overlapping graph": "one kernel per op, under a CUDA graph with programmatic dependent launches",
}


def machine_of(platform: str, device: jax.Device) -> Machine:
    """The properties of an H200 or MI300X, with fewer CTAs if the device has fewer multiprocessors."""
    machine = MACHINES[platform]
    cores = getattr(device, "core_count", machine.multiprocessors)
    return replace(machine, ctas=min(machine.ctas, cores), multiprocessors=cores)


class Inputs(NamedTuple):
    """The request of a call as the GPU kernel reads it. A call with several slots has a leading slot axis."""

    prompt: np.ndarray
    """int32 [p]: token ids; only the first control[0] are used."""
    control: np.ndarray
    """int32 [5]: number of prompt tokens (0 in a slot without a request), `start`, `limit`, `top_k`, `drawn`."""
    settings: np.ndarray
    """float32 [4]: the options of SETTINGS."""
    key: np.ndarray
    """uint32 [2]: low and high word of the seed."""
    stops: np.ndarray
    """int32 [s]: stop tokens; -1 for an unused entry."""


class Group(Protocol):
    """The processes whose devices a session uses. The caller creates the group: a laneformer.processes.Group."""

    index: int
    """This process's number in the job."""

    @property
    def machine(self) -> str:
        """Identifier of the machine, equal in all processes on one machine."""

    @property
    def several(self) -> bool:
        """Whether there are other processes."""

    def share(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchanges a value with all processes. Returns the value of each process, by its number."""

    def barrier(self) -> bool:
        """Waits for all processes. Returns whether they arrived in time."""

    def __enter__(self) -> "Group": ...

    def __exit__(self, kind, error, trace) -> None:
        """Reports an exception to the other processes."""


class GpuSession(SlotStream, DecodeSession):
    """A model in the library, on the devices of a mesh. Pack every weight, then pass the session to
    `custom_calls.decode`, one call at a time: start the next call after the last one has ended.

    If the devices belong to several processes on one machine, all processes open the session, pack the weights and make
    the same calls. Close it in all processes while no call runs. `close` waits for the other processes, because they
    may still write to this process's memory.
    """

    _prefix = "gpu_"
    ops = ("embed", "merge", "final", "head", "sample", *TRACE_NAMES)
    """In the order of `Names` in gpu/kernel/ops/dense.h."""
    worker = "CTA"

    def __init__(
        self,
        plan: Plan,
        *,
        group: Group,
        mesh: Mesh | None = None,
        platform: str = "cuda",
        machine: Machine | None = None,
        chaos_us: int = 0,
        timeout_ms: int = 10_000,
        peer_ctas: int = 0,
        peer_delay_us: int = 0,
        launch: str = "persistent",
        bf12: Bf12Choice | None = None,
        codes: CodesChoice | None = None,
        rows: int = 1,
        slots: int = 1,
        drafts: bool = False,
        variants: Collection[str] | None = None,
        compile_with: Callable[[Path, Path, str], None] | None = None,
        driver: Path | None = None,
    ):
        """Opens a session. Raises NativeError for a model or an option that the kernel does not support, BuildError if
        the kernel cannot be compiled, and the group's error if a process is missing.

        mesh: axes (data, lane); None for the first local device. group: the processes of the mesh. platform: "cuda" or
        "hip". machine: properties of the devices, which also set the numbers of CTAs and warps; by default those of
        `machine_of`. timeout_ms: longest wait for another lane during a call; six times as long at its start, because
        other processes may still compile. chaos_us: for tests; longest random delay, in microseconds. compile_with,
        driver: for tests on emulated devices.

        peer_ctas: run one lane alone, with random weights (`fill`); this number of CTAs emulates the other lanes and
        answers after peer_delay_us microseconds (gpu/kernel/peers.h). launch: one of LAUNCHES. "graph" launches each op
        of each pass separately from a graph; "overlapping graph" also loads the next op's weights while one ends (CUDA
        only). Both measure what the persistent kernel saves.

        bf12: products whose bfloat16 weights are packed in 12 bits, with the same bits of every result. codes: products
        whose weights are quantized. Both must be made from the weights that will be packed.

        rows: most rows of a pass. Several rows are for drafts (`speculate`) and for prompts, of which the kernel then
        reads that many tokens at a time. slots: slots of a call, at most `rows`; with several, a pass has a row of each
        request (see `yield_` and `inputs`). drafts: whether a call with several slots
        may have drafts, in rows that requests and prompts leave free; a call with one slot always may.

        variants: names in VARIANTS of custom_calls/gpu/variants.py; by default those in LANEFORMER_GPU_VARIANTS.
        """
        if reason := without_kernel(plan.ops, GpuOp):
            raise NativeError(f"the GPU kernel does not support this model ({reason})")
        if launch not in LAUNCHES:
            raise NativeError(f"unknown launch {launch!r}; choose {', '.join(LAUNCHES)}")
        if launch != "persistent" and rows > 1:
            raise NativeError(f"passes of {rows} rows need launch 'persistent', got {launch!r}")
        if slots > 1 and group.several:
            raise NativeError(f"calls of {slots} slots need one process, got several")
        chosen = from_environment() if variants is None else tuple(variants)
        if launch != "persistent" and "spare-writer" in chosen:
            raise NativeError(f"variant 'spare-writer' needs launch 'persistent', got {launch!r}")
        if launch != "persistent" and peer_ctas:
            raise NativeError(f"peer_ctas needs launch 'persistent', got {launch!r}")
        self._group = group
        devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.reshape(-1))
        self._places = [place for place, device in enumerate(devices) if device.process_index == self._group.index]
        lanes, layers = plan.ops.lanes, len(plan.ops.layers)
        if lanes % len(devices):
            raise NativeError(f"the number of devices must divide {lanes} lanes, got {len(devices)}")
        if len(devices) > MOST_DEVICES:
            raise NativeError(f"the GPU kernel runs on at most {MOST_DEVICES} devices, got {len(devices)}")
        if layers > MOST_LAYERS:
            raise NativeError(
                f"the GPU kernel runs at most {MOST_LAYERS} layers, the model has {layers}: use backend xla"
            )
        if (kept := sum(map(len, plan.kept))) > MOST_KEPT:
            raise NativeError(
                f"the layers of this model keep {kept} arrays, the GPU kernel supports {MOST_KEPT}: use backend xla"
            )
        try:
            lanes_here = 1 if peer_ctas else lanes // len(devices)
            bf12, self._codes = bf12 or Bf12Choice(), codes or CodesChoice()
            machine = machine or machine_of(platform, devices[0])
            packed = frozenset(bf12.tables), self._codes.formats
            self.layout = Layout(plan, machine, lanes_here, peer_ctas, *packed, rows, slots, drafts, chosen)
            header = model_header(self.layout)
        except ValueError as error:
            raise NativeError(str(error)) from None
        self.target, self.together = TARGET if driver is None else EMULATED, slots
        with self._group:
            compiled = image(
                header, ARCHITECTURES[platform], compile_with, PERSISTENT if launch == "persistent" else STEPS
            )
            self._open_here(devices, compiled, platform, driver, launch, timeout_ms, chaos_us, peer_delay_us)
            identity = repr((header, launch, plan.words.tolist(), plan.floats.tolist()))
            self._connect(hashlib.sha256(identity.encode()).hexdigest())
        self._group.share({})  # all processes have opened each other's memory
        self._weights = GpuWeights(self.layout, bf12, self._codes, mesh, self._group.several)

    def _open_here(
        self,
        devices: list,
        compiled: bytes,
        platform: str,
        driver: Path | None,
        launch: str,
        timeout_ms: int,
        chaos_us: int,
        peer_delay_us: int,
    ) -> None:
        """Opens this process's part of the session in the library. compiled: the image of the kernel."""
        layout, plan = self.layout, self.layout.plan
        steps = [] if launch == "persistent" else layout.steps
        self.launches_per_token = len(steps)  # 0: one launch for all tokens
        numbers: dict[str, int | list[int]] = {
            "lanes_here": layout.lanes_here,
            "packed_words": math.prod(layout.packed_shape) // len(devices),
            "ctas": layout.ctas,
            "grid": layout.grid,
            "threads": layout.threads,
            "shared_bytes": layout.memory.shared_bytes,
            "lane_words": layout.rows * edges.lane_words(layout),
            "rows": layout.rows,
            "requests": layout.requests,
            "shared_words": edges.shared_words(layout),
            "pass_tags": edges.pass_tags(layout),
            "drafting": int(layout.drafting),
            "exchanges": len(layout.table.sums) + 1,
            "steps": [word for step in steps for word in step],
            "overlapping": int(launch == "overlapping graph"),
            "kept_floats": layout.kept_floats,
            "devices": [devices[place].local_hardware_id for place in self._places],
            "places": self._places,
            "all_devices": len(devices),
            "timeout_ms": timeout_ms,
            "chaos_us": chaos_us,
            "peer_delay_us": peer_delay_us,
        }
        lines = (f"{name} {' '.join(map(str, np.atleast_1d(value)))}" for name, value in numbers.items())
        self._open(
            plan,
            timeout_ms,
            "\n".join(lines).encode(),
            platform.encode(),
            str(driver).encode() if driver else None,
            compiled,
        )

    def _connect(self, digest: str) -> None:
        """Exports this process's memory to the other processes of the group, and opens theirs. Raises NativeError if a
        process is on another machine, or has opened another model. digest: identifies model and options.
        """
        if not self._group.several:
            return
        self.close.detach()
        self.close = weakref.finalize(self, _close, self._lib, self._id, self._group)
        self.close.atexit = False  # the process's exit frees everything, and must not wait for others
        own = (ctypes.c_char * (HANDLE_BYTES * len(self._places)))()
        call("gpu_export", self.id, ctypes.addressof(own))
        handles = {
            str(place): own.raw[i * HANDLE_BYTES : (i + 1) * HANDLE_BYTES].hex() for i, place in enumerate(self._places)
        }
        replies = self._group.share({"machine": self._group.machine, "model": digest, "handles": handles})
        for process, other in replies.items():
            if other["machine"] != replies[self._group.index]["machine"]:
                raise NativeError(
                    f"processes {self._group.index} and {process} are on different machines: devices write to each"
                    " other's memory on one machine only; use backend xla"
                )
            if other["model"] != digest:
                raise NativeError(
                    f"processes {self._group.index} and {process} have different models or options: start them with the"
                    " same"
                )
        by_place = {
            int(place): bytes.fromhex(handle)
            for other in replies.values()
            for place, handle in other["handles"].items()
        }
        call("gpu_connect", self.id, b"".join(by_place[place] for place in range(len(by_place))))

    # ---- weights

    def pack(self, path: str, weight: AnyWeight) -> None:
        """Packs a weight whose path and shape are those of the table in laneformer/weights.py. A matrix must be
        quantized as announced when the session was opened. Raises NativeError if the weight does not fit.
        """
        self._check_weight(path, tuple(weight.shape))
        if (now := weight.name if isinstance(weight, Quantized) else None) != (name := self._codes.names.get(path)):
            raise NativeError(
                f"weight {path} is {now or 'not quantized'}, but the session was opened for {name or 'not quantized'}"
            )
        self._missing.pop(path, None)
        self._weights.pack(path, weight)

    def fill(self, seed: int = 0) -> None:
        """Fills all weights for measurements: matrices with random numbers, small weights with 1, tables of experts
        with random experts.
        """
        self._weights.fill(seed)
        self._missing = {}

    @property
    def operands(self) -> tuple:
        """The operands of the custom call, see `GpuWeights.operands`. Raises NativeError while weights are missing."""
        self._require_weights()
        return self._weights.operands

    def inputs(self, *requests: Request | None, most_tokens: int = 0, most_stops: int = 0) -> Inputs:
        """The arrays in which a call gets its requests, one for each of its `together` slots; None for a slot without a
        request. This also sets the texts of the slots' next calls.
        """
        for slot, request in zip(self.slots, requests, strict=True):
            if request is not None and (self.layout.drafting or len(request.forced) or len(request.given)):
                slot.set_texts(request)
        given = [Request(prompt=(), limit=0) if request is None else request for request in requests]
        rooms = [max(map(len, lists)) for lists in zip(*((one.prompt, one.stops) for one in given), strict=True)]
        sizes = max(LEAST_TOKENS, most_tokens, rooms[0]), max(LEAST_STOPS, most_stops, rooms[1])
        of_slots = [_inputs(request, *(1 << (size - 1).bit_length() for size in sizes)) for request in given]
        return of_slots[0] if self.together == 1 else Inputs(*map(np.stack, zip(*of_slots, strict=True)))

    @property
    def of_lanes(self) -> tuple[bool, ...]:
        return self._weights.of_lanes

    @property
    def bf12_weights(self) -> Bf12Weights:
        """Counts of the weights that are packed in 12 bits."""
        return self._weights.bf12

    @property
    def quantized_weights(self) -> dict[str, Any]:
        """Facts of the quantized matrices, see `GpuWeights.quantized`; {} if nothing is quantized."""
        return self._weights.quantized

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights that a token reads on all devices."""
        return self.layout.stream_bytes

    # ---- the running call

    @property
    def _address(self) -> tuple[int, int]:
        return self.id, 0

    @cached_property
    def slots(self) -> tuple[SlotStream, ...]:
        """The slots of a call by number; the session itself if there is one slot."""
        if self.together == 1:
            return (self,)
        drafting_rows = self.layout.rows if self.layout.drafting else 0
        return tuple(GpuSlot(self, slot, drafting_rows) for slot in range(self.together))

    def begin(self) -> int:
        """Announces a call. If calls have several slots, also call `begin` of a slot before each of its requests."""
        if self.together == 1:
            return super().begin()
        call("gpu_begin_call", self.id)
        return 0

    def yield_(self) -> None:
        """Ends the running call with several slots, or the call that `begin` has announced, after its current pass.
        Requests that have not ended continue in another call, with the same bits.
        """
        self._lib.laneformer_gpu_yield(self.id)

    def yield_after(self, passes: int) -> None:
        """Lets every later call yield after `passes` passes; 0 for no limit."""
        self._lib.laneformer_gpu_yield_after(self.id, passes)

    @property
    def passes(self) -> int:
        """Number of passes of the last call with several slots."""
        return self._lib.laneformer_gpu_passes(self.id)

    @property
    def failure(self) -> str | None:
        """Why the last call failed on the devices, and where its CTAs waited then; None if it did not fail."""
        text = ctypes.create_string_buffer(1000)
        if not self._lib.laneformer_gpu_failure(self.id, text, len(text)):
            return None
        where = watchdog.describe(self.stuck(), self.ops, self.layout.memory.slots)
        return text.value.decode() + (f" ({where})" if where else "")

    def stuck(self) -> np.ndarray:
        """What each CTA of this process waited for when the last call failed: array of `watchdog.STUCK`, the first one
        first. A CTA that did not wait has no record.
        """
        count = self._lib.laneformer_gpu_stuck(self.id, None, 0)
        records = np.zeros(count, watchdog.STUCK)
        self._lib.laneformer_gpu_stuck(self.id, records.ctypes.data, count)
        return records

    def speculate(self, most: int, prices: Sequence[float] | None = None) -> None:
        """Lets the next calls check up to `most` drafts of each request in a pass, at most rows - 1; 0 for none. Drafts
        are copied from the text so far. They change only the speed, no bit of a result.

        prices: times of passes of 1, 2, ... rows in units of a pass of one row, the same in all processes; by default
        PRICES, increased by the experts that each further row reads. Raises NativeError for a kernel without drafts,
        and for an invalid number of drafts or prices.
        """
        if prices is None:
            rows = np.arange(self.layout.rows)
            prices = np.array(PRICES)[rows] * (1 + self.layout.expert_share * rows)
        given = np.asarray(prices, np.float32)
        call("gpu_speculate", self.id, most, given.ctypes.data, given.size)

    @property
    def drafting(self) -> Drafting | None:
        if self.together > 1 or not self.layout.drafting:
            return None
        return drafting_of(self._draft_counts(), self.layout.rows)

    def read_pass(self) -> float:
        """Seconds in which the devices read all weights of one token without computing: the lower bound of decoding. 0
        for a model that is too small to time. Raises NativeError with the driver's message.
        """
        shards = sorted(self.operands[0].addressable_shards, key=lambda shard: shard.index[0].start or 0)
        addresses = (ctypes.c_void_p * len(shards))(*(shard.data.unsafe_buffer_pointer() for shard in shards))
        return 1e-9 * call("gpu_read_pass", self.id, ctypes.addressof(addresses))

    def trace(self, spans_per_cta: int) -> None:
        """Records the spans of each CTA from now on, at most `spans_per_cta` in each call; 0 stops recording."""
        call("gpu_trace", self.id, spans_per_cta)

    def spans(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number (among all devices) and the recorded spans of each CTA of this process; the spans are an array of
        SPAN.
        """
        each = self.layout.lanes_here * self.layout.ctas
        for cta in range(len(self._places) * each):
            count = call("gpu_spans", self.id, cta, None, 0)
            spans = np.zeros(count, SPAN)
            call("gpu_spans", self.id, cta, spans.ctypes.data, count)
            yield (self._places[cta // each] * each + cta % each, spans)


def _inputs(request: Request, tokens: int, stops: int) -> Inputs:
    """The arrays of a request, with room for these numbers of tokens and stop tokens."""
    sampling = request.sampling
    top_k = min(sampling.top_k, np.iinfo(np.int32).max)
    return Inputs(
        np.pad(np.asarray(request.prompt, np.int32), (0, tokens - len(request.prompt))),
        np.array([len(request.prompt), request.start, request.limit, top_k, request.drawn], np.int32),
        np.array([getattr(sampling, name) for name in SETTINGS], np.float32),
        np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32),
        np.pad(np.asarray(request.stops, np.int32), (0, stops - len(request.stops)), constant_values=-1),
    )


def _close(lib: ctypes.CDLL, session: int, group: Group) -> None:
    """Frees the memory after all processes have left the session. If a process does not arrive, the memory stays
    allocated until this process ends.
    """
    call("gpu_leave", session)
    if group.barrier():
        lib.laneformer_gpu_close(session)
