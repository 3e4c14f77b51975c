"""How the GPU kernel lays a model out: shapes of the products, the packed weights, the memory of the edges, and the
header for all of it.

The kernel is compiled for one model: `Layout.header` is the file model.h that the sources in custom_calls/gpu include.
Weights are packed once into the order in which each warp reads them; the same numbers make both, so that they cannot
disagree.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from custom_calls.gpu.shapes import HEADS, Shapes
from custom_calls.library import ring_slots
from custom_calls.plan import Table

# Of the stream's ring: a slot of 4 KiB. Each warp orders its own copies; a single thread for all would need larger ones
SLOT_LINES = 8
SPLIT_KEYS = 64  # keys for which another CTA is worth its while in attention
MAX_VECTORS = 4  # that a thread keeps of a product's vector; registers bound it
C_DTYPES = {"float32": "kFloat32", "bfloat16": "kBfloat16", "float16": "kFloat16"}
STEPS = ("begin", "embed", "qkv", "attend", "out", "gate_up", "down", "final", "head")  # as in gpu/params.h
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Machine:
    """What the layout must know of a GPU."""

    warp_size: int
    ctas: int
    """That may be resident together and are worth using: at most one on each multiprocessor."""
    warps: int
    """Of a CTA."""
    shared_bytes: int
    """Of a CTA, at most."""
    bulk_copies: bool
    """Whether the weights stream through a ring in shared memory."""


H200 = Machine(warp_size=32, ctas=128, warps=8, shared_bytes=232_448, bulk_copies=True)
MI300X = Machine(warp_size=64, ctas=256, warps=8, shared_bytes=65_536, bulk_copies=False)


@dataclass(frozen=True)
class Product:
    """One matrix, of one lane, for one CTA. The names are those of custom_calls/gpu/kernel/product.h."""

    name: str
    all_rows: int
    columns: int
    ctas: int
    rows: int
    group: int
    vectors: int
    segments: int
    steps: int
    warps: int
    warp_size: int
    per: int
    """Elements of 16 bytes."""

    @property
    def lines(self) -> int:
        return self.segments * self.steps * self.vectors

    @property
    def padded_rows(self) -> int:
        return self.steps * (self.warp_size // self.group)

    def pack(self, matrix):
        """[..., all rows, columns] -> [..., CTAs, warps, elements], the lines of each warp in its order."""
        *lead, rows, columns = matrix.shape
        wide = self.warps * self.segments * self.vectors * self.group * self.per
        matrix = jnp.pad(matrix, [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows), (0, wide - columns)])
        matrix = matrix.reshape(*lead, self.ctas, self.rows, wide)
        matrix = jnp.pad(matrix, [(0, 0)] * (len(lead) + 1) + [(0, self.padded_rows - self.rows), (0, 0)])
        of_rows = (self.ctas, self.steps, self.warp_size // self.group)
        parts = matrix.reshape(*lead, *of_rows, self.warps, self.segments, self.vectors, self.per // 2, self.group, 2)
        n = len(lead)
        cta, step, row, warp, segment, vector, pair, member, element = range(n, n + 9)
        order = (*range(n), cta, warp, segment, step, vector, row, member, pair, element)
        return parts.transpose(order).reshape(*lead, self.ctas, self.warps, -1)


def product(name: str, all_rows: int, columns: int, ctas: int, machine: Machine, per: int, unit: int = 1) -> Product:
    """The shape that reads the fewest padded bytes; unit: rows that must stay together."""
    rows = -(-all_rows // unit // ctas) * unit
    vectors_per_warp = math.ceil(columns / (per * machine.warps))
    best = None
    for log in range(machine.warp_size.bit_length()):
        group = 1 << log
        vectors = -(-vectors_per_warp // group)
        segments = -(-vectors // MAX_VECTORS)
        vectors = -(-vectors // segments)
        steps = -(-rows // (machine.warp_size // group))
        cost = (segments * vectors * steps, segments, group)
        if best is None or cost < best[0]:
            best = (
                cost,
                Product(
                    name,
                    all_rows,
                    columns,
                    ctas,
                    rows,
                    group,
                    vectors,
                    segments,
                    steps,
                    machine.warps,
                    machine.warp_size,
                    per,
                ),
            )
    return best[1]


@dataclass(frozen=True)
class Layout:
    """A model on one device of several, which has some of its lanes."""

    shapes: Shapes
    table: Table
    windows: tuple[int, ...]
    """Keys that each layer sees, 0 for all."""
    machine: Machine
    lanes_here: int
    peer_ctas: int = 0
    """CTAs that play the lanes of other devices, for one rank alone on a GPU; its weights are then the only ones. See
    gpu/peers.h.
    """

    @cached_property
    def ctas(self) -> int:
        """Of a lane. Every one has rows of the residual stream: that makes its edges a barrier."""
        rows = -(-self.shapes.hidden // max(1, self.machine.ctas // self.lanes_here))
        return -(-self.shapes.hidden // rows)

    @cached_property
    def products(self) -> dict[str, Product]:
        s, per = self.shapes, 16 // WIDTH[self.shapes.weight_dtype]

        def make(name, rows, columns, ctas=self.ctas, unit=1):
            return product(name, rows, columns, ctas, self.machine, per, unit)

        by_lane = s.head_type == "vocab_parallel"
        head_ctas = self.ctas * (1 if by_lane else s.lanes)
        return {
            "qkv": make("Qkv", (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
            "out": make("Out", s.hidden, s.heads * s.head_dim),
            "gate_up": make("GateUp", 2 * s.ff, s.hidden, unit=2),
            "down": make("Down", s.hidden, s.ff),
            "head": make(
                "Head",
                s.vocab // (s.lanes if by_lane else 1),
                s.hidden * (s.lanes if s.head_type == "lane" else 1),
                head_ctas,
            ),
        }

    @property
    def layer_ops(self) -> tuple[str, ...]:
        """Of a layer, in the order in which they are read."""
        return ("qkv", "out", "gate_up", "down")

    @property
    def steps(self) -> list[tuple[int, int]]:
        """A pass op by op, as (one of STEPS by number, layer or -1)."""
        s = self.shapes
        layers = [(op, layer) for layer in range(s.layers) for op in ("qkv", "attend", "out", "gate_up", "down")]
        together = s.lanes > 1 and s.head_type != "vocab_parallel"
        named = [("embed", -1), *layers, *([("final", -1)] if together else []), ("head", -1)]
        return [(STEPS.index(op), layer) for op, layer in named]

    @property
    def kept_floats(self) -> int:
        """What a CTA keeps of the residual stream between launches, where each op is one."""
        return (1 + self.table.history) * self.products["out"].rows

    def _padded(self, lines: int) -> int:
        return -(-lines // SLOT_LINES) * SLOT_LINES

    @cached_property
    def layer_lines(self) -> int:
        """Of all layers, with padding to a border of slots."""
        return self._padded(self.shapes.layers * sum(self.products[op].lines for op in self.layer_ops))

    @cached_property
    def head_lines(self) -> int:
        return self._padded(self.products["head"].lines)

    @property
    def line_elements(self) -> int:
        return self.machine.warp_size * 16 // WIDTH[self.shapes.weight_dtype]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of the packed weights of all lanes, in elements of their dtype."""
        lanes = self.lanes_here if self.peer_ctas else self.shapes.lanes
        return (lanes, self.ctas, self.machine.warps, (self.layer_lines + self.head_lines) * self.line_elements)

    def offset(self, op: str, layer: int = 0) -> int:
        """Element of each warp's stream at which a product begins."""
        if op == "head":
            return self.layer_lines * self.line_elements
        before = self.layer_ops[: self.layer_ops.index(op)]
        lines = layer * sum(self.products[o].lines for o in self.layer_ops) + sum(
            self.products[o].lines for o in before
        )
        return lines * self.line_elements

    @property
    def stream_bytes(self) -> int:
        """Read for one token, by all lanes, padding included."""
        return math.prod(self.packed_shape) * WIDTH[self.shapes.weight_dtype]

    @property
    def max_splits(self) -> int:
        """Of a key/value head's keys: as many as there are CTAs, up to 16, since merging them costs every CTA."""
        return max(1, min(16, self.ctas // self.shapes.kv_heads))

    @cached_property
    def _attention_floats(self) -> int:
        s = self.shapes
        group_heads = s.heads // s.kv_heads
        per = 16 // WIDTH[s.cache_dtype] if s.head_dim * WIDTH[s.cache_dtype] % 16 == 0 else 1
        pieces, threads = s.head_dim // per, 1
        while threads < 16 and -(-pieces // threads) > 4:
            threads *= 2
        own = -(-pieces // threads) * per
        at_once = max(1, min(group_heads, 64 // own))
        return (
            (group_heads + 2) * s.head_dim
            + self.machine.warps * at_once * (s.head_dim + 2)
            + 2 * self.max_splits * s.heads
        )

    @cached_property
    def shared_floats(self) -> int:
        s, warps, p = self.shapes, self.machine.warps, self.products

        def even(n):
            return n + n % 2

        partial = warps * max(product.padded_rows for product in p.values())
        sampler = 2 * 2048 + 2 * 64 + 4 * warps + 16
        return (
            2 * even(partial)
            + 2 * even(warps)
            + even(max(self._attention_floats, sampler))
            + even(s.heads * s.head_dim)
            + even(p["out"].rows)
            + even(self.table.history * p["out"].rows)
            + 2 * even(p["head"].rows)
            + 2
        )

    @cached_property
    def slots(self) -> int:
        """Of each warp's ring: as many as shared memory holds, up to 64 KiB for a warp. Raises ValueError for
        too few.
        """
        if not self.machine.bulk_copies:
            return 1
        each = self.machine.warps * (SLOT_LINES * self.machine.warp_size * 16 + 8)
        slots = min(16, (self.machine.shared_bytes - 128 - 4 * self.shared_floats) // each)
        if slots < 4:
            raise ValueError(
                f"{4 * self.shared_floats} bytes of shared memory beside the weights' ring are too many: use more"
                " devices"
            )
        return slots

    @property
    def barrier_bytes(self) -> int:
        return -(-8 * self.machine.warps * self.slots // 128) * 128 if self.machine.bulk_copies else 0

    @property
    def shared_bytes(self) -> int:
        """Of a CTA."""
        ring = (
            self.machine.warps * self.slots * SLOT_LINES * self.machine.warp_size * 16
            if self.machine.bulk_copies
            else 0
        )
        return ring + self.barrier_bytes + 4 * self.shared_floats

    @property
    def threads(self) -> int:
        return self.machine.warps * self.machine.warp_size

    @property
    def grid(self) -> int:
        return self.lanes_here * self.ctas + self.peer_ctas

    @cached_property
    def mail_slots(self) -> int:
        """Of the ring of lane exchanges; a power of two, so that sequence numbers may wrap around."""
        return 1 << (ring_slots(self.table.exchanges) - 1).bit_length()

    @property
    def pass_tags(self) -> int:
        """Tags that a pass takes; a power of two, so that they may wrap around."""
        return 1 << (2 * self.shapes.layers + 2).bit_length()

    def _boards(self) -> Iterator[tuple[str, int]]:
        """Memory between the CTAs of a lane, in words."""
        s = self.shapes
        yield "StreamBoard", s.hidden
        yield "OtherStreamBoard", s.hidden
        yield "QkvBoard", self.products["qkv"].all_rows
        yield "PartsBoard", s.heads * self.max_splits * (s.head_dim + 2 + s.head_dim % 2)
        yield "HiddenBoard", s.ff
        yield "HeadBoard", self.products["head"].columns

    def _shared(self) -> Iterator[tuple[str, int]]:
        """Memory between the lanes, on each device, in words. The first word ends everything."""
        s = self.shapes
        packets = s.lanes * self.ctas
        yield "Abort", 16
        yield "CheckIn", packets
        yield "Packets", 2 * packets * 6
        yield "LargestZ", 2 * packets
        yield "Z", 2 * s.vocab
        yield "Logits", 2 * s.vocab
        yield "Mail", self.mail_slots * s.lanes * s.hidden

    @staticmethod
    def _places(parts: Iterator[tuple[str, int]]) -> tuple[dict[str, int], int]:
        at, places = 0, {}
        for name, words in parts:
            places[name] = at
            at += -(-words // 16) * 16
        return places, at

    @property
    def lane_words(self) -> int:
        return self._places(self._boards())[1]

    @property
    def shared_words(self) -> int:
        return self._places(self._shared())[1]

    @cached_property
    def header(self) -> str:
        """The file model.h."""
        s, m = self.shapes, self.machine
        numbers = {
            "Lanes": s.lanes,
            "LanesHere": self.lanes_here,
            "PeerCtas": self.peer_ctas,
            "Ctas": self.ctas,
            "Warps": m.warps,
            "Layers": s.layers,
            "Hidden": s.hidden,
            "Heads": s.heads,
            "KvHeads": s.kv_heads,
            "HeadDim": s.head_dim,
            "Ff": s.ff,
            "Vocab": s.vocab,
            "HeadType": HEADS[s.head_type],
            "SlotLines": SLOT_LINES,
            "Slots": self.slots,
            "BarrierBytes": self.barrier_bytes,
            "LayerLines": self.layer_lines,
            "HeadLines": self.head_lines,
            "LayerPadding": self.layer_lines - s.layers * sum(self.products[op].lines for op in self.layer_ops),
            "HeadPadding": self.head_lines - self.products["head"].lines,
            "SharedFloats": self.shared_floats,
            "MaxSplits": self.max_splits,
            "SplitKeys": SPLIT_KEYS,
            "MailSlots": self.mail_slots,
            "PassTags": self.pass_tags,
            "History": self.table.history,
            "NumSums": len(self.table.sums),
            "LaneWords": self.lane_words,
        }
        numbers |= self._places(self._boards())[0]
        numbers |= {f"{name}At": place for name, place in self._places(self._shared())[0].items()}
        flags = {
            "LaneNorms": s.lane_norms,
            "LaneFinalNorm": s.lane_final_norm,
            "QkvBias": s.qkv_bias,
            "QkNorm": s.qk_norm,
            "NormOfSum": s.norm_of_sum,
            "AnyMean": any(total.stream_mean for total in self.table.sums),
        }
        lines = [
            "// Made by custom_calls/gpu/layout.py.",
            "#pragma once",
            '#include "numbers.h"',
            "namespace laneformer {",
            "namespace gpu {",
        ]
        lines += [f"constexpr int k{name} = {value};" for name, value in numbers.items()]
        lines += [f"constexpr bool k{name} = {str(bool(value)).lower()};" for name, value in flags.items()]
        dtypes = {"Weights": s.weight_dtype, "Embedding": s.weight_dtype, "Cache": s.cache_dtype}
        lines += [f"constexpr Dtype k{name} = {C_DTYPES[value]};" for name, value in dtypes.items()]
        lines.append(f"constexpr float kNormEps = {_float(s.norm_eps)};")
        lines.append(f"constexpr float kScoreScale = {_float(math.log2(math.e) / math.sqrt(s.head_dim))};")
        for p in self.products.values():
            fields = {
                "AllRows": p.all_rows,
                "Rows": p.rows,
                "Columns": p.columns,
                "Group": p.group,
                "Vectors": p.vectors,
                "Segments": p.segments,
                "Steps": p.steps,
                "Lines": p.lines,
            }
            lines.append(
                f"struct {p.name} {{ static constexpr int {', '.join(f'k{n} = {v}' for n, v in fields.items())}; }};"
            )
        lines += [
            "struct Event { int landing, module; float weight; int parts, num_parts; };",
            "struct Sum { int width, complete_at; bool stream_mean; int parts, num_parts; };",
            "struct Part { int module; float weight; };",
            *self._tables(),
            "}  // namespace gpu",
            "}  // namespace laneformer",
        ]
        return "\n".join(lines) + "\n"

    def _tables(self) -> Iterator[str]:
        parts: list[tuple[int, float]] = []

        def place(pairs) -> tuple[int, int]:
            parts.extend(pairs)
            return len(parts) - len(pairs), len(pairs)

        events, starts = [], [0]
        for at_time in self.table.events:
            for event in at_time:
                first, count = place(event.apart)
                events.append(f"{{{event.payload}, {event.module}, {_float(event.weight)}, {first}, {count}}}")
            starts.append(len(events))
        sums = []
        for total in self.table.sums:
            first, count = place(total.parts)
            sums.append(f"{{{total.width}, {total.complete_at}, {int(total.stream_mean)}, {first}, {count}}}")
        yield f"LF_CONSTANT int kWindows[] = {{{', '.join(map(str, self.windows))}}};"
        yield f"LF_CONSTANT int kEventsAt[] = {{{', '.join(map(str, starts))}}};"
        yield f"LF_CONSTANT Event kEvents[] = {{{', '.join(events) or '{}'}}};"
        yield f"LF_CONSTANT Sum kSums[] = {{{', '.join(sums) or '{}'}}};"
        yield f"LF_CONSTANT Part kParts[] = {{{', '.join(f'{{{m}, {_float(w)}}}' for m, w in parts) or '{}'}}};"


def _float(value: float) -> str:
    return f"{float(np.float32(value)).hex()}f"
