"""A model on GPUs: its packed weights, the kernel compiled for it, and the call that is running."""

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from custom_calls.gpu.compile import PERSISTENT, STEPS, image
from custom_calls.gpu.layout import H200, MI300X, Layout, Machine
from custom_calls.gpu.shapes import BIASES, DTYPES, Shapes, frequencies_of, windows_of
from custom_calls.library import EMULATED, SPAN, TARGET, GpuModel, NativeError, call
from custom_calls.plan import Plan
from custom_calls.session import DecodeSession

PARTS = {  # of a packed matrix: its weights, in the order of its rows
    "qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "out": ("attention.wo",),
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}
MOST_DEVICES, MOST_LAYERS = 8, 128  # gpu/params.h
HANDLE_BYTES = 64  # gpu/host/driver.h
MACHINES = {"cuda": H200, "hip": MI300X}
ARCHITECTURES = {"cuda": "sm_90a", "hip": "gfx942"}
CAPABILITIES = {
    "cuda": ("9.0", "H100 and H200"),
    "hip": ("gfx942", "MI300X"),
}  # as JAX tells it of a device, and who has it
LAUNCHES = {
    "persistent": "one kernel for a whole answer",
    "graph": "one kernel per op, under a CUDA graph",
    "overlapping graph": "one kernel per op, under a CUDA graph with programmatic dependent launches",
}


def machine_of(platform: str, device: jax.Device) -> Machine:
    """An H200 or MI300X, with fewer CTAs where the device has fewer multiprocessors."""
    machine = MACHINES[platform]
    return replace(machine, ctas=min(machine.ctas, getattr(device, "core_count", machine.ctas)))


class Group(Protocol):
    """The processes whose devices a session uses, as laneformer.processes.Group is; this module does not make one."""

    index: int
    """This process's number in the job."""
    machine: str
    """The same in all processes on one machine."""
    several: bool
    """Whether there are other processes."""

    def share(self, own: dict) -> dict[int, dict]:
        """What each process passes here, by its number."""

    def barrier(self) -> bool:
        """Waits for all processes; whether they arrived in time."""

    def __enter__(self) -> "Group": ...

    def __exit__(self, kind, error, trace) -> None:
        """Reports an exception to the other processes."""


