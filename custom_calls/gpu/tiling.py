"""Tilings: how the products of the GPU kernel are divided among CTAs, warps and threads.

A tiling is a function of a matrix's shape and format, and of the GPU. custom_calls/gpu/layout.py chooses the tilings of
a model, and custom_calls/gpu/packing.py packs weights according to them.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import Bf12, Plain

MAX_VECTORS = 4  # vectors of a segment in a thread's registers
MAX_TENSOR_VECTORS = 12  # the same for tensor cores, where they are bytes
MAX_TENSOR_HELD = 24  # scales in a thread's registers at the same time, for tensor cores
MOST_MORE = 2  # lines of scales beyond those that a step needs, for tensor cores
# Instructions that a warp of an H200 may issue while it reads a line: 128 multiprocessors with 4 schedulers each at
# 1.98 GHz, and 4.3 TB/s, both assumed
ISSUE_SLOTS = 121
MAX_TOGETHER = 4  # rows of a thread in registers at the same time


@dataclass(frozen=True)
class Machine:
    """The properties of a GPU on which the layout depends."""

    warp_size: int
    """Threads of a warp."""
    ctas: int
    """CTAs to use, at most one on each multiprocessor so that all are resident together."""
    warps: int
    """Warps of a CTA."""
    shared_bytes: int
    """Largest shared memory of a CTA, in bytes."""
    bulk_copies: bool
    """Whether the weights stream through a ring in shared memory."""
    multiprocessors: int = 132
    """Multiprocessors of the device, on each of which one CTA is resident."""

    @property
    def selector_bits(self) -> int:
        """Bits that select a byte in the GPU's byte permutation: 4 on NVIDIA GPUs, 8 on AMD GPUs."""
        return 4 if self.warp_size == 32 else 8


H200 = Machine(warp_size=32, ctas=128, warps=8, shared_bytes=232_448, bulk_copies=True)
MI300X = Machine(warp_size=64, ctas=256, warps=8, shared_bytes=65_536, bulk_copies=False, multiprocessors=304)


@dataclass(frozen=True)
class Pieces:
    """How the matrices of chosen experts are divided; see custom_calls/gpu/kernel/ops/experts.h. The rows of a matrix
    are cut into one part for each CTA of its tiling. If products are summed, its columns are cut instead, into one part
    for each warp. The parts of the used experts are dealt in order to all CTAs (warps) of the machine. In memory, the
    parts of all experts are dealt in the same way.
    """

    experts: int
    """Number of experts."""
    used: int
    """Experts that a token uses."""
    summed: bool
    """Whether the products of the experts are summed; their matrices are then cut by columns."""
    each: int
    """Most parts that a CTA (warp) reads for a token."""
    ctas: int
    """CTAs of a lane."""
    warps: int
    """Warps of a CTA of the machine."""

    @property
    def rows(self) -> int:
        """Number of CTAs (warps) to which parts are dealt."""
        return self.warps if self.summed else self.ctas


