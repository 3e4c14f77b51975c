"""A model on GPUs: its packed weights, the kernel compiled for it, and the running call."""

import ctypes
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from custom_calls.gpu import edges
from custom_calls.gpu.codes import CodesChoice, Header
from custom_calls.gpu.compile import PERSISTENT, STEPS, image
from custom_calls.gpu.formats import Bf12Choice
from custom_calls.gpu.header import model_header
from custom_calls.gpu.layout import Layout
from custom_calls.gpu.packing import (
    Placement,
    by_ctas,
    chunks,
    filled,
    filled_codes,
    gathered,
    normal,
    placed,
    placed_codes,
)
from custom_calls.gpu.slot import GpuSlot, SlotStream, drafting_of
from custom_calls.gpu.supported import Router
from custom_calls.gpu.tiling import H200, MI300X, Machine, Tiling
from custom_calls.library import EMULATED, SPAN, TARGET, NativeError, call
from custom_calls.plan import Plan
from custom_calls.session import Bf12Weights, CallStream, DecodeSession, Drafting
from laneformer.formats import BF12_TABLE
from laneformer.ops import TRACE_NAMES, GatherStreams, GpuOp, HeadKind, Rotary, without_kernel
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
LAUNCHES = {
    "persistent": "one kernel for a whole answer",
    "graph": "one kernel per op, under a CUDA graph",
    "overlapping graph": "one kernel per op, under a CUDA graph with programmatic dependent launches",
}


def machine_of(platform: str, device: jax.Device) -> Machine:
    """The properties of an H200 or MI300X, with fewer CTAs if the device has fewer multiprocessors."""
    machine = MACHINES[platform]
    return replace(machine, ctas=min(machine.ctas, getattr(device, "core_count", machine.ctas)))


