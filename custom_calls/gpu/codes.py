"""Quantized matrices (laneformer/quantized) in the GPU kernel: codes of 8 or 4 bits in the lines of a product's steps,
lines of scales between them, and a factor for each row. custom_calls/gpu/kernel/codes.h reads these lines.

A vector has 8 codes of each thread: half a line with 8 bits, a quarter with 4. If blocks of columns have scales, the
threads of a cluster share a block in each vector, and each thread has the scales of some of a step's vectors. These
scales are in the last words of the step's last line if its codes leave room. Otherwise they are in lines of scales, 16
bytes of each thread; such a line serves several steps and precedes the first of them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls.gpu.formats import AnyWeight, Bf12, in_one_format, joined
from laneformer.custom_calls.library import NativeError
from laneformer.custom_calls.plan import Plan
from laneformer.formats import FORMATS
from laneformer.ops import HeadKind, Product, Value
from laneformer.quantized import Quantized

BITS = {"int8": 8, "e4m3": 8, "int4": 4, "e2m1": 4}
CODES = {"int8": "int8", "fp8": "e4m3", "int4": "int4", "mxfp4": "e2m1", "nvfp4": "e2m1"}
SCALE_BYTES: dict[str | None, int] = {"e8m0": 1, "e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}
OWN_SCALES = {"mxfp4": "e8m0", "nvfp4": "e4m3"}
# Instructions per weight on the usual path of the loops in an H200's kernel, by code and whether there are zero points:
# for vector code, and for tensor cores
INSTRUCTIONS = {("int4", False): (4.7, 1.5), ("int4", True): (5.3, 1.6), ("e2m1", False): (4.9, 2.9)}
LEAST_BLOCK, MOST_BLOCK = 16, 128  # columns that share a scale
HALF_1024 = 0x6400  # bits of 1024 in float16, whose low bits are a zero point beside a scale


@dataclass(frozen=True)
class Codes:
    """A format of quantized weights; the fields are those of its struct in kernel/codes.h."""

    code: str
    """Type of the codes, a key of BITS."""
    scale: str | None = None
    """Dtype of the scales of blocks, a key of SCALE_BYTES; None if only whole rows have scales."""
    block: int = 0
    """Columns of a row that share a scale, a power of two."""
    zeros: bool = False
    """Whether a zero point is in the upper half of each scale's 32 bits."""
    factors: bool = False
    """Whether each row has a float32 that multiplies its sum."""
    selector_bits: int = 4
    """Bits that select a byte in the device's byte permutation, on which the order of E2M1's nibbles depends (Bf12)."""
    by_tensor: bool = False
    """Whether tensor cores multiply it (kernel/tensor.h): codes of 4 bits, groups of four threads."""
    joined: int = 1
    """Tensor cores: number of neighbouring vectors of a thread that share a scale."""
    more: int = 0
    """Lines of scales that are taken beyond those of one step, because more lines may serve more steps per byte."""

    per = 8

    @property
    def struct(self) -> str:
        """Name of the format's struct in the kernel, with its template arguments."""
        flags = f"{str(self.zeros).lower()}, {str(self.factors).lower()}"
        codes = f"Codes<Code::k{self.code.title()}, Scale::k{str(self.scale).title()}, {flags}>"
        return f"ByTensor<{codes}, {self.halves}, {self.joined}, {self.more}>" if self.by_tensor else codes

    @property
    def halves(self) -> int:
        """Number of scales in one vector of a cluster: 2 for tensor cores with blocks of 16 columns, because their
        vectors have 32 columns, otherwise 1.
        """
        return 2 if self.by_tensor and self.scale and self.block == 16 else 1

    def scales(self, vectors: int) -> int:
        """Number of scales in `vectors` vectors of a cluster."""
        return vectors * self.halves // self.joined

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For codes of 4 bits: for each weight of a word, the nibble that contains its low three bits, and the nibble
        that contains its fourth bit.
        """
        own = tuple(range(8))
        if self.by_tensor:
            own = (0, 2, 4, 6, 1, 3, 5, 7) if self.code == "int4" else own
        elif self.code == "e2m1":
            return Bf12.of(self.selector_bits).places
        return own, own

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.code]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, including its zero point."""
        return 4 if self.zeros else SCALE_BYTES[self.scale]

    @property
    def ways(self) -> tuple["Codes", ...]:
        """The ways to multiply this format: with vector code, and on NVIDIA GPUs codes of 4 bits with tensor cores."""
        return (self, replace(self, by_tensor=True)) if self.bits == 4 and self.selector_bits == 4 else (self,)

    @property
    def instructions(self) -> float:
        """Instructions per weight if the format has several ways, otherwise 0."""
        return INSTRUCTIONS[self.code, self.zeros][self.by_tensor] if len(self.ways) > 1 else 0.0

    def lines(self, vectors: int) -> int:
        return -(-vectors * self.bits // 16)

    def units(self, vectors: int) -> int:
        return 0

    def cluster(self, group: int) -> int:
        return min(group, self.block // self.per) if self.scale and not self.by_tensor else group

    def own_scales(self, vectors: int, cluster: int) -> int:
        """Number of scales of a step in each thread."""
        return -(-self.scales(vectors) // cluster)

    def inside(self, vectors: int, cluster: int) -> bool:
        """Whether the scales of a step fit in the lines of its codes."""
        return self.own_scales(vectors, cluster) * self.scale_bytes <= 16 * self.lines(vectors) - self.bits * vectors

    def scale_lines(self, vectors: int, cluster: int) -> tuple[int, int]:
        """Number of lines of scales that are taken together, and number of steps that they serve. vectors: vectors of a
        step.
        """
        own = self.own_scales(vectors, cluster) * self.scale_bytes
        lines = -(-own // 16) + self.more
        return lines, 16 * lines // own

    def lines_beside(self, vectors: int, steps: int, cluster: int) -> int:
        if not self.scale or self.inside(vectors, cluster):
            return 0
        lines, served = self.scale_lines(vectors, cluster)
        return -(-steps // served) * lines

    def pack(self, steps: jax.Array) -> jax.Array:
        """Packs codes, uint8, dealt [..., steps, vectors, threads, 8], into lines, uint32 [..., steps, lines, threads,
        4].
        """
        if self.bits == 8:
            words = joined(steps, 4)
        else:
            words = jnp.zeros((*steps.shape[:-1], 1), jnp.uint32)
            codes = steps.astype(jnp.uint32) ^ (8 if self.by_tensor and self.code == "int4" and not self.zeros else 0)
            for weight, (index, sign) in enumerate(zip(*self.places, strict=True)):
                code = codes[..., weight, None]
                words |= (code & 7) << 4 * index | (code >> 3) << 4 * sign + 3
        per_line = 4 // words.shape[-1]
        short = -words.shape[-3] % per_line
        words = jnp.pad(words, [(0, 0)] * (words.ndim - 3) + [(0, short), (0, 0), (0, 0)])
        words = words.reshape(*words.shape[:-3], -1, per_line, *words.shape[-2:]).swapaxes(-3, -2)
        return words.reshape(*words.shape[:-2], 4)

    def zero_bits(self, zeros: jax.Array | int) -> jax.Array | int:
        """The 16 bits of zero points that are stored beside a scale."""
        return 256 - zeros & 0xFF if self.by_tensor else zeros | HALF_1024

    def with_scales(self, lines: jax.Array, scales: jax.Array, cluster: int) -> jax.Array:
        """Adds scales to the lines of codes that `pack` returned. scales: the bits of the clusters' scales, uint32
        [..., steps, scales of a step, clusters]. Returns all lines, uint32 [..., all lines, threads, 4].
        """
        *lead, steps, count, clusters = scales.shape
        vectors = count * self.joined // self.halves
        own = self.own_scales(vectors, cluster)

        def padded(array: jax.Array, axis: int, width: int) -> jax.Array:
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, width)
            return jnp.pad(array, widths)

        scales = padded(scales, len(lead) + 1, cluster * own - count)
        scales = scales.reshape(*lead, steps, cluster, own, clusters)
        scales = jnp.moveaxis(scales, -1, -3).reshape(*lead, steps, clusters * cluster, own)
        parts = scales[..., None] >> 8 * jnp.arange(self.scale_bytes, dtype=jnp.uint32) & 0xFF
        parts = parts.reshape(*scales.shape[:-1], -1)  # bytes of each step and thread
        if self.inside(vectors, cluster):
            words = joined(padded(parts, parts.ndim - 1, -parts.shape[-1] % 4), 4)
            return lines.at[..., -1, :, 4 - words.shape[-1] :].set(words)
        count, served = self.scale_lines(vectors, cluster)
        last = -steps % served
        parts = padded(parts, len(lead), last)
        parts = parts.reshape(*lead, -1, served, *parts.shape[-2:]).swapaxes(-3, -2)
        parts = parts.reshape(*parts.shape[:-2], -1)
        words = joined(padded(parts, parts.ndim - 1, 16 * count - parts.shape[-1]), 4)
        beside = words.reshape(*words.shape[:-1], count, 4).swapaxes(-3, -2)  # [..., chunks, lines, threads, 4]
        per_step, threads = lines.shape[-3:-1]
        lines = padded(lines, len(lead), last).reshape(*lead, -1, served * per_step, threads, 4)
        found = jnp.concatenate([beside, lines], -3).reshape(*lead, -1, threads, 4)
        return found[..., : steps * per_step + self.lines_beside(vectors, steps, cluster), :, :]


class Header(NamedTuple):
    """The properties of a record, other than its arrays, on which packing depends."""

    kind: str
    group: tuple[int, int]
    columns: int


def arrays_of(record: Quantized[jax.Array], header: Header, format: Codes, granule: int) -> dict[str, jax.Array]:
    """The arrays of a record that are dealt to threads: "codes", uint8 [*lanes, rows, columns]; "scales" if blocks have
    them, the bits for each granule of columns, uint32 [*lanes, rows, granules]; "factors" if rows have them, float32
    [*lanes, rows, 1].
    """
    kind, group, columns = header
    codes = FORMATS[kind].unpack(record.codes, columns, jnp)
    if kind == "int8":
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ 0x80
    elif kind == "fp8":
        codes = jnp.where(codes == 0x80, 0, codes)  # 0x80 is -0, which AMD's E4M3 does not have
    found, of_row = {"codes": codes}, np.arange(codes.shape[-2]) // group[0]
    if format.scale:
        of_granule = np.arange(0, columns, granule) // group[1]

        def each(grid: jax.Array) -> jax.Array:
            return grid[..., of_row, :][..., of_granule]

        bits = _scale_bits(each(record.scales), format.scale)
        if format.zeros:
            zeros = FORMATS[kind].zero if record.zero_points is None else each(record.zero_points).astype(jnp.uint32)
            bits |= format.zero_bits(zeros) << 16
        found["scales"] = bits
    if format.factors:
        if record.global_scale is not None:
            factors = jnp.full((*codes.shape[:-1], 1), jnp.float32(1) / record.global_scale)
        elif format.scale:
            factors = jnp.ones((*codes.shape[:-1], 1), jnp.float32)
        else:
            factors = record.scales.astype(jnp.float32)[..., of_row, :1]
        found["factors"] = factors
    return found


FILLED_SCALE = 2.0**-8  # scale of random codes, for measurements


def random_codes(format: Codes) -> int:
    """A mask for random codes. It excludes NaN and -0 of E4M3."""
    return {"int8": 0xFF, "e4m3": 0x77}.get(format.code, 0x0F)


def equal_scales(format: Codes) -> int:
    """The bits of `FILLED_SCALE` in the format's dtype of scales, with a zero point if the format has zero points."""
    if format.scale == "e8m0":
        return 127 - 8
    dtype = "float8_e4m3fn" if format.scale == "e4m3" else format.scale
    bits = int.from_bytes(np.array(FILLED_SCALE, dtype).tobytes(), "little")
    return bits | int(format.zero_bits(FORMATS["int4"].zero)) << 16 if format.zeros else bits


def _scale_bits(scales: jax.Array, dtype: str) -> jax.Array:
    if scales.dtype == jnp.uint8:
        return scales.astype(jnp.uint32)
    scales = scales.astype(dtype)
    return jax.lax.bitcast_convert_type(scales, f"uint{8 * scales.dtype.itemsize}").astype(jnp.uint32)


@dataclass
class CodesChoice:
    """The formats of a model's quantized matrices."""

    formats: dict[str, Codes] = field(default_factory=dict)
    """Format of each quantized matrix, by path. Neighbouring matrices of one kind in a product share a format."""
    names: dict[str, str] = field(default_factory=dict)
    """Name of each quantized matrix's format for reports, by path."""

    @classmethod
    def of(cls, plan: Plan, weights: Iterable[tuple[str, AnyWeight]]) -> "CodesChoice":
        """The choice for the weights of a model, which are read one by one. Raises NativeError for a weight that the
        kernel cannot hold.
        """
        records = {path: _without_values(weight) for path, weight in weights if isinstance(weight, Quantized)}
        found = cls(names={path: record.name for path, record in records.items()})
        if loose := set(records) - plan.matrices:
            path = min(loose)
            raise NativeError(f"weight {path} is {records[path].name}, but not a matrix of a product: dequantize it")
        kinds = {path: record.kind for path, record in records.items()}
        for op in plan.products:
            parts = in_one_format(op, kinds)
            if len(parts) > 1 and (op.gated or op.writes is Value.OUTPUT):
                raise NativeError(_two_formats(parts, kinds))
            for part in parts:
                paths = [matrix.weight.path for matrix in part.matrices]
                found._hold(paths, records, of_experts=(op.chosen or op.blocks) is not None)
        found._hold([plan.ops.head.weight.path], records, beside=plan.ops.head.kind == HeadKind.LANE)
        return found

    def _hold(self, paths: list[str], records: Mapping[str, Quantized], **options: bool) -> None:
        """Adds the format of matrices of which all or none are quantized; does nothing for none."""
        if paths[0] in records:
            self.formats |= dict.fromkeys(paths, format_of(paths, records, **options))


def _without_values(record: Quantized | Quantized[jax.Array]) -> Quantized:
    """The record with only the shapes and dtypes of its arrays, so that no matrix stays in memory."""
    return record.with_arrays(
        {name: np.broadcast_to(np.zeros((), a.dtype), a.shape) for name, a in record.arrays.items()}
    )


def _two_formats(parts: list[Product], kinds: Mapping[str, str]) -> str:
    """The error message for matrices of one product that need one format but have several."""
    a, b = (
        f"{path} ({kinds.get(path, 'not quantized')})" for path in (part.matrices[0].weight.path for part in parts[:2])
    )
    return (
        f"weights {a} and {b} are in one product, whose matrices must have one format: use backend xla, or add"
        " --weights bfloat16"
    )


def format_of(
    paths: list[str], records: Mapping[str, Quantized], *, beside: bool = False, of_experts: bool = False
) -> Codes:
    """The format of a product's matrices, which are of one kind. Raises NativeError for a format that the kernel does
    not support.

    beside: the columns of all lanes follow each other, as in the lanes' head. of_experts: each expert or block has its
    own matrices; scales of whole rows are then held as scales of blocks.
    """
    parts = [records[path] for path in paths]
    kind, columns = parts[0].kind, parts[0].columns
    dtypes = {part.scales.dtype.name for part in parts}
    scale = OWN_SCALES.get(kind) or (dtypes.pop() if len(dtypes) == 1 else "float32")
    zeros = any(part.zero_points is not None for part in parts)
    crossing = [columns] if beside else []  # a block must be in one lane
    block = math.gcd(MOST_BLOCK, *crossing, *(part.group[1] for part in parts if part.group[1] < columns))
    for path, part in zip(paths, parts, strict=True):
        why = None
        if part.order is not None:
            why = "has reordered columns"
        elif kind == "int8" and zeros:
            why = "has zero points"
        elif zeros and scale == "float32":
            why = "has zero points beside scales of float32"
        elif of_experts and part.global_scale is not None:
            why = "has several matrices and a scale for the whole tensor"
        elif block < LEAST_BLOCK:
            why = f"has groups of {min(part.group[1], columns)} columns"
        if why:
            raise NativeError(
                f"weight {path} ({part.name}) {why}, which the GPU kernel cannot hold: use backend xla, or add"
                " --weights bfloat16"
            )
    whole = not zeros and kind not in OWN_SCALES and all(part.group[1] >= columns for part in parts)
    whole = whole and not beside and not of_experts
    if whole:
        return Codes(CODES[kind], factors=True)
    factors = any(part.global_scale is not None for part in parts)
    return Codes(CODES[kind], scale, block, zeros, factors)