@dataclass(frozen=True)
class Tiling:
    """How a matrix of one lane is divided among CTAs, warps and threads. Fields without a docstring are described in
    custom_calls/gpu/kernel/product.h, where they have the same names.
    """

    all_rows: int
    columns: int
    ctas: int
    rows: int
    group: int
    vectors: int
    segments: int
    steps: int
    together: int
    warps: int
    warp_size: int
    format: Plain | Bf12 | Codes
    pieces: Pieces | None = None
    """How the matrices of experts are divided; None for a matrix without experts."""
    turns: int = 1
    """Products of `rows` rows each that a CTA computes one after the other."""
    blocks: int = 0
    """Number of blocks of a block-diagonal matrix, otherwise 0. `all_rows` then counts the rows of one block, and each
    product's rows are in one block.
    """

    @property
    def floats(self) -> Plain | Bf12:
        """The format of a matrix that is not quantized. Raises TypeError for a quantized one."""
        if isinstance(self.format, Codes):
            raise TypeError(f"{self.format} is a format of quantized weights")
        return self.format

    @property
    def codes(self) -> Codes:
        """The format of a quantized matrix. Raises TypeError for another one."""
        if not isinstance(self.format, Codes):
            raise TypeError(f"{self.format} is not a format of quantized weights")
        return self.format

    @property
    def expert_pieces(self) -> Pieces:
        """How the matrices of experts are divided. Raises TypeError for a matrix without experts."""
        if self.pieces is None:
            raise TypeError("a matrix without experts has no pieces")
        return self.pieces

    @property
    def block_parts(self) -> int:
        """Number of products that compute one block."""
        return -(-self.all_rows // self.rows)

    @property
    def all_lines(self) -> int:
        """Lines that a warp reads for all products of a CTA."""
        return self.lines * self.turns

    @property
    def lines(self) -> int:
        """Lines that a warp reads for one product, scales included."""
        vectors = self.together * self.vectors
        return self._takes * self.format.lines(vectors) + self.format.lines_beside(vectors, self._takes, self.cluster)

    @property
    def cluster(self) -> int:
        """Number of neighbouring threads whose columns of a vector are next to each other."""
        return self.format.cluster(self.group)

    @property
    def units(self) -> int:
        """Units of a warp that are coded in 12 bits; see gpu/formats.py."""
        return self._takes * self.format.units(self.together * self.vectors)

    @property
    def coded(self) -> float:
        """Share of the weights that is in coded units."""
        return self.units * Bf12.vectors / (self.segments * self.steps * self.vectors)

    @property
    def _takes(self) -> int:
        """Number of times that a warp takes lines from its stream."""
        return self.segments * self.steps // self.together

    @property
    def padded_rows(self) -> int:
        """Rows of a CTA with those that pad the last step."""
        return self.steps * (self.warp_size // self.group)

    @property
    def fields(self) -> dict[str, int]:
        """The constants of the product's struct in the kernel, by name."""
        found = {
            "kAllRows": self.all_rows,
            "kRows": self.rows,
            "kColumns": self.columns,
            "kGroup": self.group,
            "kCluster": self.cluster,
            "kVectors": self.vectors,
            "kSegments": self.segments,
            "kSteps": self.steps,
            "kTogether": self.together,
            "kLines": self.lines,
            "kColumnParts": self.warps,
        }
        if self.pieces:
            found |= {"kUsed": self.pieces.used, "kParts": self.parts, "kPieces": self.pieces.each}
        if self.blocks:
            found |= {"kLines": self.all_lines, "kTurns": self.turns, "kBlockParts": self.block_parts}
        return found

    @property
    def segment_columns(self) -> int:
        """Columns of a warp in a segment."""
        return self.vectors * self.group * self.format.per

    @property
    def taken(self) -> int:
        """Most lines that a warp takes from its stream at once."""
        vectors = self.together * self.vectors
        beside = self.format.lines_beside(vectors, 1, self.cluster)
        return max(self.format.lines(vectors), beside)

    @property
    def parts(self) -> int:
        """Parts of each expert's matrix."""
        return self.warps if self.expert_pieces.summed else self.ctas

    @property
    def stored_lines(self) -> int:
        """Lines in the memory of a warp for all experts."""
        return -(-self.expert_pieces.experts * self.parts // self.expert_pieces.rows) * self.lines

    @property
    def read_lines(self) -> int:
        """Lines that all warps of a lane read for a token."""
        return self.lines * self.ctas * self.warps * (self.pieces.used if self.pieces else 1)  # turns are CTAs

    @property
    def chunk(self) -> int:
        """The smallest number of experts whose parts are dealt evenly to all CTAs (warps)."""
        return self.expert_pieces.rows // math.gcd(self.expert_pieces.rows, self.parts)

    @property
    def chunk_lines(self) -> int:
        """Lines in the memory of a warp for a chunk of experts."""
        return self.chunk * self.parts // self.expert_pieces.rows * self.lines

    def deal(self, matrix: jax.Array) -> jax.Array:
        """Deals a matrix to threads: [..., all rows, columns] -> [..., CTAs, warps, *dealt]. Each thread gets its part
        of the vectors of each step, segment by segment.
        """
        matrix = self._with_blocks(matrix)
        *lead, rows, columns = matrix.shape
        per = self.format.per
        wide = self.warps * self.segments * self.vectors * self.group * per
        matrix = jnp.pad(matrix, [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows), (0, wide - columns)])
        matrix = matrix.reshape(*lead, self.ctas, self.rows, wide)
        matrix = jnp.pad(matrix, [(0, 0)] * (len(lead) + 1) + [(0, self.padded_rows - self.rows), (0, 0)])
        of_rows = (self.ctas, self.steps, self.warp_size // self.group)
        of_columns = (self.vectors, self.group // self.cluster, per // 2, self.cluster, 2)
        parts = matrix.reshape(*lead, *of_rows, self.warps, self.segments, *of_columns)
        n = len(lead)
        cta, step, row, warp, segment, vector, cluster, pair, member, element = range(n, n + 10)
        order = (*range(n), cta, warp, segment, step, vector, row, cluster, member, pair, element)
        return parts.transpose(order).reshape(*lead, self.ctas, self.warps, *self.dealt)

    def _with_blocks(self, array: jax.Array) -> jax.Array:
        """Reshapes [..., blocks, rows, columns] to [..., all rows, columns], with each block's rows padded to whole
        products. Without blocks, returns the array unchanged.
        """
        if not self.blocks:
            return array
        *lead, blocks, rows, columns = array.shape
        array = jnp.pad(array, [(0, 0)] * (len(lead) + 1) + [(0, self.block_parts * self.rows - rows), (0, 0)])
        return array.reshape(*lead, blocks * self.block_parts * self.rows, columns)

    @property
    def granule(self) -> int:
        """Columns of a vector in one cluster that share a scale."""
        return self.cluster * self.codes.per * self.codes.joined // self.codes.halves

    def deal_granules(self, grid: jax.Array) -> jax.Array:
        """Deals values that the columns of a granule share, as `deal` does with weights: [..., all rows, granules] ->
        [..., CTAs, warps, takes, scales of a take, clusters of a warp].
        """
        grid = self._with_blocks(grid)
        *lead, rows, columns = grid.shape
        halves, clusters = self.codes.halves, self.group // self.cluster
        vectors = self.vectors // self.codes.joined
        granules = self.warps * self.segments * vectors * clusters * halves
        grid = jnp.pad(grid, [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows), (0, granules - columns)])
        grid = grid.reshape(*lead, self.ctas, self.rows, granules)
        grid = jnp.pad(grid, [(0, 0)] * (len(lead) + 1) + [(0, self.padded_rows - self.rows), (0, 0)])
        of_rows = (self.ctas, self.steps, self.warp_size // self.group)
        parts = grid.reshape(*lead, *of_rows, self.warps, self.segments, vectors, clusters, halves)
        n = len(lead)
        cta, step, row, warp, segment, vector, cluster, half = range(n, n + 8)
        parts = parts.transpose(*range(n), cta, warp, segment, step, vector, half, row, cluster)
        each = self.codes.scales(self.together * self.vectors)
        return parts.reshape(*lead, self.ctas, self.warps, self.dealt[0], each, self.warp_size // self.cluster)

    def deal_rows(self, values: jax.Array) -> jax.Array:
        """Deals one value of each row: [..., all rows, 1] -> [..., CTAs, warps, n], with a CTA's rows in order over its
        warps.
        """
        *lead, rows, _ = values.shape
        each = -(-self.rows // self.warps)
        values = jnp.pad(values[..., 0], [(0, 0)] * len(lead) + [(0, self.ctas * self.rows - rows)])
        values = values.reshape(*lead, self.ctas, self.rows)
        values = jnp.pad(values, [(0, 0)] * (len(lead) + 1) + [(0, each * self.warps - self.rows)])
        return values.reshape(*lead, self.ctas, self.warps, each)

    def partial_floats(self, vectors: int = 1, parts: int = 1) -> int:
        """Floats in shared memory for the warps' sums and the factors of the rows. vectors: rows of a pass, each of
        which has sums. parts: parts into which the steps are divided; only the sums of one part are stored at a time.
        """
        factors = isinstance(self.format, Codes) and self.format.factors
        return (vectors * self._cta_warps * self.padded_rows // parts + factors * self.rows) * self.sum_sets

    @property
    def sum_sets(self) -> int:
        """Number of sets of sums that a CTA stores at the same time."""
        return self.pieces.each if self.pieces and not self.pieces.summed else 1

    @property
    def _cta_warps(self) -> int:
        return self.pieces.warps if self.pieces else self.warps

    @property
    def cost(self) -> float:
        """A measure of the time with quantized weights, to compare tilings: the longer of the times to read the lines
        and to issue the instructions for their codes. Each additional segment adds a sixteenth, because all sums are
        added once more.
        """
        codes = math.prod(self.dealt[:2]) * self.codes.per
        return max(self.lines, codes * self.codes.instructions / ISSUE_SLOTS) * (15 + self.segments)

    @property
    def brought_floats(self) -> int:
        """Floats in shared memory through which warps convert the vector for tensor cores: bytes, and a power of two
        for each 32 columns.
        """
        by_tensor = isinstance(self.format, Codes) and self.format.by_tensor
        return by_tensor * self._cta_warps * self.vectors * 25

    @property
    def dealt(self) -> tuple[int, ...]:
        """Shape of what `deal` gives to a warp: takes, vectors of a take, threads, weights of a vector."""
        return self._takes, self.together * self.vectors, self.warp_size, self.format.per


def tile(
    all_rows: int, columns: int, ctas: int, machine: Machine, format: Plain | Bf12 | Codes, unit: int = 1
) -> Tiling:
    """The tiling that reads the fewest bytes, padding included, or for quantized weights the one with the lowest cost.
    The columns are divided in the same way for bfloat16 and Bf12, so the order of sums is the same. unit: number of
    rows that must stay in one CTA.
    """
    rows = -(-all_rows // unit // ctas) * unit
    vectors_per_warp = math.ceil(columns / (format.per * machine.warps))
    tensor = format if isinstance(format, Codes) and format.by_tensor else None

    def with_group(group: int) -> Tiling:
        vectors = -(-vectors_per_warp // group)
        segments = -(-vectors // (MAX_TENSOR_VECTORS if tensor else MAX_VECTORS))
        vectors = -(-vectors // segments)
        vectors += vectors % 2 if tensor else 0  # a tile of the tensor cores has two vectors
        steps = -(-rows // (machine.warp_size // group))
        return Tiling(
            *(all_rows, columns, ctas, rows, group, vectors, segments, steps, 1, machine.warps, machine.warp_size),
            replace(tensor, joined=math.gcd(max(1, tensor.block // 32), vectors)) if tensor else format,
        )

    def taking(tiling: Tiling) -> list[Tiling]:
        return [
            replace(tiling, steps=-(-tiling.steps // together) * together, together=together)
            for together in range(1, MAX_TOGETHER + 1)
            if together == 1 or not tensor or together * tiling.vectors * tensor.halves <= MAX_TENSOR_HELD
        ]

    groups = [with_group(4)] if tensor else [with_group(1 << log) for log in range(machine.warp_size.bit_length())]
    if isinstance(format, Codes):
        options = (
            replace(one, format=replace(one.codes, more=more))
            for group in groups
            for one in taking(group)
            for more in range(MOST_MORE + 1 if tensor else 1)
        )
        return min(options, key=lambda one: (one.cost, -one.together, one.codes.more))
    tiling = min(groups, key=lambda one: (one.segments * one.steps * one.vectors, one.segments, one.group))
    return min(taking(tiling), key=lambda one: (one.lines, -one.together))