class Group(Protocol):
    """The processes whose devices a session uses. The caller creates the group: a laneformer.processes.Group."""

    index: int
    """This process's number in the job."""
    machine: str
    """Identifier of the machine, equal in all processes on one machine."""
    several: bool
    """Whether there are other processes."""

    def share(self, own: dict) -> dict[int, dict]:
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
        request (see `yield_`, and `decode` for the arrays of such a call). drafts: whether a call with several slots
        may have drafts, in rows that requests and prompts leave free; a call with one slot always may.
        """
        if reason := without_kernel(plan.ops, GpuOp):
            raise NativeError(f"the GPU kernel does not support this model ({reason})")
        if launch not in LAUNCHES:
            raise NativeError(f"unknown launch {launch!r}; choose {', '.join(LAUNCHES)}")
        if launch != "persistent" and rows > 1:
            raise NativeError(f"passes of {rows} rows need launch 'persistent', got {launch!r}")
        if slots > 1 and group.several:
            raise NativeError(f"calls of {slots} slots need one process, got several")
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
            self._bf12, self._codes = bf12 or Bf12Choice(), codes or CodesChoice()
            machine = machine or machine_of(platform, devices[0])
            packed = frozenset(self._bf12.tables), self._codes.formats
            self.layout = Layout(plan, machine, lanes_here, peer_ctas, *packed, rows, slots, drafts)
            header = model_header(self.layout)
        except ValueError as error:
            raise NativeError(str(error)) from None
        self.target, self.together = TARGET if driver is None else EMULATED, slots
        self._mesh, self._waiting = mesh, {}
        with self._group:
            compiled = image(
                header, ARCHITECTURES[platform], compile_with, PERSISTENT if launch == "persistent" else STEPS
            )
            self._open_here(devices, compiled, platform, driver, launch, timeout_ms, chaos_us, peer_delay_us)
            identity = repr((header, launch, plan.words.tolist(), plan.floats.tolist()))
            self._connect(hashlib.sha256(identity.encode()).hexdigest())
        self._group.share({})  # all processes have opened each other's memory
        self._make_operands()

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
        numbers = {
            "lanes_here": layout.lanes_here,
            "packed_words": math.prod(layout.packed_shape) // len(devices),
            "ctas": layout.ctas,
            "grid": layout.grid,
            "threads": layout.threads,
            "shared_bytes": layout.shared_bytes,
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

    def _sharding(self, of_lanes: bool):
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, P("lane") if of_lanes else P())

    def _put(self, array: np.ndarray | jax.Array, of_lanes: bool) -> jax.Array:
        """Puts an array, which must be equal in all processes, on the devices. of_lanes: whether its first axis is the
        lanes.
        """
        if self._group.several and isinstance(array, np.ndarray):  # device_put would compare the processes' arrays
            return jax.make_array_from_callback(array.shape, self._sharding(of_lanes), lambda index: array[index])
        return jax.device_put(array, self._sharding(of_lanes))

    def _make_operands(self) -> None:
        plan = self.plan
        self._small = np.zeros(plan.small_size, np.float32)
        self._packed = jnp.zeros(self.layout.packed_shape, jnp.uint32, device=self._sharding(True))
        self._lists: dict[int, jax.Array] = {}  # exceptions of each warp, by product
        self._exceptions: dict[int, int] = {}  # number of exceptions, by product
        self._factors: dict[int, jax.Array] = {}  # factors of a quantized product's rows for each warp, by product
        self._embedding = None
        self._ready: tuple | None = None
        self._multiplied = {
            matrix.weight.path: (layer, number)
            for layer, stages in enumerate(self.layout.stages)
            for number, stage in enumerate(stages)
            for matrix in stage.matrices
        }

    def pack(self, path: str, weight: np.ndarray | jax.Array | Quantized) -> None:
        """Packs a weight whose path and shape are those of the table in laneformer/weights.py. A matrix must be
        quantized as announced when the session was opened. Raises NativeError if the weight does not fit.
        """
        plan = self.plan
        self._check_weight(path, tuple(weight.shape))
        if (now := weight.name if isinstance(weight, Quantized) else None) != (name := self._codes.names.get(path)):
            raise NativeError(
                f"weight {path} is {now or 'not quantized'}, but the session was opened for {name or 'not quantized'}"
            )
        self._missing.pop(path, None)
        self._ready = None
        if path in plan.places:
            plan.place(self._small, path, self._checked_table(path, _whole(weight)))
        elif path in self._multiplied:
            self._pack_rows(path, _kept(weight))
        if path == plan.ops.embedding.path:
            self._embedding = self._put(_kept(weight).astype(plan.weight_dtype.name), False)
        gather = plan.ops.head.gather
        if gather and path == gather.mix.weight.path:
            self._place_mixture(_whole(weight), gather, self.layout.head_mixture, self.layout.layer_lines)
        if path == plan.ops.head.weight.path:
            self._pack_head(_kept(weight))

    def _pack_rows(self, path: str, weight: np.ndarray | jax.Array) -> None:
        """Collects the matrices of a product, a router or a mixture of streams, and packs them once all are known."""
        layer, number = self._multiplied[path]
        parts = self._waiting.setdefault((layer, number), {})
        parts[path] = weight
        stage = self.layout.stages[layer][number]
        if len(parts) < len(stage.matrices):
            return
        del self._waiting[layer, number]
        weights = [matrix.weight for matrix in stage.matrices]
        if isinstance(stage.op, Router):
            rows = [self._put(parts[weight.path].astype(jnp.float32), weight.lane_sharded) for weight in weights]
            return self._place_router(rows, layer, number)
        if isinstance(stage.op, GatherStreams):
            return self._place_mixture(_whole(weight), stage.op, *self._tiled(layer, number))
        matrices = [self._put_matrix(parts[weight.path], weight.lane_sharded) for weight in weights]
        self._place(matrices, self.layout.numbers[layer, number])

    def _place_router(self, matrices: list[jax.Array], layer: int, number: int) -> None:
        self._place_float32(matrices, *self._tiled(layer, number))

    def _place_mixture(self, mix: np.ndarray, op: GatherStreams, tiling: Tiling, line: int) -> None:
        parts = by_ctas(mix, op.count, self.layout.ctas, self.layout.stream_rows)
        self._place_float32([self._put(parts, op.mix.weight.lane_sharded)], tiling, line)

    def _tiled(self, layer: int, number: int) -> tuple[Tiling, int]:
        """The tiling of a stage, and its first line in the memory of each warp."""
        layout = self.layout
        return layout.tiling(layer, number), layout.line(layer, number)

    def _place_float32(self, matrices: list[jax.Array], tiling: Tiling, line: int) -> None:
        offset, table = np.int32(line * self.layout.line_words), np.zeros(BF12_TABLE, np.uint8)
        self._packed, *_ = placed(self._packed, matrices, offset, table, tiling, "rows", self._sharding(True))

    def _pack_head(self, weight: np.ndarray | jax.Array) -> None:
        # Each lane packs some rows of the vocabulary. A head other than vocab_parallel has no lane axis or is split by
        # columns, so every device needs the whole matrix.
        matrix = self._put_matrix(weight, self.plan.ops.head.kind == HeadKind.VOCAB_PARALLEL)
        self._place([matrix], len(self.layout.numbers))

    def _put_matrix(self, weight: np.ndarray | jax.Array | Quantized, of_lanes: bool) -> jax.Array | Quantized:
        if isinstance(weight, Quantized):
            return replace(weight, **{name: self._put(a, of_lanes and a.ndim > 0) for name, a in weight.arrays.items()})
        return self._put(weight.astype(self.plan.weight_dtype.name), of_lanes)

    def _place(self, matrices: list[jax.Array] | list[Quantized], product: int) -> None:
        """Packs the matrices of the product with number `product`."""
        place = self._placements[product]
        if not place.tiling.pieces:
            return self._place_at(place.offset, matrices, product)
        for lines, some in chunks(matrices, place.tiling):
            self._place_at(place.offset + lines * self.layout.line_words, some, product)

    def _place_at(self, offset: int, matrices: list[jax.Array] | list[Quantized], product: int) -> None:
        place = self._placements[product]
        kept = place.tiling, place.arrangement, self._sharding(True)
        if place.paths[0] not in self._codes.formats:
            self._keep(product, placed(self._packed, matrices, np.int32(offset), self._table(product), *kept))
            return
        headers = tuple(Header(part.kind, part.group, part.columns) for part in matrices)
        arrays = [part.arrays for part in matrices]
        self._packed, factors = placed_codes(self._packed, arrays, np.int32(offset), headers, *kept)
        if factors is not None:
            self._factors[product] = factors

    def _table(self, product: int) -> np.ndarray:
        return self._bf12.tables.get(self._placements[product].paths[0], np.zeros(BF12_TABLE, np.uint8))

    def _keep(self, product: int, placed: tuple[jax.Array, ...]) -> None:
        self._packed, listed, most, count = placed
        if listed is not None:  # sizes are powers of two, so that few programs are compiled
            self._lists[product] = gathered(listed, 1 << int(most).bit_length())
            self._exceptions[product] = int(count)

    @cached_property
    def _placements(self) -> list[Placement]:
        """Where and how each product is packed, by its number."""
        layout, head = self.layout, self.plan.ops.head
        found = [
            Placement(
                tuple(matrix.weight.path for matrix in layout.stages[layer][number].matrices),
                layout.offset(layer, number),
                layout.tiling(layer, number),
                "pairs" if layout.stages[layer][number].op.gated else "rows",
            )
            for layer, number in layout.numbers
        ]
        arrangement = "columns" if head.kind == HeadKind.LANE else "as it is"
        return [*found, Placement((head.weight.path,), layout.head_offset, layout.head, arrangement)]

    def fill(self, seed: int = 0) -> None:
        """Fills all weights for measurements: matrices with random numbers, small weights with 1, tables of experts
        with random experts.
        """
        layout, keys = self.layout, jax.random.split(jax.random.key(seed))
        self._small[:] = 1
        for path, experts in self.plan.tables.items():
            tokens, used = self.plan.weights[path].shape
            first = np.random.default_rng(seed).integers(0, experts, (tokens, 1))
            self.plan.place(self._small, path, (first + np.arange(used)) % experts)
        block = normal(keys[0], jnp.zeros(1 << 20, self.plan.weight_dtype.name))
        bits = jax.random.bits(jax.random.key(seed + 1), (1 << 20,), jnp.uint8)
        for product, place in enumerate(self._placements):
            kept = place.tiling, self._sharding(True)
            if place.paths[0] in self._codes.formats:
                self._packed, factors = filled_codes(self._packed, bits, np.int32(place.offset), *kept)
                if factors is not None:
                    self._factors[product] = factors
                continue
            self._keep(product, filled(self._packed, block, np.int32(place.offset), self._table(product), *kept))
        for layer, stages in enumerate(layout.stages):
            for number, stage in enumerate(stages):
                if isinstance(stage.op, Router):
                    shapes = (matrix.weight.shape for matrix in stage.matrices)
                    self._place_router([normal(keys[1], jnp.zeros(shape)) for shape in shapes], layer, number)
                elif isinstance(stage.op, GatherStreams):
                    self._fill_mixture(keys[1], stage.op, *self._tiled(layer, number))
        if gather := self.plan.ops.head.gather:
            self._fill_mixture(keys[1], gather, layout.head_mixture, layout.layer_lines)
        embedding = jnp.zeros(self.plan.ops.embedding.shape, self.plan.weight_dtype.name, device=self._sharding(False))
        self._embedding = normal(keys[1], embedding)
        self._missing, self._ready = {}, None

    def _fill_mixture(self, key: jax.Array, op: GatherStreams, tiling: Tiling, line: int) -> None:
        self._place_mixture(np.asarray(normal(key, jnp.zeros(op.mix.weight.shape))), op, tiling, line)

    @property
    def operands(self) -> tuple:
        """The operands of the custom call on the devices: packed weights, factors and exceptions (`_listed`),
        embedding, index of factors and exceptions (`_coding`), small weights, rotations. Raises NativeError while
        weights are missing.
        """
        self._require_weights()
        if self._ready is None:
            tables = [_rotations(rotary, head_dim, self.plan.ops.context) for rotary, head_dim in self.layout.rotations]
            rotations = np.concatenate(tables or [np.zeros(1, np.float32)])
            rest = (self._put(array, False) for array in (self._coding, self._small, rotations))
            self._ready = (self._packed, self._listed(), self._embedding, *rest)
        return self._ready

    @property
    def of_lanes(self) -> tuple[bool, ...]:
        return (True, True, False, False, False, False)

    def _listed(self) -> jax.Array:
        """Each warp's data beside its stream, uint32 [lanes, CTAs, warps, n]: the factors of rows, product by product,
        then the lists of exceptions, then padding that the kernel may load.
        """
        lead, beyond = self.layout.packed_shape[:3], 2 * self.layout.machine.warp_size
        lists = [words for _, words in self._beside]
        end = jnp.zeros((*lead, beyond if self._lists else 1), jnp.uint32, device=self._sharding(True))
        return jnp.concatenate([*lists, end], -1) if lists else end

    @property
    def _beside(self) -> list[tuple[int, jax.Array]]:
        """Number of the product and words of each factor array and list. The lists are last, because a warp reads them
        without a gap.
        """
        return [*sorted(self._factors.items()), *sorted(self._lists.items())]

    @property
    def _coding(self) -> np.ndarray:
        """For each product the table of bf12 (8 bytes), and the begin and end of its words beside the stream, uint32
        [products, 4].
        """
        coding, end = np.zeros((len(self._placements), 4), np.uint32), 0
        for product, words in self._beside:
            begin, end = end, end + words.shape[-1]
            coding[product] = *self._table(product).astype(np.uint8).view(np.uint32), begin, end
        return coding

    @property
    def bf12_weights(self) -> Bf12Weights:
        """Counts of the weights that are packed in 12 bits."""
        held = matrices = 0
        for place in self._placements:
            size = sum(math.prod(self.plan.shape_of(path)) for path in place.paths)
            held += round(size * place.tiling.coded)
            matrices += len(place.paths) * (place.tiling.units > 0)
        return Bf12Weights(held, sum(self._exceptions.values()), matrices, self._bf12.left)

    @property
    def quantized_weights(self) -> dict[str, Any]:
        """The formats of the quantized matrices, and the number of their weights that one token reads and the bytes of
        these, padding included; {} if nothing is quantized.
        """
        if not self._codes.formats:
            return {}
        tilings = [place.tiling for place in self._placements if place.paths[0] in self._codes.formats]
        lines = self.layout.packed_shape[0] * sum(tiling.read_lines for tiling in tilings)
        factors = 4 * sum(words.size for words in self._factors.values())
        share = {matrix.weight.path: op.share for op in self.plan.products for matrix in op.matrices}
        sizes = {path: math.prod(self.plan.shape_of(path)) for path in self._codes.names}
        return {
            "quantized_formats": sorted(set(self._codes.names.values())),
            "quantized_weights": sum(round(size * share.get(path, 1)) for path, size in sizes.items()),
            "quantized_bytes": lines * self.layout.line_words * 4 + factors,
        }

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights that a token reads on all devices."""
        return self.layout.stream_bytes

    # ---- the running call

    @property
    def _address(self) -> tuple[int, int]:
        return self.id, 0

    @cached_property
    def slots(self) -> tuple[CallStream, ...]:
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
        """Why the last call failed on the devices; None if it did not fail."""
        text = ctypes.create_string_buffer(1000)
        return text.value.decode() if self._lib.laneformer_gpu_failure(self.id, text, len(text)) else None

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