class GpuSession(DecodeSession):
    """One model in the library, on the devices of a mesh. Pack every weight, then use it in `custom_calls.decode`, one
    call at a time: the next one may be put on the devices' streams once this one has ended.

    Where these belong to several processes (of one machine), all of them make the session, pack the weights and make
    the same calls. Close it in all of them, once no call runs: `close` waits for the others, as they may still write to
    this one's memory.
    """

    _prefix = "gpu_"
    ops = ("embed", "qkv", "attend", "merge", "out", "gate_up", "down", "final", "head", "sample")  # gpu/decoder.h
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
        compile_with: Callable[[Path, Path, str], None] | None = None,
        driver: Path | None = None,
    ):
        """mesh: (data, lane); None for the first local device. group: the processes of the mesh.

        platform: "cuda" or "hip". machine: by default that of the devices; ctas and warps may be chosen with it.
        chaos_us, compile_with and driver are for tests, the last two for emulated devices. timeout_ms: for another lane
        in the middle of a call; at its start all have six times as long to come, as processes may still compile.
        peer_ctas: one lane alone, the others played by so many CTAs that answer after peer_delay_us (gpu/peers.h); its
        weights can only be random: see `fill`. launch: one of LAUNCHES; "graph" launches every op of every pass by
        itself, from a graph, "overlapping graph" lets the next op's weights come while one ends (CUDA only): both are
        there to show what the persistent kernel saves. Raises NativeError, BuildError if the kernel cannot be compiled,
        and what the group raises when a process is missing.
        """
        if launch not in LAUNCHES:
            raise NativeError(f"launch = {launch!r}: known are {', '.join(LAUNCHES)}")
        if launch != "persistent" and peer_ctas:
            raise NativeError(f"launch = {launch!r}: lanes can be played beside the persistent kernel only")
        try:
            shapes = Shapes.of(plan)
        except ValueError as error:
            raise NativeError(str(error)) from None
        self._group = group
        devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.reshape(-1))
        self._places = [place for place, device in enumerate(devices) if device.process_index == self._group.index]
        if shapes.lanes % len(devices):
            raise NativeError(
                f"{shapes.lanes} lanes do not spread over {len(devices)} devices: use a number that divides them"
            )
        if len(devices) > MOST_DEVICES:
            raise NativeError(f"{len(devices)} devices are more than the kernel's {MOST_DEVICES}")
        if shapes.layers > MOST_LAYERS:
            raise NativeError(f"{shapes.layers} layers are more than the kernel's {MOST_LAYERS}")
        try:
            self.layout = Layout(
                shapes,
                plan.schedule,
                windows_of(plan),
                machine or machine_of(platform, devices[0]),
                1 if peer_ctas else shapes.lanes // len(devices),
                peer_ctas,
            )
            header = self.layout.header
        except ValueError as error:
            raise NativeError(str(error)) from None
        self.target = TARGET if driver is None else EMULATED
        self._mesh, self._waiting = mesh, {}
        with self._group:
            compiled = image(
                header, ARCHITECTURES[platform], compile_with, PERSISTENT if launch == "persistent" else STEPS
            )
            self._open_here(plan, devices, compiled, platform, driver, launch, timeout_ms, chaos_us, peer_delay_us)
            self._connect(hashlib.sha256(repr((header, launch)).encode()).hexdigest())
        self._group.share({})  # all have opened the others' memory
        self._make_operands(frequencies_of(plan))

    def _open_here(
        self,
        plan: Plan,
        devices: list,
        compiled: bytes,
        platform: str,
        driver: Path | None,
        launch: str,
        timeout_ms: int,
        chaos_us: int,
        peer_delay_us: int,
    ) -> None:
        """This process's part of the session."""
        layout = self.layout
        shapes = layout.shapes
        places = np.array(self._places, np.int32)
        ordinals = np.array([devices[place].local_hardware_id for place in self._places], np.int32)
        steps = np.array(() if launch == "persistent" else layout.steps, np.int32)
        self.launches_per_token = len(steps)  # 0: there is one for all of them
        model = GpuModel(
            layers=shapes.layers,
            lanes=shapes.lanes,
            lanes_here=layout.lanes_here,
            ctas=layout.ctas,
            threads=layout.threads,
            shared_bytes=layout.shared_bytes,
            vocab=shapes.vocab,
            context=shapes.context,
            kv_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            cache_dtype=DTYPES[shapes.cache_dtype],
            weight_dtype=DTYPES[shapes.weight_dtype],
            pass_tags=layout.pass_tags,
            exchanges=len(layout.table.sums) + 1,
            lane_words=layout.lane_words,
            shared_words=layout.shared_words,
            packed_elements=int(np.prod(layout.packed_shape)) // len(devices),
            driver=platform.encode(),
            library=str(driver).encode() if driver else None,
            image=compiled,
            grid=layout.grid,
            peer_delay_us=peer_delay_us,
            steps=steps.ctypes.data,
            num_steps=len(steps),
            overlapping=launch == "overlapping graph",
            kept_floats=layout.kept_floats,
            devices=ordinals.ctypes.data,
            places=places.ctypes.data,
            num_devices=len(places),
            all_devices=len(devices),
            timeout_ms=timeout_ms,
            chaos_us=chaos_us,
        )
        self._open(plan, timeout_ms, ctypes.byref(model))

    def _connect(self, digest: str) -> None:
        """Gives this process's memory to the others and opens theirs, where there are others."""
        if not self._group.several:
            return
        self.close.detach()
        self.close = weakref.finalize(self, _close, self._lib, self._id, self._group)
        self.close.atexit = False  # the end of the process frees everything, and must not wait for others
        own = (ctypes.c_char * (HANDLE_BYTES * len(self._places)))()
        call("gpu_export", self.id, ctypes.addressof(own))
        handles = {
            str(place): own.raw[i * HANDLE_BYTES : (i + 1) * HANDLE_BYTES].hex() for i, place in enumerate(self._places)
        }
        said = self._group.share({"machine": self._group.machine, "model": digest, "handles": handles})
        for process, other in said.items():
            if other["machine"] != said[self._group.index]["machine"]:
                raise NativeError(
                    f"processes {self._group.index} and {process} are on different machines: devices write to each"
                    " other's memory on one machine only; use backend xla"
                )
            if other["model"] != digest:
                raise NativeError(
                    f"processes {self._group.index} and {process} have opened different models, or with other options"
                )
        by_place = {
            int(place): bytes.fromhex(handle) for other in said.values() for place, handle in other["handles"].items()
        }
        call("gpu_connect", self.id, b"".join(by_place[place] for place in range(len(by_place))))

    # ---- weights

    def _sharding(self, of_lanes: bool):
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, P("lane") if of_lanes else P())

    def _put(self, array: np.ndarray | jax.Array, of_lanes: bool) -> jax.Array:
        """An array that is the same in all processes, on the devices."""
        if self._group.several and isinstance(array, np.ndarray):  # device_put would compare the processes' arrays
            return jax.make_array_from_callback(array.shape, self._sharding(of_lanes), lambda index: array[index])
        return jax.device_put(array, self._sharding(of_lanes))

    def _make_operands(self, frequencies: np.ndarray) -> None:
        s = self.layout.shapes
        angles = np.arange(s.context, dtype=np.float32)[:, None] * np.asarray(frequencies, np.float32)
        rotations = np.stack([np.cos(angles), np.sin(angles)], 1) * np.float32(s.rope_factor)
        rows = self.layout.products["qkv"].all_rows
        floats = {
            "attention_norm": ((s.lanes if s.lane_norms else 1, s.layers, s.hidden), s.lane_norms),
            "ffn_norm": ((s.lanes if s.lane_norms else 1, s.layers, s.hidden), s.lane_norms),
            "norm": ((s.lanes if s.lane_final_norm else 1, s.hidden), s.lane_final_norm),
            "biases": ((s.lanes, s.layers, rows) if s.qkv_bias else (1,), s.qkv_bias),
            "q_norm": ((s.layers, s.head_dim), False),
            "k_norm": ((s.layers, s.head_dim), False),
        }
        self._floats = {name: np.zeros(shape, np.float32) for name, (shape, _) in floats.items()} | {
            "rotations": rotations
        }
        self._float_lanes = {name: split for name, (_, split) in floats.items()} | {"rotations": False}
        self._packed = jnp.zeros(self.layout.packed_shape, s.weight_dtype, device=self._sharding(True))
        self._embedding = None
        self._ready: tuple | None = None

    def pack(self, path: str, weight: np.ndarray | jax.Array) -> None:
        """Puts a weight into its place; path and shape as in laneformer's parameter table. Raises NativeError if it
        does not fit.
        """
        self._check_weight(path, tuple(weight.shape))
        self._missing.pop(path, None)
        _, number, inside = path.split(".", 2) if path.startswith("layers.") else ("", "0", path)
        layer, name = int(number), inside
        self._ready = None
        s = self.layout.shapes
        if name in ("attention_norm", "ffn_norm"):
            self._floats[name][:, layer] = _whole(weight).reshape(-1, s.hidden)
        elif name == "norm":
            self._floats[name][:] = _whole(weight).reshape(-1, s.hidden)
        elif name in ("attention.q_norm", "attention.k_norm"):
            self._floats[name.removeprefix("attention.")][layer] = _whole(weight)
        elif name in BIASES:
            first = {"q": 0, "k": s.heads * s.head_dim, "v": (s.heads + s.kv_heads) * s.head_dim}[
                name[len("attention.w")]
            ]
            flat = _whole(weight).reshape(s.lanes, -1)
            self._floats["biases"][:, layer, first : first + flat.shape[1]] = flat
        elif name in ("tok_embeddings", "lm_head"):
            if name == "tok_embeddings":
                self._embedding = self._put(_kept(weight).astype(s.weight_dtype), False)
            if name == "lm_head" or s.tied_head:
                self._pack_matrix("head", 0, (_kept(weight),), lanes=s.head_type != "replicate")
        else:
            op = next(op for op, parts in PARTS.items() if name in parts)
            parts = self._waiting.setdefault((op, layer), {})
            parts[name] = _kept(weight)
            if len(parts) == len(PARTS[op]):
                self._pack_matrix(op, layer, tuple(parts[part] for part in PARTS[op]), lanes=True)
                del self._waiting[op, layer]

    def fill(self, seed: int = 0) -> None:
        """Random numbers for all weights, for measurements; norms are 1."""
        keys = jax.random.split(jax.random.key(seed))
        s = self.layout.shapes
        for name in ("attention_norm", "ffn_norm", "norm", "q_norm", "k_norm"):
            self._floats[name][:] = 1
        self._packed = _normal(keys[0], self._packed)
        self._embedding = _normal(keys[1], jnp.zeros((s.vocab, s.hidden), s.weight_dtype, device=self._sharding(False)))
        self._missing, self._ready = {}, None

    def _pack_matrix(self, op: str, layer: int, parts: tuple, lanes: bool) -> None:
        # The lanes' head is packed by rows of the vocabulary, of which each lane has some: it comes whole to every
        # device.
        split = lanes and not (op == "head" and self.layout.shapes.head_type == "lane")
        arrays = [self._put(part.astype(self.layout.shapes.weight_dtype), split) for part in parts]
        self._packed = _place(
            self._packed, arrays, np.int32(self.layout.offset(op, layer)), op, self.layout, self._sharding(True)
        )

    @property
    def operands(self) -> tuple:
        """Packed weights, embedding, norms, biases and rotations, on the devices. Raises NativeError while weights are
        missing.
        """
        self._require_weights()
        if self._ready is None:
            floats = [self._put(array, self._float_lanes[name]) for name, array in self._floats.items()]
            self._ready = (self._packed, self._embedding, *floats)
        return self._ready

    @property
    def of_lanes(self) -> tuple[bool, ...]:
        return (True, False, *self._float_lanes.values())

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights, which is what a token reads, of all devices."""
        return self.layout.stream_bytes

    # ---- the running call

    def begin(self) -> None:
        call("gpu_begin", self.id)

    @property
    def failure(self) -> str | None:
        """What went wrong on the devices in the last call; None if nothing did."""
        text = ctypes.create_string_buffer(1000)
        return text.value.decode() if self._lib.laneformer_gpu_failure(self.id, text, len(text)) else None

    def read_pass(self) -> float:
        """Seconds in which the devices read all that they stream for one token, without computing anything: the bound
        of decoding.

        0 for a model so small that it cannot be told. Raises NativeError with the driver's words.
        """
        shards = sorted(self.operands[0].addressable_shards, key=lambda shard: shard.index[0].start or 0)
        addresses = (ctypes.c_void_p * len(shards))(*(shard.data.unsafe_buffer_pointer() for shard in shards))
        return 1e-9 * call("gpu_read_pass", self.id, ctypes.addressof(addresses))

    def trace(self, spans_per_cta: int) -> None:
        """Writes down when each CTA did what, from now on; 0 ends it."""
        call("gpu_trace", self.id, spans_per_cta)

    def spans(self) -> Iterator[tuple[int, np.ndarray]]:
        """Number, among those of all devices, and spans of each CTA of this process, an array of SPAN."""
        each = self.layout.lanes_here * self.layout.ctas
        for cta in range(len(self._places) * each):
            count = call("gpu_spans", self.id, cta, None, 0)
            spans = np.zeros(count, SPAN)
            call("gpu_spans", self.id, cta, spans.ctypes.data, count)
            yield (self._places[cta // each] * each + cta % each, spans)


def _close(lib: ctypes.CDLL, session: int, group: Group) -> None:
    """Frees what nobody writes to any more; where another process does not say so, it stays until this one ends."""
    call("gpu_leave", session)
    if group.barrier():
        lib.laneformer_gpu_close(session)


@partial(jax.jit, donate_argnums=1)
def _normal(key: jax.Array, like: jax.Array) -> jax.Array:
    """Of the deviation that initial weights have; a block of them repeated where there are many."""
    block = 0.02 * jax.random.normal(key, (min(like.shape[-1], 1 << 20),))
    return jnp.broadcast_to(jnp.resize(block, like.shape[-1]).astype(like.dtype), like.shape)


def _whole(weight) -> np.ndarray:
    """On the host, in float32; from all processes where its lanes are theirs."""
    if isinstance(weight, jax.Array) and not (weight.is_fully_addressable or weight.is_fully_replicated):
        weight = multihost_utils.process_allgather(weight, tiled=True)
    return np.asarray(weight, np.float32)


def _kept(weight):
    """An array that stays as it is: one of numpy may be valid only until the next one comes."""
    return weight if isinstance(weight, jax.Array) else np.array(weight)


def _matrix(op: str, layout: Layout, parts: list[jax.Array]) -> jax.Array:
    """Lane-first parts -> one matrix [lanes, rows, columns], or [rows, columns] for a head over all lanes."""
    s = layout.shapes
    if op == "gate_up":  # a gate and its partner are neighbours, so that SwiGLU stays in a CTA
        return jnp.stack(parts, 2).reshape(s.lanes, 2 * s.ff, s.hidden)
    if op == "head":
        head = parts[0]
        return head.transpose(1, 0, 2).reshape(s.vocab, s.lanes * s.hidden) if s.head_type == "lane" else head
    return jnp.concatenate([part.reshape(s.lanes, -1, part.shape[-1]) for part in parts], 1)


@partial(jax.jit, static_argnames=("op", "layout", "sharding"), donate_argnums=0)
def _place(
    packed: jax.Array, parts: list[jax.Array], offset: jax.Array, op: str, layout: Layout, sharding
) -> jax.Array:
    rows = layout.products[op].pack(_matrix(op, layout, parts)).reshape(*packed.shape[:3], -1)
    if sharding is not None:
        rows = jax.lax.with_sharding_constraint(rows, sharding)
    return jax.lax.dynamic_update_slice(packed, rows, (0, 0, 0, offset))
