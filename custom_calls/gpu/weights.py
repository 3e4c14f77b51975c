"""The weights of a GPU session: packs them into the stream that each warp reads, and into the arrays beside it."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.custom_calls.gpu.codes import CodesChoice, Header
from laneformer.custom_calls.gpu.formats import AnyWeight, Bf12Choice
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.ops.kernel import OpKernel
from laneformer.custom_calls.gpu.ops.streams import GatherStreamsKernel
from laneformer.custom_calls.gpu.packing import (
    Exceptions,
    Placement,
    chunks,
    filled,
    filled_codes,
    gathered,
    normal,
    placed,
    placed_codes,
)
from laneformer.custom_calls.gpu.tiling import Tiling
from laneformer.custom_calls.session import Bf12Weights
from laneformer.formats import BF12_TABLE
from laneformer.ops import HeadKind, Product, Rotary, Weight
from laneformer.quantized import Quantized


class GpuWeights:
    """The packed weights of a model on the devices of a mesh. `pack` every weight, or `fill` all of them with random
    numbers; `operands` are then those of the custom call.
    """

    of_lanes = (True, True, False, False, False, False)
    """Whether the first axis of each operand is the lanes."""

    def __init__(self, layout: Layout, bf12: Bf12Choice, codes: CodesChoice, mesh: Mesh | None, several: bool):
        """bf12, codes: how the weights that will be packed are coded. mesh: axes (data, lane); None for one device.
        several: the devices of the mesh belong to several processes.
        """
        self.layout, self.plan = layout, layout.plan
        self._bf12, self._codes, self._mesh, self._several = bf12, codes, mesh, several
        self._waiting: dict[tuple[int, int], dict] = {}  # matrices of products of which some are missing
        self._small = np.zeros(self.plan.small_size, np.float32)
        self._packed = jnp.zeros(self.layout.packed_shape, jnp.uint32, device=self._sharding(True))
        self._lists: dict[int, jax.Array] = {}  # exceptions of each warp, by product
        self._exceptions: dict[int, int] = {}  # number of exceptions, by product
        self._factors: dict[int, jax.Array] = {}  # factors of a quantized product's rows for each warp, by product
        self._embedding: jax.Array | None = None
        self._ready: tuple | None = None
        self._multiplied = {
            matrix.weight.path: (layer, number)
            for layer, stages in enumerate(self.layout.stages)
            for number, stage in enumerate(stages)
            for matrix in stage.matrices
        }

    def pack(self, path: str, weight: AnyWeight) -> None:
        """Packs a weight, or keeps it until all matrices of its product are known. Raises CheckpointError for a table
        with an expert that the model does not have.
        """
        plan = self.plan
        self._ready = None
        if path in plan.places:
            plan.place(self._small, path, plan.checked_table(path, _whole(weight)))
        elif path in self._multiplied:
            self._pack_rows(path, _kept(weight))
        if path == plan.ops.embedding.path:
            self._embedding = self._put(_kept(weight).astype(plan.weight_dtype.name), False)
        gather, tiling = plan.ops.head.gather, self.layout.head_mixture
        if gather and tiling and path == gather.mix.weight.path:
            line = self.layout.layer_lines
            self._place_float32(GatherStreamsKernel(gather), [gather.mix.weight], {path: weight}, tiling, line)
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
        if stage.kernel.in_float32:
            return self._place_float32(stage.kernel, weights, parts, *self._tiled(layer, number))
        matrices = [self._put_matrix(parts[weight.path], weight.lane_sharded) for weight in weights]
        self._place(matrices, self.layout.numbers[layer, number])

    def _tiled(self, layer: int, number: int) -> tuple[Tiling, int]:
        """The tiling of a stage, and its first line in the memory of each warp."""
        layout = self.layout
        return layout.tiling(layer, number), layout.line(layer, number)

    def _place_float32(
        self, kernel: OpKernel, weights: list[Weight], arrays: Mapping[str, Any], tiling: Tiling, line: int
    ) -> None:
        """Packs the matrices of an op in float32. arrays: of `weights`, by path."""
        arranged = [kernel.arranged(_gathered(arrays[weight.path]), self.layout.lane) for weight in weights]
        matrices = [self._put(own, weight.lane_sharded) for own, weight in zip(arranged, weights, strict=True)]
        offset, table = np.int32(line * self.layout.line_words), np.zeros(BF12_TABLE, np.uint8)
        self._packed, _ = placed(self._packed, matrices, offset, table, tiling, "rows", self._sharding(True))

    def _pack_head(self, weight: np.ndarray | jax.Array) -> None:
        # Each lane packs some rows of the vocabulary. A head other than vocab_parallel has no lane axis or is split by
        # columns, so every device needs the whole matrix.
        matrix = self._put_matrix(weight, self.plan.ops.head.kind == HeadKind.VOCAB_PARALLEL)
        self._place([matrix], len(self.layout.numbers))

    def _put_matrix(self, weight: AnyWeight, of_lanes: bool) -> jax.Array | Quantized[jax.Array]:
        if isinstance(weight, Quantized):
            return weight.with_arrays(
                {name: self._put(array, of_lanes and array.ndim > 0) for name, array in weight.arrays.items()}
            )
        return self._put(weight.astype(self.plan.weight_dtype.name), of_lanes)

    def _place(self, matrices: list[jax.Array | Quantized[jax.Array]], product: int) -> None:
        """Packs the matrices of the product with number `product`."""
        place = self._placements[product]
        if not place.tiling.pieces:
            return self._place_at(place.offset, matrices, product)
        for lines, some in chunks(matrices, place.tiling):
            self._place_at(place.offset + lines * self.layout.line_words, some, product)

    def _place_at(self, offset: int, matrices: list[jax.Array | Quantized[jax.Array]], product: int) -> None:
        place = self._placements[product]
        kept = place.tiling, place.arrangement, self._sharding(True)
        parts = [part for part in matrices if isinstance(part, Quantized)]  # all or none
        if not parts:
            self._keep(product, placed(self._packed, matrices, np.int32(offset), self._table(product), *kept))
            return
        headers = tuple(Header(part.kind, part.group, part.columns) for part in parts)
        arrays = [part.arrays for part in parts]
        self._packed, factors = placed_codes(self._packed, arrays, np.int32(offset), headers, *kept)
        if factors is not None:
            self._factors[product] = factors

    def _table(self, product: int) -> np.ndarray:
        return self._bf12.tables.get(self._placements[product].paths[0], np.zeros(BF12_TABLE, np.uint8))

    def _keep(self, product: int, placed: tuple[jax.Array, Exceptions | None]) -> None:
        self._packed, listed = placed
        if listed is not None:  # sizes are powers of two, so that few programs are compiled
            self._lists[product] = gathered(listed.words, 1 << int(listed.most).bit_length())
            self._exceptions[product] = int(listed.total)

    @cached_property
    def _placements(self) -> list[Placement]:
        """Where and how each product is packed, by its number."""
        layout, head = self.layout, self.plan.ops.head
        found = [
            Placement(
                tuple(matrix.weight.path for matrix in layout.stages[layer][number].matrices),
                layout.offset(layer, number),
                layout.tiling(layer, number),
                "pairs" if isinstance(op := layout.stages[layer][number].op, Product) and op.gated else "rows",
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
                if stage.kernel.in_float32:
                    weights = [matrix.weight for matrix in stage.matrices]
                    self._fill_float32(keys[1], stage.kernel, weights, *self._tiled(layer, number))
        gather, tiling = self.plan.ops.head.gather, layout.head_mixture
        if gather and tiling:
            line = layout.layer_lines
            self._fill_float32(keys[1], GatherStreamsKernel(gather), [gather.mix.weight], tiling, line)
        embedding = jnp.zeros(self.plan.ops.embedding.shape, self.plan.weight_dtype.name, device=self._sharding(False))
        self._embedding = normal(keys[1], embedding)
        self._ready = None

    def _fill_float32(self, key: jax.Array, kernel: OpKernel, weights: list[Weight], tiling: Tiling, line: int) -> None:
        arrays = {weight.path: np.asarray(normal(key, jnp.zeros(weight.shape))) for weight in weights}
        self._place_float32(kernel, weights, arrays, tiling, line)

    @property
    def operands(self) -> tuple:
        """The operands of the custom call on the devices: packed weights, factors and exceptions (`_listed`),
        embedding, index of factors and exceptions (`_coding`), small weights, rotations.
        """
        if self._ready is None:
            tables = [_rotations(rotary, head_dim, self.plan.ops.context) for rotary, head_dim in self.layout.rotations]
            rotations = np.concatenate(tables or [np.zeros(1, np.float32)])
            rest = (self._put(array, False) for array in (self._coding, self._small, rotations))
            self._ready = (self._packed, self._listed(), self._embedding, *rest)
        return self._ready

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
    def bf12(self) -> Bf12Weights:
        """Counts of the weights that are packed in 12 bits."""
        held = matrices = 0
        for place in self._placements:
            size = sum(math.prod(self.plan.shape_of(path)) for path in place.paths)
            held += round(size * place.tiling.coded)
            matrices += len(place.paths) * (place.tiling.units > 0)
        return Bf12Weights(held, sum(self._exceptions.values()), matrices, self._bf12.left)

    @property
    def quantized(self) -> dict[str, Any]:
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

    def _sharding(self, of_lanes: bool):
        if self._mesh is None:
            return None
        return NamedSharding(self._mesh, P("lane") if of_lanes else P())

    def _put(self, array: np.ndarray | jax.Array, of_lanes: bool) -> jax.Array:
        """Puts an array, which must be equal in all processes, on the devices. of_lanes: whether its first axis is the
        lanes.
        """
        if self._several and isinstance(array, np.ndarray):  # device_put would compare the processes' arrays
            return jax.make_array_from_callback(array.shape, self._sharding(of_lanes), lambda index: array[index])
        return jax.device_put(array, self._sharding(of_lanes))


def _whole(weight) -> np.ndarray:
    """A weight on the host in float32, gathered if its lanes belong to several processes."""
    return np.asarray(_gathered(weight), np.float32)


def _gathered(weight):
    """A weight, gathered on the host if its lanes belong to several processes."""
    if isinstance(weight, jax.Array) and not (weight.is_fully_addressable or weight.is_fully_replicated):
        weight = multihost_utils.process_allgather(weight, tiled=True)
    return weight


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