def _close(lib: ctypes.CDLL, session: int, group: Group) -> None:
    """Frees the memory after all processes have left the session. If a process does not arrive, the memory stays
    allocated until this process ends.
    """
    call("gpu_leave", session)
    if group.barrier():
        lib.laneformer_gpu_close(session)


def _whole(weight) -> np.ndarray:
    """A weight on the host in float32, gathered if its lanes belong to several processes."""
    if isinstance(weight, jax.Array) and not (weight.is_fully_addressable or weight.is_fully_replicated):
        weight = multihost_utils.process_allgather(weight, tiled=True)
    return np.asarray(weight, np.float32)


def _kept(weight):
    """A copy of a NumPy array, which may be valid only until the next weight is read; other weights unchanged."""
    return weight if isinstance(weight, (jax.Array, Quantized)) else np.array(weight)


def _rotations(rotary: Rotary, head_dim: int, context: int) -> np.ndarray:
    """Cosines and sines of every position, float32 [context * 2 * (head_dim / 2)]. Pairs without a frequency do not
    rotate: cosine 1, sine 0.
    """
    frequencies = np.array(rotary.frequencies, np.float32)
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies
    table = np.zeros((context, 2, head_dim // 2), np.float32)
    table[:, 0] = 1
    table[:, :, : len(frequencies)] = np.stack([np.cos(angles), np.sin(angles)], 1) * np.float32(rotary.factor)
    return table.reshape(-1)
